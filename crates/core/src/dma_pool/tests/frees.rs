//! Frees are checked in every build, by whichever handle they are made, and a refused one changes
//! nothing.

use super::subject::{Pool, PoolLocal};
use super::{heap, pool};
use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, FreeError, RawBlock};
use crate::frame::Order;
use std::ptr::NonNull;

/// The block `bytes` further on.
fn moved(block: RawBlock, bytes: usize) -> RawBlock {
    let at = block.as_ptr().as_ptr().wrapping_add(bytes);
    RawBlock::from_parts(NonNull::new(at).unwrap(), Iova::new(block.iova().raw() + bytes as u64))
}

/// Frees a block in every way; returns what each says.
fn free_by_all(pool: &Pool, locals: &mut [PoolLocal], block: RawBlock) -> Vec<FreeError> {
    let mut errors = vec![pool.free_raw(block).unwrap_err()];
    for local in locals {
        errors.push(local.free_raw(block).unwrap_err());
        let bulk = local.free_bulk(&[block]).unwrap_err();
        assert_eq!(bulk.freed, 0);
        errors.push(bulk.error);
    }
    errors
}

#[test]
fn wrong_frees_are_refused_by_every_handle_and_change_nothing() {
    for size in [64, 192, 3000, 4096] {
        let (heap, other) = (heap(4), heap(4));
        let (pool, foreign) = (pool(&heap, size), pool(&other, size));
        let mut locals = vec![pool.local(), pool.local()];
        let raw = locals[0].alloc_raw().unwrap();
        let owned = locals[1].alloc().unwrap();
        let freed = locals[0].alloc_raw().unwrap();
        locals[1].free_raw(freed).unwrap();
        let before = pool.stats();
        for error in free_by_all(&pool, &mut locals, foreign.alloc_raw().unwrap()) {
            assert!(matches!(error, FreeError::Foreign { .. }), "{error}");
        }
        for error in free_by_all(&pool, &mut locals, moved(raw, 3 << 20)) {
            assert!(matches!(error, FreeError::Foreign { .. }), "{error}");
        }
        for bytes in [1, 8, size / 2, size - 1] {
            for error in free_by_all(&pool, &mut locals, moved(raw, bytes)) {
                assert!(matches!(error, FreeError::Misaligned { .. }), "{error}");
            }
        }
        for error in free_by_all(&pool, &mut locals, owned.as_raw()) {
            assert!(matches!(error, FreeError::Owned { .. }), "{error}");
        }
        for error in free_by_all(&pool, &mut locals, freed) {
            assert!(matches!(error, FreeError::DoubleFree { .. }), "{error}");
        }
        let elsewhere = RawBlock::from_parts(raw.as_ptr(), Iova::new(raw.iova().raw() + 64));
        for error in free_by_all(&pool, &mut locals, elsewhere) {
            assert!(matches!(error, FreeError::WrongIova { .. }), "{error}");
        }
        let after = pool.stats();
        assert_eq!((before.in_use, before.blocks), (after.in_use, after.blocks));
        // The right free is still accepted, once.
        locals[1].free_raw(raw).unwrap();
        assert!(locals[1].free_raw(raw).is_err());
        locals[0].free(owned);
        assert_eq!(pool.stats().in_use, 0);
    }
}

#[test]
fn bytes_that_no_block_uses_are_refused_as_misaligned() {
    let heap = heap(2);
    let pool = super::subject::build(&heap, 3000, 8, 4096).unwrap();
    let block = pool.alloc_raw().unwrap();
    for bytes in [3000, 3008, 4088] {
        assert!(matches!(pool.free_raw(moved(block, bytes)), Err(FreeError::Misaligned { .. })));
    }
    pool.free_raw(block).unwrap();
}

/// The neighbours of a chunk are in the same unit, and may be another pool's.
#[test]
fn an_owner_drops_the_block_of_another_pool_there() {
    let (heap, other_heap) = (heap(2), heap(2));
    let (pool, other) = (pool(&heap, 64), pool(&other_heap, 64));
    let (mut local, block) = (pool.local(), other.alloc().unwrap());
    let raw = block.as_raw();
    local.free(block);
    assert_eq!(other.alloc().unwrap().as_raw(), raw, "it is free in its own pool");
    let own = local.alloc().unwrap().as_raw();
    let place = own.as_ptr().as_ptr().addr().wrapping_sub(heap.start());
    assert!(place < heap.bytes(), "{own:?} is no block of this pool");
}

