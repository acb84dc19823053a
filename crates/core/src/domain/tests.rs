use super::*;
use crate::access::{Access, Bidirectional, FromDevice, ToDevice};
use crate::addr::{Iova, IovaRange};
use crate::invalidate::{Ticket, WaitError, WaitLimit};
use crate::iova::IovaSpace;
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

mod future;
mod local;
mod owned;
mod pieces;
mod stress;
mod windows;

const PAGE: usize = 4096;

/// A backend that is a map from pages to memory, and whose flushes a test completes.
#[derive(Default)]
struct Mock {
    pages: Mutex<BTreeMap<u64, (usize, Access)>>,
    last: AtomicU64,
    done: AtomicU64,
    flushes: AtomicU64,
    refuse_revoke: AtomicBool,
    stick: AtomicBool,
    /// Waiting completes what it waits for; else it times out.
    obliging: AtomicBool,
    /// The unit has failed for good.
    failed: AtomicBool,
    /// Panics instead of mapping or revoking.
    panics: AtomicBool,
    waits: AtomicU64,
    /// Ranges revoked.
    ranges: AtomicU64,
}

fn numbers(iova: IovaRange) -> core::ops::RangeInclusive<u64> {
    iova.start().raw() / 4096..=iova.last().raw() / 4096
}

impl Backend for Arc<Mock> {
    fn name(&self) -> &'static str {
        "mock"
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) {}
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError> {
        assert!(!self.panics.load(Ordering::SeqCst), "a backend");
        if self.stick.load(Ordering::SeqCst) {
            let flush = WaitError::TimedOut { ticket: Ticket(1), waited_ns: 0, polls: 0 };
            return Err(BackendError::RollbackIncomplete { iova, flush });
        }
        if memory.len() > 8 * PAGE {
            return Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() });
        }
        let mut pages = self.pages.lock();
        for (i, page) in numbers(iova).enumerate() {
            assert!(pages.insert(page, (memory.addr() + i * PAGE, access)).is_none(), "mapped twice");
        }
        Ok(())
    }
    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError> {
        if self.refuse_revoke.load(Ordering::SeqCst) {
            return Err(BackendError::NotRevoked);
        }
        assert!(!self.panics.load(Ordering::SeqCst), "a backend");
        let mut any = false;
        for page in ranges.inspect(|_| _ = self.ranges.fetch_add(1, Ordering::SeqCst)).flat_map(numbers) {
            any = true;
            assert!(self.pages.lock().remove(&page).is_some(), "not mapped");
        }
        self.flushes.fetch_add(u64::from(any), Ordering::SeqCst);
        Ok(if any { Ticket(self.last.fetch_add(1, Ordering::SeqCst) + 1) } else { Ticket::COMPLETED })
    }
    fn is_completed(&self, ticket: Ticket) -> bool {
        self.done.load(Ordering::SeqCst) >= ticket.0
    }
    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError> {
        self.waits.fetch_add(1, Ordering::SeqCst);
        if self.has_failed() && !self.is_completed(ticket) {
            return Err(WaitError::UnitFailed { ticket }.into());
        }
        if self.obliging.load(Ordering::SeqCst) {
            self.done.fetch_max(ticket.0, Ordering::SeqCst);
        }
        let flush = WaitError::TimedOut { ticket, waited_ns: 0, polls: 0 };
        if self.is_completed(ticket) { Ok(()) } else { Err(flush.into()) }
    }
    fn stats(&self) -> BackendStats {
        BackendStats::default()
    }
}

/// Pinned memory that counts its drops.
#[derive(Debug)]
struct Buf {
    base: NonNull<u8>,
    layout: core::alloc::Layout,
    fixed: Option<(DomainId, Iova)>,
    drops: Arc<AtomicUsize>,
}

// SAFETY: only `memory()` reaches the bytes.
unsafe impl Send for Buf {}
// SAFETY: the memory is allocated in `new`, owned, and freed on drop; no reference into it is made.
unsafe impl Pinned for Buf {
    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: see above.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        self.fixed.filter(|(fixed, _)| *fixed == domain).map(|(_, iova)| iova)
    }
}

