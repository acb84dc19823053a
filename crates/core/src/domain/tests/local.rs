//! An owner's handle: what it does besides what the domain does.

use super::*;
use crate::domain::window::WINDOW_BYTES;

fn pages(mock: &Mock) -> Vec<u64> {
    mock.pages.lock().keys().copied().collect()
}

#[test]
fn many_are_mapped_side_by_side_and_revoked_as_one_range() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mut local = domain.local();
    drop(local.map(Buf::new(3, &drops), ToDevice).unwrap());
    let payloads = [1, 2, 8, 1].map(|pages| Buf::new(pages, &drops));
    let mappings = local.map_many(payloads, FromDevice).unwrap();
    assert!(mappings.windows(2).all(|pair| pair[0].iova().end() == pair[1].iova().start()));
    let mut revoked = Vec::new();
    mock.ranges.store(0, Ordering::SeqCst);
    local.revoke_many(mappings, &mut revoked);
    assert_eq!(
        (mock.ranges.load(Ordering::SeqCst), revoked.len()),
        (1, 4),
        "neighbours are one range"
    );
    revoked.into_iter().for_each(|one| drop(local.wait(one).unwrap()));
    assert!(local.map_many::<Buf, _>([], FromDevice).unwrap().is_empty());
}

#[test]
fn a_batch_that_fails_in_the_middle_leaves_nothing_mapped() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let mut local = domain.local();
    let sizes = [2, 1, 9, 1, 3]; // the backend refuses 9 pages
    let failed =
        local.map_many(sizes.map(|pages| Buf::new(pages, &drops)), Bidirectional).unwrap_err();
    assert_eq!(failed.index, 2);
    assert!(matches!(failed.error, BackendError::NotRegistered { .. }));
    let back: Vec<_> =
        failed.payloads.iter().map(|payload| payload.memory().len() / PAGE).collect();
    assert_eq!(back, sizes);
    assert_eq!((pages(&mock), mock.flushes.load(Ordering::SeqCst)), (vec![], 1));
    let stats = domain.stats();
    assert_eq!((stats.live, stats.held_bytes, stats.maps, stats.unmaps), (0, 0, 2, 2));
    assert_eq!(drops.load(Ordering::SeqCst), 0);
}

/// In a space without a window, where the batch has a range of its own.
#[test]
fn what_a_refused_batch_has_not_used_of_its_range_returns() {
    let mock = Arc::new(Mock::default());
    set(&mock.obliging);
    let domain = Domain::new(Box::new(Arc::clone(&mock)), IovaSpace::new(20).unwrap());
    let drops = Arc::default();
    let mut local = domain.local();
    let sizes = [2, 1, 9, 1, 3]; // the backend refuses 9 pages
    let failed =
        local.map_many(sizes.map(|pages| Buf::new(pages, &drops)), Bidirectional).unwrap_err();
    assert_eq!(
        (failed.index, domain.space.iovas.stats().bytes_in_use, domain.stats().windows),
        (2, 0, 0)
    );
    let mappings =
        local.map_many([2, 1, 8].map(|pages| Buf::new(pages, &drops)), FromDevice).unwrap();
    assert!(mappings.windows(2).all(|pair| pair[0].iova().end() == pair[1].iova().start()));
    drop(mappings);
    assert_eq!(domain.space.iovas.stats().bytes_in_use, 0);
}

/// A rollback whose flush is late returns the others, and the domain holds those until it
/// completes.
#[test]
fn a_batch_whose_rollback_is_late_holds_what_was_mapped() {
    let (mock, domain, drops) = domain();
    let mut local = domain.local();
    let failed =
        local.map_many([2, 9, 3].map(|pages| Buf::new(pages, &drops)), FromDevice).unwrap_err();
    assert_eq!(failed.payloads.len(), 2);
    assert_eq!((domain.stats().deferred, domain.stats().deferred_bytes), (1, 2 * 4096));
    complete(&mock, Ticket(1));
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(domain.stats().held_bytes, 0);
}

#[test]
fn a_revocation_beyond_the_limit_waits() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    domain.set_held_limit(3 * 4096);
    let mut local = domain.local();
    let mut revoke = |pages| {
        let mapping = local.map(Buf::new(pages, &drops), FromDevice).unwrap();
        local.revoke(mapping)
    };
    let first = [revoke(2), revoke(1)];
    assert!(first.iter().all(|one| !one.is_quiesced()));
    assert_eq!((domain.stats().held_bytes, domain.stats().limited), (3 * 4096, 0));
    // Through the domain too: what all hold counts together.
    let third = domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke();
    assert!(third.is_quiesced());
    assert_eq!((domain.stats().held_bytes, domain.stats().limited), (4 * 4096, 1));
    drop((first, third));
    assert_eq!(domain.stats().held_bytes, 0);
    let mappings: Vec<_> =
        (0..4).map(|_| local.map(Buf::new(1, &drops), FromDevice).unwrap()).collect();
    let mut revoked = Vec::new();
    local.revoke_many(mappings, &mut revoked);
    assert!(revoked.iter().all(Revoked::is_quiesced));
    assert_eq!(domain.stats().limited, 2, "one wait for a batch");
    domain.set_held_limit(0);
    revoked.clear();
    let one = local.map(Buf::new(1, &drops), FromDevice).unwrap();
    assert!(local.revoke(one).is_quiesced());
}

