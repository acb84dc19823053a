//! Alloc and free without checks, for benchmarks that measure the cost of the checks.

use super::current::Current;
use super::error::AllocError;
use super::geometry::Geometry;
use super::local::Local;
use super::owner::Owner;
use super::pool::{DmaPool, Found};
use super::raw::RawBlock;
use super::row::{Form, FreeRefusal};
use super::row_ref::RowRef;
use super::source::ChunkSource;
use crate::share::Hold;

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Local<S, H> {
    /// Allocates a block without recording it, to measure what the checks cost.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    ///
    /// # Safety
    /// The pool is not in debug mode. The block is freed by [`free_raw_unchecked`](Self::free_raw_unchecked) of this
    /// same `Local`, before the pool is shrunk or dropped.
    #[inline]
    pub unsafe fn alloc_raw_unchecked(&mut self) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(offset) = self.owner.pop_unmarked(&self.pool.geometry) {
                return Ok(self.pool.block_at(offset));
            }
            self.pool.stock(&mut self.owner)?;
        }
    }

    /// Frees a block from [`alloc_raw_unchecked`](Self::alloc_raw_unchecked) without any check.
    ///
    /// # Safety
    /// This `Local` allocated the block by that call, and it has not been freed since.
    #[inline]
    pub unsafe fn free_raw_unchecked(&mut self, block: RawBlock) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.pool.free_unchecked(&mut self.owner, block) };
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// Frees a block without checking that it is one and allocated.
    ///
    /// # Safety
    /// `pop_unmarked` returned this block of the pool to this owner, and it has not been freed since.
    #[inline(always)]
    unsafe fn free_unchecked(&self, owner: &mut Owner, block: RawBlock) {
        let offset = block.addr().wrapping_sub(self.memory.addr()) as u64;
        if !owner.push_unchecked(offset) {
            self.free_found_unchecked(owner, block);
        }
    }

    #[inline(never)]
    fn free_found_unchecked(&self, owner: &mut Owner, block: RawBlock) {
        let Ok(Found { row, bit, .. }) = self.find(block) else { return };
        // Not refused: the block is from `pop_unmarked`.
        let _ = owner.free_unchecked(&self.geometry, row, bit);
        self.relieve(owner);
    }
}

impl Owner {
    /// Allocates a block without recording that it is allocated.
    #[inline(always)]
    fn pop_unmarked(&mut self, geometry: &Geometry) -> Option<u64> {
        let (_, bit) = self.current.first()?;
        Some(self.pop_first(geometry, bit))
    }

    /// Frees a block of the current row without checking that it is a block and allocated; returns false if its row must be
    /// looked up.
    #[inline(always)]
    fn push_unchecked(&mut self, offset: u64) -> bool {
        let Some((_, bit)) = self.current.find_unchecked(offset) else { return false };
        self.put(1 << bit, 1);
        true
    }

    /// Frees a block without checking that it is allocated.
    fn free_unchecked(&mut self, geometry: &Geometry, row: RowRef, bit: u32) -> Result<(), FreeRefusal> {
        row.set_allocated(bit, Form::Raw);
        self.free(geometry, row, bit, Form::Raw)
    }
}

impl Current {
    /// Returns the block that contains `offset`, if it is in the row; arbitrary for offsets 2^31 away or more.
    #[inline(always)]
    fn find_unchecked(&self, offset: u64) -> Option<(RowRef, u32)> {
        let within = offset.wrapping_sub(self.offset);
        let index = self.by_size.quotient(within);
        if index < self.blocks && within < 1 << 31 { self.at(index) } else { None }
    }
}
