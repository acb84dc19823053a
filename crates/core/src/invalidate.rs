//! Invalidation: requests in, tickets out.
//!
//! Clearing a table entry does not take a device's access away: the IOMMU may have cached the entry and keeps it
//! until it is told. An [`Invalidator`] gathers the requests of all owners into one open [`Batch`], hands it to the
//! [`Sink`] followed by one wait, and publishes the sequence number of the last wait that is over. While a batch is
//! on its way the next one gathers, so that a burst of requests costs one flush and one wait.
//!
//! ```text
//! clear entries -> request(ranges) -> Ticket     the open batch
//!                  submit()                      the batch goes to the sink, one at a time
//!                  is_done(ticket) / wait(ticket)
//! ```
//!
//! The rule that everything rests on: **a request is made after its entries are cleared, and its ticket is done only
//! when a flush that was submitted after the request is over.** The lock on the open batch orders the two; no lock is
//! held while anybody waits. A waiter that finds the batch on its way finished submits the next one itself, so no
//! owner depends on another one running.

use crate::addr::IovaRange;
use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering};
use core::fmt;

mod batch;
#[cfg(all(test, loom))]
mod loom_model;
#[cfg(test)]
mod picture;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use batch::{Batch, Flush};

/// A point in the sequence of an invalidation queue: `done >= ticket` means that the flush is over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Done from the start: the ticket of what needs no flush.
    pub const DONE: Self = Self(0);
    /// Never done: the ticket of what could not be revoked.
    pub const NEVER: Self = Self(u64::MAX);
}

/// How long a waiter waits before it gives the flush up; whichever is reached first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitLimit {
    /// Nanoseconds of the sink's clock, if it has one.
    pub time_ns: u64,
    /// How often a waiter asks.
    pub polls: u64,
}

/// Why a sink did not take a batch. Nothing of the batch was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SinkError {
    /// The queue has no room; it is tried again when somebody asks.
    #[error("the invalidation queue has no room for a batch")]
    Full,
    /// The unit that flushes has failed.
    #[error("the invalidation unit does not take batches any more")]
    Gone,
}

/// What carries flushes out: the queue of an IOMMU.
pub trait Sink: Send + Sync {
    /// Takes all of a batch and, behind it, a wait whose completion makes [`completed`](Self::completed) return
    /// `ticket`. Must not block until the flush is over. Tickets come in ascending order.
    ///
    /// # Errors
    /// [`SinkError`]; then nothing was taken.
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), SinkError>;

    /// The last ticket up to which *all* waits are over. It never goes back, and reads memory only.
    ///
    /// When it returns `t`, no device uses anything that the batches up to `t` cover, and accesses that had begun
    /// with it have ended.
    fn completed(&self) -> Ticket;

    /// Called between two polls; `polls` counts from 0.
    fn relax(&self, polls: u64);

    /// A clock that only goes forward, if there is one.
    fn now_ns(&self) -> Option<u64> {
        None
    }

    /// How long to wait.
    fn limit(&self) -> WaitLimit;

    /// Whether entries that are *not* present are cached too, so that a map needs a flush (VT-d: caching mode).
    fn caches_absent(&self) -> bool {
        false
    }
}

/// Why a wait ended without the flush being over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The flush may still be on its way: what it covers must be treated as reachable for ever.
    #[error(
        "an invalidation (ticket {}) was not over after {waited_ns} ns and {polls} polls: \
         a device may still reach what it covers, so that memory is not used again",
        ticket.0
    )]
    TimedOut {
        /// What was waited for.
        ticket: Ticket,
        /// How long, in nanoseconds; 0 where the sink has no clock.
        waited_ns: u64,
        /// How often it was asked.
        polls: u64,
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
    /// cleared, and those of `asked_tables`.
    pub asked: u64,
    /// Of these, ranges of which the table pages that an IOMMU holds had to be dropped, too: one for each request that
    /// retired some (and for each map, where entries that are not present are cached).
    pub asked_tables: u64,
    /// Ranges that needed no flush of their own, because a neighbour's covered them.
    pub merged: u64,
    /// Flushes handed to the sink.
    pub sent: u64,
    /// Of these, flushes of the whole domain, because a batch was full.
    pub whole: u64,
    /// Waits handed to the sink: one a batch.
    pub waits: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// Nanoseconds spent in them, where the sink has a clock.
    pub wait_ns: u64,
    /// Waits that were given up.
    pub timed_out: u64,
}

struct Queue {
    open: Batch,
    /// The ticket of the open batch.
    next: u64,
    stats: InvalidationStats,
}

