//! The suite `pool`: DMA pools beside those of the kernel.
//!
//! Every subject gets the same memory, touched before, and takes its pages or chunks from an allocator that costs next
//! to nothing, so that the figures are about the pools. `linear` runs once in a few rounds' stead where it would take
//! minutes: its free is quadratic.

use super::BenchError;
use crate::baseline::inblock::InBlock;
use crate::baseline::linear::Linear;
use crate::baseline::malloc::Malloced;
use crate::baseline::pages::Pages;
use crate::baseline::rbtree::RbTree;
use crate::baseline::{Blocks, Offset};
use crate::harness::{Harness, Run, Sample, Subject, time_ns};
use crate::record::Record;
use pinfold::{Arena, Domain, Exposure};
use pinfold_core::dma_pool::{DmaPool, RawBlock};

/// How many blocks the seeds' workload takes, of 128 bytes.
pub const SEED_BLOCKS: usize = 373_959;
const SEED_SIZE: usize = 128;
const MEMORY: usize = 96 << 20;

type Samples<'a> = &'a mut Vec<Sample>;

/// Measures the suite.
///
/// # Errors
/// Where the memory cannot be had, or a subject fails.
pub fn run(harness: &Harness) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(2 * MEMORY as u64).exposure(Exposure::Whole).build(&domain)?;
    let baseline = arena.alloc(MEMORY)?;
    touch(&arena, &baseline);
    let pages = Pages::new(baseline.memory());

    let mut records = seed_workload(harness, &arena, &pages)?;
    for size in [16, 64, 256, 1024, 4096] {
        records.extend(pairs(harness, &arena, &pages, size)?);
    }
    Ok(records)
}

/// Touches all memory, so that no subject pays for a page's first use.
fn touch(arena: &Arena, baseline: &pinfold::Buffer) {
    // Both are inside their memory by construction: a refusal is impossible and would only cost a page fault later.
    let _ = baseline.memory().fill(0, baseline.memory().len(), 0);
    if let Ok(rest) = arena.alloc(MEMORY) {
        let _ = rest.memory().fill(0, rest.memory().len(), 0);
    }
}

fn seed_workload(harness: &Harness, arena: &Arena, pages: &Pages<'_>) -> Result<Vec<Record>, BenchError> {
    let blocks = if harness.options().quick { SEED_BLOCKS / 16 } else { SEED_BLOCKS };
    let size = SEED_SIZE as u64;
    let mut subjects: Vec<Subject<'_, BenchError>> = vec![
        Subject { name: "pinfold", run: Box::new(move |out| seed_pinfold_local(arena, blocks, out)) },
        Subject { name: "pinfold-shared", run: Box::new(move |out| seed_pinfold_shared(arena, blocks, out)) },
        Subject { name: "inblock", run: seed_baseline(move || InBlock::new(pages.clone(), size), blocks) },
        Subject { name: "rbtree", run: seed_baseline(move || RbTree::new(pages.clone(), size), blocks) },
        Subject { name: "malloc", run: Box::new(move |out| seed_malloc(blocks, out)) },
    ];
    let mut records = harness.interleave(std::mem::take(&mut subjects))?;
    // Once is enough for what takes seconds: its spread is small beside its size.
    let once = Harness::new("pool", crate::Options { runs: 1, ..harness.options() });
    let linear =
        Subject { name: "linear", run: seed_baseline(move || Linear::new(pages.clone(), size), blocks) };
    records.extend(once.interleave(vec![linear])?);
    records.sort_by_key(|r| r.case != "mpt3sas-alloc");
    Ok(records)
}

fn seed_samples(out: Samples<'_>, alloc_ns: f64, free_ns: f64, blocks: usize) {
    out.push(Sample::ns_per_op("mpt3sas-alloc", alloc_ns, blocks));
    out.push(Sample::ns_per_op("mpt3sas-free", free_ns, blocks));
}

fn seed_pinfold_local(arena: &Arena, blocks: usize, out: Samples<'_>) -> Result<(), BenchError> {
    let pool = DmaPool::new(arena, "chain pool", SEED_SIZE, SEED_SIZE, 0)?;
    let mut held: Vec<RawBlock> = Vec::with_capacity(blocks);
    let mut result = Ok(());
    let mut local = pool.local();
    let alloc_ns = time_ns(|| {
        for _ in 0..blocks {
            match local.alloc_raw() {
                Ok(block) => held.push(block),
                Err(error) => return result = Err(error.into()),
            }
        }
    });
    let free_ns = time_ns(|| {
        for block in &held {
            if let Err(error) = local.free_raw(*block) {
                return result = Err(error.into());
            }
        }
        drop(local);
    });
    let destroy_ns = time_ns(|| drop(pool));
    seed_samples(out, alloc_ns, free_ns + destroy_ns, blocks);
    result
}

