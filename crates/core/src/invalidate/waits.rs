//! What the waiters of an invalidator have in common.

use super::stats::InvalidationStats;
use crate::sync::{AtomicU64, Ordering};

mod yields;

use yields::Yields;

/// Counts waits, and what their yields were worth.
#[derive(Debug)]
pub(super) struct Waits {
    pub(super) waited: AtomicU64,
    pub(super) wait_ns: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) yields: Yields,
}

impl Waits {
    pub(super) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { waited: zero(), wait_ns: zero(), timed_out: zero(), yields: Yields::new() }
    }

    pub(super) fn add_to(&self, stats: &mut InvalidationStats) {
        stats.waited = self.waited.load(Ordering::Relaxed);
        stats.wait_ns = self.wait_ns.load(Ordering::Relaxed);
        stats.timed_out = self.timed_out.load(Ordering::Relaxed);
    }
}
