//! Requests of threads that wait for them next: they gather where a yield has been worth it.

use super::*;

fn batches(inv: &Invalidator<Hand>) -> usize {
    inv.queue().batches.lock().unwrap().len()
}

/// A queue whose pause is the time in which another thread requests something.
struct Busy {
    unit: Hand,
    other: std::sync::OnceLock<std::sync::Weak<Invalidator<Busy>>>,
}

impl InvalidationQueue for Busy {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.unit.submit(descriptors, wait)?;
        self.unit.completed.fetch_max(wait.unwrap_or_default().0, Ordering::SeqCst);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        self.unit.completed()
    }
    fn relax(&self, _polls: u64) {
        if let Some(inv) = self.other.get().and_then(std::sync::Weak::upgrade) {
            inv.request_awaited(flush(50, 1));
        }
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}

/// An invalidator whose queue completes at once, and in whose pauses another thread requests
/// something if `busy`.
fn invalidator(busy: bool) -> Arc<Invalidator<Busy>> {
    let inv = Arc::new(Invalidator::new(Busy {
        unit: Hand::default(),
        other: std::sync::OnceLock::new(),
    }));
    if busy {
        inv.queue().other.set(Arc::downgrade(&inv)).unwrap();
    }
    inv
}

fn submitted(inv: &Invalidator<Busy>) -> usize {
    inv.queue().unit.batches.lock().unwrap().len()
}

#[test]
fn awaited_requests_gather_until_they_are_several_or_one_of_them_is_polled() {
    let inv = invalidator(false);
    for page in 0..7 {
        assert_eq!(inv.request_awaited(flush(2 * page, 1)), Ticket(1));
    }
    assert_eq!(submitted(&inv), 0);
    assert_eq!(inv.request_awaited(flush(100, 1)), Ticket(1));
    assert_eq!(submitted(&inv), 1, "the eighth submits all of them");
    let next = inv.request_awaited(flush(0, 1));
    assert_eq!((next, submitted(&inv)), (Ticket(2), 1));
    assert!(inv.is_completed(next));
    assert_eq!(submitted(&inv), 2, "whoever polls submits it");
    assert_eq!(inv.wait(next), Ok(()));
    assert_eq!((inv.stats().requested, inv.stats().waits), (9, 2));
}

#[test]
fn awaited_requests_do_not_gather_where_a_limit_counts_polls() {
    let inv = Invalidator::new(Hand::default());
    assert_eq!((inv.request_awaited(flush(0, 1)), batches(&inv)), (Ticket(1), 1));
    complete(&inv, 1);
    assert_eq!((inv.request_awaited(flush(0, 1)), batches(&inv)), (Ticket(2), 2));
}

/// A pause may be longer than the limit.
#[test]
fn a_wait_with_a_limit_of_its_own_does_not_yield() {
    let inv = invalidator(true);
    let ticket = inv.request_awaited(flush(0, 1));
    assert_eq!(inv.wait_for(ticket, WaitLimit { time_ns: 0, polls: 0 }), Ok(()));
    assert_eq!(inv.stats().requested, 1);
}

#[test]
fn a_wait_for_what_has_completed_does_not_yield() {
    let inv = invalidator(true);
    let ticket = inv.request_awaited(flush(0, 1));
    inv.submit();
    assert_eq!(inv.wait(ticket), Ok(()));
    assert_eq!(inv.stats().requested, 1);
}

/// Only those who wait for what they request are a reason to yield.
#[test]
fn what_nobody_waits_for_is_no_reason_to_yield() {
    let inv = invalidator(false);
    let before = inv.waits.yields.requests();
    inv.request([flush(0, 1)]);
    inv.request_and_submit([flush(0, 1)]);
    inv.request_one(flush(0, 1));
    assert_eq!(inv.waits.yields.requests(), before);
    inv.request_awaited(flush(0, 1));
    assert_eq!(inv.waits.yields.requests(), before + 1);
}

#[test]
fn what_others_request_while_a_waiter_has_yielded_shares_its_flush() {
    let inv = invalidator(true);
    for turn in 1..=100 {
        assert_eq!(inv.wait(inv.request_awaited(flush(0, 1))), Ok(()));
        let stats = inv.stats();
        assert_eq!((stats.requested, stats.waits), (2 * turn, turn));
    }
}

#[test]
fn an_awaited_request_is_submitted_at_once_after_a_yield_in_vain() {
    let inv = invalidator(false);
    let batches = || submitted(&inv);
    let first = inv.request_awaited(flush(0, 1));
    assert_eq!(batches(), 0);
    assert_eq!((inv.wait(first), batches()), (Ok(()), 1));
    assert_eq!((inv.request_awaited(flush(0, 1)), batches()), (Ticket(2), 2));
}

/// The iterator of a request may use the invalidator: it runs without the lock.
#[test]
fn an_iterator_of_requests_may_request() {
    let inv = Invalidator::new(Hand::default());
    let flushes = (0..40).map(|page| {
        inv.request([flush(1000 + 2 * page, 1)]);
        flush(2 * page, 1)
    });
    assert_eq!(inv.request_and_submit(flushes), Ticket(1));
    assert_eq!((inv.stats().requested, batches(&inv)), (80, 1));
}
