//! Shrinking beside owners, and iteration over all blocks.

use super::*;

#[test]
fn shrinking_beside_owners_keeps_what_they_hold() {
    let heap = Heap::new(8 << 20);
    let pool = Shared::new(DmaPool::new(&heap, "shared", 64, 0, 0).unwrap());
    let (mut one, mut other) = (pool.local(), pool.local());
    let kept = other.alloc().unwrap();
    let mut blocks: Vec<_> = (0..40_000).map(|_| one.alloc().unwrap()).collect();
    let spare = blocks.pop().unwrap();
    blocks.into_iter().for_each(|block| one.free(block));
    let before = pool.stats();
    // The owner's magazines and the two blocks keep their chunks.
    let bytes = pool.shrink_shared();
    let stats = pool.stats();
    assert!(bytes > 0 && stats.in_use == 2 && stats.bytes == before.bytes - bytes);
    kept.memory().write_u64(0, 1).unwrap();
    one = pool.local();
    assert!(pool.shrink_shared() > 0);
    assert!(pool.stats().chunks <= 2);
    drop((spare, one));
    other.free(kept);
    drop(other);
    pool.shrink_shared();
    assert_eq!((pool.stats().chunks, heap.frames_taken()), (0, 0));
    assert!(pool.alloc().is_ok());
}

/// As a free by another thread does that looks the block up just before its chunk is released.
#[test]
fn a_block_whose_chunk_is_released_after_it_was_looked_up_is_foreign() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let block = pool.alloc_raw().unwrap();
    pool.free_raw(block).unwrap();
    let found = pool.find(block).unwrap();
    let why = found.site.row.refusal(found.site.bit);
    assert!(matches!(pool.refused(found.chunk, block, why), FreeError::DoubleFree { .. }));
    assert_eq!(pool.shrink_shared(), 4096);
    assert!(matches!(pool.refused(found.chunk, block, why), FreeError::Foreign { .. }));
    assert!(matches!(pool.free_raw(block), Err(FreeError::Foreign { .. })));
}

#[test]
fn a_chunk_whose_raw_memory_was_lent_stays_until_the_pool_is_exclusive() {
    let heap = Heap::new(4 << 20);
    let mut pool = pool(&heap, 64);
    let (block, other) = (pool.alloc_raw().unwrap(), pool.alloc_raw().unwrap());
    let memory = pool.memory(block).unwrap();
    pool.free_bulk(&[block, other]).unwrap();
    assert_eq!(pool.shrink_shared(), 0);
    memory.write_u64(0, 1).unwrap();
    // Not even the memory of a block that is free marks it, after that.
    assert_eq!(pool.shrink(), 4096);
    assert!(pool.memory(block).is_err());
    let block = pool.alloc().unwrap();
    block.memory().write_u64(0, 1).unwrap();
    drop(block);
    assert_eq!(pool.shrink_shared(), 4096);
}

#[test]
fn stress_of_shrinking_beside_blocks_and_lent_memory() {
    // 32 pages, so that released chunks are soon acquired again.
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 1024);
    let rounds = if cfg!(miri) { 10 } else { 3_000 };
    crate::testing::scope(|scope| {
        for me in 1..=3u64 {
            let pool = &pool;
            scope.spawn(move || {
                for _ in 0..rounds {
                    let mut local = pool.local();
                    let blocks: Vec<_> = (0..20).map(|_| local.alloc().unwrap()).collect();
                    for block in &blocks {
                        block.memory().write_u64(0, me).unwrap();
                    }
                    if me == 3 {
                        let raw = local.alloc_raw().unwrap();
                        assert!(pool.memory(raw).unwrap().write_u64(0, me).is_ok());
                        local.free_raw(raw).unwrap();
                    }
                    for block in blocks {
                        assert_eq!(block.memory().read_u64(0), Ok(me));
                    }
                }
            });
        }
        for _ in 0..rounds {
            pool.shrink_shared();
        }
    });
    let mut pool = pool;
    assert_eq!(pool.stats().in_use, 0);
    pool.shrink();
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn every_block_is_seen_once_in_order_and_keeps_what_is_written() {
    for (size, boundary) in [(64, 0), (192, 4096), (3000, 0), (5000, 8192)] {
        let heap = Heap::new(4 << 20);
        let mut pool = DmaPool::new(&heap, "all", size, 0, boundary).unwrap();
        pool.for_each_block(|_, _| panic!("an empty pool has no block"));
        pool.set_limits(Limits { minimum: 500, maximum: 500 }).unwrap();
        let (held, bytes) = (pool.alloc_raw().unwrap(), pool.block_size());
        let mut seen = Vec::new();
        pool.for_each_block(|block, memory| {
            assert_eq!((memory.len(), memory.addr()), (bytes, block.as_ptr().addr().get()));
            memory.write_u64(0, block.iova().raw()).unwrap();
            seen.push(block);
        });
        assert!(seen.is_sorted_by_key(RawBlock::iova) && seen.contains(&held));
        let stats = pool.stats();
        assert_eq!((seen.len() as u64, stats.in_use), (stats.blocks, 1));
        // Seen blocks are not allocated by that.
        let free = *seen.iter().find(|&&block| block != held).unwrap();
        assert!(matches!(pool.free_raw(free), Err(FreeError::DoubleFree { .. })));
        let mut local = pool.local();
        for _ in 0..3 {
            let all: Vec<_> = std::iter::from_fn(|| local.alloc_raw().ok()).collect();
            assert_eq!(all.len() + 1, seen.len());
            for block in &all {
                assert_eq!(pool.memory(*block).unwrap().read_u64(0), Ok(block.iova().raw()));
            }
            local.free_bulk(&all).unwrap();
        }
    }
}

#[test]
fn writing_to_every_block_is_no_damage_in_debug_mode() {
    let heap = Heap::new(2 << 20);
    let mut pool = DmaPool::with_debug(&heap, "debug", 64, 0, 0).unwrap();
    let held = pool.alloc_raw().unwrap();
    pool.for_each_block(|_, memory| memory.fill(0, memory.len(), 7).unwrap());
    assert_eq!(pool.memory(held).unwrap().read_u8(0), Ok(7), "an allocated block keeps it");
    assert!(pool.inspect().is_empty());
}
