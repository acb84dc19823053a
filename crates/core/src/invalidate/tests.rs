use super::batch::FlushList;
use super::*;
use crate::addr::{Iova, IovaRange};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use snapshot::Snapshot;
use std::sync::Arc;

mod cover;
mod deadlines;
mod units;
mod unwind;

/// An invalidation queue whose batches the test completes.
struct Hand {
    /// The parts submitted; the ticket is 0 where there was no wait.
    batches: std::sync::Mutex<Vec<(Ticket, Vec<Descriptor>)>>,
    accepts: AtomicUsize,
    device_tlbs: bool,
    disabled: bool,
    aborted: AtomicBool,
    completed: core::sync::atomic::AtomicU64,
    full: AtomicBool,
    relaxed: core::sync::atomic::AtomicU64,
    /// The number of batches that may be in flight; 0 is the default.
    depth: u64,
    gone: AtomicBool,
    /// Fails while a waiter waits, after this many polls.
    fails_after: Option<u64>,
}

impl Default for Hand {
    fn default() -> Self {
        Self {
            batches: std::sync::Mutex::default(),
            accepts: usize::MAX.into(),
            device_tlbs: false,
            disabled: false,
            aborted: false.into(),
            completed: 0.into(),
            full: false.into(),
            relaxed: 0.into(),
            depth: 0,
            gone: false.into(),
            fails_after: None,
        }
    }
}

impl InvalidationQueue for Hand {
    fn caches(&self) -> bool {
        !self.disabled
    }
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        if self.aborted.load(Ordering::SeqCst) || self.full.load(Ordering::SeqCst) {
            return Err(QueueError::Full);
        }
        if self.gone.load(Ordering::SeqCst) {
            return Err(QueueError::Failed);
        }
        self.batches.lock().unwrap().push((wait.unwrap_or_default(), descriptors.to_vec()));
        Ok(())
    }
    fn accepts(&self) -> usize {
        self.accepts.load(Ordering::SeqCst)
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn has_device_tlbs(&self) -> bool {
        self.device_tlbs
    }
    fn has_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }
    fn restart(&self) {
        self.aborted.store(false, Ordering::SeqCst);
    }
    fn completed(&self) -> Ticket {
        Ticket(self.completed.load(Ordering::SeqCst))
    }
    fn relax(&self, _polls: u64) {
        self.relaxed.fetch_add(1, Ordering::SeqCst);
    }
    fn queue_depth(&self) -> u64 {
        self.depth.max(1)
    }
    fn has_failed(&self) -> bool {
        self.fails_after.is_some_and(|polls| self.relaxed.load(Ordering::SeqCst) >= polls)
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 10 }
    }
}

fn flush(page: u64, pages: u64) -> Flush {
    IovaRange::new(Iova::new(page << 12), pages << 12).unwrap().into()
}

/// The blocks of leaves with these first pages and orders.
fn blocks<const N: usize>(blocks: [(u64, u32); N]) -> Vec<Descriptor> {
    let block = |(page, order)| Descriptor::Iotlb {
        scope: Scope::Block(queue::Block::containing(page, order)),
        leaf_only: true,
    };
    blocks.into_iter().map(block).collect()
}

const ALL: Descriptor = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };

fn complete(invalidator: &Invalidator<Hand>, ticket: u64) {
    invalidator.queue().completed.store(ticket, Ordering::SeqCst);
}

#[test]
fn while_a_batch_is_on_its_way_the_next_one_gathers() {
    let inv = Invalidator::new(Hand::default());
    let first = inv.request([flush(10, 1)]);
    inv.submit();
    let second = inv.request([flush(20, 1), flush(22, 1)]);
    inv.submit();
    let third = inv.request([flush(21, 1)]);
    inv.submit();
    assert_eq!((first, second, third), (Ticket(1), Ticket(2), Ticket(2)));
    assert!(!inv.is_completed(first) && !inv.is_completed(second));
    assert_eq!(inv.queue().batches.lock().unwrap().len(), 1);
    complete(&inv, 1);
    assert!(inv.is_completed(first) && !inv.is_completed(second));
    assert_eq!(inv.queue().batches.lock().unwrap()[1], (Ticket(2), blocks([(20, 1), (22, 0)])));
    complete(&inv, 2);
    assert!(inv.is_completed(second));
    let stats = inv.stats();
    assert_eq!((stats.requested, stats.merged, stats.sent, stats.waits), (4, 2, 3, 2));
    assert_eq!((stats.pages_requested, stats.pages_flushed, stats.parts), (4, 4, 2));
    assert_eq!(stats.requested_tables, 0);
}

