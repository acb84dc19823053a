//! One frame at a time, and one run of 2 MiB.

use super::{BenchError, FRAMES, Parts};
use crate::baseline::buddy::{self, Offset};
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::harness::{Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{
    Baseline, Hand, Huge, InMemory, OUT, Rng, TWO, Written, alone, give_all, scattered, slots, take_all,
    together,
};
use pinfold_core::frame::Frame;

/// The places of the frames, the lowest on top of a stack of them.
fn frames(count: u32, bytes: u64) -> impl Iterator<Item = Offset> {
    (0..u64::from(count)).rev().map(move |i| i * bytes)
}

pub(super) fn pairs(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, memory } = *parts;
    let times = harness.scale(1_000_000);
    let stack = Lifo::new(frames(super::WRITTEN, Frame::BYTES));
    let stack = &stack;
    let list = || Baseline(ThreadList::new(stack, 64));
    let (one, bare, two) = ("pair-4k", "pair-4k-nowrite", "pair-4k-2t");
    // One thread and two in turn, so that their ratio holds.
    harness.interleave(vec![
        Subject::countable("pinfold", alone(one, times, || Written(InMemory(zone.local(), memory)))),
        Subject::countable("pinfold-shared", alone(one, times, || Written(InMemory(zone, memory)))),
        Subject::new("single", alone(one, times, || Written(InMemory(Baseline(buddy.owner()), memory)))),
        Subject::new("lifo", alone(one, times, || Written(InMemory(Baseline(stack), memory)))),
        Subject::new("thread-list", alone(one, times, || Written(InMemory(list(), memory)))),
        Subject::countable("pinfold", alone(bare, times, || zone.local())),
        Subject::countable("pinfold-shared", alone(bare, times, || zone)),
        Subject::new("single", alone(bare, times, || Baseline(buddy.owner()))),
        Subject::new("lifo", alone(bare, times, || Baseline(stack))),
        Subject::new("thread-list", alone(bare, times, list)),
        Subject::countable("pinfold", together(two, TWO, || Written(InMemory(zone.local(), memory)))),
        Subject::countable("pinfold-shared", together(two, TWO, || Written(InMemory(zone, memory)))),
        Subject::new("single", together(two, TWO, || Written(InMemory(Baseline(buddy.owner()), memory)))),
        Subject::new("lifo", together(two, TWO, || Written(InMemory(Baseline(stack), memory)))),
        Subject::new("thread-list", together(two, TWO, || Written(InMemory(list(), memory)))),
    ])
}

/// One run of 2 MiB out and back again.
pub(super) fn huge_pairs(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, memory } = *parts;
    let times = harness.scale(250_000);
    let stack = Lifo::new(frames(super::WRITTEN / 512, 512 * Frame::BYTES));
    let stack = &stack;
    let single = || Baseline(buddy::Huge(buddy.owner()));
    let list = || Baseline(ThreadList::new(stack, 8));
    let (case, bare) = ("pair-2m", "pair-2m-nowrite");
    harness.interleave(vec![
        Subject::countable("pinfold", alone(case, times, || Written(InMemory(Huge(zone.local()), memory)))),
        Subject::countable("pinfold-shared", alone(case, times, || Written(InMemory(Huge(zone), memory)))),
        Subject::new("single", alone(case, times, || Written(InMemory(single(), memory)))),
        Subject::new("lifo", alone(case, times, || Written(InMemory(Baseline(stack), memory)))),
        Subject::new("thread-list", alone(case, times, || Written(InMemory(list(), memory)))),
        Subject::countable("pinfold", alone(bare, times, || Huge(zone.local()))),
        Subject::countable("pinfold-shared", alone(bare, times, || Huge(zone))),
        Subject::new("single", alone(bare, times, single)),
        Subject::new("lifo", alone(bare, times, || Baseline(stack))),
        Subject::new("thread-list", alone(bare, times, list)),
    ])
}

/// All frames of the zone out and back again in random order, and a quarter of them.
pub(super) fn random_frees(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = random(harness, parts, "random-free-all", FRAMES)?;
    records.extend(random(harness, parts, "random-free", FRAMES / 4)?);
    Ok(records)
}

fn random(
    harness: &Harness<'_>,
    parts: &Parts<'_>,
    case: &'static str,
    count: u32,
) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, .. } = *parts;
    let count = harness.scale(count as usize);
    let (stack, lists) = (Lifo::new(frames(FRAMES, Frame::BYTES)), Lifo::new(frames(FRAMES, Frame::BYTES)));
    let (stack, lists) = (&stack, &lists);
    harness.interleave(vec![
        Subject::countable("pinfold", shuffled(case, count, || zone.local())),
        Subject::countable("pinfold-shared", shuffled(case, count, || zone)),
        Subject::new("single", shuffled(case, count, || Baseline(buddy.owner()))),
        Subject::new("lifo", shuffled(case, count, || Baseline(stack))),
        Subject::new(
            "thread-list",
            shuffled(case, count, || Baseline(ThreadList::new(lists, FRAMES as usize))),
        ),
    ])
}

fn shuffled<H: Hand>(
    case: &'static str,
    frames: usize,
    hand: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut hand, mut held) = (hand(), slots(frames));
        take_all(&mut hand, &mut held)?;
        Rng::new().shuffle(&mut held);
        out.cost(case, give_all(&mut hand, held)?, frames);
        Ok(())
    }
}

/// 4,096 frames out at a time, freed at random.
pub(super) fn scatter(harness: &Harness<'_>, parts: &Parts<'_>) -> Result<Vec<Record>, BenchError> {
    let Parts { zone, buddy, .. } = *parts;
    let (case, rounds) = ("random-4096", harness.scale(256));
    let stacks = [(); 2].map(|()| Lifo::new(frames(super::WRITTEN, Frame::BYTES)));
    let [stack, lists] = &stacks;
    harness.interleave(vec![
        Subject::countable("pinfold", scattered(case, rounds, || zone.local())),
        Subject::countable("pinfold-shared", scattered(case, rounds, || zone)),
        Subject::new("single", scattered(case, rounds, || Baseline(buddy.owner()))),
        Subject::new("lifo", scattered(case, rounds, || Baseline(stack))),
        Subject::new("thread-list", scattered(case, rounds, || Baseline(ThreadList::new(lists, OUT)))),
    ])
}
