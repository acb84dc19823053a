//! [`IovaSpace`], its statistics, and the state behind its lock: a tree for each half of the
//! address space, and the reservations.

use super::error::IovaError;
use super::node::{ALIGNS, Extent, GRANULE_SHIFT, HIGH, extent_of, halves, range_of};
use super::search::FirstFit;
use super::tree::Tree;
use crate::addr::{Iova, IovaRange};
use crate::sync::Mutex;
use alloc::vec::Vec;
use core::fmt;

/// The most parts that the statistics count with the lock held.
pub(super) const PIECE: usize = 4096;

/// All in granules of 4 KiB.
#[derive(Debug)]
pub(super) struct Space {
    /// The free ranges below and above 4 GiB. The second tree is empty if there is nothing above.
    trees: [Tree; 2],
    /// The number of granules.
    end: u64,
    /// Sorted and disjoint. In the trees they are in use.
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
                FirstFit::Taken(taken) => return Ok(Some(taken)),
                FirstFit::Beyond => return Ok(None),
                FirstFit::Unknown => {}
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

    /// Returns the start of the first `len` free granules, if they end at `limit` at most.
    /// O(levels).
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

    /// Frees a range that is not in one region with a map, or fails.
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

    /// Returns the parts between the reservations that `wanted` touches, which must be free.
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

    /// Counts at most `most` parts from granule `from` on. Returns where the next one begins; `None`
    /// if there is none.
    pub(super) fn count(&mut self, from: u64, most: usize, counter: &mut Counter) -> Option<u64> {
        let (half, rest) = halves(Extent { start: from, end: self.end }).next()?;
        let tree = &mut self.trees[half];
        tree.settle();
        let (mut parts, mut next) = (0, rest.end);
        tree.walk(rest, &mut |part, free| {
            counter.add(part, free, &self.reserved);
            (parts, next) = (parts + 1, part.end);
            parts < most
        });
        if next == HIGH {
            // No allocation crosses it.
            counter.run = 0;
        }
        Some(next)
    }

    fn finish(&self, counter: Counter) -> IovaStats {
        IovaStats {
            bytes_in_use: self.bytes_in_use(),
            bytes_reserved: self.reserved.iter().map(|r| r.len()).sum::<u64>() << GRANULE_SHIFT,
            ..counter.stats
        }
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
        let below = halves(Extent { start: 0, end: limit.min(self.end) });
        let longest = below.map(|(half, part)| self.trees[half].longest_before(part.end)).max();
        longest.unwrap_or(0) << GRANULE_SHIFT
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn metadata_bytes(&self) -> usize {
        let trees = self.trees.iter().map(|tree| tree.nodes.bytes() + tree.maps.bytes());
        trees.sum::<usize>() + self.reserved.capacity() * size_of::<Extent>()
    }

    /// Reserves the memory for allocating all of `parts`.
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

    /// Allocates `part`, all of it free and prepared.
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

    /// Checks the trees, and the counts against a walk; returns the free extents.
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
        self.trees.iter().map(|tree| tree.visits.get()).sum()
    }
}

fn no_memory(extents: usize) -> IovaError {
    IovaError::NoMemory { bytes: extents * size_of::<Extent>() }
}

fn touch(a: &Extent, b: &Extent) -> bool {
    a.start <= b.end && b.start <= a.end
}

/// Allocates the addresses of an I/O address space.
///
/// Shared by reference. A lock inside is held for O(log width) steps by an allocation, also where it
/// fails, and a free; [`stats`](Self::stats) takes it for a few thousand runs at a time. Freeing whole
/// allocations never allocates memory.
#[derive(Debug)]
pub struct IovaSpace {
    pub(super) space: Mutex<Space>,
    bits: u32,
}

impl IovaSpace {
    /// The unit of allocation in bytes.
    pub const GRANULE: u64 = 4096;
    /// The largest alignment: 1 GiB.
    pub const MAX_ALIGN: u64 = 1 << 30;

