//! Blocks of more than 2 MiB: their chunks have 1 GiB, which is many words of the directory.

use super::*;

const GIB: usize = 1 << 30;

/// The first block is not the only one that is found: others start beyond the first 2 MiB of the chunk.
#[test]
fn every_block_of_a_chunk_of_1_gib_can_be_freed() {
    let heap = Heap::new(GIB);
    for (size, blocks) in [(3 << 20, 341), (300 << 20, 3), (GIB, 1)] {
        let mut pool = pool(&heap, size);
        let mut local = pool.local();
        let mut raws: Vec<_> = (0..blocks).map(|_| local.alloc_raw().unwrap()).collect();
        assert!(local.alloc_raw().is_err());
        let last = raws[blocks - 1];
        assert_eq!(pool.memory(last).map(|memory| memory.len()), Ok(size));
        assert!(matches!(pool.free_raw(moved(last, 8)), Err(FreeError::Misaligned { .. })));
        for block in raws.drain(..) {
            assert_eq!(local.free_raw(block), Ok(()));
        }
        let owned: Vec<_> = (0..blocks).map(|_| local.alloc().unwrap()).collect();
        drop(owned);
        drop(local);
        assert_eq!((pool.stats().in_use, pool.stats().blocks), (0, blocks as u64));
        // Not found any more, by a late, wrong free.
        assert_eq!(pool.shrink(), GIB as u64);
        assert!(matches!(pool.free_raw(last), Err(FreeError::Foreign { .. })));
        assert_eq!(heap.frames_taken(), 0);
    }
}

/// In a shorter span every alloc would fail, so the pool is refused, in debug mode too.
#[test]
fn a_span_shorter_than_the_smallest_chunk_is_refused() {
    let heap = Heap::new(8 << 20);
    let (size, chunk, len) = ((2 << 20) + 1, 1 << 30, 8 << 20);
    let refused = CreateError::SpanTooSmall { size: size as u64, chunk, len };
    assert_eq!(DmaPool::new(&heap, "test", size, 0, 0).err(), Some(refused.clone()));
    assert_eq!(DmaPool::with_debug(&heap, "test", size, 0, 0).err(), Some(refused.clone()));
    assert_eq!(heap.asked.load(Ordering::Relaxed), 0, "no chunk is asked for");
    let text = refused.to_string();
    assert!(text.contains("of 2097153 bytes (after rounding) in a span of 8388608 bytes"), "{text}");
    assert!(text.ends_with("has 1073741824 bytes; use a larger arena, or smaller blocks"), "{text}");

    // A span of exactly one chunk is enough.
    let heap = Heap::new(2 << 20);
    assert!(pool(&heap, 2 << 20).alloc_raw().is_ok());
    let heap = Heap::new(4096);
    assert!(pool(&heap, 4096).alloc_raw().is_ok());
    assert!(matches!(
        DmaPool::new(&heap, "test", 4097, 0, 0).err(),
        Some(CreateError::SpanTooSmall { chunk: 8192, len: 4096, .. })
    ));
}
