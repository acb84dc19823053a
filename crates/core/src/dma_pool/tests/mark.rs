//! The most blocks in use at a time.

use super::*;
use std::sync::Arc;

/// The most blocks in use are exact for one owner, whatever its calls, and where there are gaps between blocks.
#[test]
fn the_high_water_mark_of_one_owner_is_exact() {
    for seed in 1..if cfg!(miri) { 2 } else { 60 } {
        let heap = Arc::new(Heap::new(8 << 20));
        let (size, boundary) = if seed % 2 == 0 { (64, 0) } else { (96, 512) };
        let pool = Shared::new(DmaPool::new(Arc::clone(&heap), "mark", size, 0, boundary).unwrap());
        assert_eq!(pool.geometry.is_even(), boundary == 0);
        let mut local = pool.local();
        let mut random = Random::new(seed);
        let (mut raws, mut owned, mut most) = (vec![], vec![], 0);
        for _ in 0..200 {
            let n = 1 + random.below(90);
            match random.below(10) {
                0 | 1 => (0..n).for_each(|_| owned.push(local.alloc().unwrap())),
                2 => (0..n).for_each(|_| raws.push(local.alloc_raw().unwrap())),
                3 => {
                    let mut slots = vec![None; n];
                    local.fill(&mut slots);
                    raws.extend(slots.into_iter().flatten());
                }
                4 => raws.extend(local.alloc_run(NonZeroUsize::new(n).unwrap()).unwrap().iter()),
                5 => {
                    for _ in 0..n.min(owned.len()) {
                        let at = random.below(owned.len());
                        local.free(owned.swap_remove(at));
                    }
                }
                6 => {
                    let at = owned.len().saturating_sub(n);
                    local.free_many(owned.drain(at..));
                }
                7 => {
                    let at = raws.len().saturating_sub(2 * n);
                    local.free_bulk(&raws[at..]).unwrap();
                    raws.truncate(at);
                }
                8 => {
                    for _ in 0..n.min(raws.len()) {
                        let at = random.below(raws.len());
                        local.free_raw(raws.swap_remove(at)).unwrap();
                    }
                }
                _ => pool.depot.record(&mut local.owner),
            }
            most = most.max(raws.len() + owned.len());
        }
        pool.depot.record(&mut local.owner);
        let stats = pool.stats();
        assert_eq!(
            (stats.high_water, stats.in_use),
            (most as u64, (raws.len() + owned.len()) as u64),
            "{seed}"
        );
        assert_eq!(pool.depot.reported_in_use(), stats.in_use);
        local.free_bulk(&raws).unwrap();
        local.free_many(owned);
    }
}

/// One block from the stash makes a new maximum after blocks were taken past it.
#[test]
fn a_block_of_the_stash_raises_the_mark_by_one() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = super::stash::row_before_the_current(&mut local);
    local.free_raw(blocks[0]).unwrap();
    local.free_raw(blocks[1]).unwrap();
    // Not from the stash.
    assert_eq!(local.fill(&mut [None; 5]), 5);
    let last = local.alloc_raw().unwrap();
    assert_eq!(last, blocks[1]);
    local.free_raw(last).unwrap();
    drop(local);
    assert_eq!(pool.stats().high_water, 65 - 2 + 5 + 1);
}

/// Also if the owner reported its counts between the two, with blocks in its stash: it counts from there on.
#[test]
fn blocks_of_the_stash_raise_the_mark_after_a_report() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = super::stash::row_before_the_current(&mut local);
    blocks[..5].iter().for_each(|&block| local.free_raw(block).unwrap());
    // Not from the stash.
    assert_eq!(local.fill(&mut [None; 5]), 5);
    pool.depot.record(&mut local.owner);
    let last = [(); 3].map(|()| local.alloc_raw().unwrap());
    assert!(last.iter().all(|block| blocks[..5].contains(block)));
    last.into_iter().for_each(|block| local.free_raw(block).unwrap());
    drop(local);
    assert_eq!(pool.stats().high_water, 65 + 3);
}

