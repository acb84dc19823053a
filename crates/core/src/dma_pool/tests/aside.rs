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
    // Runs return to their rows, past the stash, so the owner keeps the rows.
    let runs = [0..3, 64..67].map(|run| &blocks[run]);
    runs.iter().for_each(|run| local.free_bulk(run).unwrap());
    let in_rows: HashSet<_> = runs.concat().into_iter().chain([last_of_the_third_row(&blocks)]).collect();
    // Those whose rows had no owner are in the stash: one of each run.
    let mut early: HashSet<_> = (0..2).map(|_| local.alloc_raw().unwrap()).collect();
    assert!(early.is_subset(&in_rows));
    // Too many for the stash: those after the 16th return to their rows.
    let freed: Vec<_> = (0..20).map(|i| blocks[(i * 37 + 5) % blocks.len()]).collect();
    freed.iter().for_each(|&block| local.free_raw(block).unwrap());
    let again: Vec<_> = (0..16).map(|_| local.alloc_raw().unwrap()).collect();
    assert!(again.iter().eq(freed[..16].iter().rev()), "{again:?}");
    early.extend((0..9).map(|_| local.alloc_raw().unwrap()));
    assert_eq!(early, in_rows.into_iter().chain(freed[16..].iter().copied()).collect());
}

/// The block that `filled` leaves free.
fn last_of_the_third_row(blocks: &[RawBlock]) -> RawBlock {
    let bytes = (3 * 64 - 1) * 64;
    let (ptr, iova) = (blocks[0].as_ptr(), blocks[0].iova());
    RawBlock::from_parts(
        ptr.map_addr(|addr| addr.saturating_add(bytes)),
        Iova::new(iova.raw() + bytes as u64),
    )
}

#[test]
fn frees_of_many_return_to_the_row_that_they_start_in_the_middle_of() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = filled(&pool, 3);
    local.free_bulk(&blocks[20..24]).unwrap();
    let again: HashSet<_> = (0..5).map(|_| local.alloc_raw().unwrap()).collect();
    let expected = blocks[20..24].iter().copied().chain([last_of_the_third_row(&blocks)]);
    assert_eq!(again, expected.collect());
    assert_eq!(pool.stats().in_use, 3 * 64);
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
