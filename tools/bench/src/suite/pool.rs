//! The suite `pool`: DMA pools beside that of the kernel and a general allocator.
//!
//! The pools and the baselines get memory of the same kind, touched before, and allocate their
//! pages or chunks from an allocator that costs next to nothing, so the figures are about the
//! pools; mimalloc has memory of its own. One word of each block is written when it is allocated.

use super::Entry;
use super::handle::{
    Baseline, Handle, MiMalloc, Object, OwnedBlocks, RawBlocks, Replaced, Rng, alloc_all, bulk_run,
    free_all, pairs_2t_run, pairs_run, replace_run, slots, spawn_second,
};
use crate::baseline::block::{Pages, blocks};
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::Record;
use pinfold::{Arena, Buffer, Domain, MappingPolicy};
use pinfold_core::dma_pool::DmaPool;
use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("pair-64", "allocate and free one block of 64 bytes"),
    ("pair-64-2t", "pair-64 by two threads at once: the time of both over the pairs of both"),
    ("fresh", "one of 373,959 allocations of 128 bytes from a new pool, which grows meanwhile"),
    ("in-order", "one of as many frees, in the order of the allocations"),
    ("at-random", "one of as many frees, at random"),
    ("queue-64", "free the oldest of 64 blocks of 64 bytes and allocate another"),
    ("replace-4k", "free a random one of 4,096 blocks of 64 bytes and allocate another"),
    ("replace-100k", "the same of 10^5"),
    ("replace-1m", "the same of 10^6"),
    ("replace-10m", "the same of 10^7"),
    ("bulk-32", "allocate and free a block of 64 bytes, 32 by one call if there is one"),
    ("bulk-512", "the same, 512 by one call"),
    ("remote-free", "allocate a block on one thread and free it on another, 256 passed at a time"),
    ("local-free", "the work of remote-free by one thread"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "a PoolLocal, and blocks that are freed through it"),
    ("pinfold-raw", "a PoolLocal and raw blocks, each of which is claimed when it is freed"),
    ("inblock", "the DMA pool of Linux since 6.3: a list through the blocks under one lock"),
    ("mimalloc", "a general allocator with a heap of each thread, which knows no device address"),
    ("thread-list", "an unchecked list of one thread, made before the clock starts: the floor"),
];

/// The number of blocks of [`LARGE`] bytes in the study of the kernel's pools.
const BLOCKS: usize = 373_959;
const LARGE: usize = 128;
/// The bytes of a block elsewhere.
const SMALL: usize = 64;
/// The number of blocks passed between threads at a time: enough to amortize the cost of passing
/// them.
const PASSED: usize = 256;
/// The number of such batches.
const BATCHES: usize = 8;
/// The number of pairs of each of two threads: enough that both run at the same time.
const PAIRS_2T: usize = 2_000_000;

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = harness.cases(&["pair-64", "pair-64-2t"], || pair(harness))?;
    records.extend(harness.cases(&["fresh", "in-order", "at-random"], || fresh(harness))?);
    records.extend(replace(harness, ("queue-64", 64), Replaced::Oldest)?);
    let live = [
        ("replace-4k", 4096),
        ("replace-100k", 100_000),
        ("replace-1m", 1_000_000),
        ("replace-10m", 10_000_000),
    ];
    for case in live {
        records.extend(replace(harness, case, Replaced::Any)?);
    }
    records.extend(bulk(harness, "bulk-32", 32)?);
    records.extend(bulk(harness, "bulk-512", 512)?);
    records.extend(harness.cases(&["remote-free", "local-free"], || remote(harness))?);
    Ok(records)
}

/// Memory for a pool, and memory of the same kind for the baselines alone.
struct Memory {
    arena: Arena,
    others: Buffer,
}

