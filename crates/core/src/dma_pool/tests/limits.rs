//! The fewest and the most blocks of a pool, and calls that allocate all or none.

use super::hooked::{HOOK, Hooked};
use super::*;

fn limits(minimum: u64, maximum: u64) -> Limits {
    Limits { minimum, maximum }
}

#[test]
fn a_minimum_is_allocated_without_the_source_by_one_owner() {
    for (size, minimum) in [(64, 1), (64, 64), (64, 65), (64, 40_000), (192, 1000), (3000, 7), (5000, 3)] {
        let heap = Heap::new(8 << 20);
        let mut pool = pool(&heap, size);
        // Free blocks of the pool's own owner are available to every other.
        drop(pool.alloc().unwrap());
        pool.set_limits(limits(minimum, u64::MAX)).unwrap();
        let reserved = pool.stats().blocks;
        let granule = u64::from(pool.geometry.blocks_in(Order::for_bytes(size as u64).unwrap()));
        assert!((minimum..minimum + granule.max(64)).contains(&reserved), "{reserved} for {minimum}");
        heap.left.store(0, Ordering::Relaxed);
        let asked = heap.asked.load(Ordering::Relaxed);
        for _ in 0..3 {
            let mut local = pool.local();
            let blocks: Vec<_> = (0..minimum).map(|_| local.alloc_raw().unwrap()).collect();
            local.free_bulk(&blocks).unwrap();
            drop(local);
            let blocks: Vec<_> = (0..minimum).map(|_| pool.alloc_raw().unwrap()).collect();
            pool.free_bulk(&blocks).unwrap();
            pool.shrink();
            assert!(pool.stats().blocks >= minimum);
        }
        assert_eq!(heap.asked.load(Ordering::Relaxed), asked);
        pool.set_limits(Limits::default()).unwrap();
        assert!(pool.shrink() > 0 && heap.frames_taken() == 0);
    }
}

#[test]
fn a_pool_is_destroyed_and_dropped_with_its_minimum() {
    let heap = Heap::new(4 << 20);
    for destroyed in [true, false] {
        let pool = pool(&heap, 64);
        pool.set_limits(limits(1000, 1000)).unwrap();
        assert!(heap.frames_taken() > 0);
        if destroyed {
            pool.destroy().unwrap()
        } else {
            drop(pool)
        }
        assert_eq!(heap.frames_taken(), 0);
    }
}

#[test]
fn a_maximum_is_reached_and_exceeded_by_less_than_the_smallest_chunk() {
    for (size, maximum) in [(64, 1), (64, 64), (64, 100), (64, 5000), (192, 10_923), (3000, 5), (5000, 3)] {
        let heap = Heap::new(8 << 20);
        let pool = pool(&heap, size);
        pool.set_limits(limits(0, maximum)).unwrap();
        assert_eq!(heap.acquired.load(Ordering::Relaxed), 0);
        let granule = u64::from(pool.geometry.blocks_in(Order::for_bytes(size as u64).unwrap()));
        let mut local = pool.local();
        let mut blocks = Vec::new();
        let error = loop {
            match local.alloc_raw() {
                Ok(block) => blocks.push(block),
                Err(error) => break error,
            }
        };
        let all = blocks.len() as u64;
        assert!((maximum..maximum + granule).contains(&all), "{all} blocks for {maximum}");
        assert_eq!(error, AllocError::Maximum { maximum, blocks: all, in_use: all });
        assert_eq!(pool.alloc_raw(), Err(error));
        // What is freed can be allocated again, and a higher maximum takes effect at once.
        local.free_raw(blocks.pop().unwrap()).unwrap();
        blocks.push(local.alloc_raw().unwrap());
        pool.set_limits(limits(0, all + 1)).unwrap();
        blocks.push(pool.alloc_raw().unwrap());
        local.free_bulk(&blocks).unwrap();
    }
}

