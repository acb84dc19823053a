//! What must not grow with the zone, the owners or the blocks: growing in a zone that is nearly
//! full (`grow-full-*`), very many owners (`locals-1024`), the metadata of a block (`metadata`),
//! frees among very many blocks (`free-random-*`).

use super::setup::pool;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::pages::{Pages, blocks};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::policy::PolicyError;
use crate::record::{Metric, Record};
use crate::suite::handle::{AllocWritten, Baseline, Handle, OwnedBlocks, Rng, Written};
use crate::suite::longest::{Longest, empty_loop};
use crate::suite::machine::available_bytes;
use crate::suite::reserved::{Reserved, fill, free_at_random};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::dma_pool::DmaPool;
use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;

type Outcome = Result<(), BenchError>;

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let mut records = or_skipped(harness, "grow-full-256g", grow(harness))?;
    let owners = Subject::new("pinfold", |out: &mut Samples| locals(out, harness.scale(1024)));
    records.extend(harness.once().interleave(vec![owners])?);
    let each = Subject::new("pinfold", |out: &mut Samples| metadata(out));
    records.extend(harness.once().interleave(vec![each])?);
    records.extend(free_random(harness, "free-random-100k", 100_000)?);
    records.extend(free_random(harness, "free-random-10m", 10_000_000)?);
    Ok(records)
}

/// Records a case as skipped where its address space cannot be reserved: under `ulimit -v`, or
/// strict overcommit.
fn or_skipped(
    harness: &Harness<'_>,
    case: &'static str,
    measured: Result<Vec<Record>, BenchError>,
) -> Result<Vec<Record>, BenchError> {
    match measured {
        Err(BenchError::Policy(why @ PolicyError::NoMemory { .. })) => {
            Ok(vec![harness.skipped(case, &why.to_string())])
        }
        measured => measured,
    }
}

/// The blocks by which a pool grows: 2,048 of the 2,621 frames that are free in 1 GiB.
const GROWN: usize = 65_536;
/// Bytes of such a block.
const GROWN_SIZE: usize = 128;

/// Measures a pool that grows in a zone of 1 GiB, and in one of 256 GiB, by as much. 99 % of the
/// frames are allocated, the free ones are at random. The memory does not exist.
fn grow(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let blocks = harness.scale(GROWN);
    let cases = [("grow-full-1g", 1 << 30), ("grow-full-256g", 256 << 30)];
    let measured = cases.map(|(case, bytes)| {
        let bytes = harness.scale(bytes);
        Subject::new("pinfold", move |out: &mut Samples| grown(out, case, bytes, blocks))
    });
    let empty = cases.map(|(case, _)| {
        Subject::new("empty-loop", move |out: &mut Samples| {
            empty_loop(out, case, blocks);
            Ok(())
        })
    });
    harness
        .with_runs(harness.options().runs.min(5))
        .interleave(measured.into_iter().chain(empty).collect())
}

/// Grows a pool twice, each time in a new zone, whose first search for a run is the longest: the
/// time of all allocations, and that of the longest.
fn grown(out: &mut Samples, case: &'static str, bytes: usize, blocks: usize) -> Outcome {
    let source = Arc::new(nearly_full(bytes)?);
    let pool = DmaPool::builder("bench").block(GROWN_SIZE).build(&source)?;
    let mut local = pool.local();
    let (cost, result) = Cost::of(|| -> Outcome {
        for _ in 0..blocks {
            black_box(local.alloc_raw()?.iova());
        }
        Ok(())
    });
    result?;
    out.cost(case, cost, blocks);

    let source = Arc::new(nearly_full(bytes)?);
    let pool = DmaPool::builder("bench").block(GROWN_SIZE).build(&source)?;
    let (mut local, mut longest) = (pool.local(), Longest::new());
    for _ in 0..blocks {
        black_box(local.alloc_raw()?.iova());
        longest.note();
    }
    longest.record(out, case);
    Ok(())
}

/// Returns memory of which 1 % is free, at random.
fn nearly_full(bytes: usize) -> Result<Reserved, BenchError> {
    let source = Reserved::new(bytes)?;
    fill(source.zone())?;
    free_at_random(source.zone(), source.zone().frames() / 100)?;
    Ok(source)
}

/// Counts how many owners get a block of 4 KiB from 1 MiB for each, and what the pool holds for a
/// block in use. Of two orders, all owners before all blocks or each with its block, the worse
/// counts.
fn locals(out: &mut Samples, owners: usize) -> Outcome {
    let (mut fewest, mut most_held) = (usize::MAX, 0.0_f64);
    for in_turn in [true, false] {
        let source = Arc::new(Reserved::new(owners << 20)?);
        let pool = DmaPool::builder("bench").block(4096).build(&source)?;
        let (mut locals, mut got) = (Vec::with_capacity(owners), 0);
        for _ in 0..owners {
            let mut local = pool.local();
            got += usize::from(in_turn && local.alloc_raw().is_ok());
            locals.push(local);
        }
        if !in_turn {
            got = locals.iter_mut().filter_map(|local| local.alloc_raw().ok()).count();
        }
        let stats = pool.stats();
        fewest = fewest.min(got);
        most_held = most_held.max(ratio(stats.blocks, stats.in_use));
    }
    out.figure("locals-1024", Metric::Count, "owners with one", as_f64(fewest as u64));
    out.figure("locals-1024", Metric::Count, "held/live", most_held);
    Ok(())
}

