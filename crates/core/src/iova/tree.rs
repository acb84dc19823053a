//! The tree of one half of the address space: what is free in it, summarised at every level.
//!
//! A radix tree: a node has eight slots, a slot of the lowest level is a region of 2 MiB, and a
//! region that is neither entirely free nor taken as a whole has a map of its granules. Each slot
//! has a [`Summary`], so that the first fit is found on one way down, and a slot that is entirely
//! free has no child.
//!
//! **Freeing a whole allocation needs no memory.** A slot that an allocation covers only in part
//! has a child, which stays until the slot is entirely free; a slot without a child is used by one
//! allocation, which covers all of it. So only freeing a *part* of an allocation can need a node or
//! a map.
//!
//! **The open region.** The summaries above the region that was used last are brought up to date
//! only when the tree needs them ([`Tree::settle`]), so that allocations and frees in one region
//! change its map and nothing else.
//!
//! **Memory for nodes and maps** comes in chunks ([`Slab`]): it grows without moving what it holds,
//! and a release needs no memory.

use super::error::IovaError;
use super::node::{
    Extent, FAN, NIL, Node, REGION, REGION_SHIFT, Summary, base_of, slot_of, slot_shift,
};
use super::region::Region;
use alloc::boxed::Box;
use alloc::vec::Vec;

/// The level of the first root. Its slots are 1 GiB each, so that the border at 4 GiB is one
/// between slots.
const FIRST_LEVEL: u32 = 4;
/// The level of the highest root: 57 bits.
const LAST_LEVEL: u32 = 12;
/// The logarithms of the lengths up to a region.
pub(super) const CLASSES: usize = REGION_SHIFT as usize + 1;
/// The number of no region.
const NOWHERE: u64 = u64::MAX;

/// The region that was used last.
#[derive(Debug)]
pub(super) struct Open {
    /// Its number; `NOWHERE` if there is none.
    pub(super) region: u64,
    pub(super) map: u32,
    /// Whether its map has changed since the summaries above it were computed.
    pub(super) dirty: bool,
    /// The node above it at each level.
    pub(super) path: [u32; LAST_LEVEL as usize + 1],
}

#[derive(Debug)]
pub(super) struct Tree {
    pub(super) nodes: Slab<Node>,
    pub(super) maps: Slab<Region>,
    pub(super) root: u32,
    /// The root's level. Addresses beyond the root's last granule are free up to `bounds.end`.
    pub(super) level: u32,
    pub(super) bounds: Extent,
    pub(super) open: Open,
    /// For each class, a region before which no run of 2^class free granules begins.
    pub(super) low: [u64; CLASSES],
    /// The number of nodes and maps visited by searches, which proves that they are not linear.
    #[cfg(test)]
    pub(super) visits: core::cell::Cell<u64>,
}

impl Tree {
    /// Creates a tree of the granules in `bounds`, which begins at 0 or at 4 GiB, all free.
    pub(super) fn new(bounds: Extent) -> Result<Self, IovaError> {
        let mut tree = Self {
            nodes: Slab::new(),
            maps: Slab::new(),
            root: NIL,
            level: FIRST_LEVEL,
            bounds,
            open: Open {
                region: NOWHERE,
                map: NIL,
                dirty: false,
                path: [NIL; LAST_LEVEL as usize + 1],
            },
            low: [bounds.start >> REGION_SHIFT; CLASSES],
            #[cfg(test)]
            visits: core::cell::Cell::new(0),
        };
        tree.nodes.reserve(1)?;
        tree.root = tree.nodes.take(Node::new(FIRST_LEVEL, 0, false));
        let part = Extent { start: bounds.start, end: bounds.end.min(tree.span()) };
        if part.start < part.end {
            tree.prepare(part.end, 1)?;
            tree.mark(part, true);
        }
        Ok(tree)
    }

    /// The first granule beyond the root.
    pub(super) fn span(&self) -> u64 {
        1 << slot_shift(self.level + 1)
    }

