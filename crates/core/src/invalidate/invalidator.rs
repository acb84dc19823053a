//! The invalidator: gathers requests, submits them in batches, and publishes their completion.

use super::batch::{Batch, Flush};
use super::clock::{Clock, MAX_IN_FLIGHT};
use super::queue::{InvalidationQueue, QueueError, WaitLimit};
use super::stats::InvalidationStats;
use super::ticket::{Ticket, WaitError};
use crate::known_bad::{self, Mistake};
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Mutex, Ordering};
use core::fmt;
use core::task::Poll;

struct Open {
    batch: Batch,
    /// The ticket of the open batch.
    ticket: u64,
    stats: InvalidationStats,
}

/// Gathers requests, submits them to an [`InvalidationQueue`] in batches, and publishes their completion.
pub struct Invalidator<Q> {
    queue: Q,
    open: Mutex<Open>,
    /// The last ticket issued.
    requested: AtomicU64,
    /// The last ticket submitted to the queue.
    submitted: CachePadded<AtomicU64>,
    /// The last completed ticket that has been observed. What other waiters poll.
    completed: CachePadded<AtomicU64>,
    depth: u64,
    clock: Clock,
    /// Whether the queue has refused a batch for good.
    refused: AtomicBool,
    waited: AtomicU64,
    wait_ns: AtomicU64,
    timed_out: AtomicU64,
}

