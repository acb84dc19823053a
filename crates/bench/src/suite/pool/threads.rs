//! `remote-free`: one thread takes blocks, another gives them back.

use super::{BenchError, pool};
use crate::baseline::inblock::InBlock;
use crate::baseline::lifo::{Lifo, ThreadList};
use crate::baseline::pages::Pages;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::hand::{Baseline, Hand, Malloc, Raw, Unowned};
use pinfold::Arena;
use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// How many blocks go from thread to thread at a time: enough that handing them over costs next to nothing a block.
const BATCH: usize = 256;
/// How many batches there are.
const BATCHES: usize = 8;

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    pages: &Pages<'_>,
) -> Result<Vec<Record>, BenchError> {
    let batches = harness.scale(2_000);
    let pool = pool(arena, 64)?;
    let inblock = InBlock::new(pages.clone(), 64);
    let stack = Lifo::new(2 * BATCH * BATCHES, 64);
    let (pool, inblock, stack) = (&pool, &inblock, &stack);
    harness.interleave(vec![
        Subject::countable("pinfold", relay(batches, || Raw(pool.local()))),
        Subject::new("pinfold-shared", relay(batches, || Unowned(pool))),
        Subject::new("inblock", relay(batches, || Baseline(inblock))),
        Subject::new("malloc", relay(batches, || Malloc::<64>)),
        Subject::new("lifo", relay(batches, || Baseline(stack))),
        Subject::new("thread-list", relay(batches, || Baseline(ThreadList::new(stack)))),
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
        let (cost, (taken, freed)) = Cost::of(|| {
            std::thread::scope(|scope| {
                let freer = scope.spawn(move || {
                    let (cost, result) = Cost::of(|| free_batches(&mut hand(), &full, &to_taker));
                    result.map(|()| cost.rmw)
                });
                let taken = take_batches(&mut hand(), batches, &empty, to_freer);
                (taken, freer.join().unwrap_or(Err(BenchError::Thread)))
            })
        });
        let rmw = cost.rmw + freed?;
        taken?;
        out.cost("remote-free", Cost { rmw, ..cost }, batches * BATCH);
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
