//! The interface to the invalidation queue of an IOMMU: what it carries out, the tickets that it
//! completes, and what its flushes cost.

use crate::addr::{Iova, IovaRange};
use core::fmt;
use core::task::Waker;
use core::time::Duration;

/// The limit of a wait: it ends at the first of these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitLimit {
    /// Nanoseconds of the queue's clock, if it has one.
    pub time_ns: u64,
    /// The number of polls.
    pub polls: u64,
}

impl WaitLimit {
    /// Limits the time alone. A queue without a clock never reaches it. Nothing waits behind a
    /// backend whose revocations have completed when they return, as where the kernel keeps the
    /// table.
    pub const fn within(time: Duration) -> Self {
        let time_ns =
            time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos() as u64);
        Self { time_ns, polls: u64::MAX }
    }
}

/// Why descriptors were not submitted; none of them were.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The queue is full, or has aborted; the descriptors are submitted again at a later poll or
    /// wait.
    #[error("the invalidation queue is full")]
    Full,
    /// The unit has failed, as if [`InvalidationQueue::has_failed`] had returned true.
    #[error("the invalidation unit has failed")]
    Failed,
}

/// The invalidation queue of an IOMMU: carries out descriptors.
///
/// # If a method panics
/// No ticket completes before a flush that covers it was submitted. A request stays: it is
/// submitted, again if need be, by the next poll or wait. A caller that was requesting learns no
/// ticket, so a domain quarantines the payload that it was [revoking](crate::domain::Backend).
/// Retired table pages are flushed with the next that are retired. The methods are called by waits,
/// polls and requests, and by no clean-up of the invalidator itself.
pub trait InvalidationQueue: Send + Sync {
    /// Submits descriptors and, if `wait` names a ticket, behind them a wait whose completion makes
    /// [`completed`](Self::completed) return that ticket. Must not block until they have been
    /// carried out. A batch may come in several parts, the last of which has the wait. Tickets come
    /// in ascending order, at most [`queue_depth`](Self::queue_depth) of them in flight. One thread
    /// at a time calls it.
    ///
    /// # Errors
    /// [`QueueError`]; then nothing was submitted.
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError>;

    /// Returns how many descriptors the queue accepts now, the wait included. It decreases by
    /// submissions only, and increases while nothing else of the queue is called.
    fn accepts(&self) -> usize {
        usize::MAX
    }

    /// Returns the last ticket up to which *all* waits have completed. It never decreases, and
    /// reads memory only.
    ///
    /// Batches in flight may complete in any order; they are published in the order of their
    /// tickets. When it returns `t`, no device uses anything that the batches up to `t` cover, and
    /// accesses that had begun with it have ended.
    fn completed(&self) -> Ticket;

    /// Returns what [`completed`](Self::completed) and [`now_ns`](Self::now_ns) return, to the
    /// thread that has just submitted a batch. A queue that knows both overrides it, and saves
    /// reading its clock twice.
    fn after_submission(&self) -> (Ticket, Option<u64>) {
        (self.completed(), self.now_ns())
    }

    /// Pauses between two polls; `polls` counts from 0. By default it spins for 64 polls, longer
    /// than a flush takes (1 to 2 us), and then yields the processor: on a machine with fewer
    /// processors than threads the thread that completes the flush may not be running.
    fn relax(&self, polls: u64) {
        crate::sync::spin_then_yield(polls);
    }

    /// Wakes `waker` when [`completed`](Self::completed) has reached `ticket`, the unit has aborted
    /// or failed, or its clock has reached `deadline_ns` (`u64::MAX`: never); without a ticket,
    /// when `completed` or [`accepts`](Self::accepts) exceeds its current value. At once, if that
    /// is so already. It may wake early, but not in a loop.
    ///
    /// By default at once, which is right for a queue whose flushes have completed when
    /// [`submit`](Self::submit) returns. One whose flushes take time overrides it with a source of
    /// its own: an interrupt or a timer.
    fn wake(&self, ticket: Option<Ticket>, deadline_ns: u64, waker: &Waker) {
        let _ = (ticket, deadline_ns);
        waker.wake_by_ref();
    }

    /// Returns whether the unit may have cached what a flush would end. False while translation is
    /// disabled, if enabling it flushes everything first: then no flush completes, and memory is
    /// unregistered without one.
    fn caches(&self) -> bool {
        true
    }

    /// Returns the time of a monotonic clock, if there is one.
    fn now_ns(&self) -> Option<u64> {
        None
    }

    /// Returns how long to wait for a batch, counted from its submission.
    fn limit(&self) -> WaitLimit;

    /// Returns how many batches may be in flight. It never changes; it is clamped to 1 and
    /// [`MAX_IN_FLIGHT`](super::MAX_IN_FLIGHT).
    ///
    /// While fewer are in flight, a batch is submitted as soon as a waiter polls; otherwise
    /// requests gather.
    fn queue_depth(&self) -> u64 {
        1
    }

    /// Returns what invalidations cost. It never changes.
    fn costs(&self) -> FlushCosts {
        FlushCosts::default()
    }

    /// Returns the order of the largest block that a descriptor can name; by default 18, 1 GiB
    /// (VT-d: the maximum address mask value of the capability register). It never changes.
    fn max_order(&self) -> u32 {
        18
    }

