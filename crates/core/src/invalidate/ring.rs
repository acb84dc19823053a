//! What one owner has requested and not yet handed over: a ring that it alone appends to, and any
//! thread may empty.

use super::descriptor::PAGE_SHIFT;
use super::flush::Pages;
use super::invalidator::Invalidator;
use super::point::Position;
use super::queue::InvalidationQueue;
use super::ticket::Ticket;
use crate::addr::IovaRange;
use crate::sync::{AtomicU64, Ordering};
use core::ops::Range;

/// Requests of one owner that have no ticket yet: of leaves, in pinned windows.
///
/// The owner appends without a lock and without a read-modify-write. Any thread hands them over to
/// the [`Invalidator`] ([`Invalidator::request_ring`]), under the lock of its open batch, and
/// learns their ticket: so one that waits does not depend on the owner running.
#[derive(Debug)]
pub struct RequestRing {
    /// How many requests were made. Changed by the owner.
    pushed: AtomicU64,
    /// How many of them were handed over. Changed with the lock of the open batch held.
    handed_over: AtomicU64,
    slots: [Slot; PLACES],
}

/// What a thread does next that hands over what an owner has gathered: decides when that is
/// submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// It goes on: the requests may gather further, with those of other owners.
    Other,
    /// It polls one of the requests: they are submitted.
    Poll,
    /// It waits for one of them: they are submitted, unless waiters yield first, so that others
    /// share the flush.
    Wait,
}

/// How many requests a ring holds.
const PLACES: usize = if cfg!(loom) { 2 } else { 64 };
const CAPACITY: u64 = PLACES as u64;
/// The bits of a slot that hold the number of pages; those above hold the number of the first page.
const COUNT_BITS: u32 = 12;

#[derive(Debug)]
struct Slot {
    pages: AtomicU64,
    /// The ticket that covers the request, or a later one. Written before `handed_over`.
    ticket: AtomicU64,
}

impl RequestRing {
    /// How many requests a ring holds.
    pub(crate) const CAPACITY: u64 = CAPACITY;

    pub(crate) fn new() -> Self {
        let slot = |_| Slot { pages: AtomicU64::new(0), ticket: AtomicU64::new(Ticket::NEVER.0) };
        let slots = core::array::from_fn(slot);
        Self { pushed: AtomicU64::new(0), handed_over: AtomicU64::new(0), slots }
    }

    fn slot(&self, position: u64) -> &Slot {
        &self.slots[(position % CAPACITY) as usize]
    }

    /// Appends the request for a range whose entries have been cleared, and returns its place.
    /// `None`, with nothing changed, if the ring is full or the range too long for a slot. For the
    /// owner alone.
    #[inline]
    pub(crate) fn push(&self, range: IovaRange) -> Option<Position> {
        let at = self.pushed.load(Ordering::Relaxed);
        // Acquire: whoever handed over what was in this slot has read it.
        let full = at - self.handed_over.load(Ordering::Acquire) == CAPACITY;
        let (first, last) = (range.start().raw() >> PAGE_SHIFT, range.last().raw() >> PAGE_SHIFT);
        let count = last - first + 1;
        if full || count >> COUNT_BITS != 0 {
            return None;
        }
        self.slot(at).pages.store(first << COUNT_BITS | count, Ordering::Relaxed);
        // Release: who sees the request sees that its entries are cleared.
        self.pushed.store(at + 1, Ordering::Release);
        Some(Position(at))
    }

    /// Returns how many requests were made so far. Exact for the owner.
    #[inline]
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed.load(Ordering::Relaxed)
    }

    /// Returns how many requests wait to be handed over. For the owner.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.pushed().saturating_sub(self.handed_over.load(Ordering::Relaxed))
    }

    /// Returns the ticket that covers the request at `position`, or a later one if its slot was
    /// used again since; `None` if it has not been handed over.
    #[inline]
    pub(crate) fn ticket_of(&self, position: Position) -> Option<Ticket> {
        let handed_over = self.handed_over.load(Ordering::Acquire) > position.0;
        handed_over.then(|| Ticket(self.slot(position.0).ticket.load(Ordering::Relaxed)))
    }

    /// Returns the requests that are to be handed over. With the lock of the open batch held, as
    /// the following two.
    fn waiting(&self) -> Range<u64> {
        self.handed_over.load(Ordering::Relaxed)..self.pushed.load(Ordering::Acquire)
    }

    fn pages(&self, position: u64) -> Pages {
        let packed = self.slot(position).pages.load(Ordering::Relaxed);
        let (first, count) = (packed >> COUNT_BITS, packed & ((1 << COUNT_BITS) - 1));
        Pages { first, end: first + count, leaf_only: true }
    }

    fn hand_over(&self, requests: Range<u64>, ticket: Ticket) {
        for position in requests.clone() {
            self.slot(position).ticket.store(ticket.0, Ordering::Relaxed);
        }
        // Release: who sees that they are handed over sees their ticket, and the owner may use the
        // slots again.
        self.handed_over.store(requests.end, Ordering::Release);
    }
}

