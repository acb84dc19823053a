//! `free_many`, of a [`Local`] and of the pool.

use super::*;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;

/// The two calls.
#[derive(Clone, Copy, Debug)]
enum By {
    Local,
    Pool,
}

fn free_many<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(
    by: By,
    local: &mut Local<S, H>,
    pool: &DmaPool<S>,
    blocks: impl IntoIterator<Item = Block<S, H::Item>>,
) {
    match by {
        By::Local => local.free_many(blocks),
        By::Pool => pool.free_many(blocks),
    }
}

#[test]
fn any_number_of_blocks_is_freed() {
    for by in [By::Local, By::Pool] {
        let heap = Heap::new(8 << 20);
        for (watched, size) in [(false, 64), (false, 100), (false, 4096), (true, 64)] {
            let make = if watched { DmaPool::with_debug } else { DmaPool::new };
            let pool = make(&heap, "test", size, 0, 0).unwrap();
            let (mut allocates, mut frees) = (pool.local(), pool.local());
            for many in [0, 1, 63, 64, 65, 128, 300] {
                let kept = allocates.alloc().unwrap();
                let blocks: Vec<_> = (0..many).map(|_| allocates.alloc().unwrap()).collect();
                free_many(by, &mut frees, &pool, blocks);
                assert_eq!(pool.stats().in_use, 1);
                drop(kept);
            }
            drop((allocates, frees));
            assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
            pool.destroy().unwrap();
        }
    }
}

#[test]
fn blocks_of_another_pool_return_there() {
    for by in [By::Local, By::Pool] {
        let ((mut pool, heap), (mut other, other_heap)) = (shared(64), shared(64));
        let (mut local, mut other_local) = (pool.local(), other.local());
        let blocks: Vec<_> =
            (0..300).map(|i| if i % 3 == 0 { other_local.alloc() } else { local.alloc() }.unwrap()).collect();
        assert_eq!((pool.stats().in_use, other.stats().in_use), (200, 100));
        free_many(by, &mut local, &pool, blocks);
        assert_eq!((pool.stats().in_use, other.stats().in_use), (0, 0));
        drop((local, other_local));
        // All shares have returned, each to its own pool.
        assert!(pool.get_mut().is_some() && other.get_mut().is_some());
        drop((pool, other));
        assert_eq!((heap.frames_taken(), other_heap.frames_taken()), (0, 0));
    }
}

#[test]
fn an_iterator_that_panics_loses_nothing() {
    for by in [By::Local, By::Pool] {
        for at in [0, 1, 63, 64, 65, 127, 128, 199] {
            let (mut pool, heap) = shared(64);
            let mut local = pool.local();
            let blocks: Vec<_> = (0..200).map(|_| local.alloc().unwrap()).collect();
            let panics = blocks.into_iter().enumerate().map(|(i, block)| {
                assert_ne!(i, at, "the iterator");
                block
            });
            let call = AssertUnwindSafe(|| free_many(by, &mut local, &pool, panics));
            assert!(catch_unwind(call).is_err());
            // What it had returned was freed, and it dropped the rest.
            assert_eq!(pool.stats().in_use, 0);
            let again: HashSet<_> = (0..200).map(|_| local.alloc_raw().unwrap()).collect();
            assert_eq!(again.len(), 200);
            again.iter().for_each(|&raw| local.free_raw(raw).unwrap());
            drop(local);
            assert!(pool.get_mut().is_some());
            drop(pool);
            assert_eq!(heap.frames_taken(), 0);
        }
    }
}

/// The lock is not held while the iterator runs: it may use the pool.
#[test]
fn an_iterator_uses_the_pool() {
    let (pool, _heap) = shared(64);
    let cell = pool.local().into_cell();
    pool.free_many((0..200).map(|_| pool.alloc().unwrap()));
    cell.free_many((0..200).map(|_| cell.alloc().unwrap().into_block()));
    pool.free_many((0..200).map(|_| cell.alloc().unwrap().into_block()));
    assert_eq!(pool.stats().in_use, 0);
}

