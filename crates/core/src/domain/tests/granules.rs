//! Which granules of a window are free.

use super::super::window::{FreeRuns, GRANULES, Granules};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_map_agrees_with_a_list_of_flags(
        changes in proptest::collection::vec((any::<bool>(), 0..GRANULES, 1..300u32), 1..40),
        from in 0..=GRANULES,
        count in 1..300u32,
    ) {
        let (mut map, mut model) = (Granules::default(), [false; GRANULES as usize]);
        for (set, first, count) in changes {
            let count = count.min(GRANULES - first);
            if set { map.set(first, count) } else { map.clear(first, count) }
            model[first as usize..(first + count) as usize].fill(set);
        }
        let bit = |at: u32| map.0[(at / 64) as usize] >> (at % 64) & 1 == 1;
        prop_assert!((0..GRANULES).all(|at| bit(at) == model[at as usize]));
        let is_free = |at: u32| at < GRANULES && !model[at as usize];
        let first = (from..GRANULES).find(|&at| {
            (at == from || !is_free(at - 1)) && (at..at + count).all(is_free)
        });
        let expected = first.map(|at| at..(at..).find(|&end| !is_free(end)).unwrap());
        prop_assert_eq!(map.free_run(from, count).ok(), expected);
    }

    /// What it remembers hides no run, whatever was taken, and freed in whole or in part.
    #[test]
    fn every_run_that_is_free_is_found(
        steps in proptest::collection::vec((0..3u8, 0..GRANULES, 1..200u32), 1..120),
    ) {
        let (mut runs, mut model) = (FreeRuns::new(), Granules::default());
        for (step, at, count) in steps {
            let count = count.min(GRANULES - at);
            match step {
                0 => {
                    let from = if at % 4 == 0 { at } else { 0 };
                    let expected = model.free_run(from, count).ok();
                    prop_assert_eq!(runs.take(from, count), expected.clone());
                    // Short runs stay free, as between mappings that live.
                    if let Some(run) = expected {
                        let kept = run.start + count;
                        runs.free(kept, run.end - kept);
                        model.set(run.start, count);
                    }
                }
                1 => {
                    runs.free(at, count);
                    model.clear(at, count);
                }
                _ => {
                    let mut others = Granules::default();
                    others.set(at, count);
                    runs.free_all(&others);
                    model.clear_all(&others);
                }
            }
        }
    }
}

#[test]
fn what_is_cleared_is_counted() {
    let (mut map, mut others) = (Granules::default(), Granules::default());
    map.set(60, 200);
    others.set(63, 66);
    assert_eq!(map.clear_all(&others), 66);
    assert_eq!(map.free_run(0, 61), Ok(63..129));
    assert_eq!(map.clear_all(&Granules::default()), 0);
}
