//! One owner's side of a pool: the row that it draws from, and the other rows that it keeps.
//!
//! Blocks go to and fro between the program and the [current row](super::current). When that has none left, another
//! one takes its place; when a block of another row is freed, that row does. When the owner has no row to draw from or
//! too many, rows are exchanged with the depot, sixteen at a time.

use super::current::Current;
use super::geometry::Geometry;
use super::list::List;
use super::row::{Fill, Form, FreeRefusal, ROW, ROW_BLOCKS, ROW_SHIFT};
use super::row_ref::RowRef;
use super::terms::{Tally, Terms};

/// The most rows that an owner gives to the depot at a time.
const SURPLUS: usize = 32;
/// How many spent rows an owner keeps for each row that it may keep free: they hold what others post.
const SPENT: usize = 4;
/// How many of its open rows an owner looks through for posts when its current row changes.
const SWEEP: usize = 2;
/// How many rows an owner lets go of at a time: two for each that it can have used up since it did so last.
const LET_GO: usize = 2 * ROW;

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
    pub(super) current: Current,
    /// The list in which the current row stands meanwhile.
    stands: Stands,
    /// Rows with nothing to draw: their blocks are out.
    spent: List,
    /// Rows of which some blocks can be drawn.
    pub(super) open: List,
    /// Rows of which most can be drawn, but not all.
    pub(super) sparse: List,
    /// Rows all of whose blocks can be drawn.
    pub(super) whole: List,
    /// How many sparse and whole rows the owner may keep, as it heard last.
    terms: Terms,
    /// How many posts to rows of other owners the depot has not been told of.
    pub(super) posts: u32,
    /// How many notices of posts the owner has seen, and how many open rows it has yet to look through for them.
    notices: u32,
    sweep: usize,
    /// How many more blocks were handed out than taken back since the last [`tally`](Self::tally) ...
    pub(super) used: i64,
    /// ... and the most that this was since.
    pub(super) peak: i64,
    /// How many second frees were found when posts were collected.
    late: u64,
    /// Debug mode: one block at a time, straight from its row and back to it, and never by the quick paths.
    watched: bool,
    /// What the caller calls this owner, for reports of debug mode.
    pub(super) tag: &'static str,
}

/// Where the current row stands: never in `sparse` or `whole`, for from there rows go to the depot.
#[derive(Clone, Copy, Default, Debug)]
enum Stands {
    #[default]
    Nowhere,
    Spent,
    Open,
}

