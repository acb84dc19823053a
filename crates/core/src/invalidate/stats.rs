//! Statistics of an invalidator.

use core::fmt;

/// What an [`Invalidator`](super::Invalidator) has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct InvalidationStats {
    /// Ranges requested: `merged + sent` when no batch is open or in flight. One for each range that was cleared, and
    /// those of `requested_tables`.
    pub requested: u64,
    /// Of these, ranges that cover table pages too: one for each request that retired some (and for each map, if entries
    /// that are not present are cached).
    pub requested_tables: u64,
    /// Ranges that needed no flush of their own, because another flush covered them.
    pub merged: u64,
    /// Flushes submitted to the queue.
    pub sent: u64,
    /// Of these, flushes of the whole domain, because a batch was full.
    pub domain_flushes: u64,
    /// Waits submitted to the queue: one a batch.
    pub waits: u64,
    /// The largest number of batches in flight so far.
    pub in_flight_peak: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// Nanoseconds spent in them, if the queue has a clock.
    pub wait_ns: u64,
    /// Waits that ended before the flush completed.
    pub timed_out: u64,
}

impl fmt::Display for InvalidationStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} flushes requested ({} for table pages), {} merged, {} sent ({} of the domain) in {} batches (peak {} in \
             flight), {} waits ({} ns, {} timed out)",
            self.requested,
            self.requested_tables,
            self.merged,
            self.sent,
            self.domain_flushes,
            self.waits,
            self.in_flight_peak,
            self.waited,
            self.wait_ns,
            self.timed_out
        )
    }
}
