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
    /// [`Local`](super::Local)s other than the one that allocates hold. There are none if all allocations are made through one
    /// `Local`, or all by calls on the pool; otherwise add for each `Local` what it may hold (see the [module](crate::dma_pool)).
    /// With both limits equal no alloc ever calls the source.
    ///
    /// Time proportional to the number of blocks acquired. Waits for the source, and for an owner that is growing the pool; other
    /// owners allocate free blocks meanwhile. As an alloc that needs a chunk, it must not be called from inside the source.
    ///
    /// # Errors
    /// [`LimitError`] if the limits contradict each other, or the source has too little for the minimum. The limits are the same
    /// as before then, and what was acquired is released.
    pub fn set_limits(&self, limits: Limits) -> Result<(), LimitError> {
        let Limits { minimum, maximum } = limits;
        if maximum < minimum.max(1) {
            return Err(LimitError::Contradiction { minimum, maximum });
        }
        // Excludes other growth and other changes of the limits.
        let _turn = self.growth.wait();
        let (before, blocks) = {
            let mut chunks = self.chunks.lock();
            let before = chunks.limits;
            // From here on nothing is released that counts towards the minimum.
            chunks.limits.minimum = before.minimum.max(minimum);
            (before, chunks.blocks())
        };
        let acquired = self.acquire_up_to(minimum, blocks);
        let mut chunks = self.chunks.lock();
        chunks.limits = if acquired.is_ok() { limits } else { before };
        acquired?.into_iter().for_each(|(frame, order)| self.enter(&mut chunks, frame, order));
        Ok(())
    }

    /// Acquires the runs that take a pool of `blocks` blocks to `minimum`, all or none. The caller enters them.
    fn acquire_up_to(&self, minimum: u64, blocks: u64) -> Result<Vec<(Frame, Order)>, LimitError> {
        let (mut runs, mut available, mut order) = (Vec::new(), blocks, self.geometry.most());
        while let Some(next) = self.geometry.order_within(order, available, minimum) {
            match self.acquire(next) {
                Ok((frame, acquired)) => {
                    runs.push((frame, acquired));
                    available += u64::from(self.geometry.blocks_in(acquired));
                    // A larger one was refused.
                    order = acquired;
                }
                Err(error) => {
                    for (frame, order) in runs {
                        // SAFETY: acquired above with this order, and entered nowhere.
                        unsafe { self.source().release(frame, order) };
                    }
                    return Err(LimitError::Unavailable { minimum, available, error });
                }
            }
        }
        Ok(runs)
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
