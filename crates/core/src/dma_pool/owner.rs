//! One owner's side of a pool: a magazine of free blocks, and the rows that they come from and go back to.
//!
//! Blocks go to and fro between the program and the magazine; when that is empty or full, half of it is exchanged with
//! the owner's own rows; when those are none or too many, rows are exchanged with the depot, sixteen at a time.
//! A block in the magazine always belongs to a row that this owner keeps.

mod quick;

use super::geometry::Geometry;
use super::list::List;
use super::recent::Recent;
use super::row::{FIRST_OWNER, ROW, ROW_BLOCKS, ROW_SHIFT, RowRef, Slot};
use crate::magazine::Magazine;

/// How many blocks are exchanged between the magazine and the rows at a time.
const HALF: usize = ROW;
/// How many whole rows an owner keeps before it gives half of them to the depot.
const WHOLE_ROWS: usize = 32;
/// How many rows an owner lets go of at a time: two for each that it can have used up since it did so last.
const LET_GO: usize = 2 * ROW;

/// A free block in a magazine.
#[derive(Clone, Copy, Default, Debug)]
struct Held {
    slot: Slot,
    /// How many bytes after the start of the span.
    offset: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
    recent: Recent,
    magazine: Magazine<Held, HALF>,
    /// Rows with nothing to draw: their blocks are out, or in the magazine.
    spent: List,
    /// Rows with something to draw.
    pub(super) open: List,
    /// Rows all of whose blocks can be drawn.
    pub(super) whole: List,
    /// How many more blocks were drawn from rows than put back or posted.
    drawn: i64,
    /// The fewest blocks that were in the magazine since it was last exchanged: then the most were in use.
    low: usize,
    /// How many of this owner's blocks were in use at the last [`tally`](Self::tally) ...
    counted: i64,
    /// ... and the most that were beyond those since.
    peak: i64,
    /// How many second frees were found when posts were collected.
    late: u64,
    /// Debug mode: one block at a time, straight from its row and back to it, and never by the quick paths.
    watched: bool,
    /// What the caller calls this owner, for reports of debug mode.
    pub(super) tag: &'static str,
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
            recent: Recent::default(),
            magazine: Magazine::new(),
            spent: List::default(),
            open: List::default(),
            whole: List::default(),
            drawn: 0,
            low: 0,
            counted: 0,
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

    /// Takes back a block that was found, without a look at whether it is in use. The magazine must have room.
    pub(super) fn push_unchecked(&mut self, geometry: &Geometry, row: RowRef, bit: u32, offset: u64) -> bool {
        row.hand_out(bit);
        self.free(geometry, row, bit, offset)
    }

    /// Remembers a row that this owner keeps as the recent one.
    fn remember(&mut self, geometry: &Geometry, row: RowRef) {
        self.recent = if self.watched { Recent::default() } else { Recent::new(geometry, row) };
    }

    /// Forgets it, because rows are going to be let go.
    pub(super) fn forget(&mut self) {
        self.recent.forget();
    }

    /// Frees a block that was found: as the keeper of its row, or by a post to whoever is. `false` where it is not in
    /// use. The magazine must have room.
    #[must_use]
    pub(super) fn free(&mut self, geometry: &Geometry, row: RowRef, bit: u32, offset: u64) -> bool {
        if !row.is_kept_by(self.id) {
            if !(row.is_nobodys() && row.adopt(self.id)) {
                return self.post(row, bit);
            }
            self.receive(row);
        }
        self.remember(geometry, row);
        self.push(row, bit, offset)
    }

    /// Takes back a block of a row that this owner keeps.
    fn push(&mut self, row: RowRef, bit: u32, offset: u64) -> bool {
        let freed =
            row.is_live(bit) && self.magazine.push(Held { slot: Slot::new(row, bit), offset }).is_ok();
        if freed {
            row.set_free(bit);
        }
        freed
    }

    /// The block that is handed out next, if it is in the magazine.
    pub(super) fn next(&self) -> Option<u64> {
        self.magazine.as_slice().last().map(|held| held.offset)
    }

    /// Whether the magazine can not take another block until it is [flushed](Self::flush).
    pub(super) fn is_full(&self) -> bool {
        self.magazine.room() == 0
    }

