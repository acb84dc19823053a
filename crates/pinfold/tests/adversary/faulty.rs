//! Invalidation queues that do something wrong: each makes a mistake that the stack above, or a unit
//! below it, could make.

use pinfold::soft::UnitQueue;
use pinfold_core::invalidate::{
    Descriptor, InvalidationQueue, QueueError, Scope, Ticket, WaitLimit,
};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// A mistake that a queue makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// A batch is submitted without its flushes.
    NoFlush,
    /// The flushes of table pages drop leaves alone.
    LeafFlushForTablePage,
    /// In caching mode, a map does not flush the entries that were cached as absent.
    MapNotFlushed,
    /// A wait that reaches its deadline reports that the flush has completed.
    TimeoutIsCompletion,
    /// The TLBs of devices are flushed before the IOTLB that they are filled from.
    DeviceTlbFirst,
    /// The waits that a unit has aborted are submitted again without their flushes.
    AbortIsCompletion,
    /// Of several units, only the first is given the flushes; the others are given the waits.
    FirstUnitOnly,
}

/// The queue of a unit, with a mistake or none.
pub(crate) struct Faulty {
    queue: UnitQueue,
    unit: usize,
    fault: Option<Fault>,
    /// Whether the unit was restarted and has not been given the flush that replaces the aborted
    /// ones.
    restarted: AtomicBool,
    /// The waits in flight, and when they were submitted.
    waits: Mutex<VecDeque<(Ticket, u64)>>,
}

impl Faulty {
    pub(crate) fn new(queue: UnitQueue, unit: usize, fault: Option<Fault>) -> Self {
        Self { queue, unit, fault, restarted: AtomicBool::new(false), waits: Mutex::default() }
    }

    /// Returns the descriptors that it submits instead of those that it is told to.
    fn instead(&self, descriptors: &[Descriptor]) -> Option<Vec<Descriptor>> {
        match self.fault? {
            Fault::NoFlush => Some(Vec::new()),
            Fault::FirstUnitOnly => (self.unit > 0).then(Vec::new),
            Fault::AbortIsCompletion => self.restarted.load(Relaxed).then(Vec::new),
            Fault::LeafFlushForTablePage => Some(
                descriptors
                    .iter()
                    .map(|descriptor| match *descriptor {
                        Descriptor::Iotlb { scope: scope @ Scope::Block(_), .. } => {
                            Descriptor::Iotlb { scope, leaf_only: true }
                        }
                        other => other,
                    })
                    .collect(),
            ),
            Fault::DeviceTlbFirst => {
                let fence = descriptors.iter().position(|one| *one == Descriptor::Fence)?;
                let (iotlb, tlbs) = (&descriptors[..fence], &descriptors[fence + 1..]);
                Some([tlbs, &[Descriptor::Fence], iotlb].concat())
            }
            Fault::MapNotFlushed | Fault::TimeoutIsCompletion => None,
        }
    }
}

impl InvalidationQueue for Faulty {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let instead = self.instead(descriptors);
        self.queue.submit(instead.as_deref().unwrap_or(descriptors), wait)?;
        self.restarted.store(false, Relaxed);
        if self.fault == Some(Fault::TimeoutIsCompletion)
            && let (Some(ticket), Some(now)) = (wait, self.now_ns())
        {
            let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
            let completed = self.queue.completed();
            waits.retain(|(ticket, _)| *ticket > completed);
            // Submitted again, it keeps its deadline.
            if waits.back().is_none_or(|(last, _)| *last < ticket) {
                waits.push_back((ticket, now));
            }
        }
        Ok(())
    }

    fn completed(&self) -> Ticket {
        let completed = self.queue.completed();
        if self.fault != Some(Fault::TimeoutIsCompletion) {
            return completed;
        }
        let now = self.now_ns().unwrap_or(0);
        let waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let late = |(_, since): &&(Ticket, u64)| now.saturating_sub(*since) >= self.limit().time_ns;
        waits.iter().take_while(late).last().map_or(completed, |(late, _)| completed.max(*late))
    }

    fn restart(&self) {
        self.restarted.store(true, Relaxed);
        self.queue.restart();
    }

    fn caches_not_present(&self) -> bool {
        self.queue.caches_not_present() && self.fault != Some(Fault::MapNotFlushed)
    }

    fn accepts(&self) -> usize {
        self.queue.accepts()
    }
    fn now_ns(&self) -> Option<u64> {
        self.queue.now_ns()
    }
    fn limit(&self) -> WaitLimit {
        self.queue.limit()
    }
    fn queue_depth(&self) -> u64 {
        self.queue.queue_depth()
    }
    fn has_device_tlbs(&self) -> bool {
        self.queue.has_device_tlbs()
    }
    fn has_aborted(&self) -> bool {
        self.queue.has_aborted()
    }
    fn has_failed(&self) -> bool {
        self.queue.has_failed()
    }
}