/// The blocks of `metadata`, in quick runs too: of fewer the directory, which does not grow with
/// them, would be most of it.
const METADATA_BLOCKS: usize = 1_000_000;

/// Measures what a pool of blocks of 64 bytes needs for itself, by the sizes of what it has
/// allocated.
fn metadata(out: &mut Samples) -> Outcome {
    let source = Arc::new(Reserved::new(METADATA_BLOCKS * 64 + (8 << 20))?);
    let pool = DmaPool::builder("bench").block(64).build(&source)?;
    let mut local = pool.local();
    for _ in 0..METADATA_BLOCKS {
        black_box(local.alloc_raw()?.iova());
    }
    let bytes = ratio(pool.metadata_bytes() as u64, pool.stats().blocks);
    out.figure("metadata", Metric::Bytes, "bytes/block", bytes);
    Ok(())
}

fn ratio(over: u64, under: u64) -> f64 {
    as_f64(over) / as_f64(under)
}

#[expect(clippy::cast_precision_loss, reason = "counts and bytes far below 2^52")]
pub(super) fn as_f64(count: u64) -> f64 {
    count as f64
}

/// Bytes of a block of `free-random-*`.
const SIZE: usize = 64;
/// How many of them a run frees at random, in rounds of 1 % of those allocated.
const FREES: usize = 1_000_000;

/// Frees blocks at random while `live` are allocated.
fn free_random(
    harness: &Harness<'_>,
    case: &'static str,
    live: usize,
) -> Result<Vec<Record>, BenchError> {
    let (live, frees) = (harness.scale(live), harness.scale(FREES));
    let bytes = (live * SIZE).next_multiple_of(2 << 20) + (8 << 20);
    // The pool's memory, that of the baselines, and the lists of all blocks.
    let needed = 4 * bytes as u64;
    if let Some(available) = available_bytes().filter(|available| *available < needed) {
        let mib = |bytes: u64| bytes >> 20;
        let why = format!("{} MiB of memory are available, {} needed", mib(available), mib(needed));
        return Ok(vec![harness.skipped(case, &why)]);
    }
    let domain = Domain::soft()?;
    let arena = |policy| Arena::builder().size(bytes as u64).mapping_policy(policy).build(&domain);
    let (own, others) = (arena(MappingPolicy::Whole)?, arena(MappingPolicy::PerUse)?);
    let mut others = others.alloc(bytes)?;
    let memory = others.as_mut_slice()?;
    // All memory is touched first.
    memory.fill(0);
    own.alloc_zeroed(bytes)?;
    let memory = &RefCell::new(memory);
    harness.with_runs(harness.options().runs.min(3)).interleave(vec![
        Subject::new("pinfold", |out: &mut Samples| {
            let pool = pool(&own, SIZE)?;
            frees_among(out, case, (live, frees), Written(OwnedBlocks(pool.local())))
        }),
        Subject::new("inblock", |out: &mut Samples| {
            let mut memory = memory.borrow_mut();
            let pool = InBlock::new(Pages::new(&mut memory), SIZE);
            frees_among(out, case, (live, frees), Written(Baseline(&pool)))
        }),
        Subject::new("thread-list", |out: &mut Samples| {
            let mut memory = memory.borrow_mut();
            let home = Lifo::new(blocks(memory.get_mut(..live * SIZE).unwrap_or_default(), SIZE));
            frees_among(out, case, (live, frees), Written(Baseline(ThreadList::new(&home, live))))
        }),
    ])
}

/// Allocates `live` blocks; then frees 1 % of them at random, timed, and allocates as many, until
/// there were `frees` frees. The first round does not count.
fn frees_among<H: AllocWritten>(
    out: &mut Samples,
    case: &'static str,
    (live, frees): (usize, usize),
    mut handle: Written<H>,
) -> Outcome {
    let each = (live / 100).max(1);
    let rounds = frees.div_ceil(each);
    let mut held = Vec::with_capacity(live);
    let (mut rng, mut total) = (Rng::new(), Cost::default());
    for round in 0..=rounds {
        while held.len() < live {
            held.push(handle.alloc()?);
        }
        // Chosen and moved to the end, where the timed loop reads them one after another.
        for at in live - each..live {
            held.swap(at, rng.below(live));
        }
        let (cost, result) =
            Cost::of(|| held.drain(live - each..).try_for_each(|block| handle.free(block)));
        result?;
        if round > 0 {
            total = total + cost;
        }
    }
    out.cost(case, total, rounds * each);
    held.into_iter().try_for_each(|block| handle.free(block))
}
