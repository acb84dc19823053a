//! [`Owner`]: one owner's part of a pool: its stash, its current row, and the other rows that it owns.
//!
//! Blocks are allocated from the [stash](super::stash) and the [current row](super::current), and freed to them. When the current
//! row is empty, or frees in order reach another row, that other row becomes the current one; a block of any other row is
//! only added to it, and the row moves to another list when it has become more or less full than that list is for. When the
//! owner has no row to allocate from, or too many, rows are exchanged with the depot, sixteen at a time.

mod aside;
#[cfg(all(test, not(loom)))]
mod audit;

use super::current::Current;
use super::geometry::Geometry;
use super::list::List;
use super::row::{Fill, ROW, ROW_BLOCKS, ROW_SHIFT, RemoteFree};
use super::row_ref::RowRef;
use super::stash::{STASH, Site, Stash};
use super::state::{Form, FreeRefusal};
use super::terms::{Tally, Terms};

/// The most rows that an owner moves to the depot at a time.
const SURPLUS: usize = 32;
/// How many of its open rows an owner checks for remote frees when its current row changes.
const SWEEP: usize = 2;
/// How many spent rows an owner releases at a time: two for each that it can have used up since the last time.
const RELEASED: usize = 2 * ROW;

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
    /// The blocks that were freed last, one at a time.
    pub(super) stash: Stash,
    pub(super) current: Current,
    /// The list that the current row is still in.
    listed: Listed,
    /// The row that a block outside the current row was freed into last.
    last_freed: Option<RowRef>,
    /// Rows without a free block.
    spent: List,
    /// Rows with some free blocks.
    pub(super) open: List,
    /// Rows most of whose blocks are free, but not all.
    pub(super) sparse: List,
    /// Rows all of whose blocks are free.
    pub(super) whole: List,
    /// The terms as last read from the depot.
    terms: Terms,
    /// Remote frees to rows of other owners that have not been announced to the depot.
    pub(super) remote_frees: u32,
    /// The last announcement of remote frees that the owner has read, and how many open rows it has yet to check for them.
    notices: u32,
    sweep: usize,
    /// Blocks allocated less blocks freed since the last [`tally`](Self::tally).
    pub(super) used: i64,
    /// The maximum of `used` since then.
    pub(super) peak: i64,
    /// Second frees that were found when remote frees were collected.
    late: u64,
    /// Debug mode: blocks are allocated and freed one at a time, never by the fast paths.
    watched: bool,
    /// The caller's name for this owner, for reports of debug mode.
    pub(super) tag: &'static str,
}

/// The list that the current row is in: never `sparse` or `whole`, from which rows move to the depot.
#[derive(Clone, Copy, Default, Debug)]
enum Listed {
    #[default]
    Nowhere,
    Spent,
    Open,
}

