//! The most blocks in use at a time.

use super::*;
use std::sync::Arc;

/// The most blocks in use are exact for one owner, whatever its calls.
#[test]
fn the_high_water_mark_of_one_owner_is_exact() {
    for seed in 1..if cfg!(miri) { 2 } else { 60 } {
        let heap = Arc::new(Heap::new(8 << 20));
        let pool = Shared::new(DmaPool::new(Arc::clone(&heap), "mark", 64, 0, 0).unwrap());
        let mut local = pool.local();
        let mut random = Random::new(seed);
        let (mut raws, mut owned, mut most) = (vec![], vec![], 0);
        for _ in 0..200 {
            let n = 1 + random.below(90);
            match random.below(9) {
                0 | 1 => (0..n).for_each(|_| owned.push(local.alloc().unwrap())),
                2 => (0..n).for_each(|_| raws.push(local.alloc_raw().unwrap())),
                3 => {
                    let mut slots = vec![None; n];
                    local.fill(&mut slots);
                    raws.extend(slots.into_iter().flatten());
                }
                4 => raws.extend(local.alloc_run(NonZeroUsize::new(n).unwrap()).unwrap().iter()),
                5 => {
                    for _ in 0..n.min(owned.len()) {
                        let at = random.below(owned.len());
                        local.free(owned.swap_remove(at));
                    }
                }
                6 => {
                    let at = owned.len().saturating_sub(n);
                    local.free_many(owned.drain(at..));
                }
                7 => {
                    let at = raws.len().saturating_sub(2 * n);
                    local.free_bulk(&raws[at..]).unwrap();
                    raws.truncate(at);
                }
                _ => pool.depot.record(&mut local.owner),
            }
            most = most.max(raws.len() + owned.len());
        }
        pool.depot.record(&mut local.owner);
        let stats = pool.stats();
        assert_eq!(
            (stats.high_water, stats.in_use),
            (most as u64, (raws.len() + owned.len()) as u64),
            "{seed}"
        );
        assert_eq!(pool.depot.reported_in_use(), stats.in_use);
        local.free_bulk(&raws).unwrap();
        local.free_many(owned);
    }
}

/// One block from the stash makes a new maximum after blocks were taken past it.
#[test]
fn a_block_of_the_stash_raises_the_mark_by_one() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..10).map(|_| local.alloc_raw().unwrap()).collect();
    local.free_raw(blocks[0]).unwrap();
    local.free_raw(blocks[1]).unwrap();
    // Not from the stash.
    assert_eq!(local.fill(&mut [None; 5]), 5);
    let last = local.alloc_raw().unwrap();
    assert_eq!(last, blocks[1]);
    local.free_raw(last).unwrap();
    drop(local);
    assert_eq!(pool.stats().high_water, 14);
}
