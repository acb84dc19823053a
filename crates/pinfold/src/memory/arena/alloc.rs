//! Buffers from an arena.

use super::error::AllocError;
use super::handle::{Arena, ArenaMemory};
use crate::memory::buffer::Buffer;
use crate::memory::policy::MappingPolicy;
use pinfold_core::addr::Iova;

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
