//! Which remote frees are announced to all owners: those that an owner would not find otherwise. Each announcement has every
//! owner check its rows, so one too many costs all of them.

use super::*;
use std::cell::RefCell;

/// Whoever is lent the row finds the blocks.
#[test]
fn frees_into_a_row_of_the_depot_are_not_announced() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut idle, mut other, mut gone) = (pool.local(), pool.local(), pool.local());
    let blocks: Vec<_> = (0..40).map(|_| gone.alloc_raw().unwrap()).collect();
    let row = pool.find(blocks[0]).unwrap().site.row;
    drop(gone);
    assert!(row.is_in_depot());
    idle.owner.update(pool.depot.news());
    let before = pool.depot.notices();
    other.free_raw(blocks[7]).unwrap();
    pool.free_raw(blocks[8]).unwrap();
    other.free_bulk(&blocks[20..30]).unwrap();
    assert_eq!(pool.depot.notices(), before);
    assert!(!idle.owner.is_behind(pool.depot.news()));
    let mut next = pool.local();
    let got: HashSet<_> = (0..24 + 12).map(|_| next.alloc_raw().unwrap()).collect();
    assert!(next.owner.current.is(row));
    assert!([7, 8].into_iter().chain(20..30).all(|at| got.contains(&blocks[at])));
}

/// The row's owner releases it after the block was marked and before that is announced: the owner that announces it has the
/// row then.
#[test]
fn a_free_by_the_owner_that_adopts_the_row_is_not_announced() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let owner = RefCell::new(pool.local());
    let mut other = pool.local();
    let mut blocks: Vec<_> = (0..64).map(|_| owner.borrow_mut().alloc().unwrap()).collect();
    let block = blocks.pop().unwrap();
    let raw = block.as_raw();
    let row = pool.find(raw).unwrap().site.row;
    assert!(row.is_owned_by(owner.borrow().owner.id));
    let before = pool.depot.notices();
    let mut kept = None;
    // When it is asked for the next block, the row's owner needs another row.
    let release = std::iter::from_fn(|| {
        kept = owner.borrow_mut().alloc().ok();
        assert!(row.is_unowned());
        None
    });
    other.free_many(std::iter::once(block).chain(release));
    assert!(row.is_owned_by(other.owner.id));
    assert_eq!(pool.depot.notices(), before);
    assert!(!owner.borrow().owner.is_behind(pool.depot.news()));
    // It has collected the block.
    assert_eq!(other.owner.open.len(), 1);
    assert_eq!(other.alloc_raw(), Ok(raw));
}

#[test]
fn only_the_first_free_into_a_row_is_announced_until_it_is_collected() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other, mut third) = (pool.local(), pool.local(), pool.local());
    let blocks: Vec<_> = (0..64).map(|_| owner.alloc_raw().unwrap()).collect();
    for round in 0..2 {
        let at = 20 * round;
        let before = pool.depot.notices();
        other.free_raw(blocks[at]).unwrap();
        assert_eq!(pool.depot.notices(), before + 1);
        assert!(owner.owner.is_behind(pool.depot.news()));
        other.free_raw(blocks[at + 1]).unwrap();
        third.free_raw(blocks[at + 2]).unwrap();
        other.free_bulk(&blocks[at + 3..at + 7]).unwrap();
        third.free_bulk(&blocks[at + 9..at + 14]).unwrap();
        assert_eq!(pool.depot.notices(), before + 1);
        // Collects the row.
        owner.owner.leave_current();
        assert!(owner.owner.refill(&pool.geometry));
    }
}

/// Adopting a row moves one, so the owner updates what it knows.
#[test]
fn an_owner_that_adopts_a_row_learns_of_frees() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut local, mut other, mut third) = (pool.local(), pool.local(), pool.local());
    let blocks: Vec<_> = (0..65).map(|_| third.alloc_raw().unwrap()).collect();
    assert!(pool.find(blocks[0]).unwrap().site.row.is_unowned());
    local.alloc_raw().unwrap();
    other.free_raw(blocks[64]).unwrap();
    assert!(local.owner.is_behind(pool.depot.news()));
    local.free_raw(blocks[0]).unwrap();
    assert!(!local.owner.is_behind(pool.depot.news()));
}
