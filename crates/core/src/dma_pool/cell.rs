//! [`LocalCell`]: an owner's handle whose blocks return to it when they are dropped, without a lock.

use super::block::Block;
use super::error::AllocError;
use super::local::Local;
use super::pool::DmaPool;
use super::raw::RawBlock;
use super::slot::Slot;
use super::source::ChunkSource;
use super::state::Form;
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::share::{Hold, Stock};
use core::fmt;
use core::mem::ManuallyDrop;

/// An owner's handle to a pool that several blocks use at a time, on one thread: [`LocalBlock`]s, which it allocates, return to
/// it when they are dropped.
///
/// Made by [`Local::into_cell`]. Its calls, and the drops of its blocks, cost what those of the [`Local`] cost: no lock and no
/// read-modify-write, except where rows change hands. Without blocks it can move between threads.
///
/// ```
/// # use pinfold_core::dma_pool::{ChunkSource, DmaPool};
/// # fn run<S: ChunkSource>(pool: &DmaPool<S>) -> Result<(), Box<dyn core::error::Error>> {
/// let cell = pool.local().into_cell();
/// let descriptor = cell.alloc_zeroed()?;
/// descriptor.memory().write_u64(0, 1)?;
/// drop(descriptor); // no lock: only this thread can have it
/// let payload = cell.alloc()?.into_block(); // may be sent to another thread
/// cell.free(payload); // or return from there
/// # Ok(())
/// # }
/// ```
///
/// Raw blocks, bulk fills ([`Local::fill`], [`Local::fill_all`]) and runs ([`BlockRun`](super::BlockRun)) are calls of the
/// [`Local`]: turn the cell back with [`into_local`](Self::into_local) for them, when its blocks have been dropped.
///
/// # Calls from inside a source
///
/// User code runs while the cell is in use in two places: in the source's [`acquire`](ChunkSource::acquire), and in the
/// [`release`](ChunkSource::release) of another pool's source, if [`free`](Self::free) is given that pool's last block and thereby
/// drops it. If such code drops a block of the cell (from a thread-local variable, for example), or frees one through it,
/// that takes the pool's lock. If it allocates from the cell, it gets a block that is free in the pool, or
/// [`AllocError::Reentrant`]. Not so if the pool's source is acquiring a chunk for another handle or a call on the pool: the cell is not in
/// use then, and an alloc that needs a chunk waits for that one, for ever (see [`ChunkSource`]).
pub struct LocalCell<S: ChunkSource, H: Hold<Target = DmaPool<S>> = Stock<DmaPool<S>>> {
    /// Taken only while user code may run, so only calls from inside the source find it taken.
    local: Slot<Local<S, H>>,
    /// What those calls use.
    pool: H::Item,
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Local<S, H> {
    /// Turns the handle into one whose blocks return to it when they are dropped. O(1).
    pub fn into_cell(mut self) -> LocalCell<S, H> {
        let pool = self.pool.issue();
        LocalCell { local: Slot::new(self), pool }
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> fmt::Debug for LocalCell<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalCell").field("pool", &self.pool.name()).finish_non_exhaustive()
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> LocalCell<S, H> {
    /// Returns the handle. All blocks have been dropped or turned into others, since they borrow the cell. O(1).
    pub fn into_local(self) -> Local<S, H> {
        let Self { local, pool } = self;
        let mut local = local.into_inner();
        local.pool.take_back(pool);
        local
    }

    /// Returns the pool.
    pub fn pool(&self) -> &DmaPool<S> {
        &self.pool
    }

    /// Allocates a block that frees itself through this cell.
    ///
    /// # Errors
    /// [`AllocError`] if neither this owner nor the depot has a free block and the pool can acquire no chunk.
    // Always inlined, with the drop: a block that is returned through memory is read before its parts are written.
    #[inline(always)]
    pub fn alloc(&self) -> Result<LocalBlock<'_, S, H>, AllocError> {
        // SAFETY: taking a block from the stash or the current row runs no code but the pool's.
        let quickly =
            unsafe { self.local.with(|local| self.pool.alloc_quickly(&mut local.owner, Form::Owned)) };
        let raw = match quickly {
            Some(Some(raw)) => raw,
            _ => self.alloc_slowly()?,
        };
        Ok(LocalBlock { cell: self, raw })
    }

    /// As [`alloc`](Self::alloc), with all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self) -> Result<LocalBlock<'_, S, H>, AllocError> {
        self.alloc().inspect(|block| self.pool.zero(block.raw))
    }

    /// Frees a block that can be sent, whichever owner allocated it; one of another pool is dropped.
    #[inline]
    pub fn free(&self, block: Block<S, H::Item>) {
        match self.local.take() {
            Some(mut local) => local.free(block),
            None => drop(block),
        }
    }

    /// Frees such blocks, as [`Local::free_many`]. The iterator may use the cell; of a full pool it may be refused a block that this
    /// call has just freed in another owner's row. O(blocks).
    pub fn free_many(&self, blocks: impl IntoIterator<Item = Block<S, H::Item>>) {
        let many = Many::new(self);
        blocks.into_iter().for_each(|block| many.0.free(block));
    }

    /// Frees the block at an address, which its caller gives up. By that address alone: one load of both, soon after they were
    /// stored one by one, waits for the stores.
    #[inline(always)]
    fn free_at(&self, addr: usize) {
        let offset = self.pool.place().offset_of_addr(addr);
        // SAFETY: that runs no code but the pool's.
        let freed = unsafe { self.local.with(|local| local.owner.push_last(offset, Form::Owned)) };
        if freed != Some(true) {
            self.free_not_last(offset);
        }
    }

    /// Frees a block that is not the one that was allocated last: by one call, so that the drop is short enough to be inlined, of a
    /// function that saves no register.
    #[inline(never)]
    fn free_not_last(&self, offset: u64) {
        // SAFETY: that runs no code but the pool's.
        let freed =
            unsafe { self.local.with(|local| self.pool.free_settled(&mut local.owner, offset, Form::Owned)) };
        if freed != Some(true) {
            self.free_slowly(offset);
        }
    }

    /// Frees a block whose row moves to another list or is not this owner's, or from inside the source.
    #[inline(never)]
    fn free_slowly(&self, offset: u64) {
        let block = self.pool.block_at(offset);
        let freed = match self.local.take() {
            Some(mut local) => self.pool.free_slowly(&mut local.owner, block, Form::Owned),
            None => self.pool.free_owned(block),
        };
        // Never refused: only its `LocalBlock` frees an owned block.
        debug_assert_eq!(freed, Ok(()));
    }

    /// Allocates a block that the fast path does not find, or from inside the source.
    #[inline(never)]
    fn alloc_slowly(&self) -> Result<RawBlock, AllocError> {
        match self.local.take() {
            Some(mut local) => self.pool.alloc_by(&mut local.owner, Form::Owned),
            None => self.alloc_reentrant(),
        }
    }

    /// From inside the source: the pool must not wait there for the chunk that the source is to return.
    #[cold]
    fn alloc_reentrant(&self) -> Result<RawBlock, AllocError> {
        self.pool.draw_shared(Form::Owned).ok_or(AllocError::Reentrant)
    }

    /// From inside the source too.
    fn issue(&self) -> H::Item {
        self.local.take().map_or_else(|| self.pool.clone(), |mut local| local.pool.issue())
    }
}

/// A call for many blocks.
struct Many<'c, S: ChunkSource, H: Hold<Target = DmaPool<S>>>(&'c LocalCell<S, H>);

