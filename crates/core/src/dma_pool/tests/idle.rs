//! What an idle handle may keep from the others in a pool that cannot grow.

use super::*;

/// The blocks of the rows that a handle keeps, of those it has used up, of the current one, and of the stash.
const HELD: usize = (32 + 32 + 1) * 64 + 16;

/// Frees a share of the blocks in random order.
fn free_some<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(
    local: &mut Local<S, H>,
    blocks: &mut Vec<RawBlock>,
    count: usize,
    random: &mut Random,
) {
    for _ in 0..count {
        local.free_raw(blocks.swap_remove(random.below(blocks.len()))).unwrap();
    }
}

#[test]
fn an_idle_handle_keeps_few_blocks_of_a_pool_of_fixed_size() {
    const BLOCKS: usize = if cfg!(miri) { 9_600 } else { 64_000 };
    for (seed, kept) in [(1, BLOCKS / 2), (2, BLOCKS / 8), (3, BLOCKS - BLOCKS / 16)] {
        let heap = Heap::new(8 << 20);
        let pool = pool(&heap, 64);
        pool.set_limits(Limits { minimum: BLOCKS as u64, maximum: BLOCKS as u64 }).unwrap();
        let (mut idle, mut other) = (pool.local(), pool.local());
        let mut random = Random::new(seed);
        let mut blocks: Vec<_> = (0..BLOCKS).map(|_| idle.alloc_raw().unwrap()).collect();
        free_some(&mut idle, &mut blocks, BLOCKS - kept, &mut random);
        let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
        assert!(available + HELD >= BLOCKS - kept, "{available} of {} free blocks", BLOCKS - kept);
    }
}

#[test]
fn blocks_that_others_free_in_the_rows_of_an_idle_handle_are_few_too() {
    const BLOCKS: usize = if cfg!(miri) { 9_600 } else { 64_000 };
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: BLOCKS as u64, maximum: BLOCKS as u64 }).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let mut blocks: Vec<_> = (0..BLOCKS).map(|_| idle.alloc_raw().unwrap()).collect();
    free_some(&mut other, &mut blocks, BLOCKS, &mut Random::new(4));
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + HELD >= BLOCKS, "{available} of {BLOCKS} free blocks");
}

#[test]
fn a_pool_that_reaches_its_maximum_has_its_owners_give_rows_up() {
    const BLOCKS: usize = if cfg!(miri) { 9_600 } else { 64_000 };
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 0, maximum: BLOCKS as u64 }).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let mut random = Random::new(5);
    // Below the maximum rows that are less than half free stay.
    let mut blocks: Vec<_> = (0..BLOCKS / 4).map(|_| idle.alloc_raw().unwrap()).collect();
    free_some(&mut idle, &mut blocks, BLOCKS / 16, &mut random);
    // The pool grows to its maximum, and the owner, which calls again, takes note of it.
    blocks.extend(std::iter::from_fn(|| other.alloc_raw().ok()));
    for _ in 0..4 {
        let some: Vec<_> = (0..64).map_while(|_| idle.alloc_raw().ok()).collect();
        idle.free_bulk(&some).unwrap();
        let count = blocks.len() / 4;
        free_some(&mut idle, &mut blocks, count, &mut random);
    }
    let in_use = blocks.len();
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + HELD >= BLOCKS - in_use, "{available} of {} free blocks", BLOCKS - in_use);
}

/// Two frees in a row make it the current one. Without another row to turn to, the handle never releases those it has used up.
#[test]
fn rows_that_an_idle_handle_has_used_up_are_few() {
    const BLOCKS: usize = 64_000;
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: BLOCKS as u64, maximum: BLOCKS as u64 }).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let mut blocks: Vec<_> = std::iter::from_fn(|| other.alloc_raw().ok()).collect();
    for at in (10..blocks.len()).step_by(64).take(500) {
        for block in &mut blocks[at..at + 40] {
            idle.free_raw(*block).unwrap();
        }
        for block in &mut blocks[at..at + 40] {
            *block = idle.alloc_raw().unwrap();
        }
    }
    free_some(&mut other, &mut blocks, BLOCKS, &mut Random::new(6));
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + HELD >= BLOCKS, "{available} of {BLOCKS} free blocks");
}
