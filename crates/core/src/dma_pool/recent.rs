//! The row that was used last.

use super::geometry::{Divider, Geometry};
use super::row::{RowRef, Slot};

/// The row of the block that was freed or drawn last: the next one to be freed is often of the same row, and is then
/// found without the directory. The owner whose it is keeps the row, or it has no blocks.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Recent {
    /// Where its first block is, in bytes after the start of the span.
    offset: u64,
    /// How many blocks it has; 0 where there is none, or where they do not lie evenly.
    blocks: u64,
    size: u64,
    by_size: Divider,
    row: RowRef,
}

impl Recent {
    pub(super) fn new(geometry: &Geometry, row: RowRef) -> Self {
        Self {
            offset: row.chunk() + geometry.offset_of(row.first_index()),
            blocks: if geometry.is_even() { row.blocks() } else { 0 },
            size: geometry.size(),
            by_size: geometry.by_size(),
            row,
        }
    }

    /// From here on no block is one of it.
    pub(super) fn forget(&mut self) {
        self.blocks = 0;
    }

    /// The block that starts at `offset`, if it is one of the row's.
    #[inline(always)]
    pub(super) fn find(&self, offset: u64) -> Option<Slot> {
        let within = offset.wrapping_sub(self.offset);
        let index = self.by_size.quotient(within);
        // Whatever the quotient of something too large is: this proves it right.
        (index < self.blocks && index * self.size == within).then(|| self.slot(index))
    }

    /// The block in which `offset` lies, if it is one of the row's; not proved for offsets 2^31 away or more, nor to
    /// be where a block starts.
    #[inline(always)]
    pub(super) fn find_unchecked(&self, offset: u64) -> Option<Slot> {
        let within = offset.wrapping_sub(self.offset);
        let index = self.by_size.quotient(within);
        (index < self.blocks && within < 1 << 31).then(|| self.slot(index))
    }

    #[inline(always)]
    fn slot(&self, index: u64) -> Slot {
        #[expect(clippy::cast_possible_truncation, reason = "less than a row's blocks")]
        Slot::new(self.row, index as u32)
    }
}
