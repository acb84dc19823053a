//! Alloc and free without the checks, to measure what those cost: for benchmarks alone.

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
        // SAFETY: the caller guarantees what is asked for.
        unsafe { self.pool.free_unchecked(&mut self.owner, block) };
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// Frees a block without looking whether it is one, or in use.
    ///
    /// # Safety
    /// It is a block of this pool that this owner had by `pop_unmarked` and that was not freed since.
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
        // Not refused: the caller had the block by `pop_unmarked`.
        let _ = owner.free_unchecked(&self.geometry, row, bit);
        self.relieve(owner);
    }
}

impl Owner {
    /// The same without a record that it is allocated.
    #[inline(always)]
    fn pop_unmarked(&mut self, geometry: &Geometry) -> Option<u64> {
        let (_, bit) = self.current.first()?;
        Some(self.pop_first(geometry, bit))
    }

    /// Takes back a block of the current row without a look at whether it is one and in use; `false` where the row has
    /// to be looked up.
    #[inline(always)]
    fn push_unchecked(&mut self, offset: u64) -> bool {
        let Some((_, bit)) = self.current.find_unchecked(offset) else { return false };
        self.put(1 << bit, 1);
        true
    }

    /// The same without a look at whether it is in use.
    fn free_unchecked(&mut self, geometry: &Geometry, row: RowRef, bit: u32) -> Result<(), FreeRefusal> {
        row.set_allocated(bit, Form::Raw);
        self.free(geometry, row, bit, Form::Raw)
    }
}

impl Current {
    /// The block in which `offset` lies, if it is one of the row's; not proved for offsets 2^31 away or more, nor to
    /// be where a block starts.
    #[inline(always)]
    fn find_unchecked(&self, offset: u64) -> Option<(RowRef, u32)> {
        let within = offset.wrapping_sub(self.offset);
        let index = self.by_size.quotient(within);
        if index < self.blocks && within < 1 << 31 { self.at(index) } else { None }
    }
}
