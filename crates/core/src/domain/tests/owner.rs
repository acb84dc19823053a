//! Handles that own what they refer to, and what an owner's handle does besides the domain.

use super::*;
use crate::domain::window::WINDOW_BYTES;
use crate::mem::DmaMemory;
use core::time::Duration;

fn shared() -> (Arc<Mock>, Domain, Arc<AtomicUsize>) {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    (mock, domain, drops)
}

/// The backend holds the second reference to the mock.
fn is_domain_alive(mock: &Arc<Mock>) -> bool {
    Arc::strong_count(mock) > 1
}

struct Driver {
    domain: Domain,
    owner: DomainLocal,
    ring: Vec<Mapping<Buf, FromDevice>>,
    revoked: Vec<Revoked<Buf>>,
}

fn driver(domain: Domain, drops: &Arc<AtomicUsize>) -> Driver {
    let mut owner = domain.local();
    let ring = (0..4).map(|_| owner.map(Buf::new(1, drops), FromDevice).unwrap()).collect();
    let revoked = vec![owner.map(Buf::new(1, drops), ToDevice).unwrap().revoke()];
    Driver { domain, owner, ring, revoked }
}

#[test]
fn a_driver_that_owns_domain_and_mappings_drops_in_any_order_on_any_thread() {
    for last in 0..4 {
        let (mock, domain, drops) = shared();
        let driver = driver(domain, &drops);
        std::thread::spawn(move || {
            let Driver { domain, owner, ring, revoked } = driver;
            let mut parts: Vec<Box<dyn core::any::Any>> =
                vec![Box::new(domain), Box::new(owner), Box::new(ring), Box::new(revoked)];
            let kept = parts.swap_remove(last);
            drop(parts);
            drop(kept);
        })
        .join()
        .unwrap();
        assert!(mock.pages.lock().is_empty());
        assert_eq!((drops.load(Ordering::SeqCst), is_domain_alive(&mock)), (5, false));
    }
}

#[test]
fn mappings_outlive_every_handle_and_keep_the_domain_alive() {
    let (mock, domain, drops) = shared();
    let Driver { ring, .. } = driver(domain, &drops);
    assert_eq!((is_domain_alive(&mock), mock.pages.lock().len()), (true, 4));
    for mapping in ring {
        assert!(is_domain_alive(&mock));
        drop(mapping.unmap().unwrap());
    }
    assert_eq!((drops.load(Ordering::SeqCst), is_domain_alive(&mock)), (5, false));
}

#[test]
fn an_owner_maps_revokes_and_returns_buffers_as_the_domain_does() {
    let (mock, domain, drops) = shared();
    let mut owner = domain.local();
    let mapping = owner.map(Buf::new(1, &drops), Bidirectional).unwrap();
    drop(owner.unmap(mapping).unwrap());
    let mappings: Vec<_> =
        (0..3).map(|_| owner.map(Buf::new(1, &drops), Bidirectional).unwrap()).collect();
    let mut revoked = Vec::new();
    owner.revoke_many(mappings, &mut revoked);
    assert_eq!(mock.flushes.load(Ordering::SeqCst), 2);
    let held = owner.poll(revoked.pop().unwrap()).unwrap_err();
    drop(owner.wait(held).unwrap());
    drop(owner.poll(revoked.pop().unwrap()).unwrap());
    let limit = WaitLimit { time_ns: 1, polls: 1 };
    drop(owner.wait_for(revoked.pop().unwrap(), limit).unwrap());
    assert!(owner.map(Buf::new(9, &drops), Bidirectional).unwrap_err().payload.is_some());
    let stats = owner.domain().stats();
    assert_eq!((stats.maps, stats.unmaps, stats.live), (4, 4, 0));
    drop((owner, domain));
    assert!(!is_domain_alive(&mock));
}