impl Buf {
    fn new(pages: usize, drops: &Arc<AtomicUsize>) -> Self {
        let layout = core::alloc::Layout::from_size_align(pages * PAGE, PAGE).unwrap();
        // SAFETY: the tests ask for at least one page.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        Self { base, layout, fixed: None, drops: Arc::clone(drops) }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
        // SAFETY: from `alloc_zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

fn domain() -> (Arc<Mock>, Domain, Arc<AtomicUsize>) {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(Box::new(Arc::clone(&mock)), IovaSpace::new(39).unwrap());
    (mock, domain, Arc::default())
}

fn set(flag: &AtomicBool) {
    flag.store(true, Ordering::SeqCst);
}

#[test]
fn a_buffer_is_returned_when_its_ticket_has_completed_and_not_before() {
    let (mock, domain, drops) = domain();
    let mapped = domain.map(Buf::new(2, &drops), FromDevice).unwrap();
    let (iova, addr) = (mapped.iova(), mapped.memory().addr());
    assert_eq!(mock.pages.lock()[&(iova.start().raw() / 4096)], (addr, Access::WRITE));
    let revoked = mapped.revoke();
    assert!(mock.pages.lock().is_empty());
    let revoked = revoked.poll().expect_err("its ticket is not done");
    let other = domain.map(Buf::new(2, &drops), ToDevice).unwrap();
    assert!(!other.iova().overlaps(&iova), "its addresses are held");
    mock.done.store(revoked.ticket().0, Ordering::SeqCst);
    let back = revoked.poll().unwrap();
    assert_eq!((back.memory().addr(), drops.load(Ordering::SeqCst)), (addr, 0));
    set(&mock.obliging);
    drop(other.unmap().unwrap());
    let stats = domain.stats();
    assert_eq!((stats.maps, stats.revokes, stats.unmaps, stats.live, stats.quarantined), (2, 2, 2, 0, 0));
}

#[test]
fn dropping_a_mapping_waits_and_frees() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap());
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke());
    assert_eq!(drops.load(Ordering::SeqCst), 2);
    assert_eq!(domain.stats().unmaps, 2);
}

fn complete(mock: &Mock, ticket: Ticket) {
    mock.done.store(ticket.0, Ordering::SeqCst);
}

#[test]
fn a_wait_past_its_deadline_returns_the_revoked_which_can_be_waited_for_again() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    let ticket = revoked.ticket();
    let refused = revoked.wait().unwrap_err();
    assert!(matches!(refused.error, BackendError::Flush(WaitError::TimedOut { .. })));
    let revoked = refused.revoked.expect("nothing is quarantined by a wait");
    let longer = WaitLimit { time_ns: 1, polls: 1 };
    let revoked = revoked.wait_for(longer).unwrap_err().revoked.unwrap();
    let stats = domain.stats();
    assert_eq!((stats.quarantined, stats.deferred, stats.unmaps), (0, 0, 0));
    complete(&mock, ticket);
    drop(revoked.wait().unwrap());
    assert_eq!((drops.load(Ordering::SeqCst), domain.stats().unmaps), (1, 1));
}

#[test]
fn what_is_dropped_past_its_deadline_is_held_until_its_flush_completes() {
    let (mock, domain, drops) = domain();
    let empty = domain.iovas.stats();
    let first = domain.map(Buf::new(1, &drops), Bidirectional).unwrap();
    let second = domain.map(Buf::new(2, &drops), Bidirectional).unwrap();
    let held = [first.iova(), second.iova()];
    assert!(matches!(first.unmap(), Err(BackendError::Flush(WaitError::TimedOut { .. }))));
    drop(second);
    let waits = mock.waits.load(Ordering::SeqCst);
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke().wait()); // and so is this one
    assert_eq!(mock.waits.load(Ordering::SeqCst) - waits, 1, "a drop after a wait waits no more");
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.deferred_bytes, stats.quarantined), (3, 4 * 4096, 0));
    let other = domain.map(Buf::new(1, &drops), Bidirectional).unwrap();
    assert!(held.iter().all(|held| !held.overlaps(&other.iova())), "the addresses are held as well");
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    complete(&mock, Ticket(1));
    set(&mock.obliging); // `other` is last: its flush has completed when the others have
    let revoked = other.revoke();
    assert_eq!(drops.load(Ordering::SeqCst), 1, "a revocation checks whether the first has completed");
    drop(revoked.wait().unwrap());
    assert_eq!(domain.release_late(), 0);
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, stats.unmaps, stats.live), (0, 0, 4, 0));
    assert_eq!((drops.load(Ordering::SeqCst), domain.iovas.stats()), (4, empty));
}

