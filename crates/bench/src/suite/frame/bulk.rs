//! Many frames by one call, and many runs of 2 MiB at a time.

use super::setup::Parts;
use crate::baseline::buddy::{Buddy, Offset};
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold_core::frame::{Frame, Order, Zone};
use std::hint::black_box;

/// How many frames are allocated before they are freed.
const OUTSTANDING: usize = 8192;
/// How many runs of 2 MiB are allocated at a time.
const RUNS: usize = 128;

pub(super) fn fills(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = fill(harness, parts, "fill-64", 64)?;
    records.extend(fill(harness, parts, "fill-512", 512)?);
    Ok(records)
}

fn fill(
    harness: &Harness<'_>,
    parts: &Parts<'_>,
    case: &'static str,
    each: usize,
) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, .. } = *parts;
    let of = (case, harness.scale(64), each);
    let (mut local, mut for_list) = (zone.local(), zone.local());
    let (mut owner, stacks) = (buddy.owner(), [(); 2].map(|()| stack()));
    let [stack, lists] = &stacks;
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            waves(
                out,
                of,
                &mut local,
                |local, slots| local.fill(slots),
                |local, slots| Ok(local.free_bulk(slots).map(drop)?),
            )
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            waves(
                out,
                of,
                zone,
                |zone, slots| zone.fill(slots),
                |zone, slots| Ok(zone.free_bulk(slots).map(drop)?),
            )
        }),
        Subject::countable("list", move |out: &mut Samples| {
            waves(
                out,
                of,
                &mut for_list,
                |local, slots| {
                    let mut list = local.take_list(slots.len());
                    slots.fill_with(|| list.next());
                    slots.iter().flatten().count()
                },
                |local, slots| Ok(local.free_bulk(slots).map(drop)?),
            )
        }),
        Subject::new("single", move |out: &mut Samples| {
            let mut slots = vec![0; OUTSTANDING];
            let mut pass = || {
                slots
                    .iter_mut()
                    .try_for_each(|slot| owner.alloc_page().map(|page| *slot = page))?;
                black_box(&slots).iter().for_each(|page| owner.free_page(*page));
                Ok(())
            };
            timed(out, of, &mut pass)
        }),
        Subject::new("lifo", move |out: &mut Samples| {
            let (mut held, mut some) = (Vec::with_capacity(OUTSTANDING), Vec::with_capacity(each));
            timed(out, of, &mut || {
                (0..OUTSTANDING / each).for_each(|_| stack.alloc_many(each, &mut held));
                expect_all(black_box(&held).len())?;
                while !held.is_empty() {
                    some.extend(held.drain(held.len() - each..));
                    stack.free_many(&mut some);
                }
                Ok(())
            })
        }),
        Subject::new("thread-list", move |out: &mut Samples| {
            let (mut held, mut some) = (Vec::with_capacity(OUTSTANDING), Vec::with_capacity(each));
            let mut list = ThreadList::new(lists, OUTSTANDING);
            timed(out, of, &mut || {
                (0..OUTSTANDING / each).for_each(|_| list.alloc_many(each, &mut held));
                expect_all(black_box(&held).len())?;
                while !held.is_empty() {
                    some.extend(held.drain(held.len() - each..));
                    list.free_many(&mut some);
                }
                Ok(())
            })
        }),
    ])
}

fn stack() -> Lifo<Offset> {
    Lifo::new((0..OUTSTANDING as u64).rev().map(|i| i * Frame::BYTES))
}

fn expect_all(got: usize) -> Result<(), BenchError> {
    if got == OUTSTANDING { Ok(()) } else { Err(BenchError::Short { asked: OUTSTANDING, got }) }
}

/// A case, its number of passes, and how many frames one call allocates.
type BulkCase = (&'static str, usize, usize);

/// Runs one pass that does not count and then the counted ones; each allocates and frees all frames
/// once.
#[inline(always)]
fn timed(
    out: &mut Samples,
    (case, passes, _): BulkCase,
    pass: &mut impl FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    pass()?;
    let (cost, result) = Cost::of(|| (0..passes).try_for_each(|_| pass()));
    out.cost(case, cost, passes * OUTSTANDING);
    result
}

/// Measures frames of a zone, allocated and freed by calls for as many as the case says.
#[inline(always)]
fn waves<L>(
    out: &mut Samples,
    of: BulkCase,
    mut local: L,
    mut fill: impl FnMut(&mut L, &mut [Option<Frame>]) -> usize,
    mut free: impl FnMut(&mut L, &mut [Option<Frame>]) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut slots = vec![None; OUTSTANDING];
    timed(out, of, &mut || {
        expect_all(
            slots.chunks_exact_mut(of.2).map(|some| fill(&mut local, black_box(some))).sum(),
        )?;
        slots.chunks_exact_mut(of.2).rev().try_for_each(|some| free(&mut local, some))
    })
}

pub(super) fn huge(
    harness: &Harness<'_>,
    zone: &Zone,
    buddy: &Buddy,
) -> Result<Vec<Record>, BenchError> {
    let passes = harness.scale(256);
    let (mut local, mut owner) = (zone.local(), buddy.owner());
    let case = "alloc-2m";
    let runs = || Vec::with_capacity(RUNS);
    let (mut of_local, mut of_zone, mut of_single) = (runs(), runs(), Vec::with_capacity(RUNS));
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    of_local.push(local.alloc(Order::HUGE)?);
                }
                of_local.drain(..).try_for_each(|run| Ok(local.free(run, Order::HUGE)?))
            })
        }),
        Subject::countable("pinfold-shared", move |out: &mut Samples| {
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    of_zone.push(zone.alloc(Order::HUGE)?);
                }
                of_zone.drain(..).try_for_each(|run| Ok(zone.free(run, Order::HUGE)?))
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            runs_of(out, case, passes, || {
                for _ in 0..RUNS {
                    of_single.push(owner.alloc_huge()?);
                }
                of_single.drain(..).for_each(|run| owner.free_huge(run));
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
    pass()?;
    let (cost, result) = Cost::of(|| (0..passes).try_for_each(|_| pass()));
    out.cost(case, cost, passes * RUNS);
    result
}
