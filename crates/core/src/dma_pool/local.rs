//! [`PoolLocal`]: one owner's handle to a pool, and its calls for many blocks.

use super::block::Block;
use super::error::{AllocError, BulkAllocError, BulkFreeError, FreeError};
use super::inner::Handle;
use super::magazine::Owner;
use super::state::State;
use super::unit::{RawBlock, Slot};
use crate::sync::Ordering;
use alloc::vec::Vec;
use core::fmt;

/// One owner's handle to a pool: it caches free blocks, which no other owner allocates meanwhile.
/// It keeps the pool alive.
///
/// One per thread of control; it can move between threads. Its calls take no lock and make no
/// atomic read-modify-write, except for the exchange of a magazine, once per magazine's size of
/// blocks, and for the claim of a raw block that is freed. Dropping it returns its cached blocks.
pub struct PoolLocal {
    pool: Handle,
    owner: Owner,
}

impl PoolLocal {
    pub(super) fn new(pool: Handle) -> Self {
        let pressure = pool.pressure.load(Ordering::Relaxed);
        let owner = pool.depot.lock().new_owner(pressure);
        Self { pool, owner }
    }

    /// Allocates a block that frees itself, from any thread; [`free`](Self::free) is the fast way.
    ///
    /// # Errors
    /// [`AllocError`] if neither this owner nor the depot has a free block and the pool can acquire
    /// no chunk.
    #[inline(always)]
    pub fn alloc(&mut self) -> Result<Block, AllocError> {
        let slot = self.pool.alloc(&mut self.owner, State::OWNED)?;
        // SAFETY: just allocated.
        Ok(unsafe { Block::new(slot) })
    }

