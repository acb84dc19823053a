//! A block that its row's owner frees in the same instant as another one: the owner has read that it is allocated, the other frees
//! it, and the owner's store comes last. Both calls return `Ok`; what the owners report says that one block was freed.

use super::super::state::Form;
use super::*;

type Borrowed<'p, 'h> = Local<&'h Heap, &'p DmaPool<&'h Heap>>;

/// Frees `block`, of the owner's current row, by both.
fn free_twice(owner: &mut Borrowed<'_, '_>, other: &mut Borrowed<'_, '_>, block: RawBlock) {
    let pool = owner.pool;
    let site = pool.find(block).unwrap().site;
    assert!(site.row.is_owned_by(owner.owner.id) && owner.owner.current.is(site.row));
    assert!(site.row.is_allocated_as(site.bit, Form::Raw));
    other.free_raw(block).unwrap();
    site.row.set_free(site.bit);
    owner.owner.put_aside(site.row, 1 << site.bit, 1);
    owner.owner.count.give(1);
}

fn check(pool: &DmaPool<&Heap>, in_use: u64) {
    check_late(pool, in_use, 1);
}

fn check_late(pool: &DmaPool<&Heap>, in_use: u64, late: u64) {
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.late_double_frees), (in_use, late));
}

#[test]
fn a_second_free_is_counted_once_by_the_rows_owner() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
    free_twice(&mut owner, &mut other, blocks[7]);
    check(&pool, 39);
    // Leaves the row, and returns to it: then it is collected.
    owner.owner.leave_current();
    let again: Vec<_> = (0..25).map(|_| owner.alloc_raw().unwrap()).collect();
    assert_eq!(again.iter().collect::<HashSet<_>>().len(), 25);
    pool.depot.record(&mut owner.owner);
    pool.depot.record(&mut other.owner);
    check(&pool, 64);
    assert_eq!(pool.depot.reported_in_use(), 64);
}

#[test]
fn a_second_free_is_counted_once_in_the_depot() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
    free_twice(&mut owner, &mut other, blocks[7]);
    drop((owner, other));
    check(&pool, 39);
    assert_eq!(pool.depot.reported_in_use(), 38, "not noticed yet");
    // Looks at the rows of each chunk.
    pool.shrink_shared();
    check(&pool, 39);
    assert_eq!(pool.depot.reported_in_use(), 39);
    // And not again by whoever gets the row.
    let mut third = pool.local();
    let rest: Vec<_> = (0..25).map(|_| third.alloc_raw().unwrap()).collect();
    assert!(rest.contains(&blocks[7]));
    drop(third);
    check(&pool, 64);
    assert_eq!(pool.depot.reported_in_use(), 64);
}

/// Of two frees by others the second finds the mark of the first, which was made to a block that is allocated again.
#[test]
fn a_second_free_that_finds_the_mark_of_the_first_is_counted_once() {
    for together in [false, true] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut other) = (pool.local(), pool.local());
        let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
        free_twice(&mut owner, &mut other, blocks[7]);
        assert_eq!(owner.alloc_raw(), Ok(blocks[7]));
        let freed = [blocks[9], blocks[7]];
        if together {
            other.free_bulk(&freed).unwrap();
        } else {
            freed.iter().for_each(|&block| other.free_raw(block).unwrap());
        }
        drop((owner, other));
        check(&pool, 38);
        pool.shrink_shared();
        check(&pool, 38);
        assert_eq!(pool.depot.reported_in_use(), 38);
    }
}

/// The owner of the block has stored its state before the row went to a third owner, and the other free sets its mark only then:
/// the stash that holds the block finds the mark when it returns it.
#[test]
fn a_second_free_that_a_returned_stash_finds_is_counted_once() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other, mut third) = (pool.local(), pool.local(), pool.local());
    let blocks: Vec<_> = (0..64).map(|_| owner.alloc_raw().unwrap()).collect();
    let site = pool.find(blocks[7]).unwrap().site;
    owner.free_raw(blocks[7]).unwrap();
    assert_eq!(owner.owner.stash.len(), 1);
    owner.owner.leave_current();
    owner.owner.release(1);
    third.free_raw(blocks[8]).unwrap();
    assert!(site.row.is_owned_by(third.owner.id));
    // The other free has read this before the owner's store, which comes after its compare-and-swap.
    site.row.set_allocated(site.bit, Form::Raw);
    other.free_raw(blocks[7]).unwrap();
    site.row.set_free(site.bit);
    drop((owner, other));
    check(&pool, 62);
    assert_eq!(pool.depot.reported_in_use(), 63, "the third owner has not reported its free");
    drop(third);
    check(&pool, 62);
    assert_eq!(pool.depot.reported_in_use(), 62);
    let rest: HashSet<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    assert!(rest.contains(&blocks[7]) && rest.contains(&blocks[8]));
    check(&pool, pool.stats().blocks);
}

