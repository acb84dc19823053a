//! [`DmaPool`], its [`Builder`] and its [`DmaPoolStats`]: the calls that need no owner's handle.

use super::block::Block;
use super::debug::{Damage, History};
use super::directory::{Span, Units};
use super::error::{AllocError, CreateError, FreeError, RangeError};
use super::inner::{Front, Growth, Handle, Inner};
use super::layout::Layout;
use super::local::PoolLocal;
use super::magazine::{Cap, Depot};
use super::source::{ChunkSource, span_memory};
use super::state::State;
use super::unit::RawBlock;
use crate::addr::Iova;
use crate::counters;
use crate::domain::DomainId;
use crate::frame::Frame;
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering, SpinLock, count_steps};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::ptr::NonNull;

/// The largest span: its frame numbers have 32 bits.
const MAX_SPAN: u64 = Frame::BYTES << 32;

/// The most bytes that an owner caches, unless the builder sets another limit.
const CACHED_BYTES: u64 = 512 << 10;

/// A pool of blocks of one size. See the [module](crate::dma_pool).
///
/// A handle: a clone is the same pool, which lives as long as a handle, a [`PoolLocal`] or a
/// [`Block`]. Calls on it take a lock; those on a [`PoolLocal`] do not.
///
/// With its last handle the pool releases the chunks whose blocks are all free, and quarantines
/// those with raw blocks still allocated, since a device may still write there;
/// [`destroy`](Self::destroy) reports them instead.
#[derive(Clone)]
pub struct DmaPool(Handle);

/// The configuration of a new pool. Every value but the block's size has a default.
///
/// # Memory of a pool
/// Besides its blocks a pool has 8 bytes for each 2 MiB of its source's span, and, for each aligned
/// 2 MiB of the span in which it ever had a chunk (1 GiB for blocks of more than 2 MiB), 1 byte for
/// each block that fits in there and about 100 more. They stay until the pool ends, since a late
/// free must find them. So a pool never takes more than the span's length divided by the size of a block, but
/// it may take that for few blocks: 128 KiB for one chunk of 4 KiB with blocks of 16 bytes, 32
/// times its bytes, and as much for each other 2 MiB in which it then has such a chunk, also after
/// it has released the one before. A source that scatters small chunks over a long span, or moves
/// them through it, should have a span of its own for the pool that is not much longer than what
/// the pool needs. Owners' caches and the lists of free blocks take 4 to 5 bytes for each block
/// that is or was allocated, until a [shrink](DmaPool::shrink).
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct Builder {
    name: String,
    size: usize,
    align: usize,
    boundary: usize,
    minimum: u64,
    maximum: u64,
    cached_bytes: u64,
    debug: bool,
}

impl Builder {
    /// The size of a block in bytes, 1 to 1 GiB; raised to 16, and rounded up to the
    /// alignment.
    pub fn block(self, bytes: usize) -> Self {
        Self { size: bytes, ..self }
    }

    /// The alignment of blocks: a power of two, or 0 (the default) for none.
    pub fn align(self, bytes: usize) -> Self {
        Self { align: bytes, ..self }
    }

    /// Blocks never cross a multiple of `bytes`, a power of two of at least a block's size, or 0
    /// (the default) for no boundary. As the alignment it holds for the device's addresses and for
    /// the processor's.
    pub fn boundary(self, bytes: usize) -> Self {
        Self { boundary: bytes, ..self }
    }

    /// The pool acquires this many blocks when it is built, and shrinking keeps them. 0 unless set.
    ///
    /// Guarantees that `blocks` blocks can be allocated without a call of the source, less those
    /// that other owners cache.
    pub fn minimum(self, blocks: u64) -> Self {
        Self { minimum: blocks, ..self }
    }

    /// The pool acquires no chunk once it has this many blocks. Its last chunk may take it past
    /// that, by less than the blocks of the [smallest chunk](Self::build). An alloc that would need
    /// more is refused with [`AllocError::Maximum`]. No maximum unless set.
    pub fn maximum(self, blocks: u64) -> Self {
        Self { maximum: blocks, ..self }
    }

