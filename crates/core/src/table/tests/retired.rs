//! Pages that are retired: what their flush covers, and what they stand in the way of.

use super::super::directory::List;
use super::super::format::Entry;
use super::super::store::Place;
use super::*;

#[test]
fn a_superpage_takes_the_place_of_a_retired_page_after_its_flush() {
    let b: Bench = bench(64, 3);
    b.map(M2 + K4, 0, K4).unwrap();
    b.map(64 * M2, 0, K4).unwrap();
    let (iova, phys) = (range(0, 3 * M2), PhysAddr::new(8 * M2));
    assert_eq!(b.table.awaits_room(iova, phys), Ok(false), "a page in use is not waited for");
    let mut retired = Retired::new();
    b.table.clear(range(M2 + K4, K4), &mut retired).unwrap();
    assert_eq!(b.table.awaits_room(iova, PhysAddr::new(K4)), Ok(false), "it gets no superpages");
    assert_eq!(b.table.awaits_room(range(K4, M2), PhysAddr::new(K4)), Ok(false));
    assert_eq!(b.table.awaits_room(iova, phys), Ok(true));
    b.table.reclaim(retired).unwrap();
    assert_eq!(b.table.awaits_room(iova, phys), Ok(false));
    b.table.map(iova, phys, RW).unwrap();
    assert_eq!([0, M2, 2 * M2].map(|at| b.at(at).unwrap().1), [M2; 3]);
}

#[test]
fn no_room_is_awaited_for_leaves_that_the_hardware_has_not() {
    let Bench { table, pages, _pages } = bench(64, 3);
    let b: Bench = Bench { table: table.with_max_leaf(PageSize::Size4K), pages, _pages };
    b.map(M2, 0, K4).unwrap();
    b.map(64 * M2, 0, K4).unwrap();
    b.table.clear(range(M2, K4), &mut Retired::new()).unwrap();
    assert_eq!(b.table.awaits_room(range(0, 2 * M2), PhysAddr::new(0)), Ok(false));
}

/// A reclaim retires the page above, which comes with the next clear wherever that is.
#[test]
fn a_clear_collects_what_a_reclaim_has_retired() {
    let b: Bench = bench(8, 3);
    b.map(0, 0, K4).unwrap();
    b.map(G1, 0, K4).unwrap();
    let mut retired = Retired::new();
    b.table.clear(range(0, K4), &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    assert_eq!(b.table.stats().retired, 1);
    let mut retired = Retired::new();
    b.table.clear(range(G1, K4), &mut retired).unwrap();
    assert_eq!(retired.len(), 2);
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

/// The ranges of many neighbours that were retired together are those of 64 pages each, and
/// together all of them; lists of them are joined as they are.
#[test]
fn retired_neighbours_are_flushed_in_ranges_of_64_pages() {
    const WINDOWS: u64 = 150;
    let b: Bench = bench(256, 3);
    (0..WINDOWS).for_each(|window| b.map(window * M2, 0, K4).unwrap());
    let mut parts = [(); 3].map(|()| Retired::new());
    for window in 0..WINDOWS {
        let part = usize::try_from(window / (WINDOWS / 3)).unwrap();
        b.table.clear(range(window * M2, K4), &mut parts[part]).unwrap();
    }
    assert!(parts.iter().all(|part| !part.is_empty()));
    let ([first, mut second, third], mut all) = (parts, Retired::new());
    // Lists of several parts are joined, in either place, and empty ones.
    b.table.append(&mut second, first).unwrap();
    b.table.append(&mut all, second).unwrap();
    b.table.append(&mut all, Retired::new()).unwrap();
    b.table.append(&mut all, third).unwrap();
    assert_eq!(u64::from(all.len()), WINDOWS);
    let mut ranges: Vec<_> = b.table.retired_ranges(&all).unwrap().collect();
    assert!(ranges.len() < 16 && ranges.iter().all(|range| range.len() <= 64 * M2), "{ranges:?}");
    ranges.sort_by_key(|range| range.start());
    assert!(ranges.is_sorted_by(|a, b| a.end() == b.start()), "{ranges:?}");
    assert_eq!(ranges.iter().map(IovaRange::len).sum::<u64>(), WINDOWS * M2);
    assert_eq!(u64::from(b.table.reclaim(all).unwrap()), WINDOWS);
    let mut parents = Retired::new();
    b.table.collect_retired(&mut parents).unwrap();
    b.table.reclaim(parents).unwrap();
    b.is_pristine();
}

/// A clear that finds nothing mapped looks at a page whose entries a failed map takes away
/// meanwhile.
#[test]
fn a_page_is_not_retired_while_a_thread_clears_there() {
    let b: Bench = bench(4, 3);
    b.map(0, 0, K4).unwrap();
    let (tree, mut at) = (&b.table.0, b.table.0.store.root());
    while at.level > 1 {
        let Entry::Link(phys) = VtdSecondStage::parse(tree.store.raw(at.page, 0), at.level) else {
            panic!()
        };
        at = Place { page: tree.store.page_at(at.page, phys).unwrap(), level: at.level - 1 };
    }
    let page = at.page;
    let retire = || {
        let (mut directory, mut retired) = (tree.directory.lock(), List::default());
        tree.locked(&mut directory).retire_if_empty(page.index(), &mut retired);
        retired.len
    };
    assert!(page.begin_clear(page.state()));
    page.uncount(1);
    assert_eq!(retire(), 0, "it keeps its home until the clear ends");
    assert!(page.end_clear(0), "which decides again");
    assert_eq!(retire(), 1);
}
