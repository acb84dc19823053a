//! The suite `frame`: page frames beside the page allocator of a kernel.

use super::Entry;
use super::handle::{BaselineFrames, Frames, Rng, random_run};
use crate::baseline::buddy::{Buddy, Offset};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold_core::frame::{Frame, Order, Zone};
use std::cell::RefCell;
use std::hint::black_box;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("fill-64", "allocate and free a frame, 64 by one call, 8,192 allocated at a time"),
    ("fill-512", "the same, 512 by one call"),
    ("runs-2m", "allocate and free a run of 2 MiB, 128 allocated at a time"),
    ("random-4096", "allocate and free a frame, 4,096 allocated at a time and freed at random"),
    ("rpc-259", "one call in a server's receive loop: refill 1 to 259 missing pages of 259"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "a ZoneLocal: fill, which fills the empty slots of an array; else alloc"),
    ("list", "a ZoneLocal: take_list, a chain from which the slots are filled"),
    (
        "single",
        "the page allocator of a kernel, one call per page: buddy lists behind owners' lists",
    ),
];

/// The number of frames of each subject: 1 GiB.
const FRAMES: u32 = 1 << 18;
/// The number of frames allocated before they are freed.
const OUTSTANDING: usize = 8192;
/// The number of runs of 2 MiB allocated at a time.
const RUNS: usize = 128;
/// The number of pages in a request of `rpc-259`.
const PAGES: usize = 259;
/// The number of requests that take turns, so that one clock reading covers as many calls.
const REQUESTS: usize = 16;

type Outcome = Result<(), BenchError>;

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (zone, buddy) = (&Zone::new(FRAMES)?, &Buddy::new(FRAMES));
    let mut records = Vec::new();
    for (case, each) in [("fill-64", 64), ("fill-512", 512)] {
        records.extend(harness.cases(&[case], || fill(harness, (case, each), zone, buddy))?);
    }
    records.extend(harness.cases(&["runs-2m"], || runs(harness, zone, buddy))?);
    let (case, rounds) = ("random-4096", harness.scale(256));
    records.extend(harness.cases(&[case], || {
        harness.interleave(vec![
            Subject::countable("pinfold", random_run(case, 4096, rounds, || Frames(zone.local()))),
            Subject::new(
                "single",
                random_run(case, 4096, rounds, || BaselineFrames(buddy.owner())),
            ),
        ])
    })?);
    records.extend(harness.cases(&["rpc-259"], || rpc(harness, zone, buddy))?);
    Ok(records)
}

fn expect(asked: usize, got: usize) -> Outcome {
    if got == asked { Ok(()) } else { Err(BenchError::Short { asked, got }) }
}

/// Records `passes` calls of `pass`, after one that does not count. Each is `operations`.
#[inline(always)]
fn timed(
    out: &mut Samples,
    case: &'static str,
    (passes, operations): (usize, usize),
    mut pass: impl FnMut() -> Outcome,
) -> Outcome {
    pass()?;
    let (cost, result) = Cost::of(|| (0..passes).try_for_each(|_| pass()));
    out.cost(case, cost, passes * operations);
    result
}

/// Fills the empty slots from a list, which one call allocates.
#[inline(always)]
fn fill_from_list(local: &mut pinfold_core::frame::ZoneLocal, slots: &mut [Option<Frame>]) {
    let holes = slots.iter().filter(|slot| slot.is_none()).count();
    let mut list = local.take_list(holes);
    slots.iter_mut().filter(|slot| slot.is_none()).for_each(|slot| *slot = list.next());
}

