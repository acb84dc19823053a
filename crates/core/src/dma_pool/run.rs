//! [`BlockRun`]: raw blocks that are neighbours as one value, for drivers that fill and empty rings.

use super::error::{AllocError, BulkFreeError};
use super::local::Local;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::state::Form;
use crate::addr::Iova;
use crate::share::Hold;
use core::num::NonZeroUsize;

/// Raw blocks at equal distances, 1 to 64 of them: the first, the distance and the number say where all are. Allocated by
/// [`Local::alloc_run`].
///
/// Each of them is a raw block like any other: [`DmaPool::memory`] lends its memory, and it may be freed by itself, in which case
/// [`free_run`](Local::free_run) refuses it. Two runs need not be neighbours: for a ring that must be contiguous, allocate from
/// the arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRun {
    first: RawBlock,
    stride: usize,
    len: usize,
}

impl BlockRun {
    /// Returns the first block.
    #[inline(always)]
    pub const fn first(&self) -> RawBlock {
        self.first
    }

    /// Returns how many bytes a block starts behind the one before, for the processor and for the device: the pool's
    /// [`block_size`](DmaPool::block_size).
    #[inline(always)]
    pub const fn stride(&self) -> usize {
        self.stride
    }

    /// Returns how many blocks there are, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    #[inline(always)]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns block `index`, or `None` from [`len`](Self::len) on.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<RawBlock> {
        (index < self.len).then(|| self.at(index))
    }

    /// Returns the blocks in ascending order.
    #[inline(always)]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = RawBlock> + use<> {
        let run = *self;
        (0..self.len).map(move |index| run.at(index))
    }

    /// The block `index` places behind the first; wraps around at the end of the address space.
    #[inline(always)]
    fn at(&self, index: usize) -> RawBlock {
        let bytes = self.stride.wrapping_mul(index);
        let ptr = self.first.as_ptr();
        let addr = ptr.addr().get().wrapping_add(bytes);
        RawBlock::from_parts(
            // Not 0: it lies in the pool's span, or equals the first one's.
            ptr.with_addr(NonZeroUsize::new(addr).unwrap_or(ptr.addr())),
            Iova::new(self.first.iova().raw().wrapping_add(bytes as u64)),
        )
    }

    /// The blocks from `index` on; `None` if there is none.
    #[inline(always)]
    fn from(&self, index: usize) -> Option<Self> {
        let first = self.get(index)?;
        Some(Self { first, len: self.len - index, ..*self })
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Local<S, H> {
    /// Allocates raw blocks that are neighbours: at least one, at most `most`, and never more than 64.
    ///
    /// How many depends on what is free next, so a driver that needs `n` blocks calls it until it has them. In a pool
    /// whose [boundary](DmaPool::new) leaves gaps between blocks, and in debug mode, a run has one block. O(blocks), with one
    /// store for each.
    ///
    /// ```
    /// # use core::num::NonZeroUsize;
    /// # use pinfold_core::dma_pool::{ChunkSource, DmaPool};
    /// # fn run<S: ChunkSource>(pool: &DmaPool<S>, mut descriptor: impl FnMut(u64)) -> Result<(), Box<dyn core::error::Error>> {
    /// let mut local = pool.local();
    /// let mut runs = Vec::new();
    /// let mut left = 512;
    /// while let Some(most) = NonZeroUsize::new(left) {
    ///     let run = local.alloc_run(most)?;
    ///     run.iter().for_each(|block| descriptor(block.iova().raw()));
    ///     left -= run.len();
    ///     runs.push(run);
    /// }
    /// runs.into_iter().try_for_each(|run| local.free_run(run))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_run(&mut self, most: NonZeroUsize) -> Result<BlockRun, AllocError> {
        let Self { pool, owner, .. } = self;
        let run = |offset, len| BlockRun { first: pool.block_at(offset), stride: pool.block_size(), len };
        loop {
            if let Some(found) = owner.pop_run(&pool.geometry, most.get()) {
                pool.relieve(owner);
                return Ok(run(found.offset, found.len));
            }
            // The blocks that were freed last, one at a time.
            if let Some(offset) = owner.pop(&pool.geometry, Form::Raw) {
                return Ok(run(offset, 1));
            }
            pool.stock(owner)?;
        }
    }

    /// Frees the blocks of a run, whichever owner allocated them. O(blocks).
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it; those behind it stay allocated.
    #[inline]
    pub fn free_run(&mut self, run: BlockRun) -> Result<(), BulkFreeError> {
        let Self { pool, owner, .. } = self;
        let even = pool.geometry.is_even() && run.stride == pool.block_size();
        pool.gathering(owner, |owner| {
            let mut freed = 0;
            while let Some(rest) = run.from(freed) {
                freed += match pool.free_run_of(owner, rest.first, if even { rest.len } else { 1 }) {
                    // Of another owner's row, or wrong.
                    0 => pool
                        .free_found(owner, rest.first, Form::Raw)
                        .map(|()| 1)
                        .map_err(|error| BulkFreeError { freed, error })?,
                    many => many,
                };
            }
            Ok(())
        })
    }
}
