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
    // All of the first row: the current one is the second by now.
    let freed: Vec<_> = (0..20).map(|i| blocks[i * 3 + 4]).collect();
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

/// An owner that has five spent rows, no free block in its current row, and a stash that is full, of blocks of the last two.
fn with_spent_rows(pool: &DmaPool<Heap>) -> (Local<Heap, &DmaPool<Heap>>, Vec<RawBlock>) {
    let mut local = pool.local();
    let mut blocks: Vec<_> = (0..5 * 64).map(|_| local.alloc_raw().unwrap()).collect();
    // What is left of the rows that it was lent.
    while local.owner.current.parts().1 != 0 || local.owner.whole.len() != 0 {
        blocks.push(local.alloc_raw().unwrap());
    }
    // Their owner frees in them, so it keeps them.
    for row in blocks.chunks(64) {
        local.free_raw(row[5]).unwrap();
        assert_eq!(local.alloc_raw(), Ok(row[5]));
    }
    (0..16).for_each(|i| local.free_raw(blocks[3 * 64 + 1 + 4 * i]).unwrap());
    assert!(local.owner.stash.is_full());
    (local, blocks)
}

/// Whether this block's row is the current one.
fn is_current(pool: &DmaPool<Heap>, local: &Local<Heap, &DmaPool<Heap>>, block: RawBlock) -> bool {
    local.owner.current.is(pool.find(block).unwrap().site.row)
}

#[test]
fn a_row_becomes_the_current_one_when_frees_in_order_reach_it() {
    for first in [0, 63] {
        let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
        let (mut local, blocks) = with_spent_rows(&pool);
        for row in [0, 1, 2] {
            let mut row = blocks[row * 64..][..64].to_vec();
            if first == 63 {
                row.reverse();
            }
            for (freed, &block) in row.iter().enumerate() {
                local.free_raw(block).unwrap();
                assert!(is_current(&pool, &local, block));
                assert_eq!(local.owner.current.parts().1.count_ones() as usize, freed + 1);
            }
        }
        // The two before it were left as whole rows.
        assert_eq!(local.owner.whole.len(), 2);
        local.owner.audit();
    }
}

#[test]
fn a_row_stays_in_its_list_when_frees_are_in_no_order() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = with_spent_rows(&pool);
    // In the middle of a row.
    local.free_raw(blocks[1]).unwrap();
    assert!(!is_current(&pool, &local, blocks[1]));
    // At the end of a row that has a free block.
    local.free_raw(blocks[0]).unwrap();
    assert!(!is_current(&pool, &local, blocks[0]));
    // At the end of a row without one.
    local.free_raw(blocks[2 * 64 + 63]).unwrap();
    assert!(is_current(&pool, &local, blocks[2 * 64 + 63]));
    // At the other end of the same.
    local.free_raw(blocks[2 * 64]).unwrap();
    assert!(is_current(&pool, &local, blocks[2 * 64]));
    assert_eq!(local.owner.current.parts().1, 1 | 1 << 63);
    assert_eq!(pool.stats().in_use, blocks.len() as u64 - 16 - 4);
    local.owner.audit();
}

#[test]
fn a_row_that_is_adopted_does_not_become_the_current_one_while_the_stash_has_room() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = filled(&pool, 3);
    assert!(pool.find(blocks[0]).unwrap().site.row.is_unowned());
    local.free_raw(blocks[0]).unwrap();
    assert!(pool.find(blocks[0]).unwrap().site.row.is_owned_by(local.owner.id));
    assert!(!is_current(&pool, &local, blocks[0]));
    assert_eq!((local.owner.stash.len(), local.alloc_raw()), (1, Ok(blocks[0])));
}

/// A pass in order starts with a row that has no free block; one that is half empty already is not one.
#[test]
fn a_row_that_becomes_sparse_by_its_first_block_does_not_become_the_current_one() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let (mut local, blocks) = with_spent_rows(&pool);
    blocks[1..56].iter().for_each(|&block| local.free_raw(block).unwrap());
    assert_eq!((local.owner.open.len(), local.owner.sparse.len()), (1, 0));
    local.free_raw(blocks[0]).unwrap();
    assert!(!is_current(&pool, &local, blocks[0]));
    assert_eq!((local.owner.open.len(), local.owner.sparse.len()), (0, 1));
    local.owner.audit();
}

/// The last row of a chunk may have fewer than 64 blocks.
#[test]
fn a_short_row_becomes_the_current_one_when_frees_reach_its_last_block() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 192, 64, 0).unwrap();
    let mut local = pool.local();
    let mut blocks: Vec<_> = (0..300).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!(pool.find(blocks[20]).unwrap().site.row.blocks(), 21);
    while local.owner.current.parts().1 != 0 || local.owner.whole.len() != 0 {
        blocks.push(local.alloc_raw().unwrap());
    }
    local.free_raw(blocks[5]).unwrap();
    assert_eq!(local.alloc_raw(), Ok(blocks[5]));
    (0..16).for_each(|i| local.free_raw(blocks[100 + i]).unwrap());
    assert!(local.owner.stash.is_full());
    local.free_raw(blocks[20]).unwrap();
    assert!(is_current(&pool, &local, blocks[20]));
}

/// Frees that follow each other look at the current row before the stash; one after an alloc does not.
#[test]
fn frees_in_turn_return_to_the_current_row() {
    let pool = DmaPool::new(Heap::new(2 << 20), "aside", 64, 64, 0).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..32).map(|_| local.alloc_raw().unwrap()).collect();
    for &block in &blocks[..4] {
        local.free_raw(block).unwrap();
        assert_eq!(local.free_raw(block), Err(FreeError::DoubleFree { addr: block.addr() }));
        assert_eq!(local.owner.stash.len(), 1, "only the first");
    }
    assert_eq!(local.alloc_raw(), Ok(blocks[0]));
    local.free_raw(blocks[9]).unwrap();
    assert_eq!((local.owner.stash.len(), local.alloc_raw()), (1, Ok(blocks[9])));
    // From the row, in ascending order.
    let again: Vec<_> = (0..4).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!(again[..3], blocks[1..4]);
    assert!(!blocks.contains(&again[3]));
    assert_eq!(pool.stats().in_use, 33);
}