    /// Creates a space of `bits` bits (13 to 57), all free except the null page: address 0 is never
    /// allocated.
    ///
    /// # Errors
    /// [`IovaError::Width`]; [`IovaError::NoMemory`].
    pub fn new(bits: u32) -> Result<Self, IovaError> {
        if !(13..=57).contains(&bits) {
            return Err(IovaError::Width { bits });
        }
        let mut space = Space::new(bits)?;
        space.reserve(Extent { start: 0, end: 1 })?;
        Ok(Self { space: Mutex::new(space), bits })
    }

    /// Returns the width of an address in bits.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Allocates `len` bytes at a multiple of `align`, the last byte at or below `limit`: the first
    /// such range. O(log width).
    ///
    /// `len` is rounded up to 4 KiB, and to nothing larger; the returned range has the rounded
    /// length. `align` is a power of two up to 1 GiB; less than 4 KiB is 4 KiB. Unless `limit`
    /// forbids it, addresses above 4 GiB are preferred: those below are left to devices that reach
    /// no others. No allocation crosses the line at 4 GiB, so that a space of 33 bits has none
    /// longer than 4 GiB. ([`alloc_at`](Self::alloc_at) may cross it.)
    ///
    /// For alignments of 4 KiB, 2 MiB and 1 GiB it fails only if there is no such range on either
    /// side of 4 GiB. For one between two of these it may also fail in a fragmented space, if every
    /// free run is shorter than `len + align` and none fits the next page size.
    ///
    /// # Errors
    /// [`IovaError::Length`], [`IovaError::Alignment`], [`IovaError::Exhausted`];
    /// [`IovaError::NoMemory`] if the metadata cannot grow.
    pub fn alloc(&self, len: u64, align: u64, limit: Option<Iova>) -> Result<IovaRange, IovaError> {
        if len == 0 || len > 1 << self.bits {
            return Err(IovaError::Length { len, bits: self.bits });
        }
        if !align.is_power_of_two() || align > Self::MAX_ALIGN {
            return Err(IovaError::Alignment { align });
        }
        let end = limit.map_or(u64::MAX, |last| last.raw().saturating_add(1)) / Self::GRANULE;
        let granules = len.div_ceil(Self::GRANULE);
        let mut space = self.space.lock();
        match space.alloc(granules, align.div_ceil(Self::GRANULE), end)? {
            Some(taken) => Ok(range_of(taken)),
            None => {
                let last = Iova::new((space.end() * Self::GRANULE) - 1);
                Err(IovaError::Exhausted {
                    len,
                    align,
                    limit: limit.map_or(last, |limit| limit.min(last)),
                    in_use: space.bytes_in_use(),
                    largest_free: space.largest_free(end),
                })
            }
        }
    }