/// One wait for a batch: what is quiesced is returned, what is late is returned to be waited for
/// again, and what never completes is quarantined. Each says so for its own ticket.
#[test]
fn a_batch_is_waited_for_with_one_deadline() {
    let (mock, domain, drops) = shared();
    mock.obliging.store(false, Ordering::SeqCst);
    let mut owner = domain.local();
    let revoke = |owner: &mut DomainLocal| {
        let mapping = owner.map(Buf::new(1, &drops), Bidirectional).unwrap();
        owner.revoke(mapping)
    };
    let mut revoked: Vec<_> = (0..4).map(|_| revoke(&mut owner)).collect();
    mock.refuse_revoke.store(true, Ordering::SeqCst);
    revoked.push(revoke(&mut owner));
    mock.refuse_revoke.store(false, Ordering::SeqCst);
    mock.done.store(2, Ordering::SeqCst);
    let limit = WaitLimit::within(Duration::from_nanos(1));
    let mut late = Vec::new();
    for (n, outcome) in owner.wait_many_for(revoked, limit).enumerate() {
        match outcome {
            Ok(_) => assert!(n < 2),
            Err(NotQuiesced { revoked: Some(one), error }) => {
                assert_eq!(
                    (one.ticket().0, error.late_ticket()),
                    (n as u64 + 1, Some(one.ticket()))
                );
                late.push(one);
            }
            Err(NotQuiesced { revoked: None, error }) => {
                assert_eq!((n, error), (4, BackendError::NotRevoked));
            }
        }
    }
    assert_eq!(
        (late.len(), mock.waits.load(Ordering::SeqCst), drops.load(Ordering::SeqCst)),
        (2, 1, 2)
    );
    mock.done.store(3, Ordering::SeqCst);
    mock.failed.store(true, Ordering::SeqCst);
    let mut outcomes = owner.wait_many_for(late, limit);
    drop(outcomes.next().unwrap().unwrap());
    let failed = outcomes.next().unwrap().unwrap_err();
    let expected = BackendError::Flush(WaitError::UnitFailed { ticket: Ticket(4) });
    assert!(failed.revoked.is_none() && failed.error == expected && outcomes.next().is_none());
    drop(outcomes);
    assert_eq!((owner.domain().stats().quarantined, drops.load(Ordering::SeqCst)), (2, 3));
}

#[test]
fn an_owner_asks_once_about_tickets_that_have_completed() {
    let (mock, domain, drops) = domain();
    let mut owner = domain.local();
    let revoke = |owner: &mut DomainLocal| {
        let mapping = owner.map(Buf::new(1, &drops), FromDevice).unwrap();
        owner.revoke(mapping)
    };
    let [first, second, third, fourth] = core::array::from_fn(|_| revoke(&mut owner));
    let waits = || mock.waits.load(Ordering::SeqCst);
    complete(&mock, second.ticket());
    owner.wait(second).unwrap();
    assert_eq!(waits(), 1);
    owner.wait(first).unwrap();
    assert_eq!(waits(), 1, "an earlier ticket");
    let third = owner.wait(third).unwrap_err().revoked.unwrap();
    assert_eq!(waits(), 2, "a later ticket");
    let fourth = owner.poll(fourth).unwrap_err();
    complete(&mock, fourth.ticket());
    owner.poll(fourth).unwrap();
    owner.wait(third).unwrap();
    assert_eq!(waits(), 2, "a ticket before that of a poll");
    // Even if the backend calls it completed, as it does here, `NEVER` is not remembered.
    set(&mock.refuse_revoke);
    let refused = revoke(&mut owner);
    mock.refuse_revoke.store(false, Ordering::SeqCst);
    let done = mock.done.swap(u64::MAX, Ordering::SeqCst);
    owner.poll(refused).unwrap();
    mock.done.store(done, Ordering::SeqCst);
    let fifth = revoke(&mut owner);
    let fifth = owner.poll(fifth).unwrap_err();
    complete(&mock, fifth.ticket());
}

#[test]
fn what_belongs_to_another_domain_is_revoked_there() {
    let ((mock, domain, drops), (other_mock, other, _)) = (shared(), shared());
    let (mut owner, mut other_owner) = (domain.local(), other.local());
    let mapping = other_owner.map(Buf::new(1, &drops), Bidirectional).unwrap();
    let revoked_alone = other_owner.map(Buf::new(1, &drops), Bidirectional).unwrap();
    drop(owner.unmap(mapping).unwrap());
    let mut revoked = Vec::new();
    owner.revoke_many([revoked_alone], &mut revoked);
    assert_eq!(revoked[0].ticket(), Ticket(2), "of its own domain");
    drop(owner.wait(revoked.remove(0)).unwrap());
    assert_eq!(
        (mock.flushes.load(Ordering::SeqCst), other_mock.flushes.load(Ordering::SeqCst)),
        (0, 2)
    );
    drop((owner, other_owner, domain, other));
    assert!(!is_domain_alive(&mock) && !is_domain_alive(&other_mock));
}

