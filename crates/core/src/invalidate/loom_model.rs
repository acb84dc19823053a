//! Every interleaving of two owners that clear, request and poll: a ticket is never reported
//! completed before a flush that covers its request was submitted after its clear.

use super::*;
use crate::addr::{Iova, IovaRange};
use crate::sync::{self, Ordering};
use loom::sync::Arc;
use loom::thread;
use snapshot::Snapshot;

/// A queue with room for one batch, which never completes.
struct Stuck;

impl InvalidationQueue for Stuck {
    fn submit(&self, _: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        assert_eq!(wait, Some(Ticket(1)), "more batches in flight than the queue has room for");
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket::COMPLETED
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}

/// Clears the entry of a page, and requests its flush: one page by itself if it `submits`, the
/// other by the general path.
fn request(inv: &Invalidator<Snapshot<2>>, page: usize, submits: bool) -> Ticket {
    inv.queue().cleared[page].store(1, Ordering::Relaxed);
    let range = IovaRange::new(Iova::new((page as u64) << 12), 4096).unwrap();
    let flush = Flush::from(range);
    match submits {
        true if page == 0 => inv.request_and_submit([flush]),
        true => inv.request_and_submit([flush, flush]),
        false => inv.request([flush]),
    }
}

fn owner(inv: &Invalidator<Snapshot<2>>, page: usize, submits: bool) {
    let ticket = request(inv, page, submits);
    while !inv.is_completed(ticket) {
        thread::yield_now();
    }
    assert_eq!(inv.queue().flushed[page].load(Ordering::Relaxed), 1);
}

#[test]
fn loom_a_ticket_does_not_complete_before_its_flush() {
    explore(false, usize::MAX, None);
}

#[test]
fn loom_a_request_that_submits_does_not_complete_before_its_flush() {
    explore(true, usize::MAX, None);
}

/// The queue accepts one descriptor at a time: flushes of a batch are in it while its wait is not.
#[test]
fn loom_a_batch_in_parts_does_not_complete_before_all_of_its_flushes() {
    explore(true, 2, None);
    explore(false, 1, None);
}

/// A batch that is in flight or submitted in part when the unit aborts is flushed again before its
/// ticket completes.
#[test]
fn loom_what_a_unit_aborted_does_not_complete_before_it_is_flushed_again() {
    explore(true, usize::MAX, Some(0));
    explore(true, 2, Some(1));
}

/// Two units, one of which refuses or aborts: the state that the queue over both keeps of each
/// passes between the threads that submit, and no ticket completes before both units have flushed.
/// The last case has a restart whose flush is refused.
#[test]
fn loom_a_ticket_does_not_complete_before_every_unit_has_flushed() {
    explore_units(Snapshot::new, || Snapshot::new().refusing_every(2));
    explore_units(|| Snapshot::with(2, Some(0)), Snapshot::new);
    explore_units(Snapshot::new, || Snapshot::with(usize::MAX, Some(0)).refusing_every(2));
}

fn explore_units(first: fn() -> Snapshot<2>, second: fn() -> Snapshot<2>) {
    // With two units there are too many interleavings to try them all.
    sync::explore(Some(2), 1, move || {
        let inv = Arc::new(Invalidator::new(FanOut::new(first(), [second()])));
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || owner_of_units(&other, 1));
        owner_of_units(&inv, 0);
        thread.join().unwrap();
        assert_eq!(inv.stats().requested, 2);
    });
}

/// Clears the entry of a page for both units, and polls until its flush has completed.
fn owner_of_units(inv: &Invalidator<FanOut<Snapshot<2>>>, page: usize) {
    inv.queue().queues().for_each(|unit| unit.cleared[page].store(1, Ordering::Relaxed));
    let range = IovaRange::new(Iova::new((page as u64) << 12), 4096).unwrap();
    let ticket = inv.request_and_submit([Flush::from(range)]);
    while !inv.is_completed(ticket) {
        thread::yield_now();
    }
    for unit in inv.queue().queues() {
        assert_eq!(unit.flushed[page].load(Ordering::Relaxed), 1);
    }
}

/// Two requests that each become a batch of their own if they can: one of them meets the other in
/// the flight, or gathers.
#[test]
fn loom_a_single_request_does_not_complete_before_its_flush() {
    sync::explore(None, 2, || {
        let inv = Arc::new(Invalidator::new(Snapshot::<2>::new()));
        let single = |inv: &Invalidator<Snapshot<2>>, page: usize| {
            inv.queue().cleared[page].store(1, Ordering::Relaxed);
            let range = IovaRange::new(Iova::new((page as u64) << 12), 4096).unwrap();
            let ticket = inv.request_and_submit([Flush::from(range)]);
            while !inv.is_completed(ticket) {
                thread::yield_now();
            }
            assert_eq!(inv.queue().flushed[page].load(Ordering::Relaxed), 1);
        };
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || single(&other, 1));
        single(&inv, 0);
        thread.join().unwrap();
        assert_eq!(inv.stats().requested, 2);
    });
}

/// One of two single requests finds the queue full, also if it looked before the other one was
/// submitted.
#[test]
fn loom_no_more_batches_are_in_flight_than_the_queue_has_room_for() {
    sync::explore(None, 2, || {
        let inv = Arc::new(Invalidator::new(Stuck));
        let single = |inv: &Invalidator<Stuck>, page: u64| {
            inv.request_and_submit([Flush::from(
                IovaRange::new(Iova::new(page << 12), 4096).unwrap(),
            )])
        };
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || single(&other, 1));
        let here = single(&inv, 0);
        let there = thread.join().unwrap();
        assert_eq!((here.min(there), here.max(there)), (Ticket(1), Ticket(2)));
    });
}

/// An owner that requests and then never runs again: others submit its request, and see it
/// complete.
#[test]
fn loom_a_request_completes_without_the_owner_that_made_it() {
    sync::explore(None, 2, || {
        let inv = Arc::new(Invalidator::new(Snapshot::<2>::new()));
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || request(&other, 1, false));
        owner(&inv, 0, false);
        let ticket = thread.join().unwrap();
        inv.wait(ticket).unwrap();
        assert_eq!(inv.queue().flushed[1].load(Ordering::Relaxed), 1);
    });
}

fn explore(submits: bool, accepts: usize, aborts_at: Option<u64>) {
    // With aborts there are too many interleavings to try them all.
    let (preemptions, of_all_orders) = if aborts_at.is_some() { (Some(2), 1) } else { (None, 2) };
    sync::explore(preemptions, of_all_orders, move || {
        let inv = Arc::new(Invalidator::new(Snapshot::<2>::with(accepts, aborts_at)));
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || owner(&other, 1, submits));
        owner(&inv, 0, submits);
        thread.join().unwrap();
        // The general path is that of two requests which are one.
        assert_eq!(inv.stats().requested, 2 + u64::from(submits));
    });
}
