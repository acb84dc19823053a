//! Every interleaving (up to three preemptions) of owners whose pages share a table page that becomes empty.
//!
//! The entries are in memory that a device shares, so they are real atomics, which loom does not track: each access to one
//! is shown to it as an access to the word beside its page (`Store::raw`, `Store::set`), so that it switches there.

use super::*;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PhysAddr};
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
    let pages = TablePages::new(pages, PhysAddr::new(0x7000_0000)).unwrap();
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
        let mut retired = Retired::new();
        self.table.clear(range(iova), &mut retired).unwrap();
        self.table.reclaim(retired).unwrap();
    }

    fn at(&self, iova: u64) -> Option<u64> {
        self.table.translate(Iova::new(iova)).map(|t| t.phys.raw())
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// One owner maps beside a page whose table page the other one empties, reclaims and reuses elsewhere.
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

/// Two threads clear the same page at once, against the contract: one of them clears it, the other gets the error that
/// nothing is mapped there, and a neighbour in the same table page stays mapped and counted.
#[test]
fn loom_two_clears_of_one_range_count_it_once() {
    explore(|| {
        let b = bench(4);
        b.map(0, 16 * K4);
        b.map(K4, 17 * K4);
        let other = b.clone();
        let clear = |b: &Bench| {
            let mut retired = Retired::new();
            let cleared = b.table.clear(range(0), &mut retired).is_ok();
            b.table.reclaim(retired).unwrap();
            cleared
        };
        let thread = thread::spawn(move || clear(&other));
        let here = clear(&b);
        assert!(here != thread.join().unwrap(), "exactly one of them has cleared it");
        assert_eq!((b.at(0), b.at(K4)), (None, Some(17 * K4)));
        b.map(M2, 18 * K4);
        assert_eq!(b.at(K4), Some(17 * K4), "its table page was not reused");
        b.clear_and_reclaim(K4);
        b.clear_and_reclaim(M2);
    });
}
