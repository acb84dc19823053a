//! Raw blocks and pages, written through their pointers, as a driver does that keeps its own rules.
#![expect(unsafe_code, reason = "the memory of a raw block is reached through its pointer")]

use super::{BenchError, Hand, Pool, WARM, Writing};
use crate::harness::{Cost, Samples};
use pinfold::Arena;
use pinfold_core::dma_pool::{self, RawBlock};
use std::hint::black_box;

/// A pool's `Local`, raw blocks.
pub(in crate::suite) struct Raw<'p, 'a>(pub(in crate::suite) dma_pool::Local<&'a Arena, &'p Pool<'a>>);

impl Hand for Raw<'_, '_> {
    type Thing = RawBlock;
    #[inline(always)]
    fn get(&mut self) -> Result<RawBlock, BenchError> {
        Ok(self.0.alloc_raw()?)
    }
    #[inline(always)]
    fn put(&mut self, block: RawBlock) -> Result<(), BenchError> {
        Ok(self.0.free_raw(block)?)
    }
    #[inline(always)]
    fn number(block: &RawBlock) -> u64 {
        block.iova().raw()
    }
}

impl Writing for Raw<'_, '_> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<RawBlock, BenchError> {
        let block = self.0.alloc_raw()?;
        // SAFETY: the block has at least 16 bytes, was handed out just now, and nobody else knows of it yet.
        unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.iova().raw()) };
        Ok(block)
    }
}

/// The pool itself, raw blocks, under its lock.
pub(in crate::suite) struct Unowned<'p, 'a>(pub(in crate::suite) &'p Pool<'a>);

impl Hand for Unowned<'_, '_> {
    type Thing = RawBlock;
    #[inline(always)]
    fn get(&mut self) -> Result<RawBlock, BenchError> {
        Ok(self.0.alloc_raw()?)
    }
    #[inline(always)]
    fn put(&mut self, block: RawBlock) -> Result<(), BenchError> {
        Ok(self.0.free_raw(block)?)
    }
    #[inline(always)]
    fn number(block: &RawBlock) -> u64 {
        block.iova().raw()
    }
}

impl Writing for Unowned<'_, '_> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<RawBlock, BenchError> {
        let block = self.0.alloc_raw()?;
        // SAFETY: the block has at least 16 bytes, was handed out just now, and nobody else knows of it yet.
        unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.iova().raw()) };
        Ok(block)
    }
}

/// Many raw blocks by one call, out and back again.
pub(in crate::suite) trait Bulk {
    fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize;
    fn free(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError>;
}

impl Bulk for Raw<'_, '_> {
    #[inline(always)]
    fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        self.0.fill(slots)
    }
    #[inline(always)]
    fn free(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError> {
        Ok(self.0.free_slots(slots)?)
    }
}

impl Bulk for Unowned<'_, '_> {
    #[inline(always)]
    fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        self.0.fill(slots)
    }
    #[inline(always)]
    fn free(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BenchError> {
        Ok(self.0.free_slots(slots)?)
    }
}

/// A run: `rounds` times `each` blocks out by one call, each written, and back by one call.
pub(in crate::suite) fn bulks<B: Bulk>(
    case: &'static str,
    each: usize,
    rounds: usize,
    hand: impl Fn() -> B,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut hand = hand();
        let mut slots = vec![None; each];
        let mut work = |rounds| {
            for _ in 0..rounds {
                let got = hand.fill(&mut slots);
                if got != each {
                    return Err(BenchError::Short { asked: each, got });
                }
                for block in black_box(&slots).iter().flatten() {
                    // SAFETY: all slots were empty before `fill` put it there: at first, and after each `free` that
                    // succeeded. So it is out, it has at least 16 bytes, and nobody else knows of it.
                    unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.iova().raw()) };
                }
                hand.free(&mut slots)?;
            }
            Ok(())
        };
        work(WARM / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}
