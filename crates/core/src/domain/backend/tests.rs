use super::deferred::DeferredReclaim;
use super::extent::LastExtent;
use super::*;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PhysAddr, PhysRange};
use crate::domain::{Backend, BackendError, Generation, Generations, PhysExtent};
use crate::invalidate::{
    Descriptor, Flush, FlushCosts, InvalidationQueue, QueueError, Ticket, WaitError, WaitLimit,
};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::table::{Retired, Table, TableError, TablePage, TablePages, VtdSecondStage};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::BTreeSet;
use std::sync::Arc;

#[cfg(feature = "count-rmw")]
mod counted;
mod order;
mod pinned;
mod single;
mod table_pages;

const PAGE: u64 = 4096;
const RW: Access = Access::READ.union(Access::WRITE);

/// Physical memory in which no two pages lie together, and some are missing; flushes complete at
/// once, or never.
#[derive(Default)]
struct Scattered {
    missing: std::sync::Mutex<BTreeSet<usize>>,
    generations: Generations,
    /// Extents that were looked up.
    looked_up: AtomicU64,
    submitted: AtomicU64,
    hangs: AtomicBool,
    caches_not_present: bool,
    /// The flushed ranges, without the borders between blocks and between batches.
    batches: std::sync::Mutex<Vec<Flush>>,
    /// The number of polls until a batch completes.
    takes_polls: u64,
    polls: AtomicU64,
    /// Whether its limit counts no polls, as that of a queue with a clock.
    patient: bool,
    /// Whether it keeps no record of what was flushed.
    forgets: bool,
    /// The number of calls until it panics, once; 0 for never.
    panics_in: AtomicU64,
}

impl Scattered {
    fn call(&self) {
        if self.panics_in.load(Ordering::SeqCst) > 0
            && self.panics_in.fetch_sub(1, Ordering::SeqCst) == 1
        {
            std::panic::resume_unwind(Box::new("a queue"));
        }
    }
}

impl InvalidationQueue for Scattered {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.call();
        let mut flushes = self.batches.lock().unwrap();
        let recorded = if self.forgets { &[] } else { descriptors };
        for descriptor in recorded {
            let Descriptor::Iotlb { scope, leaf_only } = *descriptor else { continue };
            let range = scope.range().expect("these tests request little");
            match flushes.last_mut().filter(|last: &&mut Flush| last.leaf_only == leaf_only) {
                Some(last) if last.range.end() == range.start() => {
                    last.range = last.range.merged(&range).unwrap();
                }
                _ => flushes.push(Flush { range, leaf_only }),
            }
        }
        self.submitted.store(wait.unwrap().0, Ordering::SeqCst);
        self.polls.store(0, Ordering::SeqCst);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        self.call();
        let submitted = self.submitted.load(Ordering::SeqCst);
        let over = self.polls.load(Ordering::SeqCst) >= self.takes_polls;
        let hangs = self.hangs.load(Ordering::SeqCst);
        Ticket(if hangs {
            0
        } else if over {
            submitted
        } else {
            submitted.saturating_sub(1)
        })
    }
    fn relax(&self, _: u64) {
        self.polls.fetch_add(1, Ordering::SeqCst);
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: if self.patient { u64::MAX } else { 10 } }
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn caches_not_present(&self) -> bool {
        self.caches_not_present
    }
}

impl PhysTranslator for Scattered {
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        self.looked_up.fetch_add(1, Ordering::SeqCst);
        if self.missing.lock().unwrap().contains(&addr) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        // Every page lies twice as far from the start as in this process.
        Ok(PhysExtent::new(addr, PhysRange::new(PhysAddr::new((addr as u64) << 1), PAGE).unwrap()))
    }
    fn generation(&self) -> Generation {
        self.generations.current()
    }
}

/// Memory of which only the addresses are used.
fn nowhere(pages: usize) -> DmaMemory<'static> {
    // SAFETY: nothing in these tests touches it.
    unsafe {
        DmaMemory::from_raw(
            NonNull::without_provenance(0x1000_0000.try_into().unwrap()),
            pages * 4096,
        )
    }
}

