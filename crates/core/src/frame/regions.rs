//! Which regions a claim tries, and how the hints follow the map.
//!
//! The [invariant](Hints) is that a region with a free frame can always be found. So every change of a hint is followed by
//! a look at the map, and every free by a look at the hints.

use super::hints::{Hints, total_order};
use super::map::WORDS;
use super::zone::Zone;
use crate::sync::Ordering;

impl Zone {
    /// Tries regions until `attempt` succeeds: at most `patience` partly free ones, then whole ones, then all others. Twice,
    /// since a region may move from one set to another meanwhile.
    pub(super) fn search<T>(&self, patience: usize, mut attempt: impl FnMut(u32) -> Option<T>) -> Option<T> {
        for _ in 0..2 {
            let mut tried = 0;
            let mut from = 0;
            while let Some(region) = self.partial.next_from(from).filter(|_| tried < patience) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                if !self.map.has_free(region) {
                    self.remove_hint(&self.partial, region);
                }
                (from, tried) = (region + 1, tried + 1);
            }
            let resume = from;
            from = 0;
            while let Some(region) = self.whole.next_from(from) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                if !self.map.is_whole(region) {
                    self.remove_hint(&self.whole, region);
                }
                from = region + 1;
            }
            from = resume;
            while let Some(region) = self.partial.next_from(from) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                from = region + 1;
            }
            if let found @ Some(_) = self.slots.reserved().find_map(&mut attempt) {
                self.counters.stolen();
                return found;
            }
        }
        None
    }

    pub(super) fn word_emptied(&self, region: u32) {
        self.ensure_visible(region);
        // The current region would change sets with every other frame, so it stays in its set.
        if self.rover.load(Ordering::SeqCst) / WORDS != region {
            self.update_hints_after_free(region);
        }
    }

    /// Updates the hints of the current region, before whole regions are searched.
    pub(super) fn update_rover_hints(&self) {
        self.update_hints_after_free(self.rover.load(Ordering::SeqCst) / WORDS);
    }

    /// Moves a region to the whole ones, if it is whole.
    pub(super) fn update_hints_after_free(&self, region: u32) {
        if self.whole.has(region) || !self.map.is_whole(region) {
            return;
        }
        self.whole.set(region);
        total_order();
        if self.map.is_whole(region) {
            self.remove_hint(&self.partial, region);
        } else {
            // A claim came before the region was in the set.
            self.update_hints_after_claim(region);
        }
    }

    /// Moves a whole region that has lost a frame to the partly free ones.
    #[inline(always)]
    pub(super) fn update_hints_after_claim(&self, region: u32) {
        total_order();
        if self.whole.has(region) {
            self.partial.set(region);
            self.remove_hint(&self.whole, region);
        }
    }

    /// Removes a region from a set, and ensures that it is in another if it has free frames.
    pub(super) fn remove_hint(&self, set: &Hints, region: u32) {
        if set.take(region) {
            self.ensure_visible(region);
        }
    }

    /// Reserves a region with free frames for the owner of a slot, a partly free one first: removes it from the
    /// sets and publishes it in the slot, so that other owners use it only when they find no other.
    pub(super) fn reserve(&self, slot: u32) -> Option<u32> {
        for set in [&self.partial, &self.whole] {
            let mut from = 0;
            while let Some(region) = set.next_from(from) {
                // Published first: a search that no longer finds the region in the set finds it here.
                self.slots.publish(slot, Some(region));
                if set.take(region) && self.map.has_free(region) {
                    return Some(region);
                }
                from = region + 1;
            }
        }
        self.slots.publish(slot, None);
        None
    }

    /// Upholds the invariant of [`Hints`] for a region: adds it to the partly free ones if it has free frames and is in no
    /// set.
    pub(super) fn ensure_visible(&self, region: u32) {
        if !self.partial.has(region) && !self.whole.has(region) && self.map.has_free(region) {
            self.partial.set(region);
        }
    }
}
