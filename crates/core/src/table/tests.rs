use super::*;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use core::sync::atomic::{AtomicUsize, Ordering};
use formats::Decode;

mod damage;
mod dump;
mod formats;
mod levels;
mod model;
mod pinned;
mod retired;
mod stress;

const K4: u64 = 1 << 12;
const M2: u64 = 1 << 21;
const G1: u64 = 1 << 30;
/// The physical address of the table pages: not their address in the process.
const TABLES: PhysAddr = PhysAddr::new(0x7_0000_0000);
const RW: Access = Access::all();

/// A table, its memory (full of rubbish at first), and a walker of its own that knows the format
/// and not this module.
struct Bench<F: Format = VtdSecondStage> {
    table: Table<F>,
    pages: &'static [TablePage],
    _pages: Box<[TablePage]>,
}

/// A table that begins with one page and is given the others as it grows.
fn bench<F: Format>(pages: usize, levels: u8) -> Bench<F> {
    let owned: Box<[TablePage]> = (0..pages).map(|_| TablePage::filled(u64::MAX)).collect();
    // SAFETY: the pages live as long as the table, and are changed by it alone.
    let pages = unsafe { &*core::ptr::from_ref(&*owned) };
    let pieces = Pieces { pages, given: AtomicUsize::new(0) };
    let table = Table::new(pieces.grow(1).unwrap(), levels).unwrap().with_memory(Box::new(pieces));
    Bench { table, pages, _pages: owned }
}

const ADVICE: &str = "use a larger bench";

/// Pages that lie together, given in pieces.
struct Pieces {
    pages: &'static [TablePage],
    given: AtomicUsize,
}

impl TableMemory for Pieces {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        let first = self.given.load(Ordering::SeqCst);
        let end = self.pages.len().min(first + pages as usize);
        self.given.store(end, Ordering::SeqCst);
        TablePages::of_a_test(
            &self.pages[first..end],
            PhysAddr::new(TABLES.raw() + first as u64 * 4096),
        )
        .ok()
    }
    fn advice(&self) -> &'static str {
        ADVICE
    }
}

impl<F: Decode> Bench<F> {
    fn entry(&self, page: u64, index: u64) -> u64 {
        let (page, index) = (usize::try_from(page).unwrap(), usize::try_from(index).unwrap());
        F::read(&self.pages[page].entries()[index])
    }

    fn walk(&self, iova: u64) -> Option<(u64, u64, u64)> {
        let mut page = self.table.root().raw();
        for level in (1..=u32::from(self.table.0.store.levels())).rev() {
            let shift = 3 + 9 * level;
            let index = (iova >> shift) & 511;
            let entry = self.entry((page - TABLES.raw()) / 4096, index);
            let access = F::access(entry)?;
            let address = entry & 0x000f_ffff_ffff_f000;
            if level == 1 || entry & 0x80 != 0 {
                return Some((address + (iova & ((1 << shift) - 1)), 1 << shift, access));
            }
            page = address;
        }
        None
    }

    /// Both walkers, which must agree.
    fn at(&self, iova: u64) -> Option<(u64, u64, u64)> {
        let ours = self.table.translate(Iova::new(iova));
        let ours = ours.map(|t| (t.phys.raw(), t.size.bytes(), u64::from(t.access.bits())));
        assert_eq!(self.walk(iova), ours);
        ours
    }

    fn map(&self, iova: u64, phys: u64, len: u64) -> Result<(), TableError> {
        self.table.map(range(iova, len), PhysAddr::new(phys), RW)
    }

    /// As if a flush had followed, until nothing is left to take back.
    fn settle(&self) {
        loop {
            let mut retired = Retired::new();
            self.table.collect_retired(&mut retired).unwrap();
            if retired.is_empty() {
                break;
            }
            self.table.reclaim(retired).unwrap();
        }
    }

    fn is_pristine(&self) {
        self.settle();
        let stats = self.table.stats();
        assert_eq!((stats.in_use, stats.retired), (1, 0));
        assert!((0..512).all(|i| self.entry(0, i) == 0), "the root is not empty");
    }
}

/// The error of a table that grows no more.
fn full(capacity: usize) -> TableError {
    TableError::NoPages { capacity: u32::try_from(capacity).unwrap(), advice: ADVICE }
}