    /// Allocates this range, which must be free: for identity mappings, or addresses fixed
    /// elsewhere. O(log width).
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`],
    /// [`IovaError::InUse`]; [`IovaError::NoMemory`] if the metadata cannot grow.
    pub fn alloc_at(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().alloc_at(extent_of(range))
    }

    /// Frees allocated addresses: an allocation, several that abut, or a part. O(log width + 2 MiB
    /// regions in `range` that several allocations had shared).
    ///
    /// Freeing whole allocations needs no memory. Freeing a part needs some (at most 24 nodes and 2
    /// maps, about 10 KiB) if the allocation it belongs to covers a whole 2 MiB region that the
    /// part cuts.
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`];
    /// [`IovaError::AlreadyFree`] if all of it is free, [`IovaError::PartlyFree`] if part of it is;
    /// [`IovaError::NoMemory`] for a part, as above.
    pub fn free(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().free(extent_of(range))
    }

    /// Reserves every granule that `range` touches for good: MSI windows, ranges that the host
    /// reports.
    ///
    /// Ranges that are reserved already, or beyond the width, may be reserved again. O(log width +
    /// reservations).
    ///
    /// # Errors
    /// [`IovaError::InUse`] if part of it is allocated; [`IovaError::NoMemory`] if the metadata
    /// cannot grow.
    pub fn reserve(&self, range: IovaRange) -> Result<(), IovaError> {
        self.space.lock().reserve(extent_of(range))
    }

    /// Returns the statistics. Walks the whole space: O(2 MiB regions with a map + free runs +
    /// reservations), about 10 ns for each.
    ///
    /// The lock is released after each few thousand of these, so that other threads allocate and
    /// free meanwhile. The numbers of runs and the largest are exact while none does.
    pub fn stats(&self) -> IovaStats {
        self.stats_in_pieces(PIECE)
    }

    pub(super) fn stats_in_pieces(&self, parts: usize) -> IovaStats {
        let (mut counter, mut from) = (Counter::default(), 0);
        loop {
            let mut space = self.space.lock();
            match space.count(from, parts, &mut counter) {
                Some(next) => from = next,
                None => return space.finish(counter),
            }
        }
    }

    /// Returns how much memory the metadata takes: 64 bytes for each 2 MiB region that is neither
    /// free nor allocated as a whole, and about as much for the tree above it where such regions
    /// are neighbours.
    #[cfg(all(test, not(loom)))]
    pub(super) fn metadata_bytes(&self) -> usize {
        self.space.lock().metadata_bytes()
    }

    /// Checks that a range is whole granules of this space.
    fn check(&self, range: IovaRange) -> Result<(), IovaError> {
        if !range.is_aligned(Self::GRANULE) {
            return Err(IovaError::Misaligned { range });
        }
        if range.end().raw() > 1 << self.bits {
            return Err(IovaError::Outside { range, bits: self.bits });
        }
        Ok(())
    }
}

/// The contents of an address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IovaStats {
    /// Runs of free addresses (one that crosses 4 GiB counts twice).
    pub free: usize,
    /// Runs of allocated addresses; ranges that abut are one.
    pub allocated: usize,
    /// Bytes allocated.
    pub bytes_in_use: u64,
    /// Bytes reserved, the null page included.
    pub bytes_reserved: u64,
    /// Bytes of the largest free run.
    pub largest_free: u64,
}

impl fmt::Display for IovaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { free, allocated, bytes_in_use, bytes_reserved, largest_free } = self;
        write!(
            f,
            "{bytes_in_use:#x} bytes in use in {allocated} runs, {bytes_reserved:#x} reserved, "
        )?;
        write!(f, "{free} free extents (largest {largest_free:#x} bytes)")
    }
}

/// Counts the runs of a space that is walked in order.
#[derive(Default)]
pub(super) struct Counter {
    /// The length of the free run that the last part belongs to; 0 if that part is not free.
    run: u64,
    /// The end of the last allocated run.
    allocated_to: Option<u64>,
    stats: IovaStats,
}

impl Counter {
    /// Counts the next part, all of it free or in use: allocated, but for what is `reserved`.
    fn add(&mut self, part: Extent, free: bool, reserved: &[Extent]) {
        if free {
            self.stats.free += usize::from(self.run == 0);
            self.run += part.len();
            self.stats.largest_free = self.stats.largest_free.max(self.run << GRANULE_SHIFT);
            return;
        }
        self.run = 0;
        let mut from = part.start;
        let after = reserved.partition_point(|r| r.end <= from);
        for next in reserved.iter().skip(after).take_while(|r| r.start < part.end) {
            self.add_allocated(from, next.start);
            from = next.end;
        }
        self.add_allocated(from, part.end);
    }

    /// Counts `from..to`, which may be empty.
    fn add_allocated(&mut self, from: u64, to: u64) {
        if from < to {
            self.stats.allocated += usize::from(self.allocated_to != Some(from));
            self.allocated_to = Some(to);
        }
    }
}
