//! The domain's own wait for what it holds: that frees it although no thread calls the domain any
//! more, and although what it holds keeps the domain.

use super::*;
use crate::mem::DmaMemory;
use core::future::Future;
use core::pin::pin;
use core::task::{Context, Waker};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A payload that keeps its domain, as a buffer of an arena that is mapped into it does.
struct Keeper {
    buf: Buf,
    _domain: Domain,
}

// SAFETY: those of `buf`.
unsafe impl Pinned for Keeper {
    fn memory(&self) -> DmaMemory<'_> {
        self.buf.memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// Every way in which a payload is left with the domain.
fn leave(how: usize, mock: &Mock, domain: &Domain, payload: Keeper) {
    let mut local = domain.local();
    match how {
        0 => drop(domain.map(payload, FromDevice).unwrap()),
        1 => drop(domain.map(payload, FromDevice).unwrap().revoke()),
        2 => drop(domain.map(payload, FromDevice).unwrap().unmap()),
        3 => drop(domain.map(payload, FromDevice).unwrap().revoke().wait()),
        4 => drop(domain.map(payload, FromDevice).unwrap().revoke().quiesced()),
        5 => {
            let mut future = pin!(domain.map(payload, FromDevice).unwrap().revoke().quiesced());
            let mut context = Context::from_waker(Waker::noop());
            assert!(future.as_mut().poll(&mut context).is_pending());
        }
        6 => {
            let mut revoked = Vec::new();
            let mapping = local.map(payload, FromDevice).unwrap();
            local.revoke_many([mapping], &mut revoked);
            drop(local.wait_many_for(revoked, WaitLimit { time_ns: 1, polls: 1 }));
        }
        7 => {
            let mapping = local.map(payload, FromDevice).unwrap();
            assert!(local.unmap(mapping).is_err());
        }
        _ => {
            // Refused, and the flush of its rollback is late.
            set(&mock.stick);
            let limit = Iova::new(u64::MAX);
            let refused = match how {
                8 => domain.map(payload, FromDevice),
                9 => domain.map_up_to(payload, FromDevice, limit),
                10 => local.map(payload, FromDevice),
                _ => local.map_up_to(payload, FromDevice, limit),
            };
            assert!(refused.unwrap_err().payload.is_none());
        }
    }
}

#[test]
fn what_no_handle_is_left_of_is_freed_when_its_flush_completes() {
    for how in 0..12 {
        let (mock, domain, drops) = domain();
        let payload = Keeper { buf: Buf::new(1, &drops), _domain: domain.clone() };
        leave(how, &mock, &domain, payload);
        drop(domain);
        assert_eq!(drops.load(Ordering::SeqCst), 0, "{how}: freed before its flush completed");
        assert!(deferred_bytes() >= 4096);
        complete(&mock, Ticket(1));
        assert_eq!(drops.load(Ordering::SeqCst), 1, "{how}: the payload is not freed");
        assert_eq!(Arc::strong_count(&mock), 1, "{how}: the domain is not freed");
    }
}

/// Each completion frees what it covers, and the domain goes on waiting for the rest.
#[test]
fn what_is_still_held_is_waited_for_again() {
    let (mock, domain, drops) = domain();
    for _ in 0..3 {
        let payload = Keeper { buf: Buf::new(1, &drops), _domain: domain.clone() };
        drop(domain.map(payload, FromDevice).unwrap());
    }
    assert_eq!(mock.wakes.load(Ordering::SeqCst), 1, "one waker, however much is held");
    drop(domain);
    for ticket in 1..=3 {
        complete(&mock, Ticket(ticket));
        assert_eq!(drops.load(Ordering::SeqCst) as u64, ticket);
    }
    assert_eq!(Arc::strong_count(&mock), 1);
}

/// A unit that has failed completes nothing: what is held is quarantined, and the domain ends.
#[test]
fn a_failure_ends_the_wait() {
    let (mock, domain, drops) = domain();
    drop(domain.map(Buf::new(1, &drops), FromDevice).unwrap());
    set(&mock.failed);
    let wakers = core::mem::take(&mut *mock.wakers.lock());
    wakers.into_iter().for_each(|(_, waker)| waker.wake());
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, drops.load(Ordering::SeqCst)), (0, 1, 0));
    assert_eq!(mock.wakes.load(Ordering::SeqCst), 1);
}

#[test]
fn a_flush_that_completes_beside_the_watch_is_found() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke();
    set(&mock.completes_at_wake);
    drop(revoked.quiesced());
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (0, 1));
}

/// The same where the backend wakes at once, because it has completed.
#[test]
fn a_flush_that_has_completed_when_the_watch_begins_is_found() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke();
    set(&mock.completes_at_wake);
    set(&mock.wakes_at_once);
    drop(revoked.quiesced());
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(mock.wakes.load(Ordering::SeqCst), 1);
}

