//! An arena that is addressed from 0.

use super::arena::{Arena, ArenaMemory};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::DomainId;
use pinfold_core::frame::{Frame, Order};
use pinfold_core::page_pool::RevocableSource;
use std::ptr::NonNull;

/// The memory of an arena, whose device addresses are offsets from its start: for an interface that
/// numbers registered memory itself, as `AF_XDP` does.
///
/// A handle: a clone is the same memory. As a [`ChunkSource`] it feeds pools of pages and blocks.
///
/// ```
/// use pinfold::memory::Offsets;
/// use pinfold::{Arena, PagePool, page_pool::Config};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = Offsets::new(Arena::builder().size(4 << 20).build_unmapped()?);
/// let mut pool = PagePool::new(memory, "receive", Config::default())?;
/// assert!(pool.alloc()?.iova().raw() < 4 << 20);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Offsets {
    memory: ArenaMemory,
}

impl Offsets {
    /// Addresses an arena's memory from 0.
    pub fn new(memory: ArenaMemory) -> Self {
        Self { memory }
    }

    /// Returns the arena.
    pub fn memory(&self) -> &ArenaMemory {
        &self.memory
    }
}

impl From<Arena> for Offsets {
    fn from(arena: Arena) -> Self {
        Self::new((*arena).clone())
    }
}

// SAFETY: the region stays while the handle does, and its addresses from 0 end within 64 bits. A
// run comes from the arena's zone, which allocates it to no other caller before `release` frees it,
// and lies in the region. References into an arena are lent by a `Buffer` only, into the run that
// it owns. What the memory is registered with reaches only what its caller names.
unsafe impl ChunkSource for Offsets {
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

// SAFETY: it cannot revoke: what it is registered with reaches all of it.
unsafe impl RevocableSource for Offsets {}