    /// The most bytes of free blocks that an owner caches; at least one block, at most 1,024. 512
    /// KiB unless set.
    pub fn cached_bytes(self, bytes: u64) -> Self {
        Self { cached_bytes: bytes, ..self }
    }

    /// Debug mode: free blocks are filled with [`FREE_PATTERN`](super::FREE_PATTERN), and checked
    /// and filled with [`FRESH_PATTERN`](super::FRESH_PATTERN) when they are allocated. A free
    /// block that was written to is reported by [`damages`](DmaPool::damages) and allocated all the
    /// same. Every alloc and free takes a lock and time proportional to the size of a block, and a
    /// chunk is written to when it is acquired.
    pub fn debug(self) -> Self {
        Self { debug: true, ..self }
    }

    /// Builds a pool whose chunks come from `source`, of which it keeps a clone: an arena, or an
    /// `Arc` of any source.
    ///
    /// The source's span has at least the bytes of the smallest chunk, which has a block wherever it
    /// lies: the least power of two of pages that a block fits in, or twice that, up to 2 MiB, if
    /// more than half of it is a block and neither the size nor the boundary is that power of two.
    /// 1 GiB for blocks of more than 2 MiB.
    ///
    /// # Errors
    /// [`CreateError`], which names the argument and its limit. Nothing stays acquired.
    pub fn build<S: ChunkSource + Clone + 'static>(
        self,
        source: &S,
    ) -> Result<DmaPool, CreateError> {
        // SAFETY: the pool owns a clone, which has the same span; only blocks of acquired chunks
        // are accessed.
        let memory = unsafe { span_memory(source, MAX_SPAN) }?;
        let iova = source.iova();
        let layout = Layout::new(self.size, self.align, self.boundary, (memory.addr(), iova))?;
        layout.check_span(memory.len() as u64)?;
        let len = memory.len();
        // SAFETY: one allocation, as long as the source that the pool owns (its contract).
        let span = unsafe { Span::new(&layout, memory.as_ptr(), len, iova) };
        let span = span.map_err(|_| CreateError::NoMemory { len })?;
        self.finish(layout, span, Some(Box::new(source.clone())))
    }

    /// Builds a pool without a source: its blocks come from [ranges](DmaPool::add_range) that the
    /// caller adds.
    ///
    /// # Errors
    /// [`CreateError`], which names the argument and its limit; a minimum is refused.
    pub fn build_empty(self) -> Result<DmaPool, CreateError> {
        let iova = Iova::new(0);
        let layout = Layout::new(self.size, self.align, self.boundary, (0, iova))?;
        // SAFETY: no byte is used.
        let span = unsafe { Span::new(&layout, NonNull::dangling(), 0, iova) };
        self.finish(layout, span.map_err(|_| CreateError::NoMemory { len: 0 })?, None)
    }

    fn finish(
        self,
        layout: Layout,
        span: Span,
        source: Option<Box<dyn ChunkSource>>,
    ) -> Result<DmaPool, CreateError> {
        let (minimum, maximum) = (self.minimum, self.maximum);
        if maximum < minimum.max(1) {
            return Err(CreateError::Limits { minimum, maximum });
        }
        let mut depot = Depot::new(Cap::new(self.cached_bytes, layout.size()));
        let front = depot.new_owner(0);
        let inner = Inner {
            units: Units::new(&layout, span),
            layout,
            history: self.debug.then(Box::<History>::default),
            source,
            name: self.name,
            minimum,
            maximum,
            pressure: AtomicU64::new(0),
            handles: AtomicU64::new(1),
            growth: CachePadded(Growth::new()),
            front: CachePadded(SpinLock::new(Front::new(front))),
            depot: CachePadded(Mutex::new(depot)),
        };
        let pool = Handle::new(inner);
        pool.reserve()?;
        Ok(DmaPool(pool))
    }
}

