use super::*;
use crate::access::{Access, Bidirectional, FromDevice, ToDevice};
use crate::addr::{Iova, IovaRange};
use crate::invalidate::{Ticket, WaitError, WaitLimit};
use crate::iova::IovaSpace;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::task::Poll;
use std::sync::Arc;

mod future;
mod late;
mod map;
mod mock;
mod model;
mod owner;
mod watch;
mod windows;

use mock::{Buf, Mock, complete, domain, numbers};

const PAGE: usize = 4096;

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
    assert_eq!(
        (stats.maps, stats.revokes, stats.unmaps, stats.live, stats.quarantined),
        (2, 2, 2, 0, 0)
    );
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
    let empty = domain.space.iovas.stats();
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
    assert!(
        held.iter().all(|held| !held.overlaps(&other.iova())),
        "the addresses are held as well"
    );
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    complete(&mock, Ticket(1));
    set(&mock.obliging); // `other` is last: its flush has completed when the others have
    let revoked = other.revoke();
    assert_eq!(
        drops.load(Ordering::SeqCst),
        1,
        "a revocation checks whether the first has completed"
    );
    drop(revoked.wait().unwrap());
    assert_eq!(domain.release_late(), 0);
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, stats.unmaps, stats.live), (0, 0, 4, 0));
    assert_eq!((drops.load(Ordering::SeqCst), domain.space.iovas.stats()), (4, empty));
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

/// A backend that forgets the domain's waker: what has completed is freed with the domain, the rest
/// is leaked and counted.
#[test]
fn what_is_late_when_the_domain_ends_is_quarantined() {
    let (mock, domain, drops) = domain();
    for pages in [1, 2, 4] {
        drop(domain.map(Buf::new(pages, &drops), Bidirectional).unwrap());
    }
    drop(std::mem::take(&mut *mock.wakers.lock()));
    let quarantined = quarantined_bytes();
    mock.done.store(1, Ordering::SeqCst);
    drop(domain);
    assert_eq!((Arc::strong_count(&mock), drops.load(Ordering::SeqCst)), (1, 1));
    assert!(quarantined_bytes() >= quarantined + 6 * 4096);
}