/// The stash was filled before the report, and nothing was taken from rows after its first block: the report itself has each
/// noted, the one that was pushed last too.
#[test]
fn each_block_of_a_stash_raises_the_mark_after_a_report() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut local, mut other) = (pool.local(), pool.local());
    let blocks = super::stash::row_before_the_current(&mut local);
    blocks[..2].iter().for_each(|&block| local.free_raw(block).unwrap());
    assert_eq!(local.owner.stash.len(), 2);
    pool.depot.record(&mut local.owner);
    // So many that the first owner alone has had no more before.
    (0..100).for_each(|_| _ = other.alloc_raw().unwrap());
    pool.depot.record(&mut other.owner);
    let last = [(); 2].map(|()| local.alloc_raw().unwrap());
    assert_eq!(last, [blocks[1], blocks[0]]);
    last.into_iter().for_each(|block| local.free_raw(block).unwrap());
    drop(local);
    assert_eq!(pool.stats().high_water, 65 + 100);
}

/// A second free that was found late is counted once from then on. More blocks are in use then than the peak says, until the
/// next alloc.
#[test]
fn an_alloc_after_a_late_second_free_raises_the_mark_to_what_is_in_use() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let count = &mut local.owner.count;
    (0..3).for_each(|_| count.take());
    // One block, twice.
    count.give(1);
    count.give(1);
    (0..2).for_each(|_| count.take());
    assert_eq!((count.used(0), count.peak()), (3, 3));
    count.correct(1);
    assert_eq!((count.used(0), count.peak()), (4, 3));
    count.take();
    assert_eq!((count.used(0), count.peak()), (5, 5));
    count.take();
    assert_eq!((count.used(0), count.peak()), (6, 6));
    count.give(6);
    assert_eq!((count.used(0), count.peak()), (0, 6));
}

/// Into the current row, into another row in its list, and into one that moves, with a full stash.
#[test]
fn frees_where_there_are_gaps_are_counted_once() {
    let heap = Heap::new(2 << 20);
    let pool = DmaPool::new(&heap, "gaps", 96, 0, 512).unwrap();
    assert!(!pool.geometry.is_even());
    let mut local = pool.local();
    let blocks: Vec<_> = (0..6 * 64).map(|_| local.alloc_raw().unwrap()).collect();
    // One by one, up and down, and many together, from fewer to fewer in use.
    let (first, rest) = blocks.split_at(2 * 64);
    let (second, third) = rest.split_at(2 * 64);
    let mut left = blocks.len() as u64;
    let mut check = |local: &mut Local<_, _>, freed: u64| {
        left -= freed;
        pool.depot.record(&mut local.owner);
        assert_eq!((pool.stats().in_use, pool.depot.reported_in_use()), (left, left));
    };
    for &block in first.iter().chain(second.iter().rev()) {
        local.free_raw(block).unwrap();
        check(&mut local, 1);
    }
    for some in third.chunks(9) {
        local.free_bulk(some).unwrap();
        check(&mut local, some.len() as u64);
    }
    assert_eq!(pool.stats().high_water, 6 * 64);
}

#[test]
fn the_pool_learns_of_frees_when_rows_move_to_the_depot() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..200 * 64).map(|_| local.alloc_raw().unwrap()).collect();
    local.free_bulk(&blocks).unwrap();
    assert_eq!(pool.stats().in_use, 0);
    let reported = pool.depot.reported_in_use();
    assert!(reported <= 33 * 64, "{reported} blocks in use, as far as is known");
}

#[test]
fn the_mark_is_not_above_what_the_pool_has_after_it_was_shrunk() {
    let heap = Heap::new(4 << 20);
    let mut pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 20_000, maximum: 20_000 }).unwrap();
    pool.set_limits(Limits::default()).unwrap();
    pool.shrink();
    pool.set_limits(Limits { minimum: 128, maximum: 128 }).unwrap();
    assert_eq!((pool.stats().blocks, pool.stats().high_water), (128, 0));
    let (mut a, mut b) = (pool.local(), pool.local());
    let _kept: Vec<_> = (0..100).map(|_| a.alloc_raw().unwrap()).collect();
    pool.depot.record(&mut a.owner);
    // As if it had allocated and freed them before the other had them.
    b.owner.count.set_peak(100);
    pool.depot.record(&mut b.owner);
    assert_eq!(pool.stats().high_water, 128);
    // A snapshot beside owners that allocate can see more than there are.
    assert_eq!(pool.depot.counts(u64::MAX).0, 128);
}
