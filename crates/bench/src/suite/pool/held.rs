//! `held-2t-*`: the memory that a pool holds, beside the memory that was in use at its peak, in
//! long runs of two threads.

use super::scale::as_f64;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use crate::suite::handle::{Rng, spawn_second};
use crate::suite::reserved::Reserved;
use pinfold_core::dma_pool::{DmaPool, Local, RawBlock};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};

type Outcome = Result<(), BenchError>;

/// Bytes of a block.
const SIZE: usize = 64;
/// How many blocks are allocated, freed or passed by one step.
const BATCH: usize = 64;
/// What the pool may hold beside the blocks in use: what each of three owners may cache (the two
/// threads', and the pool's front), and a chunk.
const CONSTANT: u64 = 3 * (512 << 10) + (2 << 20);

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let subject = |case, pattern: fn(&DmaPool, &Live, usize) -> Outcome, steps| {
        let steps = harness.scale(steps);
        Subject::new("pinfold", move |out: &mut Samples| {
            held(out, case, |pool, live| pattern(pool, live, steps))
        })
    };
    harness.with_runs(harness.options().runs.min(3)).interleave(vec![
        subject("held-2t-pipe", pipe, 65_536),
        subject("held-2t-random", random, 256),
        subject("held-2t-waves", waves, 64),
    ])
}

/// Blocks in use. They are counted after they are allocated, and no longer before they are freed:
/// so the peak is not above the true one, and the ratio to it not below.
#[derive(Default)]
struct Live {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Live {
    fn allocated(&self, blocks: usize) {
        let now = self.now.fetch_add(blocks as u64, Ordering::Relaxed) + blocks as u64;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn freed(&self, blocks: usize) {
        self.now.fetch_sub(blocks as u64, Ordering::Relaxed);
    }
}

/// Runs a pattern on a new pool. A pool releases no chunk by itself, so what it holds at the end is
/// what it held at most.
fn held(
    out: &mut Samples,
    case: &'static str,
    pattern: impl FnOnce(&DmaPool, &Live) -> Outcome,
) -> Outcome {
    let (source, live) = (Arc::new(Reserved::new(1 << 30)?), Live::default());
    let pool = DmaPool::builder("bench").block(SIZE).build(&source)?;
    pattern(&pool, &live)?;
    let (held, peak) = (pool.stats().bytes, live.peak.load(Ordering::Relaxed) * SIZE as u64);
    let mib = |bytes| as_f64(bytes) / as_f64(1 << 20);
    let beyond = as_f64(held.saturating_sub(CONSTANT)) / as_f64(peak);
    out.figure(case, Metric::Count, "(held-const)/live", beyond);
    out.figure(case, Metric::Bytes, "MiB held", mib(held));
    out.figure(case, Metric::Bytes, "MiB live, peak", mib(peak));
    Ok(())
}

/// Allocates a batch.
fn take(owner: &mut Local, live: &Live, to: &mut Vec<RawBlock>, count: usize) -> Outcome {
    for _ in 0..count {
        to.push(owner.alloc_raw()?);
    }
    live.allocated(count);
    Ok(())
}

/// Frees the last `count` blocks of `from`.
fn give(owner: &mut Local, live: &Live, from: &mut Vec<RawBlock>, count: usize) -> Outcome {
    live.freed(count);
    Ok(owner.free_bulk(&from.split_off(from.len() - count))?)
}

/// One thread allocates and the other frees, in the same order, `batches` batches. An eighth of
/// them is in flight at first.
fn pipe(pool: &DmaPool, live: &Live, batches: usize) -> Outcome {
    let (send, receive) = sync_channel::<Vec<RawBlock>>(batches / 8 + 1);
    let full = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let consumer = spawn_second(scope, move || -> Outcome {
            let mut owner = pool.local();
            while !full.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            receive.into_iter().try_for_each(|mut batch| give(&mut owner, live, &mut batch, BATCH))
        })?;
        let mut owner = pool.local();
        let produced = (0..batches).try_for_each(|number| -> Outcome {
            full.fetch_or(number == batches / 8, Ordering::Release);
            let mut batch = Vec::with_capacity(BATCH);
            take(&mut owner, live, &mut batch, BATCH)?;
            send.send(batch).map_err(|_| BenchError::Thread)
        });
        full.store(true, Ordering::Release);
        drop(send);
        consumer.join().unwrap_or(Err(BenchError::Thread)).and(produced)
    })
}

/// How many sets of blocks the threads of `random` share, and the largest size of one in batches.
const SETS: (usize, usize) = (4, 2048);

/// Both threads, `steps` times, choose one of four sets and a size for it, up to 131,072 blocks:
/// they allocate what it lacks, or free blocks of it at random.
fn random(pool: &DmaPool, live: &Live, steps: usize) -> Outcome {
    let sets: &[Mutex<Vec<RawBlock>>] = &[const { Mutex::new(Vec::new()) }; SETS.0];
    let work = move |mut rng: Rng| -> Outcome {
        let mut owner = pool.local();
        for _ in 0..steps {
            let (set, size) = (rng.below(SETS.0), rng.below(SETS.1) * BATCH);
            let Some(set) = sets.get(set) else { continue };
            let mut set = set.lock().unwrap_or_else(PoisonError::into_inner);
            while set.len() < size {
                take(&mut owner, live, &mut set, BATCH)?;
            }
            while set.len() > size {
                for at in set.len() - BATCH..set.len() {
                    let other = rng.below(at + 1);
                    set.swap(at, other);
                }
                give(&mut owner, live, &mut set, BATCH)?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let second = spawn_second(scope, move || {
            let mut rng = Rng::new();
            rng.below(2);
            work(rng)
        })?;
        let first = work(Rng::new());
        second.join().unwrap_or(Err(BenchError::Thread)).and(first)
    })
}

/// One thread allocates all blocks of a wave, up to 262,144, and the other frees them at random
/// before the next.
fn waves(pool: &DmaPool, live: &Live, waves: usize) -> Outcome {
    let (to_freer, full) = sync_channel::<Vec<RawBlock>>(0);
    let (to_allocator, empty) = sync_channel(1);
    std::thread::scope(|scope| {
        let freer = spawn_second(scope, move || -> Outcome {
            let (mut owner, mut rng) = (pool.local(), Rng::new());
            for mut wave in full {
                rng.shuffle(&mut wave);
                while !wave.is_empty() {
                    give(&mut owner, live, &mut wave, BATCH)?;
                }
                // The first thread waits for it, unless it has failed.
                let _ = to_allocator.send(wave);
            }
            Ok(())
        })?;
        let (mut owner, mut rng, mut wave) = (pool.local(), Rng::new(), Vec::new());
        let allocated = (0..waves).try_for_each(|_| -> Outcome {
            for _ in 0..=rng.below(4096) {
                take(&mut owner, live, &mut wave, BATCH)?;
            }
            to_freer.send(std::mem::take(&mut wave)).map_err(|_| BenchError::Thread)?;
            wave = empty.recv().map_err(|_| BenchError::Thread)?;
            Ok(())
        });
        drop(to_freer);
        freer.join().unwrap_or(Err(BenchError::Thread)).and(allocated)
    })
}