/// Until the second free is found the pool counts one block less than are in use. The mark is too low by as much if the most
/// blocks are in use then, and never too high.
#[test]
fn a_second_free_lowers_the_high_water_mark_by_one_until_it_is_found() {
    for found_first in [false, true] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut other) = (pool.local(), pool.local());
        let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
        free_twice(&mut owner, &mut other, blocks[7]);
        // So that all that others have freed is counted.
        pool.depot.record(&mut other.owner);
        if found_first {
            owner.owner.leave_current();
            assert!(owner.owner.refill(&pool.geometry));
        }
        let more: Vec<_> = (0..10).map(|_| owner.alloc_raw().unwrap()).collect();
        owner.free_bulk(&more).unwrap();
        drop((owner, other));
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.late_double_frees), (39, 1));
        assert_eq!(stats.high_water, if found_first { 49 } else { 48 });
    }
}

/// Both frees by others are of one call, which announces them together: the block was freed by its row's owner, and allocated
/// again, in between.
#[test]
fn a_second_free_of_one_call_is_counted_once() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
    let site = pool.find(blocks[7]).unwrap().site;
    // As `free_bulk(&[blocks[7], blocks[7]])` of the other owner.
    other.owner.gather();
    other.free_raw(blocks[7]).unwrap();
    // The row's owner has read before this that the block is allocated.
    site.row.set_free(site.bit);
    owner.owner.put_aside(site.row, 1 << site.bit, 1);
    owner.owner.count.give(1);
    assert_eq!(owner.alloc_raw(), Ok(blocks[7]));
    other.free_raw(blocks[7]).unwrap();
    pool.announce(&mut other.owner);
    drop((owner, other));
    check(&pool, 39);
    pool.shrink_shared();
    check(&pool, 39);
    assert_eq!(pool.depot.reported_in_use(), 39);
}

/// One call frees two blocks, and both find the mark of an earlier free: as raw blocks, and as owned ones.
#[test]
fn two_second_frees_that_are_announced_together_are_both_counted() {
    for owned in [false, true] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut other) = (pool.local(), pool.local());
        let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
        free_twice(&mut owner, &mut other, blocks[7]);
        free_twice(&mut owner, &mut other, blocks[8]);
        let again = [(); 2].map(|()| owner.alloc().unwrap());
        assert_eq!([again[0].as_raw(), again[1].as_raw()], [blocks[7], blocks[8]]);
        if owned {
            other.free_many(again);
        } else {
            other.free_bulk(&again.map(Block::into_raw)).unwrap();
        }
        pool.depot.record(&mut owner.owner);
        pool.depot.record(&mut other.owner);
        check_late(&pool, 38, 2);
        assert_eq!(pool.depot.reported_in_use(), 38);
        drop((owner, other));
        pool.shrink_shared();
        check_late(&pool, 38, 2);
        assert_eq!(pool.depot.reported_in_use(), 38);
        // Neither is free twice.
        let all: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
        let distinct: HashSet<_> = all.iter().chain(&blocks[9..]).chain(&blocks[..7]).collect();
        assert_eq!(distinct.len(), all.len() + 38);
        check_late(&pool, pool.stats().blocks, 2);
    }
}

/// The first of the two has told the row's owner that there is something to collect.
#[test]
fn a_second_free_that_finds_its_own_mark_is_not_announced_again() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut owner, mut other) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
    let before = pool.depot.notices();
    free_twice(&mut owner, &mut other, blocks[7]);
    assert_eq!(owner.alloc_raw(), Ok(blocks[7]));
    assert_eq!(pool.depot.notices(), before + 1);
    other.free_raw(blocks[7]).unwrap();
    assert_eq!(pool.depot.notices(), before + 1);
    pool.depot.record(&mut other.owner);
    check(&pool, 39);
}

/// The row's owner has put the block into its stash, or allocated it from there again, when it collects the mark.
#[test]
fn a_second_free_of_a_block_of_the_stash_frees_nothing() {
    for again in [false, true] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut owner, mut other) = (pool.local(), pool.local());
        let blocks: Vec<_> = (0..40).map(|_| owner.alloc_raw().unwrap()).collect();
        let site = pool.find(blocks[7]).unwrap().site;
        other.free_raw(blocks[7]).unwrap();
        // What the owner has read before that.
        site.row.set_allocated(site.bit, Form::Raw);
        owner.free_raw(blocks[7]).unwrap();
        if again {
            assert_eq!(owner.alloc_raw(), Ok(blocks[7]));
        }
        owner.owner.leave_current();
        assert!(owner.owner.refill(&pool.geometry));
        let mut all: Vec<_> = std::iter::from_fn(|| owner.alloc_raw().ok()).collect();
        all.extend(again.then_some(blocks[7]));
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        assert!(all.contains(&blocks[7]));
        pool.depot.record(&mut owner.owner);
        check(&pool, pool.stats().blocks);
    }
}
