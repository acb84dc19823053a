//! Threads: blocks are freed anywhere, and wrong frees from anywhere give no block two owners.

use super::{heap, pool};
use crate::dma_pool::Block;
use crate::sync::Mutex;
use crate::testing::scope;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const ROUNDS: usize = if cfg!(miri) { 20 } else { 2_000 };

#[test]
fn stress_exactly_one_of_two_raw_frees_succeeds() {
    let heap = heap(4);
    let pool = pool(&heap, 64);
    let (ready, freed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut local = pool.local();
    let blocks: Vec<_> = (0..ROUNDS).map(|_| local.alloc_raw().unwrap()).collect();
    scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut local = pool.local();
                ready.fetch_add(1, Ordering::Relaxed);
                while ready.load(Ordering::Relaxed) < 2 {
                    thread::yield_now();
                }
                for &block in &blocks {
                    freed.fetch_add(usize::from(local.free_raw(block).is_ok()), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(freed.into_inner(), ROUNDS);
    assert_eq!(pool.stats().in_use, 0);
    let again: HashSet<_> = (0..2 * ROUNDS).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!(again.len(), 2 * ROUNDS, "no block has two owners");
}

#[test]
fn stress_wrong_frees_do_not_disturb_the_right_ones() {
    let heap = heap(4);
    let pool = pool(&heap, 64);
    let mut first = pool.local();
    let owned: Vec<_> = (0..100).map(|_| first.alloc().unwrap()).collect();
    let stale: Vec<_> = owned.iter().map(|block| block.as_raw()).collect();
    scope(|scope| {
        scope.spawn(|| {
            let mut local = pool.local();
            for _ in 0..ROUNDS / 10 {
                for &block in &stale {
                    assert!(local.free_raw(block).is_err(), "always owned by a Block, or free");
                }
            }
        });
        scope.spawn(|| {
            let mut local = pool.local();
            let mut kept = owned;
            for _ in 0..ROUNDS {
                let block = kept.pop().unwrap();
                local.free(block);
                let block = local.alloc().unwrap();
                block.memory().write_u64(0, 1).unwrap();
                kept.push(block);
            }
        });
    });
    drop(first);
    pool.destroy().unwrap();
}

#[test]
fn stress_a_producer_and_a_consumer_keep_the_pool_small() {
    let heap = heap(64);
    let pool = pool(&heap, 64);
    let queue = Mutex::new(Vec::<Vec<Block>>::new());
    scope(|scope| {
        let (pool, queue) = (&pool, &queue);
        scope.spawn(move || {
            let (mut local, mut freed) = (pool.local(), 0);
            while freed < ROUNDS {
                let batch = queue.lock().pop();
                match batch {
                    Some(batch) => {
                        freed += 1;
                        local.free_many(batch);
                    }
                    None => thread::yield_now(),
                }
            }
        });
        scope.spawn(move || {
            let mut local = pool.local();
            for _ in 0..ROUNDS {
                let batch: Vec<_> = (0..64).map(|_| local.alloc().unwrap()).collect();
                while queue.lock().len() > 4 {
                    thread::yield_now();
                }
                queue.lock().push(batch);
            }
        });
    });
    let stats = pool.stats();
    assert_eq!(stats.in_use, 0);
    assert!(stats.blocks <= 32_768, "{stats:?}");
    pool.destroy().unwrap();
}

#[test]
fn stress_blocks_dropped_on_other_threads_return() {
    let heap = heap(16);
    let pool = pool(&heap, 192);
    scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut local = pool.local();
                for _ in 0..ROUNDS / 20 {
                    let blocks: Vec<_> = (0..100).map(|_| local.alloc_zeroed().unwrap()).collect();
                    for (i, block) in blocks.iter().enumerate() {
                        block.memory().write_u64(0, i as u64).unwrap();
                    }
                    for (i, block) in blocks.iter().enumerate() {
                        assert_eq!(block.memory().read_u64(0).unwrap(), i as u64);
                    }
                    thread::spawn(move || drop(blocks)).join().unwrap();
                }
            });
        }
    });
    assert_eq!(pool.stats().in_use, 0);
    pool.destroy().unwrap();
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn stress_shrink_beside_owners_that_allocate_and_free() {
    let heap = heap(16);
    let pool = pool(&heap, 64);
    scope(|scope| {
        for seed in [3, 5] {
            let pool = &pool;
            scope.spawn(move || {
                let mut local = pool.local();
                for round in 0..ROUNDS / 20 {
                    let count = 1 + (round * seed * 97) % 3_000;
                    let blocks: Vec<_> = (0..count).map(|_| local.alloc().unwrap()).collect();
                    for block in &blocks {
                        block.memory().write_u64(0, block.iova().raw()).unwrap();
                    }
                    for block in blocks {
                        assert_eq!(block.memory().read_u64(0).unwrap(), block.iova().raw());
                        local.free(block);
                    }
                }
            });
        }
        let pool = &pool;
        scope.spawn(move || {
            for _ in 0..ROUNDS / 10 {
                pool.shrink();
                thread::yield_now();
            }
        });
    });
    pool.shrink();
    assert_eq!((pool.stats().in_use, heap.frames_taken()), (0, 0));
}
