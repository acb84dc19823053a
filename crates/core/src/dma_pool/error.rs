//! Errors of pools, each with the value and the limit. Nothing has changed when one is returned.
//!
//! [`AllocError`] and [`FreeError`] are also those of a [page pool](crate::page_pool), and
//! `AllocError` is that of an arena of the crate `pinfold`: a program that allocates from several of
//! them has one error to handle.

use crate::addr::Iova;
use crate::domain::BackendError;
use crate::frame::{Frame, FrameError, Order};
use crate::mem::AccessError;
use core::fmt;

/// The largest chunk in bytes, and so the largest block.
pub(super) const LARGEST: u64 = 1 << 30;

/// Why no chunk can be acquired.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// No frames are available.
    #[error(transparent)]
    Frames(#[from] FrameError),
    /// Frames are available, but mapping them for the device failed.
    #[error("cannot map a chunk for the device: {0}")]
    Map(#[source] BackendError),
    /// No run is that large.
    #[error("cannot acquire {bytes} contiguous bytes: the largest run has {limit}")]
    TooLarge {
        /// The requested value.
        bytes: u64,
        /// The size of the largest run.
        limit: u64,
    },
    /// The source gives its pool no more memory than this.
    #[error(
        "cannot acquire {bytes} more bytes: the pool may have {limit}, and {left} of them are left"
    )]
    Limit {
        /// The requested value.
        bytes: u64,
        /// The rest of the limit.
        left: u64,
        /// The most memory that the pool may have.
        limit: u64,
    },
    /// The source violated its contract: the run lies outside its span. It was released.
    #[error("the source returned a run outside its span: {0}")]
    Outside(AccessError),
}

/// A source's span is empty, too long for frame numbers, or ends beyond 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "cannot use a span of {len:#x} bytes at {iova}: it must have 1 to {limit:#x} bytes and end within 64 bits"
)]
pub struct SpanError {
    /// The length of the span in bytes.
    pub len: usize,
    /// The start of the span as seen by the device.
    pub iova: Iova,
    /// The limit in bytes.
    pub limit: u64,
}

/// Why a pool cannot be created.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A block has at least 1 byte and at most 1 GiB.
    #[error("cannot create blocks of {size} bytes: a block has 1 to {limit} bytes", limit = LARGEST)]
    Size {
        /// The requested value.
        size: usize,
    },
    /// An alignment is a power of two (or 0, which means 1).
    #[error("alignment {align} is invalid: it must be a power of two, or 0 for none")]
    Align {
        /// The requested value.
        align: usize,
    },
    /// A boundary is 0, or a power of two of at least a block.
    #[error(
        "boundary {boundary} is invalid for blocks of {size} bytes: it must be 0 for none, or a power of two of at least a block"
    )]
    Boundary {
        /// The requested value.
        boundary: usize,
        /// The size of a block in bytes, rounded up.
        size: u64,
    },
    /// A block must fit in the largest run of frames there is.
    #[error(
        "cannot create blocks of {size} bytes (after rounding): a chunk has at most {limit} bytes"
    )]
    TooLarge {
        /// The size of a block in bytes, rounded up.
        size: u64,
        /// The size of the largest chunk in bytes.
        limit: u64,
    },
    /// The source's span is shorter than the smallest chunk that holds a block, so every alloc
    /// would fail.
    #[error(
        "cannot create blocks of {size} bytes (after rounding) in a span of {len} bytes: their smallest chunk has {chunk} bytes; use a larger arena, or smaller blocks"
    )]
    SpanTooSmall {
        /// The size of a block in bytes, rounded up.
        size: u64,
        /// The size of the smallest chunk in bytes.
        chunk: u64,
        /// The length of the span in bytes.
        len: u64,
    },
    /// The span's start is not aligned enough for the blocks' alignment or boundary.
    #[error(
        "cannot align blocks to, or keep them within, {needed} bytes: the span starts at {addr:#x} and {iova}, aligned to {have} only"
    )]
    Base {
        /// The required alignment of the span's start.
        needed: u64,
        /// Its alignment.
        have: u64,
        /// The start of the span in this process.
        addr: usize,
        /// The start of the span as seen by the device.
        iova: Iova,
    },
    /// The source's span cannot be used.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// The process has no memory for the table of the span: 8 bytes for each 2 MiB.
    #[error("cannot allocate the table of a span of {len} bytes: use a shorter span")]
    NoMemory {
        /// The length of the span in bytes.
        len: usize,
    },
    /// The maximum is at least 1, and at least the minimum.
    #[error(
        "cannot limit a pool to {minimum} to {maximum} blocks: the maximum must be at least 1 and the minimum; lower the minimum, or raise the maximum"
    )]
    Limits {
        /// The requested minimum.
        minimum: u64,
        /// The requested maximum.
        maximum: u64,
    },
    /// The source has not enough chunks for the minimum.
    #[error(
        "cannot reserve {minimum} blocks: with all the chunks that are available the pool has {available}: {cause}; lower the minimum, or give the source more memory",
        cause = cause(error)
    )]
    Minimum {
        /// The requested minimum.
        minimum: u64,
        /// The number of blocks in all chunks that the source can provide.
        available: u64,
        /// Why no further chunk was acquired.
        #[source]
        error: AllocError,
    },
}

