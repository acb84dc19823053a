//! Requests that are submitted by themselves, and what an owner hands over, beside batches on their
//! way.

use super::*;

/// The queue had no room for the batch before: it stays whole, and the next single request gathers
/// behind it.
#[test]
fn a_single_request_gathers_behind_a_batch_on_its_way() {
    let inv = Invalidator::new(Hand { accepts: 0.into(), depth: 2, ..Hand::default() });
    assert_eq!([0, 2].map(|page| inv.request_one(flush(page, 1))), [Ticket(1), Ticket(2)]);
    inv.queue().accepts.store(usize::MAX, Ordering::SeqCst);
    inv.submit();
    inv.submit();
    let expected = [(Ticket(1), blocks([(0, 0)])), (Ticket(2), blocks([(2, 0)]))];
    assert_eq!(*inv.queue().batches.lock().unwrap(), expected);
}

/// What an owner hands over is submitted although the batch before was in flight when the owner
/// looked last.
#[test]
fn a_full_ring_finds_that_the_queue_has_room_again() {
    let (inv, ring) = (Invalidator::new(Hand::default()), RequestRing::new());
    let submitted = |batches| assert_eq!(inv.queue().batches.lock().unwrap().len(), batches);
    let fill = || {
        for page in 0..RequestRing::CAPACITY {
            ring.push(flush(page, 1).range).unwrap();
        }
        inv.request_ring(&ring, Next::Other);
    };
    fill();
    submitted(1);
    fill();
    submitted(1);
    complete(&inv, 1);
    // Some of another owner, too few to be submitted for their number alone.
    ring.push(flush(0, 1).range).unwrap();
    inv.request_ring(&ring, Next::Other);
    submitted(2);
    assert_eq!(inv.stats().pages_requested, 2 * RequestRing::CAPACITY + 1);
}
