//! Every interleaving (up to three preemptions, or two) of owners whose pages share a table page
//! that becomes empty.
//!
//! The entries are in memory that a device shares, so they are real atomics, which loom does not
//! track: each access to one is shown to it as an access to the word beside its page (`Store::raw`,
//! `Store::set`), so that it switches there.

use super::*;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::sync::in_all_orders;
use alloc::boxed::Box;
use loom::sync::Arc;
use loom::thread;

const K4: u64 = 1 << 12;
const M2: u64 = 1 << 21;

struct Bench {
    table: Table<VtdSecondStage>,
    _pages: Box<[TablePage]>,
}

fn bench(pages: usize) -> Arc<Bench> {
    let owned: Box<[TablePage]> = (0..pages).map(|_| TablePage::filled(0)).collect();
    // SAFETY: the pages live as long as the table, and are changed by it alone.
    let pages = unsafe { &*core::ptr::from_ref(&*owned) };
    let pages = TablePages::of_a_test(pages, PhysAddr::new(0x7000_0000)).unwrap();
    Arc::new(Bench { table: Table::new(pages, 3).unwrap(), _pages: owned })
}

fn range(iova: u64) -> IovaRange {
    IovaRange::new(Iova::new(iova), K4).unwrap()
}

impl Bench {
    fn map(&self, iova: u64, phys: u64) {
        self.table.map(range(iova), PhysAddr::new(phys), Access::all()).unwrap();
    }

    fn clear_and_reclaim(&self, iova: u64) {
        assert!(self.try_clear_and_reclaim(iova));
    }

    /// Returns whether something was mapped there.
    fn try_clear_and_reclaim(&self, iova: u64) -> bool {
        let mut retired = Retired::new();
        let cleared = self.table.clear(range(iova), &mut retired).is_ok();
        self.table.reclaim(retired).unwrap();
        cleared
    }

    fn at(&self, iova: u64) -> Option<u64> {
        self.table.translate(Iova::new(iova)).map(|t| t.phys.raw())
    }

