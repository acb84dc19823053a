//! Statistics of a domain and of its backend.

use crate::invalidate::{InvalidationStats, write_rows};
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

/// A table: a line for each counter, then those of the backend.
impl fmt::Display for DomainStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rows(
            f,
            &[
                ("buffers mapped", self.maps),
                ("  at a static mapping", self.maps_fixed),
                ("  refused", self.refused),
                ("  live", self.live),
                ("buffers revoked", self.revokes),
                ("  returned", self.unmaps),
                ("  bytes held", self.held_bytes),
                ("  limited", self.limited),
                ("buffers deferred", self.deferred),
                ("  bytes", self.deferred_bytes),
                ("buffers quarantined", self.quarantined),
                ("  bytes", self.quarantined_bytes),
                ("static mappings", self.static_mappings),
                ("owners", self.owners),
                ("  windows", self.windows),
                ("free address extents", self.iova_extents),
            ],
        )?;
        write!(f, "\n{}", self.backend)
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

/// A table: a line for each counter, then those of the invalidation queue. The lines of the kernel's
/// table are left out where there is none.
impl fmt::Display for BackendStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = [("table pages", self.table_pages), ("  retired", self.table_pages_retired)];
        write_rows(f, &pages)?;
        if self.entries_peak > 0 || self.entries_limit.is_some() {
            let rows = [
                ("kernel entries", self.entries),
                ("  peak", self.entries_peak),
                ("  bytes pinned", self.pinned_bytes),
            ];
            writeln!(f)?;
            write_rows(f, &rows)?;
        }
        if let Some(limit) = self.entries_limit {
            writeln!(f)?;
            write_rows(f, &[("  limit", limit)])?;
        }
        write!(f, "\n{}", self.invalidations)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn statistics_print_as_a_table_of_short_lines() {
        let stats = DomainStats { maps: 12, held_bytes: 4096, ..DomainStats::default() };
        let text = stats.to_string();
        let line = |name: &str, value: u64| format!("{name:<24}{value:>16}");
        assert_eq!(text.lines().next(), Some(&*line("buffers mapped", 12)));
        assert!(text.lines().any(|found| found == line("  bytes held", 4096)), "{text}");
        assert!(text.lines().all(|line| line.len() == 40), "{text}");
        assert!(!text.contains("kernel entries"), "{text}");
        let kernel = BackendStats { entries: 3, entries_limit: Some(65_535), ..stats.backend };
        let text = kernel.to_string();
        assert!(text.lines().any(|found| found == line("kernel entries", 3)), "{text}");
        assert!(text.lines().any(|found| found == line("  limit", 65_535)), "{text}");
    }
}
