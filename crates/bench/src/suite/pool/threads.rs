//! `remote-free`: one thread allocates blocks, another frees them. `owners-64`: many owners of one
//! pool.

use super::setup::pool;
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Batches, Lifo};
use crate::baseline::pages::{Pages, blocks};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{
    Baseline, Handle, Malloc, Object, OwnedBlocks, RawBlocks, SharedRawBlocks, Written, owners_run,
    spawn_second,
};
use pinfold::Arena;
use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// A case: its name, and how many blocks are passed at a time, enough that passing them costs
/// little per block.
type Case = (&'static str, usize);
const REMOTE_FREE: Case = ("remote-free", 256);
/// How many bytes a block has.
const SIZE: usize = 64;
/// How many batches there are.
const BATCHES: usize = 8;

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let mut records = relayed(harness, arena, memory)?;
    records.extend(owners(harness, arena, memory)?);
    Ok(records)
}

/// `owners-64`.
fn owners(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    const CASE: &str = "owners-64";
    let pool = pool(arena, SIZE)?;
    let (behind, rest) = memory.split_at_mut(8192 * SIZE);
    let (behind, inblock) = (Lifo::new(blocks(behind, SIZE)), InBlock::new(Pages::new(rest), SIZE));
    let (pool, inblock, behind) = (&pool, &inblock, &behind);
    harness.interleave(vec![
        Subject::countable("pinfold", owners_run(CASE, || Written(OwnedBlocks(pool.local())))),
        Subject::countable("pinfold-shared", owners_run(CASE, || Written(SharedRawBlocks(pool)))),
        Subject::new("inblock", owners_run(CASE, || Written(Baseline(inblock)))),
        Subject::new("batches", owners_run(CASE, || Written(Baseline(Batches::new(behind))))),
    ])
}

/// `remote-free`.
fn relayed(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let case = REMOTE_FREE;
    let batches = harness.scale(2_000);
    let pool = pool(arena, SIZE)?;
    // All that may be in flight between the threads, and what the two lists cache.
    let needed = 2 * case.1 * BATCHES * SIZE;
    let (one, rest) = memory.split_at_mut(needed);
    let (two, rest) = rest.split_at_mut(needed);
    let (stack, behind) = (Lifo::new(blocks(one, SIZE)), Lifo::new(blocks(two, SIZE)));
    let inblock = InBlock::new(Pages::new(rest), SIZE);
    let (pool, inblock, stack, behind) = (&pool, &inblock, &stack, &behind);
    harness.interleave(vec![
        Subject::countable("pinfold", relay(case, batches, || Written(OwnedBlocks(pool.local())))),
        Subject::countable(
            "pinfold-alone",
            alone(case, batches, || Written(OwnedBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-raw",
            relay(case, batches, || Written(RawBlocks(pool.local()))),
        ),
        Subject::countable(
            "pinfold-shared",
            relay(case, batches, || Written(SharedRawBlocks(pool))),
        ),
        Subject::new("inblock", relay(case, batches, || Written(Baseline(inblock)))),
        Subject::new("malloc", relay(case, batches, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", relay(case, batches, || Written(Baseline(stack)))),
        Subject::new("batches", relay(case, batches, || Written(Baseline(Batches::new(behind))))),
    ])
}

/// Returns a run in which this thread allocates `batches` batches and another frees them, each by
/// its own handle.
fn relay<H: Handle<Object: Send>>(
    (case, batch): Case,
    batches: usize,
    handle: impl Fn() -> H + Sync,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (to_freer, full) = sync_channel(BATCHES);
        let (to_allocator, empty) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            to_allocator.send(Vec::with_capacity(batch)).map_err(|_| BenchError::Thread)?;
        }
        let handle = &handle;
        let (cost, freed) = Cost::of(|| {
            std::thread::scope(|scope| {
                let freer = spawn_second(scope, move || {
                    let (cost, result) =
                        Cost::of(|| free_batches(&mut handle(), &full, &to_allocator));
                    result.map(|()| cost.counts)
                })?;
                let allocated = alloc_batches(&mut handle(), (batches, batch), &empty, to_freer);
                let freed = freer.join().unwrap_or(Err(BenchError::Thread))?;
                allocated.map(|()| freed)
            })
        });
        let cost = cost.with(freed?);
        out.cost(case, cost, batches * batch);
        Ok(())
    }
}

/// Returns a run in which one thread allocates and frees as many batches.
fn alone<H: Handle>(
    (case, batch): Case,
    batches: usize,
    handle: impl Fn() -> H,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (mut handle, mut held) = (handle(), Vec::with_capacity(batch));
        let (cost, result) = Cost::of(|| {
            (0..batches).try_for_each(|_| {
                for _ in 0..batch {
                    held.push(handle.alloc()?);
                }
                black_box(&held);
                handle.free_many(&mut held)
            })
        });
        out.cost(case, cost, batches * batch);
        result
    }
}

fn alloc_batches<H: Handle>(
    handle: &mut H,
    (batches, each): (usize, usize),
    empty: &Receiver<Vec<H::Object>>,
    full: SyncSender<Vec<H::Object>>,
) -> Result<(), BenchError> {
    for _ in 0..batches {
        let mut batch = empty.recv().map_err(|_| BenchError::Thread)?;
        for _ in 0..each {
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
        handle.free_many(&mut batch)?;
        // The first thread no longer receives when the last batches come back.
        let _ = empty.send(batch);
    }
    Ok(())
}