/// A revoke requests and submits at once; while the queue is full its request gathers.
#[test]
fn a_request_that_submits_appends_while_the_queue_is_full() {
    assert_eq!(Invalidator::new(Hand::default()).request_and_submit([]), Ticket::COMPLETED);
    appends_while_full(|inv, flush| inv.request_and_submit([flush]));
    // As a list of two that are one.
    appends_while_full(|inv, flush| inv.request_and_submit([flush, flush]));
}

fn appends_while_full(request: impl Fn(&Invalidator<Hand>, Flush) -> Ticket) {
    let inv = Invalidator::new(Hand::default());
    let submitted = || inv.queue().batches.lock().unwrap().len();
    assert_eq!(request(&inv, flush(10, 1)), Ticket(1));
    assert_eq!(submitted(), 1);
    assert_eq!(request(&inv, flush(20, 1)), Ticket(2));
    assert_eq!(submitted(), 1);
    complete(&inv, 1);
    assert_eq!(request(&inv, flush(22, 1)), Ticket(2), "the same batch, which it submits");
    assert_eq!(inv.queue().batches.lock().unwrap()[1], (Ticket(2), blocks([(20, 0), (22, 0)])));
    // A unit that refused a batch for good is not offered another one.
    inv.queue().gone.store(true, Ordering::SeqCst);
    complete(&inv, 2);
    assert_eq!(request(&inv, flush(30, 1)), Ticket(3));
    assert!(inv.has_failed());
    inv.queue().gone.store(false, Ordering::SeqCst);
    assert_eq!(request(&inv, flush(31, 1)), Ticket(4));
    assert_eq!(submitted(), 2);
}

#[test]
fn nothing_asked_needs_no_ticket() {
    let inv = Invalidator::new(Hand::default());
    assert_eq!(inv.request([]), Ticket::COMPLETED);
    assert!(inv.is_completed(Ticket::COMPLETED));
    inv.submit();
    assert!(inv.queue().batches.lock().unwrap().is_empty());
}

#[test]
fn a_full_batch_becomes_a_flush_of_the_whole_domain() {
    let inv = Invalidator::new(Hand::default());
    let apart = |i| flush(i * 2, 1);
    for i in 0..batch::Batch::CAPACITY as u64 + 1 {
        inv.request([apart(i)]);
    }
    inv.submit();
    assert_eq!(*inv.queue().batches.lock().unwrap(), [(Ticket(1), vec![ALL])]);
    let stats = inv.stats();
    assert_eq!((stats.requested, stats.merged, stats.sent, stats.domain_flushes), (257, 256, 1, 1));
}

#[test]
fn as_many_batches_are_in_flight_as_the_queue_allows_and_they_are_published_in_order() {
    let inv = Invalidator::new(Hand { depth: 3, ..Hand::default() });
    for page in 0..5 {
        inv.request([flush(page * 2, 1)]);
        inv.submit();
    }
    let submitted = || inv.queue().batches.lock().unwrap().len();
    assert_eq!(submitted(), 3, "the fourth gathers what came after");
    complete(&inv, 2); // the third may have completed before the second: this is when both are over
    assert!(
        inv.is_completed(Ticket(1)) && inv.is_completed(Ticket(2)) && !inv.is_completed(Ticket(3))
    );
    assert!(!inv.is_completed(Ticket(4)), "but it is submitted by who asks");
    assert_eq!(submitted(), 4);
    assert_eq!(inv.queue().batches.lock().unwrap()[3].1, blocks([(6, 0), (8, 0)]));
    complete(&inv, 4);
    assert!(inv.is_completed(Ticket(4)));
    assert_eq!(inv.stats().in_flight_peak, 3);
}

