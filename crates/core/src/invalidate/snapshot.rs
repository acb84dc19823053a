//! [`Snapshot`]: an invalidation queue for tests and models that records what was cleared when each
//! flush was submitted. It can refuse submissions and abort.

use super::{Descriptor, FlushCosts, InvalidationQueue, QueueError, Ticket, WaitLimit};
use crate::addr::Iova;
use crate::sync::{AtomicBool, AtomicU64, Ordering};
#[cfg(loom)]
use loom::thread;
#[cfg(not(loom))]
use std::thread;

/// Its flush takes effect when it is submitted: it takes a snapshot of what had been cleared by
/// then.
///
/// The clears are relaxed stores: only the invalidator orders them before the snapshot, and only
/// the ticket orders the snapshot before the owner's check.
pub(super) struct Snapshot<const PAGES: usize> {
    pub(super) cleared: [AtomicU64; PAGES],
    pub(super) flushed: [AtomicU64; PAGES],
    submitted: AtomicU64,
    /// The number of descriptors accepted at a time.
    accepts: usize,
    /// The submission (counted from 0) that aborts.
    aborts_at: Option<u64>,
    /// Refuses the last of every so many submissions.
    refuses_every: Option<u64>,
    /// Counts submissions: one thread at a time makes them.
    submissions: AtomicU64,
    aborted: AtomicBool,
}

impl<const PAGES: usize> Snapshot<PAGES> {
    pub(super) fn new() -> Self {
        Self::with(usize::MAX, None)
    }

    pub(super) fn with(accepts: usize, aborts_at: Option<u64>) -> Self {
        let zeros = || core::array::from_fn(|_| AtomicU64::new(0));
        Self {
            cleared: zeros(),
            flushed: zeros(),
            submitted: AtomicU64::new(0),
            accepts,
            aborts_at,
            refuses_every: None,
            submissions: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
        }
    }

    /// Returns the queue, which now refuses the last of every `submissions`.
    pub(super) fn refusing_every(self, submissions: u64) -> Self {
        Self { refuses_every: Some(submissions), ..self }
    }

    /// Returns whether it has aborted and was restarted.
    #[cfg(not(loom))]
    pub(super) fn has_recovered(&self) -> bool {
        let submissions = self.submissions.load(Ordering::Relaxed);
        self.aborts_at.is_some_and(|at| submissions > at) && !self.aborted.load(Ordering::Relaxed)
    }
}

impl<const PAGES: usize> InvalidationQueue for Snapshot<PAGES> {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let submission = self.submissions.load(Ordering::Relaxed);
        self.submissions.store(submission + 1, Ordering::Relaxed);
        if self.aborts_at == Some(submission) {
            // The descriptors that it accepts are lost, as those in flight are.
            self.aborted.store(true, Ordering::Release);
            return Ok(());
        }
        let refuses =
            self.refuses_every.is_some_and(|every| (submission + 1).is_multiple_of(every));
        if refuses || self.aborted.load(Ordering::Relaxed) {
            return Err(QueueError::Full);
        }
        for descriptor in descriptors {
            let Descriptor::Iotlb { scope, .. } = descriptor else { continue };
            for (page, cleared) in (0..).zip(&self.cleared) {
                let at = Iova::new((page as u64) << 12);
                if scope.range().is_none_or(|range| range.contains(at)) {
                    self.flushed[page].store(cleared.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
        }
        if let Some(ticket) = wait {
            self.submitted.store(ticket.0, Ordering::Release);
        }
        Ok(())
    }
    fn accepts(&self) -> usize {
        self.accepts
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }
    fn restart(&self) {
        self.aborted.store(false, Ordering::Release);
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
