//! [`Owner`]: one owner's part of a pool: its stash, its current row, and the other rows that it owns.
//!
//! Blocks are allocated from the [stash](super::stash) and the [current row](super::current), and when that is empty from another
//! row, which becomes the current one. A freed block goes to the stash, otherwise to its row, which moves to another list when it has
//! become more or less full than that list is for. When the owner has no row to allocate from, or too many, rows are
//! exchanged with the depot, up to 32 at a time.

mod aside;
#[cfg(all(test, not(loom)))]
mod audit;
mod count;
mod parcel;

use super::current::{Current, Run};
use super::geometry::Geometry;
use super::list::List;
use super::row::{Fill, ROW, ROW_BLOCKS, ROW_SHIFT};
use super::row_ref::RowRef;
use super::stash::{Site, Stash};
use super::state::{Form, FreeRefusal};
use super::terms::{News, Tally, Terms};
use count::Count;
use parcel::Parcel;

/// The most rows that an owner moves to the depot at a time.
const SURPLUS: usize = 32;
/// How many of its open rows an owner checks for remote frees when its current row changes.
const SWEEP: usize = 2;
/// How many spent rows an owner releases at a time: two for each that it can have used up since the last time.
const RELEASED: usize = 2 * ROW;
/// A number that no owner has.
const NOBODY: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
    /// The number by which the fast paths recognise the owner's rows: no row's owner in debug mode.
    pub(super) fast_id: u32,
    /// The blocks that were freed last, one at a time.
    pub(super) stash: Stash,
    /// In none of the lists.
    pub(super) current: Current,
    /// Rows without a free block.
    spent: List,
    /// How many of them the owner keeps when it needs another row.
    kept_spent: usize,
    /// Rows with some free blocks.
    pub(super) open: List,
    /// Rows most of whose blocks are free, but not all.
    pub(super) sparse: List,
    /// Rows all of whose blocks are free.
    pub(super) whole: List,
    /// The terms as last read from the depot.
    terms: Terms,
    /// A row has moved since the owner last exchanged rows and news with the depot.
    pub(super) unrelieved: bool,
    /// Blocks of a row of another owner that a call for many has freed so far.
    parcel: Option<Parcel>,
    /// Whether such a call runs.
    gathers: bool,
    /// Remote frees to rows of other owners that have not been announced to the depot.
    pub(super) remote_frees: u32,
    /// What the owner has learnt from the depot last, and how many open rows it has yet to check for remote frees.
    news: News,
    sweep: usize,
    /// How many blocks are in use, and were at most, since the last [`tally`](Self::tally).
    pub(super) count: Count,
    /// The fewest blocks in the stash since more were last taken from rows: only below that may the peak be a new one. Never more than are in
    /// it.
    pub(super) floor: usize,
    /// Second frees that were found when remote frees were collected.
    late: u64,
    /// Debug mode: blocks are allocated and freed one at a time, never by the fast paths.
    watched: bool,
    /// The caller's name for this owner, for reports of debug mode.
    pub(super) tag: &'static str,
}

