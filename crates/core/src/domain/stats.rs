//! Statistics of a domain and of its backend, and the counters behind them.

use crate::counters;
use crate::counters::Counters;
use crate::invalidate::InvalidationStats;
use crate::sync::{AtomicU64, Ordering};
use core::fmt;

counters! {
    /// The operations of a domain so far, and the buffers that it holds. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub struct DomainStats {
        /// Buffers mapped.
        maps: Total Count "buffers mapped",
        /// Of these, the ones that needed no table work because they stay mapped for their
        /// lifetime.
        maps_fixed: Total Count "  at a static mapping",
        /// Payloads that were not mapped, for any reason.
        refused: Total Count "  refused",
        /// Mappings that have not been revoked.
        live: Level Count "  live",
        /// Mappings revoked.
        revokes: Total Count "buffers revoked",
        /// Buffers returned after their ticket had completed.
        unmaps: Total Count "  returned",
        /// Bytes of buffers that have been revoked and not returned.
        held_bytes: Level Bytes "  bytes held",
        /// Revocations that waited because too many bytes were held.
        limited: Total Count "  limited",
        /// Buffers that the domain holds until their late flush completes.
        deferred: Level Count "buffers deferred",
        /// The bytes of these.
        deferred_bytes: Level Bytes "  bytes",
        /// Buffers quarantined, because a device may reach them for good.
        quarantined: Total Count "buffers quarantined",
        /// The bytes of these.
        quarantined_bytes: Total Bytes "  bytes",
        /// Ranges of memory that stay mapped for their lifetime.
        static_mappings: Level Count "static mappings",
        /// Owner's handles.
        owners: Level Count "owners",
        /// Windows of 2 MiB of addresses that they hold, or that mappings of dropped ones are in.
        windows: Level Count "  windows",
        /// Free extents of the I/O address space.
        iova_extents: Level Count "free address extents",
    }
    besides {
        /// The backend's statistics.
        backend: BackendStats,
    }
}

/// A table: a line for each counter, then those of the backend.
impl fmt::Display for DomainStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)?;
        write!(f, "\n{}", self.backend)
    }
}

counters! {
    /// The operations of a backend so far, and the pages that it holds. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub struct BackendStats {
        /// Pages of the table in use.
        table_pages: Level Count "table pages",
        /// Table pages that wait for a flush before they can be reused.
        table_pages_retired: Level Count "  retired",
        /// Entries in the kernel's table, if the kernel owns it.
        entries: Level Count "kernel entries",
        /// The largest number of entries so far.
        entries_peak: Peak Count "  peak",
        /// Bytes pinned for these entries; memory that is mapped twice counts twice.
        pinned_bytes: Level Bytes "  bytes pinned",
    }
    besides {
        /// The kernel's limit on entries; `None` if there is none, or no such table.
        entries_limit: Option<u64>,
        /// Statistics of the invalidation queue.
        invalidations: InvalidationStats,
    }
}

/// A table: a line for each counter, then those of the invalidation queue.
impl fmt::Display for BackendStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)?;
        if let Some(limit) = self.entries_limit {
            write!(f, "\n{:<24}{limit:>16}", "  limit")?;
        }
        write!(f, "\n{}", self.invalidations)
    }
}

/// Who changes a set of counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Writers {
    /// One thread at a time: with plain loads and stores.
    One,
    /// Any thread: by read-modify-writes.
    Many,
}

/// Counters of operations, from which the held bytes follow. The sum over all sets is that of the
/// domain; a mapping that is made through one and ends through another counts in both.
#[derive(Debug)]
pub(super) struct Counts {
    writers: Writers,
    maps: AtomicU64,
    maps_fixed: AtomicU64,
    revokes: AtomicU64,
    unmaps: AtomicU64,
    /// Bytes revoked and not returned. It wraps: bytes revoked here may be returned through another
    /// set.
    held_bytes: AtomicU64,
    limited: AtomicU64,
    refused: AtomicU64,
}

/// A sum of counters.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Sum {
    pub(super) maps: u64,
    pub(super) maps_fixed: u64,
    pub(super) revokes: u64,
    pub(super) unmaps: u64,
    pub(super) held_bytes: u64,
    pub(super) limited: u64,
    pub(super) refused: u64,
}

impl Counts {
    pub(super) fn new(writers: Writers) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            writers,
            maps: zero(),
            maps_fixed: zero(),
            revokes: zero(),
            unmaps: zero(),
            held_bytes: zero(),
            limited: zero(),
            refused: zero(),
        }
    }

    /// Release: a revocation that is seen comes after its map, which is then seen too, so that no
    /// more are revoked than mapped.
    #[inline]
    fn add(&self, counter: &AtomicU64, n: u64) {
        if self.writers == Writers::One {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Release);
        } else {
            counter.fetch_add(n, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn count_map(&self, fixed: bool) {
        if fixed {
            self.add(&self.maps_fixed, 1);
        }
        self.add(&self.maps, 1);
    }

    /// Counts a revocation after which `bytes` are held until they are returned.
    #[inline]
    pub(super) fn count_revoked(&self, bytes: u64) {
        self.add(&self.revokes, 1);
        self.add(&self.held_bytes, bytes);
    }

    #[inline]
    pub(super) fn count_unmapped(&self) {
        self.add(&self.unmaps, 1);
    }

    /// Counts `bytes` as no longer held: returned, or left with the domain.
    #[inline]
    pub(super) fn count_no_longer_held(&self, bytes: u64) {
        self.add(&self.held_bytes, bytes.wrapping_neg());
    }

    /// Counts a revocation that waited because too many bytes were held.
    pub(super) fn count_limited(&self) {
        self.add(&self.limited, 1);
    }

    /// Counts a payload that was not mapped.
    pub(super) fn count_refused(&self) {
        self.add(&self.refused, 1);
    }

    /// Adds all of `sum`: the counters of an owner that is dropped.
    pub(super) fn add_all(&self, sum: &Sum) {
        let Sum { maps, maps_fixed, revokes, unmaps, held_bytes, limited, refused } = *sum;
        let counters = [
            (&self.maps, maps),
            (&self.maps_fixed, maps_fixed),
            (&self.revokes, revokes),
            (&self.unmaps, unmaps),
            (&self.held_bytes, held_bytes),
            (&self.limited, limited),
            (&self.refused, refused),
        ];
        counters.into_iter().for_each(|(counter, n)| self.add(counter, n));
    }

    /// Adds the revocations to `sum`. Before any [`add_rest_to`](Self::add_rest_to), so that no
    /// more are seen than maps.
    pub(super) fn add_revokes_to(&self, sum: &mut Sum) {
        sum.revokes += self.revokes.load(Ordering::Acquire);
    }

    /// Adds all others to `sum`.
    pub(super) fn add_rest_to(&self, sum: &mut Sum) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        sum.maps += get(&self.maps);
        sum.maps_fixed += get(&self.maps_fixed);
        sum.unmaps += get(&self.unmaps);
        sum.held_bytes = sum.held_bytes.wrapping_add(get(&self.held_bytes));
        sum.limited += get(&self.limited);
        sum.refused += get(&self.refused);
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
        assert!(!text.contains("  limit  "), "{text}");
        let kernel = BackendStats { entries: 3, entries_limit: Some(65_535), ..stats.backend };
        let text = kernel.to_string();
        assert!(text.lines().any(|found| found == line("kernel entries", 3)), "{text}");
        assert!(text.lines().any(|found| found == line("  limit", 65_535)), "{text}");
    }
}
