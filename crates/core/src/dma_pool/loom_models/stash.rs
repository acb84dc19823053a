//! Blocks in a stash, whose rows may have other owners by then.

use super::*;

/// A pool, and an owner whose stash has the first block of a row that it has released, and the second block.
fn with_a_stash() -> (Arc<Pool>, Owner, u64, u64) {
    let (pool, mut owner, x, y) = with_an_allocated_row();
    assert!(pool.free(&mut owner, x));
    owner.leave_current();
    owner.release(1);
    (pool, owner, x, y)
}

/// A stash returns a block to a row that another owner adopts and keeps using.
#[test]
fn a_stash_returned_against_the_adoption_of_its_row() {
    check(|| {
        let (pool, mut a, _, y) = with_a_stash();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            if let Some(again) = pool.alloc(b) {
                assert!(pool.free(b, again));
            }
        });
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A stash's block is allocated and freed while another owner adopts its row and frees it there as well, wrongly: one free is
/// valid.
#[test]
fn a_block_of_a_stash_freed_twice_while_its_row_is_adopted() {
    check(|| {
        let (pool, mut a, x, y) = with_a_stash();
        let again = pool.alloc(&mut a).unwrap();
        assert_eq!(again, x);
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            pool.free_again(b, x)
        });
        let here = pool.free_again(&mut a, x);
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

/// The same, and then both owners allocate: whichever free was valid, no block is allocated by both.
#[test]
fn a_block_of_a_stash_freed_twice_is_allocated_once() {
    check(|| {
        let (pool, mut a, x, y) = with_a_stash();
        assert_eq!(pool.alloc(&mut a), Some(x));
        let mut b = pool.depot.register();
        let shared = pool.clone();
        let other = thread::spawn(move || {
            assert!(shared.free(&mut b, y));
            shared.free_again(&mut b, x);
            b
        });
        pool.free_again(&mut a, x);
        let mut b = other.join().unwrap();
        let mut allocated = BTreeSet::new();
        for owner in [&mut a, &mut b] {
            while let Some(block) = pool.alloc(owner) {
                assert!(allocated.insert(block), "{block} twice");
            }
        }
    });
}

/// A stash returns a block while the row's owner for now gives it away: that block can be allocated without another free.
#[test]
fn a_stash_returned_against_the_release_of_its_row() {
    check(|| {
        let (pool, mut a, _, y) = with_a_stash();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            let again = pool.alloc(b);
            b.leave_current();
            b.release(1);
            again
        });
        pool.depot.retire(&mut a);
        let again = other.join().unwrap();
        let mut c = pool.depot.register();
        let all: Vec<_> = core::iter::from_fn(|| pool.alloc(&mut c)).collect();
        assert_eq!(all.len() + usize::from(again.is_some()), 4);
        for block in all.into_iter().chain(again) {
            assert!(pool.free(&mut c, block));
        }
        pool.depot.retire(&mut c);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A stash returns a block that was freed remotely as well, at the same instant: it is freed once, and the second free counted.
#[test]
fn a_stash_returns_a_block_that_was_freed_twice() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let mut c = pool.depot.register();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let here = pool.free_again(&mut a, x);
        a.leave_current();
        a.release(1);
        assert!(pool.free_again(&mut c, y));
        pool.depot.retire(&mut a);
        pool.depot.retire(&mut c);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
        assert_eq!(pool.depot.counts(0).0, 4);
    });
}