impl Memory {
    /// Allocates memory for `count` blocks of `size` bytes and some more, and touches all of it: no
    /// subject pays for the first use of a page.
    fn new(count: usize, size: usize) -> Result<Self, BenchError> {
        let domain = Domain::soft()?;
        let bytes = (count * size + (4 << 20)).next_multiple_of(2 << 20);
        let builder = || Arena::builder().size(bytes as u64);
        let arena = builder().mapping_policy(MappingPolicy::Whole).build(&domain)?;
        let others = builder().mapping_policy(MappingPolicy::PerUse).build(&domain)?;
        drop(arena.alloc_zeroed(bytes)?);
        Ok(Self { arena, others: others.alloc_zeroed(bytes)? })
    }

    fn pool(&self, size: usize) -> Result<DmaPool, BenchError> {
        Ok(DmaPool::builder("bench").block(size).build(&self.arena)?)
    }
}

fn pair(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut memory = Memory::new(4 * 8192, SMALL)?;
    let (one, two, times) = ("pair-64", "pair-64-2t", harness.scale(1_000_000));
    let pool = memory.pool(SMALL)?;
    let (for_list, rest) = memory.others.as_mut_slice()?.split_at_mut(8192 * SMALL);
    let inblock = InBlock::new(Pages::new(rest), SMALL);
    let stack = Lifo::new(blocks(for_list, SMALL));
    let (owned, raw) = (|| OwnedBlocks::new(pool.local()), || RawBlocks::new(pool.local()));
    let locked = || Baseline(&inblock);
    let list = || Baseline(ThreadList::new(&stack, 4096));
    // One thread and two are interleaved, so that their ratio holds.
    harness.interleave(vec![
        Subject::countable("pinfold", pairs_run(one, times, owned)),
        Subject::countable("pinfold-raw", pairs_run(one, times, raw)),
        Subject::new("inblock", pairs_run(one, times, locked)),
        Subject::new("mimalloc", pairs_run(one, times, || MiMalloc::<SMALL>)),
        Subject::new("thread-list", pairs_run(one, times, list)),
        Subject::countable("pinfold", pairs_2t_run(two, PAIRS_2T, owned)),
        Subject::countable("pinfold-raw", pairs_2t_run(two, PAIRS_2T, raw)),
        Subject::new("inblock", pairs_2t_run(two, PAIRS_2T, locked)),
        Subject::new("mimalloc", pairs_2t_run(two, PAIRS_2T, || MiMalloc::<SMALL>)),
        Subject::new("thread-list", pairs_2t_run(two, PAIRS_2T, list)),
    ])
}

/// Allocates all blocks of a new pool, frees them in order, allocates them again, and frees them at
/// random.
fn fresh(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    fn pass<H: Handle>(out: &mut Samples, count: usize, mut handle: H) -> Result<(), BenchError> {
        let mut held = slots(count);
        out.cost("fresh", alloc_all(&mut handle, &mut held)?, count);
        out.cost("in-order", free_all(&mut handle, &mut held)?, count);
        alloc_all(&mut handle, &mut held)?;
        Rng::new().shuffle(&mut held);
        out.cost("at-random", free_all(&mut handle, &mut held)?, count);
        Ok(())
    }
    let count = harness.scale(BLOCKS);
    let mut memory = Memory::new(count, LARGE)?;
    let (arena, others) = (&memory.arena, std::cell::RefCell::new(memory.others.as_mut_slice()?));
    let pool = || Ok::<_, BenchError>(DmaPool::builder("bench").block(LARGE).build(arena)?);
    harness.interleave(vec![
        Subject::countable("pinfold", |out| pass(out, count, OwnedBlocks::new(pool()?.local()))),
        Subject::countable("pinfold-raw", |out| pass(out, count, RawBlocks::new(pool()?.local()))),
        Subject::new("inblock", |out| {
            let memory = &mut others.borrow_mut();
            pass(out, count, Baseline(&InBlock::new(Pages::new(memory), LARGE)))
        }),
        Subject::new("mimalloc", |out| pass(out, count, MiMalloc::<LARGE>)),
        Subject::new("thread-list", |out| {
            let memory = &mut others.borrow_mut();
            let all = memory.get_mut(..count * LARGE).unwrap_or_default();
            pass(out, count, Baseline(ThreadList::new(&Lifo::new(blocks(all, LARGE)), count)))
        }),
    ])
}

