//! The interface to the invalidation queue of an IOMMU.

use super::costs::FlushCosts;
use super::descriptor::Descriptor;
use super::ticket::Ticket;
use core::task::Waker;
use core::time::Duration;

/// How long a waiter waits: until the first of these limits is reached.
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
/// No ticket completes before a flush that covers it was submitted. What was requested stays so: it
/// is submitted, again if need be, by the next poll or wait. A caller that was requesting learns no
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
    /// or failed, or its clock has reached `deadline_ns`; without a ticket, when the queue may accept
    /// more than it does now. At once, if that is so already. It may wake early, but not in a loop.
    ///
    /// By default at once, which is right for a queue whose flushes have completed when
    /// [`submit`](Self::submit) returns. One whose flushes take time overrides it with a source of
    /// its own: an interrupt or a timer.
    fn wake(&self, ticket: Option<Ticket>, deadline_ns: u64, waker: &Waker) {
        let _ = (ticket, deadline_ns);
        waker.wake_by_ref();
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

    /// Whether the unit has failed: what is in flight never completes, and no batch is accepted.
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
