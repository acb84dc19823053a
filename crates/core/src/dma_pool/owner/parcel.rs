//! Frees of blocks in rows of other owners: one at a time, or those of a row together.

use super::super::row_ref::RowRef;
use super::super::state::{Form, FreeRefusal};
use super::Owner;

/// Blocks of a row that are marked as freed remotely, and not announced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parcel {
    row: RowRef,
    /// Bit set: the block is one of them.
    blocks: u64,
}

impl Owner {
    /// Begins a call that frees many blocks: those of one row of another owner are announced to it together, by two
    /// read-modify-writes instead of two each. Until then that owner has no use of them, so each such call ends with
    /// [`announce`](Self::announce), however it ends.
    #[inline(always)]
    pub(in super::super) fn gather(&mut self) {
        self.gathers = true;
    }

    /// Ends such a call.
    #[inline(always)]
    pub(in super::super) fn announce(&mut self) {
        self.gathers = false;
        if self.parcel.is_some() {
            self.send_parcel();
        }
    }

    /// Frees a block in a row of another owner.
    pub(super) fn remote_free(&mut self, row: RowRef, bit: u32, form: Form) -> Result<(), FreeRefusal> {
        row.mark_remotely(bit, form)?;
        // Corrected when it is announced, if it was a second free.
        self.count.give(1);
        let mut blocks = 1 << bit;
        if self.gathers {
            match self.parcel {
                Some(parcel) if parcel.row == row && parcel.blocks & blocks == 0 => blocks |= parcel.blocks,
                // Of another row; or a second free of the block, which is counted when it is announced, too.
                Some(_) => self.send_parcel(),
                None => {}
            }
            self.parcel = Some(Parcel { row, blocks });
            return Ok(());
        }
        self.send(row, blocks);
        Ok(())
    }

    #[inline(never)]
    fn send_parcel(&mut self) {
        if let Some(Parcel { row, blocks }) = self.parcel.take() {
            self.send(row, blocks);
        }
    }

    /// Announces marked blocks to their row's owner, and sees to it that there is one to collect them.
    pub(super) fn send(&mut self, row: RowRef, blocks: u64) {
        let freed = row.announce(blocks);
        // Second frees; both have been counted.
        self.late += u64::from(freed.late);
        self.count.correct(u64::from(freed.late));
        if freed.first {
            let adopted = row.lacks_owner() && self.adopt(row);
            if !adopted && !row.is_in_depot() {
                // Not needed for the depot: an owner that gets a row from there collects.
                self.remote_frees = self.remote_frees.wrapping_add(1);
                self.unrelieved = true;
            }
        }
    }
}
