//! Freeing many [`Block`]s: through an owner without a lock, or through the pool with one lock for many.

use super::block::Block;
use super::local::Local;
use super::pool::DmaPool;
use super::source::ChunkSource;
use super::state::Form;
use crate::share::{Held, Hold};

/// The most blocks that are freed under one hold of the pool's lock: as many as a row has.
const LOT: usize = 64;

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Local<S, H> {
    /// Frees blocks, whichever owners allocated them; those of another pool are dropped.
    ///
    /// Takes no lock, as [`free`](Self::free). Blocks of one row of another owner that follow each other are returned to it together, up to
    /// 64 by two read-modify-writes, at the latest when the iterator ends: while the iterator waits for something, no owner can
    /// allocate them. The iterator may panic: the blocks that it has returned are freed all the same. O(blocks).
    ///
    /// One thread allocates, another frees:
    ///
    /// ```
    /// # use pinfold_core::dma_pool::{Block, ChunkSource, DmaPool};
    /// # use pinfold_core::share::Shared;
    /// # use std::sync::mpsc::sync_channel;
    /// # fn run<S: ChunkSource + Send + Sync + 'static>(pool: Shared<DmaPool<S>>) -> Result<(), Box<dyn core::error::Error>> {
    /// let (filled, received) = sync_channel::<Vec<Block<S>>>(8);
    /// let mut consumer = pool.local(); // moves to its thread
    /// let thread = std::thread::spawn(move || {
    ///     for batch in received {
    ///         consumer.free_many(batch); // without a `Local`: `pool.free_many(batch)`
    ///     }
    /// });
    /// let mut producer = pool.local();
    /// for _ in 0..100 {
    ///     let batch: Result<Vec<_>, _> = (0..64).map(|_| producer.alloc()).collect();
    ///     filled.send(batch?).map_err(|_| "the consumer has ended")?;
    /// }
    /// drop(filled);
    /// thread.join().map_err(|_| "panicked")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn free_many(&mut self, blocks: impl IntoIterator<Item = Block<S, H::Item>>) {
        self.owner.gather();
        let many = Many(self);
        blocks.into_iter().for_each(|block| many.0.free(block));
    }
}

/// A call for many blocks.
struct Many<'l, S: ChunkSource, H: Hold<Target = DmaPool<S>>>(&'l mut Local<S, H>);

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Drop for Many<'_, S, H> {
    fn drop(&mut self) {
        let Local { pool, owner, .. } = &mut *self.0;
        pool.announce(owner);
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// Frees blocks, whichever owners allocated them, for a thread without a [`Local`]; those of another pool are dropped.
    ///
    /// Takes the lock once for each 64 blocks, and never while the iterator runs; in the shared form it returns their shares
    /// by one read-modify-write. The iterator may panic: the blocks that it has returned are freed all the same. O(blocks), and
    /// allocates no memory.
    pub fn free_many<H: Held<Target = Self>>(&self, blocks: impl IntoIterator<Item = Block<S, H>>) {
        let mut own = blocks.into_iter().filter(|block| core::ptr::eq(block.pool(), self));
        loop {
            let mut lot = core::array::from_fn(|_| None);
            let mut taken = 0;
            for (slot, block) in lot.iter_mut().zip(own.by_ref()) {
                *slot = Some(block);
                taken += 1;
            }
            if taken != 0 {
                self.free_lot(lot);
            }
            if taken < LOT {
                return;
            }
        }
    }

    /// Frees blocks of this pool under one hold of its lock.
    fn free_lot<H: Held<Target = Self>>(&self, lot: [Option<Block<S, H>>; LOT]) {
        let mut all_freed = true;
        let held = self.gathering(&mut self.lock(), |owner| {
            lot.map(|slot| {
                let (held, raw) = slot?.into_parts();
                all_freed &= self.free_by(owner, raw, Form::Owned).is_ok();
                Some(held)
            })
        });
        // Never refused: only its `Block` frees an owned block.
        debug_assert!(all_freed);
        H::give_up_all(held.into_iter().flatten());
    }
}
