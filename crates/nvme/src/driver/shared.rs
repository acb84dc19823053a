//! State that a controller shares with its queues and everything in flight: its generation, and
//! counters.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of rings, buffers and PRP lists of this process are quarantined because
/// their controller could not be disabled. Payloads are counted by
/// [`ControllerStats::quarantined_permanently`](super::ControllerStats::quarantined_permanently).
pub fn quarantined_bytes() -> u64 {
    QUARANTINED_BYTES.load(Ordering::Relaxed)
}

pub(super) fn count_quarantined_bytes(bytes: u64) {
    QUARANTINED_BYTES.fetch_add(bytes, Ordering::Relaxed);
}

#[derive(Debug, Default)]
pub(super) struct SharedState {
    /// Advances whenever the controller has been seen disabled: commands of a lower generation
    /// access no memory.
    generation: AtomicU64,
    queues: AtomicU32,
    /// Threads that are disabling or enabling the controller.
    transitions: AtomicU32,
    pub(super) quarantined: AtomicU64,
    pub(super) quarantined_permanently: AtomicU64,
    pub(super) quarantined_queues: AtomicU64,
    pub(super) events: AtomicU64,
    pub(super) events_lost: AtomicU64,
    pub(super) health_events: AtomicU64,
    pub(super) namespace_events: AtomicU64,
    pub(super) admin_retries: AtomicU64,
    pub(super) spurious_admin_completions: AtomicU64,
    /// Twice the number of namespace scans; odd where a namespace has changed since the last one.
    namespaces: AtomicU64,
}

impl SharedState {
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Begins a new generation. The controller is disabled and makes no more accesses.
    pub(super) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Marks that CSTS.RDY may be 0 because of this thread, until the guard is dropped.
    pub(super) fn begin_transition(&self) -> TransitionGuard<'_> {
        self.transitions.fetch_add(1, Ordering::AcqRel);
        TransitionGuard(self)
    }

    /// Whether a thread of this process is disabling or enabling the controller.
    pub(super) fn in_transition(&self) -> bool {
        self.transitions.load(Ordering::Acquire) > 0
    }

    /// Returns the version of the namespaces: it changes when they do, and is odd until they are
    /// scanned again.
    pub(super) fn namespace_version(&self) -> u64 {
        self.namespaces.load(Ordering::Acquire)
    }

    /// Records that a namespace has changed.
    pub(super) fn namespaces_changed(&self) {
        self.namespaces.fetch_or(1, Ordering::AcqRel);
    }

    /// Records a namespace scan. Called under the control lock, as is
    /// [`namespaces_changed`](Self::namespaces_changed).
    pub(super) fn namespaces_scanned(&self) {
        self.namespaces.store((self.namespace_version() | 1).wrapping_add(1), Ordering::Release);
    }

    /// Returns a serial number that no other queue has had.
    pub(super) fn next_queue_serial(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed)
    }

    /// Drops what was submitted in `generation`, or quarantines it where the controller may still
    /// access it.
    pub(super) fn drop_or_quarantine<P>(&self, payload: P, generation: u64) {
        if self.generation() > generation {
            drop(payload);
        } else {
            self.quarantined_permanently.fetch_add(1, Ordering::Relaxed);
            std::mem::forget(payload);
        }
    }
}

/// Held while the controller is being disabled or enabled.
pub(super) struct TransitionGuard<'s>(&'s SharedState);

impl Drop for TransitionGuard<'_> {
    fn drop(&mut self) {
        self.0.transitions.fetch_sub(1, Ordering::AcqRel);
    }
}