    /// Returns what a device finds now: `at` would wait for a thread that is changing the shape.
    fn walk(&self, iova: u64) -> Option<u64> {
        let store = &self.table.0.store;
        let place = store.descend(iova, 1).unwrap();
        match store.load(place, format::slot(iova, place.level)) {
            Entry::Leaf { phys, .. } => Some(phys.raw()),
            _ => None,
        }
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    explore_up_to(3, model);
}

fn explore_up_to(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    (builder.preemption_bound, builder.max_branches) = (Some(preemptions), 20_000);
    in_all_orders(|| builder.check(model));
}

/// One owner maps beside a page whose table page the other one empties, reclaims and reuses
/// elsewhere.
#[test]
fn a_map_beside_a_page_that_moves_lands_where_it_belongs() {
    explore(|| {
        let b = bench(5);
        b.map(0, 16 * K4);
        let other = b.clone();
        let mapper = thread::spawn(move || other.map(K4, 17 * K4));
        b.clear_and_reclaim(0);
        b.map(M2, 18 * K4);
        mapper.join().unwrap();
        assert_eq!((b.at(0), b.at(K4)), (None, Some(17 * K4)));
        assert_eq!((b.at(M2), b.at(M2 + K4)), (Some(18 * K4), None));
    });
}

/// Both empty the same table page, and one of them fills it again.
#[test]
fn a_page_is_retired_once_however_many_empty_it() {
    explore(|| {
        let b = bench(4);
        b.map(0, 16 * K4);
        b.map(K4, 17 * K4);
        let other = b.clone();
        let clearer = thread::spawn(move || other.clear_and_reclaim(K4));
        b.clear_and_reclaim(0);
        b.map(0, 18 * K4);
        clearer.join().unwrap();
        assert_eq!((b.at(0), b.at(K4)), (Some(18 * K4), None));
        b.clear_and_reclaim(0);
        for _ in 0..4 {
            let mut retired = Retired::new();
            b.table.collect_retired(&mut retired).unwrap();
            b.table.reclaim(retired).unwrap();
        }
        assert_eq!((b.table.stats().in_use, b.table.stats().retired), (1, 0));
    });
}

/// Two threads clear the same page at once, against the contract: one of them clears it, the other
/// gets the error that nothing is mapped there, and a neighbour in the same table page stays mapped
/// and counted.
#[test]
fn loom_two_clears_of_one_range_count_it_once() {
    explore(|| {
        let b = bench(4);
        b.map(0, 16 * K4);
        b.map(K4, 17 * K4);
        let other = b.clone();
        let thread = thread::spawn(move || other.try_clear_and_reclaim(0));
        let here = b.try_clear_and_reclaim(0);
        assert!(here != thread.join().unwrap(), "exactly one of them has cleared it");
        assert_eq!((b.at(0), b.at(K4)), (None, Some(17 * K4)));
        b.map(M2, 18 * K4);
        assert_eq!(b.at(K4), Some(17 * K4), "its table page was not reused");
        b.clear_and_reclaim(K4);
        b.clear_and_reclaim(M2);
    });
}

/// A second clear of a range, against the contract, while the first one's table page is used again
/// elsewhere: what is mapped through it there stays.
#[test]
fn loom_a_second_clear_leaves_what_its_page_maps_elsewhere() {
    explore(|| {
        let b = bench(4);
        b.map(0, 16 * K4);
        let other = b.clone();
        let second = thread::spawn(move || other.try_clear_and_reclaim(0));
        let here = b.try_clear_and_reclaim(0);
        b.map(M2, 18 * K4);
        assert!(here != second.join().unwrap(), "exactly one of them has cleared it");
        assert_eq!((b.at(0), b.at(M2)), (None, Some(18 * K4)));
        b.clear_and_reclaim(M2);
    });
}

/// The page of one window is pinned, used and unpinned, beside an owner whose page in the next
/// window is emptied, retired and reclaimed. There are pages for both and no more.
#[test]
fn loom_a_pin_keeps_its_page_beside_retire_and_reclaim() {
    explore(|| {
        let b = bench(4);
        b.map(M2, 16 * K4);
        let other = b.clone();
        let neighbour = thread::spawn(move || {
            other.clear_and_reclaim(M2);
            other.map(M2 + K4, 17 * K4);
        });
        let pin = b.table.pin(Iova::new(0)).unwrap();
        b.table.map_pinned(&pin, range(0), PhysAddr::new(18 * K4), Access::all()).unwrap();
        assert_eq!(b.at(0), Some(18 * K4));
        b.table.clear_pinned(&pin, range(0)).unwrap();
        let mut retired = Retired::new();
        b.table.unpin(pin, &mut retired).unwrap();
        b.table.reclaim(retired).unwrap();
        neighbour.join().unwrap();
        assert_eq!((b.at(0), b.at(M2), b.at(M2 + K4)), (None, None, Some(17 * K4)));
        b.clear_and_reclaim(M2 + K4);
    });
}

/// A page that waits for its flush is pinned while another thread reclaims it: it is the pinned
/// one, or a fresh one, and neither is reclaimed while it is pinned.
#[test]
fn loom_a_retired_page_is_pinned_or_reclaimed() {
    explore(|| {
        let b = bench(4);
        b.map(0, 16 * K4);
        let mut retired = Retired::new();
        b.table.clear(range(0), &mut retired).unwrap();
        let other = b.clone();
        let reclaimer = thread::spawn(move || {
            other.table.reclaim(retired).unwrap();
            let refused = other.table.clear(range(K4), &mut Retired::new());
            assert!(matches!(
                refused,
                Err(TableError::Pinned { .. } | TableError::NotMapped { .. })
            ));
        });
        let pin = b.table.pin(Iova::new(0)).unwrap();
        b.table.map_pinned(&pin, range(K4), PhysAddr::new(18 * K4), Access::all()).unwrap();
        reclaimer.join().unwrap();
        assert_eq!((b.at(0), b.at(K4)), (None, Some(18 * K4)));
    });
}

/// Part of a pinned window is cleared by one thread while another one maps beside it.
#[test]
fn loom_a_pinned_clear_runs_beside_a_pinned_map() {
    explore(|| {
        let b = bench(3);
        let pin = Arc::new(b.table.pin(Iova::new(0)).unwrap());
        b.table.map_pinned(&pin, range(0), PhysAddr::new(16 * K4), Access::all()).unwrap();
        let (other, its_pin) = (b.clone(), pin.clone());
        let clearer = thread::spawn(move || other.table.clear_pinned(&its_pin, range(0)).unwrap());
        b.table.map_pinned(&pin, range(K4), PhysAddr::new(17 * K4), Access::all()).unwrap();
        clearer.join().unwrap();
        assert_eq!((b.at(0), b.at(K4)), (None, Some(17 * K4)));
        let pin = Arc::try_unwrap(pin).unwrap();
        let (_, pin) = b.table.unpin(pin, &mut Retired::new()).unwrap_err();
        b.table.clear_pinned(&pin, range(K4)).unwrap();
        b.table.unpin(pin, &mut Retired::new()).unwrap();
    });
}

/// A clear of what is not mapped, against the contract, in a page that is reclaimed and used again
/// elsewhere: it changes nothing there.
#[test]
fn loom_a_clear_of_nothing_leaves_what_its_page_maps_elsewhere() {
    explore(|| {
        let b = bench(16);
        b.map(0, 16 * K4);
        let mut retired = Retired::new();
        b.table.clear(range(0), &mut retired).unwrap();
        let other = b.clone();
        let clearer = thread::spawn(move || {
            let mut retired = Retired::new();
            assert!(other.table.clear(range(0), &mut retired).is_err());
            retired
        });
        b.table.reclaim(retired).unwrap();
        b.map(M2, 18 * K4);
        let late = clearer.join().unwrap();
        b.table.reclaim(late).unwrap();
        assert_eq!((b.at(0), b.at(M2)), (None, Some(18 * K4)));
        b.clear_and_reclaim(M2);
        assert!(b.table.stats().in_use <= 2, "all leaf pages are free again");
    });
}

/// A page is freed and linked again in the same place, while another thread maps there. What that
/// has mapped is reachable when its map returns: nothing is counted in a page before it is linked.
#[test]
fn loom_a_page_that_is_counted_in_is_linked() {
    explore_up_to(2, || {
        let b = bench(16);
        b.map(0, 16 * K4);
        let other = b.clone();
        let mapper = thread::spawn(move || {
            other.map(K4, 17 * K4);
            assert_eq!(other.walk(K4), Some(17 * K4));
        });
        let mut retired = Retired::new();
        b.table.clear(range(0), &mut retired).unwrap();
        b.table.reclaim(retired).unwrap();
        b.map(2 * K4, 18 * K4);
        mapper.join().unwrap();
        assert_eq!([0, 1, 2].map(|page| b.at(page * K4)), [None, Some(17 * K4), Some(18 * K4)]);
    });
}