#[test]
fn reads_and_writes_are_revoked_with_one_flush() {
    let (mock, domain, drops) = shared();
    let read = domain.map(Buf::new(1, &drops), ToDevice).unwrap();
    let write = domain.map(Buf::new(1, &drops), FromDevice).unwrap();
    let mut revoked = Vec::new();
    domain.revoke_many([Unrevoked::from(read), Unrevoked::from(write)], &mut revoked);
    assert_eq!((mock.flushes.load(Ordering::SeqCst), revoked.len()), (1, 2));
    drop(revoked);
    // Dropped without its direction it is revoked too.
    drop(Unrevoked::from(domain.map(Buf::new(1, &drops), Bidirectional).unwrap()));
    assert!(mock.pages.lock().is_empty());
    assert_eq!((drops.load(Ordering::SeqCst), domain.stats().unmaps), (3, 3));
}

/// Errors are usable with `?`, whatever the payload: `Buf` is not `Sync`.
#[test]
fn errors_with_a_payload_convert() {
    fn one(owner: &mut DomainLocal, buf: Buf) -> Result<Buf, BackendError> {
        let mapping = owner.map(buf, Bidirectional)?;
        Ok(owner.wait(mapping.revoke())?)
    }
    fn boxed(owner: &mut DomainLocal, buf: Buf) -> Result<Buf, Box<dyn core::error::Error>> {
        let mapping = owner.map(buf, Bidirectional)?;
        Ok(owner.wait(mapping.revoke())?)
    }
    let (_mock, domain, drops) = shared();
    let mut owner = domain.local();
    assert!(matches!(
        one(&mut owner, Buf::new(9, &drops)),
        Err(BackendError::NotRegistered { .. })
    ));
    assert!(
        boxed(&mut owner, Buf::new(9, &drops))
            .unwrap_err()
            .downcast_ref::<MapError<Buf>>()
            .is_some()
    );
    drop(one(&mut owner, Buf::new(1, &drops)).unwrap());
    drop(boxed(&mut owner, Buf::new(1, &drops)).unwrap());
}

#[test]
fn a_mapping_that_cannot_be_revoked_is_quarantined_when_it_is_dropped() {
    let (mock, domain, drops) = shared();
    let mapping = domain.map(Buf::new(1, &drops), FromDevice).unwrap();
    set(&mock.refuse_revoke);
    drop(mapping);
    let stats = domain.stats();
    assert_eq!((stats.quarantined, stats.deferred, drops.load(Ordering::SeqCst)), (1, 0, 0));
}

/// Its drop panics.
struct Panicking(Buf);
// SAFETY: as for `Buf`.
unsafe impl Pinned for Panicking {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}
impl Drop for Panicking {
    fn drop(&mut self) {
        panic!("a payload's drop");
    }
}

fn panics(call: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err()
}

#[test]
fn a_payload_whose_drop_panics_releases_no_other_that_is_mapped() {
    let (mock, domain, drops) = shared();
    let mut owner = domain.local();
    let mapped = owner.map(Buf::new(1, &drops), FromDevice).unwrap();
    let late = owner.map(Panicking(Buf::new(1, &drops)), FromDevice).unwrap().revoke();
    mock.obliging.store(false, Ordering::SeqCst);
    let ticket = late.ticket();
    drop(late);
    assert_eq!(domain.stats().deferred, 1);
    // Found by the drop, before the domain is woken.
    mock.done.fetch_max(ticket.0, Ordering::SeqCst);
    assert!(panics(|| drop(mapped)));
    assert_eq!(mock.pages.lock().len(), 1, "a device still reaches it");
    assert_eq!(drops.load(Ordering::SeqCst), 1, "the late one alone");
    // It is revoked by the next call, and dropped when its flush has completed.
    let stats = domain.stats();
    assert_eq!((stats.quarantined, stats.deferred, stats.live), (0, 1, 1));
    assert_eq!((domain.release_late(), mock.pages.lock().len()), (1, 0));
    complete(&mock, Ticket(mock.last.load(Ordering::SeqCst)));
    assert_eq!(
        (domain.release_late(), drops.load(Ordering::SeqCst), domain.stats().live),
        (0, 2, 0)
    );
    drop((owner, domain));
    assert!(!is_domain_alive(&mock));
}

