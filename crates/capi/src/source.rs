//! [`Marked`]: an arena as the source of a pool's chunks, whose memory is marked as the pool's.

use crate::arena::pf_arena_t;
use crate::region::{Hold, PAGE, Region};
use pinfold::core::domain::DomainId;
use pinfold::core::frame::{Frame, Order};
use pinfold::dma_pool::{ChunkSource, SourceError};
use pinfold::page_pool::{RevocableSource, RevokeError};
use pinfold::{Arena, Iova};
use std::ptr::NonNull;
use std::sync::Arc;

/// An arena that a pool acquires chunks from. Chunks are marked in the region while the pool has
/// them, so that devices may be given memory of its blocks, and `pf_free` refuses it.
///
/// It keeps the arena, which `pf_arena_put` refuses to end meanwhile, whether the pool has a chunk
/// or not: memory that the pool acquires later is still found by its address.
pub(crate) struct Marked {
    arena: Arena,
    hold: Hold,
}

impl Marked {
    pub(crate) fn new(arena: &pf_arena_t) -> Arc<Self> {
        Arc::new(Self { arena: arena.arena.clone(), hold: Hold::new(&arena.region) })
    }

    /// Returns the arena's memory.
    pub(crate) fn region(&self) -> &Region {
        self.hold.region()
    }

    fn mark(&self, frame: Frame, order: Order, has: bool) {
        // Inside the region: a frame of its arena.
        let at = usize::try_from(frame.offset()).unwrap_or(usize::MAX);
        let bytes = order.frames() as usize * PAGE;
        self.region().mark_pool(self.region().addr().saturating_add(at), bytes, has);
    }
}

// SAFETY: each call is forwarded to the arena, which gives these guarantees and is the value's.
unsafe impl ChunkSource for Marked {
    fn span(&self) -> NonNull<[u8]> {
        self.arena.span()
    }

    fn iova(&self) -> Iova {
        ChunkSource::iova(&self.arena)
    }

    fn domain(&self) -> Option<DomainId> {
        self.arena.domain()
    }

    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.arena.acquire(order).inspect(|&frame| self.mark(frame, order, true))
    }

    unsafe fn release(&self, frame: Frame, order: Order) {
        // Before another allocation can have it.
        self.mark(frame, order, false);
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.arena.release(frame, order) };
    }
}

// SAFETY: as for `ChunkSource`.
unsafe impl RevocableSource for Marked {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.arena.hide(frame, order) }
    }

    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        self.mark(frame, order, false);
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.arena.release_hidden(frame, order) };
    }
}
