//! [`Local`]: one owner's handle to a pool.

use super::block::Block;
use super::bulk::{empty, full, undo};
use super::error::{AllocError, BulkAllocError, BulkFreeError, FreeError};
use super::owner::Owner;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::state::Form;
use crate::share::{Hold, Shared, Stock};
use core::fmt;
use core::marker::PhantomData;

/// One owner's handle to a pool: it keeps rows of blocks that no other owner allocates from, and allocates from one of them
/// at a time. One per thread of control; it can move between threads.
///
/// `H` is how it keeps its pool alive: a [`Stock`] of shares of a [`Shared`] pool (the default), or a borrow
/// (`&DmaPool`). Its blocks do the same.
///
/// Its calls take no lock and make no atomic read-modify-write, in either form, except where rows change hands and for a block in a
/// row of another owner or of the depot. In order that is at most once in 64 blocks; where more blocks are freed at random than an
/// owner keeps rows for, it is up to one read-modify-write for every three or four. Dropping it moves what it holds to the depot, which
/// takes time proportional to its rows.
pub struct Local<S: ChunkSource, H: Hold<Target = DmaPool<S>> = Stock<DmaPool<S>>> {
    pub(super) pool: H,
    pub(super) owner: Owner,
    source: PhantomData<fn() -> S>,
}

impl<S: ChunkSource> DmaPool<S> {
    /// Returns a new owner's handle that borrows the pool.
    ///
    /// Allocates memory if there are more owners than ever before.
    pub fn local(&self) -> Local<S, &Self> {
        Local::new(self)
    }
}

impl<S: ChunkSource> Shared<DmaPool<S>> {
    /// Returns a new owner's handle that keeps the pool alive, as its blocks do.
    ///
    /// Allocates memory if there are more owners than ever before.
    pub fn local(&self) -> Local<S> {
        Local::new(self.stock())
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> fmt::Debug for Local<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("pool", &self.pool.name()).finish_non_exhaustive()
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Local<S, H> {
    fn new(pool: H) -> Self {
        Self { owner: pool.register_owner(), pool, source: PhantomData }
    }

    /// Allocates a block that frees itself, from any thread. A drop takes a lock; [`free`](Self::free) and
    /// [`free_many`](Self::free_many) take none. For blocks that this thread drops, use a [`LocalCell`](super::LocalCell): its
    /// blocks return here.
    ///
    /// # Errors
    /// [`AllocError`] if neither this owner nor the depot has a free block and the pool can acquire no chunk.
    #[inline(always)]
    pub fn alloc(&mut self) -> Result<Block<S, H::Item>, AllocError> {
        let raw = self.pool.alloc_by(&mut self.owner, Form::Owned)?;
        Ok(Block::new(self.pool.issue(), raw))
    }

    /// As [`alloc`](Self::alloc), with all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&mut self) -> Result<Block<S, H::Item>, AllocError> {
        self.alloc().inspect(|block| self.pool.zero(block.as_raw()))
    }

    /// Frees a block, whichever owner allocated it; one of another pool is dropped.
    #[inline(always)]
    pub fn free(&mut self, block: Block<S, H::Item>) {
        if !core::ptr::eq(block.pool(), &raw const *self.pool) {
            return drop(block);
        }
        let (item, raw) = block.into_parts();
        // Never refused: only its `Block` frees an owned block.
        let freed = self.pool.free_by(&mut self.owner, raw, Form::Owned);
        debug_assert_eq!(freed, Ok(()));
        self.pool.take_back(item);
    }

    /// Allocates a raw block: it stays allocated until it is freed by address.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline(always)]
    pub fn alloc_raw(&mut self) -> Result<RawBlock, AllocError> {
        self.pool.alloc_by(&mut self.owner, Form::Raw)
    }

    /// Frees a raw block, whichever owner allocated it.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw block of this pool; then nothing has changed.
    #[inline(always)]
    pub fn free_raw(&mut self, block: RawBlock) -> Result<(), FreeError> {
        self.pool.free_by(&mut self.owner, block, Form::Raw)
    }

    /// Returns the owner's number, by which debug mode reports it. Numbers of dropped owners are reused.
    pub fn number(&self) -> u32 {
        self.owner.id
    }

    /// Sets the name by which debug mode reports this owner.
    pub fn set_tag(&mut self, tag: &'static str) {
        self.owner.tag = tag;
    }

    /// Fills the empty slots with raw blocks and returns how many slots are full afterwards: fewer than all if
    /// blocks run out.
    #[inline]
    pub fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        match self.pool.fill_by(&mut self.owner, slots) {
            Ok(()) => slots.len(),
            Err(_) => slots.len() - empty(slots),
        }
    }

    /// Fills the empty slots with raw blocks, all or none: what several descriptors of one request need. Slots that are full
    /// stay as they are.
    ///
    /// If blocks run out, those that were allocated for this call are freed again, so another owner may find the pool empty
    /// meanwhile; one that a wrong free of the program has freed already is left out. Chunks that were acquired for it stay in
    /// the pool.
    ///
    /// O(slots), and what [`alloc`](Self::alloc) takes. Allocates memory only if some slots are full already.
    ///
    /// # Errors
    /// [`BulkAllocError`], with how many blocks were available; the slots are as before.
    #[inline]
    pub fn fill_all(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkAllocError> {
        let before = full(slots);
        let Self { pool, owner, .. } = self;
        pool.fill_by(owner, slots)
            .map_err(|error| undo(slots, &before, error, |filled| pool.free_slots_by(owner, filled)))
    }

    /// Frees raw blocks.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it.
    #[inline]
    pub fn free_bulk(&mut self, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        self.pool.free_bulk_by(&mut self.owner, blocks)
    }

    /// Frees the raw blocks in the slots, as [`fill`](Self::fill) left them, and empties the slots.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it; it and those after it stay
    /// in their slots.
    #[inline]
    pub fn free_slots(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkFreeError> {
        self.pool.free_slots_by(&mut self.owner, slots)
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Drop for Local<S, H> {
    fn drop(&mut self) {
        self.pool.depot.retire(&mut self.owner);
    }
}
