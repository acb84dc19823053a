//! The placement of blocks.

use super::heap::IOVA;
use super::subject::{build, limited};
use super::{heap, pool};
use crate::dma_pool::{ChunkSource, CreateError};
use crate::frame::Order;
use std::collections::BTreeSet;

#[test]
fn blocks_are_aligned_apart_and_cross_no_boundary() {
    for (size, align, boundary) in [
        (1, 0, 0),
        (64, 64, 0),
        (96, 32, 4096),
        (100, 0, 0),
        (128, 128, 4096),
        (192, 64, 0),
        (192, 64, 4096),
        (3000, 8, 0),
        (3000, 8, 8192),
        (3000, 0, 4096),
        (9000, 8, 16_384),
        (40_000, 4096, 0),
        (700_000, 4096, 0),
    ] {
        let heap = heap(16);
        // Another user's page before the first chunk.
        let before = heap.acquire(Order::PAGE).unwrap();
        let pool = build(&heap, size, align, boundary).unwrap();
        let rounded = size.max(16).next_multiple_of(align.max(1));
        assert_eq!(pool.stats().block_bytes, rounded as u64);
        let mut local = pool.local();
        let count = (8 << 20) / rounded.next_power_of_two();
        let mut seen = BTreeSet::new();
        for _ in 0..count {
            let block = local.alloc_raw().unwrap();
            let at = block.as_ptr().as_ptr().addr() - heap.start();
            assert_eq!(block.iova().raw() - IOVA, at as u64);
            assert!(at.is_multiple_of(align.max(1)) && at + rounded <= heap.bytes());
            assert!(
                at as u64 >= before.offset() + 4096,
                "the block at {at} of {size} bytes is in no chunk"
            );
            let window = |at: usize| at.checked_div(boundary);
            assert_eq!(window(at), window(at + rounded - 1), "{size} {align} {boundary}");
            assert!(seen.insert(at));
        }
        let starts: Vec<_> = seen.into_iter().collect();
        assert!(
            starts.windows(2).all(|two| two[0] + rounded <= two[1]),
            "{size} {align} {boundary}"
        );
    }
}

/// Each has the blocks of the one grid of its unit that lie in it.
#[test]
fn single_pages_are_enough_for_blocks_of_half_a_page() {
    for size in [64, 192, 1500, 2047, 2048, 4096] {
        let heap = heap(2);
        heap.largest.store(0, std::sync::atomic::Ordering::Relaxed);
        let pool = pool(&heap, size);
        let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        let within = |block: &usize| block * size / 4096 == (block * size + size - 1) / 4096;
        assert_eq!(blocks.len(), (0..(2 << 20) / size).filter(within).count(), "{size}");
        for block in blocks {
            pool.free_raw(block).unwrap();
        }
    }
}

/// Two pages have one wherever they lie; a single one may have none, and is not asked for.
#[test]
fn longer_blocks_take_twice_the_pages_that_one_fits_in() {
    use std::sync::atomic::Ordering;
    let heap = heap(2);
    heap.largest.store(0, Ordering::Relaxed);
    let pool = pool(&heap, 3000);
    assert!(pool.alloc_raw().is_err());
    heap.largest.store(1, Ordering::Relaxed);
    let blocks = std::iter::from_fn(|| pool.alloc_raw().ok()).count();
    let within = |block: &usize| block * 3000 / 8192 == (block * 3000 + 2999) / 8192;
    assert_eq!(blocks, (0..(2 << 20) / 3000).filter(within).count());
}

#[test]
fn large_chunks_waste_nothing_on_odd_sizes() {
    for size in [192, 3000, 9216, 700_000] {
        let heap = heap(2);
        let pool = limited(&heap, size, (2 << 20) / size as u64, u64::MAX).unwrap();
        assert_eq!((pool.stats().chunks, pool.stats().bytes), (1, 2 << 20), "{size}");
    }
}

