//! What is timed: pairs, many out and back, and so on.

use super::{BenchError, Hand};
use crate::harness::{Cost, Counts, Samples};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Instant;

/// One out and back again, so many times: the hot path and nothing else.
#[inline(always)]
pub(in crate::suite) fn pairs<H: Hand>(hand: &mut H, times: usize) -> Result<Cost, BenchError> {
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

/// How many pairs each subject makes before the clock runs, in every run.
pub(in crate::suite) const WARM: usize = 4096;

/// Empty slots, whose memory has been touched: the loops do not pay for it.
pub(in crate::suite) fn slots<T>(count: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

/// One for each slot.
#[inline(always)]
pub(in crate::suite) fn take_all<H: Hand>(
    hand: &mut H,
    held: &mut [Option<H::Thing>],
) -> Result<Cost, BenchError> {
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
pub(in crate::suite) fn give_all<H: Hand>(
    hand: &mut H,
    mut held: Vec<Option<H::Thing>>,
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for thing in held.drain(..).flatten() {
            hand.put(thing)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Numbers that look random and are the same every time (xorshift, Marsaglia 2003).
pub(in crate::suite) struct Rng(u64);

impl Rng {
    pub(in crate::suite) fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// A number below `limit`, which is not 0.
    pub(in crate::suite) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 32) % limit.max(1) as u64).unwrap_or(0)
    }

    pub(in crate::suite) fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            things.swap(last, self.below(last + 1));
        }
    }
}

/// How many pairs each of two threads makes: fewer would be over before both run.
pub(in crate::suite) const TWO: usize = 2_000_000;

/// Starts a second thread.
///
/// # Errors
/// [`BenchError::NoThread`], where `Scope::spawn` would panic: a limit of the user's or of a control group.
pub(in crate::suite) fn beside<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, BenchError> {
    Builder::new().spawn_scoped(scope, work).map_err(BenchError::NoThread)
}

/// [`pairs`] by two threads at the same time, each with a hand of its own. The time runs from the first start to the
/// last end.
pub(in crate::suite) fn pairs_by_two<H: Hand>(
    hand: impl Fn() -> H + Sync,
    times_each: usize,
) -> Result<Cost, BenchError> {
    // Spun on, not slept on: a run is shorter than waking up may take.
    let ready = AtomicUsize::new(0);
    let work = || -> Result<(Instant, Instant, Counts), BenchError> {
        let mut hand = hand();
        let warm = pairs(&mut hand, WARM);
        // Both must reach the barrier, whatever has become of one.
        ready.fetch_add(1, Ordering::AcqRel);
        while ready.load(Ordering::Acquire) < 2 {
            std::hint::spin_loop();
        }
        let from = Instant::now();
        let cost = warm.and_then(|_| pairs(&mut hand, times_each))?;
        Ok((from, Instant::now(), cost.counts))
    };
    let (one, other) = std::thread::scope(|scope| {
        let other = beside(scope, work)?;
        Ok::<_, BenchError>((work(), other.join().unwrap_or(Err(BenchError::Thread))))
    })?;
    let ((from_a, to_a, counts_a), (from_b, to_b, counts_b)) = (one?, other?);
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns, 52 days")]
    let ns = to_a.max(to_b).duration_since(from_a.min(from_b)).as_nanos() as f64;
    Ok(Cost { ns, counts: counts_a + counts_b })
}

/// A run of [`pairs`].
pub(in crate::suite) fn alone<H: Hand>(
    case: &'static str,
    times: usize,
    hand: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut hand = hand();
        pairs(&mut hand, WARM)?;
        out.cost(case, pairs(&mut hand, times)?, times);
        Ok(())
    }
}

/// A run of [`pairs_by_two`].
pub(in crate::suite) fn together<H: Hand>(
    case: &'static str,
    times: usize,
    hand: impl Fn() -> H + Sync,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        out.cost(case, pairs_by_two(&hand, times)?, 2 * times);
        Ok(())
    }
}

/// So many out and all of them back in a random order, over and over; an operation is one out and back.
#[inline(always)]
fn scatter<H: Hand>(
    hand: &mut H,
    held: &mut [Option<H::Thing>],
    order: &[usize],
    rounds: usize,
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..rounds {
            for slot in &mut *held {
                *slot = Some(hand.get()?);
            }
            for &at in order {
                if let Some(thing) = held.get_mut(at).and_then(Option::take) {
                    black_box(H::number(&thing));
                    hand.put(thing)?;
                }
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// How many things [`scattered`] has out.
pub(in crate::suite) const OUT: usize = 4096;

/// A run of [`scatter`]: 4,096 things out, freed at random. Each subject has the same order.
pub(in crate::suite) fn scattered<H: Hand>(
    case: &'static str,
    rounds: usize,
    hand: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut hand, mut held) = (hand(), slots(OUT));
        let mut order: Vec<usize> = (0..OUT).collect();
        Rng::new().shuffle(&mut order);
        scatter(&mut hand, &mut held, &order, 2)?;
        out.cost(case, scatter(&mut hand, &mut held, &order, rounds)?, rounds * OUT);
        Ok(())
    }
}
