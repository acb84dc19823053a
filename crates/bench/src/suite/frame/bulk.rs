//! Many frames in one call, and many at once.

use super::BenchError;
use crate::baseline::Offset;
use crate::baseline::buddy::Buddy;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold_core::frame::{Frame, Order, Zone};
use std::hint::black_box;

/// How many frames are out when they go back, which is not timed.
const OUT: usize = 8192;
/// How many runs of 2 MiB are out at a time.
const RUNS: usize = 128;

pub(super) fn fills(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let mut records = fill(harness, zone, buddy, "fill-64", 64)?;
    records.extend(fill(harness, zone, buddy, "fill-512", 512)?);
    Ok(records)
}

fn fill(
    harness: &Harness<'_>,
    zone: &Zone,
    buddy: &Buddy,
    case: &'static str,
    each: usize,
) -> Result<Vec<Record>, BenchError> {
    let passes = harness.scale(64);
    let (mut local, mut for_list) = (zone.local(), zone.local());
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            of_zone(out, case, passes, each, zone, |slots| local.fill(slots))
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            of_zone(out, case, passes, each, zone, |slots| zone.fill(slots))
        }),
        Subject::countable("list", move |out: &mut Samples| {
            of_zone(out, case, passes, each, zone, |slots| {
                let mut list = for_list.take_list(slots.len());
                slots.fill_with(|| list.next());
                slots.len()
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            // Not 0, which would be memory that nobody has touched yet.
            let mut slots = vec![Offset::MAX; OUT];
            let mut total = Cost::default();
            for _ in 0..passes {
                let (cost, result) = Cost::of(|| {
                    slots.iter_mut().try_for_each(|slot| buddy.alloc_page().map(|page| *slot = page))
                });
                result?;
                total = total + cost;
                slots.iter().for_each(|page| buddy.free_page(*page));
            }
            out.cost(case, total, passes * OUT);
            Ok(())
        }),
    ])
}

#[inline(always)]
fn of_zone(
    out: &mut Samples,
    case: &'static str,
    passes: usize,
    each: usize,
    zone: &Zone,
    mut fill: impl FnMut(&mut [Option<Frame>]) -> usize,
) -> Result<(), BenchError> {
    let mut slots = vec![None; OUT];
    let mut total = Cost::default();
    for _ in 0..passes {
        let (cost, got) =
            Cost::of(|| slots.chunks_exact_mut(each).map(|some| fill(black_box(some))).sum::<usize>());
        if got != OUT {
            return Err(BenchError::Short { asked: OUT, got });
        }
        total = total + cost;
        zone.free_bulk(&mut slots)?;
    }
    out.cost(case, total, passes * OUT);
    Ok(())
}

pub(super) fn huge(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let passes = harness.scale(256);
    let mut local = zone.local();
    let case = "alloc-2m";
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            let mut runs = Vec::with_capacity(RUNS);
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    runs.push(local.alloc(Order::HUGE)?);
                }
                runs.drain(..).try_for_each(|run| Ok(local.free(run, Order::HUGE)?))
            })
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            let mut runs = Vec::with_capacity(RUNS);
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    runs.push(zone.alloc(Order::HUGE)?);
                }
                runs.drain(..).try_for_each(|run| Ok(zone.free(run, Order::HUGE)?))
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            let mut runs = Vec::with_capacity(RUNS);
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    runs.push(buddy.alloc_run(Order::HUGE.get())?);
                }
                runs.drain(..).for_each(|run| buddy.free_run(run, Order::HUGE.get()));
                Ok(())
            })
        }),
    ])
}

#[inline(always)]
fn runs_of(
    out: &mut Samples,
    case: &'static str,
    passes: usize,
    mut pass: impl FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (cost, result) = Cost::of(|| (0..passes).try_for_each(|_| pass()));
    out.cost(case, cost, passes * RUNS);
    result
}