#[test]
fn the_error_at_the_maximum_tells_blocks_in_use_from_those_of_other_owners() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(limits(0, 64)).unwrap();
    let mut hoarder = pool.local();
    let blocks: Vec<_> = (0..40).map(|_| hoarder.alloc_raw().unwrap()).collect();
    hoarder.free_bulk(&blocks[..10]).unwrap();
    // An owner's counts are known from the next time on that it needs a row.
    pool.depot.record(&mut hoarder.owner);
    let error = pool.alloc_raw().unwrap_err();
    assert_eq!(error, AllocError::Maximum { maximum: 64, blocks: 64, in_use: 30 });
    let text = error.to_string();
    assert!(
        text.contains("may have 64 blocks and has 64, 30 of them in use as far as its owners have reported"),
        "{text}"
    );
    assert!(text.contains("other owners hold the rest: drop idle `Local`s"), "{text}");
    assert!(text.ends_with("raise the maximum with `DmaPool::set_limits`"), "{text}");
    drop(hoarder);
    assert!(pool.alloc_raw().is_ok());
    // Where nobody holds a free one, no other owner is blamed.
    let all: Vec<_> = core::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    assert_eq!(all.len(), 33);
    let text = pool.alloc_raw().unwrap_err().to_string();
    assert!(
        text.ends_with(
            "64 of them in use as far as its owners have reported; free blocks, or raise the maximum with `DmaPool::set_limits`"
        ),
        "{text}"
    );
}

#[test]
fn contradicting_limits_are_refused() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    for (minimum, maximum) in [(0, 0), (2, 1), (u64::MAX, 1), (1, 0)] {
        let error = pool.set_limits(limits(minimum, maximum)).unwrap_err();
        assert_eq!(error, LimitError::Contradiction { minimum, maximum });
    }
    assert_eq!((heap.asked.load(Ordering::Relaxed), pool.stats().blocks), (0, 0));
    pool.set_limits(limits(1, 1)).unwrap();
    pool.set_limits(limits(0, u64::MAX)).unwrap();
}

#[test]
fn a_minimum_that_the_source_does_not_have_is_rolled_back() {
    // 512 frames, some of which are the pool's already.
    for minimum in [32_769, 100_000, u64::MAX] {
        let heap = Heap::new(2 << 20);
        let mut pool = pool(&heap, 64);
        pool.set_limits(limits(100, 200)).unwrap();
        let block = pool.alloc_raw().unwrap();
        let (before, taken) = (pool.stats(), heap.taken.lock().clone());
        let error = pool.set_limits(limits(minimum, u64::MAX)).unwrap_err();
        let LimitError::Unavailable { available, error: cause, .. } = &error else { panic!("{error}") };
        assert!(matches!(cause, AllocError::Source(_)) && *available == 32_768, "{error}");
        assert_eq!((pool.stats(), heap.taken.lock().clone()), (before, taken));
        // The limits are the old ones.
        let mut many = [None; 300];
        assert_eq!(pool.fill(&mut many), 255, "256 blocks are the least of at least 200 that were acquired");
        pool.free_slots(&mut many).unwrap();
        pool.free_raw(block).unwrap();
        pool.shrink();
        assert!((100..164).contains(&pool.stats().blocks));
    }
}

#[test]
fn a_source_that_fails_at_any_chunk_of_a_minimum_loses_nothing() {
    for n in 1..12 {
        let heap = Heap::new(4 << 20);
        let pool = pool(&heap, 64);
        heap.fail_at(n);
        // One refusal means smaller chunks from there on, or the end if it was of the smallest.
        match pool.set_limits(limits(10_000, 10_000)) {
            Ok(()) => assert!(pool.stats().blocks >= 10_000),
            Err(_) => assert_eq!(pool.stats().blocks, 0),
        }
        assert_eq!(pool.stats().bytes, heap.frames_taken() as u64 * 4096);
        heap.left.store(n - 1, Ordering::Relaxed);
        let before = pool.stats();
        match pool.set_limits(limits(60_000, 60_000)) {
            Ok(()) => assert!(pool.stats().blocks >= 60_000),
            Err(_) => assert_eq!(pool.stats(), before),
        }
        assert_eq!(pool.stats().bytes, heap.frames_taken() as u64 * 4096);
    }
}