impl Owner {
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            stash: Stash::new(STASH),
            current: Current::default(),
            listed: Listed::default(),
            last_freed: None,
            spent: List::default(),
            open: List::default(),
            sparse: List::default(),
            whole: List::default(),
            terms: Terms::default(),
            remote_frees: 0,
            notices: 0,
            sweep: 0,
            used: 0,
            peak: 0,
            late: 0,
            watched: false,
            tag: "",
        }
    }

    /// The same in debug mode.
    pub(super) fn watched(self) -> Self {
        Self { watched: true, stash: Stash::new(0), ..self }
    }

    /// Frees a block: locally if this owner has or adopts its row, else remotely. The row becomes the current one if the free
    /// before was into it too, if the block is its first or last, or if there is nothing else to allocate from next. Otherwise
    /// the block goes to the stash, or is only marked in its row: frees in random order do not switch.
    ///
    /// # Errors
    /// [`FreeRefusal`] if it is not allocated in this form; then no block's state has changed.
    pub(super) fn free(&mut self, geometry: &Geometry, site: Site, form: Form) -> Result<(), FreeRefusal> {
        let Site { row, bit, .. } = site;
        if !self.current.is(row) {
            // First: wrong frees must not collect rows.
            if !row.is_allocated_as(bit, form) {
                return Err(row.refusal(bit));
            }
            let owned = row.is_owned_by(self.id);
            if !(owned || row.is_unowned() && row.adopt(self.id)) {
                return self.remote_free(row, bit, form);
            }
            // A pass in order, up or down, starts a row with its first or its last block. The model's rows have no others.
            let in_order = !cfg!(loom) && (bit == 0 || u64::from(bit) + 1 == row.blocks());
            let again = self.last_freed.replace(row) == Some(row);
            if !again && !in_order && (self.stash.has_room() || self.current.first().is_some()) {
                if !owned {
                    self.receive(row);
                    self.limit_spent();
                }
                return self.free_aside(site, form);
            }
            let listed = if owned { self.unlist_current(row) } else { Listed::Nowhere };
            self.make_current(geometry, row, ROW, listed);
        }
        // Checked again: a remote free of the same block may have been collected since the check above.
        if !row.is_allocated_as(bit, form) {
            return Err(row.refusal(bit));
        }
        row.set_free(bit);
        self.put(1 << bit, 1);
        Ok(())
    }

    /// Makes a row the current one, with at most `most` of its free blocks. It may stay in its list.
    fn make_current(&mut self, geometry: &Geometry, row: RowRef, most: usize, listed: Listed) {
        self.leave_current();
        self.collect(row);
        row.unsettle();
        self.current = Current::new(geometry, row, most, self.watched);
        self.listed = listed;
        // After that: the row may be the oldest of `spent`, which must not be released while it is the current one.
        self.limit_spent();
    }

    /// Removes a row of the owner from the lists that the current row cannot be in; returns where it still is.
    fn unlist_current(&mut self, row: RowRef) -> Listed {
        match row.fill(self.terms.sparse_eighths) {
            Fill::Spent => Listed::Spent,
            Fill::Open => Listed::Open,
            Fill::Sparse => {
                self.sparse.remove(row);
                Listed::Nowhere
            }
            Fill::Whole => {
                self.whole.remove(row);
                Listed::Nowhere
            }
        }
    }

    /// Moves the current row to the list for its fill; there is no current row afterwards. Of 64 frees in random rows only
    /// two move a row: the first, and the one that makes it whole.
    pub(super) fn leave_current(&mut self) {
        let Some(row) = self.current.leave() else { return };
        let fill = row.settle(self.terms.sparse_eighths);
        match core::mem::take(&mut self.listed) {
            Listed::Open if fill == Fill::Open => return,
            Listed::Open => self.open.remove(row),
            Listed::Spent if fill == Fill::Spent => return,
            Listed::Spent => self.spent.remove(row),
            Listed::Nowhere => {}
        }
        self.add_to(fill, row);
    }

    /// The block that is allocated next, if the current row has one.
    pub(super) fn next(&self, geometry: &Geometry) -> Option<u64> {
        self.current.first().map(|(_, bit)| self.current.offset_of(geometry, bit))
    }

    /// Frees a block in a row of another owner.
    fn remote_free(&mut self, row: RowRef, bit: u32, form: Form) -> Result<(), FreeRefusal> {
        let remote_freed = row.remote_free(bit, form)?;
        if remote_freed.late {
            self.late += 1;
        } else {
            self.used -= 1;
        }
        self.after_remote_free(row, &remote_freed);
        Ok(())
    }

    /// Sees to it that what was freed in a row of another owner is collected.
    fn after_remote_free(&mut self, row: RowRef, freed: &RemoteFree) {
        if freed.first {
            if row.lacks_owner() && row.adopt(self.id) {
                self.receive(row);
            } else if !row.is_in_depot() {
                // Not needed for the depot: an owner that gets a row from there collects.
                self.remote_frees = self.remote_frees.wrapping_add(1);
            }
        }
    }

    /// Adds a row that this owner has just got to the list for its fill.
    pub(super) fn receive(&mut self, row: RowRef) {
        self.collect(row);
        if row.is_whole() {
            // In ascending order, like fresh ones.
            self.whole.push_back(row);
        } else {
            self.enlist(row);
        }
    }

    fn enlist(&mut self, row: RowRef) {
        let fill = row.settle(self.terms.sparse_eighths);
        self.add_to(fill, row);
    }

    /// Adds a row, settled for this fill, to its list.
    fn add_to(&mut self, fill: Fill, row: RowRef) {
        match fill {
            Fill::Spent => self.spent.push_front(row),
            Fill::Open => self.open.push_front(row),
            Fill::Sparse => self.sparse.push_front(row),
            Fill::Whole => self.whole.push_front(row),
        }
    }

    fn collect(&mut self, row: RowRef) {
        let late = row.collect();
        self.late += late;
        // Counted as frees when they were made.
        self.used += late.cast_signed();
    }

    /// Makes the next row with free blocks the current one, when that has none left. `false` if there is none.
    pub(super) fn refill(&mut self, geometry: &Geometry) -> bool {
        self.leave_current();
        self.release(RELEASED);
        let row = loop {
            let Some(row) = self.pop_free() else {
                // Any spent row may have remote frees, so all are checked. Each check removes a row from the list, so its cost
                // is amortised by what added the row.
                if self.spent.len() == 0 {
                    return false;
                }
                self.release(RELEASED);
                continue;
            };
            break row;
        };
        self.make_current(geometry, row, if self.watched { 1 } else { ROW }, Listed::Nowhere);
        true
    }

    /// A row with free blocks: the fullest first, so that the emptier ones become whole.
    pub(super) fn pop_free(&mut self) -> Option<RowRef> {
        self.open.pop_front().or_else(|| self.sparse.pop_front()).or_else(|| self.whole.pop_front())
    }

    /// A row to move to the depot: a whole one, or the sparse one least recently freed into.
    pub(super) fn pop_surplus(&mut self) -> Option<RowRef> {
        self.whole.pop_front().or_else(|| self.sparse.pop_back())
    }

    /// Releases rows all of whose blocks are allocated: the oldest, at most `most`. Keeps the current row, which may be
    /// in that list while blocks of it are free.
    pub(super) fn release(&mut self, most: usize) {
        for _ in 0..most {
            let Some(row) = self.spent.pop_back() else { return };
            if self.current.is(row) {
                self.spent.push_front(row);
            } else if !row.release(self.id) {
                self.receive(row);
            }
        }
    }

    /// Updates what the owner may have and how many remote frees were announced in the pool. After new ones it checks its
    /// open rows, a few each time: otherwise remote frees would stay in a row whose owner only frees in other rows.
    /// Constant time, except twice in the life of an owner, when it is proportional to its rows.
    pub(super) fn update_terms(&mut self, terms: Terms, notices: u32) {
        let stricter = terms.sparse_eighths != self.terms.sparse_eighths;
        self.terms = terms;
        if stricter {
            self.collect_open(self.open.len());
        }
        if notices != self.notices {
            self.notices = notices;
            self.sweep = self.open.len();
        }
        let some = SWEEP.min(self.sweep);
        self.sweep -= some;
        self.collect_open(some);
    }

    /// Collects the remote frees of this many open rows, the oldest first, and moves the rows to the list for their fill.
    fn collect_open(&mut self, rows: usize) {
        for _ in 0..rows {
            let Some(row) = self.open.pop_back() else { return };
            if self.current.is(row) {
                self.open.push_front(row);
            } else {
                self.collect(row);
                self.enlist(row);
            }
        }
    }

    /// Returns how many sparse and whole rows should move to the depot: half, if there are more than the terms allow.
    #[inline]
    pub(super) fn surplus(&self) -> usize {
        let free = self.sparse.len() + self.whole.len();
        let keep = self.terms.keep;
        if free > keep { (free - keep / 2).min(SURPLUS) } else { 0 }
    }

    /// Returns the stash and the current row, and releases the spent rows; those in `open`, `sparse` and `whole` are for the
    /// depot.
    pub(super) fn retire(&mut self) {
        self.empty_stash();
        self.leave_current();
        while let Some(row) = self.spent.pop_front() {
            if !row.release(self.id) {
                self.receive(row);
            }
        }
    }

    /// Returns and resets the counts since the last tally.
    pub(super) fn tally(&mut self) -> Tally {
        let tally = Tally { in_use: self.used, peak: self.peak, late: self.late };
        (self.used, self.peak, self.late) = (0, 0, 0);
        tally
    }
}

/// The row of block `index` of a chunk, and its bit there.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "an index is below 2^31")]
    ((index >> ROW_SHIFT) as usize, index as u32 & (ROW_BLOCKS - 1))
}
