//! The state behind the lock: a tree for each half of the address space, and the reservations.

use super::error::IovaError;
use super::extent::{ALIGNS, Extent, GRANULE_SHIFT, HIGH, halves, range_of};
use super::fit::Quick;
use super::stats::{Census, IovaStats};
use super::tree::Tree;
use alloc::vec::Vec;

/// All in granules of 4 KiB.
#[derive(Debug)]
pub(super) struct Space {
    /// What is free below and above 4 GiB. The second one is empty if there is nothing above.
    trees: [Tree; 2],
    /// How many granules there are.
    end: u64,
    /// In order, apart from each other. In the trees they are in use.
    reserved: Vec<Extent>,
    in_use: u64,
}

impl Space {
    pub(super) fn new(bits: u32) -> Result<Self, IovaError> {
        let end = 1 << (bits - GRANULE_SHIFT);
        let low = Tree::new(Extent { start: 0, end: end.min(HIGH) })?;
        let high = Tree::new(Extent { start: HIGH, end: end.max(HIGH) })?;
        Ok(Self { trees: [low, high], end, reserved: Vec::new(), in_use: 0 })
    }

    pub(super) fn alloc(
        &mut self,
        len: u64,
        align: u64,
        limit: u64,
    ) -> Result<Option<Extent>, IovaError> {
        let limit = limit.min(self.end);
        let order: &[usize] = if limit <= HIGH { &[0] } else { &[1, 0] };
        for &half in order {
            if let Some(taken) = Self::alloc_in(&mut self.trees[half], len, align, limit)? {
                self.in_use += len;
                return Ok(Some(taken));
            }
        }
        Ok(None)
    }

    fn alloc_in(
        tree: &mut Tree,
        len: u64,
        align: u64,
        limit: u64,
    ) -> Result<Option<Extent>, IovaError> {
        if align == 1 {
            match tree.take_first(len, limit) {
                Quick::Taken(taken) => return Ok(Some(taken)),
                Quick::Beyond => return Ok(None),
                Quick::Unknown => {}
            }
        }
        let Some(start) = Self::find(tree, len, align, limit) else { return Ok(None) };
        let taken = Extent { start, end: start + len };
        let opened = taken.region() == Some(tree.open.region);
        if !(opened && tree.take_part(taken)) {
            tree.prepare(taken.end, 1)?;
            tree.take(taken);
        }
        Ok(Some(taken))
    }

    /// Where the first `len` free granules begin, if they end at `limit` at most. O(levels).
    ///
    /// Exact for the page sizes. For an alignment between two of them: a run that is long enough
    /// wherever it begins, else one that would do for the next page size.
    fn find(tree: &mut Tree, len: u64, align: u64, limit: u64) -> Option<u64> {
        let class = ALIGNS.iter().position(|&exact| align <= exact)?;
        let fits = |start: &u64| start + len <= limit;
        if ALIGNS[class] != align {
            let anywhere =
                tree.first_fit(0, len + align - 1).map(|start| start.next_multiple_of(align));
            if let Some(start) = anywhere.filter(fits) {
                return Some(start);
            }
        }
        tree.first_fit(class, len).filter(fits)
    }

    pub(super) fn alloc_at(&mut self, wanted: Extent) -> Result<(), IovaError> {
        let half = usize::from(wanted.start >= HIGH);
        if !self.trees[half].take_part(wanted) {
            let range = range_of(wanted);
            if let Some(reserved) = self.reserved_in(wanted) {
                return Err(IovaError::Reserved { range, reserved: range_of(reserved) });
            }
            if let Some(used) = self.first(wanted, false) {
                return Err(IovaError::InUse { range, used: range_of(used) });
            }
            self.prepare(&[wanted])?;
            self.take(wanted);
        }
        self.in_use += wanted.len();
        Ok(())
    }

    pub(super) fn free(&mut self, freed: Extent) -> Result<(), IovaError> {
        if let Some(reserved) = self.reserved_in(freed) {
            return Err(IovaError::Reserved {
                range: range_of(freed),
                reserved: range_of(reserved),
            });
        }
        let half = usize::from(freed.start >= HIGH);
        if !self.trees[half].free_part(freed) {
            self.free_across(freed)?;
        }
        self.in_use -= freed.len();
        Ok(())
    }

    /// Frees what is not in one region with a map, or fails.
    fn free_across(&mut self, freed: Extent) -> Result<(), IovaError> {
        let range = range_of(freed);
        if let Some(free) = self.first(freed, true) {
            return Err(match self.first(freed, false) {
                None => IovaError::AlreadyFree { range },
                Some(_) => IovaError::PartlyFree { range, free: range_of(free) },
            });
        }
        for (half, part) in halves(freed) {
            self.trees[half].prepare_free(part)?;
        }
        for (half, part) in halves(freed) {
            self.trees[half].free(part);
        }
        Ok(())
    }

