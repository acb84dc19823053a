//! The row that an owner allocates from and frees to.

use super::geometry::{Divider, Geometry};
use super::row_ref::RowRef;

/// The current row, its free blocks as the bits of one word: alloc and free find, clear or set a bit. The next block is
/// mostly in the same row and is then found without the directory; of the row itself only the byte of the block's state
/// is accessed.
///
/// The row is the owner's, and what is free here is not available there.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Current {
    /// Bit set: the block is free.
    free: u64,
    /// Where the first block is, in bytes after the start of the span.
    pub(super) offset: u64,
    /// How many blocks [`find`](Self::find) finds: none where there is no row, where the blocks do not lie evenly, and
    /// in debug mode.
    pub(super) blocks: u64,
    size: u64,
    pub(super) by_size: Divider,
    row: Option<RowRef>,
}

impl Current {
    /// Makes a row the current one, with the lowest `most` of its blocks. What was posted to it should have been
    /// collected before. In debug mode blocks are not found here.
    pub(super) fn new(geometry: &Geometry, row: RowRef, most: usize, watched: bool) -> Self {
        let avail = row.avail();
        let left = all_but_lowest(avail, most);
        row.set_avail(left);
        let quick = geometry.is_even() && !watched;
        Self {
            free: avail & !left,
            offset: row.chunk() + geometry.offset_of(row.first_index()),
            blocks: if quick { row.blocks() } else { 0 },
            size: geometry.size(),
            by_size: geometry.by_size(),
            row: Some(row),
        }
    }

    /// The row, with all that is free of it available there again; there is no current row afterwards.
    pub(super) fn leave(&mut self) -> Option<RowRef> {
        let Self { row, free, .. } = core::mem::take(self);
        row.inspect(|row| row.set_avail(row.avail() | free))
    }

    /// Whether it is this row.
    pub(super) fn is(&self, row: RowRef) -> bool {
        self.row == Some(row)
    }

    /// The next free block.
    #[inline(always)]
    pub(super) fn first(&self) -> Option<(RowRef, u32)> {
        let row = self.row?;
        (self.free != 0).then(|| (row, self.free.trailing_zeros()))
    }

    /// Clears the lowest bit: the block that [`first`](Self::first) named is no longer free.
    #[inline(always)]
    pub(super) fn drop_first(&mut self) {
        self.free &= self.free.wrapping_sub(1);
    }

    /// Blocks of the row are free again.
    #[inline(always)]
    pub(super) fn put(&mut self, blocks: u64) {
        self.free |= blocks;
    }

    /// Where a block of the row starts, in bytes after the start of the span.
    #[inline(always)]
    pub(super) fn offset_of(&self, geometry: &Geometry, bit: u32) -> u64 {
        if self.blocks == 0 {
            return self.offset_by(geometry, bit);
        }
        self.offset + u64::from(bit) * self.size
    }

    #[cold]
    fn offset_by(&self, geometry: &Geometry, bit: u32) -> u64 {
        self.row.map_or(0, |row| row.chunk() + geometry.offset_of(row.first_index() + u64::from(bit)))
    }

    /// The block that starts at `offset`, if it is one of the row's.
    #[inline(always)]
    pub(super) fn find(&self, offset: u64) -> Option<(RowRef, u32)> {
        let within = offset.wrapping_sub(self.offset);
        let index = self.by_size.quotient(within);
        // Whatever the quotient of something too large is: this proves it right.
        if index < self.blocks && index * self.size == within { self.at(index) } else { None }
    }

    #[inline(always)]
    pub(super) fn at(&self, index: u64) -> Option<(RowRef, u32)> {
        #[expect(clippy::cast_possible_truncation, reason = "less than a row's blocks")]
        self.row.map(|row| (row, index as u32))
    }
}

/// The set bits of a word but for the lowest `most`. Time proportional to the fewer of the two.
fn all_but_lowest(mut word: u64, most: usize) -> u64 {
    if most >= word.count_ones() as usize {
        return 0;
    }
    for _ in 0..most {
        word &= word.wrapping_sub(1);
    }
    word
}
