//! Removal of the chunks all of whose blocks are in the depot.
//!
//! The depot is locked for one array of numbers at a time, so that owners exchange magazines
//! meanwhile: the numbers of chunks that may be free are set aside, the others go back at once. A
//! chunk is removed if all of its numbers have been found; the numbers of any other go back. So
//! numbers that are set aside are neither lost nor held by an owner, and an owner that finds no
//! block meanwhile waits for the permit, as it would for a chunk.

use super::directory::Chunk;
use super::inner::{Inner, Permit};
use super::magazine::{Depot, MOST};
use super::state::State;
use super::unit::Slot;
use crate::sync::count_steps;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cmp::Reverse;

/// A chunk that may be free.
pub(super) struct Candidate {
    pub(super) chunk: Chunk,
    /// Its place in the list of chunks.
    place: usize,
    /// The number of its blocks that have been set aside. Their states are `LISTED`.
    aside: u32,
    /// The number of those that have never been allocated.
    fresh: u32,
    removed: bool,
}

/// The chunks that may be free, in the order of their numbers.
struct Candidates(Vec<Candidate>);

impl Candidates {
    /// Returns the one that has a number.
    fn of(&mut self, number: u32) -> Option<&mut Candidate> {
        let after = self.0.partition_point(|candidate| candidate.chunk.first() <= number);
        let candidate = self.0.get_mut(after.checked_sub(1)?)?;
        (number - candidate.chunk.first() < candidate.chunk.blocks()).then_some(candidate)
    }

    fn is_removed(&mut self, number: u32) -> bool {
        self.of(number).is_some_and(|candidate| candidate.removed)
    }
}

impl Inner {
    /// Removes the chunks all of whose blocks are in the depot, as long as the minimum is left, the
    /// last ones first, and returns them; none while blocks are visited. O(blocks). Allocates
    /// memory, and leaves out the chunks that it has none for.
    pub(super) fn take_free_chunks(&self, _permit: &Permit<'_>) -> Vec<Candidate> {
        let is_free = |chunk: &Chunk| {
            chunk.run().is_some() && chunk.states().iter().all(|state| state.get() == State::FREE)
        };
        let (mut candidates, mut place) = (Candidates(Vec::new()), 0);
        // The permit keeps others from removing chunks.
        self.each_chunk(|chunk| {
            if is_free(chunk) && candidates.0.try_reserve(1).is_ok() {
                let chunk = chunk.clone();
                candidates.0.push(Candidate { chunk, place, aside: 0, fresh: 0, removed: false });
            }
            place += 1;
        });
        candidates.0.sort_unstable_by_key(|candidate| candidate.chunk.first());
        if candidates.0.is_empty() {
            return Vec::new();
        }
        self.set_aside(&mut candidates);
        let surplus = self.depot.lock().remove(&mut candidates, self.minimum);
        // Dropped outside the lock.
        drop(surplus);
        let mut removed = candidates.0;
        let is_kept = |candidate: &&Candidate| !candidate.removed;
        self.give_back(removed.iter().filter(is_kept).flat_map(|one| one.chunk.slots()));
        removed.retain(|candidate| candidate.removed);
        for Candidate { chunk, .. } in &removed {
            chunk.states().iter().for_each(|state| state.set(State::ABSENT));
        }
        removed
    }

    /// Sets aside the numbers of candidates that the depot's arrays have.
    fn set_aside(&self, candidates: &mut Candidates) {
        let mut is_other = |number: u32| {
            let Some(candidate) = candidates.of(number) else { return true };
            candidate.aside += 1;
            // SAFETY: the number of a block in the depot, which is the caller's now.
            unsafe { self.units.slot(number) }.state().set(State::LISTED);
            false
        };
        // First: the numbers that are put back go there, and on to the full arrays.
        self.depot.lock().keep_in_part(&mut is_other);
        let arrays = self.depot.lock().full_arrays();
        let mut others = Vec::with_capacity(MOST);
        for _ in 0..arrays {
            let Some(array) = self.depot.lock().take_oldest() else { break };
            others.extend(array.iter().copied().filter(|&number| is_other(number)));
            self.depot.lock().put_back(array, &others);
            others.clear();
        }
    }

    /// Returns the numbers that were set aside to the depot.
    fn give_back<'s>(&self, slots: impl Iterator<Item = Slot<'s>>) {
        let mut numbers = Vec::with_capacity(MOST);
        for slot in slots.filter(|slot| slot.state().get() == State::LISTED) {
            slot.state().set(State::FREE);
            numbers.push(slot.number());
            if numbers.len() == MOST {
                self.depot.lock().take_numbers(&numbers);
                numbers.clear();
            }
        }
        self.depot.lock().take_numbers(&numbers);
    }
}

impl Depot {
    /// Removes the candidates all of whose numbers were set aside, or were never in an array.
    /// Returns the arrays that nothing needs any more. O(chunks).
    fn remove(&mut self, candidates: &mut Candidates, minimum: u64) -> Vec<Box<[u32]>> {
        if self.visits > 0 {
            return Vec::new();
        }
        count_steps(self.chunks.len() + self.fresh.len());
        // The numbers of a chunk that no owner has had yet are in one piece.
        for range in &self.fresh {
            if let Some(candidate) = candidates.of(range.start) {
                candidate.fresh = range.end - range.start;
            }
        }
        candidates.0.sort_unstable_by_key(|candidate| Reverse(candidate.place));
        for candidate in &mut candidates.0 {
            let Candidate { aside, fresh, .. } = *candidate;
            let blocks = candidate.chunk.blocks();
            let left = self.blocks.checked_sub(blocks.into()).filter(|&left| left >= minimum);
            if let (true, Some(left)) = (aside + fresh == blocks, left) {
                candidate.removed = true;
                self.blocks = left;
                self.bytes -= candidate.chunk.bytes();
                self.cut -= u64::from(aside);
                self.aside -= u64::from(aside);
                self.fresh_blocks -= u64::from(fresh);
            }
        }
        candidates.0.sort_unstable_by_key(|candidate| candidate.chunk.first());
        self.fresh.retain(|range| !candidates.is_removed(range.start));
        let before = self.chunks.len();
        self.chunks.retain(|chunk| !candidates.is_removed(chunk.first()));
        self.removals += u64::from(self.chunks.len() < before);
        self.surplus()
    }
}