fn seed_pinfold_shared(arena: &Arena, blocks: usize, out: Samples<'_>) -> Result<(), BenchError> {
    let pool = DmaPool::new(arena, "chain pool", SEED_SIZE, SEED_SIZE, 0)?;
    let mut held: Vec<RawBlock> = Vec::with_capacity(blocks);
    let mut result = Ok(());
    let alloc_ns = time_ns(|| {
        for _ in 0..blocks {
            match pool.alloc_raw() {
                Ok(block) => held.push(block),
                Err(error) => return result = Err(error.into()),
            }
        }
    });
    let free_ns = time_ns(|| {
        for block in &held {
            if let Err(error) = pool.free_raw(*block) {
                return result = Err(error.into());
            }
        }
        drop(pool);
    });
    seed_samples(out, alloc_ns, free_ns, blocks);
    result
}

fn seed_baseline<'s, B: Blocks>(create: impl Fn() -> B + 's, blocks: usize) -> Run<'s, BenchError> {
    Box::new(move |out| {
        let mut pool = create();
        let mut held: Vec<Offset> = Vec::with_capacity(blocks);
        let mut result = Ok(());
        let alloc_ns = time_ns(|| {
            for _ in 0..blocks {
                match pool.alloc() {
                    Ok(block) => held.push(block),
                    Err(error) => return result = Err(error.into()),
                }
            }
        });
        let free_ns = time_ns(|| {
            for block in &held {
                if let Err(error) = pool.free(*block) {
                    return result = Err(error.into());
                }
            }
            pool.destroy();
        });
        seed_samples(out, alloc_ns, free_ns, blocks);
        result
    })
}

fn seed_malloc(blocks: usize, out: Samples<'_>) -> Result<(), BenchError> {
    let mut held: Vec<Malloced<SEED_SIZE>> = Vec::with_capacity(blocks);
    let alloc_ns = time_ns(|| held.extend((0..blocks).map(|_| Malloced::alloc())));
    let free_ns = time_ns(|| drop(held));
    seed_samples(out, alloc_ns, free_ns, blocks);
    Ok(())
}

/// One block out and back again, a million times: the hot path and nothing else.
fn pairs(
    harness: &Harness,
    arena: &Arena,
    pages: &Pages<'_>,
    size: usize,
) -> Result<Vec<Record>, BenchError> {
    let case = match size {
        16 => "pair-16",
        64 => "pair-64",
        256 => "pair-256",
        1024 => "pair-1024",
        _ => "pair-4096",
    };
    let times = if harness.options().quick { 50_000 } else { 1_000_000 };
    let pool = DmaPool::new(arena, "pairs", size, 0, 0)?;
    let mut local = pool.local();
    let mut inblock = InBlock::new(pages.clone(), size as u64);
    let shared = &pool;
    let subjects: Vec<Subject<'_, BenchError>> = vec![
        Subject {
            name: "pinfold",
            run: Box::new(move |out| {
                let mut work =
                    || local.alloc_raw().map_err(BenchError::from).and_then(|b| Ok(local.free_raw(b)?));
                pair_samples(case, times, out, &mut work)
            }),
        },
        Subject {
            name: "pinfold-shared",
            run: Box::new(move |out| {
                let mut work =
                    || shared.alloc_raw().map_err(BenchError::from).and_then(|b| Ok(shared.free_raw(b)?));
                pair_samples(case, times, out, &mut work)
            }),
        },
        Subject {
            name: "inblock",
            run: Box::new(move |out| {
                let mut work = || Ok(inblock.alloc().and_then(|b| inblock.free(b))?);
                pair_samples(case, times, out, &mut work)
            }),
        },
    ];
    harness.interleave(subjects)
}

fn pair_samples(
    case: &'static str,
    times: usize,
    out: Samples<'_>,
    work: &mut impl FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let mut result = Ok(());
    let ns = time_ns(|| {
        for _ in 0..times {
            if let Err(error) = work() {
                return result = Err(error);
            }
        }
    });
    out.push(Sample::ns_per_op(case, ns, times));
    result
}