fn at(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

/// A table of a few pages, that the test leaks (a table may outlive every test).
fn paged(pages: usize, sink: Scattered) -> TableBackend<VtdSecondStage, Scattered> {
    let pages: &'static [TablePage] = Box::leak((0..pages).map(|_| TablePage::filled(0)).collect());
    let pages = TablePages::of_a_test(pages, PhysAddr::new(pages.as_ptr().addr() as u64)).unwrap();
    TableBackend::new("test", sink, Table::new(pages, 3).unwrap())
}

fn revoke(paged: &TableBackend<VtdSecondStage, Scattered>, range: IovaRange) -> Ticket {
    paged.revoke(Revocation { range, window: None }, &mut core::iter::empty()).unwrap()
}

/// Revokes all of `ranges`, which are in no window.
fn revoke_all(
    paged: &TableBackend<VtdSecondStage, impl InvalidationQueue + PhysTranslator + 'static>,
    ranges: impl IntoIterator<Item = IovaRange>,
) -> Result<Ticket, BackendError> {
    let mut ranges = ranges.into_iter().map(|range| Revocation { range, window: None });
    let first = ranges.next().expect("a range");
    paged.revoke(first, &mut ranges)
}

/// Waits for the ticket, to its deadline.
fn wait(
    paged: &TableBackend<VtdSecondStage, impl InvalidationQueue + PhysTranslator + 'static>,
    ticket: Ticket,
) -> Result<(), BackendError> {
    match paged.wait(ticket, Wait::ToDeadline) {
        Poll::Ready(waited) => waited,
        Poll::Pending => panic!("it has waited"),
    }
}

#[test]
fn scattered_memory_is_contiguous_for_the_device() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.map(at(16, 4), memory, RW, None).unwrap();
    for page in 0..4 {
        let found = paged.table.translate(Iova::new((16 + page) * PAGE)).unwrap();
        assert_eq!(found.phys.raw(), (memory.addr() as u64 + page * PAGE) << 1);
    }
    let ticket = revoke(&paged, at(16, 4));
    wait(&paged, ticket).unwrap();
    assert_eq!(paged.table.translate(Iova::new(16 * PAGE)), None);
}

/// A handle that maps memory next to what it mapped last asks the IOMMU nothing, until memory is
/// unregistered.
#[test]
fn an_extent_is_looked_up_once_per_generation() {
    let translator = Scattered::default();
    let (memory, cache) = (nowhere(3), LastExtent::new());
    let page = |n: usize| memory.part(n * 4096, 4096).unwrap();
    let phys = |n: u64| {
        PhysRange::new(PhysAddr::new((memory.addr() as u64 + n * PAGE) << 1), PAGE).unwrap()
    };
    for (n, lookups) in [(0, 1), (0, 1), (1, 2), (1, 2), (0, 3)] {
        assert_eq!(cache.run(&translator, page(n)), Ok(phys(n as u64)));
        assert_eq!(translator.looked_up.load(Ordering::SeqCst), lookups);
    }
    // The start decides: the run ends where the extent does, and the rest is another look-up.
    assert_eq!(cache.run(&translator, memory), Ok(phys(0)));
    translator.missing.lock().unwrap().insert(memory.addr());
    translator.generations.advance();
    assert!(matches!(cache.run(&translator, page(0)), Err(BackendError::NotRegistered { .. })));
    assert_eq!(translator.looked_up.load(Ordering::SeqCst), 4);
}

#[test]
fn a_run_begins_inside_its_extent() {
    let phys = PhysRange::new(PhysAddr::new(0x20_0000), 3 * PAGE).unwrap();
    let (memory, at) = (nowhere(2), nowhere(2).addr());
    let run =
        |addr| PhysExtent::new(addr, phys).run(memory).map(|run| (run.start().raw(), run.len()));
    assert_eq!(run(at), Some((0x20_0000, 2 * PAGE)), "no longer than the memory");
    assert_eq!(run(at - 4096), Some((0x20_1000, 2 * PAGE)));
    assert_eq!(run(at - 2 * 4096), Some((0x20_2000, PAGE)), "no longer than the extent");
    assert_eq!((run(at - 3 * 4096), run(at + 4096)), (None, None));
}

