//! Bulk calls, on the pool and on an owner: what is looked up for one block is used for the next.

use super::error::BulkFreeError;
use super::owner::Owner;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::state::Form;

impl<S: ChunkSource> DmaPool<S> {
    /// Fills the empty slots from an owner. Returns how many slots are full.
    #[inline]
    pub(super) fn fill_by(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        let all = slots.len();
        let place = self.place();
        let mut rest = slots;
        loop {
            let full = owner.pop_into(&self.geometry, rest, place);
            rest = rest.get_mut(full..).unwrap_or_default();
            let Some(slot) = rest.first_mut() else { return all };
            // It is empty, and so is the current row; the stash may not be.
            if let Some(offset) = owner.pop(&self.geometry, Form::Raw) {
                *slot = Some(place.block_at(offset));
            } else if self.stock(owner).is_err() {
                return rest.iter().filter(|slot| slot.is_some()).count() + all - rest.len();
            }
        }
    }

    /// Fills the empty slots with raw blocks and returns how many slots are full afterwards: fewer than all if
    /// blocks run out.
    //
    // The lock of the pool's own owner is not held while the pool grows.
    pub fn fill(&self, slots: &mut [Option<RawBlock>]) -> usize {
        let (all, place) = (slots.len(), self.place());
        let mut rest = slots;
        loop {
            {
                let mut lock = self.lock();
                loop {
                    let full = lock.pop_into(&self.geometry, rest, place);
                    rest = rest.get_mut(full..).unwrap_or_default();
                    let Some(slot) = rest.first_mut() else { return all };
                    if let Some(offset) = lock.pop(&self.geometry, Form::Raw) {
                        *slot = Some(place.block_at(offset));
                    } else if !self.restock(&mut lock) {
                        break;
                    }
                }
            }
            // The rest begins with an empty slot, and the pool has no more: the next block needs a chunk.
            let Ok(block) = self.alloc_shared(Form::Raw) else {
                return all - rest.iter().filter(|slot| slot.is_none()).count();
            };
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
            // Of another row, or wrong.
            self.free_found(owner, block, Form::Raw)
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
                self.free_found(owner, block, Form::Raw).map_err(|error| BulkFreeError { freed, error })?;
                *slot = None;
                freed += 1;
            }
            rest = after;
        }
    }
}