    /// Reserves the nodes and maps for changing `ranges` ranges that end at `end` at most.
    pub(super) fn prepare(&mut self, end: u64, ranges: usize) -> Result<(), IovaError> {
        let mut level = self.level;
        while end > 1 << slot_shift(level + 1) {
            level += 1;
        }
        // A node at each level below the root where a range begins, and where it ends; the roots
        // above the present one.
        self.nodes.reserve(2 * ranges * (level as usize - 1) + (level - self.level) as usize)?;
        self.maps.reserve(2 * ranges)
    }

    /// Prepares freeing `part`, all of it in use. Needs no memory if whole allocations are freed.
    pub(super) fn prepare_free(&mut self, part: Extent) -> Result<(), IovaError> {
        if self.divides_a_slot(part) { self.prepare(part.end, 1) } else { Ok(()) }
    }

    /// Whether `part`, all of it in use, begins or ends inside of a slot without a child: as a part
    /// of an allocation does that is freed, a whole one never.
    pub(super) fn divides_a_slot(&self, part: Extent) -> bool {
        let inside = |at: u64| at < self.span() && self.cuts_a_childless_slot(at);
        inside(part.start) || inside(part.end)
    }

    /// Whether a range that begins or ends at `granule` divides a slot without a child.
    fn cuts_a_childless_slot(&self, granule: u64) -> bool {
        let (mut at, mut level) = (self.root, self.level);
        while granule & ((1 << slot_shift(level)) - 1) != 0 {
            at = self.nodes.get(at).kids[slot_of(level, granule)];
            if at == NIL {
                return true;
            }
            if level == 1 {
                break;
            }
            level -= 1;
        }
        false
    }

    /// Makes this the open region, if it has a map. O(levels).
    #[inline]
    pub(super) fn open(&mut self, region: u64) -> bool {
        self.open.region == region || self.find_region(region)
    }

    fn find_region(&mut self, region: u64) -> bool {
        let granule = region << REGION_SHIFT;
        self.close();
        if granule >= self.span() {
            return false;
        }
        let (mut at, mut level) = (self.root, self.level);
        loop {
            self.open.path[level as usize] = at;
            at = self.nodes.get(at).kids[slot_of(level, granule)];
            if at == NIL {
                return false;
            }
            if level == 1 {
                self.open.map = at;
                self.open.region = region;
                return true;
            }
            level -= 1;
        }
    }

    /// Settles, and has no open region then.
    pub(super) fn close(&mut self) {
        self.settle();
        self.open.region = NOWHERE;
    }

    /// Brings the summaries above the open region up to date. O(levels), and no more than have
    /// changed.
    pub(super) fn settle(&mut self) {
        if !core::mem::take(&mut self.open.dirty) {
            return;
        }
        let granule = self.open.region << REGION_SHIFT;
        let old = self.nodes.get(self.open.path[1]).get(slot_of(1, granule));
        let summary = self.maps.get(self.open.map).summary(granule);
        // A burst ends with the summary that it began with, or mostly with another longest run.
        if summary.has_ends_of(old) && summary.head < REGION {
            self.settle_longest(granule, old.best[0], summary.best[0]);
        } else {
            self.settle_all(granule, summary);
        }
    }

    /// Changes the longest run recorded for the open region, on which no run beyond it depends.
    fn settle_longest(&mut self, granule: u64, mut before: u64, mut after: u64) {
        for level in 1..=self.level {
            if before == after {
                return;
            }
            let at = self.open.path[level as usize];
            self.nodes.get_mut(at).put_longest(slot_of(level, granule), after);
            if level == self.level {
                return;
            }
            // This was the longest run of this node.
            let above = self
                .nodes
                .get(self.open.path[level as usize + 1])
                .get(slot_of(level + 1, granule))
                .best[0];
            if after < above {
                if before < above {
                    return;
                }
                after = self.nodes.get(at).longest(level, 0);
            }
            before = above;
        }
    }

    /// Changes the summary of the open region.
    fn settle_all(&mut self, granule: u64, mut summary: Summary) {
        let mut child = self.open.map;
        for level in 1..=self.level {
            let at = self.open.path[level as usize];
            let slot = slot_of(level, granule);
            if summary.head == 1 << slot_shift(level) {
                self.release(child, level - 1);
                self.nodes.get_mut(at).kids[slot] = NIL;
                self.open.region = NOWHERE;
            } else if self.nodes.get(at).get(slot) == summary {
                return;
            }
            self.nodes.get_mut(at).put(slot, summary);
            if level < self.level {
                summary = self.nodes.get(at).summary(level, base_of(level, granule));
            }
            child = at;
        }
    }