#[test]
fn a_map_that_fails_in_the_middle_is_taken_back_and_flushed() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.queue().missing.lock().unwrap().insert(memory.addr() + 2 * 4096);
    let error = paged.map(at(16, 4), memory, RW, None).unwrap_err();
    assert!(
        matches!(error, BackendError::NotRegistered { .. }) && !error.stays_reachable(),
        "{error}"
    );
    assert!((16..20).all(|page| paged.table.translate(Iova::new(page * PAGE)).is_none()));
    assert!(paged.stats().invalidations.waits > 0, "a device may have looked in between");
    paged.queue().missing.lock().unwrap().clear();
    paged.map(at(16, 4), memory, RW, None).unwrap();
}

#[test]
fn what_cannot_be_unmapped_is_reported() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(4);
    paged.queue().missing.lock().unwrap().insert(memory.addr() + 2 * 4096);
    paged.queue().hangs.store(true, Ordering::SeqCst);
    let error = paged.map(at(16, 4), memory, RW, None).unwrap_err();
    assert!(
        matches!(error, BackendError::RollbackIncomplete { flush: WaitError::TimedOut { .. }, .. }),
        "{error}"
    );
    assert!(error.stays_reachable());
}

#[test]
fn where_nothing_happened_nothing_is_flushed() {
    let paged = paged(8, Scattered::default());
    let memory = nowhere(2);
    paged.queue().missing.lock().unwrap().insert(memory.addr());
    assert!(matches!(
        paged.map(at(0, 2), memory, RW, None),
        Err(BackendError::NotRegistered { .. })
    ));
    let short = paged.map(at(16, 1), memory, RW, None);
    assert!(matches!(short, Err(BackendError::LengthsDiffer { .. })));
    assert!(revoke_all(&paged, [at(16, 1)]).is_err(), "nothing is mapped there");
    assert_eq!(paged.stats().invalidations.waits, 0);
}

#[test]
fn a_caching_iommu_is_flushed_after_maps_too() {
    let sink = Scattered { caches_not_present: true, ..Scattered::default() };
    let paged = paged(8, sink);
    paged.map(at(16, 1), nowhere(1), RW, None).unwrap();
    assert_eq!(paged.stats().invalidations.waits, 1);
    paged.queue().hangs.store(true, Ordering::SeqCst);
    let error = paged.map(at(32, 1), nowhere(1), RW, None).unwrap_err();
    assert!(error.stays_reachable(), "{error}");
    assert_eq!(paged.table.translate(Iova::new(32 * PAGE)), None);
}

/// As maps outside of pinned windows, although the usual case has a path of its own.
#[test]
fn a_map_in_a_pinned_window_is_checked_and_flushed() {
    let at = |first: u64, pages: u64| at(512 + first, pages);
    let plain = Arc::new(paged(16, Scattered::default()));
    let window = Arc::clone(&plain).window(at(0, 512)).unwrap();
    // The first of its pages is as long as the range by itself.
    let longer = plain.map(at(0, 1), nowhere(2), RW, Some(&window));
    assert!(matches!(longer, Err(BackendError::LengthsDiffer { .. })));
    assert_eq!(
        (plain.table.translate(at(0, 1).start()), plain.stats().invalidations.waits),
        (None, 0)
    );
    plain.map(at(0, 1), nowhere(1), RW, Some(&window)).unwrap();
    let again = plain.map(at(0, 1), nowhere(1), RW, Some(&window)).unwrap_err();
    assert!(matches!(again, BackendError::Table(TableError::AlreadyMapped { .. })), "{again}");
    assert!(
        plain.table.translate(at(0, 1).start()).is_some() && plain.stats().invalidations.waits == 0
    );

    let caching = paged(16, Scattered { caches_not_present: true, ..Scattered::default() });
    let caching = Arc::new(caching);
    let window = Arc::clone(&caching).window(at(0, 512)).unwrap();
    caching.map(at(0, 1), nowhere(1), RW, Some(&window)).unwrap();
    assert_eq!(caching.stats().invalidations.waits, 1);
    caching.queue().hangs.store(true, Ordering::SeqCst);
    let error = caching.map(at(1, 1), nowhere(1), RW, Some(&window)).unwrap_err();
    assert!(
        error.stays_reachable() && caching.table.translate(at(1, 1).start()).is_none(),
        "{error}"
    );
}

