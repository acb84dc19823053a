//! Pools over memory of the caller.

use super::heap::Heap;
use crate::addr::Iova;
use crate::dma_pool::{
    AllocError, ChunkSource, CreateError, DmaPool, FreeError, RangeError, RawBlock,
};
use std::collections::BTreeSet;
use std::ptr::NonNull;

/// `bytes` of the heap from `offset` on.
fn part(heap: &Heap, offset: usize, bytes: usize) -> NonNull<[u8]> {
    // SAFETY: within the heap.
    let start = unsafe { heap.span().cast::<u8>().add(offset) };
    NonNull::slice_from_raw_parts(start, bytes)
}

#[test]
fn ranges_are_added_in_pieces_with_addresses_of_their_own() {
    let heap = Heap::new(16 << 20);
    let pool = DmaPool::builder("ranges")
        .block(192)
        .align(64)
        .boundary(4096)
        .maximum(60_000)
        .build_empty()
        .unwrap();
    assert!(matches!(pool.alloc(), Err(AllocError::Ranges { blocks: 0 })));
    let mut expected = 0;
    // One of less than a unit, one of several, one of exactly one, one whose rest has no block, one
    // that ends within a group.
    for (offset, bytes, iova) in [
        (0, 8192, 1 << 33),
        (8 << 20, 5 << 20, 1 << 20),
        (2 << 20, 2 << 20, 1 << 41),
        (4 << 20, (2 << 20) + 100, 1 << 42),
        (64 << 10, 4096 + 200, 7 << 40),
    ] {
        // SAFETY: the heap outlives the pool, and nothing else uses the part.
        let added = unsafe { pool.add_range(part(&heap, offset, bytes), Iova::new(iova)) }.unwrap();
        assert_eq!(added, (bytes / 4096 * 21 + (bytes % 4096) / 192) as u64);
        expected += added;
    }
    let mut local = pool.local();
    let blocks: Vec<_> = std::iter::from_fn(|| local.alloc_raw().ok()).collect();
    assert_eq!(blocks.len() as u64, expected);
    assert!(local.alloc_raw().unwrap_err().to_string().contains("add another range"));
    let places: BTreeSet<_> = blocks.iter().map(|block| block.as_ptr()).collect();
    assert_eq!(places.len(), blocks.len());
    for &block in &blocks {
        let offset = block.as_ptr().as_ptr().addr() - heap.start();
        let iova = match offset {
            0..8192 => (1 << 33) + offset,
            65_536..73_728 => (7 << 40) + offset - 65_536,
            0x20_0000..0x40_0000 => (1 << 41) + offset - (2 << 20),
            0x40_0000..0x60_0000 => (1 << 42) + offset - (4 << 20),
            _ => (1 << 20) + offset - (8 << 20),
        };
        assert_eq!(block.iova().raw(), iova as u64);
        local.free_raw(block).unwrap();
        assert!(matches!(local.free_raw(block), Err(FreeError::DoubleFree { .. })));
    }
    let beside = part(&heap, 32 << 10, 64).cast();
    let foreign = RawBlock::from_parts(beside, Iova::new(1 << 33));
    assert!(matches!(local.free_raw(foreign), Err(FreeError::Foreign { .. })));
    drop(local);
    assert_eq!(
        (pool.shrink(), pool.stats().in_use),
        (0, 0),
        "a range is never given back before the end"
    );
    pool.destroy().unwrap();
}

#[test]
fn ranges_that_do_not_fit_are_refused_by_name() {
    let heap = Heap::new(2 << 20);
    let pool = DmaPool::builder("ranges")
        .block(64)
        .align(64)
        .boundary(8192)
        .maximum(100)
        .build_empty()
        .unwrap();
    let add = |offset, bytes, iova| {
        // SAFETY: the heap outlives the pool, and nothing else uses the part.
        unsafe { pool.add_range(part(&heap, offset, bytes), Iova::new(iova)) }
    };
    assert!(matches!(add(64, 4096, 0), Err(RangeError::Align { needed: 8192, .. })));
    assert!(matches!(add(0, 4096, 64), Err(RangeError::Align { .. })));
    assert!(matches!(add(0, 63, 0), Err(RangeError::Size { len: 63, size: 64, .. })));
    assert!(matches!(add(0, 8192, u64::MAX - 8191), Err(RangeError::Size { .. })));
    assert!(matches!(
        add(0, 8192, 0),
        Err(RangeError::Maximum { blocks: 128, have: 0, maximum: 100 })
    ));
    assert_eq!(add(0, 4096, 0), Ok(64));
    assert_eq!(pool.stats().blocks, 64);
    // 2^17 numbers for each 2 MiB of blocks of 16 bytes: of 64 GiB, all but the last.
    let pool = DmaPool::builder("numbers").block(16).build_empty().unwrap();
    // SAFETY: as above; the other pool has the first page.
    assert_eq!(unsafe { pool.add_range(part(&heap, 1 << 20, 4096), Iova::new(0)) }, Ok(256));
    for len in [(32_766 << 21) + 16, 32_767 << 21, 1 << 47, 1 << 62] {
        let range = NonNull::slice_from_raw_parts(NonNull::<u128>::dangling().cast::<u8>(), len);
        // SAFETY: refused for its length, before anything uses it.
        let refused = unsafe { pool.add_range(range, Iova::new(0)) };
        assert_eq!(refused, Err(RangeError::Numbers { len, size: 16, left: 32_766 << 21 }));
    }
    assert_eq!(pool.stats().blocks, 256);
    let refused = DmaPool::builder("ranges").block(64).minimum(1).build_empty();
    assert!(matches!(refused, Err(CreateError::Minimum { minimum: 1, available: 0, .. })));
}

#[test]
fn shrink_releases_the_sources_chunks_and_keeps_the_callers_range() {
    let (heap, own) = (std::sync::Arc::new(Heap::new(2 << 20)), Heap::new(2 << 20));
    let pool = DmaPool::builder("both").block(4096).build(&heap).unwrap();
    drop(pool.alloc().unwrap());
    // SAFETY: the heap outlives the pool, and nothing else uses the part.
    assert_eq!(unsafe { pool.add_range(part(&own, 0, 1 << 20), Iova::new(0)) }, Ok(256));
    assert_eq!(pool.stats().blocks, 257);
    assert_eq!((pool.shrink(), pool.stats().blocks, heap.frames_taken()), (4096, 256, 0));
    let mut local = pool.local();
    assert_eq!(local.fill(&mut [None; 256]), 256);
    assert_eq!(heap.frames_taken(), 0);
}