    /// Allocates `part`, all of it free. The caller prepared it.
    pub(super) fn take(&mut self, part: Extent) {
        self.close();
        while part.end > self.span() {
            self.grow();
        }
        let Some(region) = part.region().filter(|_| !part.len().is_multiple_of(1 << REGION_SHIFT))
        else {
            self.mark(part, false);
            return;
        };
        let mut at = self.root;
        for level in (1..=self.level).rev() {
            self.open.path[level as usize] = at;
            at = self.child(at, level, part.start);
        }
        self.open.map = at;
        self.open.region = region;
        self.open.dirty = true;
        self.maps.get_mut(at).set(part, false);
    }

    /// Frees `part`, all of it in use. The caller prepared it.
    pub(super) fn free(&mut self, part: Extent) {
        self.close();
        self.mark(part, true);
        // A run that begins in the region before this one may have become longer. One that begins
        // even earlier contains all of that region, and then no class is beyond it.
        self.lower((part.start >> REGION_SHIFT).saturating_sub(1), CLASSES - 1);
    }

    /// Records that runs of up to 2^`class` granules may begin in `region`.
    #[inline]
    pub(super) fn lower(&mut self, region: u64, class: usize) {
        let region = region.max(self.bounds.start >> REGION_SHIFT);
        // In ascending order: a place for a longer run is one for a shorter one.
        for low in self.low[..=class].iter_mut().rev() {
            if *low <= region {
                break;
            }
            *low = region;
        }
    }

    /// Puts a root above the root.
    fn grow(&mut self) {
        let (old, summary) = (self.root, self.nodes.get(self.root).summary(self.level, 0));
        self.level += 1;
        let mut node = Node::new(self.level, 0, false);
        for slot in 0..FAN {
            let part = Node::part(self.level, 0, slot);
            // The end is a power of two, beyond the old root: a slot is on one side of it.
            node.put(slot, Summary::uniform(part, part.end <= self.bounds.end));
        }
        node.put(0, summary);
        node.kids[0] = old;
        self.root = self.nodes.take(node);
    }

    /// The child of a slot, a node or a map; one in the slot's state if it had none.
    fn child(&mut self, at: u32, level: u32, granule: u64) -> u32 {
        let slot = slot_of(level, granule);
        let node = self.nodes.get(at);
        if node.kids[slot] != NIL {
            return node.kids[slot];
        }
        let free = !node.is_used(slot);
        let child = if level == 1 {
            self.maps.take(Region::new(free))
        } else {
            self.nodes.take(Node::new(level - 1, base_of(level - 1, granule), free))
        };
        self.nodes.get_mut(at).kids[slot] = child;
        child
    }

    /// Changes the state of `part`. There is no open region.
    fn mark(&mut self, part: Extent, free: bool) {
        self.mark_in(self.root, self.level, part, free);
    }

    /// Changes the state of `part`, all of it in this node.
    fn mark_in(&mut self, at: u32, level: u32, part: Extent, free: bool) {
        let base = base_of(level, part.start);
        for slot in slot_of(level, part.start)..=slot_of(level, part.end - 1) {
            let whole = Node::part(level, base, slot);
            let Some(sub) = whole.intersection(part) else { continue };
            let mut summary = Summary::uniform(whole, free);
            let mut child = self.nodes.get(at).kids[slot];
            if sub != whole {
                child = self.child(at, level, sub.start);
                summary = if level == 1 {
                    let map = self.maps.get_mut(child);
                    map.set(sub, free);
                    map.summary(whole.start)
                } else {
                    self.mark_in(child, level - 1, sub, free);
                    self.nodes.get(child).summary(level - 1, whole.start)
                };
            }
            if child != NIL && (sub == whole || summary.head == whole.len()) {
                self.release(child, level - 1);
                self.nodes.get_mut(at).kids[slot] = NIL;
            }
            self.nodes.get_mut(at).put(slot, summary);
        }
    }

