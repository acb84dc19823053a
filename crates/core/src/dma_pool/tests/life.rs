//! Growth, shrinking, reports and the end of a pool.

use super::subject::{Block, Local, Pool};
use super::{heap, pool};
use crate::dma_pool::{FreeError, REPORT_HEADER};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn the_report_is_in_the_kernels_format() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let _blocks: Vec<_> = (0..3).map(|_| pool.alloc().unwrap()).collect();
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.blocks, stats.chunks, stats.bytes), (3, 64, 1, 4096));
    assert_eq!(stats.to_string(), format!("{REPORT_HEADER}\ntest                3   64   64  1\n"));
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
    assert!(text.contains("other owners of the pool may hold free blocks"), "{text}");
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
        local: Local,
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
