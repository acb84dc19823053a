//! What can go wrong with a pool, each with the value and the limit. Nothing has changed when one is returned.

use crate::addr::Iova;
use crate::domain::BackendError;
use crate::frame::{Frame, FrameError, Order};
use crate::mem::AccessError;

/// Why a chunk could not be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// No frames.
    #[error(transparent)]
    Frames(#[from] FrameError),
    /// The frames were there, but the device could not be given access to them.
    #[error("the device could not be given access to a chunk: {0}")]
    Map(#[source] BackendError),
    /// No run is as large.
    #[error("{bytes} bytes in one run: the largest has {limit}")]
    TooLarge {
        /// What was asked for.
        bytes: u64,
        /// The most that there can be.
        limit: u64,
    },
    /// The source broke its promise: the run lies outside its span. It was given back.
    #[error("the source gave a run outside its span: {0}")]
    Outside(AccessError),
}

/// Why a pool was not made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A block has at least 1 byte and at most `i32::MAX`.
    #[error("blocks of {size} bytes: a block has 1 to {limit} bytes", limit = i32::MAX)]
    Size {
        /// What was asked for.
        size: usize,
    },
    /// An alignment is a power of two (or 0, which means 1).
    #[error("an alignment of {align}: it must be a power of two, or 0 for none")]
    Align {
        /// What was asked for.
        align: usize,
    },
    /// A boundary is 0, or a power of two of at least a block.
    #[error(
        "a boundary of {boundary} for blocks of {size} bytes: it must be 0 for none, or a power of two of at least a block"
    )]
    Boundary {
        /// What was asked for.
        boundary: usize,
        /// How many bytes a block has after rounding.
        size: u64,
    },
    /// A block must fit in the largest run of frames there is.
    #[error("blocks of {size} bytes after rounding: a chunk has at most {limit} bytes")]
    TooLarge {
        /// How many bytes a block has after rounding.
        size: u64,
        /// How many bytes the largest chunk has.
        limit: u64,
    },
    /// Where the span starts decides what alignments and boundaries its blocks can keep.
    #[error(
        "blocks aligned to or kept within {needed} bytes: the span starts at {addr:#x} and {iova}, multiples of {have} only"
    )]
    Base {
        /// What the start of the span would have to be a multiple of.
        needed: u64,
        /// What it is a multiple of.
        have: u64,
        /// Where the span starts in this process.
        addr: usize,
        /// Where the span starts for the device.
        iova: Iova,
    },
    /// The span must be one that frames can number, and its last address must fit in 64 bits.
    #[error("a span of {len:#x} bytes at {iova}: it must have 1 to {limit:#x} bytes and end within 64 bits")]
    Span {
        /// How many bytes the span has.
        len: usize,
        /// Where it starts for the device.
        iova: Iova,
        /// How many bytes it may have.
        limit: u64,
    },
}

/// Why no block was handed out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No chunk could be had. Free blocks may be left in the hands of other owners (see
    /// [`PoolStats::in_magazines`](super::PoolStats)).
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The source broke its promise: the run is not where a run of this order can be. It was given back.
    #[error("the source gave {frame} as a run of order {order}: it is outside the span or not aligned to its size", order = order.get())]
    Misplaced {
        /// Where the run starts.
        frame: Frame,
        /// What was asked for.
        order: Order,
    },
}

/// Why a block was not taken back, or not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// The address is not in a chunk of this pool.
    #[error(
        "{addr:#x} is in no chunk of this pool, whose span is {start:#x}..{end:#x}: free it where it came from"
    )]
    Foreign {
        /// The address that was given.
        addr: usize,
        /// Where the pool's span starts.
        start: usize,
        /// Where the pool's span ends.
        end: usize,
    },
    /// The address is in a chunk of this pool, but no block starts there.
    #[error(
        "{addr:#x} is where no block starts: the chunk at {chunk:#x} has {blocks} blocks of {size} bytes"
    )]
    Misaligned {
        /// The address that was given.
        addr: usize,
        /// Where the chunk starts.
        chunk: usize,
        /// How many blocks the chunk has.
        blocks: u32,
        /// How many bytes a block has.
        size: u64,
    },
    /// A [`Block`](super::Block) owns the block and frees it when it is dropped.
    #[error(
        "the block at {addr:#x} belongs to a Block, which frees it on drop: use Block::into_raw to free it by hand"
    )]
    Owned {
        /// The address that was given.
        addr: usize,
    },
    /// The block is free already.
    #[error("the block at {addr:#x} is not in use: it was freed before")]
    DoubleFree {
        /// The address that was given.
        addr: usize,
    },
    /// The two addresses do not belong to one block.
    #[error("the block at {addr:#x} is {expected} for the device, not {iova}")]
    WrongIova {
        /// The address that was given.
        addr: usize,
        /// The device's address that was given with it.
        iova: Iova,
        /// The device's address that belongs to it.
        expected: Iova,
    },
}

/// Why a list of blocks was not taken back whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("after {freed} blocks of the list were freed: {error}")]
pub struct BulkFreeError {
    /// How many blocks, from the start of the list, are free now. The one after them is at fault; it and the rest
    /// are as they were.
    pub freed: usize,
    /// What is wrong with it.
    #[source]
    pub error: FreeError,
}
