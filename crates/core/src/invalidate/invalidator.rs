//! The [`Invalidator`]: gathers requests; submits them in batches, one thread at a time and not
//! under the lock that requesters need; publishes their completion; and waits for a ticket.

use super::batch::{
    Clock, Flight, FlightCell, Flush, FlushList, MAX_IN_FLIGHT, Open, Pages, Requested,
};
use super::queue::{
    Descriptor, FlushCosts, InvalidationQueue, QueueError, Scope, Ticket, WaitError, WaitLimit,
};
use super::stats::{InvalidationStats, Sent, Waits};
use crate::sync::{AtomicBool, AtomicU64, CachePadded, Guard, Ordering, SpinLock};
use core::task::{Poll, Waker};
use core::{fmt, mem};

/// Gathers requests, submits them to an [`InvalidationQueue`] in batches, and publishes their
/// completion.
pub struct Invalidator<Q> {
    pub(super) queue: Q,
    /// The lock that requesters need: held for an append, or to take the batch out.
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
    /// [`is_completed`](Self::is_completed) or [`wait`](Self::wait): for a caller that has more to
    /// request.
    ///
    /// No flushes at all need no ticket: [`Ticket::COMPLETED`].
    pub fn request(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        self.gather(flushes, || false)
    }

    /// Requests `flushes`, and submits the open batch under the same lock if `submits` returns true
    /// after the last of them.
    pub(crate) fn request_and_submit_if(
        &self,
        flushes: impl IntoIterator<Item = Flush>,
        submits: impl FnOnce() -> bool,
    ) -> Ticket {
        self.gather(flushes, submits)
    }

    /// Requests `flushes`, as [`request`](Self::request) does, and submits the open batch unless
    /// the queue is full: for a caller that has no more. A single one needs no list.
    #[inline]
    pub fn request_and_submit(&self, flushes: impl IntoIterator<Item = Flush>) -> Ticket {
        let mut flushes = flushes.into_iter();
        let Some(first) = flushes.next() else { return Ticket::COMPLETED };
        let Some(second) = flushes.next() else {
            let pages = Pages::new(&first);
            return self.append(&[pages], &Requested::of(&pages), true);
        };
        self.gather([first, second].into_iter().chain(flushes), || true)
    }

    /// Requests `flushes`, a list at a time: the caller's iterator runs without the lock.
    fn gather(
        &self,
        flushes: impl IntoIterator<Item = Flush>,
        submits: impl FnOnce() -> bool,
    ) -> Ticket {
        let (mut list, mut ticket) = (FlushList::new(), Ticket::COMPLETED);
        for flush in flushes {
            let mut flush = flush;
            while let Err(full) = list.push(flush) {
                ticket = ticket.max(self.append(list.pages(), &list.requested, false));
                list.clear();
                flush = full;
            }
        }
        if list.is_empty() {
            return ticket;
        }
        ticket.max(self.append(list.pages(), &list.requested, submits()))
    }

