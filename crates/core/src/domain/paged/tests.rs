use super::*;
use crate::addr::Iova;
use crate::invalidate::{Batch, SinkError, WaitError, WaitLimit};
use crate::table::TablePage;
use crate::table::VtdSecondStage;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::BTreeSet;

const PAGE: u64 = 4096;
const RW: Access = Access::READ.union(Access::WRITE);

/// Physical memory in which no two pages lie together, and some are missing; flushes are over at once, or never.
#[derive(Default)]
struct Scattered {
    missing: std::sync::Mutex<BTreeSet<usize>>,
    submitted: AtomicU64,
    hangs: AtomicBool,
    caches_absent: bool,
}

impl Sink for Scattered {
    fn submit(&self, _: &Batch, ticket: Ticket) -> Result<(), SinkError> {
        self.submitted.store(ticket.0, Ordering::SeqCst);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        let hangs = self.hangs.load(Ordering::SeqCst);
        Ticket(if hangs { 0 } else { self.submitted.load(Ordering::SeqCst) })
    }
    fn relax(&self, _: u64) {}
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 10 }
    }
    fn caches_absent(&self) -> bool {
        self.caches_absent
    }
}

impl Physical for Scattered {
    unsafe fn admit(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn expel(&self, _: DmaMemory) {}
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        if self.missing.lock().unwrap().contains(&addr) {
            return Err(BackendError::NotAdmitted { addr, len });
        }
        // Every page lies twice as far from the start as in this process.
        Ok(PhysRange::new(PhysAddr::new((addr as u64) << 1), PAGE).unwrap())
    }
}

/// Memory of which only the addresses are used.
fn nowhere(pages: usize) -> DmaMemory<'static> {
    // SAFETY: nothing in these tests touches it.
    unsafe { DmaMemory::from_raw(NonNull::without_provenance(0x1000_0000.try_into().unwrap()), pages * 4096) }
}

fn at(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

/// A table of a few pages, that the test leaks (a table may outlive every test).
fn paged(pages: usize, sink: Scattered) -> Paged<VtdSecondStage, Scattered> {
    let pages: &'static [TablePage] = Box::leak((0..pages).map(|_| TablePage::filled(0)).collect());
    let pages = TablePages::new(pages, PhysAddr::new(pages.as_ptr().addr() as u64)).unwrap();
    Paged::new("test", sink, pages, 3).unwrap()
}

fn revoke(paged: &Paged<VtdSecondStage, Scattered>, range: IovaRange) -> Ticket {
    paged.revoke(&mut core::iter::once(range)).unwrap()
}

#[test]
fn scattered_memory_is_contiguous_for_the_device() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.map(at(16, 4), memory, RW).unwrap();
    for page in 0..4 {
        let found = paged.table.translate(Iova::new((16 + page) * PAGE)).unwrap();
        assert_eq!(found.phys.raw(), (memory.addr() as u64 + page * PAGE) << 1);
    }
    let ticket = revoke(&paged, at(16, 4));
    paged.wait(ticket).unwrap();
    assert_eq!(paged.table.translate(Iova::new(16 * PAGE)), None);
}

#[test]
fn a_map_that_fails_in_the_middle_is_taken_back_and_flushed() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.sink().missing.lock().unwrap().insert(memory.addr() + 2 * 4096);
    let error = paged.map(at(16, 4), memory, RW).unwrap_err();
    assert!(matches!(error, BackendError::NotAdmitted { .. }) && !error.stays_reachable(), "{error}");
    assert!((16..20).all(|page| paged.table.translate(Iova::new(page * PAGE)).is_none()));
    assert!(paged.stats().invalidations.waits > 0, "a device may have looked in between");
    paged.sink().missing.lock().unwrap().clear();
    paged.map(at(16, 4), memory, RW).unwrap();
}

#[test]
fn what_can_not_be_taken_back_says_so() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.sink().missing.lock().unwrap().insert(memory.addr() + 2 * 4096);
    paged.sink().hangs.store(true, Ordering::SeqCst);
    let error = paged.map(at(16, 4), memory, RW).unwrap_err();
    assert!(matches!(error, BackendError::Stuck { flush: WaitError::TimedOut { .. }, .. }), "{error}");
    assert!(error.stays_reachable());
}

#[test]
fn where_nothing_happened_nothing_is_flushed() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(2);
    paged.sink().missing.lock().unwrap().insert(memory.addr());
    assert!(matches!(paged.map(at(0, 2), memory, RW), Err(BackendError::NotAdmitted { .. })));
    let short = paged.map(at(16, 1), memory, RW);
    assert!(matches!(short, Err(BackendError::LengthsDiffer { .. })));
    assert_eq!(paged.revoke(&mut core::iter::empty()).unwrap(), Ticket::DONE);
    assert!(paged.revoke(&mut core::iter::once(at(16, 1))).is_err(), "nothing is mapped there");
    assert_eq!(paged.stats().invalidations.waits, 0);
}

#[test]
fn a_caching_iommu_is_told_of_maps_too() {
    let sink = Scattered { caches_absent: true, ..Scattered::default() };
    let paged = paged(8, sink);
    paged.map(at(16, 1), nowhere(1), RW).unwrap();
    assert_eq!(paged.stats().invalidations.waits, 1);
    paged.sink().hangs.store(true, Ordering::SeqCst);
    let error = paged.map(at(32, 1), nowhere(1), RW).unwrap_err();
    assert!(error.stays_reachable(), "{error}");
    assert_eq!(paged.table.translate(Iova::new(32 * PAGE)), None);
}

#[test]
fn table_pages_come_back_however_many_windows_come_and_go() {
    // Room for the root, one page of level 2, and two of level 1: each window of 2 MiB needs one of these.
    let paged = paged(4, Scattered::default());
    for window in 1..1000 {
        let range = at(window % 512 * 512, 1);
        paged.map(range, nowhere(1), RW).unwrap();
        revoke(&paged, range); // and nobody waits for it
    }
    let stats = paged.stats();
    assert!(stats.table_pages <= 4, "{stats:?}");
}

#[test]
fn pages_that_a_failed_map_retired_come_back_to_the_next_map() {
    // Room for the root, one page of level 2 and one of level 1; nothing is ever revoked, so no ticket is under way.
    let paged = paged(3, Scattered::default());
    // Two windows of 2 MiB need two pages of level 1: the map makes one, fails, and retires what it made.
    let error = paged.map(at(512 - 1, 2), nowhere(2), RW).unwrap_err();
    assert!(matches!(error, BackendError::Table(TableError::NoPages { .. })), "{error}");
    // Elsewhere, below another page of level 2: only what was retired can serve it.
    paged.map(at(512 * 512 * 3, 1), nowhere(1), RW).unwrap();
    assert_eq!(paged.stats().table_pages, 3);
}

#[test]
fn a_map_gets_the_pages_of_all_levels_that_were_revoked() {
    let paged = paged(3, Scattered::default());
    for gib in 0..20 {
        let range = at(gib * 512 * 512, 1);
        paged.map(range, nowhere(1), RW).unwrap();
        revoke(&paged, range); // and nobody waits for it
    }
}

#[test]
fn without_a_flush_table_pages_run_out_and_say_so() {
    let paged = paged(4, Scattered { hangs: true.into(), ..Scattered::default() });
    let map = |window| paged.map(at(window * 512, 1), nowhere(1), RW);
    for window in 1..3 {
        map(window).unwrap();
        revoke(&paged, at(window * 512, 1));
    }
    let error = map(3).unwrap_err();
    assert!(matches!(error, BackendError::Table(TableError::NoPages { .. })), "{error}");
}
