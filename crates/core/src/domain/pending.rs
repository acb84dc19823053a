//! Buffers whose flush is late: held by the domain until it completes, and only then dropped.
//!
//! A deadline that has passed is no verdict. The owner of a [`Revoked`](super::Revoked) may wait again; one that drops it
//! leaves the buffer here, with its addresses. Later maps, revocations and waits look whether the oldest ticket here has
//! completed, which costs them one load while nothing is held.

use super::Domain;
use crate::addr::IovaRange;
use crate::invalidate::Ticket;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

/// A buffer that a device may reach until `ticket` has completed. Dropping it leaks the buffer.
pub(super) struct Late {
    pub(super) payload: ManuallyDrop<Box<dyn Send>>,
    pub(super) iova: IovaRange,
    pub(super) ticket: Ticket,
}

pub(super) struct PendingReleases {
    held: Mutex<Vec<Late>>,
    /// The first ticket of those held; [`Ticket::NEVER`] while nothing is.
    first: AtomicU64,
}

impl PendingReleases {
    pub(super) fn new() -> Self {
        Self { held: Mutex::new(Vec::new()), first: AtomicU64::new(Ticket::NEVER.0) }
    }

    pub(super) fn first(&self) -> Ticket {
        Ticket(self.first.load(Ordering::Acquire))
    }

    fn push(&self, late: Late) {
        let mut held = self.held.lock();
        held.push(late);
        self.note_first(&held);
    }

    /// Takes one out whose ticket is `ready`. O(buffers held).
    fn pop(&self, ready: impl Fn(Ticket) -> bool) -> Option<Late> {
        let mut held = self.held.lock();
        let at = held.iter().position(|late| ready(late.ticket))?;
        let late = held.swap_remove(at);
        self.note_first(&held);
        Some(late)
    }

    fn note_first(&self, held: &[Late]) {
        let first = held.iter().map(|late| late.ticket.0).min().unwrap_or(Ticket::NEVER.0);
        self.first.store(first, Ordering::Release);
    }

    /// How many buffers are held, and how many bytes they have.
    pub(super) fn counts(&self) -> (u64, u64) {
        let held = self.held.lock();
        (held.len() as u64, held.iter().map(|late| late.iova.len()).sum())
    }
}

impl Domain {
    /// Drops the buffers whose flush was late and has completed since, and returns how many are still held. O(1) while
    /// nothing is held.
    ///
    /// Maps, revocations and waits do this by the way; a program that makes none calls it to have its memory back.
    pub fn release_late(&self) -> u64 {
        let first = self.pending.first();
        if first == Ticket::NEVER {
            return 0;
        }
        let failed = self.backend.has_failed();
        if failed || self.backend.is_completed(first) {
            // One by one: a drop may do anything, so it runs without the lock.
            while let Some(late) = self.pending.pop(|ticket| self.backend.is_completed(ticket)) {
                self.finish_unmap(late.iova, false);
                drop(ManuallyDrop::into_inner(late.payload));
            }
        }
        if failed {
            while let Some(late) = self.pending.pop(|_| true) {
                self.count_quarantined(late.iova.len());
            }
        }
        self.pending.counts().0
    }

    /// Takes over a buffer that a device may still reach: until its flush completes if that is `late`, else it is
    /// quarantined.
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        iova: IovaRange,
        late: Option<Ticket>,
    ) {
        let Some(ticket) = late else {
            core::mem::forget(payload);
            return self.count_quarantined(iova.len());
        };
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(Late { payload, iova, ticket });
    }
}

impl Drop for Domain {
    /// What is still held then stays leaked: no more is heard of its flush.
    fn drop(&mut self) {
        self.release_late();
    }
}