    /// Frees a child and its descendants to the spare lists: a map at level 0.
    fn release(&mut self, child: u32, level: u32) {
        if level == 0 {
            self.maps.release(child);
            return;
        }
        let kids = self.nodes.get(child).kids;
        for kid in kids.into_iter().filter(|&kid| kid != NIL) {
            self.release(kid, level - 1);
        }
        self.nodes.release(child);
    }
}

const CHUNK_SHIFT: u32 = 4;
/// The number of items in a chunk.
const CHUNK: usize = 1 << CHUNK_SHIFT;

/// An item of a slab, which stores the index of another one while it is spare.
pub(super) trait Item: Copy {
    /// A spare item, followed by `next` in the list.
    fn spare(next: u32) -> Self;
    /// The spare item after this one.
    fn next(&mut self) -> u32;
}

impl Item for Node {
    fn spare(next: u32) -> Self {
        let mut node = Self::new(1, 0, false);
        node.kids[0] = next;
        node
    }
    fn next(&mut self) -> u32 {
        self.kids[0]
    }
}

impl Item for Region {
    fn spare(next: u32) -> Self {
        let mut map = Self::new(false);
        *map.word() = u64::from(next);
        map
    }
    fn next(&mut self) -> u32 {
        u32::try_from(*self.word()).unwrap_or(NIL)
    }
}

/// Items by index, and the spare ones in a list.
#[derive(Debug)]
pub(super) struct Slab<T> {
    chunks: Vec<Box<[T; CHUNK]>>,
    spare: u32,
    spares: usize,
}

impl<T: Item> Slab<T> {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), spare: NIL, spares: 0 }
    }

    /// Ensures at least `spares` spare items. O(1) for each, and at most a chunk more than
    /// requested.
    pub(super) fn reserve(&mut self, spares: usize) -> Result<(), IovaError> {
        while self.spares < spares {
            let no_memory = IovaError::NoMemory { bytes: CHUNK * size_of::<T>() };
            let first = u32::try_from(self.chunks.len() << CHUNK_SHIFT).map_err(|_| no_memory)?;
            let last = first.checked_add(1 << CHUNK_SHIFT).ok_or(no_memory)?;
            self.chunks.try_reserve(1).map_err(|_| no_memory)?;
            let mut chunk = Vec::new();
            chunk.try_reserve_exact(CHUNK).map_err(|_| no_memory)?;
            // In ascending order, the last one before the spare ones that there are.
            chunk.extend((first + 1..last).map(T::spare).chain([T::spare(self.spare)]));
            self.chunks.push(chunk.into_boxed_slice().try_into().map_err(|_| no_memory)?);
            self.spare = first;
            self.spares += CHUNK;
        }
        Ok(())
    }

    /// Uses a spare item. The caller reserved it: without one nothing is stored, and the result is
    /// `NIL`.
    pub(super) fn take(&mut self, item: T) -> u32 {
        let at = self.spare;
        debug_assert_ne!(at, NIL, "not reserved");
        if at != NIL {
            self.spare = self.get_mut(at).next();
            self.spares -= 1;
            *self.get_mut(at) = item;
        }
        at
    }

    /// Makes an item spare.
    pub(super) fn release(&mut self, at: u32) {
        *self.get_mut(at) = T::spare(self.spare);
        self.spare = at;
        self.spares += 1;
    }

    // Every index is one that this slab made, and the slab never shrinks.
    #[inline]
    pub(super) fn get(&self, at: u32) -> &T {
        &self.chunks[(at >> CHUNK_SHIFT) as usize][at as usize % CHUNK]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: u32) -> &mut T {
        &mut self.chunks[(at >> CHUNK_SHIFT) as usize][at as usize % CHUNK]
    }

    /// Returns the bytes of memory that the slab has allocated.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>()
            + self.chunks.capacity() * size_of::<Box<[T; CHUNK]>>()
    }

    /// Returns the number of items in use.
    #[cfg(all(test, not(loom)))]
    pub(super) fn used(&self) -> usize {
        self.chunks.len() * CHUNK - self.spares
    }
}