impl Owner {
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            current: Current::default(),
            stands: Stands::default(),
            spent: List::default(),
            open: List::default(),
            sparse: List::default(),
            whole: List::default(),
            terms: Terms::default(),
            posts: 0,
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
        Self { watched: true, ..self }
    }

    /// Frees a block that was found: as the keeper of its row, which is the current one afterwards, or by a post to
    /// the owner that is.
    ///
    /// # Errors
    /// [`FreeRefusal`] where it is not in use in this form; then no block's state has changed.
    pub(super) fn free(
        &mut self,
        geometry: &Geometry,
        row: RowRef,
        bit: u32,
        form: Form,
    ) -> Result<(), FreeRefusal> {
        if !self.current.is(row) {
            let kept = row.is_kept_by(self.id);
            if !(kept || row.is_nobodys() && row.adopt(self.id)) {
                return self.post(row, bit, form);
            }
            if !row.is_out(bit, form) {
                let refused = row.refusal(bit);
                if !kept {
                    self.receive(row);
                }
                return Err(refused);
            }
            let stands = if kept { self.stand_by(row) } else { Stands::Nowhere };
            self.turn_to(geometry, row, ROW, stands);
        }
        // Also after the look above: a post of the same block may have been collected on the way here.
        if !row.is_out(bit, form) {
            return Err(row.refusal(bit));
        }
        row.set_free(bit);
        self.put(1 << bit, 1);
        Ok(())
    }

    /// Makes a row the current one, with at most so many of its blocks to draw. It may go on standing where it stands.
    fn turn_to(&mut self, geometry: &Geometry, row: RowRef, most: usize, stands: Stands) {
        self.settle();
        self.collect(row);
        self.current = Current::new(geometry, row, most, self.watched);
        self.stands = stands;
        // After that: the row may be the oldest of `spent`, which must not be let go of while it is the current one.
        if self.spent.len() > SPENT * self.terms.keep {
            // One came, and a let-go may put one back.
            self.let_go(2);
        }
    }

    /// Where a row of the owner's stands while it is the current one.
    fn stand_by(&mut self, row: RowRef) -> Stands {
        match row.fill(self.terms.sparse_eighths) {
            Fill::Spent => Stands::Spent,
            Fill::Open => Stands::Open,
            Fill::Sparse => {
                self.sparse.remove(row);
                Stands::Nowhere
            }
            Fill::Whole => {
                self.whole.remove(row);
                Stands::Nowhere
            }
        }
    }

    /// Enters the current row into the list where it belongs; there is none afterwards. Of 64 frees in random rows each
    /// this moves two: the first, and the one that makes the row whole.
    pub(super) fn settle(&mut self) {
        let Some(row) = self.current.leave() else { return };
        let fill = row.fill(self.terms.sparse_eighths);
        match core::mem::take(&mut self.stands) {
            Stands::Open if fill == Fill::Open => return,
            Stands::Open => self.open.remove(row),
            Stands::Spent if fill == Fill::Spent => return,
            Stands::Spent => self.spent.remove(row),
            Stands::Nowhere => {}
        }
        self.enlist(row);
    }

    /// The block that is handed out next, if the current row has one.
    pub(super) fn next(&self, geometry: &Geometry) -> Option<u64> {
        self.current.first().map(|(_, bit)| self.current.offset_of(geometry, bit))
    }

    /// Frees a block of a row that another keeps.
    fn post(&mut self, row: RowRef, bit: u32, form: Form) -> Result<(), FreeRefusal> {
        let posted = row.post(bit, form)?;
        if posted.late {
            self.late += 1;
        } else {
            self.used -= 1;
        }
        if posted.first {
            if row.is_quarantined() && row.adopt(self.id) {
                self.receive(row);
            } else if !row.is_in_depot() {
                // The depot needs no notice: whoever takes a row from there collects.
                self.posts = self.posts.wrapping_add(1);
            }
        }
        Ok(())
    }

    /// Enters a row that has just become this owner's into the list where it belongs.
    pub(super) fn receive(&mut self, row: RowRef) {
        self.collect(row);
        if row.is_whole() {
            // In ascending order, as fresh ones come.
            self.whole.push_back(row);
        } else {
            self.enlist(row);
        }
    }

    fn enlist(&mut self, row: RowRef) {
        match row.fill(self.terms.sparse_eighths) {
            Fill::Spent => self.spent.push_front(row),
            Fill::Open => self.open.push_front(row),
            Fill::Sparse => self.sparse.push_front(row),
            Fill::Whole => self.whole.push_front(row),
        }
    }

    fn collect(&mut self, row: RowRef) {
        let late = row.collect();
        self.late += late;
        // Their posters counted them as freed.
        self.used += late.cast_signed();
    }

    /// Turns to the next row that has something, when the current one has nothing left. `false` where none has.
    pub(super) fn refill(&mut self, geometry: &Geometry) -> bool {
        self.settle();
        self.let_go(LET_GO);
        let row = loop {
            let Some(row) = self.pop_free() else {
                // Blocks of any spent row may have been posted: all are looked at before the owner has none. Each look
                // takes a row out of the list, so they are paid for by what brought the rows there.
                if self.spent.len() == 0 {
                    return false;
                }
                self.let_go(LET_GO);
                continue;
            };
            break row;
        };
        self.turn_to(geometry, row, if self.watched { 1 } else { ROW }, Stands::Nowhere);
        true
    }

    /// A row with something to draw: the fullest first, so that the emptier ones become whole.
    pub(super) fn pop_free(&mut self) -> Option<RowRef> {
        self.open.pop_front().or_else(|| self.sparse.pop_front()).or_else(|| self.whole.pop_front())
    }

    /// A row that goes to the depot: a whole one, or the sparse one that was freed into least recently.
    pub(super) fn pop_surplus(&mut self) -> Option<RowRef> {
        self.whole.pop_front().or_else(|| self.sparse.pop_back())
    }

    /// Lets go of rows that have nothing left, all their blocks being out: the oldest, at most so many. Keeps the current
    /// row, which may stand there while blocks of it are free.
    fn let_go(&mut self, most: usize) {
        for _ in 0..most {
            let Some(row) = self.spent.pop_back() else { return };
            if self.current.is(row) {
                self.spent.push_front(row);
            } else if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    /// Learns what the owner may keep and how many posts there were in the pool. After new ones it looks through its open
    /// rows, a few each time: what others post to a row whose keeper only frees in other rows would stay there
    /// else. Constant time, but once in the life of an owner time proportional to its rows.
    pub(super) fn hear(&mut self, terms: Terms, notices: u32) {
        let stricter = terms.sparse_eighths != self.terms.sparse_eighths;
        self.terms = terms;
        if stricter {
            self.look_through(self.open.len());
        }
        if notices != self.notices {
            self.notices = notices;
            self.sweep = self.open.len();
        }
        let some = SWEEP.min(self.sweep);
        self.sweep -= some;
        self.look_through(some);
    }

    /// Collects the posts of so many open rows, the oldest first, and enters them where they belong now.
    fn look_through(&mut self, rows: usize) {
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

    /// How many sparse and whole rows should go to the depot: where there are more than the owner may keep, half.
    #[inline]
    pub(super) fn surplus(&self) -> usize {
        let free = self.sparse.len() + self.whole.len();
        let keep = self.terms.keep;
        if free > keep { (free - keep / 2).min(SURPLUS) } else { 0 }
    }

    /// Puts everything back into the rows and lets go of those that have nothing; what is left in `open`, `sparse`
    /// and `whole` is for the depot.
    pub(super) fn retire(&mut self) {
        self.settle();
        while let Some(row) = self.spent.pop_front() {
            if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    /// What has happened since the last tally.
    pub(super) fn tally(&mut self) -> Tally {
        let tally = Tally { in_use: self.used, peak: self.peak, late: self.late };
        (self.used, self.peak, self.late) = (0, 0, 0);
        tally
    }
}

/// A row and a bit of it for block `index` of a chunk.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "an index is below 2^31")]
    ((index >> ROW_SHIFT) as usize, index as u32 & (ROW_BLOCKS - 1))
}
