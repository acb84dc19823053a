//! The hot path: pairs, bulk calls, and 4,096 blocks freed at random.

use super::setup::pool as new_pool;
use crate::baseline::block::Block;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::pages::{Pages, blocks};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{
    AllocWritten, Baseline, Malloc, OUTSTANDING, OwnedBlocks, PAIRS_2T, Pool, RawBlocks,
    SharedRawBlocks, WARM_UP, Written, bulk_run, pairs_2t_run, pairs_run, queue_run, random_run,
    replace_run,
};
use pinfold::Arena;
use std::hint::black_box;

/// How many blocks the stacks have.
const STACK: usize = 2 * OUTSTANDING;

/// The names of the cases of a block size: written or not, by one thread, and by two where that is
/// measured.
struct PairCases {
    written: &'static str,
    unwritten: &'static str,
    by_two: Option<&'static str>,
}

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let names = |written, unwritten| PairCases { written, unwritten, by_two: None };
    let mut records = pair::<16>(harness, arena, memory, &names("pair-16", "pair-16-nowrite"))?;
    let both = PairCases { by_two: Some("pair-64-2t"), ..names("pair-64", "pair-64-nowrite") };
    records.extend(pair::<64>(harness, arena, memory, &both)?);
    records.extend(pair::<256>(harness, arena, memory, &names("pair-256", "pair-256-nowrite"))?);
    records.extend(pair::<1024>(harness, arena, memory, &names("pair-1024", "pair-1024-nowrite"))?);
    records.extend(pair::<4096>(harness, arena, memory, &names("pair-4096", "pair-4096-nowrite"))?);
    records.extend(bulk(harness, arena, memory, "bulk-32", 32)?);
    records.extend(bulk(harness, arena, memory, "bulk-512", 512)?);
    records.extend(random(harness, arena, memory)?);
    records.extend(out(harness, arena, memory)?);
    records.extend(queue(harness, arena, memory, "queue-64", 64)?);
    records.extend(queue(harness, arena, memory, "queue-4096", OUTSTANDING)?);
    Ok(records)
}

/// The allocators that every case compares, for blocks of one size.
struct Allocators<'m> {
    pool: Pool,
    inblock: InBlock<'m>,
    stack: Lifo<Block<'m>>,
    lists: Lifo<Block<'m>>,
}

impl<'m> Allocators<'m> {
    fn new(arena: &Arena, memory: &'m mut [u8], size: usize) -> Result<Self, BenchError> {
        let (one, rest) = memory.split_at_mut(STACK * size);
        let (two, rest) = rest.split_at_mut(STACK * size);
        Ok(Self {
            pool: new_pool(arena, size)?,
            inblock: InBlock::new(Pages::new(rest), size),
            stack: Lifo::new(blocks(one, size)),
            lists: Lifo::new(blocks(two, size)),
        })
    }
}

