//! A queue for tests and models.

use super::{Batch, InvalidationQueue, QueueError, Ticket, WaitLimit};
use crate::addr::Iova;
use crate::sync::{AtomicU64, Ordering};
#[cfg(loom)]
use loom::thread;
#[cfg(not(loom))]
use std::thread;

/// Its flush takes effect when it is submitted: it takes a snapshot of what had been cleared by then.
///
/// The clears are relaxed stores: only the invalidator orders them before the snapshot, and only the ticket orders the
/// snapshot before the owner's check.
pub(super) struct Snapshot<const PAGES: usize> {
    pub(super) cleared: [AtomicU64; PAGES],
    pub(super) flushed: [AtomicU64; PAGES],
    submitted: AtomicU64,
}

impl<const PAGES: usize> Snapshot<PAGES> {
    pub(super) fn new() -> Self {
        let zeros = || core::array::from_fn(|_| AtomicU64::new(0));
        Self { cleared: zeros(), flushed: zeros(), submitted: AtomicU64::new(0) }
    }
}

impl<const PAGES: usize> InvalidationQueue for Snapshot<PAGES> {
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), QueueError> {
        for flush in batch.flushes() {
            for (page, cleared) in (0..).zip(&self.cleared) {
                if flush.range.contains(Iova::new((page as u64) << 12)) {
                    self.flushed[page].store(cleared.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
        }
        self.submitted.store(ticket.0, Ordering::Release);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.submitted.load(Ordering::Acquire))
    }
    fn relax(&self, _polls: u64) {
        thread::yield_now();
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}
