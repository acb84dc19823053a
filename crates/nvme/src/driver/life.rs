//! How often the controller has been reset, and what is quarantined meanwhile.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

static LEAKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes of rings, buffers and PRP lists that were leaked in this process, because their controller could not be
/// disabled. Payloads are counted by [`ControllerStats::quarantined_permanently`](super::ControllerStats::quarantined_permanently).
pub fn quarantined_bytes() -> u64 {
    LEAKED_BYTES.load(Ordering::Relaxed)
}

pub(super) fn count_quarantined_bytes(bytes: u64) {
    LEAKED_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

/// Shared by a controller, its queues and everything in flight.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// Grows when the controller has been seen disabled: what was submitted under a lower number is over.
    epoch: AtomicU64,
    queues: AtomicU32,
    /// How many threads are disabling or enabling the controller.
    changing: AtomicU32,
    pub(super) quarantined: AtomicU64,
    pub(super) quarantined_queues: AtomicU64,
    pub(super) events: AtomicU64,
    pub(super) events_lost: AtomicU64,
    pub(super) health_events: AtomicU64,
    pub(super) namespace_events: AtomicU64,
    /// Admin completions of no outstanding command.
    pub(super) spurious: AtomicU64,
    /// How often the namespaces were identified, times 2; odd where one has changed since.
    namespaces: AtomicU64,
    pub(super) quarantined_permanently: AtomicU64,
}

impl Life {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The controller is disabled: it makes no access any more.
    pub(super) fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// From here until the value is dropped, CSTS.RDY may be 0 because of this thread.
    pub(super) fn change(&self) -> Change<'_> {
        self.changing.fetch_add(1, Ordering::AcqRel);
        Change(self)
    }

    /// Whether somebody is disabling or enabling the controller.
    pub(super) fn is_changing(&self) -> bool {
        self.changing.load(Ordering::Acquire) > 0
    }

    /// Changes when the namespaces do; odd while they are to be identified again.
    pub(super) fn namespaces(&self) -> u64 {
        self.namespaces.load(Ordering::Acquire)
    }

    /// A namespace has changed.
    pub(super) fn namespaces_changed(&self) {
        self.namespaces.fetch_or(1, Ordering::AcqRel);
    }

    /// The namespaces have been identified. Called under the control lock, as is `namespaces_changed`.
    pub(super) fn namespaces_identified(&self) {
        self.namespaces.store((self.namespaces() | 1).wrapping_add(1), Ordering::Release);
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
            self.quarantined_permanently.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(payload);
        }
    }
}

/// The controller is being disabled or enabled.
pub(super) struct Change<'l>(&'l Life);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.changing.fetch_sub(1, Ordering::AcqRel);
    }
}
