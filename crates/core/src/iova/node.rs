//! Runs of granules and the sizes of the structure; and a node of a tree: eight parts of the
//! address space of equal size, each summarised.

use crate::addr::{Iova, IovaRange};

/// The index that means "none".
pub(super) const NIL: u32 = u32::MAX;
/// log2 of [`FAN`].
const FAN_SHIFT: u32 = 3;
/// The number of slots in a node.
pub(super) const FAN: usize = 1 << FAN_SHIFT;

/// The free runs of a part of the address space. All in granules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Summary {
    /// The number of free granules at its start.
    pub(super) head: u64,
    /// The number of free granules at its end.
    pub(super) tail: u64,
    /// For each of `ALIGNS`, the longest free run that begins at a multiple of it.
    pub(super) best: [u64; 3],
}

impl Summary {
    /// The summary of a part of which all granules are in one state.
    pub(super) fn uniform(part: Extent, free: bool) -> Self {
        if free {
            let best = ALIGNS.map(|align| room(part.start, part.end, align));
            Self { head: part.len(), tail: part.len(), best }
        } else {
            Self { head: 0, tail: 0, best: [0; 3] }
        }
    }

    /// Whether it differs from `other` in nothing but the longest run.
    pub(super) fn has_ends_of(self, other: Self) -> bool {
        (self.head, self.tail) == (other.head, other.tail) && self.best[1..] == other.best[1..]
    }
}

/// Returns log2 of the granules in a slot of a node at `level`. At level 1 a slot is a region.
#[inline]
pub(super) fn slot_shift(level: u32) -> u32 {
    REGION_SHIFT + FAN_SHIFT * (level - 1)
}

/// Returns the slot of a granule in its node at `level`.
#[inline]
pub(super) fn slot_of(level: u32, granule: u64) -> usize {
    const SLOTS: u64 = 1 << FAN_SHIFT;
    ((granule >> slot_shift(level)) % SLOTS) as usize
}

/// The first granule of the node at `level` that contains `granule`.
#[inline]
pub(super) fn base_of(level: u32, granule: u64) -> u64 {
    granule & (!0 << slot_shift(level + 1))
}

/// The result of a search in a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// The first fit begins at this granule, and ends in another slot or in one that is entirely
    /// free.
    At(u64),
    /// The first fit lies within this slot.
    Down(usize),
    /// Nothing fits; the number of granules that are free up to the end of the node.
    Tail(u64),
}

/// Eight slots. Arrays, because a search reads two or three of them.
///
/// A slot without a child is entirely free, or entirely in use by one allocation or reservation.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Node {
    best: [[u64; FAN]; 3],
    head: [u64; FAN],
    tail: [u64; FAN],
    /// Nodes; at level 1 the maps of regions.
    pub(super) kids: [u32; FAN],
}

impl Node {
    /// A node at `level`, of which all granules are in one state.
    pub(super) fn new(level: u32, base: u64, free: bool) -> Self {
        let mut node =
            Self { best: [[0; FAN]; 3], head: [0; FAN], tail: [0; FAN], kids: [NIL; FAN] };
        if free {
            for slot in 0..FAN {
                node.put(slot, Summary::uniform(Self::part(level, base, slot), true));
            }
        }
        node
    }

    /// The granules of a slot.
    pub(super) fn part(level: u32, base: u64, slot: usize) -> Extent {
        let start = base + ((slot as u64) << slot_shift(level));
        Extent { start, end: start + (1 << slot_shift(level)) }
    }

    pub(super) fn get(&self, slot: usize) -> Summary {
        let best = [self.best[0][slot], self.best[1][slot], self.best[2][slot]];
        Summary { head: self.head[slot], tail: self.tail[slot], best }
    }

    pub(super) fn put(&mut self, slot: usize, summary: Summary) {
        self.head[slot] = summary.head;
        self.tail[slot] = summary.tail;
        for (of_class, best) in self.best.iter_mut().zip(summary.best) {
            of_class[slot] = best;
        }
    }

    pub(super) fn put_longest(&mut self, slot: usize, longest: u64) {
        self.best[0][slot] = longest;
    }

    /// Whether no granule of a slot is free.
    pub(super) fn is_used(&self, slot: usize) -> bool {
        self.best[0][slot] == 0
    }

    /// Returns the number of free granules at the end of the slot before `slot`.
    pub(super) fn tail_before(&self, slot: usize) -> Option<u64> {
        self.tail.get(slot.checked_sub(1)?).copied()
    }

