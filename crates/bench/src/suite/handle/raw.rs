//! Raw blocks, written through their pointers as a driver with its own bookkeeping does.
#![expect(unsafe_code, reason = "the memory of a raw block is reached through its pointer")]

use super::api::{AllocWritten, Object, Pool, PoolLocal, handle};
use super::workloads::WARM_UP;
use crate::error::BenchError;
use crate::harness::{Cost, Samples};
use pinfold_core::dma_pool::{BlockRun, RawBlock};
use std::hint::black_box;
use std::num::NonZeroUsize;

impl Object for RawBlock {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// Raw blocks of a pool, allocated and freed by one call for many.
pub(in crate::suite) trait Bulk {
    /// Fills the empty slots and returns how many are full afterwards.
    fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize;
    /// Frees the blocks of all slots and empties them.
    fn free_slots(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError>;
}

/// The raw blocks of a pool's `Local`, without its lock.
pub(in crate::suite) struct RawBlocks<'p, 'a>(pub(in crate::suite) PoolLocal<'p, 'a>);

/// The raw blocks of the pool's own calls, which take its lock.
pub(in crate::suite) struct SharedRawBlocks<'p, 'a>(pub(in crate::suite) &'p Pool<'a>);

macro_rules! raw_blocks {
    ($handle:ident) => {
        handle!(
            ['p, 'a] $handle<'p, 'a>, RawBlock,
            |handle| handle.0.alloc_raw()?, |handle, block| handle.0.free_raw(block)?
        );

        impl AllocWritten for $handle<'_, '_> {
            #[inline(always)]
            fn alloc_written(&mut self) -> Result<RawBlock, BenchError> {
                let block = self.0.alloc_raw()?;
                // SAFETY: the block has at least 16 bytes and was allocated just now; no other code has its address yet.
                unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
                Ok(block)
            }
        }

        impl Bulk for $handle<'_, '_> {
            #[inline(always)]
            fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
                self.0.fill(slots)
            }
            #[inline(always)]
            fn free_slots(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError> {
                Ok(self.0.free_slots(slots)?)
            }
        }
    };
}
raw_blocks!(RawBlocks);
raw_blocks!(SharedRawBlocks);

/// Returns a run that, `rounds` times, allocates `each` blocks by one call, writes each, and frees them by one call.
pub(in crate::suite) fn bulk_run<B: Bulk>(
    case: &'static str,
    each: usize,
    rounds: usize,
    handle: impl Fn() -> B,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut handle = handle();
        let mut slots = vec![None; each];
        let mut work = |rounds| {
            for _ in 0..rounds {
                let got = handle.fill(&mut slots);
                if got != each {
                    return Err(BenchError::Short { asked: each, got });
                }
                for block in black_box(&slots).iter().flatten() {
                    // SAFETY: every slot was empty before `fill`: at first, and after each `free_slots` that succeeded.
                    // So the block is allocated, has at least 16 bytes, and only this loop has its address.
                    unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
                }
                handle.free_slots(&mut slots)?;
            }
            Ok(())
        };
        work(WARM_UP / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}

/// The same in runs of neighbours.
pub(in crate::suite) fn run_run<'p, 'a: 'p>(
    case: &'static str,
    each: usize,
    rounds: usize,
    local: impl Fn() -> PoolLocal<'p, 'a>,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut local = local();
        let mut runs = Vec::with_capacity(each);
        let mut work = |rounds| {
            for _ in 0..rounds {
                let mut left = each;
                while let Some(most) = NonZeroUsize::new(left) {
                    let run = local.alloc_run(most)?;
                    left -= run.len();
                    runs.push(run);
                }
                black_box(&runs).iter().flat_map(BlockRun::iter).for_each(|block| {
                    // SAFETY: as in `bulk_run`: `runs` was empty before, since each run was freed.
                    unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.address()) };
                });
                runs.drain(..).try_for_each(|run| local.free_run(run))?;
            }
            Ok(())
        };
        work(WARM_UP / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}
