//! Growth, shrinking, reports and the end of a pool.

use super::heap::Heap;
use super::subject::{Block, Pool, PoolLocal, limited};
use super::{heap, pool};
use crate::addr::Iova;
#[cfg(feature = "count-rmw")]
use crate::dma_pool::RawBlock;
use crate::dma_pool::{AllocError, ChunkSource, FreeError, SourceError};
use crate::frame::{Frame, Order};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn the_report_is_in_the_kernels_format() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let _blocks: Vec<_> = (0..3).map(|_| pool.alloc().unwrap()).collect();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.blocks, stats.chunks, stats.bytes), (3, 64, 1, 4096));
    assert_eq!(stats.to_string(), "poolinfo - 0.1\ntest                3   64   64  1\n");
}

#[test]
fn a_pool_grows_by_doubling_and_takes_smaller_chunks_if_it_must() {
    let heap = heap(16);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let mut sizes = vec![];
    for _ in 0..(8 << 20) / 64 {
        local.alloc_raw().unwrap();
        let bytes = pool.stats().bytes;
        if sizes.last() != Some(&bytes) {
            sizes.push(bytes);
        }
        if sizes.len() > 6 {
            break;
        }
    }
    assert_eq!(sizes[..4], [4096, 8192, 16_384, 32_768]);
    heap.largest.store(0, Ordering::Relaxed);
    let before = pool.stats().bytes;
    while pool.stats().bytes == before {
        local.alloc_raw().unwrap();
    }
    assert_eq!(pool.stats().bytes, before + 4096);
}

#[test]
fn a_source_that_fails_is_reported_and_may_recover() {
    let heap = heap(2);
    heap.left.store(1, Ordering::Relaxed);
    let pool = pool(&heap, 64);
    let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    assert_eq!(blocks.len(), 64);
    let text = pool.alloc_raw().unwrap_err().to_string();
    assert!(text.contains("other owners of the pool may hold free memory"), "{text}");
    pool.free_raw(blocks[5]).unwrap();
    assert_eq!(pool.alloc_raw(), Ok(blocks[5]));
    heap.left.store(1, Ordering::Relaxed);
    assert!(pool.alloc_raw().is_ok());
}

