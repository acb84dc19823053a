//! The interface to what carries flushes out: the invalidation queue of an IOMMU.

use super::{Batch, Ticket};

/// How long a waiter waits before it gives up; whichever is reached first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitLimit {
    /// Nanoseconds of the sink's clock, if it has one.
    pub time_ns: u64,
    /// How often waiters ask.
    pub polls: u64,
}

/// Why a sink did not take a batch. Nothing of the batch was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The queue has no room; the batch is submitted again at the next poll or wait.
    #[error("the invalidation queue has no room for a batch")]
    Full,
    /// The unit has failed for good, as if [`InvalidationQueue::has_failed`] had said so.
    #[error("the invalidation unit has failed")]
    Failed,
}

/// What carries flushes out: the queue of an IOMMU.
pub trait InvalidationQueue: Send + Sync {
    /// Takes all of a batch and, behind it, a wait whose completion makes [`completed`](Self::completed) return
    /// `ticket`. Must not block until the flush is over. Tickets come in ascending order, at most
    /// [`queue_depth`](Self::queue_depth) of them in flight.
    ///
    /// # Errors
    /// [`QueueError`]; then nothing was taken.
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), QueueError>;

    /// The last ticket up to which *all* waits are over. It never goes back, and reads memory only.
    ///
    /// Batches in flight may complete in any order; they are published in the order of their tickets. When it
    /// returns `t`, no device uses anything that the batches up to `t` cover, and accesses that had begun
    /// with it have ended.
    fn completed(&self) -> Ticket;

    /// Called between two polls; `polls` counts from 0.
    fn relax(&self, polls: u64);

    /// A clock that only goes forward, if there is one.
    fn now_ns(&self) -> Option<u64> {
        None
    }

    /// How long to wait for a batch, counted from its submission.
    fn limit(&self) -> WaitLimit;

    /// How many batches may be in flight. It never changes; less than 1 counts as 1, and more than
    /// [`MAX_IN_FLIGHT`](super::MAX_IN_FLIGHT) as that.
    ///
    /// While fewer are in flight, a batch is submitted as soon as a waiter asks; otherwise requests gather.
    fn queue_depth(&self) -> u64 {
        1
    }

    /// Whether the unit has failed for good: what is in flight will never complete, and no batch is taken any more.
    /// Once it is true it stays true; every waiter then returns at once.
    fn has_failed(&self) -> bool {
        false
    }

    /// Whether entries that are *not* present are cached too, so that a map needs a flush (VT-d: caching mode).
    fn caches_not_present(&self) -> bool {
        false
    }
}
