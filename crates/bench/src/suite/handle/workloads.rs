//! The timed loops: pairs, batches of many, and frees in random order.

use super::api::{Handle, Object};
use crate::error::BenchError;
use crate::harness::{Cost, Counts, Samples};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Instant;

/// How many pairs each subject makes before the clock starts, in every run.
pub(in crate::suite) const WARM_UP: usize = 4096;

/// How many objects [`random_run`] has allocated at a time.
pub(in crate::suite) const OUTSTANDING: usize = 4096;

/// How many pairs each of two threads makes: enough that both run at the same time.
pub(in crate::suite) const PAIRS_2T: usize = 2_000_000;

/// Allocates and frees one object, `times` times.
#[inline(always)]
pub(in crate::suite) fn pairs<H: Handle>(handle: &mut H, times: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..times {
            let object = handle.alloc()?;
            black_box(object.address());
            handle.free(object)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns empty slots whose memory has been touched, so the loops do not pay for it.
pub(in crate::suite) fn slots<T>(count: usize) -> Vec<Option<T>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

/// Allocates an object for each slot.
#[inline(always)]
pub(in crate::suite) fn alloc_all<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for slot in held {
            *slot = Some(handle.alloc()?);
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Frees all objects, in the order of the slots.
#[inline(always)]
pub(in crate::suite) fn free_all<H: Handle>(
    handle: &mut H,
    mut held: Vec<Option<H::Object>>,
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for object in held.drain(..).flatten() {
            handle.free(object)?;
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// A generator of the same pseudo-random numbers in every run (xorshift, Marsaglia 2003).
pub(in crate::suite) struct Rng(u64);

impl Rng {
    pub(in crate::suite) fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// Returns a number below `limit`, which is not 0.
    pub(in crate::suite) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 32) % limit.max(1) as u64).unwrap_or(0)
    }

    pub(in crate::suite) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Starts a second thread.
///
/// # Errors
/// [`BenchError::NoThread`] where `Scope::spawn` would panic: a limit of the user or of a control
/// group.
pub(in crate::suite) fn spawn_second<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, BenchError> {
    Builder::new().spawn_scoped(scope, work).map_err(BenchError::NoThread)
}

/// Runs [`pairs`] on two threads at once, each with a handle of its own. The time is from the first
/// start to the last end.
fn pairs_2t<H: Handle>(
    handle: impl Fn() -> H + Sync,
    times_each: usize,
) -> Result<Cost, BenchError> {
    // The threads spin here instead of sleeping: waking up may take longer than a run.
    let ready = AtomicUsize::new(0);
    let work = || -> Result<(Instant, Instant, Counts), BenchError> {
        let mut handle = handle();
        let warm_up = pairs(&mut handle, WARM_UP);
        // Both threads must pass the barrier, even if the warm-up of one failed.
        ready.fetch_add(1, Ordering::AcqRel);
        while ready.load(Ordering::Acquire) < 2 {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        let cost = warm_up.and_then(|_| pairs(&mut handle, times_each))?;
        Ok((start, Instant::now(), cost.counts))
    };
    let (first, second) = std::thread::scope(|scope| {
        let second = spawn_second(scope, work)?;
        Ok::<_, BenchError>((work(), second.join().unwrap_or(Err(BenchError::Thread))))
    })?;
    let ((start_a, end_a, counts_a), (start_b, end_b, counts_b)) = (first?, second?);
    #[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 ns, 52 days")]
    let ns = end_a.max(end_b).duration_since(start_a.min(start_b)).as_nanos() as f64;
    Ok(Cost { ns, counts: counts_a + counts_b })
}

/// Returns a run of [`pairs`].
pub(in crate::suite) fn pairs_run<H: Handle>(
    case: &'static str,
    times: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut handle = handle();
        pairs(&mut handle, WARM_UP)?;
        out.cost(case, pairs(&mut handle, times)?, times);
        Ok(())
    }
}

/// How many owners take turns, how many objects each allocates in one, and how many turns each has.
const OWNERS: (usize, usize, usize) = (64, 32, 200);

/// Returns a run in which one thread has many handles, which take turns: each frees what it
/// allocated in its last turn, at random, and allocates as many again. What a handle shares with
/// the others is counted the same as if each had a processor.
pub(in crate::suite) fn owners_run<H: Handle>(
    case: &'static str,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (owners, each, turns) = OWNERS;
        let mut rng = Rng::new();
        let mut all: Vec<_> = (0..owners).map(|_| (handle(), Vec::with_capacity(each))).collect();
        let mut turn = |handle: &mut H, held: &mut Vec<H::Object>| {
            rng.shuffle(held);
            handle.free_many(held)?;
            for _ in 0..each {
                held.push(handle.alloc()?);
            }
            Ok(())
        };
        all.iter_mut().try_for_each(|(handle, held)| turn(handle, held))?;
        let (cost, result) = Cost::of(|| {
            (0..turns)
                .try_for_each(|_| all.iter_mut().try_for_each(|(handle, held)| turn(handle, held)))
        });
        out.cost(case, cost, owners * each * turns);
        all.iter_mut().try_for_each(|(handle, held)| handle.free_many(held))?;
        result
    }
}

/// Returns a run of [`pairs_2t`].
pub(in crate::suite) fn pairs_2t_run<H: Handle>(
    case: &'static str,
    times: usize,
    handle: impl Fn() -> H + Sync,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        out.cost(case, pairs_2t(&handle, times)?, 2 * times);
        Ok(())
    }
}

/// Allocates an object for each slot and frees them in `order`, `rounds` times.
#[inline(always)]
fn random<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
    order: &[usize],
    rounds: usize,
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..rounds {
            for slot in &mut *held {
                *slot = Some(handle.alloc()?);
            }
            for &at in order {
                if let Some(object) = held.get_mut(at).and_then(Option::take) {
                    black_box(object.address());
                    handle.free(object)?;
                }
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns a run that frees [`OUTSTANDING`] objects in random order, the same order for every
/// subject.
pub(in crate::suite) fn random_run<H: Handle>(
    case: &'static str,
    rounds: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut handle, mut held) = (handle(), slots(OUTSTANDING));
        let mut order: Vec<usize> = (0..OUTSTANDING).collect();
        Rng::new().shuffle(&mut order);
        random(&mut handle, &mut held, &order, 2)?;
        out.cost(case, random(&mut handle, &mut held, &order, rounds)?, rounds * OUTSTANDING);
        Ok(())
    }
}

/// Returns a run that, with [`OUTSTANDING`] objects allocated, frees one at random and allocates
/// another, `times` times.
pub(in crate::suite) fn replace_run<H: Handle>(
    case: &'static str,
    times: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let mut random = Rng::new();
        let order: Vec<usize> = (0..times).map(|_| random.below(OUTSTANDING)).collect();
        replace_in_order(case, OUTSTANDING, &order, handle(), out)
    }
}

/// Returns a run that, with `outstanding` objects allocated, frees the oldest and allocates
/// another, `times` times.
pub(in crate::suite) fn queue_run<H: Handle>(
    case: &'static str,
    outstanding: usize,
    times: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let order: Vec<usize> = (0..outstanding).cycle().take(times).collect();
        replace_in_order(case, outstanding, &order, handle(), out)
    }
}

#[inline(always)]
fn replace_in_order<H: Handle>(
    case: &'static str,
    outstanding: usize,
    order: &[usize],
    mut handle: H,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let mut held = slots(outstanding);
    alloc_all(&mut handle, &mut held)?;
    replace(&mut handle, &mut held, order.get(..WARM_UP).unwrap_or_default())?;
    out.cost(case, replace(&mut handle, &mut held, order)?, order.len());
    held.into_iter().flatten().try_for_each(|object| handle.free(object))
}

/// Frees the object of each slot that `order` names, and allocates another for it.
#[inline(always)]
fn replace<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
    order: &[usize],
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for &at in order {
            if let Some(slot) = held.get_mut(at) {
                slot.take().map_or(Ok(()), |object| handle.free(object))?;
                let object = handle.alloc()?;
                black_box(object.address());
                *slot = Some(object);
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}