#[test]
fn a_lower_maximum_releases_nothing_and_ends_growth() {
    let heap = Heap::new(4 << 20);
    let mut pool = pool(&heap, 64);
    let blocks: Vec<_> = (0..1000).map(|_| pool.alloc_raw().unwrap()).collect();
    pool.set_limits(limits(0, 10)).unwrap();
    let have = pool.stats().blocks;
    assert_eq!(pool.fill(&mut [None; 2000]) as u64, have - 1000);
    assert!(matches!(pool.alloc_raw(), Err(AllocError::Maximum { maximum: 10, .. })));
    pool.free_bulk(&blocks).unwrap();
    assert_eq!(pool.stats().blocks, have);
    pool.shrink();
}

#[test]
fn limits_hold_in_debug_mode() {
    let heap = Heap::new(2 << 20);
    let pool = DmaPool::with_debug(&heap, "debug", 64, 0, 0).unwrap();
    pool.set_limits(limits(64, 64)).unwrap();
    let mut slots = [None; 65];
    assert_eq!(pool.fill_all(&mut slots).unwrap_err().available, 64);
    assert_eq!(pool.local().fill_all(&mut slots[..64]), Ok(()));
    assert!(matches!(pool.alloc_raw(), Err(AllocError::Maximum { .. })));
    pool.free_slots(&mut slots).unwrap();
    assert!(pool.damages().is_empty());
}

#[test]
fn limits_are_set_while_others_grow_and_shrink() {
    let heap = Heap::new(16 << 20);
    let pool = pool(&heap, 64);
    let rounds = if cfg!(miri) { 5 } else { 300 };
    crate::testing::scope(|scope| {
        for me in 0..3u64 {
            let pool = &pool;
            scope.spawn(move || {
                let mut random = Random::new(me + 1);
                for _ in 0..rounds {
                    let mut local = pool.local();
                    let mut slots = vec![None; random.below(5000)];
                    if local.fill_all(&mut slots).is_ok() {
                        local.free_slots(&mut slots).unwrap();
                    }
                    assert!(slots.iter().all(Option::is_none));
                }
            });
        }
        for round in 0..rounds {
            let minimum = 500 * (round as u64 % 7);
            pool.set_limits(limits(minimum, minimum.max(4000))).unwrap();
            pool.shrink_shared();
            let blocks = pool.chunks.lock().blocks();
            assert!(blocks >= minimum, "{blocks} of {minimum}");
        }
    });
    assert_eq!(pool.stats().in_use, 0);
    pool.set_limits(Limits::default()).unwrap();
    pool.shrink_shared();
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn all_or_none_leaves_full_slots_and_names_what_was_available() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(limits(64, 64)).unwrap();
    let mut local = pool.local();
    let held = [0, 1].map(|_| local.alloc_raw().unwrap());
    local.fill_all(&mut []).unwrap();
    let mut slots = [None; 66];
    (slots[0], slots[30]) = (Some(held[0]), Some(held[1]));
    let before = slots;
    let error = local.fill_all(&mut slots).unwrap_err();
    assert_eq!((error.wanted, error.available, slots), (64, 62, before));
    let text = error.to_string();
    assert!(text.starts_with("cannot allocate 64 blocks at once: only 62 are available: no free"), "{text}");
    let in_use = pool.stats().in_use;
    local.fill_all(&mut slots[..64]).unwrap();
    assert_eq!((slots[0], slots[30], pool.stats().in_use), (before[0], before[30], in_use + 62));
    assert_eq!(local.fill_all(&mut slots[..64]), Ok(()), "nothing is missing");
}

fn hooked() -> Shared<DmaPool<Hooked>> {
    Shared::new(DmaPool::new(Hooked(Heap::new(8 << 20)), "test", 64, 0, 0).unwrap())
}

/// A mistake of the program: a copy of a block's address is freed after the block was allocated again.
#[test]
fn all_or_none_survives_that_its_blocks_are_freed_under_it() {
    for by_pool in [false, true] {
        let pool = hooked();
        let stale = pool.alloc_raw().unwrap();
        pool.free_raw(stale).unwrap();
        // The one chunk, and no more.
        pool.source().0.left.store(0, Ordering::Relaxed);
        let have = usize::try_from(pool.stats().blocks).unwrap();
        let by_source = pool.clone();
        HOOK.set(Some(Box::new(move || by_source.free_raw(stale).unwrap())));
        let mut slots = vec![None; have + 1];
        let error = if by_pool { pool.fill_all(&mut slots) } else { pool.local().fill_all(&mut slots) };
        let error = error.unwrap_err();
        assert!(HOOK.take().is_none());
        assert_eq!((error.wanted, error.available), (have + 1, have), "{error}");
        assert!(slots.iter().all(Option::is_none), "full slots after a call that fills all or none");
        assert_eq!(pool.stats().in_use, 0);
    }
}

