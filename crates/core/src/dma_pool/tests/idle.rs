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

/// By growing, or because the maximum is lowered to what it has.
#[test]
fn a_pool_that_reaches_its_maximum_has_its_owners_give_rows_up() {
    const BLOCKS: usize = if cfg!(miri) { 9_600 } else { 64_000 };
    for lowered in [false, true] {
        let heap = Heap::new(8 << 20);
        let pool = pool(&heap, 64);
        let maximum = if lowered { u64::MAX } else { BLOCKS as u64 };
        pool.set_limits(Limits { minimum: 0, maximum }).unwrap();
        let (mut idle, mut other) = (pool.local(), pool.local());
        let mut blocks: Vec<_> = (0..BLOCKS).map(|_| other.alloc_raw().unwrap()).collect();
        if lowered {
            pool.set_limits(Limits { minimum: 0, maximum: 1 }).unwrap();
        }
        // No row is half free.
        let freed = BLOCKS * 3 / 10;
        free_some(&mut idle, &mut blocks, freed, &mut Random::new(5));
        let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
        assert!(available + HELD >= freed, "{available} of {freed} free blocks");
    }
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

/// The owner keeps the rows that it has used up, because it frees in them itself, when the pool reaches its maximum; then its
/// current row changes once.
#[test]
fn rows_that_an_idle_handle_has_kept_until_the_maximum_are_few() {
    const BLOCKS: u64 = 64_000;
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 0, maximum: BLOCKS }).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let mut blocks: Vec<_> = (0..200 * 64).map(|_| idle.alloc_raw().unwrap()).collect();
    // Whole rows stay with it, so that it need not release the others for its next one.
    let whole: Vec<_> = (0..4 * 64).map(|_| idle.alloc_raw().unwrap()).collect();
    idle.free_bulk(&whole).unwrap();
    for row in blocks.chunks(64).take(150) {
        idle.free_raw(row[5]).unwrap();
        assert_eq!(idle.alloc_raw(), Ok(row[5]));
    }
    blocks.extend(std::iter::from_fn(|| other.alloc_raw().ok()));
    let (row, _) = idle.owner.current.parts();
    while idle.owner.current.parts().0 == row {
        blocks.push(idle.alloc_raw().unwrap());
    }
    let total = blocks.len();
    free_some(&mut other, &mut blocks, total, &mut Random::new(9));
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + HELD >= total, "{available} of {total} free blocks");
}

/// The same with partly free rows, which it need not give up before.
#[test]
fn partly_free_rows_that_an_idle_handle_has_at_the_maximum_are_few() {
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 0, maximum: 64_000 }).unwrap();
    let (mut idle, mut other) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..500 * 64).map(|_| idle.alloc_raw().unwrap()).collect();
    blocks.chunks(64).for_each(|row| idle.free_bulk(&row[10..35]).unwrap());
    while other.alloc_raw().is_ok() {}
    let (row, _) = idle.owner.current.parts();
    while idle.owner.current.parts().0 == row {
        idle.alloc_raw().unwrap();
    }
    let stats = pool.stats();
    let free = usize::try_from(stats.blocks - stats.in_use).unwrap();
    let available = std::iter::from_fn(|| other.alloc_raw().ok()).count();
    assert!(available + HELD >= free, "{available} of {free} free blocks");
}
