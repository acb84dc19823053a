//! The workload of the driver mpt3sas when it is loaded and unloaded.

use super::setup::pool;
use crate::baseline::Blocks;
use crate::baseline::block::Block;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::linear::Linear;
use crate::baseline::lock::KernelLock;
use crate::baseline::pages::{Pages, blocks};
use crate::baseline::rbtree::RbTree;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{
    Baseline, Handle, Malloc, OwnedBlocks, RawBlocks, Rng, SharedRawBlocks, Written, alloc_all,
    free_all, slots,
};
use pinfold::Arena;
use std::cell::RefCell;

/// How many blocks the driver allocates.
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
    // Each run of a baseline uses all of it.
    let memory = &RefCell::new(memory);
    let mut records = Vec::new();
    for case in FREES {
        records.extend(harness.interleave(subjects(case, n, arena, memory))?);
    }
    // Once: it takes seconds, because its free is quadratic.
    records.extend(harness.once().interleave(vec![Subject::new("linear", |out| {
        FREES.into_iter().try_for_each(|case| {
            let memory = &mut memory.borrow_mut();
            baseline(KernelLock::new(Linear::new(Pages::new(memory), SIZE)), case, n, out)
        })
    })])?);
    let cases = [ALLOC, "mpt3sas-free", "mpt3sas-free-random"];
    records.sort_by_key(|record| cases.iter().position(|case| *case == record.case));
    Ok(records)
}

/// The subjects of a case, pools and baselines in turn: none follows one that used the same memory,
/// which would leave half of it in the caches. One to three passes in other memory lie between two
/// in the same; those before `pinfold` are three.
fn subjects<'s>(
    case: Case,
    n: usize,
    arena: &'s Arena,
    memory: &'s RefCell<&mut [u8]>,
) -> Vec<Subject<'s, BenchError>> {
    vec![
        Subject::countable("pinfold", move |out| owned(arena, case, n, out)),
        Subject::new("inblock", move |out| {
            baseline(&InBlock::new(Pages::new(&mut memory.borrow_mut()), SIZE), case, n, out)
        }),
        Subject::countable("pinfold-raw", move |out| raw(arena, case, n, out)),
        Subject::new("rbtree", move |out| {
            let memory = &mut memory.borrow_mut();
            baseline(KernelLock::new(RbTree::new(Pages::new(memory), SIZE)), case, n, out)
        }),
        Subject::countable("pinfold-shared", move |out| shared(arena, case, n, out)),
        Subject::new("lifo", move |out| {
            let memory = &mut memory.borrow_mut();
            baseline(&Lifo::new(blocks(memory_of(memory, n), SIZE)), case, n, out)
        }),
        Subject::new("malloc", move |out| malloc(case, n, out)),
        Subject::new("thread-list", move |out| {
            let memory = &mut memory.borrow_mut();
            let home = Lifo::new(blocks(memory_of(memory, n), SIZE));
            baseline(ThreadList::new(&home, n), case, n, out)
        }),
    ]
}

/// Returns the memory of the first `blocks` blocks.
pub(super) fn memory_of(memory: &mut [u8], blocks: usize) -> &mut [u8] {
    memory.get_mut(..blocks * SIZE).unwrap_or_default()
}

/// A case, and whether its frees are in random order.
type Case = (&'static str, bool);

/// Allocates all blocks and frees them in the order of the case, which ends with `retire`. Returns
/// the cost of both.
fn pass<H: Handle>(
    (_, random): Case,
    blocks: usize,
    mut handle: H,
    retire: impl FnOnce(H),
) -> Result<(Cost, Cost), BenchError> {
    let mut held = slots(blocks);
    let alloc = alloc_all(&mut handle, &mut held)?;
    if random {
        Rng::new().shuffle(&mut held);
    }
    let free = free_all(&mut handle, held)?;
    let (retired, ()) = Cost::of(|| retire(handle));
    Ok((alloc, free + retired))
}

/// Records a pass; the allocations once, with the ordered frees.
fn record(out: &mut Samples, (case, random): Case, blocks: usize, alloc: Cost, free: Cost) {
    if !random {
        out.cost(ALLOC, alloc, blocks);
    }
    out.cost(case, free, blocks);
}

/// A pass by a pool of Pinfold's; its destruction counts as part of the frees.
macro_rules! pinfold {
    ($name:ident, |$pool:ident| $handle:expr) => {
        fn $name(
            arena: &Arena,
            case: Case,
            blocks: usize,
            out: &mut Samples,
        ) -> Result<(), BenchError> {
            let $pool = pool(arena, SIZE)?;
            let (alloc, free) = pass(case, blocks, Written($handle), drop)?;
            let (destroy, ()) = Cost::of(|| drop($pool));
            record(out, case, blocks, alloc, free + destroy);
            Ok(())
        }
    };
}
pinfold!(raw, |pool| RawBlocks(pool.local()));
pinfold!(owned, |pool| OwnedBlocks(pool.local()));
pinfold!(shared, |pool| SharedRawBlocks(&pool));

fn baseline<'m, B: Blocks<Block = Block<'m>>>(
    pool: B,
    case: Case,
    blocks: usize,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let (alloc, free) =
        pass(case, blocks, Written(Baseline(pool)), |mut handle| handle.0.0.destroy())?;
    record(out, case, blocks, alloc, free);
    Ok(())
}

fn malloc(case: Case, blocks: usize, out: &mut Samples) -> Result<(), BenchError> {
    let (alloc, free) = pass(case, blocks, Written(Malloc::<SIZE>), drop)?;
    record(out, case, blocks, alloc, free);
    Ok(())
}
