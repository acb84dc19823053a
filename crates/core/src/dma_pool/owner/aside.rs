//! Blocks that are freed past the current row: to the stash, and to rows in the owner's lists.

use super::super::row::Fill;
use super::super::row_ref::RowRef;
use super::super::stash::Site;
use super::super::state::{Form, FreeRefusal};
use super::Owner;

impl Owner {
    /// Releases the oldest spent rows, if there are too many. Called when one was added; a release may put one back.
    pub(super) fn limit_spent(&mut self) {
        if self.spent.len() > self.terms.spent() {
            self.release(2);
        }
    }

    /// Frees a block of a row of this owner that is in one of its lists: to the stash, or to the row, which moves if it is in
    /// the wrong list then.
    #[inline]
    pub(super) fn free_aside(&mut self, site: Site, form: Form) -> Result<(), FreeRefusal> {
        let Site { row, bit, .. } = site;
        // Checked again, as in `free`.
        if !row.is_allocated_as(bit, form) {
            return Err(row.refusal(bit));
        }
        row.set_free(bit);
        self.used -= 1;
        if !self.stash.push(site) {
            self.put_aside(row, bit);
        }
        Ok(())
    }

    /// Adds a block, which is marked as free, to a row of this owner that is in one of its lists.
    fn put_aside(&mut self, row: RowRef, bit: u32) {
        if row.put_settled(bit) {
            return;
        }
        match row.fill(self.terms.sparse_eighths) {
            Fill::Spent => self.spent.remove(row),
            Fill::Open => self.open.remove(row),
            Fill::Sparse => self.sparse.remove(row),
            Fill::Whole => self.whole.remove(row),
        }
        row.set_avail(row.avail() | 1 << bit);
        self.enlist(row);
    }

    /// Returns the blocks of the stash to their rows, which may be other owners' by now.
    pub(super) fn empty_stash(&mut self) {
        while let Some(Site { row, bit, .. }) = self.stash.pop() {
            if self.current.is(row) {
                self.current.put(1 << bit);
                continue;
            }
            let owned = row.is_owned_by(self.id);
            if !owned && row.is_unowned() && row.adopt(self.id) {
                self.receive(row);
            } else if !owned {
                let returned = row.put_remotely(bit);
                if returned.late {
                    // It was freed twice, and both frees have been counted.
                    self.late += 1;
                    self.used += 1;
                }
                self.after_remote_free(row, &returned);
                continue;
            }
            self.put_aside(row, bit);
        }
    }

    /// Frees the block at `offset` if it is the one that the stash gave out last: the first part of [`push`](Owner::push), short
    /// enough that the drop of a block is inlined.
    #[inline(always)]
    pub(in super::super) fn push_last(&mut self, offset: u64, form: Form) -> bool {
        let Some(Site { row, bit, .. }) = self.stash.last_popped(offset) else { return false };
        if !row.is_owned_by(self.id) || !row.is_allocated_as(bit, form) {
            return false;
        }
        row.set_free(bit);
        self.stash.push_last_popped();
        self.used -= 1;
        true
    }
}
