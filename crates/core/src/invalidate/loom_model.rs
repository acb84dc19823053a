//! Every interleaving of two owners that clear, request and ask: a ticket is never reported done before a flush that
//! covers its request was submitted after its clear.

use super::*;
use crate::addr::Iova;
use loom::sync::Arc;
use loom::thread;

/// Takes a picture of what is cleared when a batch is submitted. The clears are relaxed stores: what orders them
/// before the picture is the invalidator alone, and what orders the picture before the owner's look is its ticket.
struct Picture {
    cleared: [AtomicU64; 2],
    flushed: [AtomicU64; 2],
    submitted: AtomicU64,
}

impl Sink for Picture {
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), SinkError> {
        for flush in batch.flushes() {
            for (page, cleared) in (0..).zip(&self.cleared) {
                if flush.range.contains(Iova::new((page as u64) << 12)) {
                    self.flushed[page].store(cleared.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
        }
        self.submitted.store(ticket.0, Ordering::Release);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.submitted.load(Ordering::Acquire))
    }
    fn relax(&self, _polls: u64) {
        thread::yield_now();
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}

fn owner(inv: &Invalidator<Picture>, page: usize) {
    inv.sink().cleared[page].store(1, Ordering::Relaxed);
    let range = IovaRange::new(Iova::new((page as u64) << 12), 4096).unwrap();
    let ticket = inv.request([Flush::from(range)]);
    while !inv.is_done(ticket) {
        thread::yield_now();
    }
    assert_eq!(inv.sink().flushed[page].load(Ordering::Relaxed), 1);
}

#[test]
fn loom_a_ticket_is_not_done_before_its_flush() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = None;
    model.check(|| {
        let inv = Arc::new(Invalidator::new(Picture {
            cleared: [AtomicU64::new(0), AtomicU64::new(0)],
            flushed: [AtomicU64::new(0), AtomicU64::new(0)],
            submitted: AtomicU64::new(0),
        }));
        let other = Arc::clone(&inv);
        let thread = thread::spawn(move || owner(&other, 1));
        owner(&inv, 0);
        thread.join().unwrap();
        assert_eq!(inv.stats().asked, 2);
    });
}
