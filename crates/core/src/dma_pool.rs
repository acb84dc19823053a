//! DMA pools: blocks of one size, cut from chunks that a device can reach.
//! (Skeleton: the face is fixed, the inside is being written.)
#![allow(unused_variables, clippy::todo, missing_debug_implementations)]

use crate::addr::Iova;
use crate::frame::{Frame, FrameError, Order};
use crate::mem::DmaMemory;
use core::ptr::NonNull;

/// Why a chunk could not be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// No frames.
    #[error(transparent)]
    Frames(#[from] FrameError),
    /// The frames were there, but the device could not be given access to them.
    #[error("the device could not be given access to a chunk: {0}")]
    Map(alloc::string::String),
}

/// Where a pool's chunks come from: a span of memory of which a piece can be had, device-reachable, at
/// `iova() + offset`.
///
/// # Safety
/// Implementers owe: `memory()` and `iova()` never change; a run that `acquire` returned lies inside `memory()`, is
/// valid memory that nobody else is given and to which no reference exists, until `release` gets it back.
/// Callers owe nothing beyond the types.
pub unsafe trait ChunkSource: Send + Sync {
    /// The whole span that chunks can lie in.
    fn memory(&self) -> DmaMemory;
    /// What a device calls the first byte of the span; the rest follows linearly.
    fn iova(&self) -> Iova;
    /// A run of 2^order frames, reachable by the device for reading and writing.
    fn acquire(&self, order: Order) -> Result<Frame, SourceError>;
    /// Takes a run back: the device can no longer reach it when this returns.
    fn release(&self, frame: Frame, order: Order);
}

/// A block, raw: where it is for the processor and for the device. `Copy`, so the pool checks what is freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawBlock {
    ptr: NonNull<u8>,
    iova: Iova,
}

impl RawBlock {
    /// Where the block is in this process.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }
    /// What the device is told.
    pub fn iova(&self) -> Iova {
        self.iova
    }
}

/// Why a pool was not made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {}
/// Why no block was handed out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No chunk could be had.
    #[error(transparent)]
    Source(#[from] SourceError),
}
/// Why a block was not taken back.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {}

/// A pool of blocks of one size.
pub struct DmaPool<S>(S);

impl<S: ChunkSource> DmaPool<S> {
    /// A pool of blocks of `size` bytes, aligned to `align`, that never cross a multiple of `boundary` (0: no such rule).
    pub fn new(
        source: S,
        name: &str,
        size: usize,
        align: usize,
        boundary: usize,
    ) -> Result<Self, CreateError> {
        todo!()
    }
    /// How many bytes of a block may be used.
    pub fn block_size(&self) -> usize {
        todo!()
    }
    /// A block, raw.
    pub fn alloc_raw(&self) -> Result<RawBlock, AllocError> {
        todo!()
    }
    /// Takes a block back.
    pub fn free_raw(&self, block: RawBlock) -> Result<(), FreeError> {
        todo!()
    }
    /// The block's memory (all of it).
    pub fn memory(&self, block: RawBlock) -> Result<DmaMemory, FreeError> {
        todo!()
    }
    /// A block that frees itself.
    pub fn alloc(&self) -> Result<Block<'_, S>, AllocError> {
        todo!()
    }
    /// The same, all bytes 0.
    pub fn alloc_zeroed(&self) -> Result<Block<'_, S>, AllocError> {
        todo!()
    }
    /// An owner's handle.
    pub fn local(&self) -> Local<'_, S> {
        todo!()
    }
}

/// One owner's way to a pool.
pub struct Local<'p, S>(&'p DmaPool<S>);

/// A block that frees itself on drop.
pub struct Block<'p, S: ChunkSource> {
    pool: &'p DmaPool<S>,
    raw: RawBlock,
}

impl<S: ChunkSource> Block<'_, S> {
    /// What the device is told.
    pub fn iova(&self) -> Iova {
        self.raw.iova
    }
    /// The block's memory, to be read and written beside the device.
    pub fn memory(&self) -> DmaMemory {
        todo!()
    }
}