#[test]
fn the_last_shares_of_a_pool_are_given_up_with_its_blocks() {
    let (pool, heap) = shared(64);
    let (other, _other_heap) = shared(64);
    let blocks: Vec<_> = (0..100).map(|_| pool.alloc().unwrap()).collect();
    drop(pool);
    other.local().free_many(blocks);
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn stress_many_blocks_are_freed_by_another_thread() {
    let rounds = if cfg!(miri) { 5 } else { 2_000 };
    for by in [By::Local, By::Pool] {
        let (mut pool, heap) = shared(64);
        // Not a channel of the standard library, whose code is not built for ThreadSanitizer.
        let (lots, ended) = (&Mutex::new(VecDeque::<Vec<Block<Arc<Heap>>>>::new()), &AtomicBool::new(false));
        crate::testing::scope(|scope| {
            let (freer, mut frees) = (pool.clone(), pool.local());
            scope.spawn(move || {
                loop {
                    // Read before the look at the list, which is complete then.
                    let last = ended.load(Ordering::Acquire);
                    let Some(blocks) = lots.lock().pop_front() else {
                        if last {
                            break;
                        }
                        std::thread::yield_now();
                        continue;
                    };
                    assert!(blocks.iter().all(|block| block.memory().read_u64(0) == Ok(block.iova().raw())));
                    free_many(by, &mut frees, &freer, blocks);
                }
            });
            let cell = pool.local().into_cell();
            for round in 0..rounds {
                let kept: Vec<_> = (0..round % 50).map(|_| cell.alloc().unwrap()).collect();
                let write = |block: Block<_>| {
                    block.memory().write_u64(0, block.iova().raw()).unwrap();
                    block
                };
                let lot = (0..64).map(|_| write(cell.alloc().unwrap().into_block())).collect();
                while lots.lock().len() >= 4 {
                    std::thread::yield_now();
                }
                lots.lock().push_back(lot);
                drop(kept);
            }
            ended.store(true, Ordering::Release);
        });
        assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
        assert!(pool.get_mut().is_some());
        drop(pool);
        assert_eq!(heap.frames_taken(), 0);
    }
}

/// Blocks that one owner allocates and another frees, 64 at a time, with so many lots in between, in a pool of some size: all
/// read-modify-writes of both, per block. They are counted per call, so one thread can make all calls.
#[cfg(feature = "count-rmw")]
fn rmws<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(
    mut allocates: Local<S, H>,
    mut free_many: impl FnMut(Vec<Block<S, H::Item>>),
    between: usize,
) -> f64 {
    use crate::sync::{rmw_count, rmw_reset};
    const LOTS: usize = 500;
    let mut lots = std::collections::VecDeque::new();
    free_many((0..100 * 64).map(|_| allocates.alloc().unwrap()).collect());
    for round in 0..between + 2 * LOTS {
        if round == between + LOTS {
            rmw_reset();
        }
        lots.push_back((0..64).map(|_| allocates.alloc().unwrap()).collect());
        if lots.len() > between {
            free_many(lots.pop_front().unwrap());
        }
    }
    rmw_count() as f64 / (64 * LOTS) as f64
}

/// The row that the allocating owner is at is its own until it allocates from the next: a lot that returns before that is freed
/// remotely, all together.
#[cfg(feature = "count-rmw")]
#[test]
fn blocks_of_another_owner_are_freed_together() {
    for between in [0, 1, 2, 4, 20] {
        let heap = Heap::new(32 << 20);
        let (borrowed, (pool, _heap)) = (pool(&heap, 64), shared(64));
        let (mut frees, mut shared_frees) = (borrowed.local(), pool.local());
        let by_local = [
            rmws(borrowed.local(), |blocks| frees.free_many(blocks), between),
            rmws(pool.local(), |blocks| shared_frees.free_many(blocks), between),
        ];
        drop((frees, shared_frees));
        let by_pool = [
            rmws(borrowed.local(), |blocks| borrowed.free_many(blocks), between),
            rmws(pool.local(), |blocks| pool.free_many(blocks), between),
        ];
        for each in by_local.into_iter().chain(by_pool) {
            assert!(each <= 0.1, "{between} lots between: {each} of {by_local:?}, {by_pool:?}");
        }
    }
}

/// What a call has freed of another owner's rows is that owner's as soon as it ends, however it ends.
#[test]
fn blocks_of_another_owners_row_return_to_it_with_the_call() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 64, maximum: 64 }).unwrap();
    let (mut owner, mut frees) = (pool.local(), pool.local());
    for end in [None, Some(0), Some(1), Some(40), Some(63)] {
        // No more: the row stays this owner's current one.
        let all: Vec<_> = (0..64).map(|_| owner.alloc().unwrap()).collect();
        let call = AssertUnwindSafe(|| {
            frees.free_many(all.into_iter().enumerate().map(|(i, block)| {
                assert_ne!(Some(i), end, "the iterator");
                block
            }));
        });
        assert_eq!(catch_unwind(call).is_err(), end.is_some());
    }
    let all: Vec<_> = (0..64).map(|_| owner.alloc_raw().unwrap()).collect();
    // A refused one ends the call, too.
    let wrong = [all[0], all[1], all[1], all[2]];
    assert_eq!(frees.free_bulk(&wrong).unwrap_err().freed, 2);
    assert_eq!(core::iter::from_fn(|| owner.alloc_raw().ok()).count(), 2);
    drop((owner, frees));
    assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (64, 0));
}

/// A row that the freeing owner adopts in the middle of a call has what the call has freed of it before.
#[test]
fn a_row_adopted_in_the_middle_of_a_call_is_collected() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (allocates, mut frees) = (std::cell::RefCell::new(pool.local()), pool.local());
    let all: Vec<_> = (0..64).map(|_| allocates.borrow_mut().alloc().unwrap()).collect();
    // The row is released by the allocation of the next block.
    let next = std::cell::Cell::new(None);
    frees.free_many(all.into_iter().enumerate().map(|(i, block)| {
        if i == 30 {
            next.set(Some(allocates.borrow_mut().alloc().unwrap()));
        }
        block
    }));
    drop(next.take());
    let all: HashSet<_> = (0..64).map(|_| frees.alloc_raw().unwrap()).collect();
    assert_eq!(all.len(), 64);
    drop((allocates, frees));
    assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (64, 0));
}

/// Raw blocks of another owner's row: each takes its compare-and-swap, and all together what makes them known to that owner.
#[cfg(feature = "count-rmw")]
#[test]
fn raw_blocks_of_another_owner_are_announced_together() {
    use crate::sync::{rmw_count, rmw_reset};
    for call in 0..3 {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut frees) = (pool.local(), pool.local());
        let run = owner.alloc_run(core::num::NonZeroUsize::new(64).unwrap()).unwrap();
        let row = pool.find(run.iter().next().unwrap()).unwrap().site.row;
        assert!(run.len() == 64 && row.is_owned_by(owner.owner.id));
        let blocks: Vec<_> = run.iter().collect();
        let mut slots: Vec<_> = run.iter().map(Some).collect();
        rmw_reset();
        let freed = match call {
            0 => frees.free_run(run),
            1 => frees.free_bulk(&blocks),
            _ => frees.free_slots(&mut slots),
        };
        assert_eq!(freed, Ok(()));
        // 64, the announcement, whether the row has an owner, and the notice to all owners.
        assert_eq!(rmw_count(), 67, "by call {call}");
    }
}