/// More tickets than the clock has entries, most of them in time.
#[test]
fn a_queue_that_names_a_ticket_from_the_future_is_not_believed() {
    let inv = Invalidator::new(Hand::default());
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    complete(&inv, u64::MAX);
    assert!(!inv.is_completed(ticket));
    assert!(!inv.is_completed(Ticket::NEVER));
    complete(&inv, 1);
    assert!(inv.is_completed(ticket));
}

#[test]
fn a_batch_that_a_full_queue_refuses_is_kept_and_retried() {
    let inv = Invalidator::new(Hand::default());
    inv.queue().full.store(true, Ordering::SeqCst);
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    assert!(!inv.is_completed(ticket));
    inv.queue().full.store(false, Ordering::SeqCst);
    assert!(!inv.is_completed(ticket));
    complete(&inv, 1);
    assert!(inv.is_completed(ticket));
    assert_eq!(inv.queue().batches.lock().unwrap().len(), 1);
}

/// The deadline of a batch that finds no room counts from the first attempt, or a queue that stays
/// full is waited for without end.
#[test]
fn a_queue_that_stays_full_is_waited_for_no_longer_than_its_limit() {
    let inv = Invalidator::new(Hand { full: true.into(), ..Hand::default() });
    for page in 0..3 {
        let ticket = inv.request([flush(page * 2, 1)]);
        assert!(matches!(inv.wait(ticket), Err(WaitError::TimedOut { polls: 10, .. })));
        assert!(inv.queue().relaxed.load(Ordering::SeqCst) <= 10);
    }
}

#[test]
fn stress_what_completed_was_flushed_after_it_was_cleared() {
    let inv = Arc::new(Invalidator::new(Snapshot::<4>::new()));
    crate::testing::scope(|scope| {
        for page in 0..4 {
            let inv = Arc::clone(&inv);
            scope.spawn(move || {
                for round in 1..=5_000 {
                    let sink = inv.queue();
                    sink.cleared[page].store(round, Ordering::Relaxed);
                    let ticket = inv.request([flush(page as u64, 1)]);
                    inv.wait(ticket).unwrap();
                    assert!(sink.flushed[page].load(Ordering::Relaxed) >= round);
                }
            });
        }
    });
    assert_eq!(inv.stats().requested, 20_000);
}

/// A queue that accepts three descriptors: a batch of five blocks goes in two parts, and its wait
/// with the second.
#[test]
fn a_batch_goes_in_parts_and_its_wait_comes_last() {
    let inv = Invalidator::new(Hand::default());
    let accept = |n| inv.queue().accepts.store(n, Ordering::SeqCst);
    accept(0);
    let ticket = inv.request_and_submit((0..5).map(|i| flush(i * 2, 1)));
    assert!(inv.queue().batches.lock().unwrap().is_empty());
    accept(3);
    inv.submit();
    // The first part fills the queue; this one has made room before the next poll.
    assert_eq!(
        *inv.queue().batches.lock().unwrap(),
        [(Ticket(0), blocks([(0, 0), (2, 0), (4, 0)])), (ticket, blocks([(6, 0), (8, 0)]))]
    );
    assert_eq!((inv.stats().parts, inv.stats().waits, inv.stats().sent), (2, 1, 5));
    complete(&inv, 1);
    assert!(inv.is_completed(ticket));
    // Exactly as many as there is room for, and the wait by itself later.
    accept(1);
    let ticket = inv.request_and_submit([flush(20, 1)]);
    assert_eq!(
        inv.queue().batches.lock().unwrap()[2..],
        [(Ticket(0), blocks([(20, 0)])), (ticket, vec![])]
    );
}