/// Why no block, page, fragment or buffer can be allocated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Nothing is free, and the pool's source has no chunk. Other owners of a DMA pool may hold free
    /// blocks (see [`DmaPoolStats::cached`](super::DmaPoolStats)).
    #[error(
        "{0}; other owners of the pool may hold free memory: drop idle `PoolLocal`s, free some, or give the source more memory"
    )]
    Source(#[from] SourceError),
    /// The source violated its contract: a run of this order cannot start there. It was released.
    #[error("the source returned {frame} for order {order}: outside its span, or not aligned to that size", order = order.get())]
    Misplaced {
        /// The first frame of the run.
        frame: Frame,
        /// The requested value.
        order: Order,
    },
    /// The pool has no free block left for this owner, and its [maximum](super::Builder::maximum)
    /// of blocks.
    #[error(
        "no free block: the pool may have {maximum} blocks and has {blocks}; other owners may hold free ones: drop idle `PoolLocal`s, free blocks, or build the pool with a larger maximum"
    )]
    Maximum {
        /// The limit.
        maximum: u64,
        /// The number of blocks in the pool.
        blocks: u64,
    },
    /// The pool has no free block left for this owner, and no source but
    /// [ranges](super::DmaPool::add_range) of the caller.
    #[error(
        "no free block: the pool has {blocks} blocks in the ranges that were added to it; other owners may hold free ones: drop idle `PoolLocal`s, free blocks, or add another range"
    )]
    Ranges {
        /// The number of blocks in the pool.
        blocks: u64,
    },
    /// Blocks are numbered with 32 bits, and the pool has used all numbers.
    #[error(
        "no number is left for a block: a pool of blocks of {size} bytes uses at most {limit} bytes of its source's span, in units of 2 MiB or 1 GiB, until it ends; use another pool"
    )]
    Numbers {
        /// The size of a block in bytes.
        size: u64,
        /// The most bytes of the span that chunks of such blocks can ever lie in.
        limit: u64,
    },
    /// The number of pages of a page pool in use is
    /// [`max_in_use`](crate::page_pool::Config::max_in_use).
    #[error(
        "no page is free: {limit} pages are in use, the pool's limit; return some, or raise `max_in_use`"
    )]
    Limit {
        /// The limit.
        limit: u64,
    },
    /// A fragment of a page, or a buffer, has at least 1 byte; a fragment has at most what a device
    /// may write of a page.
    #[error("cannot allocate {len} bytes: 1 to {limit} are possible")]
    Length {
        /// The requested value.
        len: usize,
        /// The largest one.
        limit: usize,
    },
    /// A buffer is larger than its arena.
    #[error("cannot allocate {requested} bytes: the arena has {arena}; build it larger")]
    TooLarge {
        /// The requested size in bytes.
        requested: u64,
        /// The size of the arena.
        arena: u64,
    },
    /// The arena has no free run of that length.
    #[error(
        "cannot allocate {requested} contiguous bytes: {in_use} of the arena's {arena} bytes are in use; free some, or build it larger"
    )]
    Exhausted {
        /// The requested size in bytes.
        requested: u64,
        /// Bytes in use.
        in_use: u64,
        /// The size of the arena.
        arena: u64,
    },
    /// The process has no memory for the states of the blocks or pages, or for the tables that lead
    /// to them. The chunk was released.
    #[error(
        "cannot allocate the states of a chunk of {bytes} bytes with blocks of {size} bytes: free memory of the process, or raise its limits"
    )]
    NoMemory {
        /// The size of the chunk in bytes.
        bytes: u64,
        /// The size of a block in bytes.
        size: u64,
    },
}