impl DmaPool {
    /// Returns a builder of a pool with this name.
    pub fn builder(name: &str) -> Builder {
        Builder {
            name: name.into(),
            size: 0,
            align: 0,
            boundary: 0,
            minimum: 0,
            maximum: u64::MAX,
            cached_bytes: CACHED_BYTES,
            debug: false,
        }
    }

    /// Returns a new owner's handle. Allocates memory for its magazines.
    pub fn local(&self) -> PoolLocal {
        PoolLocal::new(self.0.clone())
    }

    /// Returns the pool's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the domain whose devices reach the blocks; `None` if the source names none.
    pub fn domain(&self) -> Option<DomainId> {
        self.0.source.as_ref().and_then(|source| source.domain())
    }

    /// Allocates a block. Takes the front's lock; [`PoolLocal::alloc`] takes none.
    ///
    /// # Errors
    /// [`AllocError`] if the pool has no free block and can acquire no chunk.
    pub fn alloc(&self) -> Result<Block, AllocError> {
        let slot = self.0.alloc_shared(State::OWNED)?;
        // SAFETY: just allocated.
        Ok(unsafe { Block::new(slot) })
    }

    /// Allocates a raw block: it stays allocated until it is freed by address.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_raw(&self) -> Result<RawBlock, AllocError> {
        let slot = self.0.alloc_shared(State::RAW)?;
        // SAFETY: a block of this pool.
        Ok(unsafe { slot.block(&self.0.layout) })
    }

    /// Frees a raw block, whichever owner allocated it.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw block of this pool; then nothing has changed.
    pub fn free_raw(&self, block: RawBlock) -> Result<(), FreeError> {
        self.0.free_raw(&mut self.0.front.lock().owner, block)
    }

    /// Adds memory of the caller, aligned to the blocks' alignment and to the boundary (or 2 MiB,
    /// if that is less), as blocks. Returns how many there are. A free that names an address looks
    /// through the ranges one after the other.
    ///
    /// # Errors
    /// [`RangeError`]; then nothing has changed.
    ///
    /// # Safety
    /// `memory` is one allocation, valid for reads and writes and used by nothing else until the
    /// pool has ended: its last handle, `PoolLocal` and `Block` have been dropped. The device
    /// reaches its first byte at `iova`, and the rest follows linearly.
    pub unsafe fn add_range(&self, memory: NonNull<[u8]>, iova: Iova) -> Result<u64, RangeError> {
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.0.add_range(memory, iova) }
    }

    /// Releases the chunks whose blocks are all in the depot, as far as the
    /// [minimum](Builder::minimum) allows, and returns how many bytes those were. Other threads may
    /// use the pool meanwhile.
    ///
    /// A block in an owner's magazine keeps its chunk. Active owners return their cached blocks at
    /// their next exchange, so a second call later releases more; an idle one can be
    /// [flushed](PoolLocal::flush). O(blocks of the pool), but no lock is held for longer than it
    /// takes to go through 512 numbers or the list of chunks: an alloc that finds no block
    /// meanwhile waits for the end, any other call does not. Waits for the source, with no lock
    /// held; must not be called from inside the source. Releases nothing while a
    /// [`for_each_block`](Self::for_each_block) runs.
    ///
    /// If the source panics for a chunk, the others are released before the panic continues.
    pub fn shrink(&self) -> u64 {
        self.0.shrink()
    }

    /// Ends the pool and releases all chunks. O(blocks), and no lock is held for it while other
    /// handles may be in use.
    ///
    /// # Errors
    /// [`Busy`] if other handles exist, or blocks are allocated, one of which it names. It contains
    /// the unchanged pool.
    pub fn destroy(self) -> Result<(), Busy> {
        // First: without other handles no block is allocated meanwhile. Acquire: nor do uses of
        // those that were dropped come later.
        let handles = self.0.handles.load(Ordering::Acquire).saturating_sub(1);
        let (mut blocks, mut first) = (0, None);
        // Where one is removed meanwhile, there is another handle.
        self.0.each_chunk(|chunk| {
            count_steps(chunk.states().len());
            for slot in chunk.slots() {
                if matches!(slot.state().get(), State::RAW | State::OWNED) {
                    blocks += 1;
                    // SAFETY: a block of this pool, which has, or had, its chunk.
                    first.get_or_insert_with(|| unsafe { slot.block(&self.0.layout) });
                }
            }
        });
        if handles == 0 && blocks == 0 {
            return Ok(());
        }
        let holder = first.and_then(|first| self.0.history.as_ref()?.holder(first));
        Err(Busy { pool: self, handles, blocks, first, holder })
    }

    /// Returns the pool's counters; they are displayed as the kernel's report. O(blocks), and a lock
    /// is held for 32 chunks at a time. What other threads do meanwhile may be seen in some counters
    /// and not in others.
    pub fn stats(&self) -> DmaPoolStats {
        /// A thread that shrinks the pool all the time does not keep the caller for ever.
        const ATTEMPTS: usize = 8;
        let depot = self.0.depot.lock();
        let (blocks, in_depot) = (depot.blocks, depot.free());
        let (bytes, peak) = (depot.bytes, depot.peak);
        drop(depot);
        let (mut chunks, mut in_use, mut free_chunks) = (0, 0, 0);
        for _ in 0..ATTEMPTS {
            (chunks, in_use, free_chunks) = (0, 0, 0);
            let all = self.0.each_chunk(|chunk| {
                count_steps(chunk.states().len());
                let states = chunk.states().iter().map(State::get);
                let live =
                    states.filter(|&state| matches!(state, State::RAW | State::OWNED)).count();
                chunks += 1;
                in_use += live as u64;
                free_chunks += u64::from(live == 0);
            });
            if all {
                break;
            }
        }
        DmaPoolStats {
            name: self.0.name.clone(),
            block_bytes: self.0.layout.size(),
            in_use,
            peak,
            blocks,
            cached: blocks.saturating_sub(in_use).saturating_sub(in_depot),
            in_depot,
            chunks,
            free_chunks,
            bytes,
            damaged: self.0.history.as_ref().map_or(0, |history| history.damaged()),
        }
    }

    /// Calls `each` with every block of the pool, allocated or free, and its memory, in ascending
    /// order in each chunk: to register the blocks with hardware, or to write data that stay the
    /// same while blocks are allocated and freed. The pool does not write to blocks except in
    /// `alloc_zeroed` and in debug mode, which reports a write to a free block as damage. Blocks of
    /// chunks that are acquired later are not seen: with equal minimum and maximum there are none.
    ///
    /// A visit does not allocate a block: a free of it is refused, unless it is allocated as a raw
    /// one. O(blocks). `each` may use the pool; until this returns, [`shrink`](Self::shrink)
    /// releases no chunk on any thread.
    pub fn for_each_block(&self, mut each: impl FnMut(RawBlock, DmaMemory<'_>)) {
        let visit = Visit::new(&self.0);
        // Chunks are added at the end of the list.
        let mut left = visit.chunks;
        visit.pool.each_chunk(|chunk| {
            let Some(fewer) = left.checked_sub(1) else { return };
            left = fewer;
            for slot in chunk.slots() {
                // SAFETY: a block of the pool, whose chunks stay as long as the visit.
                let (block, memory) = unsafe { visit.pool.place(slot) };
                each(block, memory);
            }
        });
    }

    /// Checks the free blocks in the depot and the front, in debug mode, and returns its first 64
    /// reports ([`DmaPoolStats::damaged`] counts all): the free blocks that were written to, and
    /// the owners that had them last. Time proportional to the bytes of the pool.
    pub fn damages(&self) -> Vec<Damage> {
        let Some(history) = &self.0.history else { return Vec::new() };
        self.0.drain_front();
        self.0.depot.lock().for_each(|number| {
            // SAFETY: the number of a block in the depot.
            let slot = unsafe { self.0.units.slot(number) };
            // SAFETY: its number stays there while the depot is locked.
            let (block, memory) = unsafe { self.0.place(slot) };
            history.inspect(block, memory);
        });
        history.damages()
    }

    /// Returns how many bytes the pool's own state takes.
    #[cfg(any(feature = "bench-internals", all(test, not(loom))))]
    pub fn metadata_bytes(&self) -> usize {
        size_of::<Inner>() + self.0.growth.metadata_bytes() + self.0.depot.lock().metadata_bytes()
    }
}

