//! A page pool's counters, the places of its pages, and their holders.

use crate::counters;
use crate::counters::Counters;
use alloc::string::String;
use core::fmt;

counters! {
    /// The counters of Linux's page pool, by their names (`struct page_pool_alloc_stats` and
    /// `page_pool_recycle_stats`).
    ///
    /// Counting costs nothing on the hot paths: `fast` and `cached` follow from the magazine's
    /// state, `ring` is the ring's position, and the others are off the hot paths.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub struct Counts {
        /// Pages allocated from the magazine.
        fast: Total Count "rx_pp_alloc_fast",
        /// Pages of 4 KiB allocated from the spill list, a fresh chunk, or the idle open page.
        slow: Total Count "rx_pp_alloc_slow",
        /// The same for larger pages.
        slow_high_order: Total Count "rx_pp_alloc_slow_high_order",
        /// How often the ring was empty when the magazine needed a refill.
        empty: Total Count "rx_pp_alloc_empty",
        /// How often the magazine was refilled from the ring.
        refill: Total Count "rx_pp_alloc_refill",
        /// Entries that could not be used. In the kernel these are pages of another NUMA node;
        /// here they are second frees of raw pages that were detected late.
        waive: Total Count "rx_pp_alloc_waive",
        /// Pages recycled into the magazine.
        cached: Total Count "rx_pp_recycle_cached",
        /// How often the magazine was full, so that half of it went to the ring first.
        cache_full: Total Count "rx_pp_recycle_cache_full",
        /// Pages recycled into the ring.
        ring: Total Count "rx_pp_recycle_ring",
        /// Pages that met a full ring. The kernel releases such pages; here they go to a list and
        /// stay mapped.
        ring_full: Total Count "rx_pp_recycle_ring_full",
        /// Pages released rather than recycled, because they were still held when the pool was
        /// taken down.
        released_refcnt: Total Count "rx_pp_recycle_released_ref",
    }
}

impl fmt::Display for Counts {
    /// Writes one counter per line, by the names that `ethtool -S` shows for the kernel's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut result = Ok(());
        self.for_each(&mut |counter, count| {
            result = result.and_then(|()| writeln!(f, "{}: {count}", counter.label));
        });
        result
    }
}

counters! {
    /// Where a pool's pages are. While other threads free pages, the numbers may be from slightly
    /// different times.
    #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
    pub struct PagePoolStats {
        /// All pages.
        pages: Level Count "pages",
        /// Pages that are allocated and not freed. Exact while no other thread frees pages.
        in_use: Level Count "  in use",
        /// Free pages in the magazine.
        in_magazine: Level Count "  in the magazine",
        /// Pages in the ring, and second frees of raw pages that have not been discarded yet.
        in_ring: Level Count "  in the ring",
        /// Pages that the consumer takes when magazine and ring are empty: those that met a full
        /// ring (second frees included), and those never allocated.
        below: Level Count "  below",
        /// Chunks acquired from the source.
        chunks: Level Count "chunks",
        /// The size of the chunks.
        bytes: Level Bytes "  bytes",
        /// How many allocs were refused because the most pages were in use. A call that fills
        /// slots ends with the first, and counts one.
        limited: Total Count "allocs refused",
    }
}

/// A holder of pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The holder's name (see [`Page::tag`](super::Page::tag)); `None` if the pages have none.
    pub name: Option<String>,
    /// The number of pages in it.
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
