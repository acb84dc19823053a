//! A buffer of an arena, and its allocation.

use super::arena::{AllocError, Arena, ArenaMemory, NotExclusive, Run};
use crate::memory::attachment::MappingPolicy;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// Memory of an arena, owned by the value and freed when it is dropped.
///
/// It moves into a mapping ([`Domain::map`](pinfold_core::domain::Domain::map)) and out of it
/// again, so that the program cannot access it while a device can.
pub struct Buffer {
    arena: ArenaMemory,
    run: Run,
    /// All of the run. Lent out for borrows of the value only.
    memory: DmaMemory<'static>,
}

impl Buffer {
    /// Returns the buffer that owns `run`, which was just allocated from `arena`.
    pub(crate) fn new(arena: ArenaMemory, run: Run) -> Self {
        // SAFETY: the arena, which the value holds, keeps the run mapped and allocates it to no
        // other owner until the value's drop. It is lent out by shared borrows of the value,
        // references by exclusive ones.
        let memory = unsafe { arena.state().memory_of(run).extend() };
        Self { arena, run, memory }
    }

    /// Splits the buffer into its parts without freeing the run.
    pub(crate) fn into_parts(self) -> (ArenaMemory, Run) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used afterwards nor dropped, so the handle is moved out of it
        // once.
        (unsafe { std::ptr::read(&this.arena) }, this.run)
    }

    /// Consumes the value and returns its memory, which stays allocated until
    /// [`from_raw`](Self::from_raw): for a caller that keeps only addresses, as a C interface does.
    pub fn into_raw(self) -> NonNull<[u8]> {
        let this = ManuallyDrop::new(self);
        NonNull::slice_from_raw_parts(this.memory.as_ptr(), this.memory.len())
    }

    /// Returns the buffer of [`into_raw`](Self::into_raw); `None` if the memory is not whole frames
    /// of the arena.
    ///
    /// # Safety
    /// `into_raw` of a buffer of this arena returned `memory`, which has not become a buffer again
    /// since, and no device reaches it except through mappings that last as long as the arena.
    pub unsafe fn from_raw(arena: &ArenaMemory, memory: NonNull<[u8]>) -> Option<Self> {
        let run = arena.state().run_at(memory)?;
        // SAFETY: a copy of a handle, whose share `into_raw` left counted for this buffer; so it
        // is moved here, and `arena` keeps its own.
        let arena = unsafe { std::ptr::read(arena) };
        Some(Self::new(arena, run))
    }

    /// Returns the usable length in bytes: the requested one, rounded up to whole frames of 4096.
    #[expect(clippy::len_without_is_empty, reason = "it has at least one frame")]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Returns the bytes for access by copies, which is always possible.
    ///
    /// It does not outlive the buffer, and does not coexist with a slice:
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

    /// Returns the arena that it belongs to.
    pub fn arena(&self) -> &ArenaMemory {
        &self.arena
    }

    /// Returns the bytes. Borrows the buffer exclusively, because [`memory`](Self::memory) allows
    /// writes.
    ///
    /// # Errors
    /// [`NotExclusive`] if the arena is mapped whole, or has a memfd: the bytes could change
    /// meanwhile.
    pub fn as_slice(&mut self) -> Result<&[u8], NotExclusive> {
        self.check_private()?;
        // SAFETY: the run is mapped, initialized (the kernel zeroes fresh pages) and owned by this
        // value until it is dropped. The arena is mapped per use, so a device reaches it only while
        // it is mapped, and then the mapping owns the buffer and it cannot be borrowed; `&mut self`
        // excludes writes through `memory`.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.as_ptr().as_ptr(), self.memory.len()) })
    }

    /// Returns the bytes for writing.
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice(&mut self) -> Result<&mut [u8], NotExclusive> {
        self.check_private()?;
        // SAFETY: as in `as_slice`; `&mut self` excludes every other borrow of the buffer.
        Ok(unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_ptr().as_ptr(), self.memory.len())
        })
    }

    /// Sets all bytes to 0. O(bytes).
    pub fn zero(&mut self) {
        match self.as_mut_slice() {
            Ok(bytes) => bytes.fill(0),
            // The range is inside the memory, so this does not fail.
            Err(NotExclusive) => drop(self.memory.fill(0, self.memory.len(), 0)),
        }
    }

    fn check_private(&self) -> Result<(), NotExclusive> {
        if self.arena.state().is_private() { Ok(()) } else { Err(NotExclusive) }
    }
}

// SAFETY: the run was allocated from the arena's zone for this value alone and is freed only in its
// drop; it lies in a region that the arena, which the value holds, keeps mapped, and does not move.
// `fixed_iova` is the run's place in a range that stays mapped while the arena lives. References
// into it are lent only by borrows of the value.
unsafe impl Pinned for Buffer {
    fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        self.arena.state().fixed_iova_of(self.run, domain)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.arena.state().free(self.run);
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

// Buffers from an arena.

impl ArenaMemory {
    /// Allocates a buffer of at least `bytes` bytes: whole frames of 4096 bytes, all of which may
    /// be used, contiguous for the processor and the device. A buffer of 2 MiB or more is aligned
    /// to 2 MiB if such a run is free, so that it maps by large leaves.
    ///
    /// Fresh memory is zero; recycled memory holds what its last user left.
    ///
    /// # Errors
    /// [`AllocError`].
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, AllocError> {
        let requested = u64::try_from(bytes).unwrap_or(u64::MAX);
        let frames = self.state().frames_for(requested)?;
        let run = self
            .state()
            .alloc(frames)
            .map_err(|error| self.state().alloc_error(requested, error))?;
        Ok(Buffer::new(self.clone(), run))
    }

    /// Allocates a buffer as [`alloc`](Self::alloc) does, with all bytes 0. O(bytes), and touches
    /// every page.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self, bytes: usize) -> Result<Buffer, AllocError> {
        let mut buffer = self.alloc(bytes)?;
        buffer.zero();
        Ok(buffer)
    }
}

impl Arena {
    /// Returns the I/O virtual address at which `buffer` is mapped in this domain for the lifetime
    /// of the arena; `None` if the arena is mapped per use, or the buffer belongs to another arena.
    pub fn iova_of(&self, buffer: &Buffer) -> Option<Iova> {
        let offset = buffer
            .memory()
            .addr()
            .checked_sub(self.addr())
            .filter(|_| buffer.arena().is_same(self))?;
        let whole = self.mapping_policy() == MappingPolicy::Whole;
        whole
            .then(|| self.attachment().iova_of(offset as u64, buffer.len() as u64))?
            .map(|iova| iova.start())
    }
}