/// Keeps the chunks that a pool has from being released.
struct Visit<'p> {
    pool: &'p Inner,
    /// How many it has.
    chunks: usize,
}

impl<'p> Visit<'p> {
    fn new(pool: &'p Inner) -> Self {
        let mut depot = pool.depot.lock();
        depot.visits += 1;
        Self { pool, chunks: depot.chunks.len() }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.pool.depot.lock().visits -= 1;
    }
}

impl fmt::Debug for DmaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaPool")
            .field("name", &self.name())
            .field("block_bytes", &self.0.layout.size())
            .finish_non_exhaustive()
    }
}

/// A pool that cannot be destroyed because other handles exist, or blocks are allocated. It is
/// unchanged.
pub struct Busy {
    /// The pool.
    pub pool: DmaPool,
    /// The number of other handles of the pool.
    pub handles: u64,
    /// The number of allocated blocks.
    pub blocks: u64,
    /// One of them.
    pub first: Option<RawBlock>,
    /// The [number](PoolLocal::number) of the owner that allocated it, if the pool is in
    /// [debug mode](Builder::debug).
    pub holder: Option<u32>,
}

impl fmt::Debug for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy")
            .field("handles", &self.handles)
            .field("blocks", &self.blocks)
            .field("first", &self.first)
            .field("holder", &self.holder)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, handles, blocks, first, holder } = self;
        write!(f, "cannot destroy pool {:?}: ", pool.name())?;
        if let Some(first) = first {
            write!(f, "{blocks} blocks are allocated, one of them at {:p}", first.as_ptr())?;
            if let Some(holder) = holder {
                write!(f, " by owner {holder}")?;
            }
            f.write_str("; free them first")?;
        }
        if *handles > 0 {
            let separator = if first.is_some() { "; " } else { "" };
            write!(
                f,
                "{separator}{handles} other handles of it exist; drop clones of the pool and \
                 `PoolLocal`s first"
            )?;
        }
        Ok(())
    }
}

