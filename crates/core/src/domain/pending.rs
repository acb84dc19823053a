//! Buffers whose flush is late: held by the domain until it completes, and only then dropped.
//!
//! Maps, revocations and waits check whether the oldest ticket here has completed, which costs them one load while
//! nothing is held.

use super::addresses::Addresses;
use crate::invalidate::Ticket;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

/// A buffer that a device may reach until `ticket` has completed. Dropping it leaks the buffer.
pub(super) struct PendingRelease {
    pub(super) payload: ManuallyDrop<Box<dyn Send>>,
    pub(super) addresses: Addresses,
    pub(super) ticket: Ticket,
}

pub(super) struct PendingReleases {
    held: Mutex<Vec<PendingRelease>>,
    /// The first ticket of those held; [`Ticket::NEVER`] if there are none.
    first: AtomicU64,
}

impl PendingReleases {
    pub(super) fn new() -> Self {
        Self { held: Mutex::new(Vec::new()), first: AtomicU64::new(Ticket::NEVER.0) }
    }

    #[inline]
    pub(super) fn first(&self) -> Ticket {
        Ticket(self.first.load(Ordering::Acquire))
    }

    pub(super) fn push(&self, release: PendingRelease) {
        let mut held = self.held.lock();
        held.push(release);
        self.update_first(&held);
    }

    /// Removes one whose ticket is `ready`. O(buffers held).
    pub(super) fn pop(&self, ready: impl Fn(Ticket) -> bool) -> Option<PendingRelease> {
        let mut held = self.held.lock();
        let at = held.iter().position(|release| ready(release.ticket))?;
        let release = held.swap_remove(at);
        self.update_first(&held);
        Some(release)
    }

    fn update_first(&self, held: &[PendingRelease]) {
        let first = held.iter().map(|release| release.ticket.0).min().unwrap_or(Ticket::NEVER.0);
        self.first.store(first, Ordering::Release);
    }

    /// Returns the number of buffers and their bytes.
    pub(super) fn counts(&self) -> (u64, u64) {
        let held = self.held.lock();
        (held.len() as u64, held.iter().map(|release| release.addresses.iova.len()).sum())
    }
}
