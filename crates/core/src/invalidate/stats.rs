//! Statistics of an invalidator.

use crate::counters;
use crate::counters::Counters;
use crate::sync::{AtomicU64, Ordering};
use core::fmt;

counters! {
    /// The work of an [`Invalidator`](super::Invalidator) so far. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub struct InvalidationStats {
        /// Ranges requested: one for each range that was cleared, and those with table pages.
        requested: Total Count "ranges to flush",
        /// Of these, ranges that cover table pages too: one for each request that retired some
        /// (and for each map, if entries that are not present are cached).
        requested_tables: Total Count "  with table pages",
        /// Pages of 4096 bytes in the ranges requested.
        pages_requested: Total Count "  pages",
        /// Ranges that needed no flush of their own, because another flush covered them.
        merged: Total Count "  merged with others",
        /// Flushes of the IOTLB submitted to the queue: a range that is not an aligned block may
        /// need several.
        sent: Total Count "flushes sent",
        /// Pages that were flushed for the ranges requested: at most twice as many. A flush of the
        /// whole domain counts as the pages that were requested, as what else it drops is unknown.
        pages_flushed: Total Count "  pages",
        /// Of the flushes sent, those of the whole domain, because that costs less than what they
        /// replace.
        domain_flushes: Total Count "  of the whole domain",
        /// Flushes of the TLBs of devices submitted to the queue.
        sent_device_tlb: Total Count "  to device TLBs",
        /// Waits submitted to the queue: one a batch.
        waits: Total Count "batches of flushes",
        /// Parts in which batches were submitted, because the queue did not accept all descriptors
        /// at once.
        parts: Total Count "  parts",
        /// The largest number of batches in flight so far.
        in_flight_peak: Peak Count "  peak in flight",
        /// How often the waits in flight were submitted again, because the unit had aborted them.
        resubmitted: Total Count "  resubmitted",
        /// Calls that had to poll.
        waited: Total Count "waits",
        /// Nanoseconds spent in them, if the queue has a clock.
        wait_ns: Total Nanoseconds "  nanoseconds",
        /// Waits that ended before the flush completed.
        timed_out: Total Count "  timed out",
    }
}

/// A table: a line for each counter.
impl fmt::Display for InvalidationStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)
    }
}

/// A counter of one writer at a time: no read-modify-write.
#[derive(Debug)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. The caller is the only writer.
    #[inline]
    pub(super) fn add(&self, n: u64) {
        self.0.store(self.get().wrapping_add(n), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of the submitting thread.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) merged: Count,
    pub(super) pages: Count,
    pub(super) iotlb: Count,
    pub(super) domain: Count,
    pub(super) device_tlb: Count,
    pub(super) waits: Count,
    pub(super) parts: Count,
    pub(super) resubmitted: Count,
    pub(super) peak: Count,
}

impl Sent {
    pub(super) fn new() -> Self {
        let [merged, pages, iotlb, domain, device_tlb, waits, parts, resubmitted, peak] =
            core::array::from_fn(|_| Count::new());
        Self { merged, pages, iotlb, domain, device_tlb, waits, parts, resubmitted, peak }
    }

    pub(super) fn add_to(&self, stats: &mut InvalidationStats) {
        stats.merged = self.merged.get();
        stats.pages_flushed = self.pages.get();
        stats.sent = self.iotlb.get();
        stats.domain_flushes = self.domain.get();
        stats.sent_device_tlb = self.device_tlb.get();
        stats.waits = self.waits.get();
        stats.parts = self.parts.get();
        stats.resubmitted = self.resubmitted.get();
        stats.in_flight_peak = self.peak.get();
    }
}

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
