//! The domain's own wait for the buffers that it holds until a flush completes: so that they are
//! freed although no thread calls the domain any more.
//!
//! Such a buffer may keep the domain itself: it keeps its arena, which is mapped into the domain.
//! The waker that is registered with the backend therefore keeps the domain too, until it is woken;
//! it then releases what is due, possibly with the last handle of all three.

use super::backend::{Until, Wait};
use super::space::Space;
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::Ticket;
use crate::share::Shared;
use crate::sync::{AtomicU8, Ordering, relax};
use alloc::sync::Arc;
use alloc::task::Wake;
use core::task::Waker;

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