#[test]
fn shrink_releases_free_chunks_while_handles_live() {
    let heap = heap(32);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let kept = local.alloc().unwrap();
    let blocks: Vec<_> = (0..200_000).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!(pool.shrink(), 0, "nothing is free");
    let taken = heap.frames_taken();
    blocks.iter().for_each(|&block| local.free_raw(block).unwrap());
    let last = blocks[199_999];
    drop(local);
    let bytes = pool.shrink();
    assert!(bytes > 10 << 20, "{bytes}");
    assert_eq!(heap.frames_taken(), taken - usize::try_from(bytes / 4096).unwrap());
    assert!(matches!(pool.free_raw(last), Err(FreeError::Foreign { .. })));
    assert_eq!(pool.stats().in_use, 1);
    drop(kept);
    pool.shrink();
    assert_eq!((heap.frames_taken(), pool.stats().blocks), (0, 0));
    // It can grow again, over the same frames.
    let again = pool.alloc_raw().unwrap();
    pool.free_raw(again).unwrap();
    drop(pool);
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn a_busy_pool_is_not_destroyed_and_says_why() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let raw = pool.alloc_raw().unwrap();
    let busy = pool.destroy().unwrap_err();
    let text = busy.to_string();
    assert_eq!((busy.blocks, busy.first), (1, Some(raw)));
    drop(busy);
    assert!(text.contains("\"test\"") && text.contains(&format!("{:p}", raw.as_ptr())), "{text}");
    // A device may still write to the block: its chunk is never released.
    assert_eq!(heap.frames_taken(), 1);
    let heap = super::heap(2);
    let pool = super::pool(&heap, 64);
    drop(pool.alloc().unwrap());
    let other = pool.clone();
    let busy = pool.destroy().unwrap_err();
    assert!(busy.to_string().contains("other handles"), "{busy}");
    drop(other);
    busy.pool.destroy().unwrap();
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn handles_and_blocks_keep_their_pool() {
    struct Driver {
        in_flight: Vec<Block>,
        local: PoolLocal,
        pool: Pool,
    }
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let mut driver = Driver { in_flight: Vec::new(), local: pool.local(), pool };
    driver.in_flight.push(driver.local.alloc().unwrap());
    driver.in_flight.push(driver.pool.alloc().unwrap());
    let driver = std::thread::spawn(move || driver).join().unwrap();
    let Driver { in_flight, mut local, pool } = driver;
    drop(pool);
    let block = local.alloc().unwrap();
    local.free(block);
    drop(local);
    assert_ne!(heap.frames_taken(), 0);
    in_flight.into_iter().for_each(|block| block.memory().fill(0, 64, 1).unwrap());
    assert_eq!(heap.frames_taken(), 0);
    assert_eq!(Arc::strong_count(&heap), 1);
}

#[test]
fn the_last_of_a_pools_blocks_ends_it() {
    let heap = heap(2);
    let pool = pool(&heap, 4096);
    let mut local = pool.local();
    let mut blocks: Vec<_> = (0..3).map(|_| local.alloc().unwrap()).collect();
    let raw = local.alloc_raw().unwrap();
    local.free_raw(raw).unwrap();
    drop((pool, local));
    while let Some(block) = blocks.pop() {
        assert_eq!(Arc::strong_count(&heap), 2, "{} blocks and this one", blocks.len());
        drop(block);
    }
    assert_eq!((Arc::strong_count(&heap), heap.frames_taken()), (1, 0));
    // A raw block keeps its chunk from the source, and not its pool.
    let pool = super::pool(&heap, 4096);
    let (first, second) = (pool.alloc().unwrap(), pool.alloc().unwrap());
    drop(pool);
    drop(first);
    let _ = second.into_raw();
    assert_eq!((Arc::strong_count(&heap), heap.frames_taken()), (1, 1));
    // Nor is it waited for where no block is left: it can be freed by nobody.
    let pool = super::pool(&heap, 4096);
    let _ = pool.alloc_raw().unwrap();
    drop(pool);
    assert_eq!((Arc::strong_count(&heap), heap.frames_taken()), (1, 2));
}

#[test]
fn a_busy_pool_tells_of_its_handles_and_blocks() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let (other, block) = (pool.local(), pool.alloc().unwrap());
    let busy = pool.destroy().unwrap_err();
    assert_eq!((busy.handles, busy.blocks, busy.first), (1, 1, Some(block.as_raw())));
    let text = busy.to_string();
    assert!(text.contains("1 blocks are allocated") && text.contains("1 other handles"), "{text}");
    drop((other, block));
    busy.pool.destroy().unwrap();
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn shrink_keeps_the_minimum_and_no_more() {
    let heap = heap(16);
    let pool = limited(&heap, 4096, 100, u64::MAX).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..2_000).map(|_| local.alloc_raw().unwrap()).collect();
    blocks.into_iter().for_each(|block| local.free_raw(block).unwrap());
    drop(local);
    assert_ne!(pool.shrink(), 0);
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.bytes, heap.frames_taken()), (100, 100 * 4096, 100));
    // Blocks that were not allocated since stay free as well.
    assert_eq!(pool.shrink(), 0);
    drop(pool);
    assert_eq!(heap.frames_taken(), 0);
    // Also where a chunk is one block.
    let pool = limited(&heap, 4096, 1, u64::MAX).unwrap();
    assert_eq!((pool.shrink(), pool.stats().blocks), (0, 1));
}

