//! The workload that began it: what the driver mpt3sas does when it is loaded and unloaded.

use super::{BenchError, pool};
use crate::baseline::Blocks;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::linear::Linear;
use crate::baseline::pages::Pages;
use crate::baseline::rbtree::RbTree;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Dice, Hand, Malloc, Raw, Safe, Unowned, give_all, slots, take_all};
use pinfold::Arena;

/// How many blocks the driver takes.
pub const BLOCKS: usize = 373_959;
/// How many bytes each has.
pub const SIZE: usize = 128;

const ALLOC: &str = "mpt3sas-alloc";
const FREES: [(&str, bool); 2] = [("mpt3sas-free", false), ("mpt3sas-free-random", true)];

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    pages: &Pages<'_>,
) -> Result<Vec<Record>, BenchError> {
    let (blocks, size) = (harness.scale(BLOCKS), SIZE as u64);
    let stack = Lifo::new(blocks, size);
    let stack = &stack;
    let mut records = harness.interleave(vec![
        Subject::countable("pinfold", move |out| raw(arena, blocks, out)),
        Subject::countable("pinfold-block", move |out| safe(arena, blocks, out)),
        Subject::new("pinfold-shared", move |out| shared(arena, blocks, out)),
        Subject::new("inblock", move |out| baseline(|| InBlock::new(pages.clone(), size), blocks, out)),
        Subject::new("rbtree", move |out| baseline(|| RbTree::new(pages.clone(), size), blocks, out)),
        Subject::new("malloc", move |out| malloc(blocks, out)),
        Subject::new("lifo", move |out| baseline(|| stack, blocks, out)),
        Subject::new("thread-list", move |out| baseline(|| ThreadList::new(stack), blocks, out)),
    ])?;
    // Once: it takes seconds, because its free is quadratic.
    records.extend(harness.once().interleave(vec![Subject::new("linear", move |out| {
        baseline(|| Linear::new(pages.clone(), size), blocks, out)
    })])?);
    let cases = [ALLOC, "mpt3sas-free", "mpt3sas-free-random"];
    records.sort_by_key(|record| cases.iter().position(|case| *case == record.case));
    Ok(records)
}

/// The figures of one pass: the allocs are told once, with the frees in their own order.
fn tell(out: &mut Samples, (case, random): (&'static str, bool), alloc: Cost, free: Cost, blocks: usize) {
    if !random {
        out.cost(ALLOC, alloc, blocks);
    }
    out.cost(case, free, blocks);
}

fn mix<T>(random: bool, held: &mut [T]) {
    if random {
        Dice::new().shuffle(held);
    }
}

fn raw(arena: &Arena, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let pool = pool(arena, SIZE)?;
        let (mut hand, mut held) = (Raw(pool.local()), slots(blocks));
        let alloc = take_all(&mut hand, &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut hand, held)?;
        let (retire, ()) = Cost::of(|| drop(hand));
        let (destroy, ()) = Cost::of(|| drop(pool));
        tell(out, case, alloc, free + retire + destroy, blocks);
    }
    Ok(())
}

fn safe(arena: &Arena, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let pool = pool(arena, SIZE)?;
        let (mut hand, mut held) = (Safe(pool.local()), slots(blocks));
        let alloc = take_all(&mut hand, &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut hand, held)?;
        let (retire, ()) = Cost::of(|| drop(hand));
        let (destroy, ()) = Cost::of(|| drop(pool));
        tell(out, case, alloc, free + retire + destroy, blocks);
    }
    Ok(())
}

fn shared(arena: &Arena, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let pool = pool(arena, SIZE)?;
        let mut held = slots(blocks);
        let alloc = take_all(&mut Unowned(&pool), &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut Unowned(&pool), held)?;
        let (rest, ()) = Cost::of(|| drop(pool));
        tell(out, case, alloc, free + rest, blocks);
    }
    Ok(())
}

fn baseline<B: Blocks>(create: impl Fn() -> B, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let (mut hand, mut held) = (Baseline(create()), slots(blocks));
        let alloc = take_all(&mut hand, &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut hand, held)?;
        let (rest, ()) = Cost::of(|| hand.0.destroy());
        tell(out, case, alloc, free + rest, blocks);
    }
    Ok(())
}

fn malloc(blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let (mut hand, mut held) = (Malloc::<SIZE>, slots::<<Malloc<SIZE> as Hand>::Thing>(blocks));
        let alloc = take_all(&mut hand, &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut hand, held)?;
        tell(out, case, alloc, free, blocks);
    }
    Ok(())
}
