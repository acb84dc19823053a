//! Allocating and freeing pages: by the consumer, through the ring, and by the slow path.

use super::handles::{Dropped, RawPages, Recycled, RemoteRawPages, Uncounted};
use super::setup::{FRAMES, pool};
use crate::baseline::buddy::{Buddy, Offset};
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{AtOffset, Baseline, Handle, WARM_UP, Written, pairs, slots};
use pinfold::Arena;
use pinfold_core::frame::Frame;
use pinfold_core::mem::DmaMemory;
use std::hint::black_box;

/// How many pages are allocated at a time: more than the magazine holds.
const WAVE: usize = 512;
/// How many entries the rings have.
const RING: u32 = 1024;
/// How many pages of a new pool are allocated.
const FRESH: usize = 4096;

/// Returns a run of [`pairs`] by a handle that all runs share.
fn repeated_pairs<'s>(
    case: &'static str,
    mut handle: impl Handle + 's,
    times: usize,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's {
    move |out| {
        pairs(&mut handle, WARM_UP)?;
        out.cost(case, pairs(&mut handle, times)?, times);
        Ok(())
    }
}

/// Returns a stack of the offsets of all frames, the lowest on top.
fn stack() -> Lifo<Offset> {
    Lifo::new((0..u64::from(FRAMES)).rev().map(|i| i * Frame::BYTES))
}

pub(super) fn local(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let (case, bare, stack) = ("local", "local-nowrite", stack());
    let list = || Baseline(ThreadList::new(&stack, 64));
    let pool = || pool(arena, RING);
    harness.interleave(vec![
        Subject::countable("pinfold", repeated_pairs(case, Written(Recycled(pool()?)), times)),
        Subject::countable("pinfold-raw", repeated_pairs(case, Written(RawPages(pool()?)), times)),
        Subject::new(
            "single",
            repeated_pairs(case, Written(AtOffset(Baseline(buddy.owner()), memory)), times),
        ),
        Subject::new(
            "lifo",
            repeated_pairs(case, Written(AtOffset(Baseline(&stack), memory)), times),
        ),
        Subject::new("thread-list", repeated_pairs(case, Written(AtOffset(list(), memory)), times)),
        Subject::countable("pinfold", repeated_pairs(bare, Recycled(pool()?), times)),
        Subject::countable("pinfold-raw", repeated_pairs(bare, RawPages(pool()?), times)),
        Subject::new("single", repeated_pairs(bare, Baseline(buddy.owner()), times)),
        Subject::new("lifo", repeated_pairs(bare, Baseline(&stack), times)),
        Subject::new("thread-list", repeated_pairs(bare, list(), times)),
    ])
}

/// Allocates an object for each slot and frees all of them, `rounds` times.
#[inline(always)]
fn waves<H: Handle>(
    handle: &mut H,
    held: &mut [Option<H::Object>],
    rounds: usize,
) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..rounds {
            for slot in &mut *held {
                *slot = Some(handle.alloc()?);
            }
            for object in held.iter_mut().filter_map(Option::take) {
                handle.free(object)?;
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns a run of [`waves`].
fn repeated_waves<'s, H: Handle + 's>(
    case: &'static str,
    wave: usize,
    mut handle: H,
    rounds: usize,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's
where
    H::Object: 's,
{
    let mut held = slots(wave);
    move |out| {
        waves(&mut handle, &mut held, 1)?;
        out.cost(case, waves(&mut handle, &mut held, rounds)?, rounds * wave);
        Ok(())
    }
}

/// Measures what the counters cost. Pairs would not show it: without counters, the optimiser
/// removes almost all of a pair.
pub(super) fn counters(harness: &Harness<'_>, arena: &Arena) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(16_000);
    let case = "local-64";
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            repeated_waves(case, 64, Recycled(pool(arena, RING)?), rounds),
        ),
        Subject::countable(
            "pinfold-uncounted",
            repeated_waves(case, 64, Uncounted(pool(arena, RING)?), rounds),
        ),
    ])
}

pub(super) fn ring(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(1_000);
    let (case, stack) = ("ring", stack());
    let list = Baseline(ThreadList::new(&stack, WAVE));
    let (raw, mut bulk) = (pool(arena, RING)?, pool(arena, RING)?);
    let (raw_remote, remote) = (raw.remote(), bulk.remote());
    let mut held = slots(WAVE);
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            repeated_waves(case, WAVE, Written(Dropped(pool(arena, RING)?)), rounds),
        ),
        Subject::countable(
            "pinfold-raw",
            repeated_waves(case, WAVE, Written(RemoteRawPages(raw, raw_remote)), rounds),
        ),
        Subject::countable("pinfold-bulk", move |out: &mut Samples| {
            let mut wave = || {
                let got = bulk.fill(black_box(&mut held));
                for page in held.iter().flatten() {
                    page.memory().write_u64(0, page.iova().raw())?;
                }
                remote.recycle_all(held.iter_mut().filter_map(Option::take));
                if got == WAVE { Ok(()) } else { Err(BenchError::Short { asked: WAVE, got }) }
            };
            wave()?;
            let (cost, result) = Cost::of(|| (0..rounds).try_for_each(|_| wave()));
            result?;
            out.cost(case, cost, rounds * WAVE);
            Ok(())
        }),
        Subject::new(
            "single",
            repeated_waves(case, WAVE, Written(AtOffset(Baseline(buddy.owner()), memory)), rounds),
        ),
        Subject::new(
            "lifo",
            repeated_waves(case, WAVE, Written(AtOffset(Baseline(&stack), memory)), rounds),
        ),
        Subject::new(
            "thread-list",
            repeated_waves(case, WAVE, Written(AtOffset(list, memory)), rounds),
        ),
    ])
}

pub(super) fn slow(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(32);
    let case = "slow";
    let mut held = slots(FRESH);
    harness.interleave(vec![
        // Not countable: it maps and unmaps, which is more than its own atomics.
        Subject::new("pinfold", move |out: &mut Samples| {
            let mut total = Cost::default();
            for _ in 0..rounds {
                let (cost, result) = Cost::of(|| {
                    let mut new = Written(Recycled(pool(arena, RING)?));
                    waves(&mut new, &mut held, 1).map(|_| drop(new.0.0.close()))
                });
                result?;
                total = total + cost;
            }
            out.cost(case, total, rounds * FRESH);
            Ok(())
        }),
        Subject::countable(
            "pinfold-full",
            repeated_waves(case, WAVE, Written(Dropped(pool(arena, 1)?)), rounds * FRESH / WAVE),
        ),
        Subject::new(
            "single",
            repeated_waves(case, FRESH, Written(AtOffset(Baseline(buddy.owner()), memory)), rounds),
        ),
    ])
}
