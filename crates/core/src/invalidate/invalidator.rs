//! The invalidator: gathers requests, submits them in batches, and publishes their completion.

use super::batch::{Flush, FlushList, Open, Pages};
use super::flight::{Clock, FlightCell, MAX_IN_FLIGHT};
use super::queue::{FlushCosts, InvalidationQueue, Ticket};
use super::stats::{InvalidationStats, Sent, Waits};
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Ordering, SpinLock};
use core::fmt;

/// Gathers requests, submits them to an [`InvalidationQueue`] in batches, and publishes their
/// completion.
pub struct Invalidator<Q> {
    pub(super) queue: Q,
    /// What requesters need: held for an append, or to take the batch out.
    pub(super) open: SpinLock<Open>,
    /// The batch being submitted. Claimed with `open` held.
    pub(super) flight: FlightCell,
    /// The last ticket issued.
    pub(super) requested: AtomicU64,
    /// The last ticket submitted to the queue.
    pub(super) submitted: CachePadded<AtomicU64>,
    /// The last completed ticket that has been observed. What other waiters poll.
    pub(super) completed: CachePadded<AtomicU64>,
    depth: u64,
    pub(super) costs: FlushCosts,
    pub(super) clock: Clock,
    /// Whether the queue has refused a batch for good.
    pub(super) refused: AtomicBool,
    /// Whether the queue was restarted and has not accepted yet what replaces the flushes that it
    /// had aborted. Changed by the thread that has claimed the flight; others read it to know that
    /// there is something to submit.
    pub(super) restarted: AtomicBool,
    pub(super) sent: Sent,
    pub(super) waits: Waits,
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
            costs: queue.costs(),
            clock: Clock::new(),
            refused: AtomicBool::new(false),
            restarted: AtomicBool::new(false),
            queue,
            open: SpinLock::new(Open::new()),
            flight: FlightCell::new(),
            requested: AtomicU64::new(0),
            submitted: CachePadded(AtomicU64::new(0)),
            completed: CachePadded(AtomicU64::new(0)),
            sent: Sent::new(),
            waits: Waits::new(),
        }
    }

    /// Returns the queue.
    pub fn queue(&self) -> &Q {
        &self.queue
    }

    /// Requests `flushes` and returns the ticket after which they have completed. The entries of
    /// each have been cleared **before** the iterator yields it. The iterator may use the
    /// invalidator. Nothing is submitted before [`submit`](Self::submit),
    /// [`is_completed`](Self::is_completed) or [`wait`](Self::wait).
    ///
    /// No flushes at all need no ticket: [`Ticket::COMPLETED`].
    pub fn request(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        self.append(flushes, false)
    }

    /// Requests `flushes`, as [`request`](Self::request) does, and submits the open batch unless
    /// the queue is full.
    pub fn request_and_submit(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        self.append(flushes, true)
    }

    /// Requests `flush` and submits, as [`request_and_submit`](Self::request_and_submit) does: by
    /// itself if nothing has gathered.
    pub(crate) fn request_one(&self, flush: Flush) -> Ticket {
        self.publish_if_in_flight();
        let pages = Pages::new(&flush);
        let mut open = self.open.lock();
        open.requested.count(&pages);
        let ticket = self.issue(&open);
        match self.submit_one(open, pages) {
            Ok(()) => {}
            Err(mut open) => {
                open.batch.push(pages);
                self.submit_open(open);
            }
        }
        ticket
    }

    /// Requests everything in `list`, which is empty afterwards, and submits the open batch as
    /// [`request_and_submit`](Self::request_and_submit) does if `submit` is true. The lock is held
    /// for as many appends as the list has ranges that do not abut.
    pub(crate) fn request_list(&self, list: &mut FlushList, submit: bool) -> Ticket {
        if list.is_empty() {
            return Ticket::COMPLETED;
        }
        if submit {
            self.publish_if_in_flight();
        }
        let mut open = self.open.lock();
        for pages in list.pages() {
            open.batch.push(*pages);
        }
        open.batch.count_merged(list.requested.flushes - list.pages().len() as u64);
        open.requested.add(&list.requested);
        let ticket = self.issue(&open);
        if submit {
            self.submit_open(open);
        } else {
            drop(open);
        }
        list.clear();
        ticket
    }

    /// Requests `flushes`, a list at a time: the caller's iterator runs without the lock.
    fn append(&self, flushes: impl IntoIterator<Item = Flush>, submit: bool) -> Ticket {
        let (mut list, mut ticket) = (FlushList::new(), Ticket::COMPLETED);
        for flush in flushes {
            let mut flush = flush;
            while let Err(full) = list.push(flush) {
                ticket = ticket.max(self.request_list(&mut list, false));
                flush = full;
            }
        }
        ticket.max(self.request_list(&mut list, submit))
    }

    pub(super) fn issue(&self, open: &Open) -> Ticket {
        self.requested.store(open.ticket, Ordering::Release);
        Ticket(open.ticket)
    }

    /// Submits the open batch unless the queue is full; then requests gather in it.
    pub fn submit(&self) {
        let submitted = self.publish_if_in_flight();
        let requested = self.requested.load(Ordering::Acquire) > submitted;
        let refused = self.refused.load(Ordering::Relaxed);
        if requested && !self.is_full(submitted) && !refused && !self.flight.is_claimed() {
            self.submit_open(self.open.lock());
        }
    }

    /// Publishes what has completed, if anything is in flight. Returns the last ticket submitted.
    #[inline(always)]
    pub(super) fn publish_if_in_flight(&self) -> u64 {
        let submitted = self.submitted.load(Ordering::Acquire);
        if self.completed.load(Ordering::Acquire) < submitted {
            self.publish_in_flight();
        }
        submitted
    }

    #[inline(never)]
    fn publish_in_flight(&self) {
        self.publish();
        // A queue that refused the flush after its restart no longer says that it has aborted.
        if self.restarted.load(Ordering::Relaxed) || self.queue.has_aborted() {
            self.resubmit();
        }
    }

    #[inline]
    pub(super) fn is_full(&self, submitted: u64) -> bool {
        // `completed` may have passed the `submitted` that the caller has read.
        submitted.saturating_sub(self.completed.load(Ordering::Acquire)) >= self.depth
    }

    /// Whether the unit has failed: no ticket in flight will complete.
    pub(crate) fn has_failed(&self) -> bool {
        self.refused.load(Ordering::Relaxed) || self.queue.has_failed()
    }

    /// Whether the flush has completed. Submits the open batch if the queue is not full, but does
    /// not wait.
    #[inline]
    pub fn is_completed(&self, ticket: Ticket) -> bool {
        self.completed.load(Ordering::Acquire) >= ticket.0 || self.is_completed_now(ticket)
    }

    fn is_completed_now(&self, ticket: Ticket) -> bool {
        self.submit();
        self.completed.load(Ordering::Acquire) >= ticket.0
    }

    /// Returns the last completed ticket that any thread has observed.
    pub(crate) fn completed(&self) -> Ticket {
        Ticket(self.completed.load(Ordering::Acquire))
    }

    /// Returns the statistics.
    pub fn stats(&self) -> InvalidationStats {
        let mut stats = InvalidationStats::default();
        self.sent.add_to(&mut stats);
        let requested = self.open.lock().requested;
        stats.requested = requested.flushes;
        stats.requested_tables = requested.tables;
        stats.pages_requested = requested.pages;
        self.waits.add_to(&mut stats);
        stats
    }

    /// Publishes what the queue has completed.
    pub(super) fn publish(&self) {
        self.publish_up_to(self.queue.completed());
    }

    /// Publishes that the queue has completed everything up to `completed`.
    pub(super) fn publish_up_to(&self, completed: Ticket) {
        // A ticket that was never submitted is not believed: its waiters time out. (It may also be
        // that the submission of this very ticket is not yet recorded; then the next poll finds
        // it.)
        let news = completed.0 > self.completed.load(Ordering::Relaxed);
        if news && completed.0 <= self.submitted.load(Ordering::Acquire) {
            self.completed.fetch_max(completed.0, Ordering::AcqRel);
        }
    }
}
