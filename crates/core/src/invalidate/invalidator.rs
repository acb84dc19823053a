//! The invalidator: gathers requests, submits them in batches, and publishes their completion.

use super::batch::Open;
use super::clock::{Clock, MAX_IN_FLIGHT};
use super::costs::FlushCosts;
use super::flight::FlightCell;
use super::flush::{Flush, FlushList, Pages};
use super::queue::{InvalidationQueue, WaitLimit};
use super::stats::{InvalidationStats, Sent};
use super::ticket::{Ticket, WaitError};
use crate::known_bad::{self, Mistake};
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Ordering, SpinLock};
use core::fmt;
use core::task::Poll;

/// Gathers requests, submits them to an [`InvalidationQueue`] in batches, and publishes their completion.
pub struct Invalidator<Q> {
    pub(super) queue: Q,
    /// What requesters need: held for an append, or to take the batch out.
    pub(super) open: SpinLock<Open>,
    /// The batch being submitted. Claimed with `open` held.
    pub(super) flight: FlightCell,
    /// The last ticket issued.
    requested: AtomicU64,
    /// The last ticket submitted to the queue.
    pub(super) submitted: CachePadded<AtomicU64>,
    /// The last completed ticket that has been observed. What other waiters poll.
    pub(super) completed: CachePadded<AtomicU64>,
    depth: u64,
    pub(super) costs: FlushCosts,
    pub(super) clock: Clock,
    /// Whether the queue has refused a batch for good.
    pub(super) refused: AtomicBool,
    pub(super) sent: Sent,
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
            costs: queue.costs(),
            clock: Clock::new(),
            refused: AtomicBool::new(false),
            queue,
            open: SpinLock::new(Open::new()),
            flight: FlightCell::new(),
            requested: AtomicU64::new(0),
            submitted: CachePadded(AtomicU64::new(0)),
            completed: CachePadded(AtomicU64::new(0)),
            sent: Sent::new(),
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
    /// **before** the iterator yields it.
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
        self.submit_open(open);
        ticket
    }

    /// Requests `flush` and submits, as [`request_and_submit`](Self::request_and_submit) does: by itself if nothing has gathered.
    pub fn request_one(&self, flush: Flush) -> Ticket {
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
    /// [`request_and_submit`](Self::request_and_submit) does if `submit` is true. The lock is held for as many appends as the
    /// list has ranges that do not abut.
    pub fn request_list(&self, list: &mut FlushList, submit: bool) -> Ticket {
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

    fn append(&self, open: &mut Open, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        let before = open.requested.flushes;
        for flush in flushes {
            let pages = Pages::new(&flush);
            open.requested.count(&pages);
            open.batch.push(pages);
        }
        if open.requested.flushes == before { Ticket::COMPLETED } else { self.issue(open) }
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
    #[inline]
    pub(super) fn publish_if_in_flight(&self) -> u64 {
        let submitted = self.submitted.load(Ordering::Acquire);
        if self.completed.load(Ordering::Acquire) < submitted {
            self.publish_in_flight();
        }
        submitted
    }

    fn publish_in_flight(&self) {
        self.publish();
        if self.queue.has_aborted() {
            self.resubmit();
        }
    }

    #[inline]
    pub(super) fn is_full(&self, submitted: u64) -> bool {
        // `completed` may have passed the `submitted` that the caller has read.
        submitted.saturating_sub(self.completed.load(Ordering::Acquire)) >= self.depth
    }

    /// Whether the unit has failed: no ticket in flight will complete.
    pub fn has_failed(&self) -> bool {
        self.refused.load(Ordering::Relaxed) || self.queue.has_failed()
    }

    /// Whether the flush has completed. Submits the open batch if the queue is not full, but does not wait.
    #[inline]
    pub fn is_completed(&self, ticket: Ticket) -> bool {
        self.completed.load(Ordering::Acquire) >= ticket.0 || self.is_completed_now(ticket)
    }

    /// Whether the flush has completed. Submits nothing: what is in the open batch may stay there.
    #[inline]
    pub fn has_completed(&self, ticket: Ticket) -> bool {
        self.completed.load(Ordering::Acquire) >= ticket.0 || {
            self.publish_if_in_flight();
            self.completed.load(Ordering::Acquire) >= ticket.0
        }
    }

    fn is_completed_now(&self, ticket: Ticket) -> bool {
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
    #[inline]
    pub fn wait(&self, ticket: Ticket) -> Result<(), WaitError> {
        if self.completed.load(Ordering::Acquire) >= ticket.0 {
            return Ok(());
        }
        self.wait_until_overdue(ticket)
    }

    fn wait_until_overdue(&self, ticket: Ticket) -> Result<(), WaitError> {
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
        let mut stats = InvalidationStats::default();
        self.sent.add_to(&mut stats);
        let requested = self.open.lock().requested;
        stats.requested = requested.flushes;
        stats.requested_tables = requested.tables;
        stats.pages_requested = requested.pages;
        stats.waited = self.waited.load(Ordering::Relaxed);
        stats.wait_ns = self.wait_ns.load(Ordering::Relaxed);
        stats.timed_out = self.timed_out.load(Ordering::Relaxed);
        stats
    }

    /// Publishes what the queue has completed.
    pub(super) fn publish(&self) {
        self.publish_up_to(self.queue.completed());
    }

    /// Publishes that the queue has completed everything up to `completed`.
    pub(super) fn publish_up_to(&self, completed: Ticket) {
        // A ticket that was never submitted is not believed: its waiters time out. (It may also be that the submission
        // of this very ticket is not yet recorded; then the next poll finds it.)
        let news = completed.0 > self.completed.load(Ordering::Relaxed);
        if news && completed.0 <= self.submitted.load(Ordering::Acquire) {
            self.completed.fetch_max(completed.0, Ordering::AcqRel);
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
