//! A page pool's counters, where its pages are, and who holds them.

use alloc::string::String;
use core::fmt;

/// The counters of Linux's page pool, by their names (`struct page_pool_alloc_stats` and
/// `page_pool_recycle_stats`).
///
/// Counting costs nothing on the hot paths: `fast` and `cached` follow from the magazine's state,
/// `ring` is the ring's position, and the others are off the hot paths.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// alloc: pages from the magazine.
    pub fast: u64,
    /// alloc: pages of 4 KiB allocated from the spill list, a fresh chunk, or the idle open page.
    pub slow: u64,
    /// alloc: the same for larger pages.
    pub slow_high_order: u64,
    /// alloc: how often the ring was empty when the magazine needed a refill.
    pub empty: u64,
    /// alloc: how often the magazine was refilled from the ring.
    pub refill: u64,
    /// alloc: entries that could not be used. In the kernel these are pages of another NUMA node;
    /// here they are second frees of raw pages that were detected late.
    pub waive: u64,
    /// recycle: pages put into the magazine.
    pub cached: u64,
    /// recycle: how often the magazine was full, so that half of it went to the ring first.
    pub cache_full: u64,
    /// recycle: pages put into the ring.
    pub ring: u64,
    /// recycle: pages that met a full ring. The kernel releases such pages; here they go to a list
    /// and stay mapped.
    pub ring_full: u64,
    /// recycle: pages released rather than recycled, because they were still held when the pool was
    /// taken down.
    pub released_refcnt: u64,
}

impl fmt::Display for Counts {
    /// Writes one counter per line, by the names that `ethtool -S` shows for the kernel's.
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

/// Where a pool's pages are. While other threads free pages, the numbers may be from slightly
/// different times.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PagePoolStats {
    /// Pages that are allocated and not freed.
    pub in_use: u64,
    /// All pages.
    pub pages: u64,
    /// Free pages in the magazine.
    pub in_magazine: u64,
    /// Pages in the ring.
    pub in_ring: u64,
    /// Pages that the consumer takes when magazine and ring are empty: those that met a full ring,
    /// and those never allocated.
    pub below: u64,
    /// Chunks acquired from the source.
    pub chunks: u64,
    /// The size of the chunks in bytes.
    pub bytes: u64,
    /// How many allocs were refused because [`Config::max_in_use`](super::Config::max_in_use) pages
    /// were in use. A call that fills slots ends with the first, and counts one.
    pub limited: u64,
}

/// A holder of pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The holder's name (see [`Page::tag`](super::Page::tag)); `None` if the pages have none.
    pub name: Option<String>,
    /// How many pages it holds.
    pub pages: u64,
    /// Their size in bytes.
    pub bytes: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_deref().unwrap_or("(unnamed)");
        write!(f, "{name}: {} pages, {} bytes", self.pages, self.bytes)
    }
}
