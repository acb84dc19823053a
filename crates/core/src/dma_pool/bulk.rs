//! Bulk calls, on the pool and on an owner: what is looked up for one block is used for the next.

use super::error::{AllocError, BulkAllocError, BulkFreeError, FreeError};
use super::owner::Owner;
use super::pool::DmaPool;
use super::quick::{empties, neighbours, put_into};
use super::raw::RawBlock;
use super::row::ROW;
use super::source::ChunkSource;
use super::state::Form;
use alloc::vec::Vec;

impl<S: ChunkSource> DmaPool<S> {
    /// Fills the empty slots from an owner.
    ///
    /// # Errors
    /// [`AllocError`] if blocks run out; some slots are full then.
    #[inline]
    pub(super) fn fill_by(
        &self,
        owner: &mut Owner,
        slots: &mut [Option<RawBlock>],
    ) -> Result<(), AllocError> {
        let mut rest = slots;
        loop {
            let full = self.pop_into(owner, rest);
            rest = rest.get_mut(full..).unwrap_or_default();
            let Some(slot) = rest.first_mut() else { return Ok(()) };
            // It is empty, and so is the current row; the stash may not be.
            if let Some(offset) = owner.pop(&self.geometry, Form::Raw) {
                *slot = Some(self.block_at(offset));
            } else {
                self.stock(owner)?;
            }
        }
    }

    /// Fills empty slots with raw blocks of the owner's current row and its whole rows; returns how many slots from the start
    /// are full.
    #[inline(always)]
    fn pop_into(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        let place = self.place();
        let (mut full, mut empty) = (0, 0);
        loop {
            let rest = slots.get_mut(full..).unwrap_or_default();
            if empty == 0 {
                empty = empties(rest.get(..ROW).unwrap_or(rest));
            }
            if empty == 0 {
                if rest.is_empty() {
                    return full;
                }
                full += 1;
                continue;
            }
            let Some(run) = owner.pop_run(&self.geometry, empty) else { return full };
            self.relieve(owner);
            put_into(rest.get_mut(..run.len).unwrap_or_default(), &run, place);
            (full, empty) = (full + run.len, empty - run.len);
        }
    }

    /// Fills the empty slots with raw blocks and returns how many slots are full afterwards: fewer than all if
    /// blocks run out.
    //
    // The lock of the pool's own owner is not held while the pool grows.
    pub fn fill(&self, slots: &mut [Option<RawBlock>]) -> usize {
        match self.try_fill(slots) {
            Ok(()) => slots.len(),
            Err(_) => slots.len() - empty(slots),
        }
    }