/// Has the source panic in its `n`-th `acquire` from now.
fn panic_at(n: usize) {
    HOOK.set(Some(Box::new(move || {
        assert_ne!(n, 1, "the source panics");
        panic_at(n - 1);
    })));
}

#[test]
fn a_source_that_panics_while_limits_are_set_loses_nothing() {
    let mut panics = 0;
    for n in 1.. {
        let mut pool = hooked();
        pool.set_limits(limits(100, 200)).unwrap();
        let (before, taken) = (pool.stats(), pool.source().0.frames_taken());
        panic_at(n);
        let set = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
            pool.set_limits(limits(100_000, 100_000))
        }));
        if HOOK.take().is_some() {
            assert_eq!(set.unwrap(), Ok(()));
            break;
        }
        panics += 1;
        assert!(set.is_err());
        assert_eq!((pool.stats(), pool.source().0.frames_taken()), (before, taken), "panicked in call {n}");
        // The limits are the old ones, and can be set again.
        assert!(pool.fill(&mut [None; 300]) < 300);
        pool.set_limits(limits(0, 1)).unwrap();
        let pool = pool.get_mut().unwrap();
        pool.shrink();
    }
    assert!(panics > 3, "{panics}");
}

/// While the source acquires what is missing, nothing is released of what the pool has.
#[test]
fn a_shrink_meanwhile_leaves_what_the_new_minimum_needs() {
    let pool = hooked();
    pool.set_limits(limits(2000, u64::MAX)).unwrap();
    pool.set_limits(Limits::default()).unwrap();
    let have = pool.stats().blocks;
    let by_source = pool.clone();
    HOOK.set(Some(Box::new(move || assert_eq!(by_source.shrink_shared(), 0))));
    pool.set_limits(limits(3000, u64::MAX)).unwrap();
    assert!(HOOK.take().is_none());
    let blocks = pool.stats().blocks;
    assert!((2000..3000).contains(&have) && blocks >= 3000, "{have}, then {blocks}");
}

/// The source is called by one thread at a time.
#[test]
fn limits_wait_for_an_owner_that_grows_the_pool() {
    let pool = hooked();
    let (entered, has_entered) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // Dropped by a failure here, which ends the thread that waits.
        let (go, goes) = std::sync::mpsc::channel::<()>();
        let (growing, limiting) = (pool.clone(), pool.clone());
        let grower = scope.spawn(move || {
            HOOK.set(Some(Box::new(move || {
                entered.send(()).unwrap();
                goes.recv().unwrap();
            })));
            growing.alloc_raw().unwrap();
        });
        has_entered.recv().unwrap();
        let limiter = scope.spawn(move || limiting.set_limits(limits(1000, 1000)).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!limiter.is_finished() && pool.source().0.asked.load(Ordering::Relaxed) == 0);
        go.send(()).unwrap();
        grower.join().unwrap();
        limiter.join().unwrap();
    });
    assert!(pool.stats().blocks >= 1000);
}

#[test]
fn the_high_water_mark_is_never_above_the_pool() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(limits(128, 128)).unwrap();
    let (mut a, mut b) = (pool.local(), pool.local());
    // The one frees all that it had before the other allocates as many, and the pool learns it afterwards.
    for local in [&mut a, &mut b] {
        let mut slots = [None; 100];
        assert_eq!(local.fill(&mut slots), 100);
        local.free_slots(&mut slots).unwrap();
        pool.depot.drain(&mut local.owner);
        local.owner.count.set_peak(100);
    }
    let kept: Vec<_> = (0..100).map(|_| a.alloc_raw().unwrap()).collect();
    pool.depot.record(&mut a.owner);
    pool.depot.record(&mut b.owner);
    let stats = pool.stats();
    assert_eq!(
        (stats.in_use, stats.high_water),
        (100, 128),
        "at most {} and the peak of the other",
        kept.len()
    );
}