#[test]
fn what_is_late_when_the_unit_fails_is_quarantined() {
    let (mock, domain, drops) = domain();
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap());
    let other = domain.map(Buf::new(2, &drops), Bidirectional).unwrap().revoke();
    set(&mock.failed);
    let refused = other.wait().unwrap_err();
    assert!(refused.revoked.is_none() && !matches!(refused.error, BackendError::NotRevoked));
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, stats.quarantined_bytes), (0, 2, 3 * 4096));
    complete(&mock, Ticket(2));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 0), "never released");
}

#[test]
fn what_is_late_when_the_domain_is_dropped_is_quarantined() {
    let (mock, domain, drops) = domain();
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap());
    drop(domain.map(Buf::new(1, &drops), Bidirectional).unwrap());
    complete(&mock, Ticket(1));
    drop(domain);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_map_whose_rollback_is_late_gives_its_buffer_back_in_the_end() {
    let (mock, domain, drops) = domain();
    let empty = domain.iovas.stats();
    set(&mock.stick);
    let stuck = domain.map(Buf::new(1, &drops), Bidirectional).unwrap_err();
    assert!(stuck.payload.is_none());
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    complete(&mock, Ticket(1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(domain.iovas.stats(), empty);
}

#[test]
fn what_cannot_be_revoked_is_never_released() {
    let (mock, domain, drops) = domain();
    let mapped = domain.map(Buf::new(1, &drops), Bidirectional).unwrap();
    set(&mock.refuse_revoke);
    set(&mock.obliging);
    let revoked = mapped.revoke();
    assert_eq!(revoked.ticket(), Ticket::NEVER);
    let revoked = revoked.poll().expect_err("never");
    assert!(matches!(revoked.wait(), Err(NotQuiesced { revoked: None, error: BackendError::NotRevoked })));
    assert_eq!((drops.load(Ordering::SeqCst), domain.stats().quarantined), (0, 1));
}

#[test]
fn a_refused_map_gives_the_payload_back_and_changes_nothing() {
    let (mock, domain, drops) = domain();
    let before = domain.iovas.stats();
    let refused = domain.map(Buf::new(9, &drops), Bidirectional).unwrap_err();
    assert!(refused.payload.is_some());
    assert!(matches!(refused.error, BackendError::NotRegistered { .. }));
    assert_eq!(domain.iovas.stats(), before);
    set(&mock.stick);
    let stuck = domain.map(Buf::new(1, &drops), Bidirectional).unwrap_err();
    assert!(stuck.payload.is_none(), "a device may reach it");
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    assert_eq!(domain.iovas.stats().bytes_in_use, before.bytes_in_use + 4096);
}

#[test]
fn many_are_revoked_with_one_flush() {
    let (mock, domain, drops) = domain();
    let mapped: Vec<_> = (0..100).map(|_| domain.map(Buf::new(1, &drops), Bidirectional).unwrap()).collect();
    let mut revoked = Vec::with_capacity(100);
    domain.revoke_all(mapped, &mut revoked);
    assert_eq!(mock.flushes.load(Ordering::SeqCst), 1);
    assert!(revoked.iter().all(|r| r.ticket() == Ticket(1) && !r.is_quiesced()));
    mock.done.store(1, Ordering::SeqCst);
    assert!(revoked.into_iter().all(|r| r.poll().is_ok()));
    assert_eq!(domain.stats().revokes, 100);
}

#[test]
fn what_is_mapped_for_life_needs_no_table_work_but_only_where_it_is() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let arena = Buf::new(8, &drops);
    // SAFETY: `arena` outlives the mapping, and no reference into it is made.
    let whole = unsafe { domain.map_static(arena.memory(), Access::READ | Access::WRITE) }.unwrap();
    let at = whole.iova();
    let of = |id, pages, offset, claim| Buf {
        base: arena.memory().part(offset, PAGE).unwrap().as_ptr(),
        layout: core::alloc::Layout::from_size_align(pages * PAGE, PAGE).unwrap(),
        fixed: at.start().checked_add(claim).map(|at| (id, at)),
        drops: Arc::clone(&drops),
    };
    let inside = |pages, offset, claim| of(domain.id(), pages, offset, claim);
    let mapped = domain.map(inside(2, 4096, 4096), FromDevice).unwrap();
    assert!(mapped.is_fixed());
    assert_eq!(mapped.iova(), at.part(4096, 8192).unwrap());
    let revoked = mapped.revoke();
    assert!(revoked.is_quiesced());
    core::mem::forget(revoked.wait().unwrap());
    assert_eq!(mock.flushes.load(Ordering::SeqCst), 0);
    // A claim from outside this domain is not trusted: the memory is mapped anew.
    let mapped = domain.map(inside(1, 4096, 8192), FromDevice).unwrap();
    assert!(!mapped.is_fixed() && !mapped.iova().overlaps(&at));
    core::mem::forget(mapped.unmap().unwrap());
    // Nor is one that is right by chance: another domain chose the same address.
    let mapped = domain.map(of(DomainId::next(), 1, 4096, 4096), FromDevice).unwrap();
    assert!(!mapped.is_fixed() && !mapped.iova().overlaps(&at));
    core::mem::forget(mapped.unmap().unwrap());
    assert_eq!(domain.stats().static_mappings, 1);
    domain.unmap_static(whole).unwrap();
    assert!(mock.pages.lock().is_empty());
}

/// What is mapped for reads alone does not serve a mapping for writes.
#[test]
fn what_is_mapped_for_life_counts_for_its_access_only() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let buf = Buf::new(1, &drops);
    // SAFETY: unmapped below, before the memory is freed; no reference into it is made.
    let fixed = unsafe { domain.map_static(buf.memory(), Access::READ) }.unwrap();
    let at = fixed.iova().start();
    assert!(domain.static_at(at, buf.memory(), Access::READ).is_some());
    assert_eq!(domain.static_at(at, buf.memory(), Access::WRITE), None);
    assert_eq!(domain.static_at(at, buf.memory(), Access::READ | Access::WRITE), None);
    domain.unmap_static(fixed).unwrap();
}