/// A batch that is stuck halfway has a deadline, and what is requested meanwhile gathers behind it.
#[test]
fn a_queue_that_fills_up_in_the_middle_of_a_batch_is_waited_for_no_longer_than_its_limit() {
    let inv = Invalidator::new(Hand { accepts: 0.into(), ..Hand::default() });
    let first = inv.request_and_submit([flush(0, 1)]);
    let second = inv.request([flush(2, 1)]);
    assert_eq!((first, second), (Ticket(1), Ticket(2)));
    assert!(matches!(inv.wait(second), Err(WaitError::TimedOut { polls: 10, .. })));
    assert!(matches!(inv.wait(first), Err(WaitError::TimedOut { polls: 10, .. })));
    inv.queue().accepts.store(usize::MAX, Ordering::SeqCst);
    assert!(!inv.is_completed(first));
    complete(&inv, 1);
    assert!(inv.is_completed(first) && !inv.is_completed(second));
    assert_eq!(inv.queue().batches.lock().unwrap()[1], (Ticket(2), blocks([(2, 0)])));
}

/// The TLB of a device is filled from the IOTLB, so it is flushed after it.
#[test]
fn device_tlbs_are_flushed_behind_a_fence() {
    let inv = Invalidator::new(Hand { device_tlbs: true, depth: 2, ..Hand::default() });
    let table = Flush { leaf_only: false, ..flush(512, 512) };
    inv.request_and_submit([flush(0, 1), table]);
    let of_device =
        |page, order| Descriptor::DeviceTlb(Scope::Block(queue::Block::containing(page, order)));
    let mut expected = blocks([(0, 0), (512, 9)]);
    expected[1] = match expected[1] {
        Descriptor::Iotlb { scope, .. } => Descriptor::Iotlb { scope, leaf_only: false },
        other => other,
    };
    expected.extend([Descriptor::Fence, of_device(0, 0), of_device(512, 9)]);
    assert_eq!(inv.queue().batches.lock().unwrap()[0].1, expected);
    inv.request_and_submit((0..=256).map(|i| flush(i * 2, 1)));
    let all = [ALL, Descriptor::Fence, Descriptor::DeviceTlb(Scope::Domain)];
    assert_eq!(inv.queue().batches.lock().unwrap()[1].1, all);
    assert_eq!((inv.stats().sent, inv.stats().sent_device_tlb), (3, 3));
}

/// The waits in flight are submitted again as one flush of the domain, once; a batch submitted in
/// part begins again.
#[test]
fn what_a_unit_aborted_is_submitted_again() {
    let inv = Invalidator::new(Hand { depth: 3, ..Hand::default() });
    let first = inv.request_and_submit([flush(0, 1)]);
    let second = inv.request_and_submit([flush(2, 1)]);
    complete(&inv, 1);
    assert!(inv.is_completed(first));
    inv.queue().aborted.store(true, Ordering::SeqCst);
    assert!(!inv.is_completed(second) && !inv.is_completed(second));
    assert!(!inv.queue().aborted.load(Ordering::SeqCst));
    assert_eq!(inv.queue().batches.lock().unwrap()[2..], [(second, vec![ALL])]);
    // Nothing is in flight: nothing is submitted again.
    complete(&inv, 2);
    assert!(inv.is_completed(second));
    inv.queue().aborted.store(true, Ordering::SeqCst);
    let third = inv.request_and_submit([flush(4, 1)]);
    assert_eq!(inv.queue().batches.lock().unwrap()[3..], [(third, blocks([(4, 0)]))]);
    assert_eq!(inv.stats().resubmitted, 1);
}

