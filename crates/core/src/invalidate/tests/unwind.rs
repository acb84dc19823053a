//! A queue that panics: whatever it was asked, no ticket completes before a flush that covers it
//! was submitted.

use super::*;
use crate::addr::{Iova, IovaRange};
use core::sync::atomic::{AtomicU64, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// Completes at once what is submitted, and panics when it is called for the `panics_at`th time.
struct Fragile {
    calls: AtomicU64,
    panics_at: u64,
    /// The pages flushed; the pages that each ticket covers.
    flushed: Mutex<Vec<Descriptor>>,
    last: AtomicU64,
}

impl Fragile {
    fn call(&self) {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        assert_ne!(call, self.panics_at, "a queue");
    }
}

impl InvalidationQueue for Fragile {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.call();
        self.flushed.lock().unwrap().extend_from_slice(descriptors);
        if let Some(ticket) = wait {
            self.last.store(ticket.0, Ordering::SeqCst);
        }
        Ok(())
    }
    fn accepts(&self) -> usize {
        self.call();
        2
    }
    fn completed(&self) -> Ticket {
        self.call();
        Ticket(self.last.load(Ordering::SeqCst))
    }
    fn now_ns(&self) -> Option<u64> {
        self.call();
        Some(0)
    }
    fn max_order(&self) -> u32 {
        self.call();
        18
    }
    fn has_device_tlbs(&self) -> bool {
        self.call();
        false
    }
    fn has_aborted(&self) -> bool {
        self.call();
        false
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 100 }
    }
}

fn page(number: u64) -> Flush {
    IovaRange::new(Iova::new(number << 12), 4096).unwrap().into()
}

/// Whether what was submitted covers page `number`.
fn covers(inv: &Invalidator<Fragile>, number: u64) -> bool {
    inv.queue().flushed.lock().unwrap().iter().any(|what| match what {
        Descriptor::Iotlb { scope, .. } => {
            scope.range().is_none_or(|range| range.covers(&page(number).range))
        }
        Descriptor::Fence | Descriptor::DeviceTlb(_) => false,
    })
}

#[test]
fn a_panic_of_the_queue_completes_nothing_that_was_not_flushed() {
    for panics_at in 0..60 {
        let flushed = Mutex::default();
        let inv = Invalidator::new(Fragile { calls: 0.into(), panics_at, flushed, last: 0.into() });
        let mut tickets = Vec::new();
        for step in (0..64).step_by(16) {
            // Requests that gather in an open batch are submitted by the next call that polls,
            // which panics.
            tickets.push((step, inv.request([page(step), page(step + 2)])));
            let _ = catch_unwind(AssertUnwindSafe(|| inv.submit()));
            if let Ok(one) =
                catch_unwind(AssertUnwindSafe(|| inv.request_and_submit([page(step + 8)])))
            {
                tickets.push((step + 8, one));
            }
            for (number, ticket) in &tickets {
                let completed = *ticket <= inv.completed();
                assert!(
                    !completed || covers(&inv, *number),
                    "call {panics_at} panics: page {number}"
                );
            }
        }
        // The queue panics once, so everything completes in the end.
        for (number, ticket) in tickets {
            let first = catch_unwind(AssertUnwindSafe(|| inv.wait(ticket)));
            first.unwrap_or_else(|_| inv.wait(ticket)).unwrap();
            assert!(
                covers(&inv, number),
                "call {panics_at} panics: page {number} completed without a flush"
            );
        }
    }
}

/// Accepts everything, completes nothing, and panics once after a submission.
struct Hanging(AtomicU64);

impl InvalidationQueue for Hanging {
    fn submit(&self, _: &[Descriptor], _: Option<Ticket>) -> Result<(), QueueError> {
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket::COMPLETED
    }
    fn after_submission(&self) -> (Ticket, Option<u64>) {
        assert_ne!(self.0.fetch_add(1, Ordering::SeqCst), 0, "a queue");
        (self.completed(), self.now_ns())
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 100 }
    }
}

#[test]
fn a_panic_after_the_submission_leaves_a_deadline() {
    let inv = Invalidator::new(Hanging(0.into()));
    let ticket = inv.request([page(1)]);
    assert!(catch_unwind(AssertUnwindSafe(|| inv.submit())).is_err());
    assert!(matches!(inv.wait(ticket), Err(WaitError::TimedOut { .. })));
}

/// A queue that aborts what was submitted, and panics when it has been restarted. The first flush
/// after that completes.
#[derive(Default)]
struct FragileRestart {
    aborted: AtomicU64,
    restarts: AtomicU64,
    submitted: AtomicU64,
    completed: AtomicU64,
}

impl InvalidationQueue for FragileRestart {
    fn submit(&self, _: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        // The first is aborted.
        let first = self.submitted.fetch_add(1, Ordering::SeqCst) == 0;
        self.aborted.store(first.into(), Ordering::SeqCst);
        if let Some(ticket) = wait.filter(|_| !first) {
            self.completed.store(ticket.0, Ordering::SeqCst);
        }
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.completed.load(Ordering::SeqCst))
    }
    fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst) != 0
    }
    fn restart(&self) {
        self.aborted.store(0, Ordering::SeqCst);
        self.restarts.fetch_add(1, Ordering::SeqCst);
        std::panic::resume_unwind(Box::new("a queue"));
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 100 }
    }
}

#[test]
fn what_was_aborted_is_flushed_although_the_restart_panics() {
    let inv = Invalidator::new(FragileRestart::default());
    let ticket = inv.request_and_submit([page(1)]);
    let outcomes: Vec<_> =
        (0..2).map(|_| catch_unwind(AssertUnwindSafe(|| inv.wait(ticket))).map_err(drop)).collect();
    assert_eq!(outcomes, [Err(()), Ok(Ok(()))]);
    assert_eq!(inv.queue().restarts.load(Ordering::SeqCst), 1);
}
