//! Waiting for a ticket: how long, and what a waiter does meanwhile.

use super::invalidator::Invalidator;
use super::queue::{InvalidationQueue, WaitLimit};
use super::ticket::{Ticket, WaitError};
use crate::known_bad::{self, Mistake};
use crate::sync::{Ordering, SPIN_POLLS};
use core::task::Poll;

/// A yield that takes this long, nanoseconds, gave the processor to a thread that used up its time
/// slice: what others requested meanwhile is no sign that they wait as well. A hundred threads that
/// each request once take less.
const SLICE_NS: u64 = 1_000_000;

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
        self.wait_until_overdue(ticket)
    }

    fn wait_until_overdue(&self, ticket: Ticket) -> Result<(), WaitError> {
        timeout_or_mistake(self.wait_while(ticket, true, |_| self.overdue(ticket)))
    }

    /// Returns how a [`wait`](Self::wait) would end if it ended now, without waiting.
    pub fn check(&self, ticket: Ticket) -> Poll<Result<(), WaitError>> {
        if self.is_completed(ticket) {
            return Poll::Ready(Ok(()));
        }
        self.check_issued(ticket)?;
        self.check_once(ticket, || self.overdue(ticket)).map(timeout_or_mistake)
    }

    /// Waits until the flush has completed, or for `limit` from now: for a ticket past its
    /// deadline.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    pub fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), WaitError> {
        let start = self.queue.now_ns();
        // A time slice may be longer than the limit, so the processor is kept.
        self.wait_while(ticket, false, |polls| {
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
        may_yield: bool,
        overdue: impl Fn(u64) -> Option<WaitError>,
    ) -> Result<(), WaitError> {
        self.check_issued(ticket)?;
        // It may have completed long ago, and nobody has polled since.
        if self.has_completed(ticket) {
            return Ok(());
        }
        let (start, mut polls) = (self.queue.now_ns(), 0);
        // A unit that has failed is reported at once.
        if may_yield && self.may_combine() && !self.has_failed() && self.waits.yields.is_due() {
            self.yield_once(start);
        }
        if self.is_completed(ticket) {
            return Ok(());
        }
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

    /// Returns whether waiters may yield before they poll: not where a limit counts polls, because
    /// a yield would be one of them.
    pub(super) fn may_combine(&self) -> bool {
        self.queue.limit().polls == u64::MAX
    }

    /// Returns whether waiters leave what they request to gather, because those that yielded lately
    /// did not do so in vain.
    pub(super) fn waiters_combine(&self) -> bool {
        self.waits.yields.are_worth_it() && self.may_combine()
    }

    /// Lets the threads run that are runnable. What they request meanwhile shares a flush.
    fn yield_once(&self, start: Option<u64>) {
        let yields = &self.waits.yields;
        let before = yields.requests();
        self.queue.relax(SPIN_POLLS);
        let took_ns = elapsed(start, self.queue.now_ns());
        yields.note(yields.requests() != before && took_ns < SLICE_NS);
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
