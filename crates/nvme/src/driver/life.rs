//! How often the controller has been reset, and what is quarantined meanwhile.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Shared by a controller, its queues and everything in flight.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// Grows when the controller has been seen disabled: what was submitted under a lower number is over.
    epoch: AtomicU64,
    queues: AtomicU32,
    pub(super) quarantined: AtomicU64,
    pub(super) leaked: AtomicU64,
}

impl Life {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The controller is disabled: it makes no access any more.
    pub(super) fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// A number for a queue that no other queue has had.
    pub(super) fn queue_serial(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed)
    }

    /// Drops what was submitted in `epoch`, or leaks it where the controller may still reach it.
    pub(super) fn drop_or_leak<P>(&self, payload: P, epoch: u64) {
        if self.epoch() > epoch {
            drop(payload);
        } else {
            self.leaked.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(payload);
        }
    }
}
