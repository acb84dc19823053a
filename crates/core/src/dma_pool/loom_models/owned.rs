//! Blocks that free themselves, whose addresses are freed raw as well.

use super::*;

/// A pool with two blocks allocated as `Owned`, and the owner of their row.
fn with_owned_blocks() -> (Arc<Pool>, Owner, u64, u64) {
    let pool = Pool::new();
    let mut owner = pool.depot.register();
    let mut alloc = || pool.alloc_as(&mut owner, Form::Owned).unwrap();
    let (x, y) = (alloc(), alloc());
    (pool, owner, x, y)
}

/// A `Block` is dropped by the owner that has its row while a raw free of its address is made elsewhere, and the
/// address is allocated as a `Block` again: the raw free is refused in every interleaving.
#[test]
fn an_owned_block_dropped_here_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Raw));
        pool.use_memory(x);
        assert_eq!(pool.free_as(&mut a, x, Form::Owned), Ok(()));
        let again = pool.alloc_as(&mut a, Form::Owned).unwrap();
        assert_eq!(pool.free_as(&mut a, again, Form::Owned), Ok(()));
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert!(other.join().unwrap().is_err());
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is dropped elsewhere, remotely or by adoption of its row, while the owner of its row frees its address raw.
#[test]
fn an_owned_block_dropped_elsewhere_against_a_raw_free_here() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| {
            pool.use_memory(x);
            pool.free_as(b, x, Form::Owned)
        });
        assert!(pool.free_as(&mut a, x, Form::Raw).is_err());
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert_eq!(other.join().unwrap(), Ok(()));
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is dropped elsewhere while a third owner, which does not have the row either, frees its address raw.
#[test]
fn an_owned_block_dropped_elsewhere_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let drops = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Owned));
        let frees = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Raw));
        assert!(frees.join().unwrap().is_err());
        assert_eq!(drops.join().unwrap(), Ok(()));
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is turned raw and freed by its holder while its address is freed raw elsewhere: one of the two frees
/// is valid, and a second one that returned `Ok` is detected late.
#[test]
fn an_owned_block_turned_raw_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let (number, bit) = split(pool.geometry.index_of(x));
        pool.chunk.row(number).unwrap().make_raw(bit);
        let here = pool.free_again(&mut a, x);
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}