#[test]
fn an_address_beside_a_chunk_is_foreign() {
    let heap = heap(2);
    let before = heap.acquire(Order::PAGE).unwrap();
    let pool = pool(&heap, 64);
    let first = pool.alloc_raw().unwrap();
    let chunk = first.as_ptr().as_ptr().addr();
    assert_eq!((pool.stats().bytes, chunk), (4096, heap.start() + 4096));
    let at = |bytes: usize| {
        let place = NonNull::new(first.as_ptr().as_ptr().wrapping_sub(64).wrapping_add(bytes));
        RawBlock::from_parts(place.unwrap(), Iova::new(first.iova().raw() - 64 + bytes as u64))
    };
    for (bytes, is_foreign) in [(0, true), (63, true), (4159, false), (4160, true)] {
        let refused = pool.free_raw(at(bytes)).unwrap_err();
        assert_eq!(matches!(refused, FreeError::Foreign { .. }), is_foreign, "{bytes}: {refused}");
    }
    let misaligned = FreeError::Misaligned { addr: chunk + 1, start: chunk, count: 64, size: 64 };
    assert_eq!(pool.free_raw(at(65)), Err(misaligned));
    assert_eq!(pool.free_raw(at(4096)), Err(FreeError::DoubleFree { addr: chunk + 4032 }));
    pool.free_raw(first).unwrap();
    // SAFETY: acquired above, and not used.
    unsafe { heap.release(before, Order::PAGE) };
}

#[test]
fn a_second_free_is_refused_wherever_the_block_is() {
    let heap = heap(4);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..10_000).map(|_| a.alloc_raw().unwrap()).collect();
    for (i, &block) in blocks.iter().enumerate() {
        if i % 3 == 0 {
            b.free_raw(block).unwrap()
        } else {
            a.free_raw(block).unwrap()
        }
        assert!(matches!(a.free_raw(block), Err(FreeError::DoubleFree { .. })));
    }
    // In an owner's array, in the depot, or taken and given back since.
    for &block in &blocks {
        assert!(matches!(b.free_raw(block), Err(FreeError::DoubleFree { .. })));
        assert!(matches!(pool.free_raw(block), Err(FreeError::DoubleFree { .. })));
    }
    assert_eq!(pool.stats().in_use, 0);
    let mut again: Vec<_> = (0..10_000).map(|_| b.alloc_raw().unwrap().iova()).collect();
    again.sort_unstable();
    again.dedup();
    assert_eq!(again.len(), 10_000);
}

#[test]
fn a_refused_bulk_free_says_what_it_leaves_freed() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let mut slots = [None; 200];
    assert_eq!(a.fill(&mut slots), 200);
    let blocks: Vec<_> = slots.iter().flatten().copied().collect();
    a.free_raw(blocks[150]).unwrap();
    let error = b.free_bulk(&blocks).unwrap_err();
    assert_eq!(error.freed, 150);
    assert!(matches!(error.error, FreeError::DoubleFree { .. }));
    assert_eq!(pool.stats().in_use, 49);
    b.free_bulk(&blocks[151..]).unwrap();
    assert_eq!(pool.stats().in_use, 0);
}

#[test]
fn fill_touches_empty_slots_only_and_fill_all_is_all_or_none() {
    let heap = heap(2);
    let pool = pool(&heap, 4096);
    let mut local = pool.local();
    let kept = local.alloc_raw().unwrap();
    let mut slots = [None; 9];
    slots[4] = Some(kept);
    assert_eq!(local.fill(&mut slots), 9);
    assert_eq!(slots[4], Some(kept));
    let in_use = pool.stats().in_use;
    assert_eq!(in_use, 9);
    let mut many = vec![None; 600];
    many[7] = Some(kept);
    let error = local.fill_all(&mut many).unwrap_err();
    assert_eq!((error.wanted, error.available), (599, 512 - 9));
    assert_eq!(many.iter().flatten().count(), 1);
    assert_eq!(pool.stats().in_use, in_use);
    assert_eq!(local.fill(&mut many), 1 + 512 - 9);
}

