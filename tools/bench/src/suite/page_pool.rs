//! The suite `page-pool`: pages that stay mapped while they are recycled.
//!
//! Only the pages of `pinfold` are mapped for the device. The cost of mapping for the others is
//! left out.

mod receive;

use super::Entry;
use super::handle::{BaselineFrames, Handle, Object, slots};
use crate::baseline::buddy::Buddy;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::frame::Frame;
use pinfold_core::mem::DmaMemory;
use pinfold_core::page_pool::{Config, Page, PagePool};
use std::hint::black_box;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("local", "allocate, write one word of, and recycle one page, by the consumer"),
    ("ring", "allocate and write a page, free it through the ring; 512 at a time, one thread"),
    ("slow", "allocate, write, free a page that no cache holds: 4,096 of a new pool, and its end"),
    ("rx-512", "receive a packet, pass its page to a thread that frees it, refill the descriptor"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "a page pool on an arena; ring, rx-512: many pages freed by one call"),
    ("array", "rx-512: a ZoneLocal for each thread: fill"),
    ("single", "the page allocator of a kernel, one call per page"),
];

/// The memory of all pools together.
const MEMORY: u64 = 256 << 20;
/// The number of frames of the baselines.
const FRAMES: u32 = 1 << 14;
/// The number of pages allocated at a time: more than the consumer's cache holds.
const WAVE: usize = 512;
/// The number of entries in each ring.
const RING: u32 = 1024;
/// The number of pages of a new pool that are allocated.
const FRESH: usize = 4096;

type Pool = PagePool;

fn pool(arena: &Arena, ring: u32) -> Result<Pool, BenchError> {
    Ok(PagePool::new(arena.clone(), "bench", Config { ring, ..Config::default() })?)
}

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena =
        Arena::builder().size(MEMORY).mapping_policy(MappingPolicy::PerUse).build(&domain)?;
    let packets = Arena::builder()
        .size(u64::from(FRAMES) * Frame::BYTES)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain)?
        .alloc_zeroed(FRAMES as usize * 4096)?;
    let (buddy, memory) = (&Buddy::new(FRAMES), packets.memory());
    let mut records = harness.cases(&["local"], || local(harness, &arena, buddy, memory))?;
    records.extend(harness.cases(&["ring"], || ring(harness, &arena, buddy, memory))?);
    records.extend(harness.cases(&["slow"], || slow(harness, &arena, buddy, memory))?);
    records.extend(harness.cases(&["rx-512"], || receive::run(harness, &arena, memory, buddy))?);
    Ok(records)
}

impl Object for Page {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.iova().raw()
    }
}

/// Pages of a pool, recycled by the consumer.
struct Recycled(Pool);

impl Handle for Recycled {
    type Object = Page;
    #[inline(always)]
    fn alloc(&mut self) -> Result<Page, BenchError> {
        let page = self.0.alloc()?;
        page.memory().write_u64(0, page.address())?;
        Ok(page)
    }
    #[inline(always)]
    fn free(&mut self, page: Page) -> Result<(), BenchError> {
        self.0.recycle(page);
        Ok(())
    }
}

/// Pages of a baseline, written at their offset.
struct Single<'b, 'm>(BaselineFrames<crate::baseline::buddy::Owner<'b>>, DmaMemory<'m>);

impl Handle for Single<'_, '_> {
    type Object = u64;
    #[inline(always)]
    fn alloc(&mut self) -> Result<u64, BenchError> {
        let offset = self.0.alloc()?;
        self.1.write_u64(usize::try_from(offset).unwrap_or(usize::MAX), offset)?;
        Ok(offset)
    }
    #[inline(always)]
    fn free(&mut self, page: u64) -> Result<(), BenchError> {
        self.0.free(page)
    }
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
                black_box(object.address());
                handle.free(object)?;
            }
        }
        Ok(())
    });
    result.map(|()| cost)
}

/// Returns a run of [`waves`] by a handle that all runs share.
fn waves_run<'s, H: Handle + 's>(
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
        waves(&mut handle, &mut held, rounds.div_ceil(64))?;
        out.cost(case, waves(&mut handle, &mut held, rounds)?, rounds * wave);
        Ok(())
    }
}

fn local(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let single = Single(BaselineFrames(buddy.owner()), memory);
    harness.interleave(vec![
        Subject::countable("pinfold", waves_run("local", 1, Recycled(pool(arena, RING)?), times)),
        Subject::new("single", waves_run("local", 1, single, times)),
    ])
}

fn ring(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let (rounds, mut pool, mut held) = (harness.scale(1_000), pool(arena, RING)?, slots(WAVE));
    let remote = pool.remote();
    let single = Single(BaselineFrames(buddy.owner()), memory);
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            let mut wave = || {
                let got = pool.fill(black_box(&mut held));
                for page in held.iter().flatten() {
                    page.memory().write_u64(0, page.iova().raw())?;
                }
                remote.recycle_all(held.iter_mut().filter_map(Option::take));
                if got == WAVE { Ok(()) } else { Err(BenchError::Short { asked: WAVE, got }) }
            };
            wave()?;
            let (cost, result) = Cost::of(|| (0..rounds).try_for_each(|_| wave()));
            out.cost("ring", cost, rounds * WAVE);
            result
        }),
        Subject::new("single", waves_run("ring", WAVE, single, rounds)),
    ])
}

fn slow(
    harness: &Harness<'_>,
    arena: &Arena,
    buddy: &Buddy,
    memory: DmaMemory<'_>,
) -> Result<Vec<Record>, BenchError> {
    let (rounds, mut held) = (harness.scale(32), slots(FRESH));
    let single = Single(BaselineFrames(buddy.owner()), memory);
    harness.interleave(vec![
        // Not countable: it maps and unmaps, which is more than its own atomics.
        Subject::new("pinfold", move |out: &mut Samples| {
            let mut total = Cost::default();
            for _ in 0..rounds {
                let (cost, result) = Cost::of(|| {
                    let mut new = Recycled(pool(arena, RING)?);
                    waves(&mut new, &mut held, 1).map(|_| drop(new.0.close()))
                });
                result?;
                total = total + cost;
            }
            out.cost("slow", total, rounds * FRESH);
            Ok(())
        }),
        Subject::new("single", waves_run("slow", FRESH, single, rounds)),
    ])
}
