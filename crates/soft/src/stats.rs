//! Counters of ports.

use pinfold_core::access::Access;
use std::fmt;

/// What a port, or all of them, has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PortStats {
    /// Translations found in the IOTLB.
    pub hits: u64,
    /// Translations that needed a table walk.
    pub misses: u64,
    /// Table entries read in these walks.
    pub walk_reads: u64,
    /// What these walks took, in nanoseconds: modelled
    /// ([`SoftConfig::walk_cost`](crate::SoftConfig::walk_cost)).
    pub walk_ns: u64,
    /// Accesses that faulted.
    pub faults: u64,
    /// Bytes that the device read.
    pub bytes_read: u64,
    /// Bytes that the device wrote.
    pub bytes_written: u64,
}

impl PortStats {
    pub(super) fn count(&mut self, access: Access, bytes: usize) {
        let count =
            if access == Access::READ { &mut self.bytes_read } else { &mut self.bytes_written };
        *count += bytes as u64;
    }

    pub(super) fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.walk_reads += other.walk_reads;
        self.walk_ns = self.walk_ns.saturating_add(other.walk_ns);
        self.faults += other.faults;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

impl fmt::Display for PortStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, misses, walk_reads, faults, bytes_read, bytes_written, .. } = self;
        write!(
            f,
            "IOTLB: {hits} hits, {misses} misses ({walk_reads} entries read); {bytes_read} bytes read, {bytes_written} \
             written; {faults} faults"
        )
    }
}
