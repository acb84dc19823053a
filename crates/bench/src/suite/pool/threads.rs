//! `remote-free`: one thread takes blocks, another gives them back.

use super::{BenchError, pool};
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Batches, Lifo};
use crate::baseline::pages::{Pages, blocks};
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Hand, Malloc, Raw, Safe, Unowned, Written, beside};
use pinfold::Arena;
use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// How many blocks go from thread to thread at a time: enough that handing them over costs next to nothing a block.
const BATCH: usize = 256;
/// How many bytes a block has.
const SIZE: usize = 64;
/// How many batches there are.
const BATCHES: usize = 8;

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    memory: &mut [u8],
) -> Result<Vec<Record>, BenchError> {
    let batches = harness.scale(2_000);
    let pool = pool(arena, SIZE)?;
    // All that may be on the way, and what the two lists keep.
    let room = 2 * BATCH * BATCHES * SIZE;
    let (one, rest) = memory.split_at_mut(room);
    let (two, rest) = rest.split_at_mut(room);
    let (stack, behind) = (Lifo::new(blocks(one, SIZE)), Lifo::new(blocks(two, SIZE)));
    let inblock = InBlock::new(Pages::new(rest), SIZE);
    let (pool, inblock, stack, behind) = (&pool, &inblock, &stack, &behind);
    harness.interleave(vec![
        Subject::countable("pinfold", relay(batches, || Written(Raw(pool.local())))),
        Subject::countable("pinfold-block", relay(batches, || Written(Safe(pool.local())))),
        Subject::countable("pinfold-shared", relay(batches, || Written(Unowned(pool)))),
        Subject::new("inblock", relay(batches, || Written(Baseline(inblock)))),
        Subject::new("malloc", relay(batches, || Written(Malloc::<SIZE>))),
        Subject::new("lifo", relay(batches, || Written(Baseline(stack)))),
        Subject::new("batches", relay(batches, || Written(Baseline(Batches::new(behind))))),
    ])
}

/// A run: so many batches out by this thread and back by another, each with a hand of its own.
fn relay<H: Hand<Thing: Send>>(
    batches: usize,
    hand: impl Fn() -> H + Sync,
) -> impl FnMut(&mut Samples) -> Result<(), BenchError> {
    move |out| {
        let (to_freer, full) = sync_channel(BATCHES);
        let (to_taker, empty) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            to_taker.send(Vec::with_capacity(BATCH)).map_err(|_| BenchError::Thread)?;
        }
        let hand = &hand;
        let (cost, freed) = Cost::of(|| {
            std::thread::scope(|scope| {
                let freer = beside(scope, move || {
                    let (cost, result) = Cost::of(|| free_batches(&mut hand(), &full, &to_taker));
                    result.map(|()| cost.counts)
                })?;
                let taken = take_batches(&mut hand(), batches, &empty, to_freer);
                let freed = freer.join().unwrap_or(Err(BenchError::Thread))?;
                taken.map(|()| freed)
            })
        });
        let cost = cost.with(freed?);
        out.cost("remote-free", cost, batches * BATCH);
        Ok(())
    }
}

fn take_batches<H: Hand>(
    hand: &mut H,
    batches: usize,
    empty: &Receiver<Vec<H::Thing>>,
    full: SyncSender<Vec<H::Thing>>,
) -> Result<(), BenchError> {
    for _ in 0..batches {
        let mut batch = empty.recv().map_err(|_| BenchError::Thread)?;
        for _ in 0..BATCH {
            let thing = hand.get()?;
            black_box(H::number(&thing));
            batch.push(thing);
        }
        full.send(batch).map_err(|_| BenchError::Thread)?;
    }
    // The other ends when nothing more can come.
    drop(full);
    Ok(())
}

fn free_batches<H: Hand>(
    hand: &mut H,
    full: &Receiver<Vec<H::Thing>>,
    empty: &SyncSender<Vec<H::Thing>>,
) -> Result<(), BenchError> {
    while let Ok(mut batch) = full.recv() {
        for thing in batch.drain(..) {
            hand.put(thing)?;
        }
        // Nobody wants it any more when the last batches come.
        let _ = empty.send(batch);
    }
    Ok(())
}
