//! Setting a pool's limits: what the minimum needs is acquired at once, all or none. Limits are checked where chunks are added and
//! released, never by an alloc or a free of a block that the pool has.

use super::error::{AllocError, LimitError};
use super::limits::Limits;
use super::pool::DmaPool;
use super::source::ChunkSource;
use crate::frame::{Frame, Order};
use alloc::vec::Vec;

impl<S: ChunkSource> DmaPool<S> {
    /// Sets the pool's limits, and acquires chunks until it has the minimum. What it has beyond the maximum it keeps until
    /// it is free and the pool is [shrunk](Self::shrink).
    ///
    /// From then on so many blocks can be allocated without a call of the source, less the free blocks that
    /// [`Local`](super::Local)s other than the one that allocates hold. There are none if one `Local`, or calls on the pool, make
    /// all allocations and frees; otherwise add for each other `Local`, also one that only frees, what it may hold (see the
    /// [module](crate::dma_pool)).
    /// With both limits equal no alloc ever calls the source.
    ///
    /// Time proportional to the number of blocks acquired. Waits for the source, and for an owner that is growing the pool; other
    /// owners allocate free blocks meanwhile. As an alloc that needs a chunk, it must not be called from inside the source.
    ///
    /// # Errors
    /// [`LimitError`] if the limits contradict each other, or the source has too little for the minimum. The limits are the same
    /// as before then, and what was acquired is released; likewise if the source panics.
    pub fn set_limits(&self, limits: Limits) -> Result<(), LimitError> {
        let Limits { minimum, maximum } = limits;
        if maximum < minimum.max(1) {
            return Err(LimitError::Contradiction { minimum, maximum });
        }
        // Excludes other growth and other changes of the limits.
        let _turn = self.growth.wait();
        let (mut raised, blocks) = Raised::new(self, minimum);
        raised.acquire(blocks, minimum)?;
        raised.enter(limits);
        Ok(())
    }

    /// The error of an alloc that finds no free block in a pool that may not grow. Constant time.
    #[cold]
    pub(super) fn at_maximum(&self) -> AllocError {
        let (blocks, maximum) = {
            let chunks = self.chunks.lock();
            (chunks.blocks(), chunks.limits.maximum)
        };
        AllocError::Maximum { maximum, blocks, in_use: self.depot.reported_in_use().min(blocks) }
    }
}

/// A pool whose minimum has been raised, so that nothing that counts towards it is released, and the runs that it still needs.
/// If it is dropped before they are entered, because the source has too little or panics, they are released.
struct Raised<'p, S: ChunkSource> {
    pool: &'p DmaPool<S>,
    /// The limits that the pool has afterwards: until the runs are entered those that it had before.
    after: Limits,
    runs: Vec<(Frame, Order)>,
}

impl<'p, S: ChunkSource> Raised<'p, S> {
    /// Raises the minimum for the holder of the turn, and returns how many blocks the pool has.
    fn new(pool: &'p DmaPool<S>, minimum: u64) -> (Self, u64) {
        let mut chunks = pool.chunks.lock();
        let after = chunks.limits;
        chunks.limits.minimum = minimum;
        (Self { pool, after, runs: Vec::new() }, chunks.blocks())
    }

    /// Acquires the runs that take a pool of `available` blocks to `minimum`.
    fn acquire(&mut self, mut available: u64, minimum: u64) -> Result<(), LimitError> {
        let geometry = &self.pool.geometry;
        let mut order = geometry.most();
        while let Some(next) = geometry.order_within(order, available, minimum) {
            let acquired = self.pool.acquire(next);
            let (frame, acquired) =
                acquired.map_err(|error| LimitError::Unavailable { minimum, available, error })?;
            self.runs.push((frame, acquired));
            available += u64::from(geometry.blocks_in(acquired));
            // A larger one was refused.
            order = acquired;
        }
        Ok(())
    }

    /// Enters the runs, and sets the limits.
    fn enter(mut self, limits: Limits) {
        let mut chunks = self.pool.chunks.lock();
        chunks.limits = limits;
        for (frame, order) in self.runs.drain(..) {
            self.pool.enter(&mut chunks, frame, order);
        }
        self.pool.note_if_full(&chunks);
        self.after = limits;
    }
}

impl<S: ChunkSource> Drop for Raised<'_, S> {
    fn drop(&mut self) {
        self.pool.chunks.lock().limits = self.after;
        for (frame, order) in self.runs.drain(..) {
            // SAFETY: acquired above with this order, and entered nowhere.
            unsafe { self.pool.source().release(frame, order) };
        }
    }
}