    /// Appends `pages`, which are those of all that is `requested`, to the open batch, and submits
    /// that if `submit` is true. The lock is held for as many appends as there are pages.
    #[inline(always)]
    fn append(&self, pages: &[Pages], requested: &Requested, submit: bool) -> Ticket {
        if submit {
            self.publish_if_in_flight();
        }
        let mut open = self.open.lock();
        for pages in pages {
            open.batch.push(*pages);
        }
        open.batch.count_merged(requested.flushes - pages.len() as u64);
        open.requested.add(requested);
        let ticket = self.issue(&open);
        if submit {
            self.submit_open(open);
        }
        ticket
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

    /// Publishes completed tickets, if anything is in flight. Returns the last ticket submitted.
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

    /// Flushes all that is cached for the domain, and waits for it. It covers every entry that was
    /// cleared before the call, also one whose own flush another thread has yet to request.
    pub(crate) fn flush_all(&self) -> Result<(), WaitError> {
        let mut open = self.open.lock();
        open.batch.flush_domain();
        let ticket = self.issue(&open);
        drop(open);
        self.wait(ticket)
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

    /// Publishes the tickets that the queue has completed.
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

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Takes the open batch out of its lock and submits it. Returns at once if another thread is
    /// submitting, or if the queue is full: the next thread that polls submits the gathered
    /// requests.
    pub(super) fn submit_open(&self, mut open: Guard<'_, Open>) {
        if self.refused.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut claim) = self.flight.try_claim(&mut open) else { return };
        claim.with(|flight| {
            if flight.ticket == 0 {
                if !self.take_batch(open, flight) {
                    return;
                }
            } else {
                drop(open);
            }
            self.submit_flight(flight);
        });
    }

    /// Submits a batch, or the rest of it.
    fn submit_flight(&self, flight: &mut Flight) {
        if !self.recover(flight) {
            return;
        }
        // Here, where it is done again if the queue panics meanwhile: a wait without descriptors
        // would flush nothing.
        if flight.descriptors.is_empty() {
            flight.prepare(&self.costs, self.queue.max_order(), self.queue.has_device_tlbs());
        }
        if self.send(flight) {
            self.sent(flight);
        } else {
            // The batch stays, and its deadline counts from this first attempt.
            self.clock.start(Ticket(flight.ticket), self.queue.now_ns());
        }
    }

    /// Submits the waits in flight again if the unit has aborted them.
    pub(super) fn resubmit(&self) {
        let claim = self.flight.try_claim(&mut self.open.lock());
        if let Some(mut claim) = claim {
            claim.with(|flight| self.recover(flight));
        }
    }

    /// Moves the open batch to `flight`, which is empty, and releases the lock. Returns false if
    /// there is nothing to submit, or if the queue is full.
    fn take_batch(&self, mut open: Guard<'_, Open>, flight: &mut Flight) -> bool {
        if open.batch.is_empty() || self.is_full(self.submitted.load(Ordering::Relaxed)) {
            return false;
        }
        mem::swap(&mut open.batch, &mut flight.batch);
        flight.ticket = open.ticket;
        open.ticket += 1;
        true
    }

    /// Restarts a queue that has aborted, and replaces the batches in flight by one flush of the
    /// domain that ends with their last ticket: it covers all of them, so their descriptors need
    /// not be kept, and it does no harm twice. A batch that was submitted in part begins again.
    /// Returns false if the queue refused the flush, so that the call must be repeated.
    #[inline]
    fn recover(&self, flight: &mut Flight) -> bool {
        if !self.restarted.load(Ordering::Relaxed) && !self.queue.has_aborted() {
            return true;
        }
        self.recover_now(flight)
    }

    #[cold]
    fn recover_now(&self, flight: &mut Flight) -> bool {
        if self.queue.has_aborted() {
            flight.next = 0;
            // First: if the queue panics here, the flush is still submitted.
            self.restarted.store(true, Ordering::Relaxed);
            self.queue.restart();
        }
        let last = self.submitted.load(Ordering::Relaxed);
        if self.completed.load(Ordering::Acquire) < last {
            let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
            let all = [flush, Descriptor::Fence, Descriptor::DeviceTlb(Scope::Domain)];
            let needed = if self.queue.has_device_tlbs() { all.len() } else { 1 };
            match self.queue.submit(all.get(..needed).unwrap_or(&all), Some(Ticket(last))) {
                Ok(()) => self.sent.resubmitted.add(1),
                Err(error) => {
                    self.note(error);
                    return false;
                }
            }
        }
        self.restarted.store(false, Ordering::Relaxed);
        true
    }

    /// Submits as much of `flight` as the queue accepts. Returns whether it accepted all,
    /// the wait included.
    fn send(&self, flight: &mut Flight) -> bool {
        loop {
            let (rest, space) = (flight.rest(), self.queue.accepts());
            // The wait takes the place of one descriptor.
            let wait = (rest.len() < space).then_some(Ticket(flight.ticket));
            let part = rest.get(..space).unwrap_or(rest);
            if space == 0 {
                return false;
            }
            match self.queue.submit(part, wait) {
                Ok(()) => flight.next += part.len(),
                Err(error) => {
                    self.note(error);
                    return false;
                }
            }
            self.sent.parts.add(1);
            if wait.is_some() {
                return true;
            }
        }
    }

    fn note(&self, error: QueueError) {
        match error {
            QueueError::Full => {}
            QueueError::Failed => self.refused.store(true, Ordering::Relaxed),
        }
    }

    /// Counts and publishes a batch that has been submitted, and its completion if that was
    /// immediate. Only then no deadline is needed, and no clock is read.
    fn sent(&self, flight: &mut Flight) {
        // First: if the queue panics here, the batch stays, and its wait is submitted again.
        let (completed, now_ns) = self.queue.after_submission();
        let (ticket, sent) = (flight.ticket, &self.sent);
        for descriptor in &flight.descriptors {
            match descriptor {
                Descriptor::Iotlb { scope, .. } => {
                    sent.iotlb.add(1);
                    sent.domain.add(u64::from(*scope == Scope::Domain));
                }
                Descriptor::DeviceTlb(_) => sent.device_tlb.add(1),
                Descriptor::Fence => {}
            }
        }
        sent.merged.add(flight.batch.merged());
        sent.pages.add(flight.pages_flushed);
        sent.waits.add(1);
        self.submitted.store(ticket, Ordering::Release);
        flight.clear();
        let in_flight = ticket - self.completed.load(Ordering::Relaxed).min(ticket);
        sent.peak.add(in_flight.saturating_sub(sent.peak.get()));
        if completed.0 == ticket {
            // No ticket above it can be published while this thread submits, so a store does not
            // lower what others publish.
            self.completed.store(ticket, Ordering::Release);
        } else {
            self.publish_up_to(completed);
        }
        if self.completed.load(Ordering::Relaxed) < ticket {
            self.clock.start(Ticket(ticket), now_ns);
        }
    }
}

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Waits until the flush has completed, or the queue's [`limit`](InvalidationQueue::limit) is
    /// reached, counted from the submission of the oldest batch in flight.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] past the deadline: a device may reach the ranges of the flush until
    /// it completes, and the ticket may be waited for again. [`WaitError::UnitFailed`] if it never
    /// completes. [`WaitError::Unknown`] if no such ticket was issued.
    #[inline]
    pub fn wait(&self, ticket: Ticket) -> Result<(), WaitError> {
        if self.completed.load(Ordering::Acquire) >= ticket.0 {
            return Ok(());
        }
        self.wait_while(ticket, |_| self.overdue(ticket))
    }

