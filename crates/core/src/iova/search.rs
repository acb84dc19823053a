//! Searches of a tree, and the operations that need only the map of one region.

use super::node::{
    ALIGNS, Extent, FAN, NIL, Node, REGION, REGION_SHIFT, Step, Summary, align_up, room, slot_of,
    slot_shift,
};
use super::tree::{CLASSES, Tree};

/// The outcome of a search of one region.
pub(super) enum FirstFit {
    /// Taken.
    Taken(Extent),
    /// The first fit ends beyond the limit, so that every other one does.
    Beyond,
    /// Nothing fits within this region.
    Unknown,
}

/// The free runs of parts that follow each other.
#[derive(Default)]
struct Runs {
    /// Granules that are free up to the end of the last one.
    run: u64,
    longest: u64,
}

impl Runs {
    /// Adds a part of `len` granules.
    fn add(&mut self, part: Summary, len: u64) {
        self.longest = self.longest.max(self.run + part.head).max(part.best[0]);
        self.run = if part.head == len { self.run + len } else { part.tail };
    }
}

impl Tree {
    /// Allocates `len` granules from the first region that may have a run of them. O(1) if that is
    /// the open one.
    #[inline]
    pub(super) fn take_first(&mut self, len: u64, limit: u64) -> FirstFit {
        let class = len.ilog2() as usize;
        let Some(&region) = self.low.get(class) else { return FirstFit::Unknown };
        if !self.open(region) {
            return FirstFit::Unknown;
        }
        self.visit();
        let Some(bit) = self.maps.get(self.open.map).find(len) else { return FirstFit::Unknown };
        let start = (region << REGION_SHIFT) + bit;
        let part = Extent { start, end: start + len };
        if part.end > limit {
            return FirstFit::Beyond;
        }
        self.maps.get_mut(self.open.map).set(part, false);
        self.open.dirty = true;
        FirstFit::Taken(part)
    }

    /// Allocates `part` if it is all free and in a region with a map. O(levels).
    #[inline]
    pub(super) fn take_part(&mut self, part: Extent) -> bool {
        self.change_part(part, false)
    }

    /// Frees `part` if it is all in use and in a region with a map. O(levels).
    #[inline]
    pub(super) fn free_part(&mut self, part: Extent) -> bool {
        let here = self.change_part(part, true);
        // Mostly nothing is beyond this region.
        if here && self.low[CLASSES - 1] >= self.open.region {
            self.lower_around(part);
        }
        here
    }

    #[inline]
    fn change_part(&mut self, part: Extent, free: bool) -> bool {
        let here = part.region().is_some_and(|region| self.open(region))
            && self.maps.get_mut(self.open.map).change(part, free);
        self.open.dirty |= here;
        here
    }

    /// Records where runs that contain `part`, of the open region, may begin.
    #[inline]
    fn lower_around(&mut self, part: Extent) {
        let region = self.open.region;
        let map = self.maps.get(self.open.map);
        let first = region << REGION_SHIFT == self.bounds.start;
        if !first && map.is_free_before(part) {
            // The summaries of other regions are exact. Across the border of a node it may be
            // longer; see `Tree::free`.
            if self.nodes.get(self.open.path[1]).tail_before(slot_of(1, part.start)) != Some(0) {
                return self.lower(region - 1, CLASSES - 1);
            }
        }
        if self.low[CLASSES - 1] > region {
            let (len, to_the_end) = map.run_around(part);
            self.lower(region, if to_the_end { CLASSES - 1 } else { len.ilog2() as usize });
        }
    }

    /// The first `len` free granules from a multiple of `ALIGNS[class]`. O(levels). Opens their
    /// region if it has a map and all of them.
    pub(super) fn first_fit(&mut self, class: usize, len: u64) -> Option<u64> {
        self.close();
        let (mut at, mut level, mut base) = (self.root, self.level, 0);
        let found = loop {
            self.visit();
            self.open.path[level as usize] = at;
            let node = self.nodes.get(at);
            match node.first_fit(level, base, class, len) {
                Step::At(start) => break Some(start),
                Step::Tail(run) => break self.fits_beyond(run, class, len),
                Step::Down(slot) => {
                    at = node.kids[slot];
                    base = Node::part(level, base, slot).start;
                }
            }
            level -= 1;
            if level == 0 {
                self.open.map = at;
                self.open.region = base >> REGION_SHIFT;
                // A region that is not entirely free: an aligned run begins with it.
                let bit = if class == 0 { self.maps.get(at).find(len) } else { Some(0) };
                break bit.map(|bit| base + bit);
            }
        };
        if let (Some(start), 0) = (found, class) {
            self.raise(start, len);
        }
        found
    }

