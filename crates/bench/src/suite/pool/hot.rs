//! The hot path: one block out and back again, many by one call, and 4,096 out at a time, freed at random.

use super::{BenchError, pool};
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::pages::{Pages, blocks};
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{
    Baseline, Malloc, OUT, Raw, Returned, Safe, TWO, Unowned, WARM, Writing, Written, alone, bulks,
    scattered, together, unchecked_pairs,
};
use pinfold::Arena;
use std::hint::black_box;

/// How many blocks the stacks have.
const STACK: usize = 2 * OUT;

/// The names of a pair's cases: each block written or not, by one thread, and by two where it is measured.
struct Names {
    written: &'static str,
    unwritten: &'static str,
    by_two: Option<&'static str>,
}

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let names = |written, unwritten| Names { written, unwritten, by_two: None };
    let mut records = pair::<16>(harness, arena, memory, &names("pair-16", "pair-16-nowrite"))?;
    let both = Names { by_two: Some("pair-64-2t"), ..names("pair-64", "pair-64-nowrite") };
    records.extend(pair::<64>(harness, arena, memory, &both)?);
    records.extend(pair::<256>(harness, arena, memory, &names("pair-256", "pair-256-nowrite"))?);
    records.extend(pair::<1024>(harness, arena, memory, &names("pair-1024", "pair-1024-nowrite"))?);
    records.extend(pair::<4096>(harness, arena, memory, &names("pair-4096", "pair-4096-nowrite"))?);
    records.extend(bulk(harness, arena, memory, "bulk-32", 32)?);
    records.extend(bulk(harness, arena, memory, "bulk-512", 512)?);
    records.extend(random(harness, arena, memory)?);
    Ok(records)
}

/// The memory of the baselines: of the pool, and of each of the stacks.
fn parts(memory: &mut [u8], size: usize) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let (one, rest) = memory.split_at_mut(STACK * size);
    let (two, rest) = rest.split_at_mut(STACK * size);
    (rest, one, two)
}

/// One out and back again, by one thread and, where `by_two` names a case, by two.
fn pair<const N: usize>(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
    names: &Names,
) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let pool = pool(arena, N)?;
    let (pages, one, two) = parts(memory, N);
    let inblock = InBlock::new(Pages::new(pages), N);
    let (stack, lists) = (Lifo::new(blocks(one, N)), Lifo::new(blocks(two, N)));
    let (pool, inblock, stack, lists) = (&pool, &inblock, &stack, &lists);
    let list = || Baseline(ThreadList::new(lists, STACK / 2));
    let (with, without) = (names.written, names.unwritten);
    let mut subjects = vec![
        Subject::countable("pinfold", alone(with, times, || Written(Raw(pool.local())))),
        Subject::countable("pinfold-unchecked", move |out: &mut Samples| {
            out.cost(with, unchecked_pairs::<true>(arena, N, times)?, times);
            Ok(())
        }),
        Subject::countable("pinfold-block", alone(with, times, || Written(Safe(pool.local())))),
        Subject::countable("pinfold-block-local", alone(with, times, || Written(Returned(pool.local())))),
        Subject::countable("pinfold-shared", alone(with, times, || Written(Unowned(pool)))),
        Subject::new("inblock", alone(with, times, || Written(Baseline(inblock)))),
        Subject::new("malloc", alone(with, times, || Written(Malloc::<N>))),
        Subject::new("lifo", alone(with, times, || Written(Baseline(stack)))),
        Subject::new("thread-list", alone(with, times, || Written(list()))),
        Subject::countable("pinfold", alone(without, times, || Raw(pool.local()))),
        Subject::countable("pinfold-unchecked", move |out: &mut Samples| {
            out.cost(without, unchecked_pairs::<false>(arena, N, times)?, times);
            Ok(())
        }),
        Subject::countable("pinfold-block", alone(without, times, || Safe(pool.local()))),
        Subject::countable("pinfold-block-local", alone(without, times, || Returned(pool.local()))),
        Subject::countable("pinfold-shared", alone(without, times, || Unowned(pool))),
        Subject::new("inblock", alone(without, times, || Baseline(inblock))),
        Subject::new("malloc", alone(without, times, || Malloc::<N>)),
        Subject::new("lifo", alone(without, times, || Baseline(stack))),
        Subject::new("thread-list", alone(without, times, list)),
    ];
    if let Some(case) = names.by_two {
        subjects.extend([
            Subject::countable("pinfold", together(case, TWO, || Written(Raw(pool.local())))),
            Subject::countable("pinfold-shared", together(case, TWO, || Written(Unowned(pool)))),
            Subject::new("inblock", together(case, TWO, || Written(Baseline(inblock)))),
            Subject::new("malloc", together(case, TWO, || Written(Malloc::<N>))),
            Subject::new("lifo", together(case, TWO, || Written(Baseline(stack)))),
            Subject::new("thread-list", together(case, TWO, || Written(list()))),
        ]);
    }
    harness.interleave(subjects)
}

