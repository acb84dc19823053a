//! One owner's side of a pool: a magazine of free blocks, and the rows that they come from and go back to.
//!
//! Blocks go to and fro between the program and the magazine; when that is empty or full, half of it is exchanged with
//! the owner's own rows; when those are none or too many, rows are exchanged with the depot, sixteen at a time.
//! A block in the magazine always belongs to a row that this owner keeps.

use super::geometry::{Divider, Geometry};
use super::row::{FIRST_OWNER, List, ROW, ROW_BLOCKS, ROW_SHIFT, RowRef, Slot};
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

/// The row of the block that was freed or drawn last: the next one to be freed is often of the same row, and is then
/// found without the directory. This owner keeps it, or it has no blocks.
#[derive(Clone, Copy, Default, Debug)]
struct Recent {
    /// Where its first block is, in bytes after the start of the span.
    offset: u64,
    /// How many blocks it has; 0 where there is none, or where they do not lie evenly.
    blocks: u64,
    size: u64,
    by_size: Divider,
    row: RowRef,
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
        held.slot.row().hand_out(held.slot.bit());
        Some(held.offset)
    }

    /// Takes back the block at `offset` if it is one of the recent row's, in use, and there is room for it.
    ///
    /// `false` says nothing about the block: it has to be looked up.
    #[inline(always)]
    pub(super) fn push_recent(&mut self, offset: u64) -> bool {
        let Recent { offset: start, blocks, size, by_size, row } = self.recent;
        let within = offset.wrapping_sub(start);
        let index = by_size.quotient(within);
        // Whatever the quotient of something too large is: this proves it right.
        if index >= blocks || index * size != within {
            return false;
        }
        #[expect(clippy::cast_possible_truncation, reason = "less than a row's blocks")]
        let slot = Slot::new(row, index as u32);
        if !row.is_live(slot.bit()) || self.magazine.push(Held { slot, offset }).is_err() {
            return false;
        }
        // No second look: what was posted in between is found when it is collected (see `row`).
        row.set_free(slot.bit());
        true
    }

    /// Remembers a row that this owner keeps as the recent one.
    fn remember(&mut self, geometry: &Geometry, row: RowRef) {
        self.recent = Recent {
            offset: row.chunk() + geometry.offset_of(row.first_index()),
            blocks: if geometry.is_even() { row.blocks() } else { 0 },
            size: geometry.size(),
            by_size: geometry.by_size(),
            row,
        };
    }

    /// Forgets it, because rows are going to be let go.
    pub(super) fn forget(&mut self) {
        self.recent.blocks = 0;
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

    /// Whether the magazine can not take another block until it is [flushed](Self::flush).
    pub(super) fn is_full(&self) -> bool {
        self.magazine.room() == 0
    }

    /// Frees a block of a row that another keeps.
    fn post(&mut self, row: RowRef, bit: u32) -> bool {
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
            let pushed = self.magazine.push(Held { slot: Slot::new(row, bit), offset });
            debug_assert!(pushed.is_ok(), "a row fits in half a magazine");
        }
        self.drawn += i64::from(drawn);
        self.remember(geometry, row);
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

    /// Puts half of the full magazine back into the rows.
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

/// A row and a bit of it for block `index` of a chunk.
#[inline(always)]
pub(super) fn split(index: u64) -> (usize, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "an index is below 2^31")]
    ((index >> ROW_SHIFT) as usize, index as u32 & (ROW_BLOCKS - 1))
}
