//! Pages that stay linked when they are empty.

use super::super::directory::List;
use super::super::format::Entry;
use super::super::store::Place;
use super::*;

/// A table that has been given all of its pages and holds one mapping far away.
fn grown(pages: usize) -> Bench {
    let b: Bench = keeping(pages, 3);
    let windows = pages as u64 - 2; // beside the root and a page of level 2
    (0..windows).for_each(|window| b.map(100 * G1 + window % 512 * M2, 0, K4).unwrap());
    let mut retired = Retired::new();
    (1..windows)
        .for_each(|window| b.table.clear(range(100 * G1 + window * M2, K4), &mut retired).unwrap());
    b.table.retire_kept(&mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    assert_eq!((b.table.stats().in_use, b.table.stats().kept), (3, 0));
    b
}

fn clear(b: &Bench, iova: u64) -> Retired {
    let mut retired = Retired::new();
    b.table.clear(range(iova, K4), &mut retired).unwrap();
    retired
}

#[test]
fn the_page_of_a_lone_mapping_stays_linked() {
    let b = grown(64);
    for round in 0..10 {
        b.map(round * K4, round * K4, K4).unwrap();
        assert_eq!(b.at(round * K4), Some((round * K4, K4, 3)));
        assert!(clear(&b, round * K4).is_empty());
        assert_eq!(b.at(round * K4), None);
        assert_eq!((b.table.stats().in_use, b.table.stats().kept), (5, 1));
    }
    let twice = b.table.clear(range(0, K4), &mut Retired::new());
    assert_eq!(twice, Err(TableError::NotMapped { at: Iova::new(0) }));
    let mut retired = clear(&b, 100 * G1);
    b.table.retire_kept(&mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

/// A sixteenth of the pages, at most 64, are kept: a page beyond them retires the half that was
/// kept longest, with the next clear.
#[test]
fn no_more_than_the_limit_are_kept() {
    for (pages, most) in [(64, 4_u64), (80, 5)] {
        let b = grown(pages);
        let half = most.div_ceil(2);
        for window in 0..most + 3 * half {
            b.map(window * M2, 0, K4).unwrap();
            let retired = clear(&b, window * M2);
            let oldest = window.checked_sub(most).filter(|beyond| beyond.is_multiple_of(half));
            let expected = oldest.map(|oldest| range(oldest * M2, half * M2));
            assert!(b.table.retired_ranges(&retired).unwrap().eq(expected), "{window} of {most}");
            b.table.reclaim(retired).unwrap();
        }
        assert!((most - half + 1..=most).contains(&u64::from(b.table.stats().kept)));
        // One that is in use when its turn comes is kept anew when it is empty.
        let hot = (most + 3 * half - 1) * M2;
        b.map(hot, 0, K4).unwrap();
        (0..=most).for_each(|beyond| {
            b.map(1000 * M2 + beyond * M2, 0, K4).unwrap();
            b.table.reclaim(clear(&b, 1000 * M2 + beyond * M2)).unwrap();
        });
        assert_eq!(b.at(hot), Some((0, K4, 3)));
        b.table.reclaim(clear(&b, hot)).unwrap();
        b.map(hot, 0, K4).unwrap();
        assert!(clear(&b, hot).is_empty());
        b.table.reclaim(clear(&b, 100 * G1)).unwrap();
        let mut retired = Retired::new();
        b.table.retire_kept(&mut retired).unwrap();
        b.table.reclaim(retired).unwrap();
        b.is_pristine();
    }
}

#[test]
fn a_superpage_takes_the_place_of_a_kept_page_after_its_flush() {
    let b = grown(64);
    b.map(M2 + K4, 0, K4).unwrap();
    assert!(clear(&b, M2 + K4).is_empty());
    let (iova, phys) = (range(0, 3 * M2), PhysAddr::new(8 * M2));
    let mut retired = Retired::new();
    assert_eq!(
        b.table.make_room(iova, PhysAddr::new(K4), &mut retired),
        Ok(false),
        "it gets no superpages"
    );
    assert_eq!(b.table.make_room(range(K4, M2), PhysAddr::new(K4), &mut retired), Ok(false));
    assert!(retired.is_empty());
    assert_eq!(b.table.make_room(iova, phys, &mut retired), Ok(true));
    assert!(b.table.retired_ranges(&retired).unwrap().eq([range(M2, M2)]));
    assert_eq!(
        b.table.make_room(iova, phys, &mut Retired::new()),
        Ok(true),
        "it still waits for the flush"
    );
    b.table.reclaim(retired).unwrap();
    assert_eq!(b.table.make_room(iova, phys, &mut Retired::new()), Ok(false));
    b.table.map(iova, phys, RW).unwrap();
    assert_eq!([0, M2, 2 * M2].map(|at| b.at(at).unwrap().1), [M2; 3]);
    let mut retired = clear(&b, 100 * G1);
    b.table.clear(iova, &mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    b.is_pristine();
}

/// Kept pages are not missing elsewhere for longer than a flush.
#[test]
fn a_shortage_retires_what_is_kept() {
    let b = grown(64);
    for window in 0..4 {
        b.map(window * M2, 0, K4).unwrap();
        assert!(clear(&b, window * M2).is_empty());
    }
    let free = 64 - u64::from(b.table.stats().in_use);
    (0..free).for_each(|window| b.map((100 + window) * M2, 0, K4).unwrap());
    assert_eq!(b.map(10 * M2, 0, K4), Err(full(64)));
    let mut retired = Retired::new();
    b.table.collect_retired(&mut retired).unwrap();
    assert_eq!((retired.len(), b.table.stats().kept), (4, 0));
    b.table.reclaim(retired).unwrap();
    b.map(10 * M2, 0, K4).unwrap();
}

/// Of the kept pages, those in the place of a whole 2 MiB piece are retired, and are no longer
/// among those that are kept.
#[test]
fn room_is_made_for_whole_pieces_alone() {
    let b = grown(64);
    for window in 0..3 {
        b.map(window * M2, 0, K4).unwrap();
        assert!(clear(&b, window * M2).is_empty());
    }
    let mut retired = Retired::new();
    assert_eq!(b.table.make_room(range(K4, 2 * M2), PhysAddr::new(K4), &mut retired), Ok(true));
    assert!(b.table.retired_ranges(&retired).unwrap().eq([range(M2, M2)]));
    assert_eq!(b.table.stats().kept, 2);
    b.table.reclaim(retired).unwrap();
    // Used again elsewhere at once, as the one that is kept longest is retired.
    let places = [4, 5, 6].map(|window| window * M2);
    places.iter().for_each(|at| b.map(*at, 0, K4).unwrap());
    assert!(places.iter().all(|at| b.at(*at) == Some((0, K4, 3))));
    let mut retired = clear(&b, 100 * G1);
    places.iter().for_each(|at| b.table.clear(range(*at, K4), &mut retired).unwrap());
    b.table.reclaim(retired).unwrap();
    b.settle();
    b.is_pristine();
}

#[test]
fn no_room_is_made_for_leaves_that_the_hardware_has_not() {
    let Bench { table, pages, _pages } = grown(64);
    let b: Bench = Bench { table: table.with_max_leaf(PageSize::Size4K), pages, _pages };
    b.map(M2, 0, K4).unwrap();
    assert!(clear(&b, M2).is_empty());
    let room = b.table.make_room(range(0, 2 * M2), PhysAddr::new(0), &mut Retired::new());
    assert_eq!((room, b.table.stats().kept), (Ok(false), 1));
}

/// However large the table, and whatever it is asked for.
#[test]
fn no_more_than_64_are_kept() {
    let b: Bench = keeping(2100, 3);
    let b = Bench { table: b.table.with_kept_pages(u32::MAX), ..b };
    // It is given half of its pages when the others are in use.
    (0..1100).for_each(|window| b.map(100 * G1 + window * M2, 0, K4).unwrap());
    let mut most = 0;
    for window in 0..200 {
        b.map(window * M2, 0, K4).unwrap();
        b.table.reclaim(clear(&b, window * M2)).unwrap();
        most = most.max(b.table.stats().kept);
    }
    assert_eq!(most, 64);
}

/// It is kept already, so a clear that empties it has nothing to decide under the lock.
#[test]
fn a_page_is_reported_as_emptied_unless_it_is_kept() {
    for (b, kept) in [(grown(64), true), (bench(64, 3), false)] {
        b.map(0, 0, K4).unwrap();
        let (place, state) = b.table.0.store.hinted(0).unwrap();
        assert_eq!(state.is_kept(), kept);
        assert_eq!(place.page.uncount(1), !kept);
        place.page.count(1);
        assert!(place.page.begin_clear(place.page.state()));
        assert_eq!(place.page.end_clear(1), !kept);
        place.page.count(1); // its leaf is still there
        assert_eq!(clear(&b, 0).is_empty(), kept);
    }
}

/// Beside one hint for each of 64 windows, which the last of those that share it has.
#[test]
fn a_hint_names_the_page_of_its_window_until_that_is_used_elsewhere() {
    let b = grown(64);
    let hinted = |iova: u64| b.table.0.store.hinted(iova).map(|(place, _)| place.page.index());
    assert_eq!(hinted(0), None, "nothing is known at first");
    b.map(K4, 0, K4).unwrap();
    let page = hinted(0);
    assert!(page.is_some() && hinted(M2 - K4) == page);
    assert_eq!((hinted(M2), hinted(64 * M2)), (None, None));
    assert!(clear(&b, K4).is_empty());
    assert_eq!(hinted(0), page, "kept");
    let mut retired = Retired::new();
    b.table.retire_kept(&mut retired).unwrap();
    b.table.reclaim(retired).unwrap();
    assert_eq!(hinted(0), None);
    b.map(64 * M2, 0, K4).unwrap();
    assert_eq!((hinted(64 * M2), hinted(0)), (page, None));
    b.map(0, 0, K4).unwrap();
    assert!(hinted(0).is_some() && hinted(64 * M2).is_none());
    assert_eq!([0, 64 * M2].map(|iova| b.at(iova)), [Some((0, K4, 3)); 2]);
}

/// A map evicts, too, and what it has retired is added to what the caller of `make_room` flushes.
#[test]
fn what_a_map_has_evicted_makes_room_after_its_flush() {
    let b = grown(64);
    for window in 0..4 {
        b.map(window * M2, 0, K4).unwrap();
        assert!(clear(&b, window * M2).is_empty());
    }
    b.map(4 * M2, 0, K4).unwrap();
    assert_eq!(b.table.stats().retired, 2);
    let (iova, mut retired) = (range(0, 2 * M2), Retired::new());
    assert_eq!(b.table.make_room(iova, PhysAddr::new(0), &mut retired), Ok(true));
    assert!(b.table.retired_ranges(&retired).unwrap().eq([iova]));
    b.table.reclaim(retired).unwrap();
    b.table.map(iova, PhysAddr::new(0), RW).unwrap();
    assert_eq!([0, M2].map(|at| b.at(at).unwrap().1), [M2; 2]);
}

/// The ranges of many neighbours that were retired together are those of 64 pages each, and
/// together all of them; lists of them are joined as they are.
#[test]
fn retired_neighbours_are_flushed_in_ranges_of_64_pages() {
    const WINDOWS: u64 = 150;
    let b: Bench = keeping(256, 3);
    (0..WINDOWS).for_each(|window| b.map(window * M2, 0, K4).unwrap());
    let mut parts = [(); 3].map(|()| Retired::new());
    for window in 0..WINDOWS {
        let part = usize::from(window >= WINDOWS / 2);
        b.table.clear(range(window * M2, K4), &mut parts[part]).unwrap();
    }
    b.table.retire_kept(&mut parts[2]).unwrap();
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