#[test]
fn a_reserved_range_is_filled_piece_by_piece() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let arena = Buf::new(4, &drops);
    let empty = domain.iovas.stats();
    let place = domain.reserve_iova(4 * 4096, 4096).unwrap();
    let range = place.range();
    let piece = range.part(8192, 4096).unwrap();
    let memory = arena.memory().part(8192, PAGE).unwrap();
    // SAFETY: `arena` outlives the mapping, and no reference into it is made.
    let mapping = unsafe { domain.map_at(&place, piece, memory, Access::READ) }.unwrap();
    assert_eq!((mapping.iova(), mock.pages.lock().len()), (piece, 1));
    assert!(!domain.map(Buf::new(4, &drops), Bidirectional).unwrap().iova().overlaps(&range));
    // As long as something is mapped in it, the range is not released.
    drop(place);
    assert_eq!(domain.iovas.stats().bytes_in_use, empty.bytes_in_use + range.len());
    domain.unmap_static(mapping).unwrap();
    assert_eq!(domain.iovas.stats(), empty);
}

/// Ranges are unmapped and released by what owns them: not by number, not twice, and not through another domain.
#[test]
fn a_range_of_another_domain_is_refused() {
    let (mock, domain, drops) = domain();
    let (other_mock, other, _) = self::domain();
    set(&mock.obliging);
    set(&other_mock.obliging);
    let arena = Buf::new(1, &drops);
    let place = other.reserve_iova(4096, 4096).unwrap();
    let map = |domain: &Domain, iova| {
        // SAFETY: `arena` outlives the mapping, and no reference into it is made.
        unsafe { domain.map_at(&place, iova, arena.memory(), Access::READ) }
    };
    let iova = place.range();
    assert!(matches!(map(&domain, iova), Err(BackendError::NotReserved { .. })));
    let beside = IovaRange::new(Iova::new(iova.end().raw()), 4096).unwrap();
    assert!(matches!(map(&other, beside), Err(BackendError::NotReserved { .. })));
    let mapping = map(&other, iova).unwrap();
    assert_eq!(domain.unmap_static(mapping), Err(BackendError::NotRevoked));
    assert_eq!((mock.flushes.load(Ordering::SeqCst), other_mock.pages.lock().len()), (0, 1));
}

