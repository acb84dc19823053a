//! One owner's side of a pool: a magazine of free blocks, and the rows that they come from and go back to.
//!
//! Blocks go to and fro between the program and the magazine; when that is empty or full, half of it is exchanged with
//! the owner's own rows; when those are none or too many, rows are exchanged with the depot, sixteen at a time.
//! A block in the magazine always belongs to a row that this owner keeps.

use super::geometry::Geometry;
use super::row::{FIRST_OWNER, List, ROW, ROW_BLOCKS, ROW_SHIFT, RowRef};
use crate::magazine::Magazine;

/// How many blocks are exchanged between the magazine and the rows at a time.
const HALF: usize = ROW;
/// How many whole rows an owner keeps before it gives half of them to the depot.
const WHOLE_ROWS: usize = 32;
/// How many rows an owner lets go of at a time: two for each that it can have used up since it did so last.
const LET_GO: usize = 2 * ROW;

/// A free block in a magazine.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Held {
    row: RowRef,
    /// The block's offset in the span, shifted by [`ROW_SHIFT`], and its bit in the row.
    at: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) id: u32,
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
            magazine: Magazine::new(),
            spent: List::default(),
            open: List::default(),
            whole: List::default(),
            drawn: 0,
            low: 0,
            counted: 0,
            peak: 0,
            late: 0,
        }
    }

    /// Whether this is the pool's own owner, which was enrolled first.
    pub(super) fn is_house(&self) -> bool {
        self.id == FIRST_OWNER
    }

    /// A free block's offset in the span, now handed out; `None` where the magazine is empty.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<u64> {
        let held = self.magazine.pop()?;
        self.low = self.low.min(self.magazine.len());
        #[expect(clippy::cast_possible_truncation, reason = "the bits of a row's number of blocks")]
        held.row.hand_out(held.at as u32 & (ROW_BLOCKS - 1));
        Some(held.at >> ROW_SHIFT)
    }

    /// Takes back a block of a row that this owner keeps. `false` where it is not in use.
    ///
    /// The magazine must have room.
    #[inline(always)]
    #[must_use]
    pub(super) fn push(&mut self, row: RowRef, bit: u32, offset: u64) -> bool {
        row.take_back(bit)
            && self.magazine.push(Held { row, at: offset << ROW_SHIFT | u64::from(bit) }).is_ok()
    }

    /// Whether the magazine can not take another block until it is [flushed](Self::flush).
    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.magazine.room() == 0
    }

    /// Frees a block of a row that this owner does not keep: as its new keeper, or by a post to the one it has.
    /// `false` where it is not in use. The magazine must have room.
    #[cold]
    #[must_use]
    pub(super) fn free_elsewhere(&mut self, row: RowRef, bit: u32, offset: u64) -> bool {
        if row.is_nobodys() && row.adopt(self.id) {
            self.receive(row);
            return self.push(row, bit, offset);
        }
        let Some(posted) = row.post(bit) else { return false };
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
        while self.magazine.len() < HALF / 2 {
            let Some(row) = self.open.pop_front().or_else(|| self.whole.pop_front()) else { break };
            self.collect(row);
            self.draw(geometry, row);
            self.spent.push_front(row);
        }
        self.low = self.magazine.len();
        self.low != 0
    }

    /// Moves all that a row has into the magazine, the first on top. There is room: less than a quarter was full.
    fn draw(&mut self, geometry: &Geometry, row: RowRef) {
        let mut avail = row.avail();
        row.set_avail(0);
        let drawn = avail.count_ones();
        while avail != 0 {
            let bit = avail.ilog2();
            avail &= !(1 << bit);
            let offset = row.chunk() + geometry.offset_of(row.first_index() + u64::from(bit));
            let pushed = self.magazine.push(Held { row, at: offset << ROW_SHIFT | u64::from(bit) });
            debug_assert!(pushed.is_ok(), "a row fits in half a magazine");
        }
        self.drawn += i64::from(drawn);
    }

    /// Lets go of rows that have nothing left. The magazine is empty, so all their blocks are out.
    fn let_go(&mut self) {
        for _ in 0..LET_GO {
            let Some(row) = self.spent.pop_front() else { return };
            if !row.let_go(self.id) {
                self.receive(row);
            }
        }
    }

    /// Puts half of the full magazine back into the rows.
    pub(super) fn flush(&mut self) {
        self.note_peak();
        self.put_back(HALF);
        self.low = self.magazine.len();
    }

    fn put_back(&mut self, blocks: usize) {
        let Self { magazine, spent, open, whole, drawn, .. } = self;
        for held in magazine.pop_slice(blocks) {
            let row = held.row;
            let before = row.avail();
            row.set_avail(before | 1 << (held.at & (ROW as u64 - 1)));
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
            *drawn -= 1;
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

/// A row and a bit of it for block `index` of a chunk.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "an index is below 2^31")]
    ((index >> ROW_SHIFT) as usize, index as u32 & (ROW_BLOCKS - 1))
}

/// The largest span: more than 32 bits can number frames of, and an offset in it fits in a [`Held`].
pub(super) const LARGEST_SPAN: u64 = 1 << 48;
const _: () = assert!(LARGEST_SPAN.leading_zeros() >= ROW_SHIFT);