/// Frees one of `live` blocks and allocates another.
fn replace(
    harness: &Harness<'_>,
    (case, live): (&'static str, usize),
    which: Replaced,
) -> Result<Vec<Record>, BenchError> {
    if !harness.wants(case) || (COUNTS_RMW && live > 100_000) {
        return Ok(Vec::new());
    }
    let live = if live > 4096 { harness.scale(live) } else { live };
    // The pool's memory, that of the baselines, mimalloc's, and the lists of all blocks.
    let needed = 4 * (live * SMALL) as u64;
    if let Some(available) = super::available_bytes().filter(|available| *available < needed) {
        let why =
            format!("{} MiB of memory are available, {} needed", available >> 20, needed >> 20);
        return Ok(vec![harness.skipped(case, &why)]);
    }
    let mut memory = Memory::new(live + 4096, SMALL)?;
    let pool = memory.pool(SMALL)?;
    let others = std::cell::RefCell::new(memory.others.as_mut_slice()?);
    let of = (live, harness.scale(1_000_000));
    let harness =
        if live > 100_000 { &harness.with_runs(harness.options().runs.min(5)) } else { harness };
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            replace_run(case, of, which, || Ok(OwnedBlocks::new(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            replace_run(case, of, which, || Ok(RawBlocks::new(pool.local()))),
        ),
        Subject::new("inblock", |out: &mut Samples| {
            let memory = &mut others.borrow_mut();
            let pool = InBlock::new(Pages::new(memory), SMALL);
            replace_run(case, of, which, || Ok(Baseline(&pool)))(out)
        }),
        Subject::new("mimalloc", replace_run(case, of, which, || Ok(MiMalloc::<SMALL>))),
        Subject::new("thread-list", |out: &mut Samples| {
            let memory = &mut others.borrow_mut();
            let all = memory.get_mut(..(live + 64) * SMALL).unwrap_or_default();
            let stack = Lifo::new(blocks(all, SMALL));
            replace_run(case, of, which, || Ok(Baseline(ThreadList::new(&stack, live + 64))))(out)
        }),
    ])
}

/// Allocates many blocks by one call and frees them by one call.
fn bulk(harness: &Harness<'_>, case: &'static str, each: usize) -> Result<Vec<Record>, BenchError> {
    if !harness.wants(case) {
        return Ok(Vec::new());
    }
    let rounds = harness.scale(2_048_000).div_ceil(each);
    let mut memory = Memory::new(4 * 8192, SMALL)?;
    let pool = memory.pool(SMALL)?;
    let (for_list, rest) = memory.others.as_mut_slice()?.split_at_mut(8192 * SMALL);
    let inblock = InBlock::new(Pages::new(rest), SMALL);
    let stack = Lifo::new(blocks(for_list, SMALL));
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            bulk_run(case, each, rounds, || OwnedBlocks::new(pool.local())),
        ),
        Subject::countable(
            "pinfold-raw",
            bulk_run(case, each, rounds, || RawBlocks::new(pool.local())),
        ),
        Subject::new("inblock", bulk_run(case, each, rounds, || Baseline(&inblock))),
        Subject::new("mimalloc", bulk_run(case, each, rounds, || MiMalloc::<SMALL>)),
        Subject::new(
            "thread-list",
            bulk_run(case, each, rounds, || Baseline(ThreadList::new(&stack, 4096))),
        ),
    ])
}

