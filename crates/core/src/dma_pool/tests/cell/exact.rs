//! A cell alone in its pool: what the pool counts is exact, and its blocks are those that were allocated.

use super::*;

/// One world: `false` in `plain` for a pool that prefetches.
fn world(seed: usize, size: usize, boundary: usize, watched: bool, plain: bool) {
    let heap = Arc::new(Heap::new(6 << 20));
    let make = if watched { DmaPool::with_debug } else { DmaPool::new };
    let pool = make(Arc::clone(&heap), "exact", size, 0, boundary).unwrap();
    let mut pool = Shared::new(if plain { pool } else { pool.with_prefetch() });
    let mut random = Random::new(seed as u64);
    let (mut raws, mut blocks, mut most, mut local) = (vec![], vec![], 0, pool.local());
    for _ in 0..6 {
        let cell = local.into_cell();
        let mut pinned: Vec<LocalBlock<'_, _>> = vec![];
        for _ in 0..12 {
            let most_at_once = [4, 20, 90, 150][random.below(4)];
            let n = 1 + random.below(most_at_once);
            match random.below(9) {
                0..3 => pinned.extend((0..n).map_while(|_| cell.alloc().ok())),
                3 => {
                    let drain = pinned.len().saturating_sub(n)..;
                    blocks.extend(pinned.drain(drain).map(LocalBlock::into_block));
                }
                4 => raws.extend(pinned.drain(..n.min(pinned.len())).map(LocalBlock::into_raw)),
                5 => {
                    for _ in 0..n.min(pinned.len()) {
                        pinned.swap_remove(random.below(pinned.len()));
                    }
                }
                6 => drop(pinned.drain(..n.min(pinned.len())).rev()),
                7 => blocks.drain(..n.min(blocks.len())).for_each(|block| cell.free(block)),
                _ => cell.free_many(blocks.drain(blocks.len().saturating_sub(n)..)),
            }
            let addresses = pinned.iter().map(LocalBlock::as_raw).chain(blocks.iter().map(Block::as_raw));
            let all: HashSet<_> = addresses.chain(raws.iter().copied()).collect();
            assert_eq!(all.len(), pinned.len() + blocks.len() + raws.len(), "seed {seed}");
            most = most.max(all.len() as u64);
        }
        drop(pinned);
        local = cell.into_local();
        local.free_bulk(&raws.split_off(raws.len() / 2)).unwrap();
        if random.below(3) == 0 {
            local = pool.local();
            pool.shrink_shared();
        }
        pool.depot.record(&mut local.owner);
        // Not before: a look at the blocks in use would raise the mark by itself.
        let stats = pool.stats();
        assert_eq!(stats.in_use, (blocks.len() + raws.len()) as u64);
        assert_eq!((stats.high_water, stats.late_double_frees), (most, 0), "seed {seed}");
        assert_eq!(pool.depot.reported_in_use(), stats.in_use, "seed {seed}");
    }
    local.free_bulk(&raws).unwrap();
    drop(blocks);
    drop(local);
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.high_water), (0, most));
    assert_eq!(pool.get_mut().unwrap().shrink(), stats.bytes);
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn the_counts_of_a_cell_are_exact() {
    let worlds = std::env::var("EXACT_WORLDS").ok().and_then(|text| text.parse().ok());
    for seed in 1..worlds.unwrap_or(if cfg!(miri) { 2 } else { 60 }) {
        let (size, boundary) = [(64, 0), (96, 512), (4096, 0), (100, 0)][seed % 4];
        world(seed, size, boundary, seed % 7 == 6, seed.is_multiple_of(2));
    }
}
