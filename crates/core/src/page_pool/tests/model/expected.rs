//! The expected number of pages in each place, and the expected counters, computed from the
//! documented rules alone.

use super::super::*;
use super::FreeBy;

/// How many pages are in the magazine, the ring, the spill list and the fresh rest of a chunk, and
/// the counters.
pub(super) struct Expected {
    pub(super) magazine: u64,
    pub(super) ring: u64,
    pub(super) spill: u64,
    pub(super) fresh: u64,
    pub(super) capacity: u64,
    pub(super) order: u8,
    /// All pages.
    pub(super) total: u64,
    /// How many may be in use, and how often that was the reason of a failure.
    pub(super) limit: u64,
    pub(super) limited: u64,
    pub(super) counts: Counts,
}

impl Expected {
    /// A page is allocated.
    pub(super) fn alloc(&mut self) {
        if self.magazine > 0 {
            self.magazine -= 1;
            self.counts.fast += 1;
            return;
        }
        if self.ring > 0 {
            let refill = self.ring.min(64);
            self.ring -= refill;
            self.magazine = refill - 1;
            self.counts.refill += 1;
            return;
        }
        if self.spill + self.fresh == 0 {
            // 64 pages, or as many as there are already (a power of two), and no more than 2 MiB.
            let left = (self.limit - self.total).min(512).next_power_of_two();
            self.fresh = self.total.max(64).min(left).min(512 >> self.order);
            self.total += self.fresh;
        }
        let left = self.limit - (self.total - self.fresh);
        let (from, most) =
            if self.spill > 0 { (&mut self.spill, 64) } else { (&mut self.fresh, left.min(64)) };
        let refill = (*from).min(most);
        *from -= refill;
        self.magazine = refill - 1;
        self.counts.empty += 1;
        self.slow();
    }

    /// The idle open page is allocated; `empty` has been counted.
    pub(super) fn alloc_open(&mut self) {
        self.counts.cached += 1;
        self.slow();
    }

    fn slow(&mut self) {
        *(if self.order > 0 { &mut self.counts.slow_high_order } else { &mut self.counts.slow }) +=
            1;
    }

    fn put_in_ring(&mut self, pages: u64) {
        let room = pages.min(self.capacity - self.ring);
        self.ring += room;
        self.counts.ring += room;
        self.spill += pages - room;
        self.counts.ring_full += pages - room;
    }

    /// A page is freed.
    pub(super) fn free(&mut self, by: FreeBy) {
        match by {
            FreeBy::Remote => self.put_in_ring(1),
            FreeBy::Consumer => {
                self.counts.cached += 1;
                if self.magazine == 128 {
                    self.counts.cache_full += 1;
                    self.magazine -= 64;
                    self.put_in_ring(64);
                }
                self.magazine += 1;
            }
        }
    }
}
