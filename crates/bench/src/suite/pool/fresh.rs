//! Blocks that are allocated for the first time, and not written, or 64 bytes of them.
#![expect(unsafe_code, reason = "64 bytes of a block are written through its pointer")]

use super::setup::pool;
use super::workload::{BLOCKS, SIZE, memory_of};
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::lock::KernelLock;
use crate::baseline::pages::{Pages, blocks};
use crate::baseline::rbtree::RbTree;
use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{
    AllocLine, Baseline, Handle, Line, Malloc, OwnedBlocks, RawBlocks, SharedRawBlocks, alloc_all,
    free_all, slots,
};
use pinfold::Arena;
use std::cell::RefCell;

const UNWRITTEN: &str = "mpt3sas-alloc-nowrite";
const WRITTEN: &str = "mpt3sas-write";

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let n = harness.scale(BLOCKS);
    let memory = &RefCell::new(memory);
    // Pools and baselines in turn, as in `workload`.
    let unwritten = vec![
        Subject::countable("pinfold", move |out| {
            pass(UNWRITTEN, n, OwnedBlocks(pool(arena, SIZE)?.local()), out)
        }),
        Subject::new("inblock", move |out| {
            let memory = &mut memory.borrow_mut();
            pass(UNWRITTEN, n, Baseline(&InBlock::new(Pages::new(memory), SIZE)), out)
        }),
        Subject::countable("pinfold-raw", move |out| {
            pass(UNWRITTEN, n, RawBlocks(pool(arena, SIZE)?.local()), out)
        }),
        Subject::new("rbtree", move |out| {
            let memory = &mut memory.borrow_mut();
            pass(
                UNWRITTEN,
                n,
                Baseline(KernelLock::new(RbTree::new(Pages::new(memory), SIZE))),
                out,
            )
        }),
        Subject::countable("pinfold-shared", move |out| {
            let pool = pool(arena, SIZE)?;
            pass(UNWRITTEN, n, SharedRawBlocks(&pool), out)
        }),
        Subject::new("malloc", move |out| pass(UNWRITTEN, n, Malloc::<SIZE>, out)),
        Subject::new("thread-list", move |out| {
            let memory = &mut memory.borrow_mut();
            let home = Lifo::new(blocks(memory_of(memory, n), SIZE));
            pass(UNWRITTEN, n, Baseline(ThreadList::new(&home, n)), out)
        }),
    ];
    let written = vec![
        Subject::new("inblock", move |out| {
            let memory = &mut memory.borrow_mut();
            line(n, Baseline(&InBlock::new(Pages::new(memory), SIZE)), out)
        }),
        Subject::countable("pinfold", move |out| {
            line(n, OwnedBlocks(pool(arena, SIZE)?.local()), out)
        }),
        Subject::new("rbtree", move |out| {
            let memory = &mut memory.borrow_mut();
            line(n, Baseline(KernelLock::new(RbTree::new(Pages::new(memory), SIZE))), out)
        }),
        Subject::new("malloc", move |out| line(n, Malloc::<SIZE>, out)),
        Subject::new("thread-list", move |out| {
            let memory = &mut memory.borrow_mut();
            let home = Lifo::new(blocks(memory_of(memory, n), SIZE));
            line(n, Baseline(ThreadList::new(&home, n)), out)
        }),
    ];
    let mut records = harness.interleave(unwritten)?;
    records.extend(harness.interleave(written)?);
    Ok(records)
}

/// Records the time of all allocations; the frees are not timed.
fn pass<H: Handle>(
    case: &'static str,
    blocks: usize,
    mut handle: H,
    out: &mut Samples,
) -> Result<(), BenchError> {
    let mut held = slots(blocks);
    out.cost(case, alloc_all(&mut handle, &mut held)?, blocks);
    free_all(&mut handle, held).map(drop)
}

/// The same with 64 bytes of each block written.
fn line<H: AllocLine>(blocks: usize, handle: H, out: &mut Samples) -> Result<(), BenchError> {
    // SAFETY: every subject here makes its blocks of `SIZE` bytes, which is more than 64.
    pass(WRITTEN, blocks, unsafe { Line::new(handle) }, out)
}
