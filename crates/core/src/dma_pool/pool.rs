//! [`DmaPool`]: the state that its owners share, and the calls that need no handle.

use super::depot::Depot;
use super::directory::{Chunk, Chunks, Directory};
use super::error::{AllocError, CreateError, FreeError};
use super::geometry::Geometry;
use super::limits::Limits;
use super::owner::Owner;
use super::raw::RawBlock;
use super::source::{ChunkSource, span_memory};
use super::stash::Site;
use super::state::{Form, FreeRefusal};
use super::turn::Growth;
use super::watch::{Damage, OwnerTag, Watch};
use crate::addr::Iova;
use crate::frame::Frame;
use crate::mem::DmaMemory;
use crate::sync::{CachePadded, Guard, Mutex, SpinLock};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::hint::cold_path;

/// How many blocks on from a fresh one memory is prefetched for writing: nothing else brings it into the cache before.
const PREFETCHED: u64 = 8;

/// The largest span: its frame numbers have 32 bits.
const MAX_SPAN: u64 = Frame::BYTES << 32;

/// A pool of blocks of one size. See the [module](crate::dma_pool).
///
/// Calls on the pool itself take a lock; those on a [`Local`](super::Local) do not. A program that keeps the pool beside
/// its handles and blocks, or moves them between threads, puts it into a [`Shared`](crate::share::Shared).
///
/// Dropping a pool releases the chunks whose blocks are all free, and quarantines those with raw blocks still allocated,
/// since a device may still write there; [`destroy`](Self::destroy) reports them instead.
//
// Locks are taken in the order lock, depot and chunks, depot; none is held while the source runs. The fields are
// dropped in their order: what refers to rows before the chunks that have them.
pub struct DmaPool<S: ChunkSource> {
    /// The source's whole span, of which only blocks of acquired chunks are accessed.
    pub(super) memory: DmaMemory<'static>,
    pub(super) iova: Iova,
    pub(super) geometry: Geometry,
    pub(super) directory: Directory,
    /// The owner for calls that are made without a `Local`.
    lock: CachePadded<SpinLock<Owner>>,
    pub(super) depot: CachePadded<Depot>,
    pub(super) chunks: Mutex<Chunks>,
    pub(super) growth: Growth,
    source: S,
    pub(super) name: String,
    /// Debug mode. The fast paths do not check it: in debug mode an owner has no block that they could take.
    pub(super) watch: Option<Box<Watch>>,
}

/// The position of a block.
pub(super) struct Found<'a> {
    pub(super) chunk: &'a Chunk,
    pub(super) site: Site,
}

/// Where a pool's span is, for the processor and for the device.
#[derive(Clone, Copy)]
pub(super) struct Place<'m> {
    memory: DmaMemory<'m>,
    iova: Iova,
}

impl Place<'_> {
    /// The block at an offset that the pool computed.
    #[inline(always)]
    pub(super) fn block_at(&self, offset: u64) -> RawBlock {
        #[expect(clippy::cast_possible_truncation, reason = "less than the span, which is a usize")]
        let bytes = offset as usize;
        // SAFETY: the block lies in a chunk, which `grow` checked against the span; the span is one allocation (contract
        // of `DmaMemory::from_raw`).
        let ptr = unsafe { self.memory.as_ptr().add(bytes) };
        RawBlock::from_parts(ptr, Iova::new(self.iova.raw().wrapping_add(offset)))
    }

    /// The offset in the span of an address that the pool made.
    #[inline(always)]
    pub(super) fn offset_of_addr(&self, addr: usize) -> u64 {
        addr.wrapping_sub(self.memory.addr()) as u64
    }

    /// The block's offset in the span, if its two addresses agree.
    #[inline(always)]
    pub(super) fn offset_of(&self, block: RawBlock) -> Option<u64> {
        let offset = block.addr().wrapping_sub(self.memory.addr()) as u64;
        (block.iova().raw().wrapping_sub(self.iova.raw()) == offset).then_some(offset)
    }
}

