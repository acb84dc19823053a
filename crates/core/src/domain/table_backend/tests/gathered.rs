//! Single revocations of an owner: their requests gather until they are many, or until any thread
//! waits.

use super::pinned::{Nowhere, Unit, domain, is_mapped};
use super::*;
use crate::access::FromDevice;
use crate::domain::{Domain, Local, Revoked};
use crate::invalidate::RequestRing;
use crate::share::Shared;

fn setup() -> (Unit, Shared<Domain>, Local) {
    let (unit, domain) = domain(64, Scattered::default());
    let local = domain.local();
    (unit, domain, local)
}

/// Maps and revokes a page, and looks whether its entry is cleared.
fn revoke_one(unit: &Unit, local: &mut Local) -> Revoked<Nowhere> {
    let mapping = local.map(Nowhere(1), FromDevice).unwrap();
    let at = mapping.iova();
    let revoked = local.revoke(mapping);
    assert!(!is_mapped(unit, at));
    revoked
}

fn requested(unit: &Unit) -> (u64, u64) {
    let stats = unit.stats().invalidations;
    (stats.requested, stats.waits)
}

#[test]
fn as_many_as_a_ring_holds_are_one_flush() {
    let (unit, _domain, mut local) = setup();
    let mut held: Vec<_> =
        (1..RequestRing::CAPACITY).map(|_| revoke_one(&unit, &mut local)).collect();
    assert_eq!(requested(&unit), (0, 0));
    held.push(revoke_one(&unit, &mut local));
    assert_eq!(requested(&unit), (RequestRing::CAPACITY, 1));
    assert!(held.into_iter().all(|one| local.poll(one).is_ok()), "the flush has completed");
}

/// Neither wait needs the owner: one is made while it lives, one when its handle has been dropped.
#[test]
fn a_thread_that_waits_hands_over_what_the_owner_has_gathered() {
    let (unit, _domain, mut local) = setup();
    let [first, second, third, last] = [(); 4].map(|()| revoke_one(&unit, &mut local));
    assert!(std::thread::spawn(move || second.wait().is_ok()).join().unwrap());
    assert_eq!(requested(&unit), (4, 1));
    assert!(first.is_quiesced() && local.poll(third).is_ok());
    let late = revoke_one(&unit, &mut local);
    assert_eq!(requested(&unit), (4, 1));
    drop(local);
    assert_eq!(requested(&unit).0, 5);
    assert!(std::thread::spawn(move || late.wait().is_ok()).join().unwrap());
    drop((last, first));
    assert_eq!((requested(&unit).1, unit.stats().invalidations.timed_out), (2, 0));
}

/// The place of its request in the ring is used again, for one that is flushed later.
#[test]
fn what_is_quiesced_stays_so_with_the_same_ticket() {
    let (unit, _domain, mut local) = setup();
    let first = revoke_one(&unit, &mut local);
    let ticket = first.ticket();
    let other = revoke_one(&unit, &mut local);
    assert!(local.wait(other).is_ok());
    assert!(first.is_quiesced());
    let later: Vec<_> = (0..RequestRing::CAPACITY).map(|_| revoke_one(&unit, &mut local)).collect();
    assert!(later.last().unwrap().ticket() > ticket);
    assert_eq!(first.ticket(), ticket);
    drop((first, later));
}

/// A loop that polls ends, although its polls leave requests where they are at first; a look
/// through the `Revoked` does not.
#[test]
fn polls_in_a_row_submit_in_the_end() {
    let (unit, _domain, mut local) = setup();
    let mut revoked = revoke_one(&unit, &mut local);
    for _ in 0..3 {
        revoked = local.poll(revoked).unwrap_err();
        assert_eq!(requested(&unit), (0, 0));
    }
    // A revocation in between begins a new row.
    let mut other = revoke_one(&unit, &mut local);
    for _ in 0..3 {
        other = local.poll(other).unwrap_err();
    }
    assert_eq!(requested(&unit), (0, 0));
    assert!(local.poll(other).is_ok() && local.poll(revoked).is_ok());
    assert_eq!(requested(&unit), (2, 1));
    // A look at it where it stays is such a poll.
    let mut kept = revoke_one(&unit, &mut local);
    for _ in 0..3 {
        assert!(!local.has_quiesced(&mut kept) && requested(&unit) == (2, 1));
    }
    assert!(local.has_quiesced(&mut kept) && requested(&unit) == (3, 2));
    assert!(local.poll(kept).is_ok());
    let looked_at = revoke_one(&unit, &mut local);
    assert!(looked_at.is_quiesced());
    let ticket = revoke_one(&unit, &mut local).ticket();
    assert!(ticket > looked_at.ticket() && ticket < Ticket::NEVER);
}

