//! Threads that allocate and free concurrently, and the number of read-modify-writes on the hot paths.

use super::*;

#[test]
fn stress_blocks_pass_between_eight_threads() {
    let heap = Heap::new(32 << 20);
    let pool = pool(&heap, 64);
    let rounds = if cfg!(miri) { 20 } else { 4_000 };
    let hands: [Mutex<Vec<RawBlock>>; 8] = Default::default();
    crate::testing::scope(|scope| {
        for me in 0..8usize {
            let (pool, hands) = (&pool, &hands);
            scope.spawn(move || {
                let mut local = pool.local();
                let mut random = Random::new(me as u64 + 1);
                for round in 0..rounds {
                    let to = random.below(8);
                    for i in 0..random.below(20) {
                        let block = if i == 7 { pool.alloc_raw() } else { local.alloc_raw() }.unwrap();
                        let memory = pool.memory(block).unwrap();
                        memory.write_u64(0, block.iova().raw()).unwrap();
                        hands[to].lock().push(block);
                    }
                    let mine = std::mem::take(&mut *hands[me].lock());
                    for (i, block) in mine.into_iter().enumerate() {
                        let memory = pool.memory(block).unwrap();
                        assert_eq!(memory.read_u64(0), Ok(block.iova().raw()));
                        memory.write_u64(0, 0).unwrap();
                        if i % 16 == 3 { pool.free_raw(block) } else { local.free_raw(block) }.unwrap();
                    }
                    if round % 1000 == 999 {
                        local = pool.local();
                        pool.shrink_shared();
                    }
                }
            });
        }
    });
    let rest: Vec<_> = hands.iter().flat_map(|hand| std::mem::take(&mut *hand.lock())).collect();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.late_double_frees), (rest.len() as u64, 0));
    pool.free_bulk(&rest).unwrap();
    pool.destroy().unwrap();
}

#[test]
fn stress_of_two_frees_of_one_block_one_is_valid() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let turn = AtomicUsize::new(0);
    let shared: Mutex<Vec<RawBlock>> = Mutex::default();
    let rounds: usize = if cfg!(miri) { 20 } else { 3_000 };
    let freed = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        let mut local = pool.local();
        scope.spawn(|| {
            let mut local = pool.local();
            for round in 0..rounds {
                while turn.load(Ordering::Acquire) < 2 * round + 1 {
                    std::thread::yield_now();
                }
                let blocks = shared.lock().clone();
                let ok = blocks.iter().rev().filter(|&&block| local.free_raw(block).is_ok()).count();
                freed.fetch_add(ok, Ordering::Relaxed);
                turn.store(2 * round + 2, Ordering::Release);
            }
        });
        for round in 0..rounds {
            let blocks: Vec<_> = (0..50).map(|_| local.alloc_raw().unwrap()).collect();
            assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), 50);
            *shared.lock() = blocks.clone();
            turn.store(2 * round + 1, Ordering::Release);
            let ok = blocks.iter().filter(|&&block| local.free_raw(block).is_ok()).count();
            freed.fetch_add(ok, Ordering::Relaxed);
            while turn.load(Ordering::Acquire) < 2 * round + 2 {
                std::thread::yield_now();
            }
        }
    });
    // Remote frees to rows in the depot are collected when the rows are next lent.
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    let stats = pool.stats();
    assert_eq!(stats.in_use, stats.blocks);
    assert_eq!(stats.late_double_frees + rounds as u64 * 50, freed.load(Ordering::Relaxed) as u64);
    pool.free_bulk(&all).unwrap();
    pool.destroy().unwrap();
}

/// Frees of many blocks at once, eight states of which are stored together, while another thread frees the same blocks one by one:
/// each is freed once, and a second free that was not refused is counted.
#[test]
fn stress_of_frees_of_many_against_frees_of_one() {
    const MANY: usize = 48;
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (turn, freed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let shared: Mutex<Vec<RawBlock>> = Mutex::default();
    let rounds: usize = if cfg!(miri) { 20 } else { 3_000 };
    // Spins at first, so that both begin at once.
    let wait_for = |least| {
        for polls in 0.. {
            if turn.load(Ordering::Acquire) >= least {
                return;
            }
            if polls < 1_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    };
    crate::testing::scope(|scope| {
        let mut local = pool.local();
        scope.spawn(|| {
            let (mut local, mut random) = (pool.local(), Random::new(8));
            for round in 0..rounds {
                wait_for(3 * round + 1);
                let blocks = shared.lock().clone();
                let (before, after) = blocks.split_at(random.below(MANY));
                let order = after.iter().chain(before);
                turn.store(3 * round + 2, Ordering::Release);
                freed.fetch_add(
                    order.filter(|&&block| local.free_raw(block).is_ok()).count(),
                    Ordering::Relaxed,
                );
                turn.store(3 * round + 3, Ordering::Release);
            }
        });
        for round in 0..rounds {
            let mut slots = [None; MANY];
            assert_eq!(local.fill(&mut slots), MANY);
            let blocks: Vec<_> = slots.into_iter().flatten().collect();
            assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), MANY);
            shared.lock().clone_from(&blocks);
            turn.store(3 * round + 1, Ordering::Release);
            wait_for(3 * round + 2);
            let mut rest = blocks.as_slice();
            while let Err(error) = local.free_bulk(rest) {
                freed.fetch_add(error.freed, Ordering::Relaxed);
                rest = &rest[error.freed + 1..];
            }
            freed.fetch_add(rest.len(), Ordering::Relaxed);
            wait_for(3 * round + 3);
        }
    });
    // Remote frees to rows in the depot are collected when the rows are next lent.
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    let stats = pool.stats();
    println!("{} second frees of {} were not refused", stats.late_double_frees, rounds * MANY);
    assert_eq!(stats.in_use, stats.blocks);
    assert_eq!(stats.late_double_frees + (rounds * MANY) as u64, freed.load(Ordering::Relaxed) as u64);
    pool.free_bulk(&all).unwrap();
    pool.destroy().unwrap();
}

