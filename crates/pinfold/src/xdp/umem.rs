//! An arena as the kernel addresses it.

use crate::memory::arena::{Arena, ArenaMemory};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::DomainId;
use pinfold_core::frame::{Frame, Order};
use std::ptr::NonNull;

/// The memory that packets are received into: an arena, addressed from 0.
///
/// A handle: a clone is the same memory. As a [`ChunkSource`] it feeds page pools, in which a
/// page's device address is its address in the UMEM.
#[derive(Clone, Debug)]
pub struct Umem {
    memory: ArenaMemory,
}

impl Umem {
    /// Makes an arena's memory a UMEM.
    pub fn new(memory: ArenaMemory) -> Self {
        Self { memory }
    }

    /// Returns the arena.
    pub fn memory(&self) -> &ArenaMemory {
        &self.memory
    }
}

impl From<Arena> for Umem {
    fn from(arena: Arena) -> Self {
        Self::new((*arena).clone())
    }
}

// SAFETY: the region stays while the handle does, and its addresses from 0 end within 64 bits. A
// run comes from the arena's zone, which allocates it to no other caller before `release` frees it,
// and lies in the region. References into an arena are lent by a `Buffer` only, into the run that
// it owns. The kernel reaches only what a socket's rings name.
unsafe impl ChunkSource for Umem {
    fn span(&self) -> NonNull<[u8]> {
        let memory = self.memory.state().region_memory();
        NonNull::slice_from_raw_parts(memory.as_ptr(), memory.len())
    }
    fn iova(&self) -> Iova {
        Iova::new(0)
    }
    fn domain(&self) -> Option<DomainId> {
        None
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        Ok(self.memory.state().alloc_order(order)?.first)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.memory.state().free_order(frame, order);
    }
}