/// Gathers requests, hands them to a [`Sink`] in batches, and says when they are over.
pub struct Invalidator<S> {
    sink: S,
    queue: Mutex<Queue>,
    /// The last ticket that a request was given.
    requested: AtomicU64,
    /// The last ticket that was handed to the sink.
    submitted: CachePadded<AtomicU64>,
    /// The last ticket that is over. What followers poll.
    done: CachePadded<AtomicU64>,
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

impl<S: Sink> Invalidator<S> {
    /// An invalidator in front of `sink`. Allocates the only memory that it ever uses.
    pub fn new(sink: S) -> Self {
        Self {
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
    pub fn sink(&self) -> &S {
        &self.sink
    }

    /// Asks for a flush of `flushes`, and says when it will be over. The entries of each have been cleared **before**
    /// it comes out of the iterator (which may clear them itself: the open batch can not be sent meanwhile). Nothing is sent before [`submit`](Self::submit), [`is_done`](Self::is_done) or [`wait`](Self::wait).
    ///
    /// No flushes at all need no ticket: [`Ticket::DONE`].
    pub fn request(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        let mut queue = self.queue.lock();
        let before = queue.stats.asked;
        for flush in flushes {
            queue.stats.asked += 1;
            queue.stats.asked_tables += u64::from(!flush.leaf_only);
            queue.open.push(flush);
        }
        if queue.stats.asked == before {
            return Ticket::DONE;
        }
        let ticket = queue.next;
        self.requested.store(ticket, Ordering::Release);
        Ticket(ticket)
    }

    /// Hands what was asked for to the sink, if no batch is on its way; else it gathers on until that one is over.
    pub fn submit(&self) {
        let submitted = self.submitted.load(Ordering::Acquire);
        if self.done.load(Ordering::Acquire) < submitted {
            self.publish();
        }
        let idle = self.done.load(Ordering::Acquire) >= submitted;
        if idle && self.requested.load(Ordering::Acquire) > submitted {
            self.submit_open();
        }
    }

    /// Whether the flush is over. Never blocks beyond the hand-over of a batch; sends the next one if it can go.
    pub fn is_done(&self, ticket: Ticket) -> bool {
        if self.done.load(Ordering::Acquire) >= ticket.0 {
            return true;
        }
        self.submit();
        self.done.load(Ordering::Acquire) >= ticket.0
    }

    /// The last ticket that is over, as far as anybody has looked.
    pub fn done(&self) -> Ticket {
        Ticket(self.done.load(Ordering::Acquire))
    }

    /// Waits until the flush is over.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] after the sink's [`limit`](Sink::limit): what the flush covers may still be reached.
    /// [`WaitError::Unknown`] where no such ticket was given out.
    pub fn wait(&self, ticket: Ticket) -> Result<(), WaitError> {
        if self.is_done(ticket) {
            return Ok(());
        }
        let last = Ticket(self.requested.load(Ordering::Acquire));
        if ticket > last {
            return Err(WaitError::Unknown { ticket, last });
        }
        self.waited.fetch_add(1, Ordering::Relaxed);
        let start = self.sink.now_ns();
        let limit = self.sink.limit();
        let mut polls = 0;
        loop {
            self.sink.relax(polls);
            polls += 1;
            let over = self.is_done(ticket);
            let waited_ns = match (start, self.sink.now_ns()) {
                (Some(start), Some(now)) => now.saturating_sub(start),
                _ => 0,
            };
            if over {
                self.wait_ns.fetch_add(waited_ns, Ordering::Relaxed);
                return Ok(());
            }
            if waited_ns >= limit.time_ns || polls >= limit.polls {
                self.wait_ns.fetch_add(waited_ns, Ordering::Relaxed);
                self.timed_out.fetch_add(1, Ordering::Relaxed);
                return Err(WaitError::TimedOut { ticket, waited_ns, polls });
            }
        }
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
        let idle = self.done.load(Ordering::Acquire) >= self.submitted.load(Ordering::Relaxed);
        if !idle || queue.open.is_empty() {
            return; // somebody else was faster
        }
        queue.open.merge();
        // A batch that is not taken stays open and goes with the next attempt; its waiters time out if none succeeds.
        if self.sink.submit(&queue.open, Ticket(queue.next)).is_ok() {
            queue.stats.sent += queue.open.flushes_sent();
            queue.stats.merged += queue.open.take_absorbed();
            queue.stats.whole += u64::from(queue.open.is_whole());
            queue.stats.waits += 1;
            queue.open.clear();
            self.submitted.store(queue.next, Ordering::Release);
            queue.next += 1;
        }
    }
}

/// A flush of all that is cached for `range`, except table pages.
impl From<IovaRange> for Flush {
    fn from(range: IovaRange) -> Self {
        Self { range, leaf_only: true }
    }
}
