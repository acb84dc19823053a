//! An owner's rows are in the lists that match their state.

use super::*;

/// A free into the oldest of the owner's spent rows makes that row the current one, and brings the number of spent rows
/// over the limit at which the oldest are released.
#[test]
fn a_spent_row_that_is_freed_into_is_not_released() {
    // The limit is 128.
    for used in 126..132 {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let (mut a, mut b) = (pool.local(), pool.local());
        let mut blocks: Vec<_> = std::iter::from_fn(|| a.alloc_raw().ok()).collect();
        for row in blocks.chunks_mut(64).take(used) {
            a.free_raw(row[0]).unwrap();
            row[0] = a.alloc_raw().unwrap();
        }
        let mut freed = 0;
        for row in blocks.chunks(64) {
            a.free_raw(row[0]).unwrap();
            b.free_raw(row[1]).unwrap();
            freed += 2;
        }
        assert_eq!(pool.stats().in_use + freed, 32_768);
        let rest: Vec<_> = blocks.chunks(64).flat_map(|row| &row[2..]).copied().collect();
        let (first, second) = rest.split_at(rest.len() / 2);
        a.free_bulk(first).unwrap();
        b.free_bulk(second).unwrap();
        let mut seen = HashSet::new();
        for local in [&mut a, &mut b] {
            while let Ok(block) = local.alloc_raw() {
                assert!(seen.insert(block), "{block:?} was allocated twice");
            }
        }
        let all: Vec<_> = seen.into_iter().collect();
        a.free_bulk(&all).unwrap();
        drop((a, b));
        assert_eq!(pool.stats().in_use, 0);
        assert_eq!(pool.stats().in_depot, pool.stats().blocks);
        pool.destroy().unwrap();
    }
}
