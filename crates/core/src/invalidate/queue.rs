//! The interface to the invalidation queue of an IOMMU.

use super::batch::Batch;
use super::ticket::Ticket;

/// How long a waiter waits; whichever limit is reached first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitLimit {
    /// Nanoseconds of the queue's clock, if it has one.
    pub time_ns: u64,
    /// The number of polls.
    pub polls: u64,
}

/// Why a batch was not submitted; nothing of it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The queue is full; the batch is submitted again at the next poll or wait.
    #[error("the invalidation queue is full")]
    Full,
    /// The unit has failed, as if [`InvalidationQueue::has_failed`] had returned true.
    #[error("the invalidation unit has failed")]
    Failed,
}

/// The invalidation queue of an IOMMU: carries out flushes.
pub trait InvalidationQueue: Send + Sync {
    /// Submits all of a batch and, behind it, a wait whose completion makes [`completed`](Self::completed) return
    /// `ticket`. Must not block until the flush has completed. Tickets come in ascending order, at most
    /// [`queue_depth`](Self::queue_depth) of them in flight.
    ///
    /// # Errors
    /// [`QueueError`]; then nothing was submitted.
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), QueueError>;

    /// Returns the last ticket up to which *all* waits have completed. It never decreases, and reads memory only.
    ///
    /// Batches in flight may complete in any order; they are published in the order of their tickets. When it
    /// returns `t`, no device uses anything that the batches up to `t` cover, and accesses that had begun
    /// with it have ended.
    fn completed(&self) -> Ticket;

    /// Pauses between two polls; `polls` counts from 0.
    fn relax(&self, polls: u64);

    /// Returns the time of a monotonic clock, if there is one.
    fn now_ns(&self) -> Option<u64> {
        None
    }

    /// Returns how long to wait for a batch, counted from its submission.
    fn limit(&self) -> WaitLimit;

    /// Returns how many batches may be in flight. It never changes; it is clamped to 1 and
    /// [`MAX_IN_FLIGHT`](super::MAX_IN_FLIGHT).
    ///
    /// While fewer are in flight, a batch is submitted as soon as a waiter polls; otherwise requests gather.
    fn queue_depth(&self) -> u64 {
        1
    }

    /// Whether the unit has failed: what is in flight never completes, and no batch is accepted.
    /// Once it is true it stays true; every waiter then returns at once.
    fn has_failed(&self) -> bool {
        false
    }

    /// Whether entries that are *not* present are cached too, so that a map needs a flush (VT-d: caching mode).
    fn caches_not_present(&self) -> bool {
        false
    }
}
