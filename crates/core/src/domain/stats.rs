//! Statistics of a domain and of its backend.

use crate::invalidate::InvalidationStats;
use core::fmt;

/// What a domain has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct DomainStats {
    /// Buffers mapped.
    pub maps: u64,
    /// Of these, the ones that needed no table work because they stay mapped for their lifetime.
    pub maps_fixed: u64,
    /// Mappings revoked.
    pub revokes: u64,
    /// Buffers returned after their ticket had completed.
    pub unmaps: u64,
    /// Mappings that have not been revoked.
    pub live: u64,
    /// Bytes of buffers that have been revoked and not returned.
    pub held_bytes: u64,
    /// Revocations that waited because [too many bytes](super::Domain::set_held_limit) were held.
    pub limited: u64,
    /// Payloads that were not mapped, for any reason: a [`MapError`](super::MapError) each.
    pub refused: u64,
    /// Owner's handles.
    pub owners: u64,
    /// Windows of 2 MiB of addresses that they hold, or that mappings of dropped ones are in.
    pub windows: u64,
    /// Buffers that the domain holds until their late flush completes.
    pub deferred: u64,
    /// The bytes of these.
    pub deferred_bytes: u64,
    /// Buffers quarantined, because a device may reach them for good.
    pub quarantined: u64,
    /// The bytes of these.
    pub quarantined_bytes: u64,
    /// Ranges of memory that stay mapped for their lifetime.
    pub static_mappings: u64,
    /// Free extents of the I/O address space.
    pub iova_extents: u64,
    /// The backend's statistics.
    pub backend: BackendStats,
}

impl fmt::Display for DomainStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} mapped ({} fixed), {} revoked, {} unmapped, {} live, {} bytes held ({} revocations waited), {} refused, {} owners with \
             {} windows, {} deferred ({} bytes), {} quarantined ({} bytes), {} static, {} free extents; {}",
            self.maps,
            self.maps_fixed,
            self.revokes,
            self.unmaps,
            self.live,
            self.held_bytes,
            self.limited,
            self.refused,
            self.owners,
            self.windows,
            self.deferred,
            self.deferred_bytes,
            self.quarantined,
            self.quarantined_bytes,
            self.static_mappings,
            self.iova_extents,
            self.backend
        )
    }
}

/// What a backend has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct BackendStats {
    /// Statistics of the invalidation queue.
    pub invalidations: InvalidationStats,
    /// Pages of the table in use.
    pub table_pages: u64,
    /// Table pages that wait for a flush before they can be reused.
    pub table_pages_retired: u64,
    /// Entries in the kernel's table, if the kernel owns it.
    pub entries: u64,
    /// The kernel's limit on these; `None` if there is none, or no such table.
    pub entries_limit: Option<u64>,
    /// The largest number of entries so far.
    pub entries_peak: u64,
    /// Bytes pinned for these entries; memory that is mapped twice counts twice.
    pub pinned_bytes: u64,
}

impl fmt::Display for BackendStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} table pages ({} retired), {} entries",
            self.table_pages, self.table_pages_retired, self.entries
        )?;
        if let Some(limit) = self.entries_limit {
            write!(f, " of {limit}")?;
        }
        let (peak, pinned) = (self.entries_peak, self.pinned_bytes);
        write!(f, " (peak {peak}), {pinned} bytes pinned; {}", self.invalidations)
    }
}