/// The flush that replaces aborted ones reaches the TLBs of devices too, behind a fence; one that
/// the queue does not accept is submitted at a later poll.
#[test]
fn what_replaces_aborted_flushes_reaches_device_tlbs_and_is_not_forgotten() {
    let inv = Invalidator::new(Hand { depth: 3, device_tlbs: true, ..Hand::default() });
    let first = inv.request_and_submit([flush(0, 1)]);
    let queue = inv.queue();
    queue.aborted.store(true, Ordering::SeqCst);
    queue.full.store(true, Ordering::SeqCst);
    assert!(!inv.is_completed(first) && !inv.queue().aborted.load(Ordering::SeqCst));
    queue.full.store(false, Ordering::SeqCst);
    assert!(!inv.is_completed(first));
    assert_eq!(queue.batches.lock().unwrap().len(), 2, "a poll is enough");
    let second = inv.request_and_submit([flush(2, 1)]);
    let all = vec![ALL, Descriptor::Fence, Descriptor::DeviceTlb(Scope::Domain)];
    let batches = queue.batches.lock().unwrap();
    assert_eq!((batches.len(), &batches[1], batches[2].0), (3, &(first, all), second));
}

#[test]
fn a_list_merges_what_abuts_and_counts_every_request() {
    let (mut list, inv) = (FlushList::new(), Invalidator::new(Hand::default()));
    assert_eq!((list.is_empty(), inv.request([])), (true, Ticket::COMPLETED));
    let near = (0..1000).map(|page| flush(page, 1));
    let far = (1..FlushList::CAPACITY as u64).map(|i| flush(2000 + i * 2, 1));
    let all: Vec<_> = near.chain(far).collect();
    assert!(all.iter().all(|flush| list.push(*flush).is_ok()));
    assert_eq!(list.push(flush(1, 1)), Err(flush(1, 1)), "full, and not beside the last one");
    assert_eq!(list.push(flush(2031, 2)), Ok(()), "beside the last one");
    list.clear();
    assert!(list.is_empty());
    assert_eq!(inv.request(all.into_iter().chain([flush(2031, 2)])), Ticket(1));
    assert!(inv.queue().batches.lock().unwrap().is_empty());
    inv.submit();
    let stats = inv.stats();
    assert_eq!((stats.requested, stats.merged), (1000 + 15 + 1, 1000));
    assert_eq!((stats.pages_requested, stats.pages_flushed), (1000 + 15 + 2, 1000 + 15 + 2));
}

/// The queue had no room for the batch before: it stays whole, and the next single request gathers
/// behind it.
#[test]
fn a_single_request_gathers_behind_a_batch_on_its_way() {
    let inv = Invalidator::new(Hand { accepts: 0.into(), depth: 2, ..Hand::default() });
    assert_eq!([0, 2].map(|page| inv.request_and_submit([flush(page, 1)])), [Ticket(1), Ticket(2)]);
    inv.queue().accepts.store(usize::MAX, Ordering::SeqCst);
    inv.submit();
    inv.submit();
    let expected = [(Ticket(1), blocks([(0, 0)])), (Ticket(2), blocks([(2, 0)]))];
    assert_eq!(*inv.queue().batches.lock().unwrap(), expected);
}

/// The most work for it: 255 requests far apart and one that abuts the first, and then a list of
/// requests of which each abuts one. Whenever the batch is full, a merge makes room for as many as
/// were appended since the last merge, which is one.
#[cfg(feature = "count-rmw")]
#[test]
fn counted_a_full_batch_is_merged_once_for_a_list() {
    const CAPACITY: u64 = batch::Batch::CAPACITY as u64;
    const LIST: u64 = FlushList::CAPACITY as u64;
    let inv = Invalidator::new(Hand::default());
    let fill = (0..CAPACITY - 1).map(|i| flush(4 * i, 1)).chain([flush(1, 1)]);
    assert!(inv.request(fill) > Ticket::COMPLETED);
    crate::sync::rmw_reset();
    inv.request((1..=LIST).map(|i| flush(4 * i + 1, 1)));
    // The lock, the requests, one merge, and the ticket.
    assert!(
        crate::sync::longest_hold() <= CAPACITY + LIST + 8,
        "{} steps",
        crate::sync::longest_hold()
    );
    inv.submit();
    assert_eq!(*inv.queue().batches.lock().unwrap(), [(Ticket(1), vec![ALL])]);
    assert_eq!(inv.stats().requested, CAPACITY + LIST);
}
