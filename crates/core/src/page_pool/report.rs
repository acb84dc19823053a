//! What a page pool tells about itself.

use alloc::string::String;
use core::fmt;

/// The counters of Linux's page pool, by their names (`struct page_pool_alloc_stats` and `page_pool_recycle_stats`).
///
/// Counting costs nothing on the hot paths: `fast` and `cached` follow from the magazine's own state, `ring` is the ring's
/// own position; `ring_full` and `released_refcnt` are off the hot path.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// alloc: pages from the magazine.
    pub fast: u64,
    /// alloc: pages for which the pool went below the ring, where a page has 4 KiB.
    pub slow: u64,
    /// alloc: the same, where a page has more.
    pub slow_high_order: u64,
    /// alloc: how often the ring was found empty, so that the pool went below it.
    pub empty: u64,
    /// alloc: pages for which the magazine was refilled from the ring.
    pub refill: u64,
    /// alloc: entries of the ring that could not be used. In the kernel these are pages of another NUMA node; here they
    /// are second frees of raw pages that were found late.
    pub waive: u64,
    /// recycle: pages put into the magazine.
    pub cached: u64,
    /// recycle: how often a page met a full magazine, of which half went to the ring first.
    pub cache_full: u64,
    /// recycle: pages put into the ring.
    pub ring: u64,
    /// recycle: pages that met a full ring and went below it (the kernel gives such pages up; here they stay mapped).
    pub ring_full: u64,
    /// recycle: pages that were not recycled, because they were still held when the pool was taken down.
    pub released_refcnt: u64,
}

impl fmt::Display for Counts {
    /// One counter a line, by the names under which `ethtool -S` shows the kernel's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alloc = [
            ("fast", self.fast),
            ("slow", self.slow),
            ("slow_high_order", self.slow_high_order),
            ("empty", self.empty),
            ("refill", self.refill),
            ("waive", self.waive),
        ];
        let recycle = [
            ("cached", self.cached),
            ("cache_full", self.cache_full),
            ("ring", self.ring),
            ("ring_full", self.ring_full),
            ("released_ref", self.released_refcnt),
        ];
        for (name, count) in alloc {
            writeln!(f, "rx_pp_alloc_{name}: {count}")?;
        }
        for (name, count) in recycle {
            writeln!(f, "rx_pp_recycle_{name}: {count}")?;
        }
        Ok(())
    }
}

/// Where a pool's pages are. While others free, the numbers may be of slightly different times.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolStats {
    /// Pages that are allocated and not freed.
    pub in_use: u64,
    /// Pages in all.
    pub pages: u64,
    /// Free pages in the magazine.
    pub in_magazine: u64,
    /// Pages in the ring.
    pub in_ring: u64,
    /// Pages below the ring: those that met a full ring, and those never allocated.
    pub below: u64,
    /// Chunks that the source gave.
    pub chunks: u64,
    /// Bytes of those.
    pub bytes: u64,
}

/// Who holds pages of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// What the pages were [tagged](super::Page::tag) with; `None`: nothing.
    pub name: Option<String>,
    /// How many pages.
    pub pages: u64,
    /// How many bytes those have.
    pub bytes: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().unwrap_or("(no holder named)");
        write!(f, "{name}: {} pages, {} bytes", self.pages, self.bytes)
    }
}