/// A place in a list of `len` things.
fn below(any: u64, len: usize) -> usize {
    usize::try_from(any % len as u64).unwrap()
}

fn range(iova: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(iova), len).unwrap()
}

#[test]
fn bad_arguments_are_refused() {
    let b: Bench = bench(8, 3);
    let r = range(K4, K4);
    let phys = PhysAddr::new(K4);
    assert!(matches!(b.map(K4 + 1, K4, K4), Err(TableError::Misaligned { .. })));
    assert!(matches!(b.map(K4, K4 + 8, K4), Err(TableError::Misaligned { .. })));
    assert!(matches!(b.map(K4, K4, K4 + 1), Err(TableError::Misaligned { .. })));
    assert!(matches!(b.map((1 << 39) - K4, K4, 2 * K4), Err(TableError::Outside { bits: 39, .. })));
    assert!(matches!(
        b.map(K4, (1 << 52) - K4, 2 * K4),
        Err(TableError::PhysOutside { bits: 52, .. })
    ));
    assert!(matches!(b.map(K4, !0xfff, 2 * K4), Err(TableError::PhysOutside { .. })));
    assert_eq!(b.table.map(r, phys, Access::empty()), Err(TableError::NoAccess { range: r }));
    let pages = TablePages::of_a_test(b.pages, TABLES).unwrap();
    assert!(matches!(
        Table::<VtdSecondStage>::new(pages, 2),
        Err(TableError::Levels { levels: 2, min: 3, .. })
    ));
    assert!(TablePages::of_a_test(b.pages, PhysAddr::new(8)).is_err());
    assert!(TablePages::of_a_test(&[], TABLES).is_err());
    assert!(TablePages::of_a_test(b.pages, PhysAddr::new(1 << 52)).is_err());
    b.is_pristine();
}

#[test]
fn one_range_becomes_the_largest_leaves_that_fit() {
    let b: Bench = bench(64, 4);
    // 4 KiB up to the first 2 MiB line, 2 MiB up to the first 1 GiB line, and down again.
    let (start, end) = (G1 - M2 - K4, 2 * G1 + M2 + K4);
    b.map(start, 8 * G1 + start, end - start).unwrap();
    let sizes = |at| b.at(at).unwrap().1;
    assert_eq!(sizes(start), K4);
    assert_eq!(sizes(G1 - M2), M2);
    assert_eq!(sizes(G1), G1);
    assert_eq!(sizes(2 * G1), M2);
    assert_eq!(sizes(2 * G1 + M2), K4);
    assert_eq!(b.at(G1 + 12345), Some((9 * G1 + 12345, G1, 3)));
    assert_eq!(b.at(start - 1), None);
    assert_eq!(b.at(end), None);
    let mut retired = Retired::new();
    b.table.clear(range(start, end - start), &mut retired).unwrap();
    assert_eq!(retired.len(), 2);
    let ranges: Vec<_> = b.table.retired_ranges(&retired).unwrap().collect();
    assert_eq!(ranges, [range(2 * G1 + M2, M2), range(G1 - 2 * M2, M2)], "not what lies between");
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
    // The same with hardware that has no 1 GiB leaves.
    let Bench { table, pages, _pages } = b;
    let b = Bench { table: table.with_max_leaf(PageSize::Size2M), pages, _pages };
    b.map(G1, G1, G1).unwrap();
    assert_eq!(b.at(G1).unwrap().1, M2);
}

