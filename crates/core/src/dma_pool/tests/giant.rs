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