/// Read-modify-writes per operation: none for alloc and free of one block, and rows change hands for 64 blocks at a time;
/// for raw blocks and those that free themselves, in the borrowed form and in the shared one.
#[cfg(feature = "count-rmw")]
#[test]
fn hot_paths_share_nothing() {
    fn count<L, T>(local: &mut L, alloc: impl Fn(&mut L) -> T, free: impl Fn(&mut L, T)) {
        use crate::sync::{lock_count, rmw_count, rmw_reset};
        const N: u32 = 200_000;
        let first = alloc(local);
        free(local, first);
        rmw_reset();
        for _ in 0..N {
            let block = alloc(local);
            free(local, block);
        }
        assert_eq!((rmw_count(), lock_count()), (0, 0));
        let blocks: Vec<_> = (0..N).map(|_| alloc(local)).collect();
        for block in blocks {
            free(local, block);
        }
        let an_operation = rmw_count() as f64 / f64::from(2 * N);
        assert!(an_operation < 0.02, "{an_operation}");
    }
    fn both_forms<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(mut local: Local<S, H>) {
        count(&mut local, |local| local.alloc_raw().unwrap(), |local, block| local.free_raw(block).unwrap());
        count(&mut local, |local| local.alloc().unwrap(), Local::free);
    }
    let heap = Heap::new(64 << 20);
    both_forms(pool(&heap, 128).local());
    both_forms(Shared::new(pool(&heap, 128)).local());
}

/// Threads that free anything at any time: what was freed twice at one instant is counted, and no block is lost, or there twice.
#[test]
fn stress_wrong_frees_by_three_threads_lose_no_block() {
    let steps = if cfg!(miri) { 200 } else { 60_000 };
    for (seed, bytes) in [(0, 64 << 10), (1, 1 << 20), (2, 16 << 10)] {
        let heap = Heap::new(bytes);
        let pool = pool(&heap, 64);
        let all: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        pool.free_bulk(&all).unwrap();
        let (allocs, frees) = (AtomicUsize::new(0), AtomicUsize::new(0));
        crate::testing::scope(|scope| {
            for me in 0..3 {
                let (pool, all, allocs, frees) = (&pool, &all, &allocs, &frees);
                scope.spawn(move || {
                    let (mut local, mut random) = (pool.local(), Random::new(me + 31 + seed * 10));
                    let (mut last, mut allocated, mut freed) = (all[0], 0, 0);
                    for step in 0..steps {
                        match random.below(12) {
                            0..5 => {
                                if let Ok(block) = local.alloc_raw() {
                                    (last, allocated) = (block, allocated + 1);
                                }
                            }
                            5..7 => freed += usize::from(local.free_raw(last).is_ok()),
                            7..10 => {
                                freed += usize::from(local.free_raw(all[random.below(all.len())]).is_ok())
                            }
                            10 => {
                                let many = &all[random.below(all.len() - 8)..][..8];
                                freed += local.free_bulk(many).map_or_else(|error| error.freed, |()| 8);
                            }
                            _ => allocated += local.fill(&mut [None; 5]),
                        }
                        if step % 10_000 == 9_999 {
                            local = pool.local();
                        }
                    }
                    allocs.fetch_add(allocated, Ordering::Relaxed);
                    frees.fetch_add(freed, Ordering::Relaxed);
                });
            }
        });
        let stats = pool.stats();
        let (allocs, frees) = (allocs.into_inner() as u64, frees.into_inner() as u64);
        assert_eq!(stats.in_use + frees, allocs + stats.late_double_frees, "{stats:?}");
        all.iter().for_each(|&block| _ = pool.free_raw(block));
        let again: HashSet<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        assert_eq!(again.len(), all.len());
        again.iter().for_each(|&block| pool.free_raw(block).unwrap());
        pool.destroy().unwrap();
    }
}
