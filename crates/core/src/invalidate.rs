//! Invalidation: requests in, tickets out.
//!
//! Clearing a table entry does not take a device's access away: the IOMMU may have cached the entry and keeps it
//! until it is told. An [`Invalidator`] gathers the requests of all owners into one open [`Batch`], hands it to the
//! [`InvalidationQueue`] followed by one wait, and publishes the sequence number of the last wait that is over. Up to
//! [`InvalidationQueue::queue_depth`] batches are in flight; while there is no room for another, the open one gathers, so that a
//! burst of requests costs one flush and one wait.
//!
//! ```text
//! clear entries -> request(ranges) -> Ticket     the open batch
//!                  submit()                      the batch goes to the sink, if the queue has room
//!                  is_completed(ticket) / wait(ticket)
//! ```
//!
//! The rule that everything rests on: **a request is made after its entries are cleared, and its ticket is done only
//! when a flush that was submitted after the request is over.** The lock on the open batch orders the two; no lock is
//! held while a thread waits. A waiter that finds room in the queue submits the open batch itself, so no owner depends
//! on another one running.
//!
//! # Deadlines
//! A deadline counts from the submission of a batch, whoever waits, and however often. Completion is published in
//! order, so a ticket cannot complete before the oldest batch in flight: when that is past its deadline, every wait for it
//! or for a later ticket ends with [`WaitError::TimedOut`]. The flush may still complete, and a later look finds it.
//! A unit that [has failed](InvalidationQueue::has_failed) is another matter: all waits end at once with [`WaitError::UnitFailed`].

use crate::addr::IovaRange;
use crate::known_bad::{self, Mistake};
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Mutex, Ordering};
use clock::Clock;
use core::fmt;
use core::task::Poll;

mod batch;
mod clock;
#[cfg(all(test, loom))]
mod loom_model;
mod queue;
#[cfg(test)]
mod snapshot;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use batch::{Batch, Flush};
pub use queue::{InvalidationQueue, QueueError, WaitLimit};

/// The most batches that can be in flight, whatever the [`InvalidationQueue::queue_depth`].
pub const MAX_IN_FLIGHT: u64 = clock::ENTRIES as u64;

/// A point in the sequence of an invalidation queue: `done >= ticket` means that the flush is over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Done from the start: the ticket of what needs no flush.
    pub const COMPLETED: Self = Self(0);
    /// Never done: the ticket of what could not be revoked.
    pub const NEVER: Self = Self(u64::MAX);
}

/// Why a wait ended without the flush being over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline has passed. The flush may still complete; until then a device may reach what it covers.
    #[error(
        "an invalidation (ticket {}) has not completed {waited_ns} ns and {polls} polls after its submission, or \
         after that of an earlier one: a device may still reach what it covers; wait longer, or look again later",
        ticket.0
    )]
    TimedOut {
        /// What was waited for.
        ticket: Ticket,
        /// Nanoseconds since the oldest batch in flight was submitted; 0 where the sink has no clock.
        waited_ns: u64,
        /// How often waiters have asked since then, where the [`WaitLimit`] limits it.
        polls: u64,
    },
    /// The unit that flushes has failed for good: a device may reach what the flush covers for ever.
    #[error(
        "the invalidation unit has failed, so the flush (ticket {}) never completes: \
         a device may reach what it covers for ever, so that memory is not used again",
        ticket.0
    )]
    UnitFailed {
        /// What was waited for.
        ticket: Ticket,
    },
    /// The ticket was never given out.
    #[error("ticket {} was never given out (the last one is {})", ticket.0, last.0)]
    Unknown {
        /// What was waited for.
        ticket: Ticket,
        /// The last ticket that was given out.
        last: Ticket,
    },
}

/// What an [`Invalidator`] has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct InvalidationStats {
    /// Ranges that were asked to be flushed: `merged + sent` when nothing is under way. One for each range that was
    /// cleared, and those of `requested_tables`.
    pub requested: u64,
    /// Of these, ranges of which the table pages that an IOMMU holds had to be dropped, too: one for each request that
    /// retired some (and for each map, where entries that are not present are cached).
    pub requested_tables: u64,
    /// Ranges that needed no flush of their own, because a neighbour's covered them.
    pub merged: u64,
    /// Flushes handed to the sink.
    pub sent: u64,
    /// Of these, flushes of the whole domain, because a batch was full.
    pub domain_flushes: u64,
    /// Waits handed to the sink: one a batch.
    pub waits: u64,
    /// The most batches that were in flight at once.
    pub in_flight_peak: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// Nanoseconds spent in them, where the sink has a clock.
    pub wait_ns: u64,
    /// Waits that ended without the flush being over.
    pub timed_out: u64,
}

struct Queue {
    open: Batch,
    /// The ticket of the open batch.
    next: u64,
    stats: InvalidationStats,
}

