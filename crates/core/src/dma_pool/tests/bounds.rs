//! Idle owners keep few blocks from the others.

use super::subject::{Pool, limited};
use super::{heap, pool};
use crate::dma_pool::ChunkSource;
use crate::frame::Order;
use crate::testing::Random;

/// The most free blocks of 64 bytes that an owner keeps.
const KEPT: usize = 4_176;

#[test]
fn a_thousand_owners_find_a_block_each() {
    const OWNERS: usize = 1024;
    for in_turn in [true, false] {
        let heap = heap(OWNERS);
        let pool = pool(&heap, 4096);
        let mut owners: Vec<_> = Vec::new();
        let mut blocks = Vec::new();
        for _ in 0..OWNERS {
            let mut owner = pool.local();
            if in_turn {
                blocks.push(owner.alloc().unwrap());
            }
            owners.push(owner);
        }
        if !in_turn {
            blocks.extend(owners.iter_mut().map(|owner| owner.alloc().unwrap()));
        }
        let mut places: Vec<_> = blocks.iter().map(|block| block.iova()).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), OWNERS);
    }
}

#[test]
fn an_idle_owner_keeps_few_blocks_of_a_pool_of_fixed_size() {
    const BLOCKS: usize = 64_000;
    for (seed, left) in [(1, 0), (2, BLOCKS / 2), (3, BLOCKS / 8)] {
        let heap = heap(8);
        let pool = limited(&heap, 64, BLOCKS as u64, BLOCKS as u64).unwrap();
        let (mut idle, mut other) = (pool.local(), pool.local());
        let mut random = Random::new(seed);
        let mut blocks: Vec<_> = (0..BLOCKS).map(|_| idle.alloc_raw().unwrap()).collect();
        while blocks.len() > left {
            idle.free_raw(blocks.swap_remove(random.below(blocks.len()))).unwrap();
        }
        let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
        assert!(available + KEPT >= BLOCKS - left, "{available} of {}", BLOCKS - left);
        drop(idle);
        let rest = std::iter::from_fn(|| other.alloc_raw().ok()).count();
        assert_eq!(available + rest, BLOCKS - left, "a dropped owner keeps nothing");
    }
}

#[test]
fn what_others_free_is_available() {
    const BLOCKS: usize = 64_000;
    let heap = heap(8);
    let pool = limited(&heap, 64, BLOCKS as u64, BLOCKS as u64).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let mut blocks: Vec<_> = (0..BLOCKS).map(|_| idle.alloc_raw().unwrap()).collect();
    let mut random = Random::new(4);
    while !blocks.is_empty() {
        other.free_raw(blocks.swap_remove(random.below(blocks.len()))).unwrap();
    }
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + KEPT >= BLOCKS, "{available} of {BLOCKS}");
}

#[test]
fn one_owner_allocates_and_another_frees_63_of_64() {
    let heap = heap(64);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let live = 20_000;
    for kept in 0..live {
        let mut slots = [None; 64];
        assert_eq!(a.fill(&mut slots), 64, "with {kept} blocks in use");
        slots[kept % 64] = None;
        let freed: Vec<_> = slots.iter().flatten().copied().collect();
        b.free_bulk(&freed).unwrap();
    }
    let stats = pool.stats();
    assert_eq!(stats.in_use, live as u64);
    assert!(stats.blocks <= 2 * (live as u64 + 64) + 3 * 10_336 + 32_768, "{stats:?}");
}

#[test]
fn the_front_keeps_nothing_that_a_handle_is_refused() {
    let heap = heap(2);
    let pool = limited(&heap, 4096, 512, 512).unwrap();
    let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc().ok()).collect();
    assert_eq!(blocks.len(), 512);
    drop(blocks);
    let mut local = pool.local();
    assert_eq!(std::iter::from_fn(|| local.alloc_raw().ok()).count(), 512);
}