/// Allocates and frees one block, by one thread and, where `by_two` names a case, by two.
fn pair<const N: usize>(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
    names: &PairCases,
) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let Allocators { pool, inblock, stack, lists } = &Allocators::new(arena, memory, N)?;
    let list = || Baseline(ThreadList::new(lists, STACK / 2));
    let (with, without) = (names.written, names.unwritten);
    let mut subjects = vec![
        Subject::countable(
            "pinfold",
            pairs_run(with, times, || Written(OwnedBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            pairs_run(with, times, || Written(RawBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-shared",
            pairs_run(with, times, || Written(SharedRawBlocks(pool))),
        ),
        Subject::new("inblock", pairs_run(with, times, || Written(Baseline(inblock)))),
        Subject::new("malloc", pairs_run(with, times, || Written(Malloc::<N>))),
        Subject::new("lifo", pairs_run(with, times, || Written(Baseline(stack)))),
        Subject::new("thread-list", pairs_run(with, times, || Written(list()))),
        Subject::countable("pinfold", pairs_run(without, times, || OwnedBlocks(pool.local()))),
        Subject::countable("pinfold-raw", pairs_run(without, times, || RawBlocks(pool.local()))),
        Subject::countable("pinfold-shared", pairs_run(without, times, || SharedRawBlocks(pool))),
        Subject::new("inblock", pairs_run(without, times, || Baseline(inblock))),
        Subject::new("malloc", pairs_run(without, times, || Malloc::<N>)),
        Subject::new("lifo", pairs_run(without, times, || Baseline(stack))),
        Subject::new("thread-list", pairs_run(without, times, list)),
    ];
    if let Some(case) = names.by_two {
        subjects.extend([
            Subject::countable(
                "pinfold",
                pairs_2t_run(case, PAIRS_2T, || Written(OwnedBlocks(pool.local()))),
            ),
            Subject::countable(
                "pinfold-raw",
                pairs_2t_run(case, PAIRS_2T, || Written(RawBlocks(pool.local()))),
            ),
            Subject::countable(
                "pinfold-shared",
                pairs_2t_run(case, PAIRS_2T, || Written(SharedRawBlocks(pool))),
            ),
            Subject::new("inblock", pairs_2t_run(case, PAIRS_2T, || Written(Baseline(inblock)))),
            Subject::new("malloc", pairs_2t_run(case, PAIRS_2T, || Written(Malloc::<N>))),
            Subject::new("lifo", pairs_2t_run(case, PAIRS_2T, || Written(Baseline(stack)))),
            Subject::new("thread-list", pairs_2t_run(case, PAIRS_2T, || Written(list()))),
        ]);
    }
    harness.interleave(subjects)
}

/// Allocates many blocks by one call, writes each, and frees them by one call; one by one where a
/// subject has no such call.
fn bulk(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
    case: &'static str,
    each: usize,
) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 64;
    let rounds = harness.scale(2_048_000) / each;
    let Allocators { pool, inblock, stack, lists } = &Allocators::new(arena, memory, SIZE)?;
    harness.interleave(vec![
        Subject::countable("pinfold", bulk_run(case, each, rounds, || OwnedBlocks(pool.local()))),
        Subject::countable("pinfold-raw", bulk_run(case, each, rounds, || RawBlocks(pool.local()))),
        Subject::new("inblock", one_by_one(case, each, rounds, Baseline(inblock))),
        Subject::new("malloc", one_by_one(case, each, rounds, Malloc::<SIZE>)),
        Subject::new("lifo", move |out: &mut Samples| {
            let mut many = Vec::with_capacity(each);
            bulk_rounds(out, (case, each, rounds), || {
                stack.alloc_many(each, &mut many);
                black_box(&mut many).iter_mut().for_each(|block| block.write(block.address()));
                let got = many.len();
                stack.free_many(&mut many);
                got
            })
        }),
        Subject::new("thread-list", move |out: &mut Samples| {
            let (mut list, mut many) = (ThreadList::new(lists, STACK), Vec::with_capacity(each));
            bulk_rounds(out, (case, each, rounds), || {
                list.alloc_many(each, &mut many);
                black_box(&mut many).iter_mut().for_each(|block| block.write(block.address()));
                let got = many.len();
                list.free_many(&mut many);
                got
            })
        }),
    ])
}

/// Measures `rounds` calls of `work`, which allocates and frees `each` blocks and returns how many
/// it got.
#[inline(always)]
fn bulk_rounds(
    out: &mut Samples,
    (case, each, rounds): (&'static str, usize, usize),
    mut work: impl FnMut() -> usize,
) -> Result<(), BenchError> {
    black_box((0..WARM_UP / each).map(|_| work()).sum::<usize>());
    let (cost, got) = Cost::of(|| (0..rounds).map(|_| work()).sum::<usize>());
    out.cost(case, cost, rounds * each);
    if got == rounds * each { Ok(()) } else { Err(BenchError::Short { asked: rounds * each, got }) }
}

/// Returns a run of one call per block.
fn one_by_one<H: AllocWritten>(
    case: &'static str,
    each: usize,
    rounds: usize,
    mut handle: H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    let mut held: Vec<H::Object> = Vec::with_capacity(each);
    move |out| {
        let mut work = |rounds| {
            for _ in 0..rounds {
                for _ in 0..each {
                    held.push(handle.alloc_written()?);
                }
                black_box(&held);
                handle.free_many(&mut held)?;
            }
            Ok(())
        };
        work(WARM_UP / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}

/// Frees 4,096 blocks at random.
fn random(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 128;
    let (case, rounds) = ("random-4096", harness.scale(256));
    let Allocators { pool, inblock, stack, lists } = &Allocators::new(arena, memory, SIZE)?;
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            random_run(case, rounds, || Written(OwnedBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            random_run(case, rounds, || Written(RawBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-shared",
            random_run(case, rounds, || Written(SharedRawBlocks(pool))),
        ),
        Subject::new("inblock", random_run(case, rounds, || Written(Baseline(inblock)))),
        Subject::new("malloc", random_run(case, rounds, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", random_run(case, rounds, || Written(Baseline(stack)))),
        Subject::new(
            "thread-list",
            random_run(case, rounds, || Written(Baseline(ThreadList::new(lists, STACK)))),
        ),
    ])
}

/// Frees one of 4,096 blocks at random and allocates another.
fn out(harness: &Harness<'_>, arena: &Arena, memory: &mut [u8]) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 64;
    let (case, times) = ("out-4096", harness.scale(1_000_000));
    let Allocators { pool, inblock, stack, lists } = &Allocators::new(arena, memory, SIZE)?;
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            replace_run(case, times, || Written(OwnedBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            replace_run(case, times, || Written(RawBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-shared",
            replace_run(case, times, || Written(SharedRawBlocks(pool))),
        ),
        Subject::new("inblock", replace_run(case, times, || Written(Baseline(inblock)))),
        Subject::new("malloc", replace_run(case, times, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", replace_run(case, times, || Written(Baseline(stack)))),
        Subject::new(
            "thread-list",
            replace_run(case, times, || Written(Baseline(ThreadList::new(lists, STACK)))),
        ),
    ])
}

/// Frees the oldest of `outstanding` blocks and allocates another.
fn queue(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
    case: &'static str,
    outstanding: usize,
) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 64;
    let times = harness.scale(1_000_000);
    let Allocators { pool, inblock, stack, lists } = &Allocators::new(arena, memory, SIZE)?;
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            queue_run(case, outstanding, times, || Written(OwnedBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            queue_run(case, outstanding, times, || Written(RawBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-shared",
            queue_run(case, outstanding, times, || Written(SharedRawBlocks(pool))),
        ),
        Subject::new("inblock", queue_run(case, outstanding, times, || Written(Baseline(inblock)))),
        Subject::new("malloc", queue_run(case, outstanding, times, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", queue_run(case, outstanding, times, || Written(Baseline(stack)))),
        Subject::new(
            "thread-list",
            queue_run(case, outstanding, times, || {
                Written(Baseline(ThreadList::new(lists, STACK)))
            }),
        ),
    ])
}