    pub(super) fn reserve(&mut self, wanted: Extent) -> Result<(), IovaError> {
        let wanted = Extent { start: wanted.start, end: wanted.end.min(self.end) };
        if wanted.start >= wanted.end {
            return Ok(()); // nothing is allocated beyond the width
        }
        let merged = self.reserved.iter().filter(|r| touch(r, &wanted)).fold(wanted, |all, r| {
            Extent { start: all.start.min(r.start), end: all.end.max(r.end) }
        });
        let gaps = self.gaps(&wanted, merged)?;
        for gap in &gaps {
            if let Some(used) = self.first(*gap, false) {
                return Err(IovaError::InUse { range: range_of(wanted), used: range_of(used) });
            }
        }
        self.reserved.try_reserve(1).map_err(|_| no_memory(1))?;
        self.prepare(&gaps)?;
        for gap in gaps {
            self.take(gap);
        }
        self.reserved.retain(|r| !touch(r, &wanted));
        let place = self.reserved.partition_point(|r| r.start < merged.start);
        self.reserved.insert(place, merged);
        Ok(())
    }

    /// What lies between the reservations that `wanted` touches; it must be free.
    fn gaps(&self, wanted: &Extent, merged: Extent) -> Result<Vec<Extent>, IovaError> {
        let mut gaps = Vec::new();
        gaps.try_reserve(self.reserved.len() + 1)
            .map_err(|_| no_memory(self.reserved.len() + 1))?;
        let mut at = merged.start;
        for old in self.reserved.iter().filter(|r| touch(r, wanted)) {
            gaps.push(Extent { start: at, end: old.start });
            at = old.end;
        }
        gaps.push(Extent { start: at, end: merged.end });
        gaps.retain(|gap| gap.start < gap.end);
        Ok(gaps)
    }

    pub(super) fn stats(&mut self) -> IovaStats {
        let mut census = Census::new(&self.reserved);
        for (tree, (_, part)) in
            self.trees.iter_mut().zip(halves(Extent { start: 0, end: self.end }))
        {
            tree.settle();
            tree.walk(part, &mut |part, free| census.add(part, free));
            census.end_free_run();
        }
        census.finish(self.in_use)
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn bytes_in_use(&self) -> u64 {
        self.in_use << GRANULE_SHIFT
    }

    /// Bytes of the longest free run that an allocation below `limit` could have had: on one side
    /// of 4 GiB.
    pub(super) fn largest_free(&mut self, limit: u64) -> u64 {
        let mut longest = 0;
        for (half, part) in halves(Extent { start: 0, end: limit.min(self.end) }) {
            let tree = &mut self.trees[half];
            if part.end == tree.bounds.end {
                longest = longest.max(tree.longest());
                continue;
            }
            let mut run = 0;
            tree.settle();
            tree.walk(part, &mut |part, free| {
                run = if free { run + part.len() } else { 0 };
                longest = longest.max(run);
                true
            });
        }
        longest << GRANULE_SHIFT
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        let trees = self.trees.iter().map(|tree| tree.nodes.bytes() + tree.maps.bytes());
        trees.sum::<usize>() + self.reserved.capacity() * size_of::<Extent>()
    }

    /// Makes sure of the memory for taking all of `parts`.
    fn prepare(&mut self, parts: &[Extent]) -> Result<(), IovaError> {
        for (half, tree) in self.trees.iter_mut().enumerate() {
            let here = parts.iter().flat_map(|&part| halves(part)).filter(|&(h, _)| h == half);
            let (ranges, end) = here.fold((0, 0), |(n, end), (_, part)| (n + 1, part.end.max(end)));
            if ranges > 0 {
                tree.prepare(end, ranges)?;
            }
        }
        Ok(())
    }

    /// Takes `part`, all of it free and prepared.
    fn take(&mut self, part: Extent) {
        for (half, part) in halves(part) {
            self.trees[half].take(part);
        }
    }

    fn reserved_in(&self, extent: Extent) -> Option<Extent> {
        let after = self.reserved.partition_point(|r| r.end <= extent.start);
        self.reserved.get(after).copied().filter(|r| r.start < extent.end)
    }

    /// The first run of granules of `extent` that are free, or that are not. O(levels + runs).
    fn first(&mut self, extent: Extent, free: bool) -> Option<Extent> {
        halves(extent).find_map(|(half, part)| {
            let mut found: Option<Extent> = None;
            self.trees[half].settle();
            self.trees[half].walk(part, &mut |part, state| {
                match &mut found {
                    Some(run) if state == free => run.end = part.end,
                    Some(_) => return false,
                    None if state == free => found = Some(part),
                    None => {}
                }
                true
            });
            found
        })
    }

    /// Checks the trees, and what is counted against a walk; the free extents.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&mut self) -> Vec<Extent> {
        let mut all = Vec::new();
        for (tree, (_, part)) in
            self.trees.iter_mut().zip(halves(Extent { start: 0, end: self.end }))
        {
            let mut free = tree.check(part);
            all.append(&mut free);
        }
        let free: u64 = all.iter().map(|e| e.len()).sum();
        let reserved: u64 = self.reserved.iter().map(|e| e.len()).sum();
        assert_eq!(free + reserved + self.in_use, self.end);
        all
    }

    /// Whether freeing this needs a node or a map.
    #[cfg(all(test, not(loom)))]
    pub(super) fn needs_memory_to_free(&mut self, freed: Extent) -> bool {
        halves(freed).any(|(half, part)| {
            self.trees[half].settle();
            self.trees[half].divides_a_slot(part)
        })
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn visits(&self) -> u64 {
        self.trees.iter().map(|tree| tree.visits).sum()
    }
}

fn no_memory(extents: usize) -> IovaError {
    IovaError::NoMemory { bytes: extents * size_of::<Extent>() }
}

fn touch(a: &Extent, b: &Extent) -> bool {
    a.start <= b.end && b.start <= a.end
}
