//! The fast paths: blocks of the stash and of the owner's rows, by plain loads and stores.

use super::bits::lowest;
use super::current::Run;
use super::geometry::Geometry;
use super::owner::Owner;
use super::pool::Place;
use super::raw::RawBlock;
use super::row::ROW;
use super::stash::{Site, Stashed};
use super::state::Form;
use crate::sync::lot::LOT;
use core::hint::cold_path;

impl Owner {
    /// Allocates a block and returns its offset in the span; `None` if neither the stash nor the current row has one.
    #[inline(always)]
    pub(super) fn pop(&mut self, geometry: &Geometry, form: Form) -> Option<u64> {
        self.pop_stashed(form).or_else(|| self.pop_current(geometry, form))
    }

    /// The same from the stash.
    #[inline(always)]
    pub(super) fn pop_stashed(&mut self, form: Form) -> Option<u64> {
        let Stashed { offset, spot } = match self.stash.pop_counted() {
            Some(block) => block,
            None => self.pop_uncounted()?,
        };
        spot.state().set_allocated(form);
        Some(offset)
    }

    /// Takes a block from the stash that [`pop_counted`](super::stash::Stash::pop_counted) does not return.
    #[inline(always)]
    fn pop_uncounted(&mut self) -> Option<Stashed> {
        if self.stash.is_empty() {
            return None;
        }
        // Laid out apart from the rest, not rare.
        cold_path();
        let block = self.stash.pop()?;
        self.note_floor();
        Some(block)
    }

    /// The same from the current row, if the stash is empty.
    #[inline(always)]
    pub(super) fn pop_current(&mut self, geometry: &Geometry, form: Form) -> Option<u64> {
        let (row, bit) = self.current.first()?;
        self.current.drop_first();
        self.count.take();
        let offset = self.current.offset_of_next(geometry, bit);
        // Last: after a store into the row nothing of the owner is known to be in registers any more.
        row.set_allocated(bit, form);
        Some(offset)
    }

    /// Allocates raw blocks that are neighbours, at most `most`: of the current row, or all of a row that is whole. `None` if
    /// the current row has no free block, and no such row is the owner's next one, or it has more than `most`.
    #[inline(always)]
    pub(super) fn pop_run(&mut self, geometry: &Geometry, most: usize) -> Option<Run> {
        let Some(mut run) = self.current.first_run(geometry) else {
            return self.pop_whole(geometry, most);
        };
        run.len = run.len.min(most);
        self.current.drop_first_of(&run);
        run.row.allocate_run(run.first, run.len);
        self.count_out(run.len);
        Some(run)
    }

    /// Frees the block at `offset` to the current row, if it is in it. Frees in turn are often of neighbours, and such a block need
    /// not be looked up. On `false` nothing has changed.
    #[inline(always)]
    pub(super) fn push_current(&mut self, geometry: &Geometry, offset: u64, form: Form) -> bool {
        let Some((row, bit)) = self.current.find(geometry, offset) else { return false };
        if !row.is_allocated_as(bit, form) {
            return false;
        }
        self.current.put(1 << bit);
        self.count.give(1);
        row.set_free(bit);
        true
    }

    /// Frees a block that was looked up to the stash, from which the last one was popped, if its row is this owner's. On `false`
    /// nothing has changed. In debug mode never.
    #[inline(always)]
    pub(super) fn push_first(&mut self, site: Site, form: Form) -> bool {
        if !self.may_push(site, form) {
            return false;
        }
        self.stash.push_first(Stashed::from(site));
        site.row.set_free(site.bit);
        true
    }

    /// Frees a block that was looked up, after one that is at the top of the stash, if its row is this owner's and stays in its
    /// list: to the stash, or if that is full to the row, unless that is the current one. On `false` nothing has changed. In debug mode never.
    #[inline(always)]
    pub(super) fn push_next(&mut self, site: Site, form: Form) -> bool {
        let Site { row, bit, .. } = site;
        if !self.may_push(site, form) {
            return false;
        }
        if !self.stash.is_full_below() {
            self.stash.push_next(Stashed::from(site));
        } else if row.put_settled(1 << bit, 1) {
            self.count.give(1);
        } else {
            return false;
        }
        row.set_free(bit);
        true
    }

