//! One owner's side of a pool: the row that it draws from, and the other rows that it keeps.
//!
//! Blocks go to and fro between the program and the [current row](super::current). When that has none left, another
//! one takes its place; when a block of another row is freed, that row does. When the owner has no row to draw from or
//! too many, rows are exchanged with the depot, sixteen at a time.

mod quick;

use super::current::Current;
use super::geometry::Geometry;
use super::list::List;
use super::row::{FIRST_OWNER, ROW, ROW_BLOCKS, ROW_SHIFT, RowRef};

/// How many whole rows an owner keeps before it gives half of them to the depot.
const WHOLE_ROWS: usize = 32;
/// How many rows an owner lets go of at a time: two for each that it can have used up since it did so last.
const LET_GO: usize = 2 * ROW;

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
    current: Current,
    /// The list in which the current row stands meanwhile.
    stands: Stands,
    /// Rows with nothing to draw: their blocks are out.
    spent: List,
    /// Rows with something to draw.
    pub(super) open: List,
    /// Rows all of whose blocks can be drawn.
    pub(super) whole: List,
    /// How many more blocks were handed out than taken back since the last [`tally`](Self::tally) ...
    used: i64,
    /// ... and the most that this was since.
    peak: i64,
    /// How many second frees were found when posts were collected.
    late: u64,
    /// Debug mode: one block at a time, straight from its row and back to it, and never by the quick paths.
    watched: bool,
    /// What the caller calls this owner, for reports of debug mode.
    pub(super) tag: &'static str,
}

/// Where the current row stands: in `whole` it never does, for from there rows go to the depot.
#[derive(Clone, Copy, Default, Debug)]
enum Stands {
    #[default]
    Nowhere,
    Spent,
    Open,
}

/// What an owner tells the pool when it meets the depot.
#[derive(Default, Debug)]
pub(super) struct Tally {
    /// How many more blocks the owner has brought into use than out of it since it told last.
    pub(super) in_use: i64,
    /// The most that this was meanwhile.
    pub(super) peak: i64,
    /// How many second frees were found late.
    pub(super) late: u64,
}

impl Owner {
    pub(super) fn new(id: u32) -> Self {
        Self {
            id,
            current: Current::default(),
            stands: Stands::default(),
            spent: List::default(),
            open: List::default(),
            whole: List::default(),
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

    /// Whether this is the pool's own owner, which was enrolled first.
    pub(super) fn is_house(&self) -> bool {
        self.id == FIRST_OWNER
    }

    /// Frees a block that was found: as the keeper of its row, which is the current one afterwards, or by a post to
    /// whoever is. `false` where it is not in use.
    #[must_use]
    pub(super) fn free(&mut self, geometry: &Geometry, row: RowRef, bit: u32) -> bool {
        if !self.current.is(row) {
            let kept = row.is_kept_by(self.id);
            if !(kept || row.is_nobodys() && row.adopt(self.id)) {
                return self.post(row, bit);
            }
            if !row.is_live(bit) {
                if !kept {
                    self.receive(row);
                }
                return false;
            }
            let stands = match kept {
                false => Stands::Nowhere,
                // Not among the whole ones: one block of it is in use.
                true if row.avail() == 0 => Stands::Spent,
                true => Stands::Open,
            };
            self.turn_to(geometry, row, ROW, stands);
        }
        // Also after the look above: a post of the same block may have been collected on the way here.
        let live = row.is_live(bit);
        if live {
            row.set_free(bit);
            self.put(1 << bit, 1);
        }
        live
    }

    /// The same without a look at whether it is in use.
    pub(super) fn free_unchecked(&mut self, geometry: &Geometry, row: RowRef, bit: u32) -> bool {
        row.hand_out(bit);
        self.free(geometry, row, bit)
    }

    /// Makes a row the current one, with at most so many of its blocks to draw. It may go on standing where it stands.
    fn turn_to(&mut self, geometry: &Geometry, row: RowRef, most: usize, stands: Stands) {
        self.settle();
        self.collect(row);
        self.current = Current::new(geometry, row, most, self.watched);
        self.stands = stands;
    }

    /// Enters the current row into the list where it belongs; there is none afterwards. Of 64 frees in random rows each
    /// this moves two: the first, and the one that makes the row whole.
    pub(super) fn settle(&mut self) {
        let Some(row) = self.current.leave() else { return };
        let is_open = row.avail() != 0 && !row.is_whole();
        match core::mem::take(&mut self.stands) {
            Stands::Open if is_open => return,
            Stands::Open => self.open.remove(row),
            Stands::Spent if row.avail() == 0 => return,
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
    fn post(&mut self, row: RowRef, bit: u32) -> bool {
        let Some(posted) = row.post(bit) else { return false };
        if posted.late {
            self.late += 1;
        } else {
            self.used -= 1;
        }
        if posted.first && row.was_abandoned() && row.adopt(self.id) {
            self.receive(row);
        }
        true
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
        if row.is_whole() {
            self.whole.push_front(row);
        } else if row.avail() != 0 {
            self.open.push_front(row);
        } else {
            self.spent.push_front(row);
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
        self.let_go();
        let Some(row) = self.open.pop_front().or_else(|| self.whole.pop_front()) else { return false };
        self.turn_to(geometry, row, if self.watched { 1 } else { ROW }, Stands::Nowhere);
        true
    }

    /// Lets go of rows that have nothing left: all their blocks are out.
    fn let_go(&mut self) {
        for _ in 0..LET_GO {
            let Some(row) = self.spent.pop_front() else { return };
            if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    /// How many whole rows should go to the depot.
    #[inline]
    pub(super) fn surplus(&self) -> usize {
        if self.whole.len() > WHOLE_ROWS { WHOLE_ROWS / 2 } else { 0 }
    }

    /// Puts everything back into the rows and lets go of those that have nothing; what is left in `open` and
    /// `whole` is for the depot.
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
