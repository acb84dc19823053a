//! Counters of waits.

use super::stats::InvalidationStats;
use crate::sync::{AtomicU64, Ordering};

/// Counts waits.
#[derive(Debug)]
pub(super) struct Waits {
    waited: AtomicU64,
    wait_ns: AtomicU64,
    timed_out: AtomicU64,
}

impl Waits {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { waited: zero(), wait_ns: zero(), timed_out: zero() }
    }

    /// Counts a wait. What is zero is not added: all waiters share these counters.
    pub(super) fn count(&self, wait_ns: u64, timed_out: bool) {
        self.waited.fetch_add(1, Ordering::Relaxed);
        if wait_ns > 0 {
            self.wait_ns.fetch_add(wait_ns, Ordering::Relaxed);
        }
        if timed_out {
            self.timed_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn add_to(&self, stats: &mut InvalidationStats) {
        stats.waited = self.waited.load(Ordering::Relaxed);
        stats.wait_ns = self.wait_ns.load(Ordering::Relaxed);
        stats.timed_out = self.timed_out.load(Ordering::Relaxed);
    }
}
