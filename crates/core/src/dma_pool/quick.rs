//! The fast paths: blocks of the stash and of the owner's rows, by plain loads and stores.

use super::current::lowest;
use super::geometry::Geometry;
use super::owner::Owner;
use super::pool::Place;
use super::raw::RawBlock;
use super::row::ROW;
use super::stash::Site;
use super::state::Form;

impl Owner {
    /// Allocates a block and returns its offset in the span; `None` if neither the stash nor the current row has one.
    #[inline(always)]
    pub(super) fn pop(&mut self, geometry: &Geometry, form: Form) -> Option<u64> {
        if let Some(Site { offset, row, bit }) = self.stash.pop() {
            self.count_out(1);
            row.set_allocated(bit, form);
            return Some(offset);
        }
        let (row, bit) = self.current.first()?;
        self.current.drop_first();
        self.count_out(1);
        let offset = self.current.offset_of(geometry, bit);
        // Last: after a store into the row nothing of the owner is known to be in registers any more.
        row.set_allocated(bit, form);
        Some(offset)
    }

    /// Fills empty slots with raw blocks of the current row; returns how many slots from the start are full.
    #[inline(always)]
    pub(super) fn pop_into(
        &mut self,
        geometry: &Geometry,
        slots: &mut [Option<RawBlock>],
        place: Place<'_>,
    ) -> usize {
        let all = slots.len();
        let mut current = self.current;
        let (mut rest, mut popped) = (slots, 0);
        loop {
            let full = rest.iter().take_while(|slot| slot.is_some()).count();
            rest = rest.get_mut(full..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let Some(run) = current.first_run(geometry) else { break };
            let (mut offset, mut taken) = (run.offset, 0);
            for (slot, state) in rest.iter_mut().zip(run.row.states(run.first, run.len)) {
                if slot.is_some() {
                    break;
                }
                state.set_allocated(Form::Raw);
                *slot = Some(place.block_at(offset));
                offset += run.size;
                taken += 1;
            }
            current.drop_first_of(&run, taken);
            popped += taken;
            rest = rest.get_mut(taken..).unwrap_or_default();
        }
        let full = all - rest.len();
        self.current = current;
        self.count_out(popped);
        full
    }

    /// Frees the block at `offset` if it is the one that the stash gave out last, or in the current row, and allocated in this
    /// form. On `false` it has to be looked up.
    #[inline(always)]
    pub(super) fn push(&mut self, offset: u64, form: Form) -> bool {
        if let Some(Site { row, bit, .. }) = self.stash.last_popped(offset) {
            // Only the row's owner may free by a store.
            if !row.is_owned_by(self.id) || !row.is_allocated_as(bit, form) {
                return false;
            }
            // Not checked again: a remote free in between is found when it is collected (see `row`).
            row.set_free(bit);
            self.stash.push_last_popped();
            self.used -= 1;
            return true;
        }
        let Some((row, bit)) = self.current.find(offset) else { return false };
        if !row.is_allocated_as(bit, form) {
            return false;
        }
        row.set_free(bit);
        if self.stash.push(Site { offset, row, bit }) {
            self.used -= 1;
        } else {
            self.put(1 << bit, 1);
        }
        true
    }

    /// Frees a block that was looked up, if its row is this owner's and stays in its list. On `false` nothing has changed.
    #[inline(always)]
    pub(super) fn push_aside(&mut self, site: Site, form: Form) -> bool {
        let Site { row, bit, .. } = site;
        if !row.is_owned_by(self.id) || !row.is_allocated_as(bit, form) {
            return false;
        }
        if !self.stash.push(site) && !row.put_settled(bit) {
            return false;
        }
        row.set_free(bit);
        self.used -= 1;
        true
    }

    /// The same for many raw blocks, up to the first that has to be looked up. Returns how many were freed.
    #[inline(always)]
    pub(super) fn push_many<T>(
        &mut self,
        place: Place<'_>,
        blocks: &[T],
        block_in: impl Fn(&T) -> Option<RawBlock>,
    ) -> usize {
        let current = self.current;
        #[expect(clippy::cast_possible_truncation, reason = "less than the span, which is a usize")]
        let step = current.size as usize;
        let (mut freed, mut pushed) = (0, 0);
        while let Some(block) = blocks.get(pushed).and_then(&block_in) {
            let found = place.offset_of(block).and_then(|offset| current.find(offset));
            let Some((row, bit)) = found else { break };
            // Neighbours behind it are known by their addresses, without a division.
            let (mut addr, mut iova, mut run) = (block.addr(), block.iova().raw(), 0);
            let rest = blocks.get(pushed..).unwrap_or_default();
            for (block, state) in rest.iter().zip(row.states(bit, ROW)) {
                let is_next =
                    block_in(block).is_some_and(|block| block.addr() == addr && block.iova().raw() == iova);
                if !is_next || !state.is_allocated_as(Form::Raw) {
                    break;
                }
                state.set_free();
                addr = addr.wrapping_add(step);
                iova = iova.wrapping_add(current.size);
                run += 1;
            }
            if run == 0 {
                break;
            }
            freed |= lowest(run) << bit;
            pushed += run;
        }
        self.put(freed, pushed);
        pushed
    }

    #[inline(always)]
    pub(super) fn put(&mut self, blocks: u64, count: usize) {
        self.current.put(blocks);
        self.used -= signed(count);
    }

    #[inline(always)]
    pub(super) fn count_out(&mut self, blocks: usize) {
        self.used += signed(blocks);
        self.peak = self.peak.max(self.used);
    }
}

/// A number of blocks of one call, as the counters have it.
#[inline(always)]
fn signed(blocks: usize) -> i64 {
    i64::try_from(blocks).unwrap_or(0)
}
