//! Tickets, and why a wait for one fails.

/// A position in an invalidation queue: `completed >= ticket` means that the flush has completed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ticket(pub u64);

impl Ticket {
    /// Completed from the start: the ticket of what needs no flush.
    pub const COMPLETED: Self = Self(0);
    /// Never completes: the ticket of what could not be revoked.
    pub const NEVER: Self = Self(u64::MAX);
}

/// Why a wait ended before the flush completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline has passed. The flush may still complete; until then a device may reach what it covers.
    #[error(
        "invalidation (ticket {}) not completed {waited_ns} ns and {polls} polls after its submission, or after that of \
         an earlier one: a device may still reach what it covers; wait longer, or check again later",
        ticket.0
    )]
    TimedOut {
        /// The ticket.
        ticket: Ticket,
        /// Nanoseconds since the oldest batch in flight was submitted; 0 if the queue has no clock.
        waited_ns: u64,
        /// Polls since then, if the [`WaitLimit`](super::WaitLimit) limits them.
        polls: u64,
    },
    /// The invalidation unit has failed: a device may reach what the flush covers for good.
    #[error(
        "the invalidation unit has failed, so the flush (ticket {}) never completes: a device may reach what it covers, \
         which is quarantined",
        ticket.0
    )]
    UnitFailed {
        /// The ticket.
        ticket: Ticket,
    },
    /// The ticket was never issued.
    #[error("ticket {} was never issued (the last one is {})", ticket.0, last.0)]
    Unknown {
        /// The ticket.
        ticket: Ticket,
        /// The last ticket issued.
        last: Ticket,
    },
}
