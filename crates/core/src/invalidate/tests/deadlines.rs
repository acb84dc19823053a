//! Waits that end before their flush has completed.

use super::*;

#[test]
fn timed_out_is_not_completed_and_a_ticket_that_was_not_issued_is_not_waited_for() {
    let inv = Invalidator::new(Hand::default());
    let ticket = inv.request([flush(1, 1)]);
    assert_eq!(inv.wait(ticket), Err(WaitError::TimedOut { ticket, waited_ns: 0, polls: 10 }));
    assert!(!inv.is_completed(ticket));
    let unknown = Ticket(2);
    assert_eq!(inv.wait(unknown), Err(WaitError::Unknown { ticket: unknown, last: ticket }));
    assert!(matches!(inv.wait(Ticket::NEVER), Err(WaitError::Unknown { .. })));
    complete(&inv, 1);
    assert_eq!(inv.wait(ticket), Ok(()));
    assert_eq!(inv.stats().timed_out, 1);
}

/// On a stuck queue, the waits of many waiters share one limit, instead of one each.
#[test]
fn a_check_ends_as_a_wait_would() {
    use core::task::Poll;
    let inv = Invalidator::new(Hand::default());
    assert_eq!(
        inv.check(Ticket(1)),
        Poll::Ready(Err(WaitError::Unknown { ticket: Ticket(1), last: Ticket(0) }))
    );
    let ticket = inv.request([flush(1, 1)]);
    let pending = (0..100).take_while(|_| inv.check(ticket).is_pending()).count();
    assert_eq!(pending, 10, "the limit");
    assert_eq!(
        inv.check(ticket),
        Poll::Ready(Err(WaitError::TimedOut { ticket, waited_ns: 0, polls: 10 }))
    );
    complete(&inv, 1);
    assert_eq!(inv.check(ticket), Poll::Ready(Ok(())));
}

#[test]
fn deadlines_count_from_the_submission_and_not_from_each_wait() {
    let inv = Invalidator::new(Hand::default());
    for page in 0..100 {
        let ticket = inv.request([flush(page * 2, 1)]);
        assert!(matches!(inv.wait(ticket), Err(WaitError::TimedOut { .. })));
        assert!(matches!(inv.wait(ticket), Err(WaitError::TimedOut { .. })));
    }
    assert_eq!(
        inv.queue().relaxed.load(Ordering::SeqCst),
        10,
        "one limit of 10 polls for all of them"
    );
    // A late completion is found by a later look, and the next batch has its own time.
    complete(&inv, 1);
    assert!(inv.is_completed(Ticket(1)) && !inv.is_completed(Ticket(2)));
    assert!(matches!(inv.wait(Ticket(2)), Err(WaitError::TimedOut { polls: 10, .. })));
    assert_eq!(inv.queue().relaxed.load(Ordering::SeqCst), 20);
    complete(&inv, 2);
    assert_eq!(inv.wait(Ticket(2)), Ok(()));
}

#[test]
fn a_wait_for_longer_counts_from_now() {
    let inv = Invalidator::new(Hand::default());
    let ticket = inv.request([flush(1, 1)]);
    assert!(inv.wait(ticket).is_err());
    let before = inv.queue().relaxed.load(Ordering::SeqCst);
    let longer = WaitLimit { time_ns: u64::MAX, polls: 7 };
    assert_eq!(
        inv.wait_for(ticket, longer),
        Err(WaitError::TimedOut { ticket, waited_ns: 0, polls: 7 })
    );
    assert_eq!(inv.queue().relaxed.load(Ordering::SeqCst) - before, 7);
    complete(&inv, 1);
    assert_eq!(inv.wait_for(ticket, longer), Ok(()));
}