#[test]
fn a_map_whose_rollback_is_late_gives_its_buffer_back_in_the_end() {
    let (mock, domain, drops) = domain();
    let empty = domain.space.iovas.stats();
    set(&mock.stick);
    let stuck = domain.map(Buf::new(1, &drops), Bidirectional).unwrap_err();
    assert!(stuck.payload.is_none());
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    complete(&mock, Ticket(1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(domain.space.iovas.stats(), empty);
    assert_eq!((domain.stats().maps, domain.stats().unmaps, domain.stats().refused), (0, 0, 1));
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
    assert!(matches!(
        revoked.wait(),
        Err(NotQuiesced { revoked: None, error: BackendError::NotRevoked })
    ));
    assert_eq!((drops.load(Ordering::SeqCst), domain.stats().quarantined), (0, 1));
}

#[test]
fn a_refused_map_gives_the_payload_back_and_changes_nothing() {
    let (mock, domain, drops) = domain();
    let before = domain.space.iovas.stats();
    let refused = domain.map(Buf::new(9, &drops), Bidirectional).unwrap_err();
    assert!(refused.payload.is_some());
    assert!(matches!(refused.error, BackendError::NotRegistered { .. }));
    assert_eq!(domain.space.iovas.stats(), before);
    set(&mock.stick);
    let stuck = domain.map(Buf::new(1, &drops), Bidirectional).unwrap_err();
    assert!(stuck.payload.is_none(), "a device may reach it");
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    assert_eq!(domain.space.iovas.stats().bytes_in_use, before.bytes_in_use + 4096);
}

#[test]
fn many_are_revoked_with_one_flush() {
    let (mock, domain, drops) = domain();
    let mapped: Vec<_> =
        (0..100).map(|_| domain.map(Buf::new(1, &drops), Bidirectional).unwrap()).collect();
    let mut revoked = Vec::with_capacity(100);
    domain.revoke_many(mapped, &mut revoked);
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

/// A static mapping for reads alone does not serve a mapping for writes.
#[test]
fn what_is_mapped_for_life_counts_for_its_access_only() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let buf = Buf::new(1, &drops);
    // SAFETY: unmapped below, before the memory is freed; no reference into it is made.
    let fixed = unsafe { domain.map_static(buf.memory(), Access::READ) }.unwrap();
    let at = fixed.iova().start();
    assert!(domain.space.statics.find(at, buf.memory(), Access::READ).is_some());
    assert_eq!(domain.space.statics.find(at, buf.memory(), Access::WRITE), None);
    assert_eq!(domain.space.statics.find(at, buf.memory(), Access::READ | Access::WRITE), None);
    domain.unmap_static(fixed).unwrap();
}

#[test]
fn a_reserved_range_is_filled_piece_by_piece() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let arena = Buf::new(4, &drops);
    let empty = domain.space.iovas.stats();
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
    assert_eq!(domain.space.iovas.stats().bytes_in_use, empty.bytes_in_use + range.len());
    domain.unmap_static(mapping).unwrap();
    assert_eq!(domain.space.iovas.stats(), empty);
}

#[test]
fn a_range_is_reserved_up_to_a_limit() {
    let (_, domain, _) = domain();
    let empty = domain.space.iovas.stats();
    let above = domain.reserve_iova(4096, 4096).unwrap().range();
    let limit = Iova::new(0x3fff);
    assert!(above.last() > limit);
    let low = domain.reserve_iova_up_to(2 * 4096, 8192, limit).unwrap();
    assert!(low.range().last() <= limit && low.range().start().raw().is_multiple_of(8192));
    let other = domain.reserve_iova_up_to(4096, 4096, limit).unwrap();
    assert!(!other.range().overlaps(&low.range()) && other.range().last() <= limit);
    // Page 0 is not allocated.
    assert!(domain.reserve_iova_up_to(4096, 4096, limit).is_err());
    drop((low, other));
    assert_eq!(domain.space.iovas.stats(), empty);
}

/// Ranges are unmapped and released by what owns them: not by number, not twice, and not through
/// another domain.
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
    let iova = mapping.iova();
    let refused = domain.unmap_static(mapping).unwrap_err();
    assert_eq!(refused.error, BackendError::OtherDomain { iova });
    assert_eq!((mock.flushes.load(Ordering::SeqCst), other_mock.pages.lock().len()), (0, 1));
    // It is as before: its own domain unmaps it.
    other.unmap_static(refused.mapping.unwrap()).unwrap();
    assert!(other_mock.pages.lock().is_empty());
}

/// Addresses behind which a device may reach something are not released.
#[test]
fn a_range_that_may_be_reached_is_kept() {
    let (mock, domain, drops) = domain();
    let arena = Buf::new(1, &drops);
    let place = domain.reserve_iova(4096, 4096).unwrap();
    let in_use = domain.space.iovas.stats().bytes_in_use;
    set(&mock.stick);
    // SAFETY: `arena` outlives the mapping, and no reference into it is made.
    let stuck = unsafe { domain.map_at(&place, place.range(), arena.memory(), Access::READ) };
    assert!(stuck.unwrap_err().stays_reachable());
    drop(place);
    assert_eq!(domain.space.iovas.stats().bytes_in_use, in_use);
    // And so are those of a mapping whose flush was not seen to complete, or that was forgotten.
    mock.stick.store(false, Ordering::SeqCst);
    for forget in [false, true] {
        // SAFETY: as above.
        let mapping = unsafe { domain.map_static(arena.memory(), Access::READ) }.unwrap();
        if forget {
            drop(mapping);
        } else {
            assert!(domain.unmap_static(mapping).unwrap_err().mapping.is_none());
        }
    }
    assert_eq!(domain.space.iovas.stats().bytes_in_use, in_use + 2 * 4096);
}
