//! What all suites do with a subject: take and give back, one at a time.
//!
//! The loops are generic, so that each subject's calls are inlined into a loop of its own; what is handed out is kept
//! from the optimiser by the number that a device would be told, which adds one store.

use super::BenchError;
use crate::baseline::malloc::Malloced;
use crate::baseline::{Blocks, Offset};
use crate::harness::{Cost, Samples};
use pinfold::Arena;
use pinfold_core::dma_pool::{self, Block, DmaPool, RawBlock};
use pinfold_core::frame::{self, Frame, Zone};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A pool as the suites make it.
pub(super) type Pool<'a> = DmaPool<&'a Arena>;

/// One owner's way to what hands out and takes back.
pub(super) trait Hand {
    /// What is handed out.
    type Thing;
    /// One.
    fn get(&mut self) -> Result<Self::Thing, BenchError>;
    /// Takes one back.
    fn put(&mut self, thing: Self::Thing) -> Result<(), BenchError>;
    /// What a device would be told.
    fn number(thing: &Self::Thing) -> u64;
}

/// A pool's `Local`, raw blocks.
pub(super) struct Raw<'p, 'a>(pub(super) dma_pool::Local<'p, &'a Arena>);

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

/// A pool's `Local`, blocks that free themselves.
pub(super) struct Safe<'p, 'a>(pub(super) dma_pool::Local<'p, &'a Arena>);

impl<'p, 'a> Hand for Safe<'p, 'a> {
    type Thing = Block<'p, &'a Arena>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, block: Self::Thing) -> Result<(), BenchError> {
        self.0.free(block);
        Ok(())
    }
    #[inline(always)]
    fn number(block: &Self::Thing) -> u64 {
        block.iova().raw()
    }
}

/// The pool itself, raw blocks, under its lock.
pub(super) struct Unowned<'p, 'a>(pub(super) &'p Pool<'a>);

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

/// A baseline.
pub(super) struct Baseline<B>(pub(super) B);

impl<B: Blocks> Hand for Baseline<B> {
    type Thing = Offset;
    #[inline(always)]
    fn get(&mut self) -> Result<Offset, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, block: Offset) -> Result<(), BenchError> {
        Ok(self.0.free(block)?)
    }
    #[inline(always)]
    fn number(block: &Offset) -> u64 {
        *block
    }
}

/// The process's allocator.
pub(super) struct Malloc<const N: usize>;

impl<const N: usize> Hand for Malloc<N> {
    type Thing = Malloced<N>;
    #[inline(always)]
    fn get(&mut self) -> Result<Malloced<N>, BenchError> {
        Ok(Malloced::alloc())
    }
    #[inline(always)]
    fn put(&mut self, block: Malloced<N>) -> Result<(), BenchError> {
        drop(block);
        Ok(())
    }
    #[inline(always)]
    fn number(block: &Malloced<N>) -> u64 {
        block.address() as u64
    }
}

impl Hand for frame::Local<'_> {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.alloc(frame::Order::PAGE)?)
    }
    #[inline(always)]
    fn put(&mut self, frame: Frame) -> Result<(), BenchError> {
        Ok(self.free(frame, frame::Order::PAGE)?)
    }
    #[inline(always)]
    fn number(frame: &Frame) -> u64 {
        frame.offset()
    }
}

impl Hand for &Zone {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.alloc(frame::Order::PAGE)?)
    }
    #[inline(always)]
    fn put(&mut self, frame: Frame) -> Result<(), BenchError> {
        Ok(self.free(frame, frame::Order::PAGE)?)
    }
    #[inline(always)]
    fn number(frame: &Frame) -> u64 {
        frame.offset()
    }
}

/// One out and back again, so many times: the hot path and nothing else.
#[inline(always)]
pub(super) fn pairs<H: Hand>(hand: &mut H, times: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..times {
            let thing = hand.get()?;
            black_box(H::number(&thing));
            hand.put(thing)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Empty slots, whose memory has been touched: the loops do not pay for it.
pub(super) fn slots<T>(count: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

/// One for each slot.
#[inline(always)]
pub(super) fn take_all<H: Hand>(hand: &mut H, held: &mut [Option<H::Thing>]) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for slot in held {
            *slot = Some(hand.get()?);
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// All of them back, in the slots' order.
#[inline(always)]
pub(super) fn give_all<H: Hand>(hand: &mut H, mut held: Vec<Option<H::Thing>>) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for thing in held.drain(..).flatten() {
            hand.put(thing)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Numbers that look random and are the same every time (xorshift, Marsaglia 2003).
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// A number below `limit`, which is not 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 32) % limit.max(1) as u64).unwrap_or(0)
    }

    pub(super) fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            things.swap(last, self.below(last + 1));
        }
    }
}

/// How many pairs each of two threads makes: fewer would be over before both run.
pub(super) const TWO: usize = 2_000_000;

/// [`pairs`] by two threads at the same time, each with a hand of its own. The time runs from the first start to the
/// last end.
pub(super) fn pairs_by_two<H: Hand>(
    hand: impl Fn() -> H + Sync,
    times_each: usize,
) -> Result<Cost, BenchError> {
    // Spun on, not slept on: a run is shorter than waking up may take.
    let ready = AtomicUsize::new(0);
    let work = || -> Result<(Instant, Instant, u64), BenchError> {
        let mut hand = hand();
        let warm = pairs(&mut hand, 64);
        // Both must reach the barrier, whatever has become of one.
        ready.fetch_add(1, Ordering::AcqRel);
        while ready.load(Ordering::Acquire) < 2 {
            std::hint::spin_loop();
        }
        let from = Instant::now();
        let cost = warm.and_then(|_| pairs(&mut hand, times_each))?;
        Ok((from, Instant::now(), cost.rmw))
    };
    let (one, other) = std::thread::scope(|scope| {
        let other = scope.spawn(work);
        (work(), other.join().unwrap_or(Err(BenchError::Thread)))
    });
    let ((from_a, to_a, rmw_a), (from_b, to_b, rmw_b)) = (one?, other?);
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns, 52 days")]
    let ns = to_a.max(to_b).duration_since(from_a.min(from_b)).as_nanos() as f64;
    Ok(Cost { ns, rmw: rmw_a + rmw_b })
}

/// A run of [`pairs`].
pub(super) fn alone<H: Hand>(
    case: &'static str,
    times: usize,
    hand: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut hand = hand();
        pairs(&mut hand, 64)?;
        out.cost(case, pairs(&mut hand, times)?, times);
        Ok(())
    }
}

/// A run of [`pairs_by_two`].
pub(super) fn together<H: Hand>(
    case: &'static str,
    times: usize,
    hand: impl Fn() -> H + Sync,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        out.cost(case, pairs_by_two(&hand, times)?, 2 * times);
        Ok(())
    }
}