/// Gathers requests, hands them to a [`InvalidationQueue`] in batches, and says when they are over.
pub struct Invalidator<S> {
    sink: S,
    queue: Mutex<Queue>,
    /// The last ticket that a request was given.
    requested: AtomicU64,
    /// The last ticket that was handed to the sink.
    submitted: CachePadded<AtomicU64>,
    /// The last ticket that is over. What followers poll.
    done: CachePadded<AtomicU64>,
    /// How many batches may be in flight.
    depth: u64,
    clock: Clock,
    /// Whether the sink has refused a batch for good.
    refused: AtomicBool,
    waited: AtomicU64,
    wait_ns: AtomicU64,
    timed_out: AtomicU64,
}

impl<S> fmt::Debug for Invalidator<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidator")
            .field("requested", &self.requested.load(Ordering::Relaxed))
            .field("submitted", &self.submitted.load(Ordering::Relaxed))
            .field("done", &self.done.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl<S: InvalidationQueue> Invalidator<S> {
    /// An invalidator in front of `sink`. Allocates the only memory that it ever uses.
    pub fn new(sink: S) -> Self {
        Self {
            depth: sink.queue_depth().clamp(1, MAX_IN_FLIGHT),
            clock: Clock::new(),
            refused: AtomicBool::new(false),
            sink,
            queue: Mutex::new(Queue { open: Batch::new(), next: 1, stats: InvalidationStats::default() }),
            requested: AtomicU64::new(0),
            submitted: CachePadded(AtomicU64::new(0)),
            done: CachePadded(AtomicU64::new(0)),
            waited: AtomicU64::new(0),
            wait_ns: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
        }
    }

    /// What carries the flushes out.
    pub fn queue(&self) -> &S {
        &self.sink
    }

    /// Asks for a flush of `flushes`, and says when it will be over. The entries of each have been cleared **before**
    /// it comes out of the iterator (which may clear them itself: the open batch can not be sent meanwhile). Nothing is sent before [`submit`](Self::submit), [`is_completed`](Self::is_completed) or [`wait`](Self::wait).
    ///
    /// No flushes at all need no ticket: [`Ticket::COMPLETED`].
    pub fn request(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        let mut queue = self.queue.lock();
        let before = queue.stats.requested;
        for flush in flushes {
            queue.stats.requested += 1;
            queue.stats.requested_tables += u64::from(!flush.leaf_only);
            queue.open.push(flush);
        }
        if queue.stats.requested == before {
            return Ticket::COMPLETED;
        }
        let ticket = queue.next;
        self.requested.store(ticket, Ordering::Release);
        Ticket(ticket)
    }

    /// Submits the open batch, if the queue has room for it; else requests gather in it until there is.
    pub fn submit(&self) {
        let submitted = self.submitted.load(Ordering::Acquire);
        if self.done.load(Ordering::Acquire) < submitted {
            self.publish();
        }
        let asked = self.requested.load(Ordering::Acquire) > submitted;
        if asked && self.has_room(submitted) && !self.refused.load(Ordering::Relaxed) {
            self.submit_open();
        }
    }

    fn has_room(&self, submitted: u64) -> bool {
        // `done` may have passed the `submitted` that the caller has read.
        submitted.saturating_sub(self.done.load(Ordering::Acquire)) < self.depth
    }

    /// Whether the unit has failed for good: no ticket that is not done will ever be.
    pub fn has_failed(&self) -> bool {
        self.refused.load(Ordering::Relaxed) || self.sink.has_failed()
    }

    /// Whether the flush is over. Never blocks beyond the hand-over of a batch; sends the next one if it can go.
    pub fn is_completed(&self, ticket: Ticket) -> bool {
        if self.done.load(Ordering::Acquire) >= ticket.0 {
            return true;
        }
        self.submit();
        self.done.load(Ordering::Acquire) >= ticket.0
    }

    /// The last ticket that is over, as far as anybody has looked.
    pub fn completed(&self) -> Ticket {
        Ticket(self.done.load(Ordering::Acquire))
    }

    /// Waits until the flush is over, or the sink's [`limit`](InvalidationQueue::limit) is reached, which counts from the submission
    /// of the oldest batch in flight.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] past the deadline: what the flush covers may be reached until it completes, and the
    /// ticket may be waited for again. [`WaitError::UnitFailed`] where it never completes. [`WaitError::Unknown`] where
    /// no such ticket was given out.
    pub fn wait(&self, ticket: Ticket) -> Result<(), WaitError> {
        believed(self.wait_while(ticket, |_| self.overdue(ticket)))
    }

    /// Returns how a [`wait`](Self::wait) would end, if it would end now, without waiting.
    pub fn check(&self, ticket: Ticket) -> Poll<Result<(), WaitError>> {
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        self.check_requested(ticket)?;
        self.check_once(ticket, || self.overdue(ticket)).map(believed)
    }

    /// Returns an error if the oldest batch in flight is past its deadline.
    fn overdue(&self, ticket: Ticket) -> Option<WaitError> {
        let (oldest, limit) = (self.oldest(), self.sink.limit());
        if limit.polls < u64::MAX {
            self.clock.count_poll(oldest);
        }
        let age = self.clock.age(oldest, self.sink.now_ns())?;
        let over = age.ns >= limit.time_ns || age.polls > limit.polls;
        over.then_some(WaitError::TimedOut { ticket, waited_ns: age.ns, polls: age.polls.min(limit.polls) })
    }

    fn check_requested(&self, ticket: Ticket) -> Result<(), WaitError> {
        let last = Ticket(self.requested.load(Ordering::Acquire));
        if ticket > last { Err(WaitError::Unknown { ticket, last }) } else { Ok(()) }
    }

    fn check_once(
        &self,
        ticket: Ticket,
        over: impl FnOnce() -> Option<WaitError>,
    ) -> Poll<Result<(), WaitError>> {
        let error = if self.has_failed() { Some(WaitError::UnitFailed { ticket }) } else { over() };
        // The flush may have completed before the unit failed, or while the clock was read.
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        error.map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
    }

    /// Waits until the flush is over, or `limit` is reached, which counts from now: for a ticket past its deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), WaitError> {
        let start = self.sink.now_ns();
        self.wait_while(ticket, |polls| {
            let waited_ns = elapsed(start, self.sink.now_ns());
            let over = waited_ns >= limit.time_ns || polls >= limit.polls;
            over.then_some(WaitError::TimedOut { ticket, waited_ns, polls })
        })
    }

    /// The oldest ticket that is not done: none can be done before it is.
    fn oldest(&self) -> Ticket {
        Ticket(self.done.load(Ordering::Acquire).saturating_add(1))
    }

    /// Waits until the flush is over or `over`, which is told how often it has been asked, gives a reason to stop.
    fn wait_while(&self, ticket: Ticket, over: impl Fn(u64) -> Option<WaitError>) -> Result<(), WaitError> {
        if self.is_completed(ticket) {
            return Ok(());
        }
        self.check_requested(ticket)?;
        let start = self.sink.now_ns();
        let mut polls = 0;
        let result = loop {
            if let Poll::Ready(result) = self.check_once(ticket, || over(polls)) {
                break result;
            }
            self.sink.relax(polls);
            polls += 1;
        };
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.wait_ns.fetch_add(elapsed(start, self.sink.now_ns()), Ordering::Relaxed);
        self.timed_out.fetch_add(u64::from(result.is_err()), Ordering::Relaxed);
        result
    }

    /// What has been done so far.
    pub fn stats(&self) -> InvalidationStats {
        let mut stats = self.queue.lock().stats;
        stats.waited = self.waited.load(Ordering::Relaxed);
        stats.wait_ns = self.wait_ns.load(Ordering::Relaxed);
        stats.timed_out = self.timed_out.load(Ordering::Relaxed);
        stats
    }

    /// Looks how far the sink is.
    fn publish(&self) {
        let completed = self.sink.completed();
        // A sink that names a ticket which it was never given is not believed: its waiters time out. (It may also be
        // that the hand-over of this very ticket is not yet noted: then the next look finds it.)
        if completed.0 <= self.submitted.load(Ordering::Acquire) {
            self.done.fetch_max(completed.0, Ordering::AcqRel);
        }
    }

    fn submit_open(&self) {
        let mut queue = self.queue.lock();
        let queue = &mut *queue;
        if !self.has_room(self.submitted.load(Ordering::Relaxed)) || queue.open.is_empty() {
            return; // another thread was faster
        }
        let ticket = Ticket(queue.next);
        queue.open.merge();
        if known_bad::makes(Mistake::NoFlush) {
            queue.open.clear();
        }
        self.clock.start(ticket, self.sink.now_ns());
        match self.sink.submit(&queue.open, ticket) {
            Ok(()) => {
                queue.stats.sent += queue.open.flushes_sent();
                queue.stats.merged += queue.open.take_absorbed();
                queue.stats.domain_flushes += u64::from(queue.open.is_domain_flush());
                queue.stats.waits += 1;
                queue.open.clear();
                let in_flight = queue.next - self.done.load(Ordering::Relaxed);
                queue.stats.in_flight_peak = queue.stats.in_flight_peak.max(in_flight);
                self.submitted.store(queue.next, Ordering::Release);
                queue.next += 1;
            }
            // The batch stays open, and its deadline counts from this first attempt.
            Err(QueueError::Full) => {}
            Err(QueueError::Failed) => self.refused.store(true, Ordering::Relaxed),
        }
    }
}

/// Takes a timeout for a completion, if that mistake is switched on.
fn believed(result: Result<(), WaitError>) -> Result<(), WaitError> {
    match result {
        Err(WaitError::TimedOut { .. }) if known_bad::makes(Mistake::TimeoutIsCompletion) => Ok(()),
        result => result,
    }
}

fn elapsed(start: Option<u64>, now: Option<u64>) -> u64 {
    start.zip(now).map_or(0, |(start, now)| now.saturating_sub(start))
}

/// A flush of all that is cached for `range`, except table pages.
impl From<IovaRange> for Flush {
    fn from(range: IovaRange) -> Self {
        Self { range, leaf_only: true }
    }
}
