//! How many rows the depot lends to an owner, which ones, and the numbers from which it decides that.

use super::*;

const ROW: u64 = 64;

/// A pool with exactly so many fresh rows, which may grow.
fn of_rows(heap: &Heap, rows: u64) -> DmaPool<&Heap> {
    let pool = pool(heap, 64);
    pool.set_limits(Limits { minimum: rows * ROW, maximum: u64::MAX }).unwrap();
    assert_eq!(pool.stats().blocks, rows * ROW);
    pool
}

/// Has the depot lend rows to an owner; returns how many.
fn lend<'h>(pool: &DmaPool<&'h Heap>, local: &mut Local<&'h Heap, &DmaPool<&'h Heap>>) -> usize {
    let before = local.owner.audit().0.len();
    let any = pool.depot.lend(&mut local.owner);
    let lent = local.owner.audit().0.len() - before;
    assert_eq!(any, lent != 0);
    lent
}

/// The share of the rows that are left, rounded down, but one at least, and no more than an owner may keep.
#[test]
fn an_owner_is_lent_its_share_of_what_is_left() {
    // The pool's own owner is one of them.
    let cases = [
        (512, 2, 32),
        (512, 3, 32),
        (512, 16, 8),
        (512, 128, 4),
        (512, 200, 2),
        (512, 1024, 1),
        (200, 2, 25),
        (40, 2, 8),
        (9, 3, 3),
        (1, 2, 1),
    ];
    for (rows, owners, keep) in cases {
        let heap = Heap::new(2 << 20);
        let pool = of_rows(&heap, rows);
        let mut locals: Vec<_> = (1..owners).map(|_| pool.local()).collect();
        let mut left = usize::try_from(rows).unwrap();
        while left != 0 {
            let lent = lend(&pool, &mut locals[0]);
            let expected = keep.min((left / owners).max(1));
            assert_eq!(lent, expected, "{left} of {rows} rows are left, with {owners} owners");
            left -= lent;
        }
        assert_eq!(lend(&pool, &mut locals[0]), 0);
    }
}

#[test]
fn partly_used_rows_are_lent_first_and_are_part_of_the_share() {
    let heap = Heap::new(2 << 20);
    let pool = of_rows(&heap, 512);
    let mut user = pool.local();
    let blocks: Vec<_> = (0..500 * ROW).map(|_| user.alloc_raw().unwrap()).collect();
    blocks.chunks(64).for_each(|row| user.free_bulk(&row[10..30]).unwrap());
    drop(user);
    let mut locals: Vec<_> = (1..16).map(|_| pool.local()).collect();
    // Of the 12 whole rows alone, 16 owners would have none each.
    for _ in 0..4 {
        assert_eq!(lend(&pool, &mut locals[0]), 8);
    }
    assert_eq!((locals[0].owner.open.len(), locals[0].owner.whole.len()), (32, 0));
}

/// Those of an owner that was dropped, whose memory and state are in the cache.
#[test]
fn whole_rows_that_were_lent_before_are_lent_before_fresh_ones() {
    let heap = Heap::new(2 << 20);
    let pool = of_rows(&heap, 512);
    let mut user = pool.local();
    let block = user.alloc_raw().unwrap();
    user.free_raw(block).unwrap();
    let (used, _) = user.owner.audit();
    drop(user);
    assert!(used.iter().all(|row| row.is_whole_in_depot()));
    let mut local = pool.local();
    assert_eq!(lend(&pool, &mut local), used.len());
    assert!(local.owner.audit().0.iter().all(|row| used.contains(row)));
}

/// As is one whose last block was freed while it was in the depot.
#[test]
fn a_row_that_became_whole_in_the_depot_is_lent_before_fresh_ones() {
    let heap = Heap::new(2 << 20);
    let pool = of_rows(&heap, 512);
    pool.set_limits(Limits::default()).unwrap();
    let mut user = pool.local();
    (0..100 * ROW).for_each(|_| _ = user.alloc_raw().unwrap());
    let block = user.alloc_raw().unwrap();
    let row = pool.find(block).unwrap().site.row;
    drop(user);
    pool.free_raw(block).unwrap();
    assert!(row.is_in_depot() && !row.is_whole());
    // Collects the rows of each chunk, and releases none: other rows of this one are in use.
    assert_eq!(pool.shrink_shared(), 0);
    assert!(row.is_whole_in_depot());
    let mut local = pool.local();
    local.alloc_raw().unwrap();
    assert!(local.owner.current.is(row));
}

#[test]
fn terms_follow_the_number_of_owners_and_stay_those_of_a_shared_pool() {
    let heap = Heap::new(2 << 20);
    let pool = of_rows(&heap, 512);
    let terms = || {
        let terms = pool.depot.terms();
        (terms.keep, terms.sparse_eighths)
    };
    let first = pool.local();
    assert_eq!(terms(), (32, 7));
    let second = pool.local();
    assert_eq!(terms(), (32, 4));
    let more: Vec<_> = (2..15).map(|_| pool.local()).collect();
    assert_eq!(terms(), (8, 4));
    drop(more);
    assert_eq!(terms(), (32, 4));
    drop((first, second));
    assert_eq!(terms(), (32, 4));
    let again = pool.local();
    assert_eq!(terms(), (32, 4));
    drop(again);
}

#[test]
fn terms_follow_the_number_of_rows() {
    let heap = Heap::new(4 << 20);
    let mut pool = of_rows(&heap, 512);
    assert_eq!(pool.depot.terms().keep, 32);
    pool.set_limits(Limits::default()).unwrap();
    pool.shrink();
    assert_eq!((pool.stats().blocks, pool.depot.terms().keep), (0, 1));
    pool.set_limits(Limits { minimum: 64 * ROW, maximum: u64::MAX }).unwrap();
    assert_eq!((pool.stats().blocks, pool.depot.terms().keep), (64 * ROW, 16));
}

#[test]
fn numbers_of_dropped_owners_are_reused() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (first, second) = (pool.local(), pool.local());
    let numbers = HashSet::from([first.number(), second.number()]);
    assert_eq!(numbers.len(), 2);
    drop((first, second));
    let (first, second) = (pool.local(), pool.local());
    assert_eq!(HashSet::from([first.number(), second.number()]), numbers);
    assert!(!numbers.contains(&pool.local().number()));
}