#[test]
fn an_owner_caches_at_most_what_the_builder_says() {
    for (size, bytes, least, most) in [
        (64, 1 << 40, 1, 1_024),
        (4096, 512 << 10, 1, 128),
        (4096, 3 << 12, 2, 2),
        (4096, 2 << 12, 2, 2),
        (4096, 0, 1, 1),
        (1 << 20, 512 << 10, 1, 1),
    ] {
        let heap = heap(64);
        let pool =
            Pool::builder("cap").block(size).minimum(60).cached_bytes(bytes).build(&heap).unwrap();
        let mut local = pool.local();
        let blocks: Vec<_> = (0..most + 10).map(|_| local.alloc_raw().unwrap()).collect();
        blocks.into_iter().for_each(|block| local.free_raw(block).unwrap());
        let stats = pool.stats();
        assert!((least..=most).contains(&stats.cached), "{bytes}: {stats:?}");
        assert_eq!(stats.in_depot + stats.cached, stats.blocks);
    }
}

/// An owner notices once for each alloc that failed, and has two arrays of 512 numbers.
#[test]
fn an_active_owner_returns_what_it_caches_when_another_is_refused() {
    let heap = heap(2);
    let pool = limited(&heap, 64, 3_000, 3_000).unwrap();
    let (mut active, mut other) = (pool.local(), pool.local());
    let mut blocks: Vec<_> = std::iter::from_fn(|| active.alloc_raw().ok()).collect();
    // That was refused, so the active owner has this to notice.
    let mut free = |owner: &mut super::subject::PoolLocal, count: usize| {
        blocks.drain(..count).for_each(|block| owner.free_raw(block).unwrap());
    };
    free(&mut active, 513);
    assert_eq!(pool.stats().cached, 1);
    free(&mut active, 1_023);
    assert_eq!(pool.stats().cached, 1_024, "it notices once");
    let mut new = pool.local();
    while other.alloc_raw().is_ok() {}
    free(&mut active, 1);
    assert_eq!(pool.stats().cached, 1, "the other one was refused");
    free(&mut new, 600);
    assert_eq!(
        pool.stats().cached,
        89,
        "the new one has been there when the other one was refused"
    );
    let mut newest = pool.local();
    free(&mut newest, 600);
    assert_eq!(pool.stats().cached, 689, "the newest one has not");
}

/// As the builder says: a byte for each block that fits in a unit of 2 MiB, and little more, for
/// each unit that the pool ever had a chunk in.
#[test]
fn what_a_pool_takes_is_bounded_by_the_units_of_its_chunks() {
    const UNIT: usize = 2 << 20;
    /// The bytes of owners' caches and lists when they hold few blocks.
    const LISTS: usize = 16 << 10;
    for size in [16, 48, 64, 4096] {
        let heap = heap(64);
        heap.largest.store(0, std::sync::atomic::Ordering::Relaxed);
        let pool = pool(&heap, size);
        let mut owner = pool.local();
        let states = UNIT / size + 4 * (UNIT / 4096) + 200;
        let before = pool.metadata_bytes();
        for units in 1..=3 {
            // Small chunks, which fill a unit in the order of their addresses.
            let block = owner.alloc_raw().unwrap();
            let took = pool.metadata_bytes() - before;
            assert!(took <= units * states + LISTS, "{took} bytes for {units} units, size {size}");
            assert!(took > 0);
            owner.free_raw(block).unwrap();
            pool.shrink();
            // The next chunk is in the next unit.
            let frame = heap.acquire(Order::PAGE).unwrap();
            let left = (frame.index() + 1).next_multiple_of(512) - (frame.index() + 1);
            (0..left).for_each(|_| _ = heap.acquire(Order::PAGE).unwrap());
        }
    }
}

/// The numbers of so many free blocks take 4 bytes each, in arrays that are full before the shrink.
#[test]
fn a_shrink_frees_the_arrays_of_the_blocks_that_it_releases() {
    const BLOCKS: usize = 64_000;
    let heap = heap(8);
    let pool = pool(&heap, 64);
    let mut owner = pool.local();
    let blocks: Vec<_> = (0..BLOCKS).map(|_| owner.alloc_raw().unwrap()).collect();
    owner.free_bulk(&blocks).unwrap();
    owner.flush();
    let grown = pool.metadata_bytes();
    assert!(pool.shrink() > 0);
    assert_eq!(pool.stats().blocks, 0);
    let freed = grown.saturating_sub(pool.metadata_bytes());
    assert!(freed >= 4 * BLOCKS, "{freed} bytes");
}
