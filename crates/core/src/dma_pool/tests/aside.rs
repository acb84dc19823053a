//! Frees into rows other than the current one.

use super::*;

/// Allocates `rows` rows of blocks of 64 bytes, all but the last block.
fn filled(pool: &DmaPool<Heap>, rows: usize) -> (Local<Heap, &DmaPool<Heap>>, Vec<RawBlock>) {
    let mut local = pool.local();
    let blocks = (0..rows * 64 - 1).map(|_| local.alloc_raw().unwrap()).collect();
    (local, blocks)
}

#[test]
fn the_blocks_freed_last_are_allocated_first() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = filled(&pool, 3);
    // A block that is free in each row, so that the owner keeps the rows.
    local.free_bulk(&[blocks[0], blocks[64]]).unwrap();
    // Too many for the stash: those after the 16th return to their rows.
    let freed: Vec<_> = (0..20).map(|i| blocks[(i * 37 + 5) % blocks.len()]).collect();
    freed.iter().for_each(|&block| local.free_raw(block).unwrap());
    let again: Vec<_> = (0..16).map(|_| local.alloc_raw().unwrap()).collect();
    assert!(again.iter().eq(freed[..16].iter().rev()), "{again:?}");
    let mut rest: HashSet<_> = (0..7).map(|_| local.alloc_raw().unwrap()).collect();
    assert!(freed[16..].iter().chain([&blocks[0], &blocks[64]]).all(|block| rest.remove(block)));
    // The last block of the third row.
    assert_eq!(rest.len(), 1);
    assert!(!blocks.contains(rest.iter().next().unwrap()));
}

#[test]
fn frees_of_many_that_start_in_the_middle_of_a_row_make_it_current() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = filled(&pool, 3);
    local.free_bulk(&blocks[20..24]).unwrap();
    let again: Vec<_> = (0..4).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!(again, blocks[20..24]);
}

#[test]
fn wrong_frees_aside_are_refused_and_change_nothing() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = filled(&pool, 3);
    let refused = |block: RawBlock| Err(FreeError::DoubleFree { addr: block.addr() });
    for &block in [&blocks[3], &blocks[67], &blocks[4], &blocks[68]] {
        local.free_raw(block).unwrap();
        assert_eq!(local.free_raw(block), refused(block));
        assert_eq!(pool.free_raw(block), refused(block));
    }
    let owned = local.alloc().unwrap();
    let owned_block = owned.as_raw();
    let in_use = pool.stats().in_use;
    assert_eq!(in_use, 3 * 64 - 1 - 4 + 1);
    local.free_raw(blocks[130]).unwrap();
    assert_eq!(local.free_raw(owned_block), Err(FreeError::Owned { addr: owned_block.addr() }));
    drop(owned);
    assert_eq!(pool.stats().in_use, in_use - 2);
}

#[test]
fn all_blocks_freed_at_random_can_be_allocated_again() {
    for size in [64, 3000] {
        let pool = DmaPool::new(Heap::new(4 << 20), "aside", size, 0, 0).unwrap();
        let mut local = pool.local();
        let mut blocks: Vec<_> = (0..1000).map(|_| local.alloc_raw().unwrap()).collect();
        let all: HashSet<_> = blocks.iter().copied().collect();
        let total = pool.stats().blocks;
        let mut random = Random::new(3);
        while !blocks.is_empty() {
            local.free_raw(blocks.swap_remove(random.below(blocks.len()))).unwrap();
        }
        assert_eq!(pool.stats().in_use, 0);
        let again: HashSet<_> = (0..1000).map(|_| local.alloc_raw().unwrap()).collect();
        assert_eq!((again.len(), pool.stats().blocks), (all.len(), total), "the pool has not grown");
    }
}