#[test]
fn a_chunk_that_was_never_used_survives_shrink_and_is_released() {
    let heap = heap(2);
    let pool = limited(&heap, 64, 1_000, u64::MAX).unwrap();
    pool.shrink();
    drop(pool.alloc().unwrap());
    drop(pool);
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn shrink_asks_active_owners_for_what_they_cache() {
    let heap = heap(2);
    let pool = limited(&heap, 64, 4_096, u64::MAX).unwrap();
    let (mut local, one_more) = (pool.local(), pool.alloc_raw().unwrap());
    let blocks: Vec<_> = (0..1_024).map(|_| local.alloc_raw().unwrap()).collect();
    blocks.into_iter().for_each(|block| local.free_raw(block).unwrap());
    pool.shrink();
    assert_eq!(pool.stats().cached, 1_024);
    local.free_raw(one_more).unwrap();
    assert_eq!(pool.stats().cached, 1);
}

#[test]
fn the_report_counts_what_was_in_use_and_where_the_free_blocks_are() {
    let heap = heap(16);
    let builder = Pool::builder("counts").block(4096).minimum(96).cached_bytes(0);
    let pool = builder.build(&heap).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.blocks, stats.in_depot, stats.cached, stats.peak), (96, 96, 0, 0));
    assert_eq!((stats.chunks, stats.free_chunks), (2, 2));
    let mut local = pool.local();
    let (a, b) = (local.alloc_raw().unwrap(), local.alloc().unwrap());
    local.free_raw(a).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.cached, stats.in_depot, stats.peak), (1, 1, 94, 2));
    assert_eq!((stats.chunks, stats.free_chunks), (2, 1));
    local.free(b);
    local.flush();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.cached, stats.in_depot, stats.peak), (0, 0, 96, 2));
    // It rises only with more blocks than ever, and stays after a shrink.
    for (count, peak) in [(2, 2), (7, 7), (3, 7)] {
        let blocks: Vec<_> = (0..count).map(|_| local.alloc_raw().unwrap()).collect();
        assert_eq!(pool.stats().peak, peak);
        local.free_bulk(&blocks).unwrap();
        local.flush();
        assert_eq!((pool.shrink(), pool.stats().peak), (0, peak));
    }
}

#[test]
fn numbers_of_dropped_owners_are_reused() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let (first, second) = (pool.local(), pool.local());
    assert_ne!(first.number(), second.number());
    let number = first.number();
    drop(first);
    assert_eq!(pool.local().number(), number);
    // One that is forgotten keeps its number.
    let forgotten = pool.local().number();
    std::mem::forget(pool.local());
    assert_ne!(pool.local().number(), forgotten);
}

#[test]
fn a_block_in_use_keeps_its_pool_from_being_destroyed() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let block = pool.alloc().unwrap();
    let busy = pool.destroy().unwrap_err();
    assert_eq!((busy.blocks, busy.first), (1, Some(block.as_raw())));
    drop(block);
    // A forgotten one may be with a device, as a raw one may.
    std::mem::forget(busy.pool.alloc().unwrap());
    assert_eq!(busy.pool.destroy().unwrap_err().blocks, 1);
    assert_eq!(heap.frames_taken(), 1);
}

/// A heap whose runs are not where they should be.
#[derive(Clone)]
struct Liar(Arc<Heap>, u32);