impl core::error::Error for Busy {}

counters! {
    /// A pool's statistics. While other threads allocate and free, the numbers may be of slightly
    /// different times.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub struct DmaPoolStats {
        /// The size of a block.
        block_bytes: Level Bytes "bytes of a block",
        /// All blocks.
        blocks: Level Count "blocks",
        /// Allocated blocks.
        in_use: Level Count "  in use",
        /// The most blocks that were in use or cached by owners at a time. Taken when an owner
        /// fetches blocks, so it is at least the peak in use, and above it by at most the blocks
        /// that owners cache.
        peak: Peak Count "  peak",
        /// Free blocks that owners cache, the pool's front among them.
        cached: Level Count "  cached by owners",
        /// Free blocks in the depot, available to every owner.
        in_depot: Level Count "  in the depot",
        /// Chunks of frames.
        chunks: Level Count "chunks",
        /// Chunks of which no block is in use. A shrink releases those of which no block is cached
        /// either, as far as the pool's minimum allows.
        free_chunks: Level Count "  free",
        /// The size of all chunks.
        bytes: Level Bytes "  bytes",
        /// Free blocks that debug mode found overwritten; 0 without debug mode.
        damaged: Total Count "damaged blocks",
    }
    besides {
        /// The pool's name.
        name: alloc::string::String,
    }
}

/// The kernel's report, byte for byte: its header, then the pool's line, `%-16s %4zu %4zu %4u %2zu`
/// of name, blocks in use, all blocks, block size, chunks.
impl fmt::Display for DmaPoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, in_use, blocks, block_bytes, chunks, .. } = self;
        writeln!(f, "poolinfo - 0.1")?;
        writeln!(f, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}")
    }
}