#[test]
fn blocks_larger_than_two_mebibytes_take_a_chunk_of_one_gibibyte() {
    let heap = heap(1024);
    let pool = pool(&heap, 300 << 20);
    let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    assert_eq!(blocks.len(), 3);
    for block in &blocks {
        pool.free_raw(*block).unwrap();
        assert!(pool.free_raw(*block).is_err());
    }
}

#[test]
fn a_new_pool_hands_out_ascending_neighbours() {
    let heap = heap(8);
    let pool = pool(&heap, 128);
    let mut local = pool.local();
    let addresses: Vec<_> = (0..20_000).map(|_| local.alloc_raw().unwrap().iova().raw()).collect();
    let neighbours = addresses.windows(2).filter(|two| two[0] + 128 == two[1]).count();
    assert!(neighbours > 19_900, "{neighbours} of 20,000");
}

#[test]
fn impossible_layouts_are_refused_by_name() {
    let heap = heap(2);
    let refused = |size, align, boundary| build(&heap, size, align, boundary).unwrap_err();
    assert!(matches!(refused(0, 0, 0), CreateError::Size { size: 0 }));
    let largest = refused((1 << 30) + 1, 0, 0);
    assert!(matches!(largest, CreateError::Size { .. }));
    assert!(largest.to_string().ends_with("a block has 1 to 1073741824 bytes"), "{largest}");
    // Not refused for its size.
    assert!(matches!(refused(1 << 30, 0, 0), CreateError::SpanTooSmall { .. }));
    assert!(matches!(refused(64, 3, 0), CreateError::Align { align: 3 }));
    assert!(matches!(refused(64, 0, 48), CreateError::Boundary { boundary: 48, size: 64 }));
    assert!(matches!(refused(64, 0, 32), CreateError::Boundary { boundary: 32, size: 64 }));
    assert!(matches!(refused(3 << 20, 0, 0), CreateError::SpanTooSmall { .. }));
    assert!(matches!(refused(64, 4 << 30, 0), CreateError::TooLarge { .. }));
}

#[test]
fn memory_is_that_of_the_block_and_zeroed_on_request() {
    let heap = heap(2);
    let pool = pool(&heap, 192);
    let mut local = pool.local();
    let block = local.alloc().unwrap();
    assert_eq!(block.memory().len(), 192);
    assert_eq!(block.memory().as_ptr(), block.as_raw().as_ptr());
    block.memory().fill(0, 192, 0xee).unwrap();
    local.free(block);
    for _ in 0..64 {
        let block = local.alloc_zeroed().unwrap();
        let mut bytes = [1; 192];
        block.memory().copy_to_slice(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 192]);
        std::mem::forget(block);
    }
}

#[test]
fn minimum_and_maximum_hold() {
    for (size, count) in [(64, 1), (64, 1000), (192, 5000), (4096, 77), (3000, 30)] {
        let heap = heap(4);
        let pool = limited(&heap, size, count, count).unwrap();
        let acquired = heap.acquired.load(std::sync::atomic::Ordering::Relaxed);
        let blocks = std::iter::from_fn(|| pool.alloc_raw().ok()).count() as u64;
        // A chunk is whole pages.
        assert!((count..count + 64).contains(&blocks), "{blocks} blocks of {size} for {count}");
        assert_eq!(heap.acquired.load(std::sync::atomic::Ordering::Relaxed), acquired);
        assert!(pool.alloc_raw().unwrap_err().to_string().contains("the pool may have"));
    }
    let heap = heap(2);
    assert!(limited(&heap, 64, 2, 1).is_err());
    assert!(matches!(
        limited(&heap, 64, 0, 0),
        Err(CreateError::Limits { minimum: 0, maximum: 0 })
    ));
    assert!(limited(&heap, 4096, 513, 1000).is_err());
    assert_eq!(heap.frames_taken(), 0, "what was acquired for it is released");
}