// SAFETY: not kept, which is what is tested; no memory of the runs is accessed.
unsafe impl ChunkSource for Liar {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.0.acquired.fetch_add(1, Ordering::Relaxed);
        Ok(Frame::new(if order == Order::PAGE { self.1.max(512) } else { self.1 }).unwrap())
    }
    unsafe fn release(&self, _: Frame, _: Order) {
        self.0.released.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_run_outside_the_span_or_not_aligned_is_given_back() {
    let heap = heap(2);
    // Behind the span by a page; half in it; in it, but not at a multiple of its size.
    for (size, first) in [(4096, 512), (8192, 511), (8192, 512), (8192, 3)] {
        let pool = Pool::builder("liar").block(size).build(&Liar(heap.clone(), first)).unwrap();
        let refused = pool.alloc().unwrap_err();
        assert!(matches!(refused, AllocError::Misplaced { .. }), "{refused}");
        assert_eq!(heap.acquired.load(Ordering::Relaxed), heap.released.load(Ordering::Relaxed));
        assert_eq!(pool.stats().blocks, 0);
    }
}

#[test]
fn no_chunk_is_acquired_that_holds_no_block() {
    let heap = heap(2);
    heap.largest.store(3, Ordering::Relaxed);
    let refused = pool(&heap, 40_000).alloc().unwrap_err();
    assert!(matches!(refused, AllocError::Source(_)), "{refused}");
    assert_eq!(heap.acquired.load(Ordering::Relaxed), 0);
}

/// Blocks of chunks that are kept, and of those that are released, are mixed in every array; some
/// chunks were never used, some in part.
#[test]
fn shrink_finds_the_free_chunks_among_mixed_numbers() {
    let mut random = crate::testing::Random::new(9);
    for round in 0..20 {
        let heap = heap(16);
        let pool = Pool::builder("mixed").block(256).cached_bytes(8 << 10).build(&heap).unwrap();
        let mut local = pool.local();
        let mut blocks: Vec<_> =
            (0..1_000 + random.below(20_000)).map(|_| local.alloc_raw().unwrap()).collect();
        for at in (1..blocks.len()).rev() {
            blocks.swap(at, random.below(at + 1));
        }
        // One block keeps its chunk.
        let kept: Vec<_> = blocks.drain(..round / 4).collect();
        for &block in &blocks {
            local.free_raw(block).unwrap();
        }
        local.flush();
        let before = pool.stats();
        let released = pool.shrink();
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.cached, stats.free_chunks), (kept.len() as u64, 0, 0));
        assert_eq!(stats.bytes, before.bytes - released);
        assert_eq!(heap.frames_taken() as u64 * 4096, stats.bytes);
        assert_eq!(pool.shrink(), 0);
        // Each remaining block is in the depot once.
        let again: std::collections::HashSet<_> =
            (0..stats.in_depot).map(|_| local.alloc_raw().unwrap()).collect();
        assert_eq!((again.len() as u64, pool.stats().blocks), (stats.in_depot, stats.blocks));
        assert!(kept.iter().all(|block| !again.contains(block)));
    }
}

/// Checks that `look` holds no lock for all of 800,000 allocated blocks.
#[cfg(feature = "count-rmw")]
fn holds_no_lock_for_all_blocks(look: impl FnOnce(Pool, &[RawBlock])) {
    let heap = heap(64);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..800_000).map(|_| local.alloc_raw().unwrap()).collect();
    crate::sync::rmw_reset();
    look(pool, &blocks);
    assert!(crate::sync::longest_hold() < 2_000, "{}", crate::sync::longest_hold());
    blocks.into_iter().for_each(|block| local.free_raw(block).unwrap());
}

#[cfg(feature = "count-rmw")]
#[test]
fn counted_stats_hold_the_lock_for_the_list_of_chunks() {
    holds_no_lock_for_all_blocks(|pool, _| {
        let stats = pool.stats();
        let free = stats.cached + stats.in_depot;
        assert_eq!((stats.in_use, free), (800_000, stats.blocks - 800_000));
    });
}

#[cfg(feature = "count-rmw")]
#[test]
fn counted_a_refused_end_holds_the_lock_for_some_chunks() {
    holds_no_lock_for_all_blocks(|pool, blocks| {
        let busy = pool.destroy().unwrap_err();
        assert_eq!((busy.blocks, busy.handles, busy.first), (800_000, 1, Some(blocks[0])));
    });
}

/// No lock is held for all blocks of the pool.
#[cfg(feature = "count-rmw")]
#[test]
fn counted_shrink_holds_a_lock_for_one_array_at_a_time() {
    let heap = heap(64);
    for left in [0, 1] {
        let pool = pool(&heap, 64);
        let mut local = pool.local();
        let blocks: Vec<_> = (0..800_000).map(|_| local.alloc_raw().unwrap()).collect();
        blocks.iter().skip(left).for_each(|&block| local.free_raw(block).unwrap());
        local.flush();
        crate::sync::rmw_reset();
        assert!(pool.shrink() > 40 << 20);
        assert!(crate::sync::longest_hold() < 2_000, "{}", crate::sync::longest_hold());
        if left == 1 {
            local.free_raw(blocks[0]).unwrap();
        }
        drop((local, pool));
        assert_eq!(heap.frames_taken(), 0);
    }
}
