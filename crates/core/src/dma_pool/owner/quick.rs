//! The quick paths: between the program and the magazine, by plain loads and stores.

use super::{Held, Owner};

impl Owner {
    /// A free block's offset in the span, now handed out; `None` where the magazine is empty.
    #[inline(always)]
    pub(in crate::dma_pool) fn pop(&mut self) -> Option<u64> {
        let held = self.magazine.pop()?;
        self.low = self.low.min(self.magazine.len());
        held.slot.row().hand_out(held.slot.bit());
        Some(held.offset)
    }

    /// The same without a record that it is handed out.
    #[inline(always)]
    pub(in crate::dma_pool) fn pop_unmarked(&mut self) -> Option<u64> {
        let held = self.magazine.pop()?;
        self.low = self.low.min(self.magazine.len());
        Some(held.offset)
    }

    /// Fills empty slots from the magazine, as far as it goes; returns how many slots from the start are full.
    #[inline(always)]
    pub(in crate::dma_pool) fn pop_into<B>(
        &mut self,
        slots: &mut [Option<B>],
        block_at: impl Fn(u64) -> B,
    ) -> usize {
        let all = self.magazine.as_slice();
        let mut held = all.iter().rev();
        let mut full = 0;
        for slot in slots {
            if slot.is_none() {
                let Some(held) = held.next() else { break };
                held.slot.row().hand_out(held.slot.bit());
                *slot = Some(block_at(held.offset));
            }
            full += 1;
        }
        let popped = all.len() - held.len();
        self.magazine.pop_slice(popped);
        self.low = self.low.min(self.magazine.len());
        full
    }

    /// Takes back the block at `offset` if it is one of the recent row's, in use, and there is room for it.
    ///
    /// `false` says nothing about the block: it has to be looked up.
    #[inline(always)]
    pub(in crate::dma_pool) fn push_recent(&mut self, offset: u64) -> bool {
        let Some(slot) = self.recent.find(offset) else { return false };
        let row = slot.row();
        if !row.is_live(slot.bit()) || self.magazine.push(Held { slot, offset }).is_err() {
            return false;
        }
        // No second look: what was posted in between is found when it is collected (see `row`).
        row.set_free(slot.bit());
        true
    }

    /// The same for many, up to the first that cannot be taken back so. Returns how many were.
    #[inline(always)]
    pub(in crate::dma_pool) fn push_recent_many(
        &mut self,
        offsets: impl Iterator<Item = Option<u64>>,
    ) -> usize {
        let recent = self.recent;
        self.magazine.push_from(offsets.map_while(|offset| {
            let offset = offset?;
            let slot = recent.find(offset)?;
            let row = slot.row();
            row.is_live(slot.bit()).then(|| {
                row.set_free(slot.bit());
                Held { slot, offset }
            })
        }))
    }

    /// Takes back a block of the recent row without a look at whether it is one and in use; `false` where the row has
    /// to be looked up, or the magazine is full.
    #[inline(always)]
    pub(in crate::dma_pool) fn push_recent_unchecked(&mut self, offset: u64) -> bool {
        let slot = self.recent.find_unchecked(offset);
        slot.is_some_and(|slot| self.magazine.push(Held { slot, offset }).is_ok())
    }
}
