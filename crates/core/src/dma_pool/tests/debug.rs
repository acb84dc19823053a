//! Debug mode: patterns, damage, and who had a block.

use super::heap;
use crate::dma_pool::{DmaPool, FREE_PATTERN, FRESH_PATTERN};

#[test]
fn patterns_show_what_a_block_is() {
    for size in [64, 192, 3000] {
        let heap = heap(2);
        let pool = DmaPool::builder("debug").block(size).debug().build(&heap).unwrap();
        let mut local = pool.local();
        let block = local.alloc().unwrap();
        let byte = |at| block.memory().read_u8(at).unwrap();
        assert!((0..size).all(|at| byte(at) == FRESH_PATTERN));
        assert_eq!(local.alloc_zeroed().unwrap().memory().read_u8(size - 1), Ok(0));
        local.free(block);
        assert_eq!(pool.damages(), []);
        assert_eq!(pool.stats().damaged, 0);
    }
}

#[test]
fn a_write_after_free_is_reported_with_both_owners() {
    let heap = heap(2);
    let pool = DmaPool::builder("debug").block(128).debug().build(&heap).unwrap();
    let (mut a, mut b) = (pool.local(), pool.local());
    let raw = a.alloc_raw().unwrap();
    b.free_raw(raw).unwrap();
    heap.memory(raw, 128).write_u8(77, 1).unwrap();
    // The block is the first that its last owner allocates again.
    assert_eq!(b.alloc_raw(), Ok(raw));
    assert_eq!(pool.stats().damaged, 1);
    let [damage] = pool.damages()[..] else { panic!("{:?}", pool.damages()) };
    assert_eq!(
        (damage.block, damage.offset, damage.expected, damage.found),
        (raw, 77, FREE_PATTERN, 1)
    );
    assert_eq!(damage.wrong_bytes, 1);
    let last = damage.last_use.unwrap();
    assert_eq!((last.allocated_by, last.freed_by), (a.number(), b.number()));
    let text = damage.to_string();
    assert!(text.contains("byte 77 is 0x01 instead of 0xa7, 1 bytes are wrong"), "{text}");
    let owners = format!("last allocated by owner {}, freed by owner {}", a.number(), b.number());
    assert!(text.contains(&owners), "{text}");
    // Idle ones are found where the depot has them.
    b.free_raw(raw).unwrap();
    b.flush();
    heap.memory(raw, 128).fill(0, 3, 9).unwrap();
    assert_eq!(pool.damages().len(), 2);
    assert_eq!(pool.stats().damaged, 2);
}

#[test]
fn a_busy_pool_names_the_holder_of_a_block() {
    let heap = heap(2);
    let pool = DmaPool::builder("debug").block(128).debug().build(&heap).unwrap();
    let mut local = pool.local();
    let block = local.alloc_raw().unwrap();
    let number = local.number();
    drop(local);
    let busy = pool.destroy().unwrap_err();
    assert_eq!(busy.holder, Some(number));
    let text = format!("by owner {number}; free them first");
    assert!(busy.to_string().contains(&text), "{busy}");
    busy.pool.free_raw(block).unwrap();
    busy.pool.destroy().unwrap();
}

#[test]
fn every_block_is_visited_once_with_its_memory() {
    let heap = heap(2);
    let pool = DmaPool::builder("all").block(192).minimum(500).maximum(500).build(&heap).unwrap();
    let mut seen = Vec::new();
    pool.for_each_block(|block, memory| {
        memory.write_u64(184, seen.len() as u64).unwrap();
        seen.push(block);
    });
    assert_eq!(seen.len() as u64, pool.stats().blocks);
    let mut local = pool.local();
    for _ in 0..seen.len() {
        let block = local.alloc().unwrap();
        let number = block.memory().read_u64(184).unwrap();
        assert_eq!(seen[usize::try_from(number).unwrap()], block.as_raw());
        std::mem::forget(block);
    }
}

#[test]
fn damage_in_the_front_is_found_and_reported_once() {
    let heap = heap(2);
    let pool = DmaPool::builder("debug").block(64).debug().build(&heap).unwrap();
    let blocks: Vec<_> = (0..70).map(|_| pool.alloc_raw().unwrap()).collect();
    for &block in &blocks {
        pool.free_raw(block).unwrap();
        heap.memory(block, 64).write_u8(5, 0).unwrap();
    }
    assert_eq!((pool.damages().len(), pool.stats().damaged), (64, 70), "all are counted");
    assert_eq!((pool.damages().len(), pool.stats().damaged), (64, 70), "none is counted twice");
}

#[test]
fn a_new_chunk_has_no_history() {
    let heap = heap(2);
    let pool = DmaPool::builder("debug").block(64).debug().build(&heap).unwrap();
    for round in 0..2 {
        let mut local = pool.local();
        let first = local.alloc_raw().unwrap();
        let next = crate::dma_pool::RawBlock::from_parts(
            std::ptr::NonNull::new(first.as_ptr().as_ptr().wrapping_add(64)).unwrap(),
            crate::addr::Iova::new(first.iova().raw() + 64),
        );
        heap.memory(next, 64).write_u8(0, 1).unwrap();
        assert_eq!(local.alloc_raw(), Ok(next));
        let damages = pool.damages();
        assert_eq!(
            (damages.len(), damages[round].block, damages[round].last_use),
            (round + 1, next, None)
        );
        local.free_raw(first).unwrap();
        local.free_raw(next).unwrap();
        drop(local);
        assert_ne!(pool.shrink(), 0);
    }
}
