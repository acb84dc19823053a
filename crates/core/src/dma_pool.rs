//! DMA pools: blocks of one size, cut from chunks that a device can reach.
//!
//! A pool asks its [`ChunkSource`] for chunks of frames, small ones first (the smallest that wastes at most an eighth),
//! then as much again as it has, up to 2 MiB at a time; so a small pool stays small and a large one has large pages.
//! The rules of sizes, alignment and boundary, and the [report](PoolStats), are those of Linux's `dma_pool`.
//!
//! All state is out of band: nothing is read from a block or written to one but by
//! [`alloc_zeroed`](DmaPool::alloc_zeroed) and in [debug mode](DmaPool::with_debug). A device that goes on writing into a freed block
//! spoils that block's next content and nothing else.
//!
//! # How it works
//!
//! The blocks of a chunk are accounted for in *rows* of 64, 128 bytes each: a bit for each free block, a byte for each
//! block's state, and who keeps the row. An owner ([`Local`]; the pool itself has one, under a lock, for calls without a
//! `Local`) keeps rows and has one of them at hand, whose free blocks are its magazine: one word of bits. Alloc and free
//! through a `Local` clear or set a bit of that word and write the block's state, by plain loads and stores. When it is
//! empty, or a block of another row is freed, that other row is the one at hand. A free finds its row from the
//! address: a range check, a table that the pool owns, a multiplication and a shift; never a header. Of a block of the
//! row at hand the multiplication alone proves where it is.
//!
//! A row whose blocks are all out is nobody's, and whoever frees one of them keeps it next; a block of a row that another
//! owner keeps is *posted* to that owner. Rows that are free for the most part go to and from the depot, many at a time.
//!
//! Every operation takes constant time, amortised, whatever the number of blocks. No free allocates, and no lock is held
//! while the [`ChunkSource`] is at work: while one owner waits for a chunk the others free blocks, and allocate those that
//! are free.
//!
//! # How much memory a pool holds
//!
//! An alloc takes a block of its owner's rows, else of the depot or of the pool's own owner; only when none of these has
//! one does the pool grow, by a chunk of 2 MiB at most (or of one block, where that is larger). What other owners keep is
//! bounded, as in the Hoard allocator (Berger et al., ASPLOS 2000): a row of which half is free goes to the depot, where
//! any owner takes it, except for 8 to 32 such rows an owner (a quarter of the pool's, divided by the owners). Therefore,
//! with *peak* the most blocks in use at a time,
//!
//! ```text
//! blocks of the pool <= 2 * peak + 10,304 for each owner + one chunk
//! ```
//!
//! where 10,304 are 32 rows, the one at hand, and 128 whose blocks were all out when they were last looked at. In a pool that
//! never had two `Local`s at a time the threshold is 7/8 and the factor 8, because a free into a row of the depot costs
//! two read-modify-writes more.
//!
//! The bound does not cover what others post to rows that an owner keeps and that still have free blocks, until the owner
//! looks at them: two rows at each call that leaves its row at hand. An owner that makes no calls, or far fewer than
//! it keeps such rows, holds those blocks meanwhile; drop a [`Local`] that is not going to be used.
//!
//! # What is checked
//!
//! Each raw free is, also in release builds: whether the address lies in a chunk of this pool, whether a block starts
//! there, whether the device's address belongs to it, whether it is in use, and that no [`Block`] owns it
//! ([`FreeError::Owned`], also where the free races with the block's drop). A refused free changes nothing. Only a second
//! free of a raw block in the very instant of the first, one through the `Local` that keeps the block's row and one
//! elsewhere, is not told to its caller; it is found when the row is next used, frees nothing, and is counted in
//! [`PoolStats::late_double_frees`]. (What a copy of a [`RawBlock`] cannot tell is whether it is freed a
//! second time after the block was handed out anew; [`Block`] cannot be freed twice.)

mod account;
mod bulk;
mod coherent;
mod current;
mod depot;
mod directory;
mod error;
mod free;
mod geometry;
mod growth;
mod list;
mod local;
mod owner;
mod report;
mod row;
mod shared;
mod spin_lock;
mod watch;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

#[cfg(test)]
#[cfg(loom)]
mod loom_models;

pub use coherent::Coherent;
pub use error::{AllocError, BulkFreeError, Busy, CreateError, FreeError, SourceError};
pub use local::Local;
pub use report::{PoolStats, REPORT_HEADER, WIDE_HEADER};
pub use watch::{Damage, FREE_PATTERN, FRESH_PATTERN, LastUse, OwnerTag};

use crate::addr::Iova;
use crate::domain::DomainId;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ptr::NonNull;
use row::Form;
use shared::Shared;