/// A table grows by as many pages as it has, and translates through all of its chunks.
#[test]
fn a_table_grows_by_as_much_as_it_has_until_there_is_no_more() {
    let b: Bench = bench(100, 3);
    let windows = 97; // the root and one page of level 2 beside theirs: one page is left
    for window in 0..windows {
        b.map(window * M2, window * K4, K4).unwrap();
    }
    let stats = b.table.stats();
    assert_eq!((stats.in_use, stats.capacity), (99, 100), "1, 2, 4, ... 64, and the rest");
    b.map(G1 - M2, 0, K4).unwrap();
    let error = b.map(G1 - 2 * M2, 0, K4).unwrap_err();
    assert_eq!(error, full(100));
    assert!(error.to_string().ends_with(ADVICE), "{error}");
    let mut retired = Retired::new();
    for window in 0..windows {
        assert_eq!(b.at(window * M2), Some((window * K4, K4, 3)));
        b.table.clear(range(window * M2, K4), &mut retired).unwrap();
    }
    b.table.clear(range(G1 - M2, K4), &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
    assert_eq!(b.table.stats().capacity, 100, "pages stay with the table");
}

/// A source that gives one page at a time is asked no more once there are too many chunks.
#[test]
fn a_table_of_tiny_chunks_stops_at_their_number() {
    struct Ones;
    impl TableMemory for Ones {
        fn grow(&self, _: u32) -> Option<TablePages> {
            static NEXT: AtomicUsize = AtomicUsize::new(1);
            let page = Box::leak(Box::new([TablePage::filled(0)]));
            let phys = NEXT.fetch_add(2, Ordering::SeqCst) as u64 * 4096;
            TablePages::of_a_test(page, PhysAddr::new(phys)).ok()
        }
        fn advice(&self) -> &'static str {
            ADVICE
        }
    }
    let table =
        Table::<VtdSecondStage>::new(Ones.grow(1).unwrap(), 3).unwrap().with_memory(Box::new(Ones));
    let map = |window: u64| table.map(range(window * M2, K4), PhysAddr::new(window * K4), RW);
    (0..30).for_each(|window| map(window).unwrap());
    assert_eq!(map(30), Err(full(MAX_CHUNKS)));
    for window in 0..30 {
        let found = table.translate(Iova::new(window * M2)).unwrap();
        assert_eq!(found.phys, PhysAddr::new(window * K4));
    }
}

#[test]
fn a_part_of_a_superpage_is_not_cleared_and_the_rest_neither() {
    let b: Bench = bench(8, 3);
    b.map(M2 - K4, 4 * M2 - K4, K4 + 2 * M2).unwrap();
    let mut retired = Retired::new();
    let cut = range(M2 - K4, K4 + M2 + K4);
    let leaf = range(2 * M2, M2);
    assert_eq!(b.table.clear(cut, &mut retired), Err(TableError::PartOfLeaf { range: cut, leaf }));
    let inner = range(M2 + K4, K4);
    assert_eq!(
        b.table.clear(inner, &mut retired),
        Err(TableError::PartOfLeaf { range: inner, leaf: range(M2, M2) })
    );
    let beyond = range(2 * M2, 2 * M2);
    assert_eq!(
        b.table.clear(beyond, &mut retired),
        Err(TableError::NotMapped { at: Iova::new(3 * M2) })
    );
    assert!(retired.is_empty());
    for at in [M2 - K4, M2, 2 * M2] {
        assert_eq!(b.at(at).unwrap().0, at + 3 * M2);
    }
}

#[test]
fn what_is_mapped_is_not_overwritten() {
    let b: Bench = bench(16, 3);
    b.map(M2 + 5 * K4, K4, K4).unwrap();
    let at = Iova::new(M2 + 5 * K4);
    for (iova, len) in [(M2, M2), (0, G1), (M2, 6 * K4), (M2 + 5 * K4, K4), (0, 4 * M2)] {
        assert_eq!(
            b.map(iova, 0, len),
            Err(TableError::AlreadyMapped { at }),
            "{iova:#x} {len:#x}"
        );
    }
    assert_eq!(b.at(M2 + 5 * K4), Some((K4, K4, 3)));
    assert_eq!(b.at(M2 + 4 * K4), None);
    assert_eq!(b.at(0), None);
    b.table.clear(range(at.raw(), K4), &mut Retired::new()).unwrap();
}

#[test]
fn a_retired_page_is_not_reused_before_it_is_reclaimed_except_at_home() {
    let b: Bench = bench(4, 3); // the root and three: one way down and one more page
    b.map(0, 0, K4).unwrap();
    let mut retired = Retired::new();
    b.table.clear(range(0, K4), &mut retired).unwrap();
    assert_eq!(retired.len(), 1);
    assert!(b.table.retired_ranges(&retired).unwrap().eq([range(0, M2)]));
    // Elsewhere: the one free page is used, and then none is free although one is retired.
    b.map(M2, 0, K4).unwrap();
    assert_eq!(b.map(2 * M2, 0, K4), Err(full(4)));
    // At its own place the page is linked again: the very page that a stale walk cache still holds.
    let entry = |i| b.entry(1, i);
    let gone = entry(0);
    assert_eq!(gone & 3, 0);
    b.map(3 * K4, K4, K4).unwrap();
    assert_eq!(entry(0) & !0xfff, gone & !0xfff & !(1 << 52));
    assert_eq!(b.table.reclaim(retired).unwrap(), 0);
    assert_eq!(b.at(3 * K4), Some((K4, K4, 3)));
    // Emptied and retired afresh, with a flush of its own.
    let mut retired = Retired::new();
    b.table.clear(range(3 * K4, K4), &mut retired).unwrap();
    b.table.clear(range(M2, K4), &mut retired).unwrap();
    assert_eq!(b.table.reclaim(retired).unwrap(), 2);
    b.is_pristine();
}

