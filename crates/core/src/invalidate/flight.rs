//! Batches on their way: the one that is being submitted, taken out of the lock that requesters need
//! and owned by one thread at a time, and how long those in the queue have been in flight.

use super::batch::{Batch, MAX_BLOCKS, Open, cover};
use super::queue::{Descriptor, FlushCosts, Scope, Ticket};
use crate::sync::{AtomicBool, AtomicU64, Ordering, UnsafeCell};
use alloc::vec::Vec;

/// A batch on its way into the queue, which may take several parts.
#[derive(Debug)]
pub(super) struct Flight {
    /// Its ticket; 0 if there is no batch.
    pub(super) ticket: u64,
    pub(super) batch: Batch,
    pub(super) descriptors: Vec<Descriptor>,
    /// How many descriptors the queue has accepted.
    pub(super) next: usize,
    pub(super) pages_flushed: u64,
}

impl Flight {
    /// Expresses the batch in descriptors: IOTLBs first, and the TLBs of devices behind a fence,
    /// because a device may fill its TLB from the IOTLB until that has been flushed (VT-d,
    /// "Device-TLB Invalidate").
    #[inline(always)]
    pub(super) fn prepare(&mut self, costs: &FlushCosts, max_order: u32, device_tlbs: bool) {
        self.batch.merge();
        self.descriptors.clear();
        let out = &mut self.descriptors;
        let covered = (!self.batch.is_domain_flush())
            .then(|| cover(self.batch.pages(), costs, max_order, out))
            .flatten();
        if covered.is_none() {
            out.push(Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false });
        }
        self.pages_flushed = covered.unwrap_or(self.batch.requested());
        if device_tlbs {
            append_device_tlbs(out);
        }
        self.next = 0;
    }

    /// Returns the descriptors that the queue has not accepted yet.
    pub(super) fn rest(&self) -> &[Descriptor] {
        self.descriptors.get(self.next..).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.ticket = 0;
        self.batch.clear();
        self.descriptors.clear();
        self.next = 0;
    }
}

/// Appends, behind a fence, the flushes of device TLBs that correspond to those of the IOTLB.
pub(super) fn append_device_tlbs(descriptors: &mut Vec<Descriptor>) {
    let count = descriptors.len();
    descriptors.push(Descriptor::Fence);
    descriptors.extend_from_within(..count);
    for descriptor in descriptors.iter_mut().skip(count + 1) {
        if let Descriptor::Iotlb { scope, .. } = *descriptor {
            *descriptor = Descriptor::DeviceTlb(scope);
        }
    }
}

/// A [`Flight`] that one thread at a time claims.
#[derive(Debug)]
pub(super) struct FlightCell {
    /// Set with the lock of `Open` held, so by a load and a store.
    claimed: AtomicBool,
    flight: UnsafeCell<Flight>,
}

// SAFETY: the flight is `Send`, and accessed by the one `Claim` that exists only (`try_claim`).
unsafe impl Sync for FlightCell {}

impl FlightCell {
    pub(super) fn new() -> Self {
        let flight = Flight {
            ticket: 0,
            batch: Batch::new(),
            // Blocks of the IOTLB and of device TLBs, and the fence between them.
            descriptors: Vec::with_capacity(2 * MAX_BLOCKS + 1),
            next: 0,
            pages_flushed: 0,
        };
        Self { claimed: AtomicBool::new(false), flight: UnsafeCell::new(flight) }
    }

    /// Whether a thread has claimed it at this moment.
    pub(super) fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Relaxed)
    }

    /// Returns the right to access the flight, unless another thread has it. Never waits.
    ///
    /// `open` is what the caller has the lock of: claims exclude each other by that.
    pub(super) fn try_claim(&self, open: &mut Open) -> Option<Claim<'_>> {
        let _ = open;
        // Acquire: what the previous claim did comes before this one.
        if self.claimed.load(Ordering::Acquire) {
            return None;
        }
        self.claimed.store(true, Ordering::Relaxed);
        Some(Claim(self))
    }
}

/// The right to access a [`Flight`], until it is dropped.
pub(super) struct Claim<'a>(&'a FlightCell);

impl Claim<'_> {
    pub(super) fn with<R>(&mut self, act: impl FnOnce(&mut Flight) -> R) -> R {
        self.0.flight.with_mut(|flight| {
            // SAFETY: `try_claim` found `claimed` false and set it for this claim, with the one
            // lock of `Open` held that all calls hold, so no other claim exists until its drop; the
            // acquire of that load orders this after the release of the previous one. `&mut self`
            // excludes itself.
            act(unsafe { &mut *flight })
        })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}

const ENTRIES: usize = if cfg!(loom) { 2 } else { 16 };

/// The limit on batches in flight, whatever the
/// [`InvalidationQueue::queue_depth`](super::InvalidationQueue::queue_depth).
pub const MAX_IN_FLIGHT: u64 = ENTRIES as u64;

/// One entry per batch that can be in flight, by ticket modulo their number.
///
/// The entry of ticket `t` is restarted for `t + MAX_IN_FLIGHT` only after `t` has completed. A
/// waiter that still reads it for `t` reads a later start at worst, so it waits longer and never
/// gives up early.
#[derive(Debug)]
pub(super) struct Clock([Entry; ENTRIES]);

#[derive(Debug)]
struct Entry {
    ticket: AtomicU64,
    since_ns: AtomicU64,
    polls: AtomicU64,
}

/// How long a batch has been in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Age {
    pub(super) ns: u64,
    pub(super) polls: u64,
}

impl Clock {
    pub(super) fn new() -> Self {
        let entry = |_| Entry {
            ticket: AtomicU64::new(0),
            since_ns: AtomicU64::new(0),
            polls: AtomicU64::new(0),
        };
        Self(core::array::from_fn(entry))
    }

    fn entry(&self, ticket: u64) -> &Entry {
        &self.0[(ticket % MAX_IN_FLIGHT) as usize]
    }

    /// Records the first attempt to submit `ticket`; later ones change nothing. Under the lock of
    /// the queue.
    pub(super) fn start(&self, ticket: Ticket, now_ns: Option<u64>) {
        let entry = self.entry(ticket.0);
        if entry.ticket.load(Ordering::Relaxed) != ticket.0 {
            entry.since_ns.store(now_ns.unwrap_or(0), Ordering::Relaxed);
            entry.polls.store(0, Ordering::Relaxed);
            entry.ticket.store(ticket.0, Ordering::Release);
        }
    }

    /// Returns how long `ticket` has been in flight; `None` if no attempt to submit it is recorded.
    pub(super) fn age(&self, ticket: Ticket, now_ns: Option<u64>) -> Option<Age> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0).then(|| Age {
            ns: now_ns.map_or(0, |now| now.saturating_sub(entry.since_ns.load(Ordering::Relaxed))),
            polls: entry.polls.load(Ordering::Relaxed),
        })
    }

    /// Returns when `ticket` was submitted, if that is recorded.
    pub(super) fn since_ns(&self, ticket: Ticket) -> Option<u64> {
        let entry = self.entry(ticket.0);
        (entry.ticket.load(Ordering::Acquire) == ticket.0)
            .then(|| entry.since_ns.load(Ordering::Relaxed))
    }

    /// Counts a poll of a waiter behind `ticket`.
    pub(super) fn count_poll(&self, ticket: Ticket) {
        self.entry(ticket.0).polls.fetch_add(1, Ordering::Relaxed);
    }
}
