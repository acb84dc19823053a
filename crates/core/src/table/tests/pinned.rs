//! Pinned pages.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const WINDOWS: u64 = 4;

fn pages(window: u64, first: u64, count: u64) -> IovaRange {
    range(window * M2 + first * K4, count * K4)
}

fn not_mapped(at: u64) -> TableError {
    TableError::NotMapped { at: Iova::new(at) }
}

fn mapped_already(at: u64) -> TableError {
    TableError::AlreadyMapped { at: Iova::new(at) }
}

#[test]
fn a_pinned_page_is_changed_through_its_pin_alone() {
    let b: Bench = bench(8, 3);
    let pin = b.table.pin(Iova::new(M2)).unwrap();
    assert_eq!(pin.window(), range(M2, M2));
    assert_eq!(b.table.pin(Iova::new(M2)).unwrap_err(), TableError::Pinned { at: Iova::new(M2) });
    let there = pages(1, 510, 2);
    b.table.map_pinned(&pin, there, PhysAddr::new(K4), Access::READ).unwrap();
    assert_eq!(b.at(2 * M2 - 1), Some((3 * K4 - 1, K4, 1)));
    assert_eq!(
        b.table.map_pinned(&pin, pages(1, 509, 2), PhysAddr::new(0), RW),
        Err(mapped_already(M2 + 510 * K4))
    );
    assert_eq!(b.at(M2 + 509 * K4), None);
    assert_eq!(b.table.clear_pinned(&pin, pages(1, 509, 2)), Err(not_mapped(M2 + 509 * K4)));
    // Ordinary calls: beside a leaf, over it, over the whole, across a border; nothing of them
    // remains.
    let pinned = |at| Err(TableError::Pinned { at: Iova::new(at) });
    assert_eq!(b.map(M2, 0, K4), pinned(M2));
    assert_eq!(b.map(M2 - 2 * K4, 0, 4 * K4), pinned(M2));
    assert_eq!(b.map(M2, M2, M2), Err(mapped_already(M2 + 510 * K4)));
    let mut retired = Retired::new();
    assert_eq!(b.table.clear(there, &mut retired), pinned(there.start().raw()));
    b.map(2 * M2, 0, K4).unwrap();
    assert_eq!(b.table.clear(range(2 * M2 - K4, 2 * K4), &mut retired), pinned(2 * M2 - K4));
    assert_eq!(b.at(2 * M2), Some((0, K4, 3)));
    b.table.clear_pinned(&pin, there).unwrap();
    assert_eq!(b.map(M2, M2, M2), pinned(M2), "no larger leaf replaces the pinned page");
    b.table.unpin(pin, &mut retired).unwrap();
    b.table.clear(range(2 * M2, K4), &mut retired).unwrap();
    b.table.collect_retired(&mut retired).unwrap();
    assert_eq!(b.table.reclaim(retired).unwrap(), 3, "with that of a map that failed");
    b.map(M2, M2, M2).unwrap();
    assert_eq!(b.at(M2).unwrap().1, M2);
    let mut retired = Retired::new();
    b.table.clear(range(M2, M2), &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

/// Entries in front of the pinned page are not cleared before that is found to be pinned.
#[test]
fn a_clear_that_ends_in_a_pinned_page_clears_nothing() {
    let b: Bench = bench(8, 3);
    let pin = b.table.pin(Iova::new(M2)).unwrap();
    b.map(M2 - K4, 0, K4).unwrap();
    b.table.map_pinned(&pin, pages(1, 0, 1), PhysAddr::new(K4), RW).unwrap();
    let mut retired = Retired::new();
    let refused = b.table.clear(range(M2 - K4, 2 * K4), &mut retired);
    assert_eq!(
        (refused, retired.is_empty()),
        (Err(TableError::Pinned { at: Iova::new(M2) }), true)
    );
    assert_eq!((b.at(M2 - K4), b.at(M2)), (Some((0, K4, 3)), Some((K4, K4, 3))));
    b.table.clear_pinned(&pin, pages(1, 0, 1)).unwrap();
    b.table.unpin(pin, &mut retired).unwrap();
    b.table.clear(range(M2 - K4, K4), &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

/// For entries that are mapped, cleared, and never used, and for addresses before, behind and far
/// from the window.
#[test]
fn a_prefetch_changes_nothing_whatever_the_address() {
    let b: Bench = bench(8, 3);
    let pin = b.table.pin(Iova::new(M2)).unwrap();
    b.table.map_pinned(&pin, pages(1, 3, 1), PhysAddr::new(K4), RW).unwrap();
    b.table.map_pinned(&pin, pages(1, 4, 1), PhysAddr::new(K4), RW).unwrap();
    b.table.clear_pinned(&pin, pages(1, 4, 1)).unwrap();
    let all_entries =
        || -> Vec<u64> { (0..8 * 512).map(|at| b.entry(at / 512, at % 512)).collect() };
    let (before, stats) = (all_entries(), b.table.stats());
    for at in [3, 4, 5, 511].map(|page| M2 + page * K4).into_iter().chain([
        0,
        M2 - 1,
        2 * M2,
        1 << 39,
        u64::MAX,
    ]) {
        pin.prefetch(Iova::new(at));
    }
    assert_eq!((all_entries(), b.table.stats()), (before, stats));
    assert_eq!((b.at(M2 + 3 * K4), b.at(M2 + 4 * K4)), (Some((K4, K4, 3)), None));
    b.table.clear_pinned(&pin, pages(1, 3, 1)).unwrap();
    let mut retired = Retired::new();
    b.table.unpin(pin, &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

#[test]
fn bad_pins_are_refused_and_change_nothing() {
    let b: Bench = bench(8, 3);
    for at in [K4, M2 + K4, 1, u64::MAX] {
        assert_eq!(
            b.table.pin(Iova::new(at)).unwrap_err(),
            TableError::NoWindow { at: Iova::new(at) }
        );
    }
    assert!(matches!(b.table.pin(Iova::new(1 << 39)), Err(TableError::Outside { bits: 39, .. })));
    b.map(7 * K4, 0, K4).unwrap();
    assert_eq!(b.table.pin(Iova::new(0)).unwrap_err(), mapped_already(7 * K4));
    b.map(M2, M2, M2).unwrap();
    assert_eq!(b.table.pin(Iova::new(M2)).unwrap_err(), mapped_already(M2));
    let mut retired = Retired::new();
    b.table.clear(range(7 * K4, K4), &mut retired).unwrap();
    b.table.clear(range(M2, M2), &mut retired).unwrap();
    // A page that waits for its flush is linked again by a pin, as by a map.
    let pin = b.table.pin(Iova::new(0)).unwrap();
    assert_eq!(b.table.reclaim(retired).unwrap(), 0);
    let map = |iova, phys, access| b.table.map_pinned(&pin, iova, PhysAddr::new(phys), access);
    let outside = |range| Err(TableError::OutsideWindow { range, window: pin.window() });
    assert_eq!(map(range(M2 - K4, 2 * K4), 0, RW), outside(range(M2 - K4, 2 * K4)));
    assert_eq!(map(range(M2, K4), 0, RW), outside(range(M2, K4)));
    assert_eq!(b.table.clear_pinned(&pin, range(M2, K4)), outside(range(M2, K4)));
    assert!(matches!(map(range(1, K4), 0, RW), Err(TableError::Misaligned { .. })));
    assert!(matches!(map(range(0, K4), 1, RW), Err(TableError::Misaligned { .. })));
    assert!(matches!(
        map(range(0, K4), 1 << 52, RW),
        Err(TableError::PhysOutside { bits: 52, .. })
    ));
    assert!(matches!(map(range(0, K4), 0, Access::empty()), Err(TableError::NoAccess { .. })));
    assert_eq!(b.at(0), None);
    // An unpin of what is still mapped returns the pin.
    map(range(5 * K4, K4), 0, RW).unwrap();
    let (error, pin) = b.table.unpin(pin, &mut Retired::new()).unwrap_err();
    assert_eq!(error, mapped_already(5 * K4));
    b.table.clear_pinned(&pin, range(5 * K4, K4)).unwrap();
    // The pin and the retired pages of another table.
    let other: Bench = bench(8, 3);
    let (error, pin) = other.table.unpin(pin, &mut Retired::new()).unwrap_err();
    assert!(matches!(error, TableError::OtherTable { .. }));
    let foreign = other.table.map_pinned(&pin, range(0, K4), PhysAddr::new(0), RW);
    assert!(matches!(foreign, Err(TableError::OtherTable { .. })));
    assert!(matches!(
        other.table.clear_pinned(&pin, range(0, K4)),
        Err(TableError::OtherTable { .. })
    ));
    b.table.unpin(pin, &mut Retired::new()).unwrap();
}

/// A pin for which a table page is missing leaves none behind.
#[test]
fn a_pin_that_runs_out_of_pages_leaves_none_linked() {
    for capacity in 1..4 {
        let b: Bench = bench(capacity, 4);
        let full = full(capacity);
        assert_eq!(b.table.pin(Iova::new(G1)).unwrap_err(), full);
        b.is_pristine();
    }
    let b: Bench = bench(4, 4);
    let pin = b.table.pin(Iova::new(G1)).unwrap();
    let mut retired = Retired::new();
    b.table.unpin(pin, &mut retired).unwrap();
    assert_eq!(b.table.reclaim(retired).unwrap(), 1);
    b.is_pristine();
}

type Op = (u8, u64, u64, u64);

fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec((0u8..7, 0..WINDOWS, 0u64..512, 1u64..40), 150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn pins_agree_with_a_page_map(capacity in 4usize..9, ops in ops()) {
        pins_agree::<VtdSecondStage>(capacity, ops)?;
    }

    #[test]
    fn pins_agree_with_a_page_map_in_the_first_stage(capacity in 5usize..10, ops in ops()) {
        pins_agree::<VtdFirstStage>(capacity, ops)?;
    }
}

/// Windows that are pinned or not, and pages that are mapped: every call succeeds or fails as the
/// page map says.
fn pins_agree<F: Decode>(capacity: usize, ops: Vec<Op>) -> Result<(), TestCaseError> {
    let b: Bench<F> = bench(capacity, F::MIN_LEVELS);
    let mut pins: Vec<Option<PinnedLeaf>> = (0..WINDOWS).map(|_| None).collect();
    let mut mapped: BTreeMap<u64, u64> = BTreeMap::new();
    let mut flushing = Vec::new();
    for (step, (kind, window, first, count)) in (0u64..).zip(ops) {
        let pinned = &mut pins[usize::try_from(window).unwrap()];
        let there = pages(window, first, count.min(512 - first));
        let (start, end) = (there.start().raw(), there.end().raw());
        let phys = (step + 1) * M2;
        let in_window = |mapped: &BTreeMap<u64, u64>| {
            mapped.range(window * M2..(window + 1) * M2).next().map(|(at, _)| *at)
        };
        let first_mapped = mapped.range(start..end).next().map(|(at, _)| *at);
        let first_hole = (start..end).step_by(4096).find(|at| !mapped.contains_key(at));
        let mut retired = Retired::new();
        match kind {
            0 => match (b.table.pin(Iova::new(window * M2)), &pinned) {
                (Ok(pin), None) => {
                    prop_assert_eq!(in_window(&mapped), None);
                    *pinned = Some(pin);
                }
                (Err(TableError::Pinned { .. }), Some(_)) => {}
                (Err(TableError::AlreadyMapped { at }), None) => {
                    prop_assert_eq!(Some(at.raw()), in_window(&mapped))
                }
                (Err(TableError::NoPages { .. }), None) => {}
                (other, _) => prop_assert!(false, "{other:?}"),
            },
            1 => {
                if let Some(pin) = pinned.take() {
                    match (b.table.unpin(pin, &mut retired), in_window(&mapped)) {
                        (Ok(()), None) => {}
                        (Err((error, leaf)), Some(at)) => {
                            prop_assert_eq!(error, mapped_already(at));
                            *pinned = Some(leaf);
                        }
                        (other, _) => prop_assert!(false, "{other:?}"),
                    }
                }
            }
            2 | 3 => {
                let result = match pinned {
                    Some(pin) => b.table.map_pinned(pin, there, PhysAddr::new(phys), RW),
                    None => b.table.map(there, PhysAddr::new(phys), RW),
                };
                match (result, first_mapped) {
                    (Ok(()), None) => {
                        mapped.extend((start..end).step_by(4096).map(|at| (at, phys + at - start)))
                    }
                    (Err(error), Some(at)) => prop_assert_eq!(error, mapped_already(at)),
                    (Err(TableError::NoPages { .. }), None) if pinned.is_none() => {}
                    (other, _) => prop_assert!(false, "{other:?}"),
                }
            }
            4 | 5 => {
                let result = match pinned {
                    Some(pin) => b.table.clear_pinned(pin, there),
                    None => b.table.clear(there, &mut retired),
                };
                prop_assert_eq!(result, first_hole.map_or(Ok(()), |at| Err(not_mapped(at))));
                if first_hole.is_none() {
                    mapped.retain(|at, _| !there.contains(Iova::new(*at)));
                }
            }
            // Changes that do not come through the pin.
            _ => {
                if pinned.is_some() {
                    let at = Iova::new(start);
                    prop_assert_eq!(
                        b.table.map(there, PhysAddr::new(0), RW),
                        Err(TableError::Pinned { at })
                    );
                    prop_assert_eq!(
                        b.table.clear(there, &mut retired),
                        Err(TableError::Pinned { at })
                    );
                } else if let Some(retired) = flushing.pop() {
                    b.table.reclaim(retired).unwrap();
                }
            }
        }
        flushing.push(retired);
        for at in (start.saturating_sub(K4)..=end).step_by(4096) {
            prop_assert_eq!(b.at(at).map(|found| found.0), mapped.get(&at).copied(), "{:#x}", at);
        }
    }
    let mut retired = Retired::new();
    for at in mapped.into_keys() {
        match &pins[usize::try_from(at / M2).unwrap()] {
            Some(pin) => b.table.clear_pinned(pin, range(at, K4)).unwrap(),
            None => b.table.clear(range(at, K4), &mut retired).unwrap(),
        }
    }
    for pin in pins.into_iter().flatten() {
        b.table.unpin(pin, &mut retired).unwrap();
    }
    flushing.push(retired);
    for retired in flushing {
        b.table.reclaim(retired).unwrap();
    }
    b.is_pristine();
    Ok(())
}
