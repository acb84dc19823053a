//! Runs of granules, and the sizes of the structure.

use crate::addr::{Iova, IovaRange};

/// A granule is 4 KiB.
pub(super) const GRANULE_SHIFT: u32 = 12;
/// A region is 512 granules, 2 MiB.
pub(super) const REGION_SHIFT: u32 = 9;
/// How many granules a region has.
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

/// How many granules of `start..end` are left from its first multiple of `align`, a power of two.
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
