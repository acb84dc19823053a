//! The hot path: one block out and back again, or 32.

use super::{BenchError, pool, unchecked};
use crate::baseline::Offset;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::pages::Pages;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Hand, Malloc, Raw, Safe, TWO, Unowned, alone, together};
use pinfold::Arena;
use pinfold_core::dma_pool::RawBlock;
use std::hint::black_box;

/// How many blocks the stacks have.
const STACK: usize = 4096;
/// How many blocks a bulk call takes.
const BULK: usize = 32;

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    pages: &Pages<'_>,
) -> Result<Vec<Record>, BenchError> {
    let mut records = pair::<16>(harness, arena, pages, "pair-16", None)?;
    // One thread and two in turn, so that their ratio holds.
    records.extend(pair::<64>(harness, arena, pages, "pair-64", Some("pair-64-2t"))?);
    records.extend(pair::<256>(harness, arena, pages, "pair-256", None)?);
    records.extend(pair::<1024>(harness, arena, pages, "pair-1024", None)?);
    records.extend(pair::<4096>(harness, arena, pages, "pair-4096", None)?);
    records.extend(bulk(harness, arena, pages)?);
    Ok(records)
}

/// One out and back again, by one thread and, where `by_two` names a case, by two.
fn pair<const N: usize>(
    harness: &Harness<'_>,
    arena: &Arena,
    pages: &Pages<'_>,
    case: &'static str,
    by_two: Option<&'static str>,
) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(1_000_000);
    let pool = pool(arena, N)?;
    let inblock = InBlock::new(pages.clone(), N as u64);
    let stack = Lifo::new(STACK, N as u64);
    let (pool, inblock, stack) = (&pool, &inblock, &stack);
    let mut subjects = vec![
        Subject::countable("pinfold", alone(case, times, || Raw(pool.local()))),
        Subject::countable("pinfold-unchecked", move |out: &mut Samples| {
            out.cost(case, unchecked::pairs(arena, N, times)?, times);
            Ok(())
        }),
        Subject::countable("pinfold-block", alone(case, times, || Safe(pool.local()))),
        Subject::new("pinfold-shared", alone(case, times, || Unowned(pool))),
        Subject::new("inblock", alone(case, times, || Baseline(inblock))),
        Subject::new("malloc", alone(case, times, || Malloc::<N>)),
        Subject::new("lifo", alone(case, times, || Baseline(stack))),
        Subject::new("thread-list", alone(case, times, || Baseline(ThreadList::new(stack)))),
    ];
    if let Some(case) = by_two {
        subjects.extend([
            Subject::countable("pinfold", together(case, TWO, || Raw(pool.local()))),
            Subject::new("pinfold-shared", together(case, TWO, || Unowned(pool))),
            Subject::new("inblock", together(case, TWO, || Baseline(inblock))),
            Subject::new("malloc", together(case, TWO, || Malloc::<N>)),
            Subject::new("lifo", together(case, TWO, || Baseline(stack))),
            Subject::new("thread-list", together(case, TWO, || Baseline(ThreadList::new(stack)))),
        ]);
    }
    harness.interleave(subjects)
}

/// 32 out in one call and back again in one, or one by one where a subject has no such call.
fn bulk(harness: &Harness<'_>, arena: &Arena, pages: &Pages<'_>) -> Result<Vec<Record>, BenchError> {
    let rounds = harness.scale(64_000);
    let pool = pool(arena, 64)?;
    let inblock = InBlock::new(pages.clone(), 64);
    let stack = Lifo::new(STACK, 64);
    let (pool, stack) = (&pool, &stack);
    let mut local = pool.local();
    let (mut inblock, mut malloc) = (Baseline(&inblock), Malloc::<64>);
    let mut list = Baseline(ThreadList::new(stack));
    let mut many: Vec<Offset> = Vec::with_capacity(BULK);
    harness.interleave(vec![
        Subject::countable("pinfold", move |out: &mut Samples| {
            let mut slots = [None; BULK];
            bulks(out, rounds, || {
                full(local.fill(&mut slots), &slots)?;
                Ok(local.free_slots(&mut slots)?)
            })
        }),
        Subject::new("pinfold-shared", move |out: &mut Samples| {
            let mut slots = [None; BULK];
            bulks(out, rounds, || {
                full(pool.fill(&mut slots), &slots)?;
                Ok(pool.free_slots(&mut slots)?)
            })
        }),
        Subject::new("inblock", move |out: &mut Samples| bulks(out, rounds, || one_by_one(&mut inblock))),
        Subject::new("malloc", move |out: &mut Samples| bulks(out, rounds, || one_by_one(&mut malloc))),
        Subject::new("lifo", move |out: &mut Samples| {
            bulks(out, rounds, || {
                many.clear();
                stack.alloc_many(BULK, &mut many);
                stack.free_many(black_box(&many));
                Ok(())
            })
        }),
        Subject::new("thread-list", move |out: &mut Samples| bulks(out, rounds, || one_by_one(&mut list))),
    ])
}

#[inline(always)]
fn bulks(
    out: &mut Samples,
    rounds: usize,
    mut work: impl FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (cost, result) = Cost::of(|| (0..rounds).try_for_each(|_| work()));
    out.cost("bulk-32", cost, rounds * BULK);
    result
}

/// Whether all came.
#[inline(always)]
fn full(got: usize, slots: &[Option<RawBlock>; BULK]) -> Result<(), BenchError> {
    black_box(slots);
    if got == BULK { Ok(()) } else { Err(BenchError::Short { asked: BULK, got }) }
}

#[inline(always)]
fn one_by_one<H: Hand>(hand: &mut H) -> Result<(), BenchError> {
    let mut held = [const { None }; BULK];
    for slot in &mut held {
        *slot = Some(hand.get()?);
    }
    black_box(&held);
    held.into_iter().flatten().try_for_each(|thing| hand.put(thing))
}
