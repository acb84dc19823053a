//! Many blocks at once: what is looked up for one is used for the next.

use super::owner::Owner;
use super::row::ROW;
use super::shared::Shared;
use super::{BulkFreeError, ChunkSource, RawBlock};

/// From so many blocks on they are drawn straight from the rows, past the magazine.
const PAST_THE_MAGAZINE: usize = 32;

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
            let full = owner.pop_into(rest, |offset| done(place.block_at(offset)));
            rest = rest.get_mut(full..).unwrap_or_default();
            if rest.is_empty() {
                return all;
            }
            // The magazine is empty now. A row's worth of slots may be looked at, no more: this is done for each row.
            let some = rest.len().min(ROW);
            let (head, _) = rest.split_at_mut(some);
            let wanted = count_empty(head);
            if wanted >= PAST_THE_MAGAZINE && self.watch.is_none() {
                let mut empty = head.iter_mut().filter(|slot| slot.is_none());
                let give = |offset| {
                    // As many are given as slots were counted.
                    if let Some(slot) = empty.next() {
                        *slot = Some(done(place.block_at(offset)));
                    }
                };
                if owner.draw_through(&self.geometry, wanted, give) > 0 {
                    continue;
                }
            }
            if self.stock(owner).is_err() {
                return all - count_empty(rest);
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
            let quick = owner.push_recent_many(rest.iter().map(|&block| place.offset_of(block)));
            let Some((&block, after)) = rest.get(quick..).and_then(<[RawBlock]>::split_first) else {
                return Ok(());
            };
            // Of another row, or wrong; or there is no room.
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
            let quick = owner.push_recent_many(offsets);
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

fn count_empty(slots: &[Option<RawBlock>]) -> usize {
    slots.iter().filter(|slot| slot.is_none()).count()
}
