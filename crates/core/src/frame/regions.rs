//! The regions that a claim tries, and how the hints follow the map.
//!
//! The [invariant](Hints) is that a region with a free frame can always be found. So every change
//! of a hint is followed by a read of the map, and every free by a read of the hints.

use super::hints::{FAN_OUT, Hints, Lowering};
use super::inner::Inner;
use super::map::WORDS;
use crate::sync::Ordering;

/// The number of regions, or groups of them, that are skipped for each one tried before a whole
/// region is split.
const MAX_SKIPPED: usize = 16;

impl Inner {
    /// Tries regions until `attempt`, which looks for a run of `order`, succeeds: at most
    /// `patience` partly free ones, then whole ones, then all others. Twice, since a region may
    /// move from one set to another meanwhile.
    ///
    /// Regions whose [limit](super::hints::Limits) is below `order` are skipped. Each attempt in a
    /// partly free region that fails lowers its limit, so that it is repeated only after a free
    /// there.
    pub(super) fn search<T>(
        &self,
        order: u8,
        patience: usize,
        mut attempt: impl FnMut(u32) -> Option<T>,
    ) -> Option<T> {
        if order > 0 {
            self.limits.use_from_now_on();
        }
        for _ in 0..2 {
            let (mut tried, most) = (0, patience.saturating_mul(MAX_SKIPPED));
            let mut walk = Walk::new(self, order);
            while tried < patience
                && let Some(region) = walk.next(most)
            {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                walk.failed(region);
                tried += 1;
            }
            let mut from = 0;
            while let Some(region) = self.whole.next_from(from) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                if !self.map.is_whole(region) {
                    self.remove_hint(&self.whole, region);
                }
                from = region + 1;
            }
            while let Some(region) = walk.next(usize::MAX) {
                if let found @ Some(_) = attempt(region) {
                    return found;
                }
                walk.failed(region);
            }
            drop(walk);
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

    /// Sets the bits of a region that was claimed as a whole, so that a part of it can be freed;
    /// see [`Map::split`](super::map::Map::split).
    #[cold]
    pub(super) fn split(&self, region: u32) {
        if self.map.split(region, || self.limits.note_claimed(region)) {
            self.ensure_visible(region);
        }
    }

    /// Frees a region that was claimed as a whole. Returns false if it was not.
    pub(super) fn release_region(&self, region: u32) -> bool {
        let released = self.map.release_region(region);
        if released {
            self.limits.note_free_region(region);
            self.update_hints_after_free(region);
            self.ensure_visible(region);
        }
        released
    }

    /// Claims a region that is wholly free.
    pub(super) fn claim_region(&self, region: u32) -> bool {
        let claimed = self.map.claim_region(region);
        if claimed {
            self.remove_hint(&self.whole, region);
        } else {
            // It was not visible while this thread tried.
            self.ensure_visible(region);
        }
        claimed
    }

    /// Moves a region to the whole ones, if it is whole.
    pub(super) fn update_hints_after_free(&self, region: u32) {
        if self.whole.has(region) || !self.map.is_whole(region) {
            return;
        }
        self.whole.set(region);
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

    /// Reserves a region with free frames for the owner of a slot, a partly free one first: removes
    /// it from the sets and publishes it in the slot, so that other owners use it only when they
    /// find no other.
    pub(super) fn reserve(&self, slot: u32) -> Option<u32> {
        for set in [&self.partial, &self.whole] {
            let mut from = 0;
            while let Some(region) = set.next_from(from) {
                // Published first: a search that no longer finds the region in the set finds it
                // here.
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

    /// Upholds the invariant of [`Hints`] for a region: adds it to the partly free ones if it has
    /// free frames and is in no set.
    pub(super) fn ensure_visible(&self, region: u32) {
        if !self.partial.has(region) && !self.whole.has(region) && self.map.has_free(region) {
            self.partial.set(region);
        }
    }

    /// Ensures that a region in which no frame was found is visible if it has one now, and has a
    /// low limit if not.
    pub(super) fn leave_full(&self, region: u32) {
        self.ensure_visible(region);
        if self.limits.is_used() && !self.map.has_free(region) {
            self.limits.note_full(region, || self.map.max_order(region));
        }
    }
}

/// A walk over the partly free regions that may have a run of an order.
struct Walk<'z> {
    zone: &'z Inner,
    order: u8,
    from: u32,
    /// The number of regions and groups skipped because of their limits.
    skipped: usize,
    /// The last region of the walk, if its group may have no such run.
    last: Option<u32>,
    lowering: Option<Lowering<'z>>,
}

impl<'z> Walk<'z> {
    fn new(zone: &'z Inner, order: u8) -> Self {
        Self { zone, order, from: 0, skipped: 0, last: None, lowering: None }
    }

    /// Returns the next region to try, where the walk stays; `None` after the last, or if `most`
    /// have been skipped.
    fn next(&mut self, most: usize) -> Option<u32> {
        while self.skipped < most {
            let next = self.zone.partial.next_from(self.from);
            if self.order == 0 {
                return next;
            }
            if let Some(last) =
                self.last.filter(|last| next.is_none_or(|next| next / FAN_OUT != last / FAN_OUT))
            {
                self.lower_groups(last);
                self.last = None;
            }
            let region = next?;
            match self.zone.limits.skip(region, self.order) {
                None => return next,
                Some(behind) => {
                    // If a single region is skipped, the earlier finding that its group was not is
                    // out of date.
                    self.last = (behind == region + 1).then_some(region).or(self.last);
                    self.from = behind;
                    self.skipped += 1;
                }
            }
        }
        None
    }

    /// Continues behind a region where the attempt failed.
    fn failed(&mut self, region: u32) {
        let zone = self.zone;
        self.from = region + 1;
        if !zone.map.has_free(region) && zone.partial.take(region) {
            zone.leave_full(region);
        }
        if self.order > 0 {
            self.lower(|lowering| lowering.region(region, || zone.map.max_order(region)));
            self.last = Some(region);
        }
    }

    /// Lowers the limits of the groups that `region` is in. Full regions are in no set, so the walk
    /// has not seen them.
    fn lower_groups(&mut self, region: u32) {
        let (zone, order, first) = (self.zone, self.order, region / FAN_OUT * FAN_OUT);
        let unseen = move |&region: &u32| {
            zone.limits.skip(region, order).is_none()
                && !zone.partial.has(region)
                && !zone.whole.has(region)
        };
        self.lower(|lowering| {
            for region in (first..zone.regions().min(first + FAN_OUT)).filter(unseen) {
                lowering.region(region, || zone.map.max_order(region));
            }
            lowering.groups(region);
        });
    }

    fn lower(&mut self, change: impl FnOnce(&Lowering<'z>)) {
        if self.lowering.is_none() {
            self.lowering = self.zone.limits.lower();
        }
        if let Some(lowering) = &self.lowering {
            change(lowering);
        }
    }
}
