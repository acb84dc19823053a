//! Where pages are, counted as the module says, without any page.

use super::super::*;
use super::Way;

/// Where pages are, and how often something happened, counted as the module says.
pub(super) struct Count {
    pub(super) magazine: u64,
    pub(super) ring: u64,
    pub(super) below: u64,
    pub(super) fresh: u64,
    pub(super) capacity: u64,
    pub(super) order: u8,
    /// Pages in all.
    pub(super) total: u64,
    pub(super) counts: Counts,
}

impl Count {
    pub(super) fn taken(&mut self) {
        if self.magazine > 0 {
            self.magazine -= 1;
            self.counts.fast += 1;
            return;
        }
        if self.ring > 0 {
            let some = self.ring.min(64);
            self.ring -= some;
            self.magazine = some - 1;
            self.counts.refill += 1;
            return;
        }
        if self.below + self.fresh == 0 {
            // 64 pages, or as many as there are already (a power of two), and no more than 2 MiB.
            self.fresh = self.total.max(64).min(512 >> self.order);
            self.total += self.fresh;
        }
        let from = if self.below > 0 { &mut self.below } else { &mut self.fresh };
        let some = (*from).min(64);
        *from -= some;
        self.magazine = some - 1;
        self.counts.empty += 1;
        *(if self.order > 0 { &mut self.counts.slow_high_order } else { &mut self.counts.slow }) += 1;
    }

    /// The open page was allocated, after `empty` was counted.
    pub(super) fn reopened(&mut self) {
        self.counts.cached += 1;
        *(if self.order > 0 { &mut self.counts.slow_high_order } else { &mut self.counts.slow }) += 1;
    }

    fn put_in_ring(&mut self, pages: u64) {
        let room = pages.min(self.capacity - self.ring);
        self.ring += room;
        self.counts.ring += room;
        self.below += pages - room;
        self.counts.ring_full += pages - room;
    }

    pub(super) fn back(&mut self, way: Way) {
        match way {
            Way::Remote => self.put_in_ring(1),
            Way::Consumer => {
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
