//! What is done under one hold of the lock of the open batch, counted.

use super::*;
use crate::sync::{longest_hold, rmw_reset};

/// The most work for it: 255 requests far apart and one that abuts the first, and then a list of
/// requests of which each abuts one. Whenever the batch is full, a merge makes room for as many as
/// were appended since the last merge, which is one.
#[test]
fn a_full_batch_is_merged_once_for_a_list() {
    const CAPACITY: u64 = batch::Batch::CAPACITY as u64;
    const LIST: u64 = FlushList::CAPACITY as u64;
    let inv = Invalidator::new(Hand::default());
    let fill = (0..CAPACITY - 1).map(|i| flush(4 * i, 1)).chain([flush(1, 1)]);
    assert!(inv.request(fill) > Ticket::COMPLETED);
    let mut list = FlushList::new();
    assert!((1..=LIST).all(|i| list.push(flush(4 * i + 1, 1)).is_ok()));
    rmw_reset();
    inv.request_list(&mut list, false);
    // The lock, the requests, one merge, and the ticket.
    assert!(longest_hold() <= CAPACITY + LIST + 8, "{} steps", longest_hold());
    inv.submit();
    assert_eq!(*inv.queue().batches.lock().unwrap(), [(Ticket(1), vec![ALL])]);
    assert_eq!(inv.stats().requested, CAPACITY + LIST);
}