    /// The same after any call.
    pub(super) fn push(&mut self, site: Site, form: Form) -> bool {
        if self.stash.has_top() { self.push_next(site, form) } else { self.push_first(site, form) }
    }

    /// Only the row's owner may free by a store. Not checked again before that: a remote free in between is found when it is
    /// collected (see `row`).
    #[inline(always)]
    fn may_push(&self, Site { row, bit, .. }: Site, form: Form) -> bool {
        row.is_owned_by(self.fast_id) && row.is_allocated_as(bit, form)
    }

    /// Frees the first of at most `most` neighbouring raw blocks of a row, up to one that is not allocated, if the row is this
    /// owner's or has none. Returns how many. In debug mode none.
    #[inline(always)]
    pub(super) fn push_run(&mut self, site: Site, most: usize) -> usize {
        let Site { row, bit, .. } = site;
        if !row.is_owned_by(self.fast_id) && !self.adopt_for_run(row, bit) {
            return 0;
        }
        let freed = row.free_run(bit, most);
        if freed != 0 {
            self.put_aside(row, lowest(freed) << bit, freed);
            self.count.give(freed);
        }
        freed
    }

    /// Counts blocks that were taken from a row, and not by way of the stash.
    #[inline(always)]
    pub(super) fn count_out(&mut self, blocks: usize) {
        self.recount();
        self.count.take_many(blocks, self.floor);
    }

    /// From now on the peak is a new one whenever there are fewer blocks in the stash than now.
    #[inline(always)]
    pub(super) fn recount(&mut self) {
        self.floor = self.stash.len();
        self.stash.recount();
    }

    /// Notes a block that has left the stash. Only where there are fewer in it than before can more be in use than before.
    #[inline(always)]
    fn note_floor(&mut self) {
        let left = self.stash.len();
        if left < self.floor {
            self.floor = left;
            self.count.note(left);
        }
    }
}

/// Returns how many slots from the start are empty.
#[inline(always)]
pub(super) fn empties(slots: &[Option<RawBlock>]) -> usize {
    let (lots, _) = slots.as_chunks::<LOT>();
    let is_empty = |lot: &&[Option<RawBlock>; LOT]| lot.iter().fold(true, |all, slot| all & slot.is_none());
    let empty = LOT * lots.iter().take_while(is_empty).count();
    empty + slots.iter().skip(empty).take_while(|slot| slot.is_none()).count()
}

/// Puts the blocks of a run into as many slots.
#[inline(always)]
pub(super) fn put_into(slots: &mut [Option<RawBlock>], run: &Run, place: Place<'_>) {
    let mut offset = run.offset;
    for slot in slots {
        *slot = Some(place.block_at(offset));
        offset += run.size;
    }
}

/// Returns how many entries from the start have the blocks that follow each other at distances of `size` bytes, from that of the
/// first entry on, at most as many as a row has.
#[inline(always)]
pub(super) fn neighbours<T>(
    entries: &[T],
    first: RawBlock,
    size: u64,
    block_in: impl Fn(&T) -> Option<RawBlock>,
) -> usize {
    let entries = entries.get(..ROW).unwrap_or(entries);
    let (first_addr, first_iova) = (first.addr() as u64, first.iova().raw());
    let is_at = |entry: &T, bytes: u64| {
        let (addr, iova) = (first_addr.wrapping_add(bytes), first_iova.wrapping_add(bytes));
        block_in(entry).is_some_and(|block| (block.addr() as u64 == addr) & (block.iova().raw() == iova))
    };
    let (mut same, mut bytes) = (0, 0);
    for lot in entries.as_chunks::<LOT>().0 {
        let mut all = true;
        for entry in lot {
            all &= is_at(entry, bytes);
            bytes += size;
        }
        if !all {
            break;
        }
        same += LOT;
    }
    let after =
        entries.iter().skip(same).zip((same as u64 * size..).step_by(usize::try_from(size).unwrap_or(1)));
    same + after.take_while(|&(entry, bytes)| is_at(entry, bytes)).count()
}