/// Why a range cannot be added to a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// No block fits into the range, or it ends beyond 64 bits.
    #[error(
        "cannot add {len} bytes at {iova}: no block of {size} bytes fits, or they end beyond 64 bits"
    )]
    Size {
        /// The length of the range in bytes.
        len: usize,
        /// The start of the range as seen by the device.
        iova: Iova,
        /// The size of a block in bytes.
        size: u64,
    },
    /// The start is not aligned enough for the blocks' alignment or boundary.
    #[error("cannot add a range at {addr:#x} and {iova}: both must be multiples of {needed} bytes")]
    Align {
        /// The start of the range in this process.
        addr: usize,
        /// The start of the range as seen by the device.
        iova: Iova,
        /// The required alignment.
        needed: u64,
    },
    /// The pool would have more blocks than its maximum.
    #[error("cannot add {blocks} blocks: the pool may have {maximum} blocks and has {have}")]
    Maximum {
        /// The number of blocks in the range.
        blocks: u64,
        /// The number of blocks in the pool.
        have: u64,
        /// The limit.
        maximum: u64,
    },
    /// Blocks are numbered with 32 bits.
    #[error(
        "cannot add {len} bytes: numbers are left for one range of {left} bytes, with blocks of {size} bytes; use another pool"
    )]
    Numbers {
        /// The length of the range in bytes.
        len: usize,
        /// The size of a block in bytes.
        size: u64,
        /// The length in bytes of the longest range that can be added. Each range uses the numbers
        /// of whole units of 2 MiB (of 1 GiB for blocks of more than 2 MiB).
        left: u64,
    },
    /// The process has no memory for the states of the blocks, or for the tables that lead to them.
    #[error(
        "cannot allocate the states of {len} bytes with blocks of {size} bytes: add a shorter range, or raise the process's limits"
    )]
    NoMemory {
        /// The length of the range in bytes.
        len: usize,
        /// The size of a block in bytes.
        size: u64,
    },
}

/// Why a slice was not filled. Its slots are as before, and no block of it stays allocated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot allocate {wanted} blocks at once: only {available} are available: {error}")]
pub struct BulkAllocError {
    /// The number of empty slots.
    pub wanted: usize,
    /// The number of blocks that could be allocated for them; they are free again.
    pub available: usize,
    /// Why there was no further one. At the [maximum](AllocError::Maximum) it counts those blocks
    /// as in use.
    #[source]
    pub error: AllocError,
}

/// Returns why no chunk was acquired, without what helps an alloc only: free blocks do not raise
/// the number of a pool's blocks.
fn cause(error: &AllocError) -> &dyn fmt::Display {
    match error {
        AllocError::Source(source) => source,
        other => other,
    }
}

/// Why a raw block or page cannot be freed or accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The address is not in memory of this pool.
    #[error(
        "{addr:#x} is in no memory of this pool, whose span is {start:#x}..{end:#x}: free it in the pool that allocated it"
    )]
    Foreign {
        /// The address.
        addr: usize,
        /// The start of the pool's span.
        start: usize,
        /// The end of the pool's span.
        end: usize,
    },
    /// The address is in memory of this pool, but no block or page starts there.
    #[error(
        "no block or page starts at {addr:#x}: the memory from {start:#x} on is divided into {count} of {size} bytes"
    )]
    Misaligned {
        /// The address.
        addr: usize,
        /// The start of the chunk of blocks, or of the page.
        start: usize,
        /// The number of blocks in the chunk; 1 for a page.
        count: u32,
        /// The size of a block in bytes.
        size: u64,
    },
    /// A [`Block`](super::Block), a [`Page`](crate::page_pool::Page) or a
    /// [`Fragment`](crate::page_pool::Fragment) owns the memory and frees it when it is dropped.
    #[error(
        "the memory at {addr:#x} is owned by a value, which frees it on drop: use its `into_raw` to free it by address"
    )]
    Owned {
        /// The address.
        addr: usize,
    },
    /// The block or page is free.
    #[error(
        "the memory at {addr:#x} is free: it was freed before; free it once, and do not use it afterwards"
    )]
    DoubleFree {
        /// The address.
        addr: usize,
    },
    /// The two addresses do not belong to one block or page.
    #[error(
        "the memory at {addr:#x} is {expected} for the device, not {iova}: pass both addresses as the pool returned them"
    )]
    WrongIova {
        /// The address.
        addr: usize,
        /// The device's address that the caller passed.
        iova: Iova,
        /// Its device address.
        expected: Iova,
    },
}

/// Why a list of blocks was not freed completely.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("after {freed} of the blocks were freed: {error}")]
pub struct BulkFreeError {
    /// The number of blocks at the start of the list that were freed. The next one was refused; it
    /// and the rest are unchanged.
    pub freed: usize,
    /// Why it was refused.
    #[source]
    pub error: FreeError,
}