/// Where a pool's chunks come from: a span of memory of which a piece can be had, device-reachable, at
/// `iova() + offset`.
///
/// # Safety
/// Implementers owe: `span()` and `iova()` never change; a run that `acquire` returned lies inside `memory()`, at a
/// multiple of its size, is valid memory that nobody else is given and to which no reference exists, until `release` gets
/// it back; the span ends at or below the end of 64 bits for the device. What callers owe is at `release`.
///
/// A [`DmaPool`] holds no lock while it calls `acquire` or `release`, and one thread at a time calls `acquire`. From inside
/// it the pool's blocks may be freed and its [report](DmaPool::report) read, but an alloc that needs another chunk would
/// wait for the call that it is made from.
pub unsafe trait ChunkSource: Send + Sync {
    /// The whole span that chunks can lie in. Of it a caller may reach what it has acquired, and nothing else.
    fn span(&self) -> NonNull<[u8]>;
    /// What a device calls the first byte of the span; the rest follows linearly.
    fn iova(&self) -> Iova;
    /// The domain whose devices reach the chunks there; `None` where that is no [`Domain`](crate::domain::Domain).
    fn domain(&self) -> Option<DomainId> {
        None
    }
    /// A run of 2^order frames, reachable by the device for reading and writing.
    ///
    /// # Errors
    /// [`SourceError`]; then nothing has changed.
    fn acquire(&self, order: Order) -> Result<Frame, SourceError>;
    /// Takes a run back: the device can no longer reach it when this returns.
    ///
    /// # Safety
    /// It is a run that [`acquire`](Self::acquire) returned for this order and that was not released since, and the
    /// caller reaches it no more.
    unsafe fn release(&self, frame: Frame, order: Order);
}

/// A block, raw: where it is for the processor and for the device. `Copy`, so the pool checks what is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawBlock {
    ptr: NonNull<u8>,
    iova: Iova,
}

// SAFETY: it is two addresses. Reaching the memory through them is `unsafe`, or goes through `DmaMemory`.
unsafe impl Send for RawBlock {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawBlock {}

impl RawBlock {
    /// The block with these two addresses, for callers that keep them elsewhere. Checked where it is used.
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Where the block is in this process.
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// What the device is told.
    pub const fn iova(&self) -> Iova {
        self.iova
    }
}

/// A pool of blocks of one size. See the [module](self).
///
/// The calls on the pool itself take a lock; those on a [`Local`] do not.
///
/// Dropping a pool gives the chunks back whose blocks are all free, and keeps for ever those with raw blocks out, since a
/// device may still write there; [`destroy`](Self::destroy) tells of them instead.
pub struct DmaPool<S: ChunkSource>(Box<Shared<S>>);

impl<S: ChunkSource> fmt::Debug for DmaPool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaPool")
            .field("name", &self.name())
            .field("block_bytes", &self.block_size())
            .finish_non_exhaustive()
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// A pool of blocks of `size` bytes (raised to 16 and rounded up to `align`), aligned to `align` (a power of two;
    /// 0: 1), that never cross a multiple of `boundary` (a power of two of at least the rounded size; 0: no such rule).
    ///
    /// Both rules hold for the device's addresses and for the processor's. No chunk is acquired yet.
    ///
    /// # Errors
    /// [`CreateError`], which names the argument and its limit.
    pub fn new(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, CreateError> {
        Ok(Self(Box::new(Shared::new(source, name, size, align, boundary, None)?)))
    }

    /// The same in debug mode: what is free is filled with [`FREE_PATTERN`], and looked at when it is handed out, filled
    /// with [`FRESH_PATTERN`]. A block that somebody wrote into meanwhile is reported
    /// ([`damages`](Self::damages)) and handed out all the same.
    ///
    /// Every operation takes a lock and time proportional to the size of a block, and a chunk is written to when it is
    /// acquired. Pools without debug mode pay nothing for it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_debug(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, CreateError> {
        let watch = Some(Box::default());
        Ok(Self(Box::new(Shared::new(source, name, size, align, boundary, watch)?)))
    }

    /// The first 64 reports of debug mode ([`PoolStats::damaged`] counts all): which free blocks were written to, and
    /// who had them last.
    pub fn damages(&self) -> Vec<Damage> {
        self.0.damages()
    }

    /// Looks, in debug mode, at every free block now, and returns all reports as [`damages`](Self::damages) does. Time
    /// proportional to the bytes of the pool.
    pub fn inspect(&mut self) -> Vec<Damage> {
        self.0.inspect();
        self.0.damages()
    }

    /// What the pool is called.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Where the pool's chunks come from.
    pub fn source(&self) -> &S {
        self.0.source()
    }

    /// How many bytes of a block may be used.
    pub fn block_size(&self) -> usize {
        self.0.block_size()
    }

