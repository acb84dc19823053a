//! Single revocations of an owner: each requests its flush at once.

use super::pinned::{Nowhere, Unit, domain, is_mapped};
use super::*;
use crate::access::FromDevice;
use crate::domain::{DomainLocal, Revoked};

/// Maps and revokes a page, and looks whether its entry is cleared.
fn revoke_one(unit: &Unit, local: &mut DomainLocal) -> Revoked<Nowhere> {
    let mapping = local.map(Nowhere(1), FromDevice).unwrap();
    let at = mapping.iova();
    let revoked = local.revoke(mapping);
    assert!(!is_mapped(unit, at));
    revoked
}

/// For each caller that ends the mapping: an owner that waits or not, another owner, and one with a
/// limit.
#[test]
fn a_single_revocation_requests_its_flush_at_once() {
    let (unit, domain) = domain(64, Scattered::default());
    let (mut local, mut other) = (domain.local(), domain.local());
    let requested = || {
        let stats = unit.stats().invalidations;
        (stats.requested, stats.waits)
    };
    let revoked = revoke_one(&unit, &mut local);
    assert_eq!(requested(), (1, 1));
    assert!(revoked.is_quiesced() && local.poll(revoked).is_ok());
    let mapping = local.map(Nowhere(1), FromDevice).unwrap();
    assert!(local.unmap(mapping).is_ok());
    assert_eq!(requested(), (2, 2));
    let mapping = local.map(Nowhere(1), FromDevice).unwrap();
    let revoked = other.revoke(mapping);
    assert_eq!(requested(), (3, 3));
    domain.set_held_limit(1 << 20);
    let limited = revoke_one(&unit, &mut local);
    assert_eq!(requested(), (4, 4));
    // Neither needs the owner that made the request.
    drop(local);
    assert!(std::thread::spawn(move || limited.wait().is_ok()).join().unwrap());
    drop(revoked);
    let stats = domain.stats();
    assert_eq!((stats.live, stats.held_bytes, stats.quarantined), (0, 0, 0));
}

#[test]
fn a_poll_finds_a_flush_that_has_completed() {
    let (unit, domain) = domain(64, Scattered { takes_polls: 1, ..Scattered::default() });
    let mut local = domain.local();
    let first = revoke_one(&unit, &mut local);
    let first = local.poll(first).unwrap_err();
    unit.queue().relax(0);
    assert!(local.poll(first).is_ok());
}

#[test]
fn a_revocation_releases_what_was_late() {
    let (unit, domain) = domain(64, Scattered::default());
    let mut local = domain.local();
    let [late, other] = [(); 2].map(|()| local.map(Nowhere(1), FromDevice).unwrap());
    unit.queue().hangs.store(true, Ordering::SeqCst);
    assert!(local.unmap(late).is_err());
    assert_eq!(domain.stats().deferred, 1);
    unit.queue().hangs.store(false, Ordering::SeqCst);
    let revoked = local.revoke(other);
    assert_eq!(domain.stats().deferred, 0);
    drop(revoked);
}

/// A task that waits for a flush is woken by the queue.
#[test]
fn a_waker_reaches_the_queue() {
    struct Count(AtomicU64);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let count = Arc::new(Count(AtomicU64::new(0)));
    let backend = paged(8, Scattered { takes_polls: 1, ..Scattered::default() });
    backend.map(at(0, 1), walker::page(0), RW, None).unwrap();
    let ticket = revoke(&backend, at(0, 1));
    for until in [Until::Completion, Until::Deadline] {
        let waker = Arc::clone(&count).into();
        assert!(backend.wait(ticket, Wait::Wake(until, &waker)).is_pending());
    }
    assert_eq!(count.0.load(Ordering::SeqCst), 2, "at once, as that queue does");
}

/// A flush past its deadline ends what a task waits for until then, and nothing of what it awaits
/// until the flush completes.
#[test]
fn a_task_waits_until_its_deadline_or_until_its_flush_completes() {
    let backend = paged(8, Scattered { hangs: true.into(), ..Scattered::default() });
    backend.map(at(0, 1), walker::page(0), RW, None).unwrap();
    let ticket = revoke(&backend, at(0, 1));
    let overdue = |waited| {
        matches!(waited, Poll::Ready(Err(BackendError::Flush(WaitError::TimedOut { .. }))))
    };
    assert!(overdue(backend.wait(ticket, Wait::ToDeadline)));
    let waker = core::task::Waker::noop();
    let wait = |until| backend.wait(ticket, Wait::Wake(until, waker));
    assert!(wait(Until::Completion).is_pending());
    assert!(overdue(wait(Until::Deadline)));
    backend.queue().hangs.store(false, Ordering::SeqCst);
    for until in [Until::Completion, Until::Deadline] {
        assert!(matches!(wait(until), Poll::Ready(Ok(()))));
    }
}
