//! The configuration of a software IOMMU, the counters of its ports, and faults.

use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PageSize};
use std::fmt;
use std::time::Duration;

/// When, between the submission and the completion of their batch, requests take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// On submission: exposes flushes that are submitted before the entries are cleared.
    AtOnce,
    /// On completion: exposes code that does not wait for it.
    AtLast,
    /// Each request independently: on submission, on completion, or at any time between.
    AtRandom,
}

/// The format of the table, by the stage of translation that uses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// [`VtdFirstStage`](pinfold_core::table::VtdFirstStage): 4 or 5 levels, 47 or 56 bits of
    /// address; what can be written can also be read.
    First,
    /// [`VtdSecondStage`](pinfold_core::table::VtdSecondStage).
    Second,
}

/// The configuration of a software IOMMU. Start from [`SoftConfig::default`]: fields may be added.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftConfig {
    /// The number of units that the devices are spread over, one after the other; 0 counts as 1.
    /// Each has an invalidation queue of its own, and a batch is complete when all of them have
    /// completed it. They walk one table.
    pub units: u8,
    /// 4 KiB translations that each port caches, rounded up to a power of two, at most 2^20; for 2
    /// MiB a quarter of that.
    pub iotlb_entries: usize,
    /// The modelled cost of a batch of one flush, its wait included: submitted at t, it completes
    /// at max(t, previous) + cost.
    pub flush_cost: Duration,
    /// The modelled cost of each further descriptor in a batch; at most `flush_cost`.
    pub descriptor_cost: Duration,
    /// The modelled cost of each table entry that a walk reads. It is time of the device: an access
    /// returns at once, and only [`Port::wait_for_walks`](crate::Port::wait_for_walks) waits for
    /// it. A translation that is cached costs nothing.
    pub walk_cost: Duration,
    /// The entries of each unit's invalidation queue, at least 4: a batch that needs more goes in
    /// parts.
    pub queue_entries: usize,
    /// Aborts everything in flight once in this many batches, instead of completing one: as after a
    /// device did not answer in time (VT-d: an invalidation time-out error). `None` for never.
    pub abort_one_in: Option<u64>,
    /// The longest random delay of a batch beyond its cost (a thousandth of it is as likely as all
    /// of it). Makes batches complete out of order.
    pub late_by: Duration,
    /// When its requests take effect.
    pub effect: Effect,
    /// The seed of the pseudo-random numbers.
    pub seed: u64,
    /// Whether entries that are not present are cached too, at every level (VT-d: caching mode): a
    /// map then needs a flush.
    pub caching_mode: bool,
    /// The first batch (counted from 1) that never completes: the IOMMU hangs.
    pub hang_from: Option<u64>,
    /// The first batch (counted from 1) that the unit refuses for good: it has failed, and
    /// completes nothing that is in flight.
    pub fail_from: Option<u64>,
    /// The most batches in flight, up to
    /// [`MAX_IN_FLIGHT`](pinfold_core::invalidate::MAX_IN_FLIGHT).
    pub queue_depth: u64,
    /// The time limit of a wait for a flush.
    pub timeout: Duration,
    /// The most memory for I/O page tables, in bytes. It is allocated as it is used, in pieces that
    /// double: 256 KiB first.
    pub table_bytes: usize,
    /// How much of it is allocated and touched when the IOMMU is created, on hugepages where the
    /// kernel has them: a program whose longest call matters reserves what its mappings need (8
    /// bytes for each page of the windows that it uses). The first touch of a page is a fault in
    /// the call that touches it, and one in some 2,000 of these takes Linux half a millisecond.
    pub table_reserved: usize,
    /// The largest leaf of the table, for drivers of hardware without larger ones.
    pub max_leaf: PageSize,
    /// The largest physically contiguous piece of memory, rounded up to a power of two: a larger
    /// buffer is mapped in several steps, as scattered pages are. `None`: all memory is contiguous.
    pub contiguous_bytes: Option<u64>,
    /// Levels of the table: 3 for 39 bits of address, 4 for 48, 5 for 57 (second stage).
    pub levels: u8,
    /// The format of the table.
    pub stage: Stage,
    /// The number of bits in a physical address, at most 52; higher bits are reserved in every
    /// entry. Physical addresses are addresses in this process, which have 47 bits or more.
    pub phys_bits: u32,
}

impl SoftConfig {
    /// The time of a read of a table entry by the walker: 197 ns, published for VT-d ("Fast & Safe
    /// IO Memory Protection", SOSP 2024).
    pub const WALK_COST: Duration = Duration::from_nanos(197);
}

impl Default for SoftConfig {
    /// Returns the default costs: a flush and its wait take 1 us (published for VT-d: 2,127
    /// cycles; measured in an emulated one: 0.97 us), each further flush 0.22 us (fifteen and a
    /// wait: 4.1 us), without delay. Walks take no time ([`Self::WALK_COST`] is the published one).
    fn default() -> Self {
        Self {
            units: 1,
            iotlb_entries: 1024,
            flush_cost: Duration::from_micros(1),
            descriptor_cost: Duration::from_nanos(220),
            walk_cost: Duration::ZERO,
            queue_entries: 256,
            abort_one_in: None,
            late_by: Duration::ZERO,
            effect: Effect::AtRandom,
            seed: 1,
            caching_mode: false,
            hang_from: None,
            fail_from: None,
            queue_depth: 1,
            timeout: Duration::from_secs(5),
            // 2 * 10^6 mappings that share no table page.
            table_bytes: usize::try_from(8u64 << 30).unwrap_or(usize::MAX),
            table_reserved: 0,
            max_leaf: PageSize::Size1G,
            contiguous_bytes: None,
            levels: 4,
            stage: Stage::Second,
            phys_bits: 52,
        }
    }
}

// Counters of ports.

/// The counters of a port, or of all of them. They print as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PortStats {
    /// Translations found in the IOTLB.
    pub hits: u64,
    /// Translations that needed a table walk.
    pub misses: u64,
    /// Table entries read in these walks.
    pub walk_reads: u64,
    /// The time of these walks in nanoseconds: modelled
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
        writeln!(f, "IOTLB hits         {hits:>14}")?;
        writeln!(f, "IOTLB misses       {misses:>14}")?;
        writeln!(f, "  entries read     {walk_reads:>14}")?;
        writeln!(f, "bytes read         {bytes_read:>14}")?;
        writeln!(f, "bytes written      {bytes_written:>14}")?;
        write!(f, "faults             {faults:>14}")
    }
}

// Accesses that faulted.

/// Why a device's access faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// No entry is present.
    #[error("no mapping")]
    NotMapped,
    /// The device may not read there.
    #[error("the mapping does not allow reads")]
    NoRead,
    /// The device may not write there.
    #[error("the mapping does not allow writes")]
    NoWrite,
    /// The access is not aligned to its size.
    #[error("the access is not aligned to its size")]
    Misaligned,
    /// The address is wider than the table translates.
    #[error("the address is beyond those that the table translates")]
    TooWide,
    /// An entry maps memory that is not registered.
    #[error("the entry maps memory that is not registered with the domain")]
    NotRegistered,
    /// An entry links to a page outside the table's memory.
    #[error("a table entry links to a page outside the table's memory")]
    BadTable,
    /// An entry has reserved bits set.
    #[error("a table entry has reserved bits set")]
    ReservedBits,
}

/// A device's access that faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("device access at {iova} faulted: {kind}")]
pub struct Fault {
    /// The first address that faulted.
    pub iova: Iova,
    /// Why.
    pub kind: FaultKind,
}
