//! The workload that began it: what the driver mpt3sas does when it is loaded and unloaded.

use super::{BenchError, pool};
use crate::baseline::Blocks;
use crate::baseline::block::Block;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::linear::Linear;
use crate::baseline::lock::KernelLock;
use crate::baseline::pages::{Pages, blocks};
use crate::baseline::rbtree::RbTree;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{
    Baseline, Hand, Malloc, Raw, Rng, Safe, Unowned, Written, give_all, slots, take_all,
};
use pinfold::Arena;
use std::cell::RefCell;

/// How many blocks the driver takes.
pub const BLOCKS: usize = 373_959;
/// How many bytes each has.
pub const SIZE: usize = 128;

const ALLOC: &str = "mpt3sas-alloc";
const FREES: [Case; 2] = [("mpt3sas-free", false), ("mpt3sas-free-random", true)];

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let n = harness.scale(BLOCKS);
    // Each run of a baseline has all of it.
    let memory = &RefCell::new(memory);
    let each = |work: fn(&mut [u8], Case, usize, &mut Samples) -> Result<(), BenchError>| {
        move |out: &mut Samples| {
            FREES.iter().try_for_each(|case| work(&mut memory.borrow_mut(), *case, n, out))
        }
    };
    let mut records = harness.interleave(vec![
        Subject::countable("pinfold", move |out| raw(arena, n, out)),
        Subject::countable("pinfold-block", move |out| safe(arena, n, out)),
        Subject::countable("pinfold-shared", move |out| shared(arena, n, out)),
        Subject::new(
            "inblock",
            each(|memory, case, n, out| baseline(&InBlock::new(Pages::new(memory), SIZE), case, n, out)),
        ),
        Subject::new(
            "rbtree",
            each(|memory, case, n, out| {
                baseline(KernelLock::new(RbTree::new(Pages::new(memory), SIZE)), case, n, out)
            }),
        ),
        Subject::new("malloc", move |out| malloc(n, out)),
        Subject::new(
            "lifo",
            each(|memory, case, n, out| baseline(&Lifo::new(blocks(some(memory, n), SIZE)), case, n, out)),
        ),
        Subject::new(
            "thread-list",
            each(|memory, case, n, out| {
                let home = Lifo::new(blocks(some(memory, n), SIZE));
                baseline(ThreadList::new(&home, n), case, n, out)
            }),
        ),
    ])?;
    // Once: it takes seconds, because its free is quadratic.
    records.extend(harness.once().interleave(vec![Subject::new(
        "linear",
        each(|memory, case, n, out| {
            baseline(KernelLock::new(Linear::new(Pages::new(memory), SIZE)), case, n, out)
        }),
    )])?);
    let cases = [ALLOC, "mpt3sas-free", "mpt3sas-free-random"];
    records.sort_by_key(|record| cases.iter().position(|case| *case == record.case));
    Ok(records)
}

/// The memory of so many blocks.
fn some(memory: &mut [u8], blocks: usize) -> &mut [u8] {
    memory.get_mut(..blocks * SIZE).unwrap_or_default()
}

/// A case, and whether its frees are in random order.
type Case = (&'static str, bool);

/// The figures of one pass: the allocs are told once, with the frees in their own order.
fn tell(out: &mut Samples, (case, random): Case, alloc: Cost, free: Cost, blocks: usize) {
    if !random {
        out.cost(ALLOC, alloc, blocks);
    }
    out.cost(case, free, blocks);
}

fn mix<T>(random: bool, held: &mut [T]) {
    if random {
        Rng::new().shuffle(held);
    }
}

fn raw(arena: &Arena, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let pool = pool(arena, SIZE)?;
        let (mut hand, mut held) = (Written(Raw(pool.local())), slots(blocks));
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
        let (mut hand, mut held) = (Written(Safe(pool.local())), slots(blocks));
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
        let alloc = take_all(&mut Written(Unowned(&pool)), &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut Written(Unowned(&pool)), held)?;
        let (rest, ()) = Cost::of(|| drop(pool));
        tell(out, case, alloc, free + rest, blocks);
    }
    Ok(())
}

fn baseline<'m, B: Blocks<Block = Block<'m>>>(
    pool: B,
    case: Case,
    blocks: usize,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let (mut hand, mut held) = (Written(Baseline(pool)), slots(blocks));
    let alloc = take_all(&mut hand, &mut held)?;
    mix(case.1, &mut held);
    let free = give_all(&mut hand, held)?;
    let (rest, ()) = Cost::of(|| hand.0.0.destroy());
    tell(out, case, alloc, free + rest, blocks);
    Ok(())
}

fn malloc(blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    for case in FREES {
        let (mut hand, mut held) = (Written(Malloc::<SIZE>), slots::<<Malloc<SIZE> as Hand>::Thing>(blocks));
        let alloc = take_all(&mut hand, &mut held)?;
        mix(case.1, &mut held);
        let free = give_all(&mut hand, held)?;
        tell(out, case, alloc, free, blocks);
    }
    Ok(())
}
