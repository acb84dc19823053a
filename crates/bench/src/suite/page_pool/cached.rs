//! Out and back again: by the consumer, through the ring, and from below.

use super::{BenchError, FRAMES, Pool, pool};
use crate::baseline::buddy::{Buddy, Offset};
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Hand, InMemory, WARM, Writing, Written, pairs, slots};
use pinfold::Arena;
use pinfold_core::frame::Frame;
use pinfold_core::mem::DmaMemory;
use pinfold_core::page_pool::{Page, RawPage, Remote};
use std::hint::black_box;

/// How many pages are out at a time: more than the magazine holds.
const WAVE: usize = 512;
/// How many entries the rings have.
const RING: u32 = 1024;
/// How many pages a new pool hands out.
const FRESH: usize = 4096;

/// The consumer.
struct Consumer<'a>(Pool<'a>);

impl<'a> Hand for Consumer<'a> {
    type Thing = Page<&'a Arena>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, page: Self::Thing) -> Result<(), BenchError> {
        self.0.recycle(page);
        Ok(())
    }
    #[inline(always)]
    fn number(page: &Self::Thing) -> u64 {
        page.iova().raw()
    }
}

impl<'a> Writing for Consumer<'a> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<Self::Thing, BenchError> {
        let page = self.0.alloc()?;
        page.memory().write_u64(0, page.iova().raw())?;
        Ok(page)
    }
}

/// The consumer, without its counters.
struct Uncounted<'a>(Pool<'a>);

impl<'a> Hand for Uncounted<'a> {
    type Thing = Page<&'a Arena>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, page: Self::Thing) -> Result<(), BenchError> {
        self.0.recycle_uncounted(page);
        Ok(())
    }
    #[inline(always)]
    fn number(page: &Self::Thing) -> u64 {
        page.iova().raw()
    }
}

/// The consumer, raw pages.
struct Raw<'a>(Pool<'a>);

impl Hand for Raw<'_> {
    type Thing = RawPage;
    #[inline(always)]
    fn get(&mut self) -> Result<RawPage, BenchError> {
        Ok(self.0.alloc_raw()?)
    }
    #[inline(always)]
    fn put(&mut self, page: RawPage) -> Result<(), BenchError> {
        Ok(self.0.free_raw(page)?)
    }
    #[inline(always)]
    fn number(page: &RawPage) -> u64 {
        page.iova().raw()
    }
}

impl Writing for Raw<'_> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<RawPage, BenchError> {
        let page = self.0.alloc_raw()?;
        self.0.memory(page)?.write_u64(0, page.iova().raw())?;
        Ok(page)
    }
}

/// Out by the consumer, back as from anywhere.
struct Dropped<'a>(Pool<'a>);

impl<'a> Hand for Dropped<'a> {
    type Thing = Page<&'a Arena>;
    #[inline(always)]
    fn get(&mut self) -> Result<Self::Thing, BenchError> {
        Ok(self.0.alloc()?)
    }
    #[inline(always)]
    fn put(&mut self, page: Self::Thing) -> Result<(), BenchError> {
        drop(page);
        Ok(())
    }
    #[inline(always)]
    fn number(page: &Self::Thing) -> u64 {
        page.iova().raw()
    }
}

impl<'a> Writing for Dropped<'a> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<Self::Thing, BenchError> {
        let page = self.0.alloc()?;
        page.memory().write_u64(0, page.iova().raw())?;
        Ok(page)
    }
}

/// The same, raw pages.
struct DroppedRaw<'a>(Pool<'a>, Remote<&'a Arena>);

impl Hand for DroppedRaw<'_> {
    type Thing = RawPage;
    #[inline(always)]
    fn get(&mut self) -> Result<RawPage, BenchError> {
        Ok(self.0.alloc_raw()?)
    }
    #[inline(always)]
    fn put(&mut self, page: RawPage) -> Result<(), BenchError> {
        Ok(self.1.free_raw(page)?)
    }
    #[inline(always)]
    fn number(page: &RawPage) -> u64 {
        page.iova().raw()
    }
}

impl Writing for DroppedRaw<'_> {
    #[inline(always)]
    fn get_written(&mut self) -> Result<RawPage, BenchError> {
        let page = self.0.alloc_raw()?;
        self.0.memory(page)?.write_u64(0, page.iova().raw())?;
        Ok(page)
    }
}

