//! Blocks that are freed to the stash, and to rows in the owner's lists.

use super::super::row_ref::RowRef;
use super::super::stash::{Site, Stashed};
use super::super::state::{Form, FreeRefusal};
use super::Owner;

impl Owner {
    /// Frees a block of a row of this owner: to the stash, or to the row.
    pub(super) fn free_own(&mut self, site: Site, form: Form) -> Result<(), FreeRefusal> {
        let Site { row, bit, .. } = site;
        // Checked again: a remote free of the same block may have been collected since the caller's check.
        if !row.is_allocated_as(bit, form) {
            return Err(row.refusal(bit));
        }
        row.set_free(bit);
        if self.watched || self.stash.is_full() {
            self.put_aside(row, 1 << bit, 1);
            self.count.give(1);
        } else {
            self.stash.push(Stashed::from(site));
        }
        Ok(())
    }

    /// Adds blocks, which are marked as free, to a row of this owner. The row moves if it is in the wrong list then.
    #[inline(always)]
    pub(in super::super) fn put_aside(&mut self, row: RowRef, blocks: u64, count: usize) {
        if self.current.is(row) {
            self.current.put(blocks);
        } else if !u32::try_from(count).is_ok_and(|count| row.put_settled(blocks, count)) {
            self.put_moving(row, blocks);
        }
    }

    /// As `put_aside`, if the row moves.
    #[inline(never)]
    fn put_moving(&mut self, row: RowRef, blocks: u64) {
        self.unrelieved = true;
        self.list(row.listed()).remove(row);
        row.set_avail(row.avail() | blocks);
        self.enlist(row);
    }

    /// Returns the blocks of the stash to their rows, which may be other owners' by now.
    pub(super) fn empty_stash(&mut self) {
        while let Some(block) = self.stash.pop() {
            self.count.give(1);
            let (row, bit) = (block.spot.row(), block.spot.bit());
            if !row.is_owned_by(self.id) && !self.adopt(row) {
                row.return_remotely(bit);
                self.send(row, 1 << bit);
                continue;
            }
            self.put_aside(row, 1 << bit, 1);
        }
    }

    /// Frees the block at `offset` if it is the one that the stash gave out last: the first part of [`push`](Owner::push), short
    /// enough that the drop of a block is inlined.
    #[inline(always)]
    pub(in super::super) fn push_last(&mut self, offset: u64, form: Form) -> bool {
        let Some(spot) = self.stash.top_at(offset) else { return false };
        if !spot.row().is_owned_by(self.id) || !spot.state().is_allocated_as(form) {
            return false;
        }
        // Not checked again: a remote free in between is found when it is collected (see `row`).
        spot.state().set_free();
        self.stash.push_top();
        true
    }
}
