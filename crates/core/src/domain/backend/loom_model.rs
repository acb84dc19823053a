//! Every interleaving (up to a few preemptions) of owners that map and revoke in a table with too
//! few pages, beside a device whose walker holds on to a table page: retired pages are relinked,
//! reclaimed and reused elsewhere meanwhile.
//!
//! As in the model of the table, an access to an entry is shown to loom as one to the word beside
//! its page.

use super::walker::{Walker, page};
use super::*;
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::domain::Backend;
use crate::sync;
use crate::table::{Table, VtdSecondStage};
use loom::sync::Arc;
use loom::thread;

const RW: Access = Access::READ.union(Access::WRITE);
const K4: u64 = 1 << 12;
const M2: u64 = 1 << 21;

type Unit = TableBackend<VtdSecondStage, Walker>;

fn at(iova: u64) -> IovaRange {
    IovaRange::new(Iova::new(iova), K4).unwrap()
}

fn map(unit: &Unit, iova: u64, number: u64) {
    unit.map(at(iova), page(number), RW, None).unwrap();
}

fn strict_unmap(unit: &Unit, iova: u64) {
    let revoked = Revocation { range: at(iova), window: None };
    let ticket = unit.revoke(revoked, &mut core::iter::empty()).unwrap();
    assert!(matches!(unit.wait(ticket, Wait::ToDeadline), Poll::Ready(Ok(()))));
}

fn explore(pages: usize, preemptions: usize, model: impl Fn(Arc<Unit>) + Sync + Send + 'static) {
    sync::explore(Some(preemptions), 2, move || {
        let (walker, table) = Walker::new(pages);
        model(Arc::new(TableBackend::new("model", walker, Table::new(table, 3).unwrap())));
    });
}

fn found(unit: &Unit, iova: u64) -> Option<u64> {
    unit.queue().walk(iova).map(|phys| (phys - page(0).addr() as u64) / 4096)
}

/// The last mapping of a window is revoked while the device walks there; the window's table page is
/// reused for another window as soon as it may be. What the device finds in the first window was
/// mapped there, or is nothing.
#[test]
fn loom_a_walker_never_finds_what_another_window_maps() {
    explore(4, 2, |unit| {
        map(&unit, 0, 1);
        map(&unit, M2, 2);
        let device = Arc::clone(&unit);
        let device = thread::spawn(move || {
            for _ in 0..2 {
                let here = found(&device, 0);
                assert!(matches!(here, None | Some(1)), "{here:?}");
                thread::yield_now();
            }
        });
        strict_unmap(&unit, 0);
        map(&unit, 2 * M2, 3); // there is no page left but that of the first window
        assert_eq!(found(&unit, 2 * M2), Some(3));
        device.join().unwrap();
        assert_eq!(found(&unit, 0), None);
    });
}

/// A map brings a retired table page back while another owner revokes, reclaims and maps elsewhere.
#[test]
fn loom_a_page_that_is_brought_back_is_not_reclaimed() {
    explore(4, 2, |unit| {
        map(&unit, 0, 1);
        let other = Arc::clone(&unit);
        let mapper = thread::spawn(move || {
            map(&other, K4, 2);
            assert_eq!(found(&other, K4), Some(2));
        });
        strict_unmap(&unit, 0);
        map(&unit, M2, 3);
        assert_eq!(found(&unit, 0), None);
        mapper.join().unwrap();
        assert_eq!((found(&unit, K4), found(&unit, M2)), (Some(2), Some(3)));
        strict_unmap(&unit, K4);
        strict_unmap(&unit, M2);
        assert_eq!((found(&unit, K4), found(&unit, M2)), (None, None));
    });
}

/// A flush takes effect after the entries that it covers have been cleared, also while other owners
/// submit.
#[test]
fn loom_a_flush_covers_cleared_entries_only() {
    explore(6, 3, |unit| {
        map(&unit, 0, 1);
        map(&unit, K4, 2);
        map(&unit, 2 * K4, 3);
        let other = Arc::clone(&unit);
        let revoker = thread::spawn(move || strict_unmap(&other, 0));
        strict_unmap(&unit, K4);
        revoker.join().unwrap();
        assert_eq!(unit.queue().found_present.load(core::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(found(&unit, 2 * K4), Some(3));
    });
}

/// A map needs the one table page that is on its way back, while another thread is reclaiming it:
/// it waits for that thread, and does not take the page for one that never comes back.
#[test]
fn loom_a_map_gets_the_page_that_another_thread_is_reclaiming() {
    explore(4, 3, |unit| {
        map(&unit, 0, 1);
        map(&unit, 2 * M2, 3); // stays, and with it the page above
        strict_unmap(&unit, 0);
        let other = Arc::clone(&unit);
        let reclaimer = thread::spawn(move || {
            other.deferred.reclaim(&other.table, |ticket| other.invalidator.completed() >= ticket);
        });
        map(&unit, M2, 2);
        assert_eq!((found(&unit, 0), found(&unit, M2)), (None, Some(2)));
        reclaimer.join().unwrap();
    });
}

/// Two threads find an extent each while another one looks for either: it finds one of them as a
/// whole, or none.
#[test]
fn loom_an_extent_is_found_as_a_whole_or_not_at_all() {
    use crate::addr::{PhysAddr, PhysRange};
    use extent::{Generations, LastExtent, PhysExtent};
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    let model = || {
        let (last, generations) = (Arc::new(LastExtent::new()), Generations::new());
        let generation = generations.current();
        let extent = |number: usize| {
            let phys = PhysRange::new(PhysAddr::new(number as u64 * K4), number as u64 * K4);
            PhysExtent::new(number * 4096, phys.unwrap())
        };
        let writers = [1, 2].map(|number| {
            let last = Arc::clone(&last);
            thread::spawn(move || last.store(generation, extent(number)))
        });
        if let Some(found) = last.load(generation) {
            assert!([1, 2].map(extent).contains(&found), "{found:?}");
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        // One of two concurrent writers may give up; the entry of the other is found.
        assert!(last.load(generation).is_some_and(|found| [1, 2].map(extent).contains(&found)));
        generations.advance();
        assert_eq!(last.load(generations.current()), None, "of another generation");
    };
    crate::sync::in_all_orders(|| builder.check(model));
}
