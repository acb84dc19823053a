//! [`Current`]: the row that an owner allocates from and frees to.

use super::bits::{all_but_lowest, lowest};
use super::geometry::Geometry;
use super::row::ROW;
use super::row_ref::RowRef;
use crate::mem::prefetch_for_write;
use core::hint::cold_path;

/// The current row. Its free blocks are the bits of one word, which alloc and free clear and set; of the row itself only the byte
/// of the block's state is accessed.
///
/// A block that is free here is not in the row's `avail`.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Current {
    /// Bit set: the block is free. 0 without a row.
    free: u64,
    /// The first block's offset in the span, in bytes.
    offset: u64,
    /// Whether the blocks are at equal distances.
    even: bool,
    /// Whether they are, and are not prefetched.
    plain: bool,
    size: u64,
    /// How many bytes its blocks have together, if they are at equal distances; 0 without a row, and in debug mode.
    bytes: u64,
    row: Option<RowRef>,
}

impl Current {
    /// Makes a row the current one, with the lowest `most` of its free blocks. The caller has collected its remote frees.
    /// In debug mode [`find`](Self::find) finds nothing.
    pub(super) fn new(geometry: &Geometry, row: RowRef, most: usize, watched: bool) -> Self {
        let avail = row.avail();
        let left = all_but_lowest(avail, most);
        row.set_avail(left);
        Self {
            free: avail & !left,
            offset: row.chunk() + geometry.offset_of(row.first_index()),
            even: geometry.is_even(),
            plain: geometry.is_even() && geometry.ahead().is_none(),
            size: geometry.size(),
            bytes: if geometry.is_even() && !watched { row.blocks() * geometry.size() } else { 0 },
            row: Some(row),
        }
    }

    /// Returns the row after moving its free blocks back to its `avail`; there is no current row afterwards.
    pub(super) fn leave(&mut self) -> Option<RowRef> {
        let Self { row, free, .. } = core::mem::take(self);
        row.inspect(|row| row.set_avail(row.avail() | free))
    }

    /// Returns the block that starts at `offset`, if it is in the row.
    #[inline(always)]
    pub(super) fn find(&self, geometry: &Geometry, offset: u64) -> Option<(RowRef, u32)> {
        // An offset before the row wraps around to one that is too large.
        let within = offset.wrapping_sub(self.offset);
        if within >= self.bytes {
            return None;
        }
        let index = geometry.quick_index_of(within);
        #[expect(clippy::cast_possible_truncation, reason = "less than a row's blocks")]
        self.row.filter(|_| index < ROW as u64).map(|row| (row, index as u32))
    }

    /// Returns whether it is this row.
    pub(super) fn is(&self, row: RowRef) -> bool {
        self.row == Some(row)
    }

    /// Returns the row, and which of its blocks are free here.
    #[cfg(all(test, not(loom)))]
    pub(super) fn parts(&self) -> (Option<RowRef>, u64) {
        (self.row, self.free)
    }

    /// Returns whether [`offset_of_next`](Self::offset_of_next) prefetches.
    #[cfg(all(test, not(loom)))]
    pub(super) fn prefetches(&self, geometry: &Geometry) -> bool {
        !self.plain && geometry.ahead().is_some()
    }

    /// Returns the next free block.
    #[inline(always)]
    pub(super) fn first(&self) -> Option<(RowRef, u32)> {
        if self.free == 0 {
            cold_path();
            return None;
        }
        // SAFETY: only with a row is a bit set.
        Some((unsafe { self.row.unwrap_unchecked() }, self.free.trailing_zeros()))
    }

    /// Removes the block that [`first`](Self::first) returned from the free ones.
    #[inline(always)]
    pub(super) fn drop_first(&mut self) {
        self.free &= self.free.wrapping_sub(1);
    }

    /// Returns the next free blocks that are neighbours: at least one.
    #[inline(always)]
    pub(super) fn first_run(&self, geometry: &Geometry) -> Option<Run> {
        let (row, first) = self.first()?;
        // Where blocks are not evenly spaced, each is a run of its own.
        let len = if self.even { (self.free >> first).trailing_ones() } else { 1 };
        let offset = self.offset_of(geometry, first);
        Some(Run { row, first, len: len as usize, offset, size: self.size })
    }

    /// Removes the blocks of a run from the free ones.
    #[inline(always)]
    pub(super) fn drop_first_of(&mut self, run: &Run) {
        self.free &= !(lowest(run.len) << run.first);
    }

    /// Adds blocks of the row to the free ones.
    #[inline(always)]
    pub(super) fn put(&mut self, blocks: u64) {
        self.free |= blocks;
    }

    /// Returns the offset of a block of the row in the span, in bytes.
    #[inline(always)]
    pub(super) fn offset_of(&self, geometry: &Geometry, bit: u32) -> u64 {
        if self.even { self.offset_even(bit) } else { self.offset_by(geometry, bit) }
    }

    /// The same for a block that is allocated by itself: prefetches what is allocated some time after it, if the pool was told to.
    #[inline(always)]
    pub(super) fn offset_of_next(&self, geometry: &Geometry, bit: u32) -> u64 {
        if self.plain {
            return self.offset_even(bit);
        }
        cold_path();
        self.offset_and_prefetch(geometry, bit)
    }

    #[inline(always)]
    fn offset_even(&self, bit: u32) -> u64 {
        self.offset + u64::from(bit) * self.size
    }

    #[cold]
    fn offset_by(&self, geometry: &Geometry, bit: u32) -> u64 {
        self.row.map_or(0, |row| row.chunk() + geometry.offset_of(row.first_index() + u64::from(bit)))
    }

    #[inline(never)]
    fn offset_and_prefetch(&self, geometry: &Geometry, bit: u32) -> u64 {
        let offset = self.offset_of(geometry, bit);
        if let Some(ahead) = geometry.ahead() {
            #[expect(clippy::cast_possible_truncation, reason = "an address")]
            prefetch_for_write(ahead.get().wrapping_add(offset as usize));
        }
        offset
    }
}

/// Free blocks of a row that are neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) row: RowRef,
    /// The first one.
    pub(super) first: u32,
    /// How many there are.
    pub(super) len: usize,
    /// The offset of the first one in the span, and the distance to the next, in bytes.
    pub(super) offset: u64,
    pub(super) size: u64,
}
