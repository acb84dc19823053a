//! What a policy has done.

use pinfold_core::invalidate::InvalidationStats;
use std::fmt;

/// What a policy has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PolicyStats {
    /// Invalidations submitted to the IOMMU.
    pub invalidations: u64,
    /// Of these, invalidations of the whole domain.
    pub domain_flushes: u64,
    /// Waits submitted behind them: one a batch.
    pub waits: u64,
    /// Pages of 4096 bytes whose translations were to be invalidated.
    pub pages_requested: u64,
    /// Pages invalidated for them. An invalidation of the whole domain counts as the pages
    /// requested.
    pub pages_flushed: u64,
    /// Entries that describe the addresses in use: of a tree, of the pages' counts, or the free
    /// extents of a domain and the windows of its owners.
    pub entries: u64,
    /// Table entries that the IOMMU has read.
    pub walk_reads: u64,
    /// What that took of the devices' time, in nanoseconds: modelled.
    pub walk_ns: u64,
    /// Pages of the I/O page table.
    pub table_pages: u64,
    /// The most bytes that were unmapped and whose flush had not completed; the sum of the peaks of
    /// the threads or CPUs.
    pub held_bytes_peak: u64,
    /// The longest time from the return of an unmap until its flush had completed, in nanoseconds;
    /// a sample of the unmaps, which contains the first one behind each flush.
    pub reachable_ns: u64,
    /// Whether the memory was free for reuse during that time.
    pub reused_while_reachable: bool,
}

impl PolicyStats {
    pub(super) fn with(self, flushes: InvalidationStats) -> Self {
        let InvalidationStats {
            sent, domain_flushes, waits, pages_requested, pages_flushed, ..
        } = flushes;
        Self { invalidations: sent, domain_flushes, waits, pages_requested, pages_flushed, ..self }
    }
}

impl fmt::Display for PolicyStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { invalidations, waits, entries, walk_reads, table_pages, .. } = self;
        write!(
            f,
            "{invalidations} invalidations, {waits} waits, {entries} entries, {table_pages} table pages, "
        )?;
        write!(
            f,
            "{walk_reads} entries read by walks; at most {} bytes held, ",
            self.held_bytes_peak
        )?;
        let whose = if self.reused_while_reachable { "free" } else { "held" };
        write!(f, "{whose} memory reachable for {} ns", self.reachable_ns)
    }
}