impl<'c, S: ChunkSource, H: Hold<Target = DmaPool<S>>> Many<'c, S, H> {
    fn new(cell: &'c LocalCell<S, H>) -> Self {
        // Not from inside the source: there the blocks are dropped.
        if let Some(mut local) = cell.local.take() {
            local.owner.gather();
        }
        Self(cell)
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Drop for Many<'_, S, H> {
    fn drop(&mut self) {
        if let Some(mut local) = self.0.local.take() {
            self.0.pool.announce(&mut local.owner);
        }
    }
}

/// A block that frees itself on drop, through the [`LocalCell`] that allocated it: without a lock and, unless its row has
/// changed hands, without a read-modify-write.
///
/// It borrows the cell, so it stays on the cell's thread and is gone before the cell:
///
/// ```compile_fail,E0277
/// # use pinfold_core::dma_pool::{ChunkSource, DmaPool};
/// fn send<S: ChunkSource>(pool: &DmaPool<S>) {
///     let cell = pool.local().into_cell();
///     let block = cell.alloc().unwrap();
///     std::thread::scope(|scope| drop(scope.spawn(move || drop(block))));
/// }
/// ```
///
/// ```compile_fail,E0505
/// # use pinfold_core::dma_pool::{ChunkSource, DmaPool};
/// fn outlive<S: ChunkSource>(pool: &DmaPool<S>) {
///     let cell = pool.local().into_cell();
///     let block = cell.alloc().unwrap();
///     drop(cell);
///     drop(block);
/// }
/// ```
///
/// [`into_block`](Self::into_block) returns one that can be sent and stored.
pub struct LocalBlock<'l, S: ChunkSource, H: Hold<Target = DmaPool<S>> = Stock<DmaPool<S>>> {
    cell: &'l LocalCell<S, H>,
    raw: RawBlock,
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> fmt::Debug for LocalBlock<'_, S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalBlock").field(&self.raw).finish()
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> LocalBlock<'_, S, H> {
    /// Returns the block's address for the device.
    pub fn iova(&self) -> Iova {
        self.raw.iova()
    }

    /// Returns both addresses. A raw free of the block is refused, as for [`Block::as_raw`].
    pub fn as_raw(&self) -> RawBlock {
        self.raw
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        // Without `memory_of`: the pool made the address, so there is nothing to check.
        // SAFETY: the pool made the address from the base of its span, for a block of this size in a chunk that it has
        // acquired. The block is allocated as long as this value lives, so the chunk is not released, and the memory
        // borrows this value.
        unsafe { DmaMemory::from_raw(self.raw.as_ptr(), self.cell.pool.block_size()) }
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address. O(1).
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        let this = ManuallyDrop::new(self);
        this.cell.pool.make_raw(this.raw);
        this.raw
    }

    /// Turns the block into one that can be sent to another thread, and does not borrow the cell. In the shared form it takes a
    /// share from the cell's stock, without a read-modify-write. O(1).
    pub fn into_block(self) -> Block<S, H::Item> {
        let this = ManuallyDrop::new(self);
        Block::new(this.cell.issue(), this.raw)
    }
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Drop for LocalBlock<'_, S, H> {
    #[inline(always)]
    fn drop(&mut self) {
        self.cell.free_at(self.raw.addr());
    }
}
