//! The limit of an owner's cache, and the owner number of the pool's front.

use super::heap;
use crate::dma_pool::DmaPool;

/// The limit is reached: an owner that may cache a number of blocks keeps all of them.
#[test]
fn an_owner_caches_as_many_blocks_as_it_may() {
    for most in [2, 6, 10, 64] {
        let heap = heap(4);
        let pool = DmaPool::builder("cached").block(4096).cached_bytes(most * 4096);
        let pool = pool.build(&heap).unwrap();
        let mut local = pool.local();
        let blocks: Vec<_> = (0..2 * most).map(|_| local.alloc_raw().unwrap()).collect();
        let cached = blocks.into_iter().map(|block| {
            local.free_raw(block).unwrap();
            pool.stats().cached
        });
        assert_eq!(cached.max(), Some(most));
    }
}

/// It has the first number, which is 0; other owners have others.
#[test]
fn the_front_of_a_pool_is_owner_0() {
    let heap = heap(2);
    let pool = DmaPool::builder("debug").block(128).debug().build(&heap).unwrap();
    let mut local = pool.local();
    let block = local.alloc_raw().unwrap();
    let number = local.number();
    assert_ne!(number, 0);
    drop(local);
    let busy = pool.destroy().unwrap_err();
    assert_eq!(busy.holder, Some(number));
    let pool = busy.pool;
    pool.free_raw(block).unwrap();
    let block = pool.alloc_raw().unwrap();
    let busy = pool.destroy().unwrap_err();
    assert_eq!(busy.holder, Some(0));
    busy.pool.free_raw(block).unwrap();
    busy.pool.destroy().unwrap();
}