/// A run of [`pairs`] by a hand that stays the same.
fn to_and_fro<'s>(
    case: &'static str,
    mut hand: impl Hand + 's,
    times: usize,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's {
    move |out| {
        pairs(&mut hand, WARM)?;
        out.cost(case, pairs(&mut hand, times)?, times);
        Ok(())
    }
}

/// The places of the frames, the lowest on top of a stack of them.
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
        Subject::countable("pinfold", to_and_fro(case, Written(Consumer(pool()?)), times)),
        Subject::countable("pinfold-raw", to_and_fro(case, Written(Raw(pool()?)), times)),
        Subject::new("single", to_and_fro(case, Written(InMemory(Baseline(buddy.owner()), memory)), times)),
        Subject::new("lifo", to_and_fro(case, Written(InMemory(Baseline(&stack), memory)), times)),
        Subject::new("thread-list", to_and_fro(case, Written(InMemory(list(), memory)), times)),
        Subject::countable("pinfold", to_and_fro(bare, Consumer(pool()?), times)),
        Subject::countable("pinfold-raw", to_and_fro(bare, Raw(pool()?), times)),
        Subject::new("single", to_and_fro(bare, Baseline(buddy.owner()), times)),
        Subject::new("lifo", to_and_fro(bare, Baseline(&stack), times)),
        Subject::new("thread-list", to_and_fro(bare, list(), times)),
    ])
}

/// So many out, and all of them back, over and over.
#[inline(always)]
fn waves<H: Hand>(hand: &mut H, held: &mut [Option<H::Thing>], rounds: usize) -> Result<Cost, BenchError> {
    let (cost, result) = Cost::of(|| {
        for _ in 0..rounds {
            for slot in &mut *held {
                *slot = Some(hand.get()?);
            }
            for thing in held.iter_mut().filter_map(Option::take) {
                hand.put(thing)?;
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// A run of [`waves`].
fn to_and_fro_in_waves<'s, H: Hand + 's>(
    case: &'static str,
    wave: usize,
    mut hand: H,
    rounds: usize,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's
where
    H::Thing: 's,
{
    let mut held = slots(wave);
    move |out| {
        waves(&mut hand, &mut held, 1)?;
        out.cost(case, waves(&mut hand, &mut held, rounds)?, rounds * wave);
        Ok(())
    }
}

/// What the counters cost. A page out and right back again would not tell: without counters nothing is left of it but what
/// the compiler cannot see through.
pub(super) fn counters(harness: &Harness<'_>, arena: &Arena) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(16_000);
    let case = "local-64";
    harness.interleave(vec![
        Subject::countable("pinfold", to_and_fro_in_waves(case, 64, Consumer(pool(arena, RING)?), rounds)),
        Subject::countable(
            "pinfold-uncounted",
            to_and_fro_in_waves(case, 64, Uncounted(pool(arena, RING)?), rounds),
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
            to_and_fro_in_waves(case, WAVE, Written(Dropped(pool(arena, RING)?)), rounds),
        ),
        Subject::countable(
            "pinfold-raw",
            to_and_fro_in_waves(case, WAVE, Written(DroppedRaw(raw, raw_remote)), rounds),
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
            to_and_fro_in_waves(case, WAVE, Written(InMemory(Baseline(buddy.owner()), memory)), rounds),
        ),
        Subject::new(
            "lifo",
            to_and_fro_in_waves(case, WAVE, Written(InMemory(Baseline(&stack), memory)), rounds),
        ),
        Subject::new("thread-list", to_and_fro_in_waves(case, WAVE, Written(InMemory(list, memory)), rounds)),
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
        // Maps and unmaps, which is more than its own atomics.
        Subject::new("pinfold", move |out: &mut Samples| {
            let mut total = Cost::default();
            for _ in 0..rounds {
                let (cost, result) = Cost::of(|| {
                    let mut new = Written(Consumer(pool(arena, RING)?));
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
            to_and_fro_in_waves(case, WAVE, Written(Dropped(pool(arena, 1)?)), rounds * FRESH / WAVE),
        ),
        Subject::new(
            "single",
            to_and_fro_in_waves(case, FRESH, Written(InMemory(Baseline(buddy.owner()), memory)), rounds),
        ),
    ])
}
