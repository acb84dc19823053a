//! The quick paths: blocks of the current row, by plain loads and stores.

use super::geometry::Geometry;
use super::owner::Owner;
use super::row::Form;

impl Owner {
    /// A free block's offset in the span, now handed out; `None` where the current row has none.
    #[inline(always)]
    pub(super) fn pop(&mut self, geometry: &Geometry, form: Form) -> Option<u64> {
        let (row, bit) = self.current.first()?;
        let offset = self.pop_first(geometry, bit);
        // Last: after a store into the row nothing of the owner is known to be in registers any more.
        row.hand_out(bit, form);
        Some(offset)
    }

    #[inline(always)]
    pub(super) fn pop_first(&mut self, geometry: &Geometry, bit: u32) -> u64 {
        self.current.drop_first();
        self.count_out(1);
        self.current.offset_of(geometry, bit)
    }

    /// Fills empty slots with raw blocks of the current row, as far as it goes; returns how many slots from the start are full.
    #[inline(always)]
    pub(super) fn pop_into<B>(
        &mut self,
        geometry: &Geometry,
        slots: &mut [Option<B>],
        block_at: impl Fn(u64) -> B,
    ) -> usize {
        let mut current = self.current;
        let (mut full, mut popped) = (0, 0);
        for slot in slots {
            if slot.is_none() {
                let Some((row, bit)) = current.first() else { break };
                current.drop_first();
                row.hand_out(bit, Form::Raw);
                *slot = Some(block_at(current.offset_of(geometry, bit)));
                popped += 1;
            }
            full += 1;
        }
        self.current = current;
        self.count_out(popped);
        full
    }

    /// Takes back the block at `offset` if it is one of the current row's, in use in this form.
    ///
    /// `false` says nothing about the block: it has to be looked up.
    #[inline(always)]
    pub(super) fn push(&mut self, offset: u64, form: Form) -> bool {
        let Some((row, bit)) = self.current.find(offset) else { return false };
        if !row.is_out(bit, form) {
            return false;
        }
        // No second look: what was posted in between is found when it is collected (see `row`).
        row.set_free(bit);
        self.put(1 << bit, 1);
        true
    }

    /// The same for many raw blocks, up to the first that cannot be taken back so. Returns how many were.
    #[inline(always)]
    pub(super) fn push_many(&mut self, offsets: impl Iterator<Item = Option<u64>>) -> usize {
        let current = self.current;
        let (mut blocks, mut pushed) = (0, 0);
        for offset in offsets {
            let Some((row, bit)) = offset.and_then(|offset| current.find(offset)) else { break };
            if !row.is_out(bit, Form::Raw) {
                break;
            }
            row.set_free(bit);
            blocks |= 1 << bit;
            pushed += 1;
        }
        self.put(blocks, pushed);
        usize::try_from(pushed).unwrap_or(0)
    }

    #[inline(always)]
    pub(super) fn put(&mut self, blocks: u64, count: i64) {
        self.current.put(blocks);
        self.used -= count;
    }

    #[inline(always)]
    fn count_out(&mut self, blocks: i64) {
        self.used += blocks;
        self.peak = self.peak.max(self.used);
    }
}