    /// Returns how a [`wait`](Self::wait) would end if it ended now, without waiting.
    pub(crate) fn check(&self, ticket: Ticket) -> Poll<Result<(), WaitError>> {
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        self.check_issued(ticket)?;
        self.check_once(ticket, || self.overdue(ticket))
    }

    /// Wakes `waker` when a [`check`](Self::check) of `ticket` may find more than now: when its
    /// flush has completed or, if `to_deadline`, passed its deadline, or when the check can submit
    /// it. The caller checks again after this returns.
    pub(crate) fn wake(&self, ticket: Ticket, to_deadline: bool, waker: &Waker) {
        let submitted = ticket.0 <= self.submitted.load(Ordering::Acquire);
        let deadline_ns = if to_deadline { self.deadline_ns() } else { u64::MAX };
        self.queue.wake(submitted.then_some(ticket), deadline_ns, waker);
        // A thread that is submitting has taken out the batch before this request was in it, and
        // its own may complete at once: the queue then has nothing to wake for. If it has ended,
        // the caller's check submits the request.
        if !submitted && self.flight.is_claimed() {
            waker.wake_by_ref();
        }
    }

    /// Returns when a wait that begins now would end at the latest: deadlines count from the oldest
    /// batch in flight.
    fn deadline_ns(&self) -> u64 {
        let oldest = Ticket(self.completed.load(Ordering::Acquire).saturating_add(1));
        let since_ns = self.clock.since_ns(oldest).or_else(|| self.queue.now_ns());
        since_ns.map_or(u64::MAX, |since| since.saturating_add(self.queue.limit().time_ns))
    }

    /// Waits until the flush has completed, or for `limit` from now: for a ticket past its
    /// deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub(crate) fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), WaitError> {
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
        over.then_some(WaitError::TimedOut {
            ticket,
            waited_ns: age.ns,
            polls: age.polls.min(limit.polls),
        })
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
        let error =
            if self.has_failed() { Some(WaitError::UnitFailed { ticket }) } else { overdue() };
        // The flush may have completed before the unit failed, or while the clock was read.
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        error.map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
    }

    /// Waits until the flush has completed or `overdue`, called with the number of polls so far,
    /// returns an error.
    fn wait_while(
        &self,
        ticket: Ticket,
        overdue: impl Fn(u64) -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        self.check_issued(ticket)?;
        // It may have completed long ago, and no thread has polled since.
        if self.is_completed(ticket) {
            return Ok(());
        }
        let (start, mut polls) = (self.queue.now_ns(), 0);
        let result = loop {
            if let Poll::Ready(result) = self.check_once(ticket, || overdue(polls)) {
                break result;
            }
            self.queue.relax(polls);
            polls += 1;
        };
        self.waits.count(elapsed(start, self.queue.now_ns()), result.is_err());
        result
    }
}

fn elapsed(start: Option<u64>, now: Option<u64>) -> u64 {
    start.zip(now).map_or(0, |(start, now)| now.saturating_sub(start))
}
