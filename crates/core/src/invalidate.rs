//! Invalidation: requests in, tickets out.
//!
//! Clearing a table entry does not revoke a device's access: the IOMMU may have cached it, until it
//! is invalidated. An [`Invalidator`] gathers the requests of all owners into one open batch,
//! submits it to the [`InvalidationQueue`] followed by one wait, and publishes the ticket of the
//! last wait that has completed. Up to [`InvalidationQueue::queue_depth`] batches are in flight;
//! while the queue is full, the open batch gathers, so a burst of requests costs one flush and one
//! wait.
//!
//! ```text
//! clear entries -> request(ranges) -> Ticket     the open batch
//!                  submit()                      the batch is submitted, if the queue is not full
//!                  is_completed(ticket) / wait(ticket)
//! ```
//!
//! [`request_and_submit`](Invalidator::request_and_submit) does the first two in one call, by which a
//! [`TableBackend`](crate::domain::TableBackend) revokes: the flush is submitted before it returns,
//! unless the queue is full or another thread is submitting. Several units are one queue to an invalidator: a [`FanOut`] submits each batch to
//! all of them, and the batch is complete when all have completed it.
//!
//! The rule that everything rests on: **a request is made after its entries are cleared, and its
//! ticket completes only when a flush that was submitted after the request has completed.** The
//! lock on the open batch orders the two; no lock is held while a thread waits. A waiter that finds
//! space in the queue submits the open batch itself, so no owner depends on another one running.
//!
//! # Deadlines
//! A deadline counts from the submission of a batch, whichever thread waits, and however often.
//! Completion is published in order, so a ticket cannot complete before the oldest batch in flight:
//! when that is past its deadline, every wait for it or for a later ticket ends with
//! [`WaitError::TimedOut`]. The flush may still complete, and a later check finds it. If the unit
//! [has failed](InvalidationQueue::has_failed), all waits end at once with
//! [`WaitError::UnitFailed`].
//!
//! ```
//! use pinfold_core::addr::{Iova, IovaRange};
//! use pinfold_core::invalidate::{Descriptor, Flush, InvalidationQueue, Invalidator, QueueError, Ticket, WaitLimit};
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! /// A unit whose flushes complete at once.
//! struct Unit(AtomicU64);
//! impl InvalidationQueue for Unit {
//!     fn submit(
//!         &self,
//!         descriptors: &[Descriptor],
//!         wait: Option<Ticket>,
//!     ) -> Result<(), QueueError> {
//!         for descriptor in descriptors {
//!             println!("{descriptor:?}"); // drops what is cached for a block of addresses
//!         }
//!         if let Some(ticket) = wait {
//!             self.0.store(ticket.0, Ordering::Release);
//!         }
//!         Ok(())
//!     }
//!     fn completed(&self) -> Ticket {
//!         Ticket(self.0.load(Ordering::Acquire))
//!     }
//!     fn limit(&self) -> WaitLimit {
//!         WaitLimit { time_ns: 1_000_000, polls: u64::MAX }
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let invalidator = Invalidator::new(Unit(AtomicU64::new(0)));
//! let range = IovaRange::new(Iova::new(0x20_0000), 4096)?; // its entries have just been cleared
//! let ticket = invalidator.request([Flush::from(range)]);
//! invalidator.wait(ticket)?; // from here on no device uses them
//! println!("{}", invalidator.stats());
//! # Ok(())
//! # }
//! ```

mod batch;
mod fan_out;
mod invalidator;
#[cfg(all(test, loom))]
mod loom_model;
mod queue;
#[cfg(test)]
mod snapshot;
mod stats;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use batch::{Flush, MAX_IN_FLIGHT};
pub use fan_out::FanOut;
pub use invalidator::Invalidator;
pub use queue::{
    Block, Descriptor, FlushCosts, InvalidationQueue, QueueError, Scope, Ticket, WaitError,
    WaitLimit,
};
pub use stats::InvalidationStats;
