//! Bulk calls, on the pool and on an owner: what is looked up for one block is used for the next.

use super::error::{AllocError, BulkAllocError, BulkFreeError, FreeError};
use super::owner::Owner;
use super::pool::DmaPool;
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
        let place = self.place();
        let mut rest = slots;
        loop {
            let full = owner.pop_into(&self.geometry, rest, place);
            rest = rest.get_mut(full..).unwrap_or_default();
            let Some(slot) = rest.first_mut() else { return Ok(()) };
            // It is empty, and so is the current row; the stash may not be.
            if let Some(offset) = owner.pop(&self.geometry, Form::Raw) {
                *slot = Some(place.block_at(offset));
            } else {
                self.stock(owner)?;
            }
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
        let place = self.place();
        let mut rest = slots;
        loop {
            {
                let mut lock = self.lock();
                loop {
                    let full = lock.pop_into(&self.geometry, rest, place);
                    rest = rest.get_mut(full..).unwrap_or_default();
                    let Some(slot) = rest.first_mut() else { return Ok(()) };
                    if let Some(offset) = lock.pop(&self.geometry, Form::Raw) {
                        *slot = Some(place.block_at(offset));
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
        let place = self.place();
        let mut rest = blocks;
        loop {
            let quick = owner.push_many(place, rest, |&block| Some(block));
            let Some((&block, after)) = rest.get(quick..).and_then(<[RawBlock]>::split_first) else {
                return Ok(());
            };
            self.free_before(owner, block, after.first().copied())
                .map_err(|error| BulkFreeError { freed: blocks.len() - after.len() - 1, error })?;
            rest = after;
        }
    }

    #[inline]
    pub(super) fn free_slots_by(
        &self,
        owner: &mut Owner,
        slots: &mut [Option<RawBlock>],
    ) -> Result<(), BulkFreeError> {
        let place = self.place();
        let (mut rest, mut freed) = (slots, 0);
        loop {
            let quick = owner.push_many(place, rest, |&slot| slot);
            let Some((done, after)) = rest.split_at_mut_checked(quick) else { return Ok(()) };
            done.fill(None);
            freed += quick;
            let Some((slot, after)) = after.split_first_mut() else { return Ok(()) };
            if let Some(block) = *slot {
                let next = after.first().copied().flatten();
                self.free_before(owner, block, next).map_err(|error| BulkFreeError { freed, error })?;
                *slot = None;
                freed += 1;
            }
            rest = after;
        }
    }

    /// Frees a block that is not in the current row, or wrong. One far from the `next` to be freed does not need another current
    /// row: in random order each would.
    fn free_before(
        &self,
        owner: &mut Owner,
        block: RawBlock,
        next: Option<RawBlock>,
    ) -> Result<(), FreeError> {
        let row_bytes = ROW * self.block_size();
        if next.is_some_and(|next| next.addr().abs_diff(block.addr()) >= row_bytes)
            && let Some(offset) = self.place().offset_of(block)
            && self.free_aside(owner, offset, Form::Raw)
        {
            return Ok(());
        }
        self.free_found(owner, block, Form::Raw)
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
