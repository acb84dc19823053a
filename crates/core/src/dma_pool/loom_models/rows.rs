//! Rows that others free blocks in, while their owner uses, releases or loses them.

use super::*;

/// The second owner frees a block of a row that the first one owns and keeps using.
#[test]
fn a_remote_free_against_alloc_and_free() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| assert!(pool.free(b, x)));
        assert!(pool.free(&mut a, y));
        let z = pool.alloc(&mut a).unwrap();
        let w = pool.alloc(&mut a).unwrap();
        assert_ne!(z, w);
        assert!(pool.free(&mut a, w));
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A row is released while a block of it is freed remotely: an owner collects it.
#[test]
fn a_remote_free_against_the_release_of_its_row() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, x));
            assert!(pool.free(b, y));
        });
        // The row of `x` and `y` has no free block, so it is released.
        let z = pool.alloc(&mut a).unwrap();
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// Two owners free the two blocks of a row without an owner.
#[test]
fn two_owners_adopt_one_row() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let z = pool.alloc(&mut a).unwrap();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, x));
            if let Some(again) = pool.alloc(b) {
                assert!(pool.free(b, again));
            }
        });
        assert!(pool.free(&mut a, y));
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A block is freed twice, by its row's owner and remotely: one free is valid, the other is refused or detected late; and the
/// block, allocated again meanwhile, has one owner.
#[test]
fn one_block_freed_twice() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let here = pool.free_again(&mut a, x);
        assert!(pool.free_again(&mut a, y));
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

/// A block is freed twice by two owners, neither of which owns the row: exactly one free is accepted.
#[test]
fn one_block_freed_twice_remotely() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let others = [0, 1].map(|_| elsewhere(&pool, move |pool, b| pool.free_again(b, x)));
        let freed = others.map(|other| other.join().unwrap());
        assert_eq!(freed.iter().filter(|&&freed| freed).count(), 1);
        assert!(pool.free_again(&mut a, y));
        pool.depot.retire(&mut a);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A block is freed while its row moves to the depot and to a third owner.
#[test]
fn a_free_against_the_depot() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        assert!(pool.free(&mut a, y));
        let other = elsewhere(&pool, move |pool, b| assert!(pool.free(b, x)));
        pool.depot.retire(&mut a);
        let mut c = pool.depot.register();
        let z = pool.alloc(&mut c).unwrap();
        assert!(pool.free(&mut c, z));
        pool.depot.remove_if_whole(pool.chunk.rows(), || true).then(|| pool.depot.add(pool.chunk.rows()));
        pool.depot.retire(&mut c);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}