fn walked(pages: usize) -> TableBackend<VtdSecondStage, walker::Walker> {
    let (walker, table) = walker::Walker::new(pages);
    TableBackend::new("walked", walker, Table::new(table, 3).unwrap())
}

/// Hardware obeys the table, so memory that it maps stays registered until it is unmapped.
#[test]
fn memory_that_is_mapped_is_not_unregistered() {
    let backend = paged(8, Scattered { forgets: true, ..Scattered::default() });
    let submitted = || backend.queue().submitted.load(Ordering::SeqCst);
    let (memory, behind) = (nowhere(3), nowhere(4).part(3 << 12, 4096).unwrap());
    // SAFETY: nothing touches it.
    unsafe { backend.register_memory(nowhere(4)).unwrap() };
    backend.map(at(7, 1), memory.part(2 << 12, 4096).unwrap(), RW, None).unwrap();
    assert_eq!(backend.unregister_memory(memory), Err(BackendError::NotRevoked));
    assert_eq!(submitted(), 0, "the table says so");
    assert_eq!(backend.unregister_memory(memory.part(0, 2 << 12).unwrap()), Ok(()), "before it");
    assert_eq!(backend.unregister_memory(behind), Ok(()));
    let ticket = revoke(&backend, at(7, 1));
    wait(&backend, ticket).unwrap();
    let before = submitted();
    assert_eq!(backend.unregister_memory(memory), Ok(()));
    assert_eq!(submitted(), before + 1, "another thread may have cleared some of it");
    backend.queue().missing.lock().unwrap().insert(memory.addr());
    let unknown = BackendError::NotRegistered { addr: memory.addr(), len: memory.len() };
    assert_eq!(backend.unregister_memory(memory), Err(unknown));
}

/// However many ranges are revoked together, their ticket is that of the last flush of them all.
#[test]
fn the_ticket_of_a_revocation_covers_all_of_its_ranges() {
    for count in [1, 15, 16, 17, 32, 33, 48] {
        let paged = paged(8, Scattered { takes_polls: 3, ..Scattered::default() });
        paged.map(at(100, 1), nowhere(1), RW, None).unwrap(); // no table page is retired
        for page in 0..count {
            paged.map(at(page, 1), nowhere(1), RW, None).unwrap();
        }
        let ticket = revoke_all(&paged, (0..count).map(|page| at(page, 1))).unwrap();
        assert_eq!(
            (ticket, paged.invalidator.is_completed(ticket)),
            (Ticket(1), false),
            "{count} ranges"
        );
        wait(&paged, ticket).unwrap();
        assert_eq!(
            *paged.queue().batches.lock().unwrap(),
            [Flush { range: at(0, count), leaf_only: true }]
        );
    }
}

/// A rollback is complete only when its flush is.
#[test]
fn a_rollback_waits_for_its_flush() {
    let paged = paged(8, Scattered { takes_polls: 3, ..Scattered::default() });
    let memory = nowhere(2);
    paged.queue().missing.lock().unwrap().insert(memory.addr() + 4096);
    let error = paged.map(at(16, 2), memory, RW, None).unwrap_err();
    assert!(!error.stays_reachable(), "{error}");
    assert!(
        paged.invalidator.is_completed(Ticket(1)) && paged.invalidator.completed() == Ticket(1)
    );
    assert_eq!(paged.stats().invalidations.waited, 1);
}

/// In caching mode a map is complete only when its flush is; so are links, as an absent entry is
/// cached at any level.
#[test]
fn a_map_waits_for_its_flush_in_caching_mode() {
    let paged =
        paged(8, Scattered { caches_not_present: true, takes_polls: 3, ..Scattered::default() });
    paged.map(at(16, 1), nowhere(1), RW, None).unwrap();
    assert_eq!(paged.invalidator.completed(), Ticket(1));
    assert_eq!(
        *paged.queue().batches.lock().unwrap(),
        [Flush { range: at(16, 1), leaf_only: false }]
    );
}