    /// Summarises a node at `level` whose first granule is `base`.
    pub(super) fn summary(&self, level: u32, base: u64) -> Summary {
        let span = 1 << slot_shift(level);
        let (mut run, mut head) = (0, None);
        for (&slot_head, &slot_tail) in self.head.iter().zip(&self.tail) {
            if slot_head == span {
                run += span;
            } else {
                head = head.or(Some(run + slot_head));
                run = slot_tail;
            }
        }
        let head = head.unwrap_or(run);
        // Slots begin at multiples of a region. With those of the largest alignment they do too, or
        // the node is no larger.
        let [_, _, large] = ALIGNS;
        let largest = if span >= large {
            self.longest(level, 2)
        } else if base & (large - 1) == 0 {
            head
        } else {
            0
        };
        Summary { head, tail: run, best: [self.longest(level, 0), self.longest(level, 1), largest] }
    }

    /// The longest run that begins at a multiple of `ALIGNS[class]`, of which a slot is a multiple.
    #[inline]
    pub(super) fn longest(&self, level: u32, class: usize) -> u64 {
        let span = 1 << slot_shift(level);
        let aligned = !(ALIGNS[class] - 1);
        let (mut run, mut most) = (0, 0);
        for slot in 0..FAN {
            let joined = (run & aligned) + self.head[slot];
            most = joined.max(self.best[class][slot]).max(most);
            run = if self.head[slot] == span { run + span } else { self.tail[slot] };
        }
        most
    }

    /// Searches the slots for the first `len` free granules from a multiple of `ALIGNS[class]`.
    pub(super) fn first_fit(&self, level: u32, base: u64, class: usize, len: u64) -> Step {
        let span = 1 << slot_shift(level);
        let mut run = 0;
        let mut at = base;
        for slot in 0..FAN {
            let slot_head = self.head[slot];
            // A run that begins in a slot before this one begins before everything in this one.
            if run > 0 && room(at - run, at + slot_head, ALIGNS[class]) >= len {
                return Step::At(align_up(at - run, ALIGNS[class]));
            }
            if self.best[class][slot] >= len {
                return if self.kids[slot] == NIL {
                    Step::At(align_up(at, ALIGNS[class]))
                } else {
                    Step::Down(slot)
                };
            }
            run = if slot_head == span { run + span } else { self.tail[slot] };
            at += span;
        }
        Step::Tail(run)
    }
}

/// A granule is 4 KiB.
pub(super) const GRANULE_SHIFT: u32 = 12;
/// A region is 512 granules, 2 MiB.
pub(super) const REGION_SHIFT: u32 = 9;
/// The number of granules in a region.
pub(super) const REGION: u64 = 1 << REGION_SHIFT;
/// The first granule above 4 GiB, where the upper half begins.
pub(super) const HIGH: u64 = 1 << (32 - GRANULE_SHIFT);
/// The alignments, in granules, at which a search is exact: 4 KiB, 2 MiB, 1 GiB.
pub(super) const ALIGNS: [u64; 3] = [1, 1 << 9, 1 << 18];

/// A run of granules, `start..end`, not empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Extent {
    pub(super) fn len(self) -> u64 {
        self.end - self.start
    }

    /// The number of the region that contains all of it, if one does.
    #[inline]
    pub(super) fn region(self) -> Option<u64> {
        let region = self.start >> REGION_SHIFT;
        (region == (self.end - 1) >> REGION_SHIFT).then_some(region)
    }

    /// The granules of both, if there are any.
    pub(super) fn intersection(self, other: Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }
}

/// Rounds up to a multiple of `align`, a power of two.
#[inline]
pub(super) fn align_up(granule: u64, align: u64) -> u64 {
    (granule + (align - 1)) & !(align - 1)
}

/// Returns the number of granules in `start..end` from its first multiple of `align`, a power of
/// two.
#[inline]
pub(super) fn room(start: u64, end: u64, align: u64) -> u64 {
    end.saturating_sub(align_up(start, align))
}

/// The parts of an extent below and above 4 GiB, each with the number of its half.
pub(super) fn halves(extent: Extent) -> impl Iterator<Item = (usize, Extent)> {
    let low = Extent { start: 0, end: HIGH };
    let high = Extent { start: HIGH, end: u64::MAX };
    [low, high]
        .into_iter()
        .enumerate()
        .filter_map(move |(half, all)| Some((half, extent.intersection(all)?)))
}

/// An extent as a range of addresses.
pub(super) fn range_of(extent: Extent) -> IovaRange {
    // An extent is not empty and ends at 2^57 at most, so that nothing is cut off.
    IovaRange::clamped(Iova::new(extent.start << GRANULE_SHIFT), extent.len() << GRANULE_SHIFT)
}

/// The granules that `range` touches.
pub(super) fn extent_of(range: IovaRange) -> Extent {
    Extent {
        start: range.start().raw() >> GRANULE_SHIFT,
        end: (range.last().raw() >> GRANULE_SHIFT) + 1,
    }
}