#[test]
fn a_unit_that_fails_is_reported_at_once_to_every_waiter() {
    let inv = Invalidator::new(Hand { depth: 2, fails_after: Some(3), ..Hand::default() });
    let tickets: Vec<_> = (0..3)
        .map(|page| {
            let ticket = inv.request([flush(page * 2, 1)]);
            inv.submit();
            ticket
        })
        .collect();
    complete(&inv, 1);
    for (i, &ticket) in tickets.iter().enumerate().rev() {
        let expected = if i == 0 { Ok(()) } else { Err(WaitError::UnitFailed { ticket }) };
        assert_eq!(inv.wait(ticket), expected);
        assert_eq!(inv.wait_for(ticket, inv.queue().limit()), expected);
    }
    assert_eq!(inv.queue().relaxed.load(Ordering::SeqCst), 3, "only the first waiter had to wait");
}

#[test]
fn a_unit_that_refuses_a_batch_for_good_has_failed() {
    let inv = Invalidator::new(Hand { gone: true.into(), ..Hand::default() });
    let ticket = inv.request([flush(1, 1)]);
    assert!(!inv.has_failed());
    assert_eq!(inv.wait(ticket), Err(WaitError::UnitFailed { ticket }));
    assert!(inv.has_failed());
    assert_eq!(inv.queue().relaxed.load(Ordering::SeqCst), 0);
    // It is given nothing more, whatever it would say now: what completed behind the refused batch
    // would complete that too.
    inv.queue().gone.store(false, Ordering::SeqCst);
    let later = inv.request_and_submit([flush(2, 1)]);
    assert_eq!(inv.wait(later), Err(WaitError::UnitFailed { ticket: later }));
    assert!(inv.queue().batches.lock().unwrap().is_empty());
}

/// A single request has a batch of its own: it meets the refusal in another place.
#[test]
fn a_single_request_after_a_refused_one_is_not_submitted() {
    let inv = Invalidator::new(Hand { gone: true.into(), depth: 2, ..Hand::default() });
    let refused = inv.request_and_submit([flush(1, 1)]);
    inv.queue().gone.store(false, Ordering::SeqCst);
    let later = inv.request_and_submit([flush(2, 1)]);
    for ticket in [refused, later] {
        assert_eq!(inv.wait(ticket), Err(WaitError::UnitFailed { ticket }));
    }
    assert!(inv.queue().batches.lock().unwrap().is_empty());
}

#[test]
fn each_batch_has_its_own_deadline() {
    let inv = Invalidator::new(Hand { depth: 4, ..Hand::default() });
    for first in 0..3 * MAX_IN_FLIGHT {
        let ticket = inv.request([flush(first, 1)]);
        let limit = WaitLimit { time_ns: u64::MAX, polls: 9 };
        assert!(inv.wait_for(ticket, limit).is_err());
        complete(&inv, ticket.0);
        assert_eq!(inv.wait(ticket), Ok(()));
    }
    let ticket = inv.request([flush(1, 1)]);
    let before = inv.queue().relaxed.load(Ordering::SeqCst);
    assert!(matches!(inv.wait(ticket), Err(WaitError::TimedOut { polls: 10, .. })));
    assert_eq!(inv.queue().relaxed.load(Ordering::SeqCst) - before, 10);
}

/// A queue whose flush completes between two looks at it: while its clock is read, or before its
/// unit is found to have failed.
struct Meanwhile {
    unit: Hand,
    fails: bool,
}

impl InvalidationQueue for Meanwhile {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.unit.submit(descriptors, wait)
    }
    fn completed(&self) -> Ticket {
        self.unit.completed()
    }
    fn has_failed(&self) -> bool {
        self.unit.completed.fetch_max(self.fails.into(), Ordering::SeqCst);
        self.fails
    }
    fn limit(&self) -> WaitLimit {
        // Read with the clock, before what it says is compared.
        self.unit.completed.store(1, Ordering::SeqCst);
        WaitLimit { time_ns: u64::MAX, polls: 0 }
    }
}

