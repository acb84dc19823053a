//! A buffer: a run of an arena's frames, owned.

use crate::arena::{Arena, Run, Shared};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::fmt;

/// Memory of an [`Arena`], owned by the value and freed when it is dropped.
///
/// It moves into a mapping ([`pinfold_core::domain::Domain::map`]) and out of it again, so that the program has no
/// way to it while a device does.
pub struct Buffer {
    arena: Arena,
    run: Run,
    /// All of the run. Lent out for borrows of the value only.
    memory: DmaMemory<'static>,
}

impl Buffer {
    /// The buffer that owns `run`, which was just taken from `arena`.
    pub(crate) fn new(arena: Arena, run: Run) -> Self {
        // SAFETY: the arena, which the value holds, keeps the run mapped and gives it to nobody else until the value's
        // drop. It is lent out by shared borrows of the value, references by exclusive ones.
        let memory = unsafe { arena.inner().memory_of(run).extend() };
        Self { arena, run, memory }
    }

    /// How many bytes may be used: what was asked for, rounded up to whole frames of 4096.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Never: a buffer has at least one frame.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// The bytes, to be read and written beside a device: by copies, which always work.
    ///
    ///
    /// What is lent does not outlive the buffer, nor is it there beside a slice:
    ///
    /// ```compile_fail,E0502
    /// # fn example(mut buffer: pinfold::Buffer) -> Result<(), Box<dyn std::error::Error>> {
    /// let memory = buffer.memory();
    /// let slice = buffer.as_slice()?;
    /// memory.write_u8(0, 1)?;
    /// assert_eq!(slice[0], 0);
    /// # Ok(()) }
    /// ```
    pub fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }

    /// The arena that it is a part of.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// What the device calls its first byte, where its arena is exposed whole; else it has a name only while mapped.
    pub fn fixed_iova(&self) -> Option<Iova> {
        self.arena.inner().fixed_iova_of(self.run)
    }

    /// The bytes. Takes the buffer for itself, because others may write through [`memory`](Self::memory).
    ///
    /// # Errors
    /// [`Shared`] where the arena is exposed whole, or has a memfd: others could write them meanwhile.
    pub fn as_slice(&mut self) -> Result<&[u8], Shared> {
        self.private()?;
        // SAFETY: the run is mapped, initialized (the kernel zeroes fresh pages) and this value's alone until it is
        // dropped. The arena is exposed per use, so a device reaches it only while it is mapped, and then the mapping
        // owns the buffer and nobody can borrow it; `&mut self` keeps out who would write through `memory`.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.as_ptr().as_ptr(), self.memory.len()) })
    }

    /// The bytes, to be written.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice(&mut self) -> Result<&mut [u8], Shared> {
        self.private()?;
        // SAFETY: as in `as_slice`; `&mut self` keeps every other borrow of the buffer out.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().as_ptr(), self.memory.len()) })
    }

    /// Sets all bytes to 0. O(bytes).
    pub fn zero(&mut self) {
        match self.as_mut_slice() {
            Ok(bytes) => bytes.fill(0),
            // All of the memory is inside itself, so this does not fail.
            Err(Shared) => drop(self.memory.fill(0, self.memory.len(), 0)),
        }
    }

    fn private(&self) -> Result<(), Shared> {
        if self.arena.is_private() { Ok(()) } else { Err(Shared) }
    }
}

// SAFETY: the run was taken from the arena's zone for this value alone and goes back only in its drop; it lies in a
// region that the arena, which the value holds, keeps mapped, and does not move. `fixed_iova` is the run's place in a
// range that stays mapped while the arena lives. References into it are lent only by borrows of the value.
unsafe impl Pinned for Buffer {
    fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }
    fn fixed_iova(&self) -> Option<(DomainId, Iova)> {
        let at = Self::fixed_iova(self)?;
        Some((ChunkSource::domain(&self.arena)?, at))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.inner().give_back(self.run);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len())
            .field("first", &self.run.first)
            .field("mapping_policy", &self.arena.mapping_policy())
            .finish()
    }
}