/// Many out in one call, each written, and back again in one; one by one where a subject has no such call.
fn bulk(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
    case: &'static str,
    each: usize,
) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 64;
    let rounds = harness.scale(2_048_000) / each;
    let pool = pool(arena, SIZE)?;
    let (pages, one, two) = parts(memory, SIZE);
    let inblock = InBlock::new(Pages::new(pages), SIZE);
    let (stack, lists) = (Lifo::new(blocks(one, SIZE)), Lifo::new(blocks(two, SIZE)));
    let (pool, inblock, stack, lists) = (&pool, &inblock, &stack, &lists);
    harness.interleave(vec![
        Subject::countable("pinfold", bulks(case, each, rounds, || Raw(pool.local()))),
        Subject::countable("pinfold-shared", bulks(case, each, rounds, || Unowned(pool))),
        Subject::new("inblock", one_by_one(case, each, rounds, Baseline(inblock))),
        Subject::new("malloc", one_by_one(case, each, rounds, Malloc::<SIZE>)),
        Subject::new("lifo", move |out: &mut Samples| {
            let mut many = Vec::with_capacity(each);
            moved(out, (case, each, rounds), || {
                stack.alloc_many(each, &mut many);
                black_box(&mut many).iter_mut().for_each(|block| block.write(block.number()));
                let got = many.len();
                stack.free_many(&mut many);
                got
            })
        }),
        Subject::new("thread-list", move |out: &mut Samples| {
            let (mut list, mut many) = (ThreadList::new(lists, STACK), Vec::with_capacity(each));
            moved(out, (case, each, rounds), || {
                list.alloc_many(each, &mut many);
                black_box(&mut many).iter_mut().for_each(|block| block.write(block.number()));
                let got = many.len();
                list.free_many(&mut many);
                got
            })
        }),
    ])
}

/// A run of what moves `each` blocks to and fro; it says how many it got.
#[inline(always)]
fn moved(
    out: &mut Samples,
    (case, each, rounds): (&'static str, usize, usize),
    mut work: impl FnMut() -> usize,
) -> Result<(), BenchError> {
    black_box((0..WARM / each).map(|_| work()).sum::<usize>());
    let (cost, got) = Cost::of(|| (0..rounds).map(|_| work()).sum::<usize>());
    out.cost(case, cost, rounds * each);
    if got == rounds * each { Ok(()) } else { Err(BenchError::Short { asked: rounds * each, got }) }
}

/// A run of one call for each block.
fn one_by_one<H: Writing>(
    case: &'static str,
    each: usize,
    rounds: usize,
    mut hand: H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    let mut held: Vec<H::Thing> = Vec::with_capacity(each);
    move |out| {
        let mut work = |rounds| {
            for _ in 0..rounds {
                for _ in 0..each {
                    held.push(hand.get_written()?);
                }
                black_box(&held);
                held.drain(..).try_for_each(|thing| hand.put(thing))?;
            }
            Ok(())
        };
        work(WARM / each)?;
        let (cost, result) = Cost::of(|| work(rounds));
        out.cost(case, cost, rounds * each);
        result
    }
}

/// 4,096 out at a time, freed at random.
fn random(harness: &Harness<'_>, arena: &Arena, memory: &mut [u8]) -> Result<Vec<Record>, BenchError> {
    const SIZE: usize = 128;
    let (case, rounds) = ("random-4096", harness.scale(256));
    let pool = pool(arena, SIZE)?;
    let (pages, one, two) = parts(memory, SIZE);
    let inblock = InBlock::new(Pages::new(pages), SIZE);
    let (stack, lists) = (Lifo::new(blocks(one, SIZE)), Lifo::new(blocks(two, SIZE)));
    let (pool, inblock, stack, lists) = (&pool, &inblock, &stack, &lists);
    harness.interleave(vec![
        Subject::countable("pinfold", scattered(case, rounds, || Written(Raw(pool.local())))),
        Subject::countable("pinfold-block", scattered(case, rounds, || Written(Safe(pool.local())))),
        Subject::countable("pinfold-shared", scattered(case, rounds, || Written(Unowned(pool)))),
        Subject::new("inblock", scattered(case, rounds, || Written(Baseline(inblock)))),
        Subject::new("malloc", scattered(case, rounds, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", scattered(case, rounds, || Written(Baseline(stack)))),
        Subject::new(
            "thread-list",
            scattered(case, rounds, || Written(Baseline(ThreadList::new(lists, STACK)))),
        ),
    ])
}