    /// Frees a block of a row that another keeps.
    fn post(&mut self, row: RowRef, bit: u32) -> bool {
        let Some(posted) = row.post(bit) else { return false };
        // The most that were in use must be taken before fewer are.
        self.note_peak();
        self.low = self.magazine.len();
        if posted.late {
            self.late += 1;
        } else {
            self.drawn -= 1;
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
            self.whole.push_back(row);
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
        self.drawn += late.cast_signed();
    }

    /// Fills the empty magazine from the owner's own rows, up to half. `false` where they have nothing.
    ///
    /// Takes time proportional to the blocks that it draws.
    pub(super) fn refill(&mut self, geometry: &Geometry) -> bool {
        self.note_peak();
        self.let_go();
        let enough = if self.watched { 1 } else { HALF / 2 };
        while self.magazine.len() < enough {
            let Some((row, avail)) = self.take(if self.watched { 1 } else { ROW }) else { break };
            self.draw(geometry, row, avail);
        }
        self.low = self.magazine.len();
        self.low != 0
    }

    /// Takes the lowest `most` of the blocks that the next row has; which ones.
    fn take(&mut self, most: usize) -> Option<(RowRef, u64)> {
        let row = self.open.pop_front().or_else(|| self.whole.pop_front())?;
        self.collect(row);
        let avail = row.avail();
        let left = all_but_lowest(avail, most);
        row.set_avail(left);
        if left == 0 {
            self.spent.push_front(row)
        } else {
            self.open.push_front(row)
        }
        self.drawn += i64::from((avail & !left).count_ones());
        Some((row, avail & !left))
    }

    /// Moves blocks that were taken from a row into the magazine, the first on top. There is room: less than a quarter
    /// was full.
    fn draw(&mut self, geometry: &Geometry, row: RowRef, mut taken: u64) {
        let offset_of = geometry.offsets_from(row.chunk(), row.first_index());
        while taken != 0 {
            let bit = taken.ilog2();
            taken &= !(1 << bit);
            let pushed = self.magazine.push(Held { slot: Slot::new(row, bit), offset: offset_of(bit) });
            debug_assert!(pushed.is_ok(), "a row fits in half a magazine");
        }
        self.remember(geometry, row);
    }

    /// Hands out blocks of one of the owner's rows, at most `most`, past the magazine, which must be empty. Returns how
    /// many: 0 where the rows have nothing.
    pub(super) fn draw_through(
        &mut self,
        geometry: &Geometry,
        most: usize,
        mut give: impl FnMut(u64),
    ) -> usize {
        self.let_go();
        let Some((row, mut taken)) = self.take(most) else { return 0 };
        let offset_of = geometry.offsets_from(row.chunk(), row.first_index());
        let drawn = taken.count_ones() as usize;
        while taken != 0 {
            let bit = taken.trailing_zeros();
            taken &= taken - 1;
            row.hand_out(bit);
            give(offset_of(bit));
        }
        self.low = 0;
        self.remember(geometry, row);
        drawn
    }

    /// Lets go of rows that have nothing left. The magazine is empty, so all their blocks are out.
    fn let_go(&mut self) {
        self.forget();
        for _ in 0..LET_GO {
            let Some(row) = self.spent.pop_front() else { return };
            if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    /// Puts half of the full magazine back into the rows (in debug mode, all that is in it).
    pub(super) fn flush(&mut self) {
        self.note_peak();
        self.put_back(HALF);
        self.low = self.magazine.len();
    }

    /// Puts blocks back, those of one row that lie side by side in the magazine at once.
    fn put_back(&mut self, blocks: usize) {
        let Self { magazine, spent, open, whole, drawn, .. } = self;
        for run in magazine.pop_slice(blocks).chunk_by(|a, b| a.slot.row() == b.slot.row()) {
            let [first, ..] = run else { continue };
            let row = first.slot.row();
            let before = row.avail();
            row.set_avail(run.iter().fold(before, |avail, held| avail | 1 << held.slot.bit()));
            if row.is_whole() {
                if before == 0 {
                    spent.remove(row)
                } else {
                    open.remove(row)
                }
                whole.push_front(row);
            } else if before == 0 {
                spent.remove(row);
                open.push_front(row);
            }
            *drawn -= count(run.len());
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
        self.forget();
        self.note_peak();
        self.put_back(usize::MAX);
        self.low = 0;
        while let Some(row) = self.spent.pop_front() {
            if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    fn note_peak(&mut self) {
        self.peak = self.peak.max(self.drawn - count(self.low) - self.counted);
    }

    /// What has happened since the last tally.
    pub(super) fn tally(&mut self) -> Tally {
        self.note_peak();
        self.low = self.magazine.len();
        let now = self.drawn - count(self.low);
        let tally = Tally { in_use: now - self.counted, peak: self.peak.max(0), late: self.late };
        (self.counted, self.peak, self.late) = (now, 0, 0);
        tally
    }
}

fn count(blocks: usize) -> i64 {
    i64::try_from(blocks).unwrap_or(i64::MAX)
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

/// A row and a bit of it for block `index` of a chunk.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "an index is below 2^31")]
    ((index >> ROW_SHIFT) as usize, index as u32 & (ROW_BLOCKS - 1))
}