#[test]
fn mappings_of_a_batch_whose_iterator_panics_are_revoked_and_dropped() {
    let (mock, domain, drops) = shared();
    let mapped: Vec<_> =
        (0..3).map(|_| domain.map(Buf::new(1, &drops), FromDevice).unwrap()).collect();
    let mut revoked = vec![domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke()];
    let mut left = 2;
    let failing = mapped.into_iter().inspect(|_| {
        assert!(left > 0, "an iterator");
        left -= 1;
    });
    assert!(panics(|| domain.revoke_many(failing, &mut revoked)));
    assert_eq!((mock.pages.lock().len(), drops.load(Ordering::SeqCst), revoked.len()), (0, 3, 1));
    drop(revoked.remove(0).wait().unwrap());
    assert_eq!(domain.stats().quarantined, 0);
}

/// Mappings of two domains, revoked and waited for together: each has the ticket of its own, and
/// what was never revoked is no ticket to wait for.
#[test]
fn mappings_of_another_domain_have_its_tickets() {
    let ((here_mock, here, drops), (there_mock, there, _)) = (shared(), shared());
    there_mock.last.store(50, Ordering::SeqCst);
    let (mut owner, mut other) = (here.local(), there.local());
    let mut mixed = vec![owner.map(Buf::new(1, &drops), Bidirectional).unwrap()];
    mixed.push(other.map(Buf::new(1, &drops), Bidirectional).unwrap());
    let mut revoked = Vec::new();
    owner.revoke_many(mixed, &mut revoked);
    assert_eq!([&revoked[0], &revoked[1]].map(Revoked::ticket), [Ticket(1), Ticket(51)]);
    set(&here_mock.refuse_revoke);
    let refused = owner.map(Buf::new(1, &drops), Bidirectional).unwrap();
    revoked.push(owner.revoke(refused));
    let limit = WaitLimit::within(Duration::from_secs(1));
    let outcomes: Vec<bool> =
        owner.wait_many_for(revoked, limit).map(|outcome| outcome.is_ok()).collect();
    assert_eq!(outcomes, [true, true, false]);
    let done = [&here_mock, &there_mock].map(|mock| mock.done.load(Ordering::SeqCst));
    assert_eq!((done, drops.load(Ordering::SeqCst)), ([1, 51], 2));
}

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
    let domain = Domain::new(mock.clone(), IovaSpace::new(20).unwrap());
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

/// Buffers that the domain holds for callers that no longer wait count like those that callers
/// hold.
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

/// A static mapping that was found once is found again without a lookup, until it is unmapped.
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

/// A part of memory that is mapped for its lifetime; counts its drop.
struct Part<'m> {
    memory: DmaMemory<'m>,
    at: (DomainId, Iova),
    drops: Arc<AtomicUsize>,
}

// SAFETY: the test keeps the memory for longer than the value, which may not be leaked then.
unsafe impl Pinned for Part<'static> {
    fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova> {
        (self.at.0 == domain).then_some(self.at.1)
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

/// It needs no call of the backend: neither then nor later.
#[test]
fn what_is_mapped_for_life_is_released_while_a_thread_unwinds() {
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let arena = Buf::new(1, &Arc::default());
    // SAFETY: it outlives what the test maps, and no reference into it is made.
    let memory = unsafe { DmaMemory::from_raw(arena.memory().as_ptr(), PAGE) };
    // SAFETY: as above.
    let whole = unsafe { domain.map_static(memory, Access::WRITE) }.unwrap();
    let part =
        || Part { memory, at: (domain.id(), whole.iova().start()), drops: Arc::clone(&drops) };
    assert!(panics(|| {
        let (mapped, revoked) = (domain.map(part(), FromDevice), domain.map(part(), FromDevice));
        let _mapped = mapped.unwrap();
        let _revoked = revoked.unwrap().revoke().quiesced();
        set(&mock.panics);
        drop(domain.map(Buf::new(1, &Arc::default()), FromDevice));
    }));
    let stats = domain.stats();
    assert_eq!((drops.load(Ordering::SeqCst), stats.deferred, stats.unmaps), (2, 0, 2));
    mock.panics.store(false, Ordering::SeqCst);
    assert_eq!((domain.release_late(), mock.flushes.load(Ordering::SeqCst)), (0, 0));
    domain.unmap_static(whole).unwrap();
}
