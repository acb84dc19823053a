//! The buffers that the domain holds until a flush completes: how it takes them over, how its calls
//! release them ([`Domain::release_late`]), and its own wait for them, so that they are freed
//! although no thread calls it any more. The queue of them is in `late`.
//!
//! Such a buffer may keep the domain itself: it keeps its arena, which is mapped into the domain.
//! The waker that is registered with the backend therefore keeps the domain too, until it is woken;
//! it then releases what is due, possibly with the last handle of all three.

use super::backend::{Until, Wait};
use super::late::{Due, PendingRelease};
use super::owner::Anyone;
use super::space::{Domain, Space};
use super::window::Addresses;
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::Ticket;
use crate::share::Shared;
use crate::sync::{AtomicU8, Ordering, relax};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::task::Wake;
use core::mem::ManuallyDrop;
use core::task::{Poll, Waker};

/// A buffer of the domain while the backend is called for it.
struct Abandoned<'d>(&'d Space, PendingRelease);

impl CleanUp for Abandoned<'_> {
    fn clean_up(self) {
        // The payload stays leaked.
        self.0.count_lost(self.1.addresses.iova.len());
    }
}

impl Domain {
    /// Drops the buffers whose late flush has completed, and returns how many are still held. O(1)
    /// while none is.
    ///
    /// Maps, revocations and waits do this too, and the domain by itself: its backend
    /// [wakes](super::Wait::Wake) it when the flush has completed, also where the program has
    /// dropped every handle. A payload is then dropped by the thread that wakes. Where a backend
    /// cannot wake (it panicked, or does so at once), a program that makes no calls calls this.
    pub fn release_late(&self) -> u64 {
        self.space.release_late();
        watch(&self.space);
        self.space.pending.len()
    }
}

impl Space {
    /// Takes over a buffer that a device may still reach: until it is `due`, or forever
    /// (quarantined). `mapped` is false for the rest of a refused map.
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        addresses: Addresses,
        due: Due,
        mapped: bool,
    ) {
        if matches!(due, Due::Never) {
            core::mem::forget(payload);
            return self.count_lost(addresses.iova.len());
        }
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(PendingRelease { payload, addresses, due, mapped });
    }

    /// Completes the work that a panic of the backend interrupted, and returns the buffer. Should
    /// it panic again, the buffer is quarantined.
    fn make_up_for(&self, release: PendingRelease) -> PendingRelease {
        let mut release = DropGuard::new(Abandoned(self, release));
        let PendingRelease { addresses, due, .. } = &mut release.1;
        *due = match *due {
            Due::Revocation => {
                self.counts().count_revoked(0);
                self.revoke_one(addresses.revocation()).map_or(Due::Never, Due::At)
            }
            known => known,
        };
        release.into_inner().1
    }

    /// Drops late buffers whose flush has completed, as [`Domain::release_late`] does.
    #[inline]
    pub(super) fn release_late(&self) -> u64 {
        match self.pending.first() {
            Ticket::NEVER => 0,
            first => self.release_from(first),
        }
    }

    /// Drops late buffers whose flush has completed, if the `first` ticket has.
    #[cold]
    fn release_from(&self, mut first: Ticket) -> u64 {
        while first != Ticket::NEVER {
            let failed = match self.check(first) {
                Poll::Ready(Ok(())) => false,
                Poll::Ready(Err(error)) if error.late_ticket().is_none() => true,
                Poll::Ready(Err(_)) | Poll::Pending => break,
            };
            let Some(releasing) = self.pending.try_begin() else { break };
            while let Some(release) = self.pending.pop_unfinished() {
                let release = self.make_up_for(release);
                if matches!(release.due, Due::Never) {
                    self.count_lost(release.addresses.iova.len());
                } else {
                    self.pending.push(release);
                }
            }
            // One by one: a drop may run any code, so it runs without the lock.
            while let Some(release) = self.pending.pop(|ticket| self.has_completed(ticket)) {
                if release.mapped {
                    self.counts().count_unmapped();
                }
                // Dropped after its addresses are returned, also if the backend panics meanwhile.
                let _payload = ManuallyDrop::into_inner(release.payload);
                self.finish_unmap(&mut Anyone, release.addresses);
            }
            while failed && let Some(release) = self.pending.pop(|_| true) {
                self.count_lost(release.addresses.iova.len());
            }
            drop(releasing);
            // Another call that found buffers due meanwhile left them to this call.
            first = self.pending.first();
        }
        self.pending.len()
    }
}

/// The number of restarts of a watch if the backend wakes at once and nothing has completed:
/// another thread may just be submitting the flush.
const ATTEMPTS: u32 = 80;

/// The waker is being registered.
const BEGINS: u8 = 0;
/// It is registered, and has not been woken.
const WAITS: u8 = 1;
const WOKEN: u8 = 2;

/// Releases due buffers when it is woken.
struct Watcher {
    domain: Shared<Space>,
    state: AtomicU8,
}

/// A watch that ends if the backend panics, or wakes at once.
struct Beginning<'d>(&'d Space);

impl CleanUp for Beginning<'_> {
    fn clean_up(self) {
        self.0.pending.unwatch();
    }
}

/// Arranges that the backend wakes the domain when the first buffer that it holds may be due,
/// unless that has been arranged.
///
/// Has no effect while a thread unwinds from a panic of the backend, or if the backend wakes at
/// once each time: then the next call of the domain releases due buffers.
#[cold]
pub(super) fn watch(domain: &Shared<Space>) {
    for attempt in 0..ATTEMPTS {
        let first = domain.pending.first();
        if first == Ticket::NEVER || domain.is_unwinding() || !domain.pending.try_watch() {
            return;
        }
        let beginning = DropGuard::new(Beginning(domain));
        let state = AtomicU8::new(BEGINS);
        let watcher = Arc::new(Watcher { domain: domain.clone(), state });
        let waker = Waker::from(Arc::clone(&watcher));
        let wait = Wait::Wake(Until::Completion, &waker);
        let sleeps = domain.call(|backend| backend.wait(first, wait)).is_pending();
        let begun =
            watcher.state.compare_exchange(BEGINS, WAITS, Ordering::AcqRel, Ordering::Acquire);
        if sleeps && begun.is_ok() {
            beginning.into_inner();
            return;
        }
        drop(beginning);
        release(domain);
        if domain.pending.first() == first {
            relax(attempt);
        }
    }
}

/// Releases all due buffers, also if the drop of a payload panics: no caller could continue with
/// the rest.
fn release(domain: &Space) {
    #[cfg(any(test, loom, feature = "std"))]
    loop {
        let held = domain.pending.len();
        let released = std::panic::AssertUnwindSafe(|| domain.release_late());
        // A panic of the backend has released nothing, and is not repeated.
        if std::panic::catch_unwind(released).is_ok() || domain.pending.len() >= held {
            return;
        }
    }
    #[cfg(not(any(test, loom, feature = "std")))]
    domain.release_late();
}

impl Wake for Watcher {
    fn wake(self: Arc<Self>) {
        if self.state.swap(WOKEN, Ordering::AcqRel) == WAITS {
            self.domain.pending.unwatch();
            release(&self.domain);
            watch(&self.domain);
        }
    }
}
