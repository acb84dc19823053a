//! Many blocks at once: what is looked up for one is used for the next.

use super::owner::Owner;
use super::shared::Shared;
use super::{BulkFreeError, ChunkSource, RawBlock};

impl<S: ChunkSource> Shared<S> {
    /// Fills the empty slots; `done` sees each new block. Returns how many slots are full.
    #[inline(always)]
    fn fill_with(
        &self,
        owner: &mut Owner,
        slots: &mut [Option<RawBlock>],
        done: impl Fn(RawBlock) -> RawBlock,
    ) -> usize {
        let all = slots.len();
        let place = self.place();
        let mut rest = slots;
        loop {
            let full = owner.pop_into(&self.geometry, rest, |offset| done(place.block_at(offset)));
            rest = rest.get_mut(full..).unwrap_or_default();
            if rest.is_empty() {
                return all;
            }
            if self.stock(owner).is_err() {
                return rest.iter().filter(|slot| slot.is_some()).count() + all - rest.len();
            }
        }
    }

    #[inline]
    pub(super) fn fill(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        self.fill_with(owner, slots, |block| block)
    }

    pub(super) fn fill_zeroed(&self, owner: &mut Owner, slots: &mut [Option<RawBlock>]) -> usize {
        self.fill_with(owner, slots, |block| {
            self.zero(block);
            block
        })
    }

    #[inline]
    pub(super) fn free_bulk(&self, owner: &mut Owner, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        let place = self.place();
        let mut rest = blocks;
        loop {
            let quick = owner.push_many(rest.iter().map(|&block| place.offset_of(block)));
            let Some((&block, after)) = rest.get(quick..).and_then(<[RawBlock]>::split_first) else {
                return Ok(());
            };
            // Of another row, or wrong.
            self.free(owner, block)
                .map_err(|error| BulkFreeError { freed: blocks.len() - after.len() - 1, error })?;
            rest = after;
        }
    }

    #[inline]
    pub(super) fn free_slots(
        &self,
        owner: &mut Owner,
        slots: &mut [Option<RawBlock>],
    ) -> Result<(), BulkFreeError> {
        let place = self.place();
        let (mut rest, mut freed) = (slots, 0);
        loop {
            let offsets = rest.iter().map(|slot| slot.and_then(|block| place.offset_of(block)));
            let quick = owner.push_many(offsets);
            let Some((done, after)) = rest.split_at_mut_checked(quick) else { return Ok(()) };
            done.fill(None);
            freed += quick;
            let Some((slot, after)) = after.split_first_mut() else { return Ok(()) };
            if let Some(block) = *slot {
                self.free(owner, block).map_err(|error| BulkFreeError { freed, error })?;
                *slot = None;
                freed += 1;
            }
            rest = after;
        }
    }
}
