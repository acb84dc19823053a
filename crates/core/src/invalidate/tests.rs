use super::*;
use crate::addr::Iova;
use core::sync::atomic::AtomicBool;
use picture::Picture;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A sink that a test completes by hand.
#[derive(Default)]
struct Hand {
    batches: std::sync::Mutex<Vec<(Ticket, Vec<Flush>, bool)>>,
    completed: core::sync::atomic::AtomicU64,
    full: AtomicBool,
}

impl Sink for Hand {
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), SinkError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(SinkError::Full);
        }
        self.batches.lock().unwrap().push((ticket, batch.flushes().to_vec(), batch.is_whole()));
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.completed.load(Ordering::SeqCst))
    }
    fn relax(&self, _polls: u64) {}
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: 10 }
    }
}

fn flush(page: u64, pages: u64) -> Flush {
    IovaRange::new(Iova::new(page << 12), pages << 12).unwrap().into()
}

fn complete(invalidator: &Invalidator<Hand>, ticket: u64) {
    invalidator.sink().completed.store(ticket, Ordering::SeqCst);
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
    assert!(!inv.is_done(first) && !inv.is_done(second));
    assert_eq!(inv.sink().batches.lock().unwrap().len(), 1);
    complete(&inv, 1);
    assert!(inv.is_done(first) && !inv.is_done(second));
    assert_eq!(inv.sink().batches.lock().unwrap()[1], (Ticket(2), vec![flush(20, 3)], false));
    complete(&inv, 2);
    assert!(inv.is_done(second));
    let stats = inv.stats();
    assert_eq!((stats.asked, stats.merged, stats.sent, stats.waits), (4, 2, 2, 2));
    assert_eq!(stats.asked_tables, 0);
}

#[test]
fn nothing_asked_needs_no_ticket() {
    let inv = Invalidator::new(Hand::default());
    assert_eq!(inv.request([]), Ticket::DONE);
    assert!(inv.is_done(Ticket::DONE));
    inv.submit();
    assert!(inv.sink().batches.lock().unwrap().is_empty());
}

#[test]
fn a_full_batch_becomes_a_flush_of_the_whole_domain() {
    let inv = Invalidator::new(Hand::default());
    let apart = |i| flush(i * 2, 1);
    for i in 0..Batch::CAPACITY as u64 + 1 {
        inv.request([apart(i)]);
    }
    inv.submit();
    assert_eq!(*inv.sink().batches.lock().unwrap(), [(Ticket(1), vec![], true)]);
    let stats = inv.stats();
    assert_eq!((stats.asked, stats.merged, stats.sent, stats.whole), (257, 256, 1, 1));
}

#[test]
fn timed_out_is_not_done_and_nobody_waits_for_a_ticket_that_was_not_given_out() {
    let inv = Invalidator::new(Hand::default());
    let ticket = inv.request([flush(1, 1)]);
    assert_eq!(inv.wait(ticket), Err(WaitError::TimedOut { ticket, waited_ns: 0, polls: 10 }));
    assert!(!inv.is_done(ticket));
    let unknown = Ticket(2);
    assert_eq!(inv.wait(unknown), Err(WaitError::Unknown { ticket: unknown, last: ticket }));
    assert!(matches!(inv.wait(Ticket::NEVER), Err(WaitError::Unknown { .. })));
    complete(&inv, 1);
    assert_eq!(inv.wait(ticket), Ok(()));
    assert_eq!(inv.stats().timed_out, 1);
}

#[test]
fn a_sink_that_names_a_ticket_from_the_future_is_not_believed() {
    let inv = Invalidator::new(Hand::default());
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    complete(&inv, u64::MAX);
    assert!(!inv.is_done(ticket));
    assert!(!inv.is_done(Ticket::NEVER));
    complete(&inv, 1);
    assert!(inv.is_done(ticket));
}

#[test]
fn a_batch_that_finds_no_room_is_kept_and_tried_again() {
    let inv = Invalidator::new(Hand::default());
    inv.sink().full.store(true, Ordering::SeqCst);
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    assert!(!inv.is_done(ticket));
    inv.sink().full.store(false, Ordering::SeqCst);
    complete(&inv, 1);
    assert!(!inv.is_done(ticket), "the sink's word from before the hand-over does not count for it");
    assert!(inv.is_done(ticket));
    assert_eq!(inv.sink().batches.lock().unwrap().len(), 1);
}

#[test]
fn stress_what_is_done_was_flushed_after_it_was_cleared() {
    let inv = Arc::new(Invalidator::new(Picture::<4>::new()));
    crate::threads::scope(|scope| {
        for page in 0..4 {
            let inv = Arc::clone(&inv);
            scope.spawn(move || {
                for round in 1..=5_000 {
                    let sink = inv.sink();
                    sink.cleared[page].store(round, Ordering::Relaxed);
                    let ticket = inv.request([flush(page as u64, 1)]);
                    inv.wait(ticket).unwrap();
                    assert!(sink.flushed[page].load(Ordering::Relaxed) >= round);
                }
            });
        }
    });
    assert_eq!(inv.stats().asked, 20_000);
}

proptest! {
    #[test]
    fn a_batch_covers_what_was_asked_and_nothing_else(
        asked in proptest::collection::vec((0u64..200, 1u64..6, any::<bool>()), 1..80),
    ) {
        let mut batch = Batch::new();
        let mut model = BTreeMap::new();
        for &(page, pages, leaf_only) in &asked {
            batch.push(Flush { leaf_only, ..flush(page, pages) });
            for page in page..page + pages {
                *model.entry(page).or_insert(true) &= leaf_only;
            }
        }
        batch.merge();
        let mut covered = BTreeMap::new();
        let mut end = None;
        for flush in batch.flushes() {
            prop_assert!(end < Some(flush.range.start()), "ascending and apart");
            end = Some(flush.range.end());
            for page in flush.range.start().raw() >> 12..=flush.range.last().raw() >> 12 {
                covered.insert(page, flush.leaf_only);
            }
        }
        prop_assert!(covered.keys().eq(model.keys()));
        // More may be flushed beyond leaves than was asked, never less.
        prop_assert!(model.iter().all(|(page, leaf_only)| *leaf_only || !covered[page]));
        prop_assert_eq!(batch.take_absorbed() + batch.flushes_sent(), asked.len() as u64);
    }
}