impl<Q: InvalidationQueue> Invalidator<Q> {
    /// Requests everything in `ring`, which is empty afterwards unless its owner appends meanwhile.
    /// Any thread may call it, at the same time as the owner appends.
    ///
    /// Submits the open batch, as [`request_and_submit`](Self::request_and_submit) does, once that
    /// has as many pages as a ring has places: owners that hand over less share a flush. A thread
    /// that needs the flush `next` submits it at once, under the same hold of the lock.
    pub fn request_ring(&self, ring: &RequestRing, next: Next) {
        let gathers = match next {
            Next::Other => true,
            Next::Poll => false,
            Next::Wait => self.waiters_combine(),
        };
        self.publish_if_in_flight();
        let mut open = self.open.lock();
        let waiting = ring.waiting();
        if waiting.is_empty() {
            return; // another thread was faster
        }
        for position in waiting.clone() {
            let pages = ring.pages(position);
            open.requested.count(&pages);
            open.batch.push(pages);
        }
        ring.hand_over(waiting, self.issue(&open));
        if !gathers || open.batch.requested() >= CAPACITY {
            self.submit_open(open);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::addr::Iova;
    use crate::invalidate::snapshot::Snapshot;

    fn page(number: u64, count: u64) -> IovaRange {
        IovaRange::clamped(Iova::new(number << PAGE_SHIFT), count << PAGE_SHIFT)
    }

    #[test]
    fn requests_are_handed_over_once_and_in_order() {
        let (ring, inv) = (RequestRing::new(), Invalidator::new(Snapshot::<4>::new()));
        let all: Vec<Position> = (0..CAPACITY).map(|at| ring.push(page(at, 1)).unwrap()).collect();
        assert!(ring.push(page(0, 1)).is_none(), "full");
        assert!(ring.len() == CAPACITY && all.iter().all(|at| ring.ticket_of(*at).is_none()));
        assert_eq!(inv.stats().requested, 0);
        inv.request_ring(&ring, Next::Other);
        inv.request_ring(&ring, Next::Poll); // nothing is left
        assert!(ring.len() == 0 && all.iter().all(|at| ring.ticket_of(*at) == Some(Ticket(1))));
        let stats = inv.stats();
        assert_eq!(
            (stats.requested, stats.sent, stats.waits),
            (CAPACITY, 1, 1),
            "neighbours are one flush"
        );
        // A slot is used again: what it was used for before is covered by a later ticket, too.
        let again = ring.push(page(9, 3)).unwrap();
        assert_eq!((ring.ticket_of(all[0]), ring.ticket_of(again)), (Some(Ticket(1)), None));
        inv.request_ring(&ring, Next::Other);
        assert_eq!(
            (ring.ticket_of(all[0]), ring.ticket_of(again)),
            (Some(Ticket(2)), Some(Ticket(2)))
        );
        assert_eq!(
            (ring.ticket_of(all[1]), inv.stats().pages_requested),
            (Some(Ticket(1)), CAPACITY + 3)
        );
    }

    #[test]
    fn the_highest_pages_and_the_longest_runs_fit_a_slot() {
        let (ring, last) = (RequestRing::new(), (1 << 52) - (1 << COUNT_BITS));
        let longest = (1 << COUNT_BITS) - 1;
        assert!(ring.push(page(0, longest + 1)).is_none());
        assert!(ring.push(page(last, longest)).is_some());
        assert_eq!(ring.pages(0), Pages { first: last, end: last + longest, leaf_only: true });
    }
}