#[test]
fn a_block_frees_itself_unless_it_is_made_raw() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let block = local.alloc().unwrap();
    let raw = block.as_raw();
    drop(block);
    assert!(matches!(pool.free_raw(raw), Err(FreeError::DoubleFree { .. })));
    let raw = local.alloc().unwrap().into_raw();
    assert_eq!(pool.stats().in_use, 1);
    pool.free_raw(raw).unwrap();
    let other_heap = super::heap(2);
    let other = super::pool(&other_heap, 64);
    // A block of another pool returns to its own.
    local.free(other.alloc().unwrap());
    assert_eq!((pool.stats().in_use, other.stats().in_use), (0, 0));
}

#[test]
fn a_free_of_what_two_chunks_share_is_refused() {
    let heap = heap(2);
    heap.largest.store(0, std::sync::atomic::Ordering::Relaxed);
    let pool = pool(&heap, 1500);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..3).map(|_| local.alloc_raw().unwrap()).collect();
    let from_first = |block: &RawBlock| block.iova().raw() - blocks[0].iova().raw();
    assert_eq!(blocks.iter().map(from_first).collect::<Vec<_>>(), [0, 1500, 4500]);
    // From 3000 to 4500, it would be in both.
    let between = moved(blocks[0], 3000);
    assert!(matches!(local.free_raw(between), Err(FreeError::Misaligned { .. })));
    blocks.iter().for_each(|&block| local.free_raw(block).unwrap());
    assert!(matches!(local.free_raw(between), Err(FreeError::Misaligned { .. })));
}

/// The chunk of a block is released, and another one acquired there that has only a part of it.
#[test]
fn a_late_free_finds_its_own_block_or_none() {
    use std::sync::atomic::Ordering;
    let heap = heap(2);
    // 1,500 bytes: no block of a chunk of two pages starts at the second one, but one ends there.
    heap.largest.store(1, Ordering::Relaxed);
    let pool = super::subject::build(&heap, 1500, 0, 0).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..5).map(|_| local.alloc_raw().unwrap()).collect();
    assert!(pool.stats().bytes == 8192 && pool.stats().blocks == 5);
    blocks.iter().for_each(|&block| local.free_raw(block).unwrap());
    local.flush();
    assert_eq!(pool.shrink(), 8192);
    heap.largest.store(0, Ordering::Relaxed);
    let second: Vec<_> = (0..4).map(|_| local.alloc_raw().unwrap()).collect();
    assert_eq!((pool.stats().bytes, pool.stats().blocks), (8192, 4));
    assert!(second.iter().all(|block| blocks.contains(block)), "the grid is the same");
    let gone = blocks.iter().find(|block| !second.contains(block)).unwrap();
    assert!(matches!(local.free_raw(*gone), Err(FreeError::Misaligned { .. })));
    second.iter().for_each(|&block| local.free_raw(block).unwrap());
}

#[test]
fn fill_blocks_fills_empty_slots_with_blocks_that_free_themselves() {
    let heap = heap(2);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let mut slots: Vec<_> = (0..1_500).map(|_| None).collect();
    slots[3] = Some(local.alloc().unwrap());
    let kept = slots[3].as_ref().map(|block| block.as_raw());
    assert_eq!(local.fill_blocks(&mut slots), 1_500);
    assert_eq!(slots[3].as_ref().map(|block| block.as_raw()), kept);
    for block in slots.iter().flatten() {
        assert!(matches!(local.free_raw(block.as_raw()), Err(FreeError::Owned { .. })));
    }
    let places: std::collections::HashSet<_> =
        slots.iter().flatten().map(|block| block.as_raw()).collect();
    assert_eq!((places.len(), pool.stats().in_use), (1_500, 1_500));
    local.free_many(slots.into_iter().flatten());
    assert_eq!(pool.stats().in_use, 0);
}
