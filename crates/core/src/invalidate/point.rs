//! Where in the sequence of flushes something is quiesced, and the memory of it.

use super::ticket::Ticket;
// Not those of `sync`: a point is learnt once, and orders nothing. The queue's counters order what
// a ticket stands for.
use core::sync::atomic::{AtomicU64, Ordering};

/// Where in the sequence of flushes something is quiesced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Point {
    /// When this ticket has completed.
    Ticket(Ticket),
    /// When the ticket has completed that this request gets with its
    /// [`RequestRing`](super::RequestRing).
    Gathered(Position),
}

/// The place of a request among all that were made through its [`RequestRing`](super::RequestRing).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position(pub(super) u64);

/// A [`Point`] whose ticket any thread may learn. The first that is learnt is kept: the ring tells
/// a later one once it has used the request's place again, and what was quiesced must not appear to
/// be reachable then.
#[derive(Debug)]
pub(crate) struct PointCell(AtomicU64);

/// Set in a position. No ticket but [`Ticket::NEVER`], which is no position, is as large.
const GATHERED: u64 = 1 << 63;

impl PointCell {
    #[inline(always)]
    pub(crate) fn new(point: Point) -> Self {
        Self(AtomicU64::new(encode(point)))
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> Point {
        decode(self.0.load(Ordering::Relaxed))
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, point: Point) {
        *self.0.get_mut() = encode(point);
    }

    /// Keeps `ticket` as that of the request at `position`, unless another thread was faster, and
    /// returns the one that is kept.
    pub(crate) fn learn(&self, position: Position, ticket: Ticket) -> Ticket {
        let gathered = encode(Point::Gathered(position));
        match self.0.compare_exchange(gathered, ticket.0, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => ticket,
            Err(kept) => Ticket(kept),
        }
    }
}

#[inline(always)]
fn encode(point: Point) -> u64 {
    match point {
        Point::Ticket(ticket) => ticket.0,
        Point::Gathered(position) => position.0 | GATHERED,
    }
}

#[inline(always)]
fn decode(bits: u64) -> Point {
    if bits & GATHERED == 0 || bits == Ticket::NEVER.0 {
        Point::Ticket(Ticket(bits))
    } else {
        Point::Gathered(Position(bits & !GATHERED))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The ring may tell the second thread a later ticket.
    #[test]
    fn what_was_learnt_first_is_kept() {
        let position = Position(0);
        let point = PointCell::new(Point::Gathered(position));
        assert_eq!(point.get(), Point::Gathered(position));
        assert_eq!([5, 9].map(|ticket| point.learn(position, Ticket(ticket))), [Ticket(5); 2]);
        assert_eq!(point.get(), Point::Ticket(Ticket(5)));
        assert_eq!(
            PointCell::new(Point::Ticket(Ticket::NEVER)).get(),
            Point::Ticket(Ticket::NEVER)
        );
    }
}
