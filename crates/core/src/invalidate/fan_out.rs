//! One invalidation queue over those of several units.

use super::queue::{Descriptor, FlushCosts, InvalidationQueue, QueueError, Ticket, WaitLimit};
use crate::sync::{AtomicU64, Ordering};
use alloc::vec::Vec;

/// The queue of a domain whose devices are behind several units: every batch goes to all of them,
/// and is complete when all have completed it.
///
/// A refusal by one unit refuses the whole submission, which the
/// [`Invalidator`](super::Invalidator) then repeats. A unit that had accepted it carries out its
/// flushes twice, which does no harm; a wait that it has accepted is not repeated, so that its
/// tickets ascend. A unit that fails has failed for all: what its devices cached cannot be dropped.
///
/// ```
/// use pinfold_core::invalidate::{Descriptor, FanOut, InvalidationQueue, QueueError, Ticket, WaitLimit};
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// A unit whose completed ticket the example sets.
/// #[derive(Default)]
/// struct Unit(AtomicU64);
/// impl InvalidationQueue for Unit {
///     fn submit(&self, _: &[Descriptor], _: Option<Ticket>) -> Result<(), QueueError> {
///         Ok(())
///     }
///     fn completed(&self) -> Ticket {
///         Ticket(self.0.load(Ordering::Acquire))
///     }
///     fn limit(&self) -> WaitLimit {
///         WaitLimit { time_ns: 1_000_000, polls: u64::MAX }
///     }
/// }
///
/// # fn main() -> Result<(), QueueError> {
/// let queue = FanOut::new(Unit::default(), [Unit::default()]);
/// queue.submit(&[], Some(Ticket(1)))?;
/// queue.first().0.store(1, Ordering::Release);
/// assert_eq!(queue.completed(), Ticket(0), "the second unit has not completed it");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FanOut<Q> {
    first: Unit<Q>,
    others: Vec<Unit<Q>>,
}

#[derive(Debug)]
struct Unit<Q> {
    queue: Q,
    /// The last ticket whose wait the unit has accepted and not aborted. Changed by the submitting
    /// thread only, which the caller of `submit` orders.
    accepted: AtomicU64,
}

impl<Q: InvalidationQueue> Unit<Q> {
    fn new(queue: Q) -> Self {
        let accepted = AtomicU64::new(queue.completed().0);
        Self { queue, accepted }
    }

    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        // A ticket names one batch, all of which precedes its wait: the unit has the descriptors as
        // well.
        if wait.is_some_and(|ticket| ticket.0 <= self.accepted.load(Ordering::Relaxed)) {
            return Ok(());
        }
        self.queue.submit(descriptors, wait)?;
        if let Some(ticket) = wait {
            self.accepted.store(ticket.0, Ordering::Relaxed);
        }
        Ok(())
    }

    fn restart(&self) {
        if self.queue.has_aborted() {
            // Nothing completes between the abort and the restart: what was accepted beyond this is
            // lost.
            self.accepted.store(self.queue.completed().0, Ordering::Relaxed);
            self.queue.restart();
        }
    }
}

impl<Q: InvalidationQueue> FanOut<Q> {
    /// Creates the queue over those of `first` and `others`, to which nothing else submits.
    pub fn new(first: Q, others: impl IntoIterator<Item = Q>) -> Self {
        Self { first: Unit::new(first), others: others.into_iter().map(Unit::new).collect() }
    }

    /// Returns the queue of the first unit, whose clock, costs and pauses are those of all.
    pub fn first(&self) -> &Q {
        &self.first.queue
    }

    fn units(&self) -> impl Iterator<Item = &Unit<Q>> {
        core::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the queues of all units.
    #[cfg(test)]
    pub(super) fn queues(&self) -> impl Iterator<Item = &Q> {
        self.units().map(|unit| &unit.queue)
    }

    /// Returns what `of` returns for the units, combined by `with`. Most domains have one unit:
    /// then this is one call.
    #[inline(always)]
    fn combined<T>(&self, of: impl Fn(&Q) -> T, with: impl Fn(T, T) -> T) -> T {
        let first = of(&self.first.queue);
        if self.others.is_empty() {
            first
        } else {
            self.others.iter().map(|unit| of(&unit.queue)).fold(first, with)
        }
    }

    #[inline(always)]
    fn least<T: Ord>(&self, of: impl Fn(&Q) -> T) -> T {
        self.combined(of, T::min)
    }

    #[inline(always)]
    fn any(&self, of: impl Fn(&Q) -> bool) -> bool {
        self.combined(of, |one, other| one | other)
    }
}

/// Every method takes time in proportion to the number of units.
///
/// Tasks are woken at once: a queue over units whose flushes take time has a source of its own.
impl<Q: InvalidationQueue> InvalidationQueue for FanOut<Q> {
    #[inline(always)]
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        if self.others.is_empty() {
            // A refused submission is repeated as a whole, so nothing has to be remembered.
            return self.first.queue.submit(descriptors, wait);
        }
        self.first.submit(descriptors, wait)?;
        self.others.iter().try_for_each(|unit| unit.submit(descriptors, wait))
    }

    fn accepts(&self) -> usize {
        self.least(Q::accepts)
    }

    fn caches(&self) -> bool {
        self.any(Q::caches)
    }

    fn completed(&self) -> Ticket {
        self.least(Q::completed)
    }

    #[inline(always)]
    fn after_submission(&self) -> (Ticket, Option<u64>) {
        // The first unit may have accepted the batch some time before the others did: its time of
        // submission is not theirs.
        if self.others.is_empty() {
            self.first().after_submission()
        } else {
            (self.completed(), self.now_ns())
        }
    }

    fn relax(&self, polls: u64) {
        self.first().relax(polls);
    }

    fn now_ns(&self) -> Option<u64> {
        self.first().now_ns()
    }

    fn limit(&self) -> WaitLimit {
        // A batch takes as long as the slowest unit.
        let longer = |one: WaitLimit, other: WaitLimit| WaitLimit {
            time_ns: one.time_ns.max(other.time_ns),
            polls: one.polls.max(other.polls),
        };
        self.combined(Q::limit, longer)
    }

    fn queue_depth(&self) -> u64 {
        self.least(Q::queue_depth)
    }

    fn costs(&self) -> FlushCosts {
        self.first().costs()
    }

    fn max_order(&self) -> u32 {
        self.least(Q::max_order)
    }

    fn has_device_tlbs(&self) -> bool {
        self.any(Q::has_device_tlbs)
    }

    fn has_aborted(&self) -> bool {
        self.any(Q::has_aborted)
    }

    fn restart(&self) {
        self.units().for_each(Unit::restart);
    }

    fn has_failed(&self) -> bool {
        self.any(Q::has_failed)
    }

    fn caches_not_present(&self) -> bool {
        self.any(Q::caches_not_present)
    }
}
