//! The state behind the lock: free extents in two halves, reservations, and the nodes that frees may need.

use super::error::IovaError;
use super::stats::IovaStats;
use super::tree::{ALIGNS, Extent, NIL, Slab};
use crate::addr::{Iova, IovaRange};
use alloc::vec::Vec;

const GRANULE_SHIFT: u32 = 12;
/// The first granule above 4 GiB, where the second half begins.
const HIGH: u64 = 1 << (32 - GRANULE_SHIFT);

/// All in granules of 4 KiB.
///
/// Between two free extents lies at least one allocation, one reservation, or the border at 4 GiB. So there are
/// never more of them than `live + reserved + 2`, and as long as the slab has that many nodes a free finds one. Allocations
/// and reservations grow it, and fail if memory is short.
#[derive(Debug)]
pub(super) struct Space {
    slab: Slab,
    /// The trees of free extents below and above 4 GiB.
    roots: [u32; 2],
    /// How many granules there are.
    end: u64,
    /// In order, apart from each other.
    reserved: Vec<Extent>,
    /// At least how many allocations are live (a free of several at once counts as one).
    live: usize,
    /// How many runs of allocated granules there are.
    runs: usize,
    in_use: u64,
}

impl Space {
    pub(super) fn new(bits: u32) -> Result<Self, IovaError> {
        let end = 1 << (bits - GRANULE_SHIFT);
        let (slab, roots) = (Slab::new(), [NIL; 2]);
        let mut space = Self { slab, roots, end, reserved: Vec::new(), live: 0, runs: 0, in_use: 0 };
        space.grow(3)?;
        for (half, part) in halves(Extent { start: 0, end }) {
            space.roots[half] = space.slab.insert(space.roots[half], part);
        }
        Ok(space)
    }