/// One thread allocates and another frees, beside one thread that does both.
fn remote(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let batches = harness.scale(2_000);
    let mut memory = Memory::new(8 * PASSED * BATCHES, SMALL)?;
    let pool = memory.pool(SMALL)?;
    let inblock = InBlock::new(Pages::new(memory.others.as_mut_slice()?), SMALL);
    let (owned, raw) = (|| OwnedBlocks::new(pool.local()), || RawBlocks::new(pool.local()));
    let locked = || Baseline(&inblock);
    let alone = batches * PASSED;
    harness.interleave(vec![
        Subject::countable("pinfold", relay(batches, owned)),
        Subject::countable("pinfold-raw", relay(batches, raw)),
        Subject::new("inblock", relay(batches, locked)),
        Subject::new("mimalloc", relay(batches, || MiMalloc::<SMALL>)),
        Subject::countable("pinfold", single("local-free", alone, owned)),
        Subject::countable("pinfold-raw", single("local-free", alone, raw)),
        Subject::new("inblock", single("local-free", alone, locked)),
        Subject::new("mimalloc", single("local-free", alone, || MiMalloc::<SMALL>)),
    ])
}

/// Returns a run in which one thread allocates batches one block at a time and frees each.
fn single<'s, H: Handle>(
    case: &'static str,
    blocks: usize,
    handle: impl Fn() -> H + 's,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's {
    move |out| {
        let (mut handle, mut held) = (handle(), Vec::with_capacity(PASSED));
        let (cost, result) = Cost::of(|| {
            (0..blocks / PASSED).try_for_each(|_| {
                for _ in 0..PASSED {
                    held.push(handle.alloc()?);
                }
                black_box(&mut held).drain(..).try_for_each(|block| handle.free(block))
            })
        });
        out.cost(case, cost, blocks);
        result
    }
}

/// Returns a run in which this thread allocates `batches` batches and another frees them, each by
/// its own handle.
fn relay<'s, H: Handle<Object: Send>>(
    batches: usize,
    handle: impl Fn() -> H + Sync + 's,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> + 's {
    move |out| {
        let (to_freer, full) = sync_channel(BATCHES);
        let (to_allocator, empty) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            to_allocator.send(Vec::with_capacity(PASSED)).map_err(|_| BenchError::Thread)?;
        }
        let handle = &handle;
        let (cost, freed) = Cost::of(|| {
            std::thread::scope(|scope| {
                let freer = spawn_second(scope, move || {
                    let (cost, result) =
                        Cost::of(|| free_batches(&mut handle(), &full, &to_allocator));
                    result.map(|()| cost.counts)
                })?;
                let allocated = alloc_batches(&mut handle(), batches, &empty, to_freer);
                let freed = freer.join().unwrap_or(Err(BenchError::Thread))?;
                allocated.map(|()| freed)
            })
        });
        out.cost("remote-free", cost.with(freed?), batches * PASSED);
        Ok(())
    }
}

fn alloc_batches<H: Handle>(
    handle: &mut H,
    batches: usize,
    empty: &Receiver<Vec<H::Object>>,
    full: SyncSender<Vec<H::Object>>,
) -> Result<(), BenchError> {
    for _ in 0..batches {
        let mut batch = empty.recv().map_err(|_| BenchError::Thread)?;
        for _ in 0..PASSED {
            let object = handle.alloc()?;
            black_box(object.address());
            batch.push(object);
        }
        full.send(batch).map_err(|_| BenchError::Thread)?;
    }
    // The other thread ends when the channel closes.
    drop(full);
    Ok(())
}

fn free_batches<H: Handle>(
    handle: &mut H,
    full: &Receiver<Vec<H::Object>>,
    empty: &SyncSender<Vec<H::Object>>,
) -> Result<(), BenchError> {
    while let Ok(mut batch) = full.recv() {
        batch.drain(..).try_for_each(|block| handle.free(block))?;
        // The first thread no longer receives when the last batches come back.
        let _ = empty.send(batch);
    }
    Ok(())
}
