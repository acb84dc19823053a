//! Buffers that are late, and a backend that panics at each of its calls: no payload is lost, none
//! is dropped that a device may reach, and no clean-up calls it again while the thread unwinds.

use super::*;
use crate::mem::DmaMemory;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

/// A payload that looks for others that can be dropped when it is dropped itself.
struct Reentrant {
    buf: Buf,
    domain: Domain,
}

// SAFETY: those of `buf`.
unsafe impl Pinned for Reentrant {
    fn memory(&self) -> DmaMemory<'_> {
        self.buf.memory()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Drop for Reentrant {
    fn drop(&mut self) {
        self.domain.release_late();
    }
}

/// Each drop finds the next payload; they are dropped one after the other, not one inside the
/// other.
#[test]
fn payloads_that_use_their_domain_when_dropped_do_not_pile_up_on_the_stack() {
    const COUNT: usize = 20_000;
    let (mock, domain, drops) = domain();
    let extents = domain.stats().iova_extents;
    for _ in 0..COUNT {
        let payload = Reentrant { buf: Buf::new(1, &drops), domain: domain.clone() };
        drop(domain.map(payload, FromDevice).unwrap());
    }
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (COUNT as u64, 0));
    complete(&mock, Ticket(COUNT as u64));
    let small = std::thread::Builder::new().stack_size(256 << 10);
    let domain = small.spawn(move || {
        assert_eq!(domain.release_late(), 0);
        domain
    });
    let domain = domain.unwrap().join().unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), COUNT);
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.unmaps, stats.iova_extents), (0, COUNT as u64, extents));
}

/// Buffers that are due are dropped in the order of their tickets, in whatever order they came; the
/// others stay.
#[test]
fn what_is_due_is_released_and_the_rest_is_not() {
    let (mock, domain, drops) = domain();
    let mut revoked: Vec<_> =
        (0..9).map(|_| domain.map(Buf::new(1, &drops), FromDevice).unwrap().revoke()).collect();
    for at in [4, 0, 3, 3, 0, 3, 1, 0, 0] {
        drop(revoked.swap_remove(at));
    }
    for due in 1..=9 {
        complete(&mock, Ticket(due));
        assert_eq!(domain.release_late(), 9 - due);
        assert_eq!(drops.load(Ordering::SeqCst) as u64, due);
    }
}

/// Panics at the `at`th call, and with `always` at all later ones; does what a [`Mock`] does
/// otherwise.
struct Fragile {
    mock: Arc<Mock>,
    calls: AtomicUsize,
    at: AtomicUsize,
    always: bool,
    /// The calls that panicked.
    panicked: Mutex<Vec<&'static str>>,
    /// The calls made by an unwinding thread, where a second panic would end the process.
    while_unwinding: Mutex<Vec<&'static str>>,
}

impl Fragile {
    fn call(&self, method: &'static str) {
        if std::thread::panicking() {
            return self.while_unwinding.lock().unwrap().push(method);
        }
        let (call, at) =
            (self.calls.fetch_add(1, Ordering::Relaxed), self.at.load(Ordering::Relaxed));
        if call == at || self.always && call > at {
            self.panicked.lock().unwrap().push(method);
            resume_unwind(Box::new(method));
        }
    }
}

impl Backend for Fragile {
    fn properties(&self) -> Properties {
        Properties::new("fragile")
    }
    unsafe fn register_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn unregister_memory(&self, _: DmaMemory) -> Result<(), BackendError> {
        Ok(())
    }
    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        _: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        self.call("map");
        self.mock.map(iova, memory, access, None)
    }
    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        self.call("revoke");
        self.mock.revoke(first, rest)
    }
    fn window(self: Arc<Self>, _: IovaRange) -> Option<WindowToken> {
        self.call("window");
        None
    }
    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        match wait {
            // At once, so that the domain does not sleep.
            Wait::Wake(_, waker) => {
                waker.wake_by_ref();
                return self.mock.wait(ticket, Wait::Not);
            }
            Wait::Not => self.call("check"),
            Wait::ToDeadline | Wait::For(_) => self.call("wait"),
        }
        self.mock.wait(ticket, wait)
    }
}

