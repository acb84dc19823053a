//! Single frames and single runs of 2 MiB.

use super::setup::{FRAMES, Parts, WRITTEN};
use crate::baseline::buddy::{self, Offset};
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{
    AtOffset, Baseline, Handle, Huge, OUTSTANDING, PAIRS_2T, Rng, Written, alloc_all, free_all,
    owners_run, pairs_2t_run, pairs_run, random_run, slots,
};
use pinfold_core::frame::Frame;

/// Returns the offsets of all frames in the order that puts the lowest on top of a stack.
fn frames(count: u32, bytes: u64) -> impl Iterator<Item = Offset> {
    (0..u64::from(count)).rev().map(move |i| i * bytes)
}

pub(super) fn pairs(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, memory } = *parts;
    let times = harness.scale(1_000_000);
    let stack = Lifo::new(frames(WRITTEN, Frame::BYTES));
    let stack = &stack;
    let list = || Baseline(ThreadList::new(stack, 64));
    let (one, bare, two) = ("pair-4k", "pair-4k-nowrite", "pair-4k-2t");
    // One thread and two are interleaved, so that their ratio holds.
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            pairs_run(one, times, || Written(AtOffset(zone.local(), memory))),
        ),
        Subject::countable(
            "pinfold-shared",
            pairs_run(one, times, || Written(AtOffset(zone, memory))),
        ),
        Subject::new(
            "single",
            pairs_run(one, times, || Written(AtOffset(Baseline(buddy.owner()), memory))),
        ),
        Subject::new("lifo", pairs_run(one, times, || Written(AtOffset(Baseline(stack), memory)))),
        Subject::new("thread-list", pairs_run(one, times, || Written(AtOffset(list(), memory)))),
        Subject::countable("pinfold", pairs_run(bare, times, || zone.local())),
        Subject::countable("pinfold-shared", pairs_run(bare, times, || zone)),
        Subject::new("single", pairs_run(bare, times, || Baseline(buddy.owner()))),
        Subject::new("lifo", pairs_run(bare, times, || Baseline(stack))),
        Subject::new("thread-list", pairs_run(bare, times, list)),
        Subject::countable(
            "pinfold",
            pairs_2t_run(two, PAIRS_2T, || Written(AtOffset(zone.local(), memory))),
        ),
        Subject::countable(
            "pinfold-shared",
            pairs_2t_run(two, PAIRS_2T, || Written(AtOffset(zone, memory))),
        ),
        Subject::new(
            "single",
            pairs_2t_run(two, PAIRS_2T, || Written(AtOffset(Baseline(buddy.owner()), memory))),
        ),
        Subject::new(
            "lifo",
            pairs_2t_run(two, PAIRS_2T, || Written(AtOffset(Baseline(stack), memory))),
        ),
        Subject::new(
            "thread-list",
            pairs_2t_run(two, PAIRS_2T, || Written(AtOffset(list(), memory))),
        ),
    ])
}

/// Many owners of the zone.
pub(super) fn owners(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    const CASE: &str = "owners-64";
    let Parts { zone, buddy, .. } = *parts;
    harness.interleave(vec![
        Subject::countable("pinfold", owners_run(CASE, || zone.local())),
        Subject::countable("pinfold-shared", owners_run(CASE, || zone)),
        Subject::new("single", owners_run(CASE, || Baseline(buddy.owner()))),
    ])
}

/// Allocates and frees one run of 2 MiB.
pub(super) fn huge_pairs(
    harness: &Harness<'_>,
    parts: &Parts<'_>,
) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, memory } = *parts;
    let times = harness.scale(250_000);
    let stack = Lifo::new(frames(WRITTEN / 512, 512 * Frame::BYTES));
    let stack = &stack;
    let single = || Baseline(buddy::Huge(buddy.owner()));
    let list = || Baseline(ThreadList::new(stack, 8));
    let (case, bare) = ("pair-2m", "pair-2m-nowrite");
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            pairs_run(case, times, || Written(AtOffset(Huge(zone.local()), memory))),
        ),
        Subject::countable(
            "pinfold-shared",
            pairs_run(case, times, || Written(AtOffset(Huge(zone), memory))),
        ),
        Subject::new("single", pairs_run(case, times, || Written(AtOffset(single(), memory)))),
        Subject::new("lifo", pairs_run(case, times, || Written(AtOffset(Baseline(stack), memory)))),
        Subject::new("thread-list", pairs_run(case, times, || Written(AtOffset(list(), memory)))),
        Subject::countable("pinfold", pairs_run(bare, times, || Huge(zone.local()))),
        Subject::countable("pinfold-shared", pairs_run(bare, times, || Huge(zone))),
        Subject::new("single", pairs_run(bare, times, single)),
        Subject::new("lifo", pairs_run(bare, times, || Baseline(stack))),
        Subject::new("thread-list", pairs_run(bare, times, list)),
    ])
}

/// Whether frames are freed in random order, or as they were allocated.
type AtRandom = bool;

/// Allocates all frames of the zone, or a quarter of them, and frees them in order, or in random
/// order.
pub(super) fn frees(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = free(harness, parts, ("free-all", false), FRAMES)?;
    records.extend(free(harness, parts, ("random-free-all", true), FRAMES)?);
    records.extend(free(harness, parts, ("random-free", true), FRAMES / 4)?);
    Ok(records)
}

fn free(
    harness: &Harness<'_>,
    parts: &Parts<'_>,
    case: (&'static str, AtRandom),
    count: u32,
) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, .. } = *parts;
    let count = harness.scale(count as usize);
    let (stack, lists) =
        (Lifo::new(frames(FRAMES, Frame::BYTES)), Lifo::new(frames(FRAMES, Frame::BYTES)));
    let (stack, lists) = (&stack, &lists);
    harness.interleave(vec![
        Subject::countable("pinfold", freed(case, count, || zone.local())),
        Subject::countable("pinfold-shared", freed(case, count, || zone)),
        Subject::new("single", freed(case, count, || Baseline(buddy.owner()))),
        Subject::new("lifo", freed(case, count, || Baseline(stack))),
        Subject::new(
            "thread-list",
            freed(case, count, || Baseline(ThreadList::new(lists, FRAMES as usize))),
        ),
    ])
}

fn freed<H: Handle>(
    (case, at_random): (&'static str, AtRandom),
    frames: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut handle, mut held) = (handle(), slots(frames));
        alloc_all(&mut handle, &mut held)?;
        if at_random {
            Rng::new().shuffle(&mut held);
        }
        out.cost(case, free_all(&mut handle, held)?, frames);
        Ok(())
    }
}

/// Frees 4,096 frames at random.
pub(super) fn scatter(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, .. } = *parts;
    let (case, rounds) = ("random-4096", harness.scale(256));
    let stacks = [(); 2].map(|()| Lifo::new(frames(WRITTEN, Frame::BYTES)));
    let [stack, lists] = &stacks;
    harness.interleave(vec![
        Subject::countable("pinfold", random_run(case, rounds, || zone.local())),
        Subject::countable("pinfold-shared", random_run(case, rounds, || zone)),
        Subject::new("single", random_run(case, rounds, || Baseline(buddy.owner()))),
        Subject::new("lifo", random_run(case, rounds, || Baseline(stack))),
        Subject::new(
            "thread-list",
            random_run(case, rounds, || Baseline(ThreadList::new(lists, OUTSTANDING))),
        ),
    ])
}