/// Allocates and frees frames by calls for `each` of them.
fn fill(
    harness: &Harness<'_>,
    (case, each): (&'static str, usize),
    zone: &Zone,
    buddy: &Buddy,
) -> Result<Vec<Record>, BenchError> {
    let of = (harness.scale(64), OUTSTANDING);
    let (mut array, mut list, mut owner) = (zone.local(), zone.local(), buddy.owner());
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            let mut slots = vec![None; OUTSTANDING];
            timed(out, case, of, || {
                let got = slots.chunks_exact_mut(each).map(|some| array.fill(black_box(some)));
                expect(OUTSTANDING, got.sum())?;
                let mut all = slots.chunks_exact_mut(each).rev();
                all.try_for_each(|some| Ok(array.free_bulk(some).map(drop)?))
            })
        }),
        Subject::countable("list", move |out: &mut Samples| {
            let mut slots = vec![None; OUTSTANDING];
            timed(out, case, of, || {
                slots.chunks_exact_mut(each).for_each(|some| fill_from_list(&mut list, some));
                expect(OUTSTANDING, slots.iter().flatten().count())?;
                let mut all = slots.chunks_exact_mut(each).rev();
                all.try_for_each(|some| Ok(list.free_bulk(some).map(drop)?))
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            let mut slots = vec![0; OUTSTANDING];
            timed(out, case, of, || {
                slots
                    .iter_mut()
                    .try_for_each(|slot| owner.alloc_page().map(|page| *slot = page))?;
                black_box(&slots).iter().for_each(|page| owner.free_page(*page));
                Ok(())
            })
        }),
    ])
}

/// Allocates and frees runs of 2 MiB.
fn runs(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let of = (harness.scale(256), RUNS);
    let (mut local, mut owner) = (zone.local(), buddy.owner());
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            let mut held = Vec::with_capacity(RUNS);
            timed(out, "runs-2m", of, || {
                for _ in 0..RUNS {
                    held.push(local.alloc(Order::HUGE)?);
                }
                held.drain(..).try_for_each(|run| Ok(local.free(run, Order::HUGE)?))
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            let mut held = Vec::with_capacity(RUNS);
            timed(out, "runs-2m", of, || {
                for _ in 0..RUNS {
                    held.push(owner.alloc_huge()?);
                }
                held.drain(..).for_each(|run| owner.free_huge(run));
                Ok(())
            })
        }),
    ])
}

/// A request's pages.
type Slots<T> = [Option<T>; PAGES];

/// Measures the receive loop of an RPC server. A request needs 259 pages; serving it consumes some
/// of them, and they are refilled before the next one. Only the refill is timed. How many pages
/// each consumed, from 1 to all, and which, is the same for every subject. Consumed pages are freed
/// outside the timed part: to the zone, as the network side would; to the owner's own list in
/// `single`, which saves it refills, the most favourable case for it.
fn rpc(harness: &Harness<'_>, zone: &Zone, buddy: &Buddy) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(1_000);
    let free = |slot: &mut Option<Frame>| match slot.take() {
        Some(frame) => Ok(zone.free(frame, Order::PAGE)?),
        None => Ok(()),
    };
    let owner = &RefCell::new(buddy.owner());
    let free_page = |slot: &mut Option<Offset>| {
        slot.take().into_iter().for_each(|page| owner.borrow_mut().free_page(page));
        Ok(())
    };
    let (mut list, mut array) = (zone.local(), zone.local());
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| expect(PAGES, array.fill(slots)))
        }),
        Subject::countable("list", move |out: &mut Samples| {
            serve(out, rounds, free, |slots| {
                fill_from_list(&mut list, slots);
                Ok(())
            })
        }),
        Subject::new("single", move |out: &mut Samples| {
            serve(out, rounds, free_page, |slots| {
                let mut owner = owner.borrow_mut();
                slots.iter_mut().filter(|slot| slot.is_none()).try_for_each(|slot| {
                    *slot = Some(owner.alloc_page()?);
                    Ok(())
                })
            })
        }),
    ])
}

#[inline(always)]
fn serve<T: Copy>(
    out: &mut Samples,
    rounds: usize,
    mut free: impl FnMut(&mut Option<T>) -> Outcome,
    mut refill: impl FnMut(&mut Slots<T>) -> Outcome,
) -> Outcome {
    let mut requests = vec![[None; PAGES]; REQUESTS];
    let (mut rng, mut total) = (Rng::new(), Cost::default());
    for _ in 0..rounds {
        let (cost, result) = Cost::of(|| requests.iter_mut().try_for_each(&mut refill));
        result?;
        total = total + cost;
        for slots in &mut requests {
            // The pages of a request are consumed in ring order from a random one, as a stream of
            // data fills them.
            let (first, consumed) = (rng.below(PAGES), 1 + rng.below(PAGES));
            let (after, before) = slots.split_at_mut(first);
            before.iter_mut().chain(after).take(consumed).try_for_each(&mut free)?;
        }
    }
    requests.iter_mut().flatten().try_for_each(&mut free)?;
    out.cost("rpc-259", total, rounds * REQUESTS);
    Ok(())
}