    /// Returns the first fit where the root ends with `run` free granules, and all beyond it are
    /// free.
    fn fits_beyond(&self, run: u64, class: usize, len: u64) -> Option<u64> {
        let (start, align) = (self.span() - run, ALIGNS[class]);
        (self.span() < self.bounds.end && room(start, self.bounds.end, align) >= len)
            .then(|| align_up(start, align))
    }

    /// Records that no run of `len` granules begins before `start`.
    fn raise(&mut self, start: u64, len: u64) {
        for low in self.low.iter_mut().skip(len.next_power_of_two().ilog2() as usize) {
            *low = (*low).max(start >> REGION_SHIFT);
        }
    }

    /// Returns the length of the longest free run up to `limit`, in granules. O(levels).
    pub(super) fn longest_before(&mut self, limit: u64) -> u64 {
        let limit = limit.min(self.bounds.end);
        self.settle();
        let known = limit.min(self.span());
        let mut before = Runs::default();
        let (mut at, mut level, mut base) = (self.root, self.level, 0);
        // Down to the region that `limit` cuts.
        while let Some((slot, part)) = self.add_whole_slots(at, level, base, known, &mut before) {
            let node = self.nodes.get(at);
            let part = Extent { start: part.start, end: known };
            let kid = node.kids[slot];
            if node.is_used(slot) || kid == NIL {
                before.add(Summary::uniform(part, !node.is_used(slot)), part.len());
                break;
            }
            if level == 1 {
                self.walk_in(kid, 0, part, &mut |part, free| {
                    before.add(Summary::uniform(part, free), part.len());
                    true
                });
                break;
            }
            (at, level, base) = (kid, level - 1, part.start);
        }
        // All is free beyond what the tree has nodes for.
        before.longest.max(before.run + (limit - known))
    }

    /// Adds the slots of a node that end at or before `limit`; returns the one that it cuts.
    fn add_whole_slots(
        &mut self,
        at: u32,
        level: u32,
        base: u64,
        limit: u64,
        before: &mut Runs,
    ) -> Option<(usize, Extent)> {
        self.visit();
        let node = self.nodes.get(at);
        for slot in 0..FAN {
            let part = Node::part(level, base, slot);
            if part.end > limit {
                return (part.start < limit).then_some((slot, part));
            }
            before.add(node.get(slot), part.len());
        }
        None
    }

    #[inline(always)]
    fn visit(&self) {
        #[cfg(test)]
        self.visits.set(self.visits.get() + 1);
    }

    /// Calls `visit` with the parts of `all` in order, each of them entirely free (`true`) or used,
    /// until it returns false. O(levels + parts), after [`settle`](Self::settle).
    pub(super) fn walk(&self, all: Extent, visit: &mut dyn FnMut(Extent, bool) -> bool) -> bool {
        let known = Extent { start: 0, end: self.span() };
        let beyond = Extent { start: self.span(), end: u64::MAX };
        all.intersection(known).is_none_or(|part| self.walk_in(self.root, self.level, part, visit))
            && all.intersection(beyond).is_none_or(|part| visit(part, true))
    }

    fn walk_in(
        &self,
        at: u32,
        level: u32,
        all: Extent,
        visit: &mut dyn FnMut(Extent, bool) -> bool,
    ) -> bool {
        self.visit();
        if level == 0 {
            let (map, base) = (self.maps.get(at), all.start & !(REGION - 1));
            let mut from = all.start;
            while from < all.end {
                let (end, free) = map.run_from(from - base);
                let end = (base + end).min(all.end);
                if !visit(Extent { start: from, end }, free) {
                    return false;
                }
                from = end;
            }
            return true;
        }
        let node = self.nodes.get(at);
        let mut from = all.start;
        while from < all.end {
            let whole = 1 << slot_shift(level);
            let part = Extent { start: from, end: ((from & !(whole - 1)) + whole).min(all.end) };
            let slot = slot_of(level, from);
            let more = if node.is_used(slot) {
                visit(part, false)
            } else if node.kids[slot] == NIL {
                visit(part, true)
            } else {
                self.walk_in(node.kids[slot], level - 1, part, visit)
            };
            if !more {
                return false;
            }
            from = part.end;
        }
        true
    }
}