/// A flush that has completed by the end of a wait was not late.
#[test]
fn a_flush_that_completes_while_a_wait_finds_out_that_it_is_over_has_completed() {
    use core::task::Poll;
    for fails in [false, true] {
        let queue = || Invalidator::new(Meanwhile { unit: Hand::default(), fails });
        let inv = queue();
        let ticket = inv.request([flush(1, 1)]);
        assert_eq!(inv.check(ticket), Poll::Ready(Ok(())), "fails: {fails}");
        let inv = queue();
        let ticket = inv.request([flush(1, 1)]);
        assert_eq!(inv.wait(ticket), Ok(()), "fails: {fails}");
        assert_eq!(inv.stats().timed_out, 0);
    }
}

/// A queue with a clock that a test sets, which records how tasks wait.
#[derive(Default)]
struct Clocked {
    now_ns: core::sync::atomic::AtomicU64,
    done: core::sync::atomic::AtomicU64,
    waiting: std::sync::Mutex<Vec<(Option<Ticket>, u64)>>,
    /// Called while a batch is submitted.
    meanwhile: std::sync::OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl InvalidationQueue for Clocked {
    fn submit(&self, _: &[Descriptor], _: Option<Ticket>) -> Result<(), QueueError> {
        self.meanwhile.get().inspect(|meanwhile| meanwhile());
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.done.load(Ordering::SeqCst))
    }
    fn wake(&self, ticket: Option<Ticket>, deadline_ns: u64, _: &core::task::Waker) {
        self.waiting.lock().unwrap().push((ticket, deadline_ns));
    }
    fn now_ns(&self) -> Option<u64> {
        Some(self.now_ns.load(Ordering::SeqCst))
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: 100, polls: u64::MAX }
    }
    fn queue_depth(&self) -> u64 {
        2
    }
}

/// A task sleeps as long as a wait may take: until the deadline of the oldest batch in flight.
#[test]
fn the_deadline_of_a_task_is_that_of_the_oldest_batch() {
    let inv = Invalidator::new(Clocked::default());
    let waiting = |ticket, to_deadline| {
        inv.wake(ticket, to_deadline, core::task::Waker::noop());
        inv.queue().waiting.lock().unwrap().pop().unwrap()
    };
    let request = |now_ns| {
        inv.queue().now_ns.store(now_ns, Ordering::SeqCst);
        inv.request_and_submit([flush(now_ns, 1)])
    };
    let (first, second, third) = (request(10), request(50), request(60));
    assert_eq!(waiting(first, true), (Some(first), 110));
    assert_eq!(waiting(second, true), (Some(second), 110));
    assert_eq!(waiting(third, true), (None, 110), "it gathers: two may be in flight");
    assert_eq!(waiting(second, false), (Some(second), u64::MAX));
    inv.queue().done.store(1, Ordering::SeqCst);
    assert!(inv.is_completed(first));
    assert_eq!(waiting(second, true), (Some(second), 150));
    assert_eq!(waiting(third, true), (Some(third), 150));
    inv.queue().done.store(3, Ordering::SeqCst);
    assert!(inv.is_completed(third));
    inv.queue().now_ns.store(1000, Ordering::SeqCst);
    assert_eq!(waiting(Ticket(4), true), (None, 1100), "nothing is in flight: from now");
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(core::sync::atomic::AtomicU64);

impl std::task::Wake for Woken {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// While a batch is being submitted, what is requested then has no event to be woken by.
#[test]
fn a_task_behind_a_thread_that_submits_is_woken_at_once() {
    let inv: &'static Invalidator<Clocked> =
        Box::leak(Box::new(Invalidator::new(Clocked::default())));
    let woken = std::sync::Arc::new(Woken::default());
    let waker = core::task::Waker::from(std::sync::Arc::clone(&woken));
    let meanwhile = Box::new(move || inv.wake(Ticket(2), true, &waker));
    assert!(inv.queue().meanwhile.set(meanwhile).is_ok());
    inv.request_and_submit([flush(1, 1)]);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1);
    let waker = core::task::Waker::from(std::sync::Arc::clone(&woken));
    inv.wake(Ticket(2), true, &waker);
    inv.wake(Ticket(1), true, &waker);
    assert_eq!(woken.0.load(Ordering::SeqCst), 1, "only then");
}
