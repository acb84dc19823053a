//! Statistics of an invalidator.

use crate::sync::{AtomicU64, Ordering};
use core::fmt;

/// The work of an [`Invalidator`](super::Invalidator) so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct InvalidationStats {
    /// Ranges requested: one for each range that was cleared, and those of `requested_tables`.
    pub requested: u64,
    /// Of these, ranges that cover table pages too: one for each request that retired some (and for
    /// each map, if entries that are not present are cached).
    pub requested_tables: u64,
    /// Pages of 4096 bytes in the ranges requested.
    pub pages_requested: u64,
    /// Pages that were flushed for them: at most twice as many. A flush of the whole domain counts
    /// as the pages that were requested, as what else it drops is unknown; see `domain_flushes`.
    pub pages_flushed: u64,
    /// Ranges that needed no flush of their own, because another flush covered them.
    pub merged: u64,
    /// Flushes of the IOTLB submitted to the queue: a range that is not an aligned block may need
    /// several.
    pub sent: u64,
    /// Of these, flushes of the whole domain, because that costs less than what they replace.
    pub domain_flushes: u64,
    /// Flushes of the TLBs of devices submitted to the queue.
    pub sent_device_tlb: u64,
    /// Waits submitted to the queue: one a batch.
    pub waits: u64,
    /// Parts in which batches were submitted, because the queue did not accept all descriptors at
    /// once.
    pub parts: u64,
    /// How often the waits in flight were submitted again, because the unit had aborted them.
    pub resubmitted: u64,
    /// The largest number of batches in flight so far.
    pub in_flight_peak: u64,
    /// Calls that had to poll.
    pub waited: u64,
    /// Nanoseconds spent in them, if the queue has a clock.
    pub wait_ns: u64,
    /// Waits that ended before the flush completed.
    pub timed_out: u64,
}

/// A table: a line for each counter.
impl fmt::Display for InvalidationStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rows(
            f,
            &[
                ("ranges to flush", self.requested),
                ("  with table pages", self.requested_tables),
                ("  pages", self.pages_requested),
                ("  merged with others", self.merged),
                ("flushes sent", self.sent),
                ("  pages", self.pages_flushed),
                ("  of the whole domain", self.domain_flushes),
                ("  to device TLBs", self.sent_device_tlb),
                ("batches of flushes", self.waits),
                ("  peak in flight", self.in_flight_peak),
                ("  resubmitted", self.resubmitted),
                ("waits", self.waited),
                ("  nanoseconds", self.wait_ns),
                ("  timed out", self.timed_out),
            ],
        )
    }
}

/// Writes a line for each of `rows`, name and value in columns, without an end of the last line.
pub(crate) fn write_rows(f: &mut fmt::Formatter<'_>, rows: &[(&str, u64)]) -> fmt::Result {
    rows.iter().enumerate().try_for_each(|(row, (name, value))| {
        let end = if row == 0 { "" } else { "\n" };
        write!(f, "{end}{name:<24}{value:>16}")
    })
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
