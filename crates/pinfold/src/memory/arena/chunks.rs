//! An arena as the source of a pool's chunks.

use super::handle::Arena;
use super::state::Run;
use crate::memory::attachment::READ_WRITE;
use crate::memory::policy::MappingPolicy;
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::{BackendError, DomainId};
use pinfold_core::frame::{Frame, Order};
use pinfold_core::page_pool::{RevocableSource, RevokeError};
use std::ptr::NonNull;

impl Arena {
    /// Acquires a chunk whose bytes are 0 before a device can reach them, for `access` (any, in an
    /// arena that is mapped whole).
    pub(in crate::memory) fn acquire_zeroed(
        &self,
        order: Order,
        access: Access,
    ) -> Result<Frame, SourceError> {
        let run = self.state().alloc_order(order)?;
        let memory = self.state().memory_of(run);
        // All of it, so this does not fail.
        let zeroed = memory.fill(0, memory.len(), 0);
        debug_assert_eq!(zeroed, Ok(()));
        self.acquire_run(run, access)
    }

    /// Maps a run that was just allocated as a chunk, or frees it.
    fn acquire_run(&self, run: Run, access: Access) -> Result<Frame, SourceError> {
        let state = self.state();
        // SAFETY: the run is in use until `release` has unmapped it, and the region stays while
        // anything is in use (`State::drop`). The run is a chunk's and no buffer's, and references
        // are lent into buffers only.
        let mapped = unsafe {
            self.attachment().map_chunk(run.first.offset(), state.memory_of(run), access)
        };
        match mapped {
            Ok(()) => Ok(run.first),
            Err(error) => {
                if error.stays_reachable() {
                    state.quarantine(run, self.attachment());
                } else {
                    state.free(run);
                }
                Err(SourceError::Map(error))
            }
        }
    }

    /// Unmaps a chunk, or quarantines it.
    fn unmap_chunk(&self, run: Run) -> Result<(), BackendError> {
        self.attachment().unmap_chunk(run.first.offset()).inspect_err(|error| {
            // Not to be tried again: nothing would be left to clear, and the flush that failed may
            // never complete.
            tracing::error!(first = %run.first, frames = run.frames, %error, "a chunk is quarantined");
            self.state().quarantine(run, self.attachment());
        })
    }
}

// SAFETY: the region and its address range are fixed when the arena is mapped and stay while a
// handle is held. A run comes from the zone, which allocates it to no other caller before `release`
// frees it; it lies in the region, because the zone has as many frames. References into an arena
// are lent by a `Buffer` only, into the run that it owns.
unsafe impl ChunkSource for Arena {
    fn span(&self) -> NonNull<[u8]> {
        let memory = self.state().region().memory();
        NonNull::slice_from_raw_parts(memory.as_ptr(), memory.len())
    }
    fn iova(&self) -> Iova {
        Self::iova(self)
    }
    fn domain(&self) -> Option<DomainId> {
        self.attachment().domain_id()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.acquire_run(self.state().alloc_order(order)?, READ_WRITE)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let run = Run::of_order(frame, order);
        if self.unmap_chunk(run).is_ok() {
            self.state().free(run);
        }
    }
}

// SAFETY: `unmap_chunk` is strict, and the run stays allocated until `release_hidden` frees it;
// while anything is allocated the region stays (`State::drop`). A run that could not be unmapped is
// never freed.
unsafe impl RevocableSource for Arena {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        if self.mapping_policy() == MappingPolicy::Whole {
            return Err(RevokeError::Permanent);
        }
        self.unmap_chunk(Run::of_order(frame, order))
            .map_err(|error| RevokeError::Unmap(error.to_string()))
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        self.state().free(Run::of_order(frame, order));
    }
}