/// Early, and in a loop, as no backend with flushes that take time may: it is not asked for ever,
/// and the next call frees what is due.
#[test]
fn a_backend_that_wakes_at_once_is_not_asked_for_ever() {
    let (mock, domain, drops) = domain();
    set(&mock.wakes_at_once);
    drop(domain.map(Buf::new(1, &drops), FromDevice).unwrap());
    assert!(mock.wakes.load(Ordering::SeqCst) < 100);
    assert_eq!(domain.stats().deferred, 1);
    mock.wakes_at_once.store(false, Ordering::SeqCst);
    assert_eq!(domain.release_late(), 1, "and may be asked again");
    complete(&mock, Ticket(1));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

/// Early once: the domain looks, and waits again.
#[test]
fn a_domain_that_is_woken_early_waits_again() {
    let (mock, domain, drops) = domain();
    drop(domain.map(Buf::new(1, &drops), FromDevice).unwrap());
    let early = core::mem::take(&mut *mock.wakers.lock());
    early.into_iter().for_each(|(_, waker)| {
        waker.wake_by_ref();
        waker.wake();
    });
    assert_eq!((mock.wakers.lock().len(), drops.load(Ordering::SeqCst)), (1, 0));
    complete(&mock, Ticket(1));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

/// A backend that panics as the domain begins to wait loses nothing, and is asked again.
#[test]
fn a_panic_of_the_registration_leaves_the_payload_held() {
    let (mock, domain, drops) = domain();
    set(&mock.wake_panics);
    let mapping = domain.map(Buf::new(1, &drops), FromDevice).unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| drop(mapping))).is_err());
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    mock.wake_panics.store(false, Ordering::SeqCst);
    assert_eq!(domain.release_late(), 1);
    complete(&mock, Ticket(1));
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (0, 1));
}

/// A backend that panics as the woken domain looks: the domain looks once, and waits again, which
/// looks too and panics in the thread that woke it. The payload stays held until the next call.
#[test]
fn a_check_that_panics_when_the_domain_is_woken_is_not_repeated() {
    let (mock, domain, drops) = domain();
    drop(domain.map(Buf::new(1, &drops), FromDevice).unwrap());
    mock.check_panics.store(9, Ordering::SeqCst);
    let woken = std::panic::catch_unwind(AssertUnwindSafe(|| complete(&mock, Ticket(1))));
    assert!(woken.is_err());
    assert_eq!(mock.check_panics.swap(0, Ordering::SeqCst), 7);
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (1, 0));
    domain.release_late();
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (0, 1));
}

/// Its drop panics.
struct Panicking(Buf);

// SAFETY: those of `Buf`.
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

/// No caller goes on with the rest, so the domain does.
#[test]
fn a_payload_whose_drop_panics_holds_no_other() {
    let (mock, domain, drops) = domain();
    let mut revoked = Vec::new();
    let mappings = [(); 3].map(|()| domain.map(Panicking(Buf::new(1, &drops)), FromDevice));
    domain.revoke_many(mappings.map(Result::unwrap), &mut revoked);
    drop(revoked);
    drop(domain.map(Buf::new(1, &drops), FromDevice).unwrap());
    drop(domain);
    complete(&mock, Ticket(1));
    assert_eq!(drops.load(Ordering::SeqCst), 3);
    complete(&mock, Ticket(2));
    assert_eq!((drops.load(Ordering::SeqCst), Arc::strong_count(&mock)), (4, 1));
}

/// Without waiting to be woken: maps, revocations, polls and waits find what is due, and only that.
#[test]
fn each_call_releases_what_is_due() {
    for how in 0..7 {
        let (mock, domain, drops) = domain();
        let new = || Buf::new(1, &drops);
        let mut local = domain.local();
        let one = domain.map(new(), FromDevice).unwrap();
        let revoked = domain.map(new(), FromDevice).unwrap().revoke();
        let late = domain.map(new(), FromDevice).unwrap().revoke();
        let mut other = Vec::new();
        mock.done.store(revoked.ticket().0, Ordering::SeqCst);
        // The clock of its flush goes on, and nothing wakes the domain.
        let ticket = late.ticket();
        drop(late.quiesced());
        mock.done.store(ticket.0 - u64::from(how == 6), Ordering::SeqCst);
        match how {
            1 => drop(local.map(new(), FromDevice).map(core::mem::forget)),
            2 => core::mem::forget(one.revoke()),
            3 => domain.revoke_many([one], &mut other),
            4 => core::mem::forget(revoked.poll().unwrap()),
            5 => core::mem::forget(revoked.wait().unwrap()),
            _ => drop(domain.map(new(), FromDevice).map(core::mem::forget)),
        }
        // The last one comes too early.
        let expected = if how == 6 { (1, 0) } else { (0, 1) };
        assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), expected, "{how}");
        core::mem::forget(other);
    }
}