    /// An owner's handle, whose calls take no lock. One per thread of control.
    ///
    /// Allocates where there were never as many owners.
    pub fn local(&self) -> Local<'_, S> {
        Local::new(&self.0)
    }

    /// A block that frees itself.
    ///
    /// # Errors
    /// [`AllocError`] where the pool has no free block and can have no chunk.
    pub fn alloc(&self) -> Result<Block<'_, S>, AllocError> {
        let raw = self.0.alloc_shared(Form::Owned)?;
        Ok(Block { pool: &self.0, raw })
    }

    /// The same, all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_zeroed(&self) -> Result<Block<'_, S>, AllocError> {
        self.alloc().inspect(|block| self.0.zero(block.raw))
    }

    /// A block, raw: it is out until [`free_raw`](Self::free_raw).
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_raw(&self) -> Result<RawBlock, AllocError> {
        self.0.alloc_shared(Form::Raw)
    }

    /// The same, all bytes 0.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_raw_zeroed(&self) -> Result<RawBlock, AllocError> {
        self.alloc_raw().inspect(|&block| self.0.zero(block))
    }

    /// Takes a block back, from whichever owner's hand it came.
    ///
    /// # Errors
    /// [`FreeError`] where it is not a raw block of this pool in use; then nothing has changed.
    pub fn free_raw(&self, block: RawBlock) -> Result<(), FreeError> {
        self.0.free(&mut self.0.lock(), block, Form::Raw)
    }

    /// Fills the empty slots with raw blocks; returns how many slots are full afterwards. Fewer than all where the
    /// pool has no more.
    pub fn fill(&self, slots: &mut [Option<RawBlock>]) -> usize {
        self.0.fill_shared(slots)
    }

    /// The same, all bytes of the new blocks 0.
    pub fn fill_zeroed(&self, slots: &mut [Option<RawBlock>]) -> usize {
        self.0.fill_zeroed_shared(slots)
    }

    /// Takes many blocks back.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it.
    pub fn free_bulk(&self, blocks: &[RawBlock]) -> Result<(), BulkFreeError> {
        self.0.free_bulk(&mut self.0.lock(), blocks)
    }

    /// Takes back the blocks in the slots, which are empty afterwards: the way back for [`fill`](Self::fill).
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first that is refused, with how many were freed before it; it and those after it stay
    /// in their slots.
    #[inline]
    pub fn free_slots(&self, slots: &mut [Option<RawBlock>]) -> Result<(), BulkFreeError> {
        self.0.free_slots(&mut self.0.lock(), slots)
    }

    /// The memory of a block that is in use (all of it).
    ///
    /// # Errors
    /// [`FreeError`] where it is not a block of this pool in use.
    pub fn memory(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        self.0.memory(block)
    }

    /// Gives chunks back to the source of which every block is in the depot, and returns how many bytes that was.
    /// What owners hold stays; drop a [`Local`] to put what it has into the depot.
    ///
    /// Time proportional to the number of rows. Waits for the source. It takes the pool for itself, so that nobody
    /// still has the [memory](Self::memory) of a block that is gone.
    pub fn shrink(&mut self) -> u64 {
        self.0.shrink()
    }

    /// The pool's account; as [`Display`](fmt::Display) it is the kernel's report. Time proportional to the number
    /// of blocks.
    pub fn report(&self) -> PoolStats {
        self.0.stats()
    }

    /// Gives all chunks back.
    ///
    /// # Errors
    /// [`Busy`] where raw blocks are still out: it has the pool, whole, and says how many and where one is.
    pub fn destroy(self) -> Result<(), Busy<S>> {
        match self.0.live() {
            (_, None) => Ok(()),
            (blocks, Some(first)) => Err(Busy { pool: self, blocks, first }),
        }
    }
}

/// A block that frees itself on drop, from any thread.
///
/// Dropped, it goes through the pool's own owner, which takes a lock. [`Local::free`] takes it back without.
pub struct Block<'p, S: ChunkSource> {
    pool: &'p Shared<S>,
    raw: RawBlock,
}

impl<S: ChunkSource> fmt::Debug for Block<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.raw).finish()
    }
}

impl<S: ChunkSource> Block<'_, S> {
    /// What the device is told.
    pub fn iova(&self) -> Iova {
        self.raw.iova
    }

    /// Where it is, raw. The block stays this one's to free: until it is dropped or turned
    /// [raw](Self::into_raw), a raw free of it is refused with [`FreeError::Owned`].
    pub fn as_raw(&self) -> RawBlock {
        self.raw
    }

    /// The block's memory, to be read and written beside the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        // It lies in the span: the pool handed it out.
        self.pool.memory_of(self.raw).unwrap_or(DmaMemory::EMPTY)
    }

    /// The block, raw: from here it is out until it is freed by hand.
    #[must_use = "the block is out until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        let raw = self.raw;
        self.pool.disown(raw);
        core::mem::forget(self);
        raw
    }
}

impl<S: ChunkSource> Drop for Block<'_, S> {
    fn drop(&mut self) {
        // Never refused: nothing but its `Block` frees an owned block.
        let freed = self.pool.free(&mut self.pool.lock(), self.raw, Form::Owned);
        debug_assert_eq!(freed, Ok(()));
    }
}