    /// Like [`alloc`](Self::alloc), with all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_zeroed(&mut self) -> Result<Block, AllocError> {
        self.alloc().inspect(|block| super::debug::fill(block.memory(), 0))
    }

    /// Frees a block, whichever owner allocated it; one of another pool is dropped.
    #[inline(always)]
    pub fn free(&mut self, block: Block) {
        if let Some(slot) = block.into_slot(&self.pool) {
            self.pool.free_owned(&mut self.owner, slot);
        }
    }

    /// Allocates a raw block: it stays allocated until it is freed by address.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline(always)]
    pub fn alloc_raw(&mut self) -> Result<RawBlock, AllocError> {
        let slot = self.pool.alloc(&mut self.owner, State::RAW)?;
        // SAFETY: a block of this pool.
        Ok(unsafe { slot.block(&self.pool.layout) })
    }

    /// Frees a raw block, whichever owner allocated it. One atomic read-modify-write on its state:
    /// the claim.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw block of this pool; then nothing has changed.
    #[inline(always)]
    pub fn free_raw(&mut self, block: RawBlock) -> Result<(), FreeError> {
        self.pool.free_raw(&mut self.owner, block)
    }

    /// Returns all blocks that this owner caches, so that others can have them and
    /// [`shrink`](super::DmaPool::shrink) release them. For an owner that is going to be idle.
    pub fn flush(&mut self) {
        self.pool.depot.lock().flush(&mut self.owner);
    }

    /// Returns the owner's number, by which debug mode reports it. Numbers of dropped owners are
    /// reused; the pool's front has 0.
    pub fn number(&self) -> u32 {
        self.owner.number
    }

    /// Fills the empty slots with raw blocks and returns how many slots are full afterwards: fewer
    /// than all if blocks run out.
    pub fn fill(&mut self, slots: &mut [Option<RawBlock>]) -> usize {
        let layout = self.pool.layout;
        // SAFETY: a block of this pool.
        match self.fill_with(slots, State::RAW, |slot| unsafe { slot.block(&layout) }) {
            Ok(()) => slots.len(),
            Err(_) => slots.iter().flatten().count(),
        }
    }

    /// Like [`fill`](Self::fill), with blocks that free themselves.
    pub fn fill_blocks(&mut self, slots: &mut [Option<Block>]) -> usize {
        // SAFETY: just allocated, in this form.
        let make = |slot: Slot<'_>| unsafe { Block::new(slot) };
        match self.fill_with(slots, State::OWNED, make) {
            Ok(()) => slots.len(),
            Err(_) => slots.iter().flatten().count(),
        }
    }

    /// Fills the empty slots with raw blocks, all or none: what several descriptors of one request
    /// need. Slots that are full stay as they are.
    ///
    /// If blocks run out, those that were allocated for this call are freed again, so another owner
    /// may find the pool empty meanwhile; one that a wrong free of the program has freed already is
    /// left out. Allocates memory then.
    ///
    /// # Errors
    /// [`BulkAllocError`], with how many blocks were available; the slots are as before.
    pub fn fill_all(&mut self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkAllocError> {
        let wanted = slots.iter().filter(|slot| slot.is_none()).count();
        let mut new = New { local: self, blocks: Vec::new() };
        new.blocks.resize(wanted, None);
        match new.fill() {
            Ok(()) => {
                let empty = slots.iter_mut().filter(|slot| slot.is_none());
                empty.zip(new.blocks.drain(..)).for_each(|(slot, block)| *slot = block);
                Ok(())
            }
            Err(error) => {
                let available = new.blocks.iter().flatten().count();
                Err(BulkAllocError { wanted, available, error })
            }
        }
    }

    /// Fills the empty slots, a magazine at a time.
    #[inline(always)]
    fn fill_with<T>(
        &mut self,
        slots: &mut [Option<T>],
        form: u8,
        make: impl Fn(Slot<'_>) -> T,
    ) -> Result<(), AllocError> {
        let Self { pool, owner } = self;
        let mut empty = slots.iter_mut().filter(|slot| slot.is_none()).peekable();
        while empty.peek().is_some() {
            let mut taken = 0;
            for (&number, slot) in owner.current.as_slice().iter().rev().zip(empty.by_ref()) {
                // SAFETY: taken from the magazine by `pop_many` below.
                slot.get_or_insert(make(unsafe { pool.issue(owner, number, form) }));
                taken += 1;
            }
            owner.current.pop_many(taken);
            if taken == 0 {
                pool.refill(owner)?;
            }
        }
        Ok(())
    }

    /// Frees raw blocks.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it: it and
    /// those after it are unchanged.
    pub fn free_bulk(&mut self, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        for (freed, &block) in blocks.iter().enumerate() {
            self.free_raw(block).map_err(|error| BulkFreeError { freed, error })?;
        }
        Ok(())
    }

    /// Frees blocks, whichever owners allocated them; those of another pool are dropped.
    ///
    /// ```
    /// # use pinfold_core::dma_pool::{Block, DmaPool};
    /// # use std::sync::mpsc::sync_channel;
    /// # fn run(pool: DmaPool) -> Result<(), Box<dyn core::error::Error>> {
    /// let (filled, received) = sync_channel::<Vec<Block>>(8);
    /// let mut consumer = pool.local(); // moves to its thread
    /// let thread = std::thread::spawn(move || {
    ///     for batch in received {
    ///         consumer.free_many(batch); // no lock, although another thread has allocated them
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
    pub fn free_many(&mut self, blocks: impl IntoIterator<Item = Block>) {
        blocks.into_iter().for_each(|block| self.free(block));
    }
}

/// Blocks that were allocated for [`PoolLocal::fill_all`], and are freed unless it takes them: also
/// if the source panics.
struct New<'l> {
    local: &'l mut PoolLocal,
    blocks: Vec<Option<RawBlock>>,
}

impl New<'_> {
    fn fill(&mut self) -> Result<(), AllocError> {
        let layout = self.local.pool.layout;
        // SAFETY: a block of this pool.
        let make = |slot: Slot<'_>| unsafe { slot.block(&layout) };
        self.local.fill_with(&mut self.blocks, State::RAW, make)
    }
}

impl Drop for New<'_> {
    fn drop(&mut self) {
        for &block in self.blocks.iter().flatten() {
            // Only a wrong free of the program can have freed one of them meanwhile.
            let _ = self.local.free_raw(block);
        }
    }
}

impl Drop for PoolLocal {
    fn drop(&mut self) {
        self.pool.depot.lock().retire(&mut self.owner);
    }
}

impl fmt::Debug for PoolLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolLocal").field("pool", &self.pool.name).finish_non_exhaustive()
    }
}
