//! Raw blocks, written through their pointers as a driver with its own bookkeeping does.
#![expect(unsafe_code, reason = "the memory of a raw block is reached through its pointer")]

use super::api::{AllocWritten, Object, Pool, PoolLocal, handle};
use super::blocks::OwnedBlocks;
use super::workloads::WARM_UP;
use crate::error::BenchError;
use crate::harness::{Cost, Samples};
use pinfold_core::dma_pool::{Block, RawBlock};
use std::hint::black_box;

impl Object for RawBlock {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// Blocks of a pool's `Local`, allocated and freed by one call for many.
pub(in crate::suite) trait Bulk {
    /// A block.
    type Item;
    /// Fills the empty slots and returns how many are full afterwards.
    fn fill(&mut self, slots: &mut [Option<Self::Item>]) -> usize;
    /// Frees the blocks of all slots and empties them.
    fn free_all(&mut self, slots: &mut [Option<Self::Item>]) -> Result<(), BenchError>;
    /// The addresses of a block.
    fn raw(block: &Self::Item) -> RawBlock;
}

/// The raw blocks of a pool's `Local`, without its lock. Each free claims its block.
pub(in crate::suite) struct RawBlocks(pub(in crate::suite) PoolLocal);

/// The raw blocks of the pool's own calls, which take its lock.
pub(in crate::suite) struct SharedRawBlocks<'p>(pub(in crate::suite) &'p Pool);

macro_rules! raw_blocks {
    ([$($lifetime:lifetime)?] $handle:ty) => {
        handle!(
            [$($lifetime)?] $handle, RawBlock,
            |handle| handle.0.alloc_raw()?, |handle, block| handle.0.free_raw(block)?
        );

        impl<$($lifetime)?> AllocWritten for $handle {
            #[inline(always)]
            fn alloc_written(&mut self) -> Result<RawBlock, BenchError> {
                let block = self.0.alloc_raw()?;
                // SAFETY: the block has at least 16 bytes and was allocated just now; no other code
                // has its address yet.
                unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
                Ok(block)
            }
        }
    };
}
raw_blocks!([] RawBlocks);
raw_blocks!(['p] SharedRawBlocks<'p>);

impl Bulk for RawBlocks {
    type Item = RawBlock;
    #[inline(always)]
    fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        self.0.fill(slots)
    }
    #[inline(always)]
    fn free_all(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError> {
        slots
            .iter_mut()
            .filter_map(Option::take)
            .try_for_each(|block| Ok(self.0.free_raw(block)?))
    }
    #[inline(always)]
    fn raw(block: &RawBlock) -> RawBlock {
        *block
    }
}

impl Bulk for OwnedBlocks {
    type Item = Block;
    #[inline(always)]
    fn fill(&mut self, slots: &mut [Option<Block>]) -> usize {
        self.0.fill_blocks(slots)
    }
    #[inline(always)]
    fn free_all(&mut self, slots: &mut [Option<Block>]) -> Result<(), BenchError> {
        self.0.free_many(slots.iter_mut().filter_map(Option::take));
        Ok(())
    }
    #[inline(always)]
    fn raw(block: &Block) -> RawBlock {
        block.as_raw()
    }
}

/// Returns a run that, `rounds` times, allocates `each` blocks by one call, writes each, and frees
/// them by one call.
pub(in crate::suite) fn bulk_run<B: Bulk>(
    case: &'static str,
    each: usize,
    rounds: usize,
    handle: impl Fn() -> B,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut handle = handle();
        let mut slots: Vec<_> = (0..each).map(|_| None).collect();
        let mut work = |rounds| {
            for _ in 0..rounds {
                let got = handle.fill(&mut slots);
                if got != each {
                    return Err(BenchError::Short { asked: each, got });
                }
                for block in black_box(&slots).iter().flatten().map(B::raw) {
                    // SAFETY: every slot was empty before `fill`: at first, and after each
                    // `free_all` that succeeded. So the block is allocated, has at least 16 bytes,
                    // and only this loop has its address.
                    unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
                }
                handle.free_all(&mut slots)?;
            }
            Ok(())
        };
        work(WARM_UP / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}