    /// Fills the empty slots with raw blocks, all or none.
    ///
    /// As [`Local::fill_all`](super::Local::fill_all).
    ///
    /// # Errors
    /// As there.
    pub fn fill_all(&self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkAllocError> {
        let before = full(slots);
        self.try_fill(slots).map_err(|error| undo(slots, &before, error, |filled| self.free_slots(filled)))
    }

    fn try_fill(&self, slots: &mut [Option<RawBlock>]) -> Result<(), AllocError> {
        let mut rest = slots;
        loop {
            {
                let mut lock = self.lock();
                loop {
                    let full = self.pop_into(&mut lock, rest);
                    rest = rest.get_mut(full..).unwrap_or_default();
                    let Some(slot) = rest.first_mut() else { return Ok(()) };
                    if let Some(offset) = lock.pop(&self.geometry, Form::Raw) {
                        *slot = Some(self.block_at(offset));
                    } else if !self.restock(&mut lock) {
                        break;
                    }
                }
            }
            // The rest begins with an empty slot, and the pool has no more: the next block needs a chunk.
            let block = self.alloc_shared(Form::Raw)?;
            if let Some(slot) = rest.iter_mut().find(|slot| slot.is_none()) {
                *slot = Some(block);
            }
        }
    }

    /// Frees raw blocks.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it.
    pub fn free_bulk(&self, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        self.free_bulk_by(&mut self.lock(), blocks)
    }

    /// Frees the raw blocks in the slots, as [`fill`](Self::fill) left them, and empties the slots.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it; it and those after it stay
    /// in their slots.
    #[inline]
    pub fn free_slots(&self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkFreeError> {
        self.free_slots_by(&mut self.lock(), slots)
    }

    #[inline]
    pub(super) fn free_bulk_by(&self, owner: &mut Owner, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        self.gathering(owner, |owner| self.free_each(owner, blocks))
    }

    /// Has blocks freed by a call for many.
    #[inline(always)]
    pub(super) fn gathering<T>(&self, owner: &mut Owner, free: impl FnOnce(&mut Owner) -> T) -> T {
        owner.gather();
        let freed = free(owner);
        self.announce(owner);
        freed
    }

    /// Ends a call that has told the owner to [gather](Owner::gather).
    #[inline(always)]
    pub(super) fn announce(&self, owner: &mut Owner) {
        owner.announce();
        self.relieve(owner);
    }

    #[inline(always)]
    fn free_each(&self, owner: &mut Owner, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        let mut freed = 0;
        while let Some(&block) = blocks.get(freed) {
            let rest = blocks.get(freed..).unwrap_or_default();
            freed += self
                .free_first(owner, block, rest, |&block| Some(block))
                .map_err(|error| BulkFreeError { freed, error })?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn free_slots_by(
        &self,
        owner: &mut Owner,
        slots: &mut [Option<RawBlock>],
    ) -> Result<(), BulkFreeError> {
        self.gathering(owner, |owner| self.free_each_slot(owner, slots))
    }

    #[inline(always)]
    fn free_each_slot(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> Result<(), BulkFreeError> {
        let (mut rest, mut freed) = (slots, 0);
        while let Some(&slot) = rest.first() {
            let count = match slot {
                Some(block) => self
                    .free_first(owner, block, rest, |&slot| slot)
                    .map_err(|error| BulkFreeError { freed, error })?,
                None => 0,
            };
            freed += count;
            let (done, after) = rest.split_at_mut_checked(count.max(1)).unwrap_or_default();
            done.fill(None);
            rest = after;
        }
        Ok(())
    }

    /// Frees the first of some raw blocks, and those after it that are its neighbours in one row of this owner. Returns how many.
    #[inline(always)]
    fn free_first<T>(
        &self,
        owner: &mut Owner,
        block: RawBlock,
        entries: &[T],
        block_in: impl Fn(&T) -> Option<RawBlock>,
    ) -> Result<usize, FreeError> {
        let size = self.geometry.size();
        // In random order none has a neighbour, and a look at more of them would be in vain.
        let next = entries.get(1).and_then(&block_in);
        let in_order = next.is_some_and(|next| next.addr().wrapping_sub(block.addr()) as u64 == size);
        if in_order && self.geometry.is_even() {
            let freed = self.free_run_of(owner, block, neighbours(entries, block, size, block_in));
            if freed != 0 {
                return Ok(freed);
            }
        }
        self.free_by(owner, block, Form::Raw).map(|()| 1)
    }

    /// Frees neighbouring raw blocks, at most `most`, up to one that is not allocated, or not in a row of this owner. Returns how
    /// many.
    #[inline(always)]
    pub(super) fn free_run_of(&self, owner: &mut Owner, first: RawBlock, most: usize) -> usize {
        let site = self.place().offset_of(first).and_then(|offset| self.site_of(offset));
        let freed = site.map_or(0, |site| owner.push_run(site, most));
        self.relieve(owner);
        freed
    }
}

/// Returns how many slots are empty.
pub(super) fn empty(slots: &[Option<RawBlock>]) -> usize {
    slots.iter().filter(|slot| slot.is_none()).count()
}

/// Returns which slots are full. Allocates memory only if any is.
pub(super) fn full(slots: &[Option<RawBlock>]) -> Vec<usize> {
    slots.iter().enumerate().filter_map(|(at, slot)| slot.map(|_| at)).collect()
}

/// Has all blocks freed but those in the slots that were full `before` blocks ran out by `error`.
pub(super) fn undo(
    slots: &mut [Option<RawBlock>],
    before: &[usize],
    error: AllocError,
    mut free: impl FnMut(&mut [Option<RawBlock>]) -> Result<(), BulkFreeError>,
) -> BulkAllocError {
    let wanted = slots.len() - before.len();
    let available = wanted - empty(slots);
    let mut start = 0;
    for end in before.iter().copied().chain([slots.len()]) {
        let mut filled = slots.get_mut(start..end).unwrap_or_default();
        // Refused only if the program has freed a stale copy of the address meanwhile: then the block is no longer this call's.
        while free(filled).is_err() {
            let after = filled.iter().position(Option::is_some).unwrap_or(filled.len());
            filled = filled.get_mut(after..).unwrap_or_default();
            let Some((slot, rest)) = filled.split_first_mut() else { break };
            *slot = None;
            filled = rest;
        }
        start = end + 1;
    }
    BulkAllocError { wanted, available, error }
}
