//! [`Block`]: a block that frees itself on drop, and the pool's calls that return one.

use super::error::AllocError;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::state::Form;
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::share::Shared;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;

/// A block that frees itself on drop, from any thread.
///
/// `H` is how it keeps its pool alive: a share of a [`Shared`] pool (the default), or a borrow (`&DmaPool`). A drop
/// goes through the pool's own owner, which takes a lock; in the shared form it also returns the share, one
/// read-modify-write. [`Local::free`](super::Local::free) does neither, and [`DmaPool::free_many`] both once for 64 blocks.
/// A block that stays with the thread that allocates it can be a [`LocalBlock`](super::LocalBlock).
pub struct Block<S: ChunkSource, H: Deref<Target = DmaPool<S>> = Shared<DmaPool<S>>> {
    pool: H,
    raw: RawBlock,
    source: PhantomData<fn() -> S>,
}

impl<S: ChunkSource, H: Deref<Target = DmaPool<S>>> fmt::Debug for Block<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.raw).finish()
    }
}

impl<S: ChunkSource, H: Deref<Target = DmaPool<S>>> Block<S, H> {
    /// `raw` was allocated from this pool, in the form `Owned`, for this value alone.
    #[inline(always)]
    pub(super) fn new(pool: H, raw: RawBlock) -> Self {
        Self { pool, raw, source: PhantomData }
    }

    /// Returns the block's address for the device.
    pub fn iova(&self) -> Iova {
        self.raw.iova()
    }

    /// Returns both addresses. The block remains owned: until it is dropped or turned [raw](Self::into_raw), a raw
    /// free of it is refused with [`FreeError::Owned`](super::FreeError::Owned).
    pub fn as_raw(&self) -> RawBlock {
        self.raw
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        // Does not fail: the pool allocated it, so it lies in the span.
        self.pool.memory_of(self.raw).unwrap_or(DmaMemory::EMPTY)
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address.
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        self.pool.make_raw(self.raw);
        self.into_parts().1
    }

    /// The pool that the block belongs to.
    #[inline(always)]
    pub(super) fn pool(&self) -> &DmaPool<S> {
        &self.pool
    }

    /// How it holds its pool, and the block, which the caller frees.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (H, RawBlock) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again, so the value is not duplicated.
        (unsafe { core::ptr::read(&raw const this.pool) }, this.raw)
    }
}

impl<S: ChunkSource, H: Deref<Target = DmaPool<S>>> Drop for Block<S, H> {
    fn drop(&mut self) {
        // Never refused: only its `Block` frees an owned block.
        let freed = self.pool.free_owned(self.raw);
        debug_assert_eq!(freed, Ok(()));
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// Allocates a block that frees itself and borrows the pool.
    ///
    /// # Errors
    /// [`AllocError`] if the pool has no free block and can acquire no chunk.
    pub fn alloc(&self) -> Result<Block<S, &Self>, AllocError> {
        Ok(Block::new(self, self.alloc_shared(Form::Owned)?))
    }

    /// As [`alloc`](Self::alloc), with all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self) -> Result<Block<S, &Self>, AllocError> {
        self.alloc().inspect(|block| self.zero(block.raw))
    }
}

impl<S: ChunkSource> Shared<DmaPool<S>> {
    /// Allocates a block that frees itself and keeps the pool alive. One read-modify-write more than the borrowed form,
    /// for its share; [`Local::alloc`](super::Local::alloc) makes none.
    ///
    /// # Errors
    /// [`AllocError`] if the pool has no free block and can acquire no chunk.
    pub fn alloc(&self) -> Result<Block<S>, AllocError> {
        Ok(Block::new(self.clone(), self.alloc_shared(Form::Owned)?))
    }

    /// As [`alloc`](Self::alloc), with all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self) -> Result<Block<S>, AllocError> {
        self.alloc().inspect(|block| self.zero(block.raw))
    }
}