/// A map whose flush misses its deadline is undone; if the undo completes, nothing stays reachable.
#[test]
fn a_map_that_is_not_announced_in_time_is_taken_back() {
    let paged =
        paged(8, Scattered { caches_not_present: true, takes_polls: 15, ..Scattered::default() });
    let error = paged.map(at(16, 1), nowhere(1), RW, None).unwrap_err();
    assert!(error.stays_reachable() && error.late_ticket() == Some(Ticket(2)), "{error}");
    assert_eq!(paged.table.translate(Iova::new(16 * PAGE)), None);
}

/// A flush is requested after the entries it covers have been cleared.
#[test]
fn what_is_revoked_is_cleared_before_its_flush() {
    let paged = walked(6);
    paged.map(at(16, 1), walker::page(1), RW, None).unwrap();
    assert_eq!(paged.queue().walk(16 * PAGE), Some(walker::page(1).addr() as u64));
    let ticket = revoke_all(&paged, [at(16, 1)]).unwrap();
    wait(&paged, ticket).unwrap();
    assert_eq!(paged.queue().found_present_by_any.load(Ordering::SeqCst), 0);
    assert_eq!(paged.queue().walk(16 * PAGE), None);
}

/// Each decision, taken wrongly, fails the test that is there for it.
#[test]
fn each_mistake_fails_its_test() {
    let tests: [(Mistake, fn()); 3] = [
        (
            Mistake::TablePageEarly,
            table_pages::table_pages_are_reclaimed_after_their_flush_and_not_before,
        ),
        (Mistake::FlushBeforeClear, what_is_revoked_is_cleared_before_its_flush),
        (Mistake::RollbackNotAwaited, a_rollback_waits_for_its_flush),
    ];
    for (mistake, test) in tests {
        known_bad::make(Some(mistake));
        let result = std::panic::catch_unwind(test);
        known_bad::make(None);
        assert!(result.is_err(), "{mistake:?} was not noticed");
        test();
    }
}

/// Two owners use one window after the other and there are three table pages for all of them, while
/// a device walks and holds on to a table page: it finds what is mapped in a window, or nothing,
/// and no owner lacks a page.
#[test]
fn stress_few_table_pages_are_reused_beside_a_walker() {
    let paged = walked(5);
    let rounds: u64 = if cfg!(debug_assertions) { 500 } else { 3_000 };
    crate::testing::scope(|scope| {
        let paged = &paged;
        for owner in 0..2 {
            scope.spawn(move || {
                for round in 0..rounds {
                    let window = (round % 4 * 2 + owner) * 512;
                    paged.map(at(window, 1), walker::page(window), RW, None).unwrap();
                    let ticket = revoke_all(paged, [at(window, 1)]).unwrap();
                    wait(paged, ticket).unwrap();
                }
            });
        }
        scope.spawn(move || {
            for window in (0..8u64).cycle().take(50_000).map(|window| window * 512) {
                let found = paged.queue().walk(window * PAGE);
                let mapped = walker::page(window).addr() as u64;
                assert!(found.is_none_or(|found| found == mapped), "{window}: {found:x?}");
            }
        });
    });
}

/// A flush takes effect after the entries that it covers have been cleared, also while other owners
/// submit.
#[test]
fn stress_a_flush_covers_cleared_entries_only() {
    let paged = walked(64);
    paged.map(at(511, 1), walker::page(0), RW, None).unwrap();
    crate::testing::scope(|scope| {
        for owner in 0..4u64 {
            let paged = &paged;
            scope.spawn(move || {
                for round in 0..2_000u64 {
                    let range = at(owner * 2 + round % 3 * 512, 1);
                    paged.map(range, walker::page(1), RW, None).unwrap();
                    let ticket = revoke_all(paged, [range]).unwrap();
                    wait(paged, ticket).unwrap();
                }
            });
        }
    });
    assert_eq!(paged.queue().found_present.load(core::sync::atomic::Ordering::Relaxed), 0);
}
