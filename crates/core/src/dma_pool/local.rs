//! One owner's handle to a pool.

use super::owner::Owner;
use super::row::Form;
use super::shared::Shared;
use super::{AllocError, Block, BulkFreeError, ChunkSource, FreeError, RawBlock};
use core::fmt;

/// One owner's way to a pool: it keeps rows of blocks that nobody else draws from, and
/// has one of them at hand.
///
/// Its calls take no lock, and no atomic read-modify-write but where rows change hands (once in 64 blocks or less)
/// and for a block of a row that another owner keeps. What it holds goes to the depot when it is dropped, which
/// takes time proportional to its rows.
pub struct Local<'p, S: ChunkSource> {
    pool: &'p Shared<S>,
    owner: Owner,
}

impl<S: ChunkSource> fmt::Debug for Local<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("pool", &self.pool.name()).finish_non_exhaustive()
    }
}

impl<'p, S: ChunkSource> Local<'p, S> {
    pub(super) fn new(pool: &'p Shared<S>) -> Self {
        Self { pool, owner: pool.enrol() }
    }

    /// A block that frees itself. [`free`](Self::free) is the quick way back; dropped, it takes a lock.
    ///
    /// # Errors
    /// [`AllocError`] where neither this owner nor the depot has a free block and the pool can have no chunk.
    #[inline]
    pub fn alloc(&mut self) -> Result<Block<'p, S>, AllocError> {
        let raw = self.pool.alloc(&mut self.owner, Form::Owned)?;
        Ok(Block { pool: self.pool, raw })
    }

    /// The same, all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&mut self) -> Result<Block<'p, S>, AllocError> {
        self.alloc().inspect(|block| self.pool.zero(block.raw))
    }

    /// Takes a block back, from whichever owner's hand it came; one of another pool goes to its own.
    #[inline]
    pub fn free(&mut self, block: Block<'p, S>) {
        if !core::ptr::eq(block.pool, self.pool) {
            return drop(block);
        }
        // Never refused: nothing but its `Block` frees an owned block.
        let freed = self.pool.free(&mut self.owner, block.raw, Form::Owned);
        debug_assert_eq!(freed, Ok(()));
        core::mem::forget(block);
    }

    /// A block, raw: it is out until it is freed.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_raw(&mut self) -> Result<RawBlock, AllocError> {
        self.pool.alloc(&mut self.owner, Form::Raw)
    }

    /// The same, all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_raw_zeroed(&mut self) -> Result<RawBlock, AllocError> {
        self.alloc_raw().inspect(|&block| self.pool.zero(block))
    }

    /// Takes a raw block back, from whichever owner's hand it came.
    ///
    /// # Errors
    /// [`FreeError`] where it is not a block of this pool in use; then nothing has changed.
    #[inline]
    pub fn free_raw(&mut self, block: RawBlock) -> Result<(), FreeError> {
        self.pool.free(&mut self.owner, block, Form::Raw)
    }

    /// A block of which nobody keeps a record that it is out: to measure what the checks cost, and for nothing else.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    ///
    /// # Safety
    /// The pool is not in debug mode. The block is freed by [`free_raw_unchecked`](Self::free_raw_unchecked) of this
    /// same `Local`, before the pool is shrunk or dropped.
    #[doc(hidden)]
    #[inline]
    pub unsafe fn alloc_raw_unchecked(&mut self) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(offset) = self.owner.pop_unmarked(&self.pool.geometry) {
                return Ok(self.pool.block_at(offset));
            }
            self.pool.stock(&mut self.owner)?;
        }
    }

    /// Takes back what [`alloc_raw_unchecked`](Self::alloc_raw_unchecked) gave, without a look at it.
    ///
    /// # Safety
    /// This `Local` gave the block by that call, and it was not freed since.
    #[doc(hidden)]
    #[inline]
    pub unsafe fn free_raw_unchecked(&mut self, block: RawBlock) {
        // SAFETY: the caller's.
        unsafe { self.pool.free_unchecked(&mut self.owner, block) };
    }

    /// The owner's number, by which debug mode reports it. That of an owner that is gone is given out again.
    pub fn number(&self) -> u32 {
        self.owner.id
    }

    /// What debug mode's reports call this owner.
    pub fn set_tag(&mut self, tag: &'static str) {
        self.owner.tag = tag;
    }

    /// Fills the empty slots with raw blocks; returns how many slots are full afterwards. Fewer than all where there
    /// are no more.
    #[inline]
    pub fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        self.pool.fill(&mut self.owner, slots)
    }

    /// The same, all bytes of the new blocks 0.
    pub fn fill_zeroed(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        self.pool.fill_zeroed(&mut self.owner, slots)
    }

    /// Takes many blocks back.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it.
    #[inline]
    pub fn free_bulk(&mut self, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        self.pool.free_bulk(&mut self.owner, blocks)
    }

    /// Takes back the blocks in the slots, which are empty afterwards: the way back for [`fill`](Self::fill).
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it; it and those after it stay
    /// in their slots.
    #[inline]
    pub fn free_slots(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkFreeError> {
        self.pool.free_slots(&mut self.owner, slots)
    }
}

impl<S: ChunkSource> Drop for Local<'_, S> {
    fn drop(&mut self) {
        self.pool.dismiss(&mut self.owner);
    }
}
