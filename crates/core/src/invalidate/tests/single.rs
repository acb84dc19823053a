//! Requests that are submitted by themselves, beside batches on their way.

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
