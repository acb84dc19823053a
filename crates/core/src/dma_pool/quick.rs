//! The fast paths: blocks of the current row, by plain loads and stores.

use super::geometry::Geometry;
use super::owner::Owner;
use super::row::Form;

impl Owner {
    /// Allocates a block and returns its offset in the span; `None` if the current row has none.
    #[inline(always)]
    pub(super) fn pop(&mut self, geometry: &Geometry, form: Form) -> Option<u64> {
        let (row, bit) = self.current.first()?;
        let offset = self.pop_first(geometry, bit);
        // Last: after a store into the row nothing of the owner is known to be in registers any more.
        row.set_allocated(bit, form);
        Some(offset)
    }

    #[inline(always)]
    pub(super) fn pop_first(&mut self, geometry: &Geometry, bit: u32) -> u64 {
        self.current.drop_first();
        self.count_out(1);
        self.current.offset_of(geometry, bit)
    }

    /// Fills empty slots with raw blocks of the current row; returns how many slots from the start are full.
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
                row.set_allocated(bit, Form::Raw);
                *slot = Some(block_at(current.offset_of(geometry, bit)));
                popped += 1;
            }
            full += 1;
        }
        self.current = current;
        self.count_out(popped);
        full
    }

    /// Frees the block at `offset` if it is in the current row, allocated in this form. On `false` it has to be looked up.
    #[inline(always)]
    pub(super) fn push(&mut self, offset: u64, form: Form) -> bool {
        let Some((row, bit)) = self.current.find(offset) else { return false };
        if !row.is_allocated_as(bit, form) {
            return false;
        }
        // Not checked again: a remote free in between is found when it is collected (see `row`).
        row.set_free(bit);
        self.put(1 << bit, 1);
        true
    }

    /// The same for many raw blocks, up to the first that has to be looked up. Returns how many were freed.
    #[inline(always)]
    pub(super) fn push_many(&mut self, offsets: impl Iterator<Item = Option<u64>>) -> usize {
        let current = self.current;
        let (mut blocks, mut pushed) = (0, 0);
        for offset in offsets {
            let Some((row, bit)) = offset.and_then(|offset| current.find(offset)) else { break };
            if !row.is_allocated_as(bit, Form::Raw) {
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
