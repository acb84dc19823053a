//! Tickets, and why a wait for one fails.

use core::fmt;

/// A position in an invalidation queue: `completed >= ticket` means that the flush has completed.
///
/// It is a number, which queues compare, and names no queue: an [`Invalidator`](super::Invalidator)
/// refuses one above its last ([`WaitError::Unknown`]), and takes any other for its own. The
/// domain's handles keep it with the domain that it is of ([`Revoked`](crate::domain::Revoked)),
/// and no domain accepts a bare one.
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
    /// The deadline has passed. The flush may still complete; until then a device may reach what it
    /// covers.
    #[error(
        "invalidation (ticket {}) not completed after {}: a device may still reach what it covers; wait longer, or check \
         again later",
        ticket.0,
        Waited { ns: *waited_ns, polls: *polls }
    )]
    TimedOut {
        /// The ticket.
        ticket: Ticket,
        /// Nanoseconds since the oldest batch in flight was submitted, or, of a wait with a limit
        /// of its own, since that began; 0 if the queue has no clock.
        waited_ns: u64,
        /// Polls since then, as far as they are counted: a [`WaitLimit`](super::WaitLimit) need not
        /// limit them.
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

/// How long a wait took: in time, or in polls if the queue has no clock.
struct Waited {
    ns: u64,
    polls: u64,
}

impl fmt::Display for Waited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ns {
            0 => write!(f, "{} polls", self.polls),
            ns if ns < 1_000_000 => write!(f, "{} us", ns.div_ceil(1000)),
            ns => write!(f, "{} ms", ns / 1_000_000),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_timeout_names_the_time_or_else_the_polls() {
        let ticket = Ticket(7);
        let text = |waited_ns, polls| WaitError::TimedOut { ticket, waited_ns, polls }.to_string();
        assert!(
            text(52_338_075, 0).starts_with("invalidation (ticket 7) not completed after 52 ms: ")
        );
        assert!(text(1_001, 64).contains(" after 2 us: "));
        assert!(text(0, 64).contains(" after 64 polls: "));
    }
}