    pub(super) fn alloc(&mut self, len: u64, align: u64, limit: u64) -> Result<Option<Extent>, IovaError> {
        let limit = limit.min(self.end);
        let order: &[usize] = if limit <= HIGH { &[0] } else { &[1, 0] };
        for &half in order {
            if let Some((from, start)) = self.find(half, len, align, limit) {
                self.grow_for_one()?;
                let taken = Extent { start, end: start + len };
                self.carve(half, from, taken);
                self.took(taken);
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    /// The free extent, and where in it, for `len` granules. O(log n).
    ///
    /// Exact for the page sizes. For an alignment between two of them: an extent that is large enough wherever
    /// it starts, else one that would do for the next page size.
    fn find(&mut self, half: usize, len: u64, align: u64, limit: u64) -> Option<(Extent, u64)> {
        let root = self.roots[half];
        let class = ALIGNS.iter().position(|&exact| align <= exact)?;
        let exact = ALIGNS[class] == align;
        let tries = if exact { [(class, len), (class, len)] } else { [(0, len + align - 1), (class, len)] };
        for (class, len_and_slack) in tries {
            if let Some(from) = self.slab.first_fit(root, class, len_and_slack) {
                let start = from.start.next_multiple_of(align);
                if start + len <= limit {
                    return Some((from, start));
                }
            }
        }
        None
    }

    pub(super) fn alloc_at(&mut self, wanted: Extent) -> Result<(), IovaError> {
        let range = range_of(wanted);
        if let Some(reserved) = self.reserved_in(wanted) {
            return Err(IovaError::Reserved { range, reserved: range_of(reserved) });
        }
        if let Some(used) = self.first_taken(wanted) {
            return Err(IovaError::InUse { range, used: range_of(used) });
        }
        self.grow_for_one()?;
        self.carve_all(wanted);
        self.took(wanted);
        Ok(())
    }

    pub(super) fn free(&mut self, freed: Extent) -> Result<(), IovaError> {
        let range = range_of(freed);
        if let Some(reserved) = self.reserved_in(freed) {
            return Err(IovaError::Reserved { range, reserved: range_of(reserved) });
        }
        if let Some(free) = self.first_free(freed) {
            return Err(match self.first_taken(freed) {
                None => IovaError::AlreadyFree { range },
                Some(_) => IovaError::PartlyFree { range, free: range_of(free) },
            });
        }
        let mut needed = 0;
        for (half, part) in halves(freed) {
            needed += usize::from(self.neighbours(half, part) == (None, None));
        }
        if needed > self.slab.spares() {
            return Err(IovaError::Pieces { range });
        }
        for (half, part) in halves(freed) {
            self.give(half, part);
        }
        let (left, right) = self.taken_beside(freed);
        self.runs = self.runs + usize::from(left) + usize::from(right) - 1;
        self.in_use -= freed.end - freed.start;
        let most = usize::try_from(self.in_use).unwrap_or(usize::MAX);
        self.live = self.live.saturating_sub(1).min(most);
        Ok(())
    }

    pub(super) fn reserve(&mut self, wanted: Extent) -> Result<(), IovaError> {
        let wanted = Extent { start: wanted.start, end: wanted.end.min(self.end) };
        if wanted.start >= wanted.end {
            return Ok(()); // nothing is allocated beyond the width
        }
        let merged = self
            .reserved
            .iter()
            .filter(|r| touch(r, &wanted))
            .fold(wanted, |all, r| Extent { start: all.start.min(r.start), end: all.end.max(r.end) });
        // What lies between the reservations that it touches must be free.
        let mut gaps = Vec::new();
        gaps.try_reserve(self.reserved.len() + 1).map_err(|_| self.no_memory(0))?;
        let mut at = merged.start;
        for old in self.reserved.iter().filter(|r| touch(r, &wanted)) {
            gaps.push(Extent { start: at, end: old.start });
            at = old.end;
        }
        gaps.push(Extent { start: at, end: merged.end });
        gaps.retain(|gap| gap.start < gap.end);
        for gap in &gaps {
            if let Some(used) = self.first_taken(*gap) {
                return Err(IovaError::InUse { range: range_of(wanted), used: range_of(used) });
            }
        }
        self.reserved.try_reserve(1).map_err(|_| self.no_memory(0))?;
        self.grow(self.slab.used().max(self.live) + self.reserved.len() + gaps.len() + 4)?;
        for gap in gaps {
            self.carve_all(gap);
        }
        self.reserved.retain(|r| !touch(r, &wanted));
        let place = self.reserved.partition_point(|r| r.start < merged.start);
        self.reserved.insert(place, merged);
        Ok(())
    }

    pub(super) fn stats(&self) -> IovaStats {
        let largest = self.roots.iter().map(|&root| self.slab.best(root)[0]).max().unwrap_or(0);
        IovaStats {
            free: self.slab.used(),
            allocated: self.runs,
            bytes_in_use: self.in_use << GRANULE_SHIFT,
            bytes_reserved: self.reserved.iter().map(|r| r.end - r.start).sum::<u64>() << GRANULE_SHIFT,
            largest_free: largest << GRANULE_SHIFT,
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    fn grow(&mut self, extents: usize) -> Result<(), IovaError> {
        self.slab.grow(extents).map_err(|_| self.no_memory(extents))
    }

    fn no_memory(&self, extents: usize) -> IovaError {
        IovaError::NoMemory { extents: extents.max(self.slab.used()) }
    }

    /// Room for the split that an allocation may make, and for the one that its free may make.
    fn grow_for_one(&mut self) -> Result<(), IovaError> {
        self.grow((self.live + self.reserved.len() + 3).max(self.slab.used() + 2))
    }

    /// Counts an allocation.
    fn took(&mut self, taken: Extent) {
        let (left, right) = self.taken_beside(taken);
        self.runs = self.runs + 1 - usize::from(left) - usize::from(right);
        self.in_use += taken.end - taken.start;
        self.live += 1;
    }

    /// Whether the granules before and after are allocated.
    fn taken_beside(&self, extent: Extent) -> (bool, bool) {
        let taken = |granule: u64| {
            let one = Extent { start: granule, end: granule + 1 };
            self.reserved_in(one).is_none() && self.first_free(one).is_none()
        };
        let left = extent.start.checked_sub(1).is_some_and(taken);
        (left, extent.end < self.end && taken(extent.end))
    }

    fn reserved_in(&self, extent: Extent) -> Option<Extent> {
        let after = self.reserved.partition_point(|r| r.end <= extent.start);
        self.reserved.get(after).copied().filter(|r| r.start < extent.end)
    }

    /// The first part of `extent` that is free.
    fn first_free(&self, extent: Extent) -> Option<Extent> {
        halves(extent).find_map(|(half, part)| {
            let root = self.roots[half];
            let before = self.slab.at_or_before(root, part.start).filter(|e| e.end > part.start);
            let free = before.or_else(|| self.slab.at_or_after(root, part.start))?;
            let (start, end) = (free.start.max(part.start), free.end.min(part.end));
            (start < end).then_some(Extent { start, end })
        })
    }

    /// The first part of `extent` that is not free.
    fn first_taken(&self, extent: Extent) -> Option<Extent> {
        halves(extent).find_map(|(half, part)| {
            let root = self.roots[half];
            let covered = self.slab.at_or_before(root, part.start).map_or(0, |e| e.end);
            let start = part.start.max(covered);
            if start >= part.end {
                return None;
            }
            let end = self.slab.at_or_after(root, start).map_or(part.end, |e| e.start.min(part.end));
            Some(Extent { start, end })
        })
    }

    /// Takes `taken`, all of it free, out of the trees.
    fn carve_all(&mut self, taken: Extent) {
        for (half, part) in halves(taken) {
            if let Some(from) = self.slab.at_or_before(self.roots[half], part.start) {
                self.carve(half, from, part);
            }
        }
    }

    fn carve(&mut self, half: usize, from: Extent, taken: Extent) {
        let root = self.roots[half];
        let head = Extent { start: from.start, end: taken.start };
        let tail = Extent { start: taken.end, end: from.end };
        match (head.start < head.end, tail.start < tail.end) {
            (false, false) => self.roots[half] = self.slab.remove(root, from.start),
            (false, true) => self.slab.resize(root, from.start, tail),
            (true, rest) => {
                self.slab.resize(root, from.start, head);
                if rest {
                    self.roots[half] = self.slab.insert(root, tail);
                }
            }
        }
    }

    /// The free extents that abut `extent` on its left and on its right.
    fn neighbours(&self, half: usize, extent: Extent) -> (Option<Extent>, Option<Extent>) {
        let root = self.roots[half];
        let left = self.slab.at_or_before(root, extent.start).filter(|e| e.end == extent.start);
        let right = self.slab.at_or_after(root, extent.end).filter(|e| e.start == extent.end);
        (left, right)
    }

    /// Puts `freed` in, merged with what abuts it.
    fn give(&mut self, half: usize, freed: Extent) {
        match self.neighbours(half, freed) {
            (None, None) => self.roots[half] = self.slab.insert(self.roots[half], freed),
            (Some(left), None) => {
                self.slab.resize(self.roots[half], left.start, Extent { start: left.start, end: freed.end });
            }
            (None, Some(right)) => {
                self.slab.resize(
                    self.roots[half],
                    right.start,
                    Extent { start: freed.start, end: right.end },
                );
            }
            (Some(left), Some(right)) => {
                self.roots[half] = self.slab.remove(self.roots[half], right.start);
                self.slab.resize(self.roots[half], left.start, Extent { start: left.start, end: right.end });
            }
        }
    }

    /// Checks the trees, and what is counted against a walk; the free extents.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&self) -> Vec<Extent> {
        let (mut low, mut high) = (Vec::new(), Vec::new());
        self.slab.check(self.roots[0], &mut low);
        self.slab.check(self.roots[1], &mut high);
        assert!(low.iter().all(|e| e.end <= HIGH) && high.iter().all(|e| e.start >= HIGH));
        low.append(&mut high);
        assert_eq!(low.len(), self.slab.used());
        let free: u64 = low.iter().map(|e| e.end - e.start).sum();
        let reserved: u64 = self.reserved.iter().map(|e| e.end - e.start).sum();
        assert_eq!(free + reserved + self.in_use, self.end);
        low
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn visits(&self) -> u64 {
        self.slab.visits
    }
}

fn touch(a: &Extent, b: &Extent) -> bool {
    a.start <= b.end && b.start <= a.end
}

/// The parts of an extent below and above 4 GiB, each with the number of its half.
fn halves(extent: Extent) -> impl Iterator<Item = (usize, Extent)> {
    let low = Extent { start: extent.start, end: extent.end.min(HIGH) };
    let high = Extent { start: extent.start.max(HIGH), end: extent.end };
    [(0, low), (1, high)].into_iter().filter(|(_, part)| part.start < part.end)
}

/// An extent as a range of addresses.
pub(super) fn range_of(extent: Extent) -> IovaRange {
    // An extent is not empty and ends at 2^57 at most, so that nothing is cut off.
    IovaRange::clamped(
        Iova::new(extent.start << GRANULE_SHIFT),
        extent.end.saturating_sub(extent.start) << GRANULE_SHIFT,
    )
}

/// The granules that `range` touches.
pub(super) fn extent_of(range: IovaRange) -> Extent {
    Extent { start: range.start().raw() >> GRANULE_SHIFT, end: (range.last().raw() >> GRANULE_SHIFT) + 1 }
}