impl<S: ChunkSource> DmaPool<S> {
    /// Creates a pool of blocks of `size` bytes (raised to 16 and rounded up to `align`), aligned to `align` (a power of
    /// two, or 0 for none), that never cross a multiple of `boundary` (a power of two of at least the rounded size, or 0
    /// for none).
    ///
    /// Both rules hold for the device's addresses and for the processor's. No chunk is acquired yet. The source's span has at least
    /// the bytes of one chunk: 4 KiB, or the least power of two of pages that a longer block fits in (1 GiB for one of more than
    /// 2 MiB).
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
        Self::with_watch(source, name, size, align, boundary, None)
    }

    /// Creates a pool in debug mode: free blocks are filled with [`FREE_PATTERN`](super::FREE_PATTERN), and checked and
    /// filled with [`FRESH_PATTERN`](super::FRESH_PATTERN) when they are allocated. A free block that was written to is
    /// reported by [`damages`](Self::damages) and allocated all the same.
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
        Self::with_watch(source, name, size, align, boundary, Some(Box::default()))
    }

    fn with_watch(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
        watch: Option<Box<Watch>>,
    ) -> Result<Self, CreateError> {
        // SAFETY: `self` owns the source; only blocks of acquired chunks are accessed, lent for borrows of `self`.
        let memory = unsafe { span_memory(&source, MAX_SPAN) }?;
        let iova = source.iova();
        let geometry = Geometry::new(size, align, boundary, memory.addr(), iova)?;
        geometry.check_span(memory.len() as u64)?;
        let depot = Depot::new();
        let owner = depot.register();
        let owner = if watch.is_some() { owner.watched() } else { owner };
        Ok(Self {
            memory,
            iova,
            geometry,
            directory: Directory::new(memory.len() as u64),
            lock: CachePadded(SpinLock::new(owner)),
            depot: CachePadded(depot),
            chunks: Mutex::new(Chunks::default()),
            growth: Growth::new(),
            source,
            name: name.into(),
            watch,
        })
    }

    /// Has allocs prefetch memory: for blocks that the program writes as soon as it has allocated them, in pools that do not fit
    /// into the caches.
    ///
    /// An alloc of one block that was not freed lately then prefetches one cache line for writing, the first of the block eight places on,
    /// so that the first write to that one waits less for memory. Runs and calls for many prefetch nothing, nor do processors other than
    /// x86-64. Where blocks are not written, as a device does that first, it moves cache lines to no use: in `pinfold bench pool`
    /// `mpt3sas-write` shows the gain, `mpt3sas-alloc-nowrite` the loss.
    #[must_use]
    pub fn with_prefetch(mut self) -> Self {
        self.geometry.prefetch(self.memory.addr(), PREFETCHED);
        self
    }

    /// Returns the pool's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the source of the pool's chunks.
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Returns how many bytes of a block may be used.
    pub fn block_size(&self) -> usize {
        // Below 2^31.
        usize::try_from(self.geometry.size()).unwrap_or(usize::MAX)
    }

    /// Allocates a raw block: it stays allocated until [`free_raw`](Self::free_raw).
    ///
    /// # Errors
    /// [`AllocError`] if the pool has no free block and can acquire no chunk.
    pub fn alloc_raw(&self) -> Result<RawBlock, AllocError> {
        self.alloc_shared(Form::Raw)
    }

    /// Frees a raw block, whichever owner allocated it.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw block of this pool; then nothing has changed.
    pub fn free_raw(&self, block: RawBlock) -> Result<(), FreeError> {
        self.free_outlined(&mut self.lock(), block, Form::Raw)
    }

    pub(super) fn free_owned(&self, block: RawBlock) -> Result<(), FreeError> {
        self.free_outlined(&mut self.lock(), block, Form::Owned)
    }

    /// Returns the memory of an allocated block (all of it). It may be used until the borrow of the pool ends, even if the
    /// block is freed before: [`shrink_shared`](Self::shrink_shared) keeps the block's chunk from then on, until the next
    /// [`shrink`](Self::shrink). [`Block::memory`](super::Block::memory) does not have this effect.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated block of this pool.
    pub fn memory(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        let Found { chunk, site } = self.find(block)?;
        if !chunk.lend(site.row, site.bit) {
            return Err(self.refused(chunk, block, FreeRefusal::Free));
        }
        self.memory_of(block)
    }

    /// Returns the first 64 reports of debug mode ([`PoolStats::damaged`](super::PoolStats::damaged) counts all): which
    /// free blocks were written to, and which owners had them last.
    pub fn damages(&self) -> Vec<Damage> {
        self.watch.as_ref().map_or_else(Vec::new, |watch| watch.history().damages().to_vec())
    }

    #[inline(always)]
    pub(super) fn lock(&self) -> Guard<'_, Owner> {
        self.lock.lock()
    }

    pub(super) fn register_owner(&self) -> Owner {
        let owner = self.depot.register();
        if self.watch.is_some() { owner.watched() } else { owner }
    }

    #[inline(always)]
    pub(super) fn alloc_by(&self, owner: &mut Owner, form: Form) -> Result<RawBlock, AllocError> {
        loop {
            if let Some(block) = self.alloc_quickly(owner, form) {
                return Ok(block);
            }
            // Once for each row.
            cold_path();
            // Returns no block, so that the block above stays in registers.
            self.stock(owner)?;
        }
    }

    /// Allocates a block of the stash or of the current row.
    #[inline(always)]
    pub(super) fn alloc_quickly(&self, owner: &mut Owner, form: Form) -> Option<RawBlock> {
        owner.pop(&self.geometry, form).map(|offset| self.block_at(offset))
    }

    /// Where the span is. Read once for many blocks, it stays in registers.
    #[inline(always)]
    pub(super) fn place(&self) -> Place<'_> {
        Place { memory: self.memory, iova: self.iova }
    }

    #[inline(always)]
    pub(super) fn block_at(&self, offset: u64) -> RawBlock {
        self.place().block_at(offset)
    }

    /// The memory of a block: that block's bytes and no others. The caller has found it, or allocated it.
    ///
    /// # Errors
    /// [`FreeError::Foreign`] if it does not lie in the span.
    pub(super) fn memory_of(&self, block: RawBlock) -> Result<DmaMemory<'_>, FreeError> {
        let offset = block.addr().wrapping_sub(self.memory.addr());
        self.memory.part(offset, self.block_size()).map_err(|_| self.foreign(block))
    }

    pub(super) fn zero(&self, block: RawBlock) {
        // It was just allocated, so neither is refused.
        let zeroed = self.memory_of(block).map(|memory| memory.fill(0, memory.len(), 0));
        debug_assert!(matches!(zeroed, Ok(Ok(()))));
    }

    /// Where the chunk of a block starts.
    #[cfg(all(test, not(loom)))]
    pub(super) fn chunk_of(&self, block: RawBlock) -> Result<u64, FreeError> {
        self.find(block).map(|found| found.chunk.offset())
    }
}

impl<S: ChunkSource> fmt::Debug for DmaPool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaPool")
            .field("name", &self.name())
            .field("block_bytes", &self.block_size())
            .finish_non_exhaustive()
    }
}

impl<S: ChunkSource> Drop for DmaPool<S> {
    fn drop(&mut self) {
        self.chunks.lock().limits = Limits::default();
        // A device may still write to allocated blocks: their chunks are quarantined.
        self.release_each(|chunk| chunk.rows().all(|row| row.is_idle()));
    }
}

/// How debug mode names an owner.
pub(super) fn tag_of(owner: &Owner) -> OwnerTag {
    OwnerTag { number: owner.id, tag: owner.tag }
}
