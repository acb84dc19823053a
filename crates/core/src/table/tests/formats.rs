//! The formats: what a walker that does not know the table's code reads, and where addresses end.

use super::*;
use core::cell::RefCell;
use core::sync::atomic::AtomicU64;
use proptest::prelude::*;
use std::collections::HashMap;

/// A format as a walker knows it: the bits of an entry, without the code that writes them.
pub(super) trait Decode: Format {
    /// Whether an entry is present, and whether the device may read (1) and write (2) through it.
    fn access(entry: u64) -> Option<u64>;
    /// The access that a mapping for `access` gives.
    fn given(access: u64) -> u64;
    /// Reads an entry.
    fn read(entry: &AtomicU64) -> u64 {
        entry.load(Ordering::Relaxed)
    }
}

impl Decode for VtdSecondStage {
    fn access(entry: u64) -> Option<u64> {
        (entry & 3 != 0).then_some(entry & 3)
    }
    fn given(access: u64) -> u64 {
        access
    }
}

impl Decode for VtdFirstStage {
    fn access(entry: u64) -> Option<u64> {
        // Present; of user mode; accessed, and dirty if it can be written, so that no unit writes
        // it.
        let valid =
            entry & 0x24 == 0x24 && (entry & 2 == 0 || entry & 0x80 == 0 || entry & 0x40 != 0);
        (entry & 1 != 0).then(|| {
            assert!(valid, "{entry:#x}");
            1 | entry & 2
        })
    }
    fn given(access: u64) -> u64 {
        access | 1
    }
}

std::thread_local! {
    /// Memory as a walker sees it that does not look into the processor's caches: entries by their
    /// addresses.
    static WRITTEN_BACK: RefCell<HashMap<usize, u64>> = RefCell::default();
}

/// Forgets what was written back to memory that other tables had.
pub(super) fn forget_written_back() {
    WRITTEN_BACK.take();
}

/// The second stage, for such a walker. The tables of a thread belong to one test.
pub(super) struct NonCoherent;

impl Format for NonCoherent {
    const NAME: &'static str = "VT-d second stage, not coherent";
    const MIN_LEVELS: u8 = VtdSecondStage::MIN_LEVELS;
    const MAX_LEVELS: u8 = VtdSecondStage::MAX_LEVELS;
    const PHYS_BITS: u32 = VtdSecondStage::PHYS_BITS;

    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64 {
        VtdSecondStage::leaf(phys, access, level)
    }
    fn link(page: PhysAddr) -> u64 {
        VtdSecondStage::link(page)
    }
    fn retired(page: PhysAddr) -> u64 {
        VtdSecondStage::retired(page)
    }
    fn parse(entry: u64, level: u8) -> Entry {
        VtdSecondStage::parse(entry, level)
    }
    fn write_back(entries: &[AtomicU64]) {
        WRITTEN_BACK.with_borrow_mut(|memory| {
            for entry in entries {
                let value = entry.load(Ordering::Relaxed);
                memory.insert(core::ptr::from_ref(entry).addr(), value);
            }
        });
    }
}

impl Decode for NonCoherent {
    fn access(entry: u64) -> Option<u64> {
        VtdSecondStage::access(entry)
    }
    fn given(access: u64) -> u64 {
        access
    }
    fn read(entry: &AtomicU64) -> u64 {
        // An entry that was never written back reads as what the memory held before: an address
        // that leads nowhere.
        WRITTEN_BACK.with_borrow(|memory| {
            memory.get(&core::ptr::from_ref(entry).addr()).copied().unwrap_or(u64::MAX)
        })
    }
}

#[test]
fn the_first_stage_translates_the_lower_half_and_grants_reads() {
    let b: Bench<VtdFirstStage> = bench(16, 4);
    assert_eq!(b.table.bits(), 47);
    let last = range((1 << 47) - K4, K4);
    for (access, given) in [(Access::READ, 1), (Access::WRITE, 3), (RW, 3)] {
        b.table.map(last, PhysAddr::new(5 * K4), access).unwrap();
        assert_eq!(b.at(last.start().raw()), Some((5 * K4, K4, given)));
        b.table.clear(last, &mut Retired::new()).unwrap();
    }
    // Not canonical, and the upper half, at its two ends.
    for start in
        [(1 << 47) - K4, 1 << 47, (1 << 48) - 2 * K4, 0xffff_8000_0000_0000, u64::MAX - 2 * K4 + 1]
    {
        let beyond = range(start, if start < 1 << 47 { 2 * K4 } else { K4 });
        assert_eq!(
            b.table.map(beyond, PhysAddr::new(0), RW),
            Err(TableError::Outside { range: beyond, bits: 47 })
        );
    }
    let pages = TablePages::of_a_test(b.pages, TABLES).unwrap();
    let three = Table::<VtdFirstStage>::new(pages, 3).map(drop);
    assert!(matches!(three, Err(TableError::Levels { levels: 3, min: 4, max: 5, .. })));
}

#[test]
fn physical_addresses_end_where_the_machine_says() {
    let b: Bench = bench(8, 3);
    let table = b.table.with_phys_bits(36).unwrap();
    let top = 1 << 36;
    let beyond =
        |phys, len, bits| Err(TableError::PhysOutside { phys: PhysAddr::new(phys), len, bits });
    for (phys, len) in
        [(top, K4), (top - K4, 2 * K4), (0, 2 * top), (1 << 63, K4), (u64::MAX - 2 * K4 + 1, K4)]
    {
        assert_eq!(table.map(range(0, len), PhysAddr::new(phys), RW), beyond(phys, len, 36));
    }
    table.map(range(0, K4), PhysAddr::new(top - K4), RW).unwrap();
    // Pages of the table itself beyond the width.
    let width = TABLES.raw().ilog2();
    let b: Bench = bench(8, 3);
    assert_eq!(b.table.with_phys_bits(width).map(drop), beyond(TABLES.raw(), K4, width));
    let b: Bench = bench(8, 3);
    let table = b.table.with_phys_bits(99).unwrap();
    assert_eq!(table.map(range(0, K4), PhysAddr::new(1 << 52), RW), beyond(1 << 52, K4, 52));
}

proptest! {
    /// Clears test several entries by the bits that they have in common.
    #[test]
    fn what_has_all_bits_of_a_leaf_is_one(entry: u64, more: u64, level in 1u8..=3) {
        fn check<F: Format>(entry: u64, more: u64, level: u8) -> bool {
            !F::is_leaf(entry, level) || F::is_leaf(entry | more, level)
        }
        prop_assert!(check::<VtdSecondStage>(entry, more, level), "second stage: {entry:#x}, {more:#x}");
        prop_assert!(check::<VtdFirstStage>(entry, more, level), "first stage: {entry:#x}, {more:#x}");
    }
}
