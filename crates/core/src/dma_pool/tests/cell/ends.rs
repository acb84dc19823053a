//! How calls for many end: what they have freed of other owners' rows is announced then, however they end.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// As the call of a `Local`: what a cell's call has freed of another owner's row is that owner's when the call ends.
#[test]
fn a_call_of_a_cell_returns_the_blocks_of_another_owners_row() {
    for end in [None, Some(0), Some(1), Some(40), Some(63)] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        pool.set_limits(Limits { minimum: 64, maximum: 64 }).unwrap();
        let (mut owner, cell) = (pool.local(), pool.local().into_cell());
        let all: Vec<_> = (0..64).map(|_| owner.alloc().unwrap()).collect();
        let call = AssertUnwindSafe(|| {
            cell.free_many(all.into_iter().enumerate().map(|(i, block)| {
                assert_ne!(Some(i), end, "the iterator");
                block
            }));
        });
        assert_eq!(catch_unwind(call).is_err(), end.is_some());
        assert_eq!(core::iter::from_fn(|| owner.alloc_raw().ok()).count(), 64);
    }
}

/// A notice of a `Local`'s call is sent when the call ends.
#[test]
fn a_call_for_many_announces_its_remote_frees_to_all_owners() {
    for by in 0..3 {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut frees) = (pool.local(), pool.local());
        let blocks: Vec<_> = (0..32).map(|_| owner.alloc().unwrap()).collect();
        let before = pool.depot.notices();
        match by {
            0 => frees.free_many(blocks),
            1 => frees.into_cell().free_many(blocks),
            _ => pool.free_many(blocks),
        }
        assert_eq!(pool.depot.notices(), before + 1, "by call {by}");
    }
}

/// The row is released while a call has marked all its blocks: the call itself has to adopt it.
#[test]
fn a_row_released_in_the_middle_of_a_call_is_adopted_at_its_end() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (allocates, mut frees) = (std::cell::RefCell::new(pool.local()), pool.local());
    let all: Vec<_> = (0..64).map(|_| allocates.borrow_mut().alloc().unwrap()).collect();
    let row = pool.find(all[0].as_raw()).unwrap().site.row;
    let next = std::cell::Cell::new(None);
    // After the last block: none is freed in the row any more.
    frees.free_many(all.into_iter().chain(std::iter::from_fn(|| {
        next.set(Some(allocates.borrow_mut().alloc().unwrap()));
        None
    })));
    assert!(row.is_owned_by(frees.owner.id), "nobody will collect the row");
    let again: HashSet<_> = (0..64).map(|_| frees.alloc_raw().unwrap()).collect();
    assert_eq!(again.len(), 64);
    assert_eq!(again.iter().filter(|&&block| pool.find(block).unwrap().site.row == row).count(), 64);
}

/// A cell's call costs what that of a `Local` costs.
#[cfg(feature = "count-rmw")]
#[test]
fn a_cell_announces_the_blocks_of_a_row_together() {
    use crate::sync::{rmw_count, rmw_reset};
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, cell) = (pool.local(), pool.local().into_cell());
    let blocks: Vec<_> = (0..64).map(|_| owner.alloc().unwrap()).collect();
    rmw_reset();
    cell.free_many(blocks);
    // The announcement, whether the row has an owner, and the notice to all owners.
    assert_eq!(rmw_count(), 3);
}