/// An owner that goes on revoking never polls twice in a row: it does not leave what another owner
/// has gathered where it is.
#[test]
fn a_poll_of_what_another_owner_has_gathered_hands_it_over() {
    let (unit, domain, mut local) = setup();
    let (mut other, revoked) = (domain.local(), revoke_one(&unit, &mut local));
    let gathered = revoke_one(&unit, &mut other);
    assert!(other.poll(revoked).is_ok());
    assert_eq!(requested(&unit), (1, 1), "its own stay");
    drop(gathered);
}

/// What is to be waited for at once, what belongs to another owner, and what a limit holds back is
/// not gathered.
#[test]
fn what_cannot_wait_is_requested_at_once() {
    let (unit, domain, mut local) = setup();
    let mapping = local.map(Nowhere(1), FromDevice).unwrap();
    assert!(local.unmap(mapping).is_ok());
    assert_eq!(requested(&unit), (1, 1));
    let (mut other, mapping) = (domain.local(), local.map(Nowhere(1), FromDevice).unwrap());
    let revoked = other.revoke(mapping);
    assert_eq!(requested(&unit), (2, 2));
    domain.set_held_limit(1 << 20);
    let limited = revoke_one(&unit, &mut local);
    assert_eq!(requested(&unit), (3, 3));
    domain.set_held_limit(u64::MAX);
    let gathered = revoke_one(&unit, &mut local);
    assert_eq!(requested(&unit), (3, 3));
    drop((revoked, limited, gathered));
    let stats = domain.stats();
    assert_eq!((stats.live, stats.held_bytes, stats.quarantined), (0, 0, 0));
}

/// A poll finds a flush that has completed meanwhile, although it submits nothing.
#[test]
fn a_single_poll_finds_what_has_completed() {
    let (unit, domain) = domain(64, Scattered { takes_polls: 1, ..Scattered::default() });
    let mut local = domain.local();
    let mut held: Vec<_> =
        (0..RequestRing::CAPACITY).map(|_| revoke_one(&unit, &mut local)).collect();
    let first = local.poll(held.remove(0)).unwrap_err();
    unit.queue().relax(0);
    assert!(local.poll(first).is_ok());
}

/// What is late is released by a gathered revocation, too.
#[test]
fn a_gathered_revocation_releases_what_was_late() {
    let (unit, domain, mut local) = setup();
    let [late, other] = [(); 2].map(|()| local.map(Nowhere(1), FromDevice).unwrap());
    unit.queue().hangs.store(true, Ordering::SeqCst);
    assert!(local.unmap(late).is_err());
    assert_eq!(domain.stats().deferred, 1);
    unit.queue().hangs.store(false, Ordering::SeqCst);
    let revoked = local.revoke(other);
    assert_eq!(domain.stats().deferred, 0);
    drop(revoked);
}

/// Many owners: each hands over a few, and the domain submits what several have handed over.
#[test]
fn owners_that_are_many_share_a_flush() {
    let (unit, domain) = domain(512, Scattered::default());
    let mut owners: Vec<_> = (0..128).map(|_| domain.local()).collect();
    let mut held = Vec::new();
    for owner in &mut owners {
        held.extend((0..8).map(|_| revoke_one(&unit, owner)));
    }
    assert_eq!(requested(&unit), (1024, 1024 / RequestRing::CAPACITY));
    assert!(held.iter().all(Revoked::is_quiesced));
}