    /// Whether devices have TLBs of their own (ATS), which need descriptors of their own.
    ///
    /// It is called after the entries of a batch have been cleared. If it returns false, no such
    /// TLB is filled from what those entries were before: a unit sets it before it lets a device
    /// fill its TLB, flushes its IOTLB in between, and orders both sides: by sequentially
    /// consistent fences, or by read-modify-writes of one word.
    fn has_device_tlbs(&self) -> bool {
        false
    }

    /// Whether the unit has aborted the waits in flight (VT-d: an invalidation time-out error,
    /// because a device did not answer). Their tickets do not complete, and the queue accepts
    /// nothing, until it is [restarted](Self::restart); then they are submitted again, as one flush
    /// of the domain with the last ticket.
    fn has_aborted(&self) -> bool {
        false
    }

    /// Lets a queue that [has aborted](Self::has_aborted) accept descriptors again. The submitting
    /// thread calls it.
    fn restart(&self) {}

    /// Whether the unit has failed: batches in flight never complete, and no batch is accepted.
    /// Once it is true it stays true; every waiter then returns at once.
    fn has_failed(&self) -> bool {
        false
    }

    /// Whether entries that are *not* present are cached too, so that a map needs a flush (VT-d:
    /// caching mode).
    fn caches_not_present(&self) -> bool {
        false
    }
}

/// A position in an invalidation queue: `completed >= ticket` means that the flush has completed.
///
/// It is a number, which queues compare, and names no queue: an [`Invalidator`](super::Invalidator)
/// refuses one above its last ([`WaitError::Unknown`]), and treats any other as its own. The
/// domain's handles keep it with its domain ([`Revoked`](crate::domain::Revoked)), and no domain
/// accepts a bare one.
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
        /// Polls since then, as far as they are counted: a [`WaitLimit`] need not
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

/// The length of a wait: in time, or in polls if the queue has no clock.
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

/// The size of a page, as a shift.
pub(super) const PAGE_SHIFT: u32 = 12;

/// An aligned block of 2^order pages of 4096 bytes: what one descriptor can invalidate (VT-d,
/// "Page-selective-within-Domain Invalidation": an address and an address mask).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    page: u64,
    order: u32,
}

impl Block {
    /// Creates the block of 2^`order` pages that contains page `page`.
    pub(super) const fn containing(page: u64, order: u32) -> Self {
        Self { page: page >> order << order, order }
    }

    /// Returns the first address, a multiple of the block's size.
    pub const fn start(&self) -> Iova {
        Iova::new(self.page << PAGE_SHIFT)
    }

    /// Returns the base-2 logarithm of the number of pages.
    pub const fn order(&self) -> u32 {
        self.order
    }

    /// Returns the number of pages of 4096 bytes.
    pub(super) const fn pages(&self) -> u64 {
        1 << self.order
    }

    /// Returns the addresses. (A range ends below 2^64: there the last byte is left out.)
    fn range(&self) -> IovaRange {
        IovaRange::clamped(self.start(), self.pages() << PAGE_SHIFT)
    }
}

/// The cached translations that a descriptor drops.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// Everything cached for the domain.
    Domain,
    /// Everything cached for a block of addresses.
    Block(Block),
}

impl Scope {
    /// Returns the addresses; `None` for those of the whole domain.
    pub fn range(&self) -> Option<IovaRange> {
        match self {
            Self::Domain => None,
            Self::Block(block) => Some(block.range()),
        }
    }
}

/// An entry of an [`InvalidationQueue`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Descriptor {
    /// Drops translations from the IOTLB.
    Iotlb {
        /// The translations.
        scope: Scope,
        /// Whether only leaf entries changed. Otherwise cached table pages are dropped too.
        leaf_only: bool,
    },
    /// Holds back what follows until everything before it in the queue has been carried out (VT-d:
    /// an invalidation wait with the fence flag).
    Fence,
    /// Drops translations from the TLBs of all devices that have their own (ATS).
    DeviceTlb(Scope),
}

/// The costs of a queue's invalidations, in expected nanoseconds: decides how a batch is expressed
/// in descriptors.
///
/// The rule: pages that were requested are covered by aligned blocks, exactly, with these
/// exceptions.
/// - One block replaces several if the descriptors that it saves cost at least as much as the
///   refills of the pages that it flushes in addition, and **at least half of its pages were
///   requested**: so no batch flushes more than twice the pages that were requested.
/// - One flush of the domain replaces all blocks if their descriptors cost more than it does.
///
/// The defaults are those of VT-d as published: 0.22 us for a descriptor (fifteen flushes and a
/// wait take 4.1 us, one and a wait 0.97 us), 197 ns for a read of a table entry by the walker, and
/// 256 entries in use in an IOTLB. Of the pages beside those that were requested, half are assumed
/// to be in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushCosts {
    /// A descriptor in a batch.
    pub descriptor_ns: u64,
    /// A page that is flushed although it was not requested: a refill, times the probability that
    /// there is one.
    pub refill_ns: u64,
    /// A flush of the whole domain: the refills of everything that it drops.
    pub domain_ns: u64,
}

impl FlushCosts {
    /// Costs by which nothing is flushed that was not requested, unless a batch has too many
    /// descriptors.
    pub const EXACT: Self = Self { descriptor_ns: 1, refill_ns: u64::MAX, domain_ns: u64::MAX };
}

impl Default for FlushCosts {
    fn default() -> Self {
        Self { descriptor_ns: 220, refill_ns: 197 / 2, domain_ns: 256 * 197 }
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
