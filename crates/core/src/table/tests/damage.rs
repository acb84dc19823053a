//! Table memory that something else writes, and lists of another table in the same memory: errors,
//! never a panic.

use super::*;
use proptest::prelude::*;

/// The pages of a table, and all of them again.
fn twice(pages: usize) -> (&'static [TablePage], TablePages) {
    let pages: &'static [TablePage] = Box::leak((0..pages).map(|_| TablePage::filled(0)).collect());
    (pages, TablePages::of_a_test(pages, TABLES).unwrap())
}

#[test]
fn a_link_to_a_page_that_was_never_used_is_damage() {
    let (pages, memory) = twice(8);
    let table = Table::<VtdSecondStage>::new(memory, 3).unwrap();
    pages[0].entries()[0]
        .store(VtdSecondStage::link(PhysAddr::new(TABLES.raw() + 7 * 4096)), Ordering::SeqCst);
    let mapped = table.map(range(0, K4), PhysAddr::new(0), RW);
    assert!(matches!(mapped, Err(TableError::Damaged { .. })), "{mapped:?}");
    assert!(matches!(table.pin(Iova::new(0)), Err(TableError::Damaged { .. })));
    assert!(table.clear(range(0, K4), &mut Retired::new()).is_err());
    table.map(range(G1, K4), PhysAddr::new(0), RW).unwrap();
}

/// Such an entry is not present, and not zero either.
#[test]
fn an_entry_that_is_neither_empty_nor_a_tables_own_is_damage() {
    let (pages, memory) = twice(8);
    let table = Table::<VtdSecondStage>::new(memory, 3).unwrap();
    table.map(range(0, K4), PhysAddr::new(0), RW).unwrap();
    let odd = VtdSecondStage::retired(TABLES);
    pages[2].entries()[5].store(odd, Ordering::SeqCst);
    let at = Iova::new(5 * K4);
    assert_eq!(
        table.map(range(5 * K4, K4), PhysAddr::new(0), RW),
        Err(TableError::Damaged { at, entry: odd })
    );
    assert!(table.map(range(4 * K4, 4 * K4), PhysAddr::new(0), RW).is_err());
    table.map(range(6 * K4, K4), PhysAddr::new(0), RW).unwrap();
}

#[test]
fn pages_retired_from_a_table_are_not_those_of_a_later_one_in_the_same_memory() {
    let (pages, memory) = twice(64);
    let mut old = Retired::new();
    {
        let table = Table::<VtdSecondStage>::new(memory, 3).unwrap();
        table.map(range(0, K4), PhysAddr::new(0), RW).unwrap();
        table.clear(range(0, K4), &mut old).unwrap();
    }
    assert_eq!(old.len(), 1);
    let table =
        Table::<VtdSecondStage>::new(TablePages::of_a_test(pages, TABLES).unwrap(), 3).unwrap();
    assert!(table.retired_ranges(&old).is_err());
    assert!(table.collect_retired(&mut old).is_err());
    let old = table.reclaim(old).expect_err("pages of another table");
    assert_eq!((old.len(), table.stats().in_use), (1, 1));
}

proptest! {
    /// No data written to its pages makes the table panic.
    #[test]
    fn no_damage_makes_a_table_panic(
        steps in prop::collection::vec((0u8..7, 0u64..8, 0usize..16, 0usize..16, any::<u64>()), 1..60),
    ) {
        let (pages, memory) = twice(16);
        let table = Table::<VtdSecondStage>::new(memory, 3).unwrap();
        let (mut retired, mut pins) = (Retired::new(), Vec::new());
        for (what, at, page, slot, value) in steps {
            let at = [0, K4, M2, M2 + K4, G1, 5 * M2, G1 + 3 * M2, 2 * G1][usize::try_from(at).unwrap()];
            let len = if value & 1 == 0 { K4 } else { M2 };
            match what {
                0 | 1 => drop(table.map(range(at, len), PhysAddr::new(0), RW)),
                2 => drop(table.clear(range(at, len), &mut retired)),
                3 => pins.extend(table.pin(Iova::new(at))),
                4 => pins.pop().map_or((), |pin| drop(table.unpin(pin, &mut retired))),
                5 => {
                    let _ = table.collect_retired(&mut retired);
                    drop(table.reclaim(core::mem::take(&mut retired)));
                }
                _ => {
                    let target = PhysAddr::new(TABLES.raw() + (value >> 8) % 18 * 4096);
                    let entry = [0, VtdSecondStage::link(target), VtdSecondStage::retired(target), value];
                    pages[page].entries()[slot % 8].store(entry[slot % 4], Ordering::SeqCst);
                }
            }
            table.translate(Iova::new(at));
        }
    }
}