impl<Q> fmt::Debug for Invalidator<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidator")
            .field("requested", &self.requested.load(Ordering::Relaxed))
            .field("submitted", &self.submitted.load(Ordering::Relaxed))
            .field("completed", &self.completed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Creates an invalidator in front of `queue`. Allocates the only memory that it ever uses.
    pub fn new(queue: Q) -> Self {
        Self {
            depth: queue.queue_depth().clamp(1, MAX_IN_FLIGHT),
            clock: Clock::new(),
            refused: AtomicBool::new(false),
            queue,
            open: Mutex::new(Open { batch: Batch::new(), ticket: 1, stats: InvalidationStats::default() }),
            requested: AtomicU64::new(0),
            submitted: CachePadded(AtomicU64::new(0)),
            completed: CachePadded(AtomicU64::new(0)),
            waited: AtomicU64::new(0),
            wait_ns: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
        }
    }

    /// Returns the queue.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Requests `flushes` and returns the ticket after which they have completed. The entries of each have been cleared
    /// **before** the iterator yields it (which may clear them itself: the open batch cannot be submitted meanwhile).
    /// Nothing is submitted before [`submit`](Self::submit), [`is_completed`](Self::is_completed) or [`wait`](Self::wait).
    ///
    /// No flushes at all need no ticket: [`Ticket::COMPLETED`].
    pub fn request(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        self.append(&mut self.open.lock(), flushes)
    }

    /// Requests `flushes`, as [`request`](Self::request) does, and submits the open batch unless the queue is full: one
    /// acquisition of the lock, and only an append while the queue is full.
    pub fn request_and_submit(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        self.publish_if_in_flight();
        let mut open = self.open.lock();
        let ticket = self.append(&mut open, flushes);
        self.submit_open(&mut open);
        ticket
    }

    fn append(&self, open: &mut Open, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        let before = open.stats.requested;
        for flush in flushes {
            open.stats.requested += 1;
            open.stats.requested_tables += u64::from(!flush.leaf_only);
            open.batch.push(flush);
        }
        if open.stats.requested == before {
            return Ticket::COMPLETED;
        }
        self.requested.store(open.ticket, Ordering::Release);
        Ticket(open.ticket)
    }

    /// Submits the open batch unless the queue is full; then requests gather in it.
    pub fn submit(&self) {
        let submitted = self.publish_if_in_flight();
        let requested = self.requested.load(Ordering::Acquire) > submitted;
        if requested && !self.is_full(submitted) && !self.refused.load(Ordering::Relaxed) {
            self.submit_open(&mut self.open.lock());
        }
    }

    /// Publishes what has completed, if anything is in flight. Returns the last ticket submitted.
    fn publish_if_in_flight(&self) -> u64 {
        let submitted = self.submitted.load(Ordering::Acquire);
        if self.completed.load(Ordering::Acquire) < submitted {
            self.publish();
        }
        submitted
    }

    fn is_full(&self, submitted: u64) -> bool {
        // `completed` may have passed the `submitted` that the caller has read.
        submitted.saturating_sub(self.completed.load(Ordering::Acquire)) >= self.depth
    }

    /// Whether the unit has failed: no ticket in flight will complete.
    pub fn has_failed(&self) -> bool {
        self.refused.load(Ordering::Relaxed) || self.queue.has_failed()
    }

    /// Whether the flush has completed. Submits the open batch if the queue is not full, but does not wait.
    pub fn is_completed(&self, ticket: Ticket) -> bool {
        if self.completed.load(Ordering::Acquire) >= ticket.0 {
            return true;
        }
        self.submit();
        self.completed.load(Ordering::Acquire) >= ticket.0
    }

    /// Returns the last completed ticket that any thread has observed.
    pub fn completed(&self) -> Ticket {
        Ticket(self.completed.load(Ordering::Acquire))
    }

    /// Waits until the flush has completed, or the queue's [`limit`](InvalidationQueue::limit) is reached, counted from the
    /// submission of the oldest batch in flight.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] past the deadline: a device may reach what the flush covers until it completes, and the
    /// ticket may be waited for again. [`WaitError::UnitFailed`] if it never completes. [`WaitError::Unknown`] if
    /// no such ticket was issued.
    pub fn wait(&self, ticket: Ticket) -> Result<(), WaitError> {
        timeout_or_mistake(self.wait_while(ticket, |_| self.overdue(ticket)))
    }

    /// Returns how a [`wait`](Self::wait) would end if it ended now, without waiting.
    pub fn check(&self, ticket: Ticket) -> Poll<Result<(), WaitError>> {
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        self.check_issued(ticket)?;
        self.check_once(ticket, || self.overdue(ticket)).map(timeout_or_mistake)
    }

    /// Waits until the flush has completed, or for `limit` from now: for a ticket past its deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), WaitError> {
        let start = self.queue.now_ns();
        self.wait_while(ticket, |polls| {
            let waited_ns = elapsed(start, self.queue.now_ns());
            let over = waited_ns >= limit.time_ns || polls >= limit.polls;
            over.then_some(WaitError::TimedOut { ticket, waited_ns, polls })
        })
    }

    /// Returns an error if the oldest batch in flight is past its deadline. Counts as one poll.
    fn overdue(&self, ticket: Ticket) -> Option<WaitError> {
        // No ticket can complete before this one.
        let oldest = Ticket(self.completed.load(Ordering::Acquire).saturating_add(1));
        let limit = self.queue.limit();
        if limit.polls < u64::MAX {
            self.clock.count_poll(oldest);
        }
        let age = self.clock.age(oldest, self.queue.now_ns())?;
        let over = age.ns >= limit.time_ns || age.polls > limit.polls;
        over.then_some(WaitError::TimedOut { ticket, waited_ns: age.ns, polls: age.polls.min(limit.polls) })
    }

    fn check_issued(&self, ticket: Ticket) -> Result<(), WaitError> {
        let last = Ticket(self.requested.load(Ordering::Acquire));
        if ticket > last { Err(WaitError::Unknown { ticket, last }) } else { Ok(()) }
    }

    fn check_once(
        &self,
        ticket: Ticket,
        overdue: impl FnOnce() -> Option<WaitError>,
    ) -> Poll<Result<(), WaitError>> {
        let error = if self.has_failed() { Some(WaitError::UnitFailed { ticket }) } else { overdue() };
        // The flush may have completed before the unit failed, or while the clock was read.
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        error.map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
    }

    /// Waits until the flush has completed or `overdue`, called with the number of polls so far, returns an error.
    fn wait_while(
        &self,
        ticket: Ticket,
        overdue: impl Fn(u64) -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        if self.is_completed(ticket) {
            return Ok(());
        }
        self.check_issued(ticket)?;
        let start = self.queue.now_ns();
        let mut polls = 0;
        let result = loop {
            if let Poll::Ready(result) = self.check_once(ticket, || overdue(polls)) {
                break result;
            }
            self.queue.relax(polls);
            polls += 1;
        };
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.wait_ns.fetch_add(elapsed(start, self.queue.now_ns()), Ordering::Relaxed);
        self.timed_out.fetch_add(u64::from(result.is_err()), Ordering::Relaxed);
        result
    }

    /// Returns the statistics.
    pub fn stats(&self) -> InvalidationStats {
        let mut stats = self.open.lock().stats;
        stats.waited = self.waited.load(Ordering::Relaxed);
        stats.wait_ns = self.wait_ns.load(Ordering::Relaxed);
        stats.timed_out = self.timed_out.load(Ordering::Relaxed);
        stats
    }

    /// Publishes what the queue has completed.
    fn publish(&self) {
        let completed = self.queue.completed();
        // A ticket that was never submitted is not believed: its waiters time out. (It may also be that the submission
        // of this very ticket is not yet recorded; then the next poll finds it.)
        if completed.0 <= self.submitted.load(Ordering::Acquire) {
            self.completed.fetch_max(completed.0, Ordering::AcqRel);
        }
    }

    fn submit_open(&self, open: &mut Open) {
        let full = self.is_full(self.submitted.load(Ordering::Relaxed));
        if full || open.batch.is_empty() || self.refused.load(Ordering::Relaxed) {
            return; // another thread was faster, or the unit has failed
        }
        let ticket = Ticket(open.ticket);
        open.batch.merge();
        if known_bad::makes(Mistake::NoFlush) {
            open.batch.clear();
        }
        self.clock.start(ticket, self.queue.now_ns());
        match self.queue.submit(&open.batch, ticket) {
            Ok(()) => {
                open.stats.sent += open.batch.flushes_sent();
                open.stats.merged += open.batch.take_merged();
                open.stats.domain_flushes += u64::from(open.batch.is_domain_flush());
                open.stats.waits += 1;
                open.batch.clear();
                let in_flight = open.ticket - self.completed.load(Ordering::Relaxed);
                open.stats.in_flight_peak = open.stats.in_flight_peak.max(in_flight);
                self.submitted.store(open.ticket, Ordering::Release);
                open.ticket += 1;
            }
            // The batch stays open, and its deadline counts from this first attempt.
            Err(QueueError::Full) => {}
            Err(QueueError::Failed) => self.refused.store(true, Ordering::Relaxed),
        }
    }
}

/// Takes a timeout for a completion, if that mistake is switched on.
fn timeout_or_mistake(result: Result<(), WaitError>) -> Result<(), WaitError> {
    match result {
        Err(WaitError::TimedOut { .. }) if known_bad::makes(Mistake::TimeoutIsCompletion) => Ok(()),
        result => result,
    }
}

fn elapsed(start: Option<u64>, now: Option<u64>) -> u64 {
    start.zip(now).map_or(0, |(start, now)| now.saturating_sub(start))
}