fn step<R>(run: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(run)).ok()
}

/// Every way in which a mapping ends, by owners and by anyone. Returns how many payloads there
/// were.
fn use_all(domain: &Domain, drops: &Arc<AtomicUsize>) -> usize {
    let made = AtomicUsize::new(0);
    let new = || {
        made.fetch_add(1, Ordering::Relaxed);
        Buf::new(1, drops)
    };
    step(|| {
        let mut local = domain.local();
        step(|| {
            let mapping = local.map(new(), FromDevice).unwrap();
            local.unmap(mapping).unwrap();
        });
        step(|| {
            let mapping = local.map(new(), FromDevice).unwrap();
            let revoked = local.revoke(mapping);
            local.poll(revoked).map_or_else(|revoked| drop(local.wait(revoked)), drop);
        });
        let many = step(|| local.map_many([(); 3].map(|()| new()), ToDevice).unwrap());
        step(|| {
            let mut revoked = Vec::new();
            local.revoke_many(many.into_iter().flatten(), &mut revoked);
            local.wait_many_for(revoked, WaitLimit { time_ns: 1, polls: 1 }).for_each(drop);
        });
        // Dropped with the handle, and after it.
        step(|| drop(local.map(new(), FromDevice).unwrap()));
        let kept = step(|| local.map(new(), FromDevice).unwrap());
        step(|| drop(local));
        step(|| drop(kept));
    });
    step(|| drop(domain.map(new(), FromDevice).unwrap()));
    step(|| domain.map(new(), FromDevice).unwrap().revoke().poll().map_err(drop));
    step(|| domain.map(new(), FromDevice).unwrap().unmap().unwrap());
    made.into_inner()
}

#[test]
fn a_backend_that_panics_loses_no_payload() {
    let mut calls = usize::MAX;
    for (at, always) in (0..).flat_map(|at| [(at, true), (at, false)]) {
        if calls <= at {
            break;
        }
        let (mock, drops) = (Arc::new(Mock::default()), Arc::default());
        set(&mock.obliging);
        let fragile = Arc::new(Fragile {
            mock: Arc::clone(&mock),
            calls: 0.into(),
            at: at.into(),
            always,
            panicked: Mutex::default(),
            while_unwinding: Mutex::default(),
        });
        let space = IovaSpace::new(39).unwrap();
        let domain = Domain::new(fragile.clone(), space);
        let made = use_all(&domain, &drops);
        calls = fragile.calls.load(Ordering::Relaxed);
        fragile.at.store(usize::MAX, Ordering::Relaxed);
        let panicked = fragile.panicked.lock().unwrap().clone();
        assert_eq!(*fragile.while_unwinding.lock().unwrap(), [""; 0], "{at}: {panicked:?}");
        // The first call makes up for the rest: it learns the tickets, or requests them.
        domain.release_late();
        mock.done.store(mock.last.load(Ordering::SeqCst), Ordering::SeqCst);
        assert_eq!(domain.release_late(), 0, "{at}: {panicked:?}");
        let stats = domain.stats();
        let lost = made - drops.load(Ordering::SeqCst);
        assert_eq!(lost as u64, stats.quarantined, "{at}: {panicked:?} {stats:?}");
        // Only what may have been mapped or revoked in part.
        let in_part =
            panicked.iter().filter(|method| ["map", "window", "revoke"].contains(method)).count();
        assert!(lost <= 3 * in_part, "{at}: {panicked:?} {stats:?}");
        assert_eq!((stats.owners, stats.live), (0, 0), "{at}: {panicked:?} {stats:?}");
        assert!(mock.pages.lock().len() <= lost, "{at}: {panicked:?}");
        // Its windows are closed, but those of which something is quarantined.
        domain.space.reclaim_idle();
        let windows = domain.stats().windows;
        assert!(windows == 0 || lost > 0, "{at}: {panicked:?} {windows} windows");
    }
}