/// What the domain holds for callers that no longer wait counts like what they hold.
#[test]
fn buffers_that_are_left_to_the_domain_count_against_the_limit() {
    let (mock, domain, drops) = domain();
    domain.set_held_limit(4 * 4096);
    let mut local = domain.local();
    for _ in 0..50 {
        let mapping = local.map(Buf::new(1, &drops), FromDevice).unwrap();
        let revoked = local.revoke(mapping);
        drop(local.wait_for(revoked, WaitLimit { time_ns: 0, polls: 0 }).unwrap_err());
    }
    let stats = domain.stats();
    assert_eq!((stats.held_bytes, stats.deferred_bytes, stats.limited), (0, 50 * 4096, 46));
    complete(&mock, Ticket(50));
    let mapping = local.map(Buf::new(1, &drops), FromDevice).unwrap();
    let revoked = local.revoke(mapping);
    assert_eq!((domain.stats().deferred_bytes, domain.stats().limited), (0, 46));
    drop(revoked);
}

/// A limit does not turn a late flush into a completed one.
#[test]
fn a_revocation_that_waits_in_vain_is_not_quiesced() {
    let (mock, domain, drops) = domain();
    domain.set_held_limit(0);
    let mut local = domain.local();
    let mapping = local.map(Buf::new(1, &drops), FromDevice).unwrap();
    let revoked = local.revoke(mapping);
    assert!(!revoked.is_quiesced());
    let revoked = local.poll(revoked).unwrap_err();
    complete(&mock, revoked.ticket());
    drop(local.poll(revoked).unwrap());
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn counts_of_owners_are_those_of_the_domain_also_when_they_are_gone() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let (mut first, mut second) = (domain.local(), domain.local());
    let (a, b) =
        (first.map(Buf::new(1, &drops), ToDevice), second.map(Buf::new(2, &drops), ToDevice));
    let revoked = second.revoke(a.unwrap()); // of another owner
    let stats = domain.stats();
    assert_eq!((stats.maps, stats.revokes, stats.live, stats.owners), (2, 1, 1, 2));
    assert_eq!((stats.windows, stats.held_bytes), (2, 4096));
    drop(first);
    assert_eq!(
        (domain.stats().windows, domain.stats().maps),
        (2, 2),
        "its window is that of its mapping"
    );
    drop(second.wait(revoked).unwrap());
    assert_eq!((domain.stats().windows, domain.stats().unmaps), (1, 1));
    drop((b, second));
    let stats = domain.stats();
    assert_eq!(
        (stats.maps, stats.unmaps, stats.owners, stats.windows, stats.held_bytes),
        (2, 2, 0, 0, 0)
    );
}

/// A window with a mapping that a device may reach for good is never returned.
#[test]
fn addresses_that_are_quarantined_stay_in_use() {
    let (mock, domain, drops) = domain();
    let mut local = domain.local();
    let mapping = local.map(Buf::new(1, &drops), FromDevice).unwrap();
    let at = mapping.iova();
    set(&mock.refuse_revoke);
    drop(mapping);
    drop(local);
    assert_eq!((domain.stats().quarantined, domain.stats().windows), (1, 1));
    assert!(domain.space.iovas.alloc_at(at).is_err());
}

/// What is found once is found again without a lookup, until it is unmapped.
#[test]
fn a_static_mapping_is_not_found_after_it_was_unmapped() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let arena = Buf::new(2, &drops);
    // SAFETY: unmapped below, before the memory is freed; no reference into it is made.
    let fixed = unsafe { domain.map_static(arena.memory(), Access::READ | Access::WRITE) }.unwrap();
    let part = |offset| Buf {
        base: arena.memory().part(offset, PAGE).unwrap().as_ptr(),
        layout: core::alloc::Layout::from_size_align(PAGE, PAGE).unwrap(),
        fixed: fixed.iova().start().checked_add(offset as u64).map(|at| (domain.id(), at)),
        drops: Arc::clone(&drops),
    };
    let parts = [0, PAGE, 0].map(part);
    let mut local = domain.local();
    let mut map = |buffer, fixed| {
        let mapping = local.map(buffer, FromDevice).unwrap();
        assert_eq!(mapping.is_fixed(), fixed);
        core::mem::forget(local.unmap(mapping).unwrap());
    };
    let [first, second, third] = parts;
    map(first, true);
    map(second, true);
    domain.unmap_static(fixed).unwrap();
    map(third, false);
    assert_eq!((domain.stats().maps_fixed, domain.stats().held_bytes), (2, 0));
}

/// A backend that panics while it maps or revokes: what a device may reach by then is neither
/// dropped nor reused.
#[test]
fn a_backend_that_panics_quarantines_what_it_was_given() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let panics = |call: &mut dyn FnMut()| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err()
    };
    let mut local = domain.local();
    let mapped: Vec<_> =
        (0..3).map(|_| local.map(Buf::new(1, &drops), FromDevice).unwrap()).collect();
    let one = local.map(Buf::new(1, &drops), FromDevice).unwrap();
    set(&mock.panics);
    assert!(panics(&mut || drop(local.map(Buf::new(1, &drops), FromDevice))));
    assert!(panics(&mut || drop(domain.map(Buf::new(1, &drops), FromDevice))));
    assert_eq!((domain.stats().quarantined, drops.load(Ordering::SeqCst)), (2, 0));
    let mut one = Some(one);
    assert!(panics(&mut || drop(local.revoke(one.take().unwrap()))));
    let (mut mapped, mut revoked) = (Some(mapped), Vec::new());
    assert!(panics(&mut || local.revoke_many(mapped.take().unwrap(), &mut revoked)));
    assert!(revoked.is_empty());
    mock.panics.store(false, Ordering::SeqCst);
    assert_eq!((domain.stats().quarantined, drops.load(Ordering::SeqCst)), (6, 0));
    assert_eq!((domain.stats().live, domain.stats().held_bytes), (0, 0));
    drop(local.map(Buf::new(1, &drops), FromDevice).unwrap());
    drop(local);
    assert_eq!(
        domain.space.iovas.stats().bytes_in_use,
        WINDOW_BYTES + 4096,
        "with their addresses"
    );
}
