//! How long each batch has been in flight: deadlines count from the submission, not from the wait.

use super::ticket::Ticket;
use crate::sync::{AtomicU64, Ordering};

const ENTRIES: usize = if cfg!(loom) { 2 } else { 16 };

/// The limit on batches in flight, whatever the
/// [`InvalidationQueue::queue_depth`](super::InvalidationQueue::queue_depth).
pub const MAX_IN_FLIGHT: u64 = ENTRIES as u64;

/// One entry per batch that can be in flight, by ticket modulo their number.
///
/// The entry of ticket `t` is restarted for `t + MAX_IN_FLIGHT` only after `t` has completed. A
/// waiter that still reads it for `t` reads a later start at worst, so it waits longer and never
/// gives up early.
#[derive(Debug)]
pub(super) struct Clock([Entry; ENTRIES]);

#[derive(Debug)]
struct Entry {
    ticket: AtomicU64,
    since_ns: AtomicU64,
    polls: AtomicU64,
}

/// How long a batch has been in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Age {
    pub(super) ns: u64,
    pub(super) polls: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let entry = |_| Entry {
            ticket: AtomicU64::new(0),
            since_ns: AtomicU64::new(0),
            polls: AtomicU64::new(0),
        };
        Self(core::array::from_fn(entry))
    }

    fn entry(&self, ticket: u64) -> &Entry {
        &self.0[(ticket % MAX_IN_FLIGHT) as usize]
    }

    /// Records the first attempt to submit `ticket`; later ones change nothing. Under the lock of
    /// the queue.
    pub(super) fn start(&self, ticket: Ticket, now_ns: Option<u64>) {
        let entry = self.entry(ticket.0);
        if entry.ticket.load(Ordering::Relaxed) != ticket.0 {
            entry.since_ns.store(now_ns.unwrap_or(0), Ordering::Relaxed);
            entry.polls.store(0, Ordering::Relaxed);
            entry.ticket.store(ticket.0, Ordering::Release);
        }
    }

    /// Returns how long `ticket` has been in flight; `None` if no attempt to submit it is recorded.
    pub(super) fn age(&self, ticket: Ticket, now_ns: Option<u64>) -> Option<Age> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0).then(|| Age {
            ns: now_ns.map_or(0, |now| now.saturating_sub(entry.since_ns.load(Ordering::Relaxed))),
            polls: entry.polls.load(Ordering::Relaxed),
        })
    }

    /// Returns when `ticket` was submitted, if that is recorded.
    pub(super) fn since_ns(&self, ticket: Ticket) -> Option<u64> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0)
            .then(|| entry.since_ns.load(Ordering::Relaxed))
    }

    /// Counts a poll of a waiter behind `ticket`.
    pub(super) fn count_poll(&self, ticket: Ticket) {
        self.entry(ticket.0).polls.fetch_add(1, Ordering::Relaxed);
    }
}
