//! Which of its rows an owner uses, keeps and gives up first, and exactly how many.

use super::relief::{keeping, spent};
use super::*;

#[test]
fn the_fullest_row_is_used_first() {
    for (bulk, open) in [(false, 10), (true, 10), (true, 0)] {
        let heap = Heap::new(4 << 20);
        let pool = pool(&heap, 64);
        let (mut local, blocks) = keeping(&pool, 10);
        let (whole, sparse, fuller) = (&blocks[..64], &blocks[64..64 + 60], &blocks[128..128 + open]);
        [whole, sparse, fuller].iter().for_each(|run| local.free_bulk(run).unwrap());
        let owner = &local.owner;
        assert_eq!((owner.whole.len(), owner.sparse.len(), owner.open.len()), (1, 1, open.min(1)));
        let mut slots = vec![None; open + 60 + 64];
        if bulk {
            assert_eq!(local.fill(&mut slots), slots.len());
        } else {
            slots.fill_with(|| local.alloc_raw().ok());
        }
        assert!(slots.iter().flatten().eq([fuller, sparse, whole].iter().copied().flatten()));
    }
}

/// Down to half of what the owner may keep: whole rows, then those that have been sparse for longest.
#[test]
fn whole_rows_are_given_up_first_and_half_of_what_may_be_kept_stays() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 512 * 64, maximum: u64::MAX }).unwrap();
    let (mut local, blocks) = keeping(&pool, 100);
    assert_eq!(pool.depot.terms().keep, 32);
    let row_of = |block| pool.find(block).unwrap().site.row;
    let (sparse, whole) = blocks[..33 * 64].split_at(20 * 64);
    sparse.chunks(64).for_each(|row| local.free_bulk(&row[..60]).unwrap());
    for row in whole.chunks(64) {
        assert_eq!(local.owner.sparse.len(), 20);
        local.free_bulk(row).unwrap();
    }
    assert_eq!((local.owner.sparse.len(), local.owner.whole.len()), (16, 0));
    for (number, row) in blocks[..33 * 64].chunks(64).enumerate() {
        assert_eq!(row_of(row[0]).is_in_depot(), !(4..20).contains(&number), "row {number}");
    }
}

/// The owner releases them when it has used them up, for those who free them to adopt.
#[test]
fn rows_that_another_owner_has_allocated_are_not_kept() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 512 * 64, maximum: u64::MAX }).unwrap();
    let mut local = pool.local();
    let mut slots = [None; 8 * 64];
    let mut gone = pool.local();
    assert_eq!(gone.fill(&mut slots), slots.len());
    drop(gone);
    local.free_slots(&mut slots).unwrap();
    assert_eq!(local.owner.whole.len(), 8);
    assert_eq!(local.fill(&mut slots[..6 * 64]), 6 * 64);
    assert_eq!(spent(&local), 0);
}

/// Although it has kept more before the pool reached its maximum.
#[test]
fn an_owner_keeps_few_used_up_rows_from_the_maximum_on() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 512 * 64, maximum: u64::MAX }).unwrap();
    let _other = pool.local();
    let (mut local, _) = keeping(&pool, 100);
    pool.set_limits(Limits { minimum: 0, maximum: 1 }).unwrap();
    // Until it has learnt of that.
    let (row, _) = local.owner.current.parts();
    while local.owner.current.parts().0 == row {
        local.alloc_raw().unwrap();
    }
    for _ in 0..60 * 64 {
        assert!(spent(&local) <= 32, "{} rows", spent(&local));
        local.alloc_raw().unwrap();
    }
}

/// A dropped owner adopts the rows of its stash, which costs one read-modify-write for each, not four as a remote free.
#[cfg(feature = "count-rmw")]
#[test]
fn a_stash_returns_its_blocks_to_rows_without_an_owner_by_adopting_them() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut other = pool.local();
    let (mut local, blocks) = keeping(&pool, 20);
    let row_of = |block| pool.find(block).unwrap().site.row;
    blocks.chunks(64).take(16).for_each(|row| local.free_raw(row[9]).unwrap());
    assert!(local.owner.stash.is_full());
    // Told that others free its rows, the owner releases them.
    other.free_raw(blocks[19 * 64]).unwrap();
    local.owner.update(pool.depot.news());
    assert!(blocks.chunks(64).take(16).all(|row| row_of(row[9]).is_unowned()));
    crate::sync::rmw_reset();
    local.owner.retire();
    let made = crate::sync::rmw_count();
    assert!((16..32).contains(&made), "{made} read-modify-writes for 16 rows");
    assert_eq!(local.owner.remote_frees, 0);
}