#[test]
fn a_page_emptied_while_its_old_flush_is_pending_waits_for_another() {
    let b: Bench = bench(4, 3);
    b.map(0, 0, K4).unwrap();
    let mut first = Retired::new();
    b.table.clear(range(0, K4), &mut first).unwrap();
    b.map(0, 0, K4).unwrap();
    let mut second = Retired::new();
    b.table.clear(range(0, K4), &mut second).unwrap();
    assert!(second.is_empty(), "it is still on the first list");
    // The first flush may have been over before the second life began: not free yet.
    assert_eq!(b.table.reclaim(first).unwrap(), 0);
    assert_eq!(b.table.stats().retired, 1);
    b.is_pristine();
}

#[test]
fn pages_of_another_table_are_returned() {
    let (a, b): (Bench, Bench) = (bench(8, 3), bench(8, 3));
    // Both benches claim the same physical address; use another for one.
    let pages = TablePages::of_a_test(b.pages, PhysAddr::new(0x1000_0000)).unwrap();
    let other = Table::<VtdSecondStage>::new(pages, 3).unwrap();
    a.map(0, 0, K4).unwrap();
    let mut retired = Retired::new();
    a.table.clear(range(0, K4), &mut retired).unwrap();
    other.map(range(0, K4), PhysAddr::new(0), RW).unwrap();
    assert!(matches!(other.clear(range(0, K4), &mut retired), Err(TableError::OtherTable { .. })));
    let retired = other.reclaim(retired).unwrap_err();
    assert_eq!(a.table.reclaim(retired).unwrap(), 1);
}

/// Runs out of table pages at every step: nothing of the range is mapped, and every page comes
/// back.
#[test]
fn running_out_of_table_pages_rolls_back_exactly() {
    let (start, len) = (G1 - 2 * M2 - K4, 5 * M2 + 2 * K4);
    let mut failures = 0;
    for capacity in 1..20 {
        let b: Bench = bench(capacity, 4);
        match b.map(start, K4, len) {
            Ok(()) => {
                assert_eq!(b.at(start + len - 1), Some((K4 + len - 1, K4, 3)));
                b.table.clear(range(start, len), &mut Retired::new()).unwrap();
                assert!(failures > 5);
                return;
            }
            Err(e) => {
                assert_eq!(e, full(capacity));
                failures += 1;
                for at in (start..start + len).step_by(4096) {
                    assert_eq!(b.at(at), None);
                }
                b.is_pristine();
            }
        }
    }
    panic!("20 pages did not suffice");
}

#[test]
fn a_million_mappings_leave_nothing_but_the_root() {
    let b: Bench = bench(2100, 4);
    let at = |i: u64| (7 * G1 + i * K4, (i ^ 0x55) * K4);
    for i in 0..1_000_000 {
        b.map(at(i).0, at(i).1, K4).unwrap();
    }
    assert_eq!(b.at(at(654_321).0), Some((at(654_321).1, K4, 3)));
    assert_eq!(b.table.stats().in_use, 1 + 1 + 4 + 1_000_000u32.div_ceil(512));
    for i in 0..1_000_000 {
        let mut retired = Retired::new();
        b.table.clear(range(at(i).0, K4), &mut retired).unwrap();
        b.table.reclaim(retired).unwrap();
    }
    // One flush for each level has not reached these yet: at most one way down.
    assert!(b.table.stats().in_use <= 3);
    b.is_pristine();
}

/// There is a page for the upper of two levels, and none for the lower one.
#[test]
fn a_map_that_lacks_a_page_gives_back_those_that_it_has_linked() {
    let b: Bench = bench(2, 3);
    assert_eq!(b.map(0, 0, K4), Err(full(2)));
    b.is_pristine();
}