/// Addresses behind which a device may reach something are not released.
#[test]
fn a_range_that_may_be_reached_is_kept() {
    let (mock, domain, drops) = domain();
    let arena = Buf::new(1, &drops);
    let place = domain.reserve_iova(4096, 4096).unwrap();
    let in_use = domain.iovas.stats().bytes_in_use;
    set(&mock.stick);
    // SAFETY: `arena` outlives the mapping, and no reference into it is made.
    let stuck = unsafe { domain.map_at(&place, place.range(), arena.memory(), Access::READ) };
    assert!(stuck.unwrap_err().stays_reachable());
    drop(place);
    assert_eq!(domain.iovas.stats().bytes_in_use, in_use);
    // And so are those of a mapping whose flush was not seen to complete, or that was forgotten.
    mock.stick.store(false, Ordering::SeqCst);
    for forget in [false, true] {
        // SAFETY: as above.
        let mapping = unsafe { domain.map_static(arena.memory(), Access::READ) }.unwrap();
        if forget {
            drop(mapping);
        } else {
            assert!(domain.unmap_static(mapping).is_err());
        }
    }
    assert_eq!(domain.iovas.stats().bytes_in_use, in_use + 2 * 4096);
}

#[derive(Clone, Debug)]
enum Step {
    Map(usize),
    Revoke(usize),
    RevokeAll,
    Unmap(usize),
    Poll(usize),
    DropMapped(usize),
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1usize..10).prop_map(Step::Map),
        2 => any::<usize>().prop_map(Step::Revoke),
        1 => Just(Step::RevokeAll),
        1 => any::<usize>().prop_map(Step::Unmap),
        3 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::DropMapped),
        2 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_domain_agrees_with_lists_of_what_is_mapped_and_held(steps in steps()) {
        let (mock, domain, drops) = domain();
        set(&mock.obliging);
        let empty = domain.iovas.stats();
        let (mut mapped, mut revoked) = (Vec::new(), Vec::new());
        let mut made = 0usize;
        for step in steps {
            match step {
                Step::Map(pages) => match domain.map(Buf::new(pages, &drops), Bidirectional) {
                    Ok(one) => { made += 1; prop_assert!(pages <= 8); mapped.push(one); }
                    Err(refused) => { made += 1; prop_assert!(pages > 8 && refused.payload.is_some()); }
                },
                Step::Revoke(i) if !mapped.is_empty() => {
                    revoked.push(mapped.swap_remove(i % mapped.len()).revoke());
                }
                Step::RevokeAll => domain.revoke_all(mapped.drain(..), &mut revoked),
                Step::Unmap(i) if !mapped.is_empty() => {
                    prop_assert!(mapped.swap_remove(i % mapped.len()).unmap().is_ok());
                }
                Step::Poll(i) if !revoked.is_empty() => {
                    let one = revoked.swap_remove(i % revoked.len());
                    let done = mock.done.load(Ordering::SeqCst) >= one.ticket().0;
                    match one.poll() {
                        Ok(_) => prop_assert!(done),
                        Err(held) => { prop_assert!(!done); revoked.push(held); }
                    }
                }
                Step::DropMapped(i) if !mapped.is_empty() => drop(mapped.swap_remove(i % mapped.len())),
                Step::Complete => { mock.done.store(mock.last.load(Ordering::SeqCst), Ordering::SeqCst); }
                _ => {}
            }
            // What the table says is what is mapped, no more and no less ...
            let table: Vec<u64> = mock.pages.lock().keys().copied().collect();
            let mut model: Vec<u64> = mapped.iter().flat_map(|m| numbers(m.iova())).collect();
            model.sort_unstable();
            prop_assert_eq!(table, model);
            // ... no address is given out twice while it is mapped or held ...
            let ranges = mapped.iter().map(Mapping::iova).chain(revoked.iter().map(Revoked::iova));
            let mut pages: Vec<u64> = ranges.flat_map(numbers).collect();
            let held = pages.len();
            pages.sort_unstable();
            pages.dedup();
            prop_assert_eq!(pages.len(), held);
            prop_assert_eq!(domain.iovas.stats().bytes_in_use, held as u64 * 4096);
            // ... and no buffer is lost.
            prop_assert_eq!(drops.load(Ordering::SeqCst), made - mapped.len() - revoked.len());
            prop_assert_eq!(domain.stats().live, mapped.len() as u64);
        }
        drop((mapped, revoked));
        prop_assert_eq!(drops.load(Ordering::SeqCst), made);
        prop_assert_eq!(domain.iovas.stats(), empty);
    }
}
