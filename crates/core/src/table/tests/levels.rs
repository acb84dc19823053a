//! Pages of each level: how they retire.

use super::*;
use crate::known_bad::{self, Mistake};

/// The last mapping goes: its pages are retired from the lowest level up, one level per flush, and
/// each is recorded in its parent until then.
fn pages_retire_one_level_per_flush() {
    let b: Bench = bench(8, 5);
    b.map(0, 0, K4).unwrap();
    let mut retired = Retired::new();
    b.table.clear(range(0, K4), &mut retired).unwrap();
    for level in 1..=4 {
        let stats = b.table.stats();
        assert_eq!(
            (retired.len(), stats.retired, stats.in_use),
            (1, 1, 5 - level),
            "level {level}"
        );
        assert!(b.table.retired_ranges(&retired).unwrap().eq([range(0, K4 << (9 * level))]));
        assert_eq!(b.table.reclaim(retired).unwrap(), 1);
        retired = Retired::new();
        b.table.collect_retired(&mut retired).unwrap();
    }
    b.is_pristine();
}

#[test]
fn a_page_of_any_level_is_retired_before_it_is_free() {
    pages_retire_one_level_per_flush();
    for level in 1..=4 {
        known_bad::make(Some(Mistake::TablePageEarlyAt(level)));
        let noticed = std::panic::catch_unwind(pages_retire_one_level_per_flush).is_err();
        known_bad::make(None);
        assert!(noticed, "level {level}");
    }
}
