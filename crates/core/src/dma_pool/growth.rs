//! Growing and shrinking: one owner at a time acquires a chunk, while others allocate and free.
//!
//! The source may make a system call and sleep, so the owner that grows the pool holds no lock that a free, an alloc from
//! free blocks or `stats` takes. It holds the *turn*, a flag for which only owners wait that need a chunk too. Between two
//! attempts to take it they look for free blocks, and so use blocks that are freed meanwhile.

use super::directory::{Chunk, Chunks, Key};
use super::error::AllocError;
use super::geometry::bytes_of;
use super::owner::Owner;
use super::pool::{DmaPool, tag_of};
use super::raw::RawBlock;
use super::source::ChunkSource;
use super::state::Form;
use super::turn::Turn;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::relax;

impl<S: ChunkSource> DmaPool<S> {
    /// Gives an owner a current row with free blocks (in debug mode with one, checked and filled), from a new chunk if
    /// necessary.
    #[cold]
    #[inline(never)]
    pub(super) fn stock(&self, owner: &mut Owner) -> Result<(), AllocError> {
        self.or_grow(|| (self.restock(owner) || self.drain_depot() && self.restock(owner)).then_some(()))
    }

    /// Allocates through the pool's own owner, whose lock is not held while the pool grows.
    #[inline]
    pub(super) fn alloc_shared(&self, form: Form) -> Result<RawBlock, AllocError> {
        match self.draw_shared(form) {
            Some(block) => Ok(block),
            None => self.or_grow(|| self.draw_shared(form)),
        }
    }

    /// The same, without growing the pool: `None` if neither the pool's own owner nor the depot has a free block.
    #[inline]
    pub(super) fn draw_shared(&self, form: Form) -> Option<RawBlock> {
        let mut lock = self.lock();
        loop {
            if let Some(offset) = lock.pop(&self.geometry, form) {
                return Some(self.block_at(offset));
            }
            if !self.restock(&mut lock) {
                return None;
            }
        }
    }

    /// Repeats `attempt`, growing the pool, until it succeeds.
    #[cold]
    fn or_grow<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> Result<T, AllocError> {
        let mut attempts = 0;
        loop {
            if let Some(done) = attempt() {
                return Ok(done);
            }
            let Some(turn) = self.growth.turn() else {
                relax(attempts);
                attempts = attempts.saturating_add(1);
                continue;
            };
            // The chunk of the previous holder of the turn is in the depot by now.
            if let Some(done) = attempt() {
                return Ok(done);
            }
            self.grow(&turn)?;
            drop(turn);
        }
    }

    /// Makes a row with free blocks an owner's current one, its own or one from the depot. `false` if there is none.
    #[cold]
    #[inline(never)]
    pub(super) fn restock(&self, owner: &mut Owner) -> bool {
        while !owner.refill(&self.geometry) {
            if !self.depot.lend(owner) {
                return false;
            }
        }
        self.relieve(owner);
        if let (Some(watch), Some(offset)) = (&self.watch, owner.next(&self.geometry)) {
            let block = self.block_at(offset);
            if let Ok(memory) = self.memory_of(block) {
                watch.history().on_alloc(offset, block, memory, tag_of(owner));
            }
        }
        true
    }

    /// Moves the rows of the pool's own owner to the depot. Returns `true`.
    fn drain_depot(&self) -> bool {
        self.depot.drain(&mut self.lock());
        true
    }

    /// Acquires a chunk of the next order, or of the largest smaller one available, within the pool's maximum. No lock is
    /// held while the source runs.
    ///
    /// Where large runs are scarce, most chunks are asked for at the size that was available last: each refusal of a source
    /// that searches costs more than a small chunk.
    fn grow(&self, turn: &Turn<'_>) -> Result<(), AllocError> {
        let wanted = {
            let chunks = self.chunks.lock();
            let next = self.geometry.next_order(chunks.bytes());
            self.geometry.order_within(next, chunks.blocks(), chunks.limits.maximum)
        };
        let first = turn.first(wanted.ok_or_else(|| self.at_maximum())?);
        let (frame, order) = self.acquire(first)?;
        turn.note(first, order);
        self.enter(&mut self.chunks.lock(), frame, order);
        Ok(())
    }

    /// Acquires a run of this order, or of the largest smaller one available, for the holder of the turn.
    pub(super) fn acquire(&self, first: Order) -> Result<(Frame, Order), AllocError> {
        let mut order = first;
        let frame = loop {
            match self.source().acquire(order) {
                Ok(frame) => break frame,
                Err(error) => order = self.geometry.smaller(order).ok_or(error)?,
            }
        };
        let end = frame.offset().checked_add(bytes_of(order));
        let inside = end.is_some_and(|end| end <= self.memory.len() as u64);
        if !inside || !frame.offset().is_multiple_of(bytes_of(order)) {
            // SAFETY: just acquired with this order, and not used.
            unsafe { self.source().release(frame, order) };
            return Err(AllocError::Misplaced { frame, order });
        }
        if let (Some(watch), Some(memory)) = (&self.watch, self.run(frame, order)) {
            watch.history().enter(frame.offset(), memory);
        }
        Ok((frame, order))
    }

    /// Adds an acquired run to the pool, with all its blocks free.
    pub(super) fn enter(&self, chunks: &mut Chunks, frame: Frame, order: Order) {
        let (blocks, even) = (self.geometry.blocks_in(order), self.geometry.is_even());
        let chunk = chunks.enter(&self.directory, (frame, order), blocks, even);
        self.depot.add(chunk.rows());
        self.note_if_full(chunks);
    }

    /// Notes whether the pool is at its maximum, after either has changed.
    pub(super) fn note_if_full(&self, chunks: &Chunks) {
        if chunks.blocks() >= chunks.limits.maximum {
            self.depot.note_full();
        }
    }

    fn run(&self, frame: Frame, order: Order) -> Option<DmaMemory<'_>> {
        let offset = usize::try_from(frame.offset()).ok()?;
        self.memory.part(offset, usize::try_from(bytes_of(order)).ok()?).ok()
    }

    /// Removes each chunk that `may_leave` accepts from the directory, as far as the pool's minimum allows, and releases it,
    /// with no lock held. Returns their bytes.
    pub(super) fn release_each(&self, may_leave: impl Fn(&Chunk) -> bool) -> u64 {
        let (mut bytes, mut after): (u64, Option<Key>) = (0, None);
        loop {
            let next = self.chunks.lock().leave_next(&self.directory, after, &may_leave);
            let Some((frame, order)) = next else { return bytes };
            // SAFETY: the chunk was acquired with this order, and has left the directory and the depot: no owner allocates
            // from it any more, and `may_leave` or exclusive access to the pool excludes borrows of blocks' memory.
            unsafe { self.source().release(frame, order) };
            bytes += bytes_of(order);
            after = Some((frame.index(), order.get()));
        }
    }
}
