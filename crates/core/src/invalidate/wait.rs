//! Waiting for a ticket: how long, and what a waiter does meanwhile.

use super::invalidator::Invalidator;
use super::queue::{InvalidationQueue, Ticket, WaitError, WaitLimit};
use crate::sync::Ordering;
use core::task::{Poll, Waker};

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Waits until the flush has completed, or the queue's [`limit`](InvalidationQueue::limit) is
    /// reached, counted from the submission of the oldest batch in flight.
    ///
    /// # Errors
    /// [`WaitError::TimedOut`] past the deadline: a device may reach what the flush covers until it
    /// completes, and the ticket may be waited for again. [`WaitError::UnitFailed`] if it never
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

    /// Wakes `waker` when a [`check`](Self::check) of `ticket` may find more than now: when its flush
    /// has completed or passed its deadline, or when the check can submit it. The caller checks
    /// again after this returns.
    pub(crate) fn wake(&self, ticket: Ticket, waker: &Waker) {
        let submitted = ticket.0 <= self.submitted.load(Ordering::Acquire);
        // Deadlines count from the oldest batch in flight.
        let oldest = Ticket(self.completed.load(Ordering::Acquire).saturating_add(1));
        let since_ns = self.clock.since_ns(oldest).or_else(|| self.queue.now_ns());
        let deadline_ns =
            since_ns.map_or(u64::MAX, |since| since.saturating_add(self.queue.limit().time_ns));
        self.queue.wake(submitted.then_some(ticket), deadline_ns, waker);
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