impl Owner {
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            fast_id: id,
            stash: Stash::new(),
            current: Current::default(),
            spent: List::default(),
            kept_spent: 0,
            open: List::default(),
            sparse: List::default(),
            whole: List::default(),
            terms: Terms::default(),
            unrelieved: false,
            parcel: None,
            gathers: false,
            remote_frees: 0,
            news: News::NONE,
            sweep: 0,
            count: Count::default(),
            floor: 0,
            late: 0,
            watched: false,
            tag: "",
        }
    }

    /// The same in debug mode.
    pub(super) fn watched(self) -> Self {
        Self { watched: true, fast_id: NOBODY, ..self }
    }

    /// Frees a block: locally if this owner has or adopts its row, else remotely. It goes to the stash, or to its row. The row becomes
    /// the current one if its blocks seem to be freed in order.
    ///
    /// # Errors
    /// [`FreeRefusal`] if it is not allocated in this form; then no block's state has changed.
    pub(super) fn free(&mut self, geometry: &Geometry, site: Site, form: Form) -> Result<(), FreeRefusal> {
        let Site { row, bit, .. } = site;
        // First: wrong frees must not collect rows.
        if !row.is_allocated_as(bit, form) {
            return Err(row.refusal(bit));
        }
        if !row.is_owned_by(self.id) && !self.adopt(row) {
            return self.remote_free(row, bit, form);
        }
        // A pass in order, up or down, starts a row with its first or its last block. The current row moves only as a whole.
        let is_end = bit == 0 || u64::from(bit) + 1 == row.blocks();
        if is_end && self.stash.is_full() && !self.current.is(row) && row.listed() == Fill::Spent {
            self.spent.remove(row);
            self.leave_current();
            self.make_current(geometry, row, ROW);
            self.unrelieved = true;
        }
        self.free_own(site, form)
    }

    /// Adopts the row of an allocated raw block, if it has no owner. In debug mode never.
    #[inline(never)]
    pub(super) fn adopt_for_run(&mut self, row: RowRef, bit: u32) -> bool {
        // First: wrong frees must not collect rows.
        !self.watched && row.is_allocated_as(bit, Form::Raw) && self.adopt(row)
    }

    /// Adopts a row, if it has no owner.
    fn adopt(&mut self, row: RowRef) -> bool {
        let Some(last_owner) = row.adopt(self.id) else { return false };
        self.unrelieved = true;
        if last_owner == self.id {
            // What this owner allocates it frees itself, so it need not release rows for others to adopt.
            self.kept_spent = self.terms.spent();
        }
        self.receive(row);
        self.keep_spent(self.terms.spent());
        true
    }

    /// Makes a row, which is in no list, the current one, with at most `most` of its free blocks.
    fn make_current(&mut self, geometry: &Geometry, row: RowRef, most: usize) {
        self.collect(row);
        row.unsettle();
        self.current = Current::new(geometry, row, most, self.watched);
    }

    /// Moves the current row to the list for its fill; there is no current row afterwards.
    pub(super) fn leave_current(&mut self) {
        if let Some(row) = self.current.leave() {
            self.enlist(row);
        }
    }

    /// Allocates all blocks of a row that is whole, as raw ones, if that is the next row to allocate from and has at most `most`.
    /// It does not become the current one. In debug mode never.
    #[inline(never)]
    pub(super) fn pop_whole(&mut self, geometry: &Geometry, most: usize) -> Option<Run> {
        if self.open.len() + self.sparse.len() != 0 || self.watched || !geometry.is_even() {
            return None;
        }
        let row = self.whole.front()?;
        let len = usize::try_from(row.blocks()).ok().filter(|&blocks| blocks <= most)?;
        self.whole.remove(row);
        row.set_avail(0);
        self.enlist(row);
        row.allocate_run(0, len);
        self.count_out(len);
        self.limit_spent();
        self.unrelieved = true;
        let offset = row.chunk() + geometry.offset_of(row.first_index());
        Some(Run { row, first: 0, len, offset, size: geometry.size() })
    }

    /// The block that is allocated next, if the current row has one.
    pub(super) fn next(&self, geometry: &Geometry) -> Option<u64> {
        self.current.first().map(|(_, bit)| self.current.offset_of(geometry, bit))
    }

    /// Adds a row that this owner has just got to the list for its fill.
    pub(super) fn receive(&mut self, row: RowRef) {
        self.collect(row);
        match row.settle(self.terms.sparse_eighths) {
            // In ascending order, like fresh ones.
            Fill::Whole => self.whole.push_back(row),
            fill => self.list(fill).push_front(row),
        }
    }

    /// Adds a row to the list for its fill.
    fn enlist(&mut self, row: RowRef) {
        let fill = row.settle(self.terms.sparse_eighths);
        self.list(fill).push_front(row);
    }

    fn list(&mut self, fill: Fill) -> &mut List {
        match fill {
            Fill::Spent => &mut self.spent,
            Fill::Open => &mut self.open,
            Fill::Sparse => &mut self.sparse,
            Fill::Whole => &mut self.whole,
        }
    }

    fn collect(&mut self, row: RowRef) {
        let late = row.collect();
        self.late += late;
        // Counted as frees when they were made.
        self.count.correct(late);
    }

    /// Makes the next row with free blocks the current one, when that has none left. `false` if there is none.
    pub(super) fn refill(&mut self, geometry: &Geometry) -> bool {
        self.leave_current();
        self.limit_spent();
        let Some(row) = self.pop_free().or_else(|| self.pop_collected()) else { return false };
        self.make_current(geometry, row, if self.watched { 1 } else { ROW });
        self.unrelieved = true;
        true
    }

    /// A spent row into which others have freed blocks. All are checked, and as many as the owner does not keep released: a check
    /// that removes a row from the list is amortised by what added the row, the others by the rows that the depot lends next.
    fn pop_collected(&mut self) -> Option<RowRef> {
        while self.kept_spent == 0 && self.spent.len() != 0 {
            self.release(RELEASED);
            if let Some(row) = self.pop_free() {
                return Some(row);
            }
        }
        for _ in 0..self.spent.len() {
            self.spent.pop_back().into_iter().for_each(|row| self.receive(row));
        }
        self.pop_free()
    }

    /// A row with free blocks: the fullest first, so that the emptier ones become whole.
    pub(super) fn pop_free(&mut self) -> Option<RowRef> {
        self.open.pop_front().or_else(|| self.sparse.pop_front()).or_else(|| self.whole.pop_front())
    }

    /// A row to move to the depot: a whole one, or the sparse one least recently freed into.
    pub(super) fn pop_surplus(&mut self) -> Option<RowRef> {
        self.whole.pop_front().or_else(|| self.sparse.pop_back())
    }

    /// Releases rows all of whose blocks are allocated: the oldest, at most `most`.
    pub(super) fn release(&mut self, most: usize) {
        for _ in 0..most {
            let Some(row) = self.spent.pop_back() else { return };
            if !row.release(self.id) {
                self.receive(row);
            }
        }
    }

    /// Releases the oldest spent rows, if there are more than this. A release may put one back.
    fn keep_spent(&mut self, keep: usize) {
        if self.spent.len() > keep {
            self.release((self.spent.len() - keep).min(RELEASED));
        }
    }

    /// The same with as many as the owner keeps when it needs another row.
    fn limit_spent(&mut self) {
        self.keep_spent(self.kept_spent.min(self.terms.spent()));
    }

    /// Whether there is something to [`update`](Self::update).
    #[inline(always)]
    pub(super) fn is_behind(&self, news: News) -> bool {
        news != self.news || self.sweep != 0
    }

    /// Updates what the owner may have and how many remote frees were announced in the pool. After new ones it checks its
    /// open rows, a few each time: otherwise remote frees would stay in a row whose owner only frees in other rows.
    /// Constant time, except twice in the life of an owner, when it is proportional to its rows.
    #[inline(never)]
    pub(super) fn update(&mut self, news: News) {
        let terms = news.terms();
        let stricter = terms.sparse_eighths != self.terms.sparse_eighths;
        self.terms = terms;
        if stricter {
            self.collect_open(self.open.len());
            self.keep_spent(self.terms.spent());
        }
        if news.notices != self.news.notices {
            self.sweep = self.open.len();
            // Others free what this owner has allocated: without an owner, its rows can be adopted.
            self.kept_spent = 0;
            self.limit_spent();
        }
        self.news = news;
        let some = SWEEP.min(self.sweep);
        self.sweep -= some;
        self.collect_open(some);
    }

    /// Collects the remote frees of this many open rows, the oldest first, and moves the rows to the list for their fill.
    fn collect_open(&mut self, rows: usize) {
        for _ in 0..rows {
            let Some(row) = self.open.pop_back() else { return };
            self.collect(row);
            self.enlist(row);
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
        let stashed = self.stash.len();
        let tally = Tally { in_use: self.count.used(stashed), peak: self.count.peak(), late: self.late };
        self.count.reset(stashed);
        self.late = 0;
        self.recount();
        tally
    }
}

/// A number of blocks of one call, as the counters have it.
#[inline(always)]
pub(super) fn signed(blocks: usize) -> i64 {
    i64::try_from(blocks).unwrap_or(0)
}

/// The row of block `index` of a chunk, and its bit there. What is no index has no row.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "masked")]
    let bit = index as u32 & (ROW_BLOCKS - 1);
    (usize::try_from(index >> ROW_SHIFT).unwrap_or(usize::MAX), bit)
}
