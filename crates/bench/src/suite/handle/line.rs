//! Blocks of which 64 bytes are written when they are allocated: a cache line, as a driver that
//! fills a request does.
#![expect(unsafe_code, reason = "the memory of a block is reached through its pointer")]

use super::api::{Handle, Object};
use super::blocks::{Baseline, Malloc, OwnedBlocks};
use crate::baseline::Blocks;
use crate::baseline::block::Block;
use crate::error::BenchError;

/// A handle whose blocks are written so.
pub(in crate::suite) trait AllocLine: Handle {
    /// Allocates a block and writes its first 64 bytes.
    ///
    /// # Safety
    /// The allocator's blocks have at least as many.
    unsafe fn alloc_line(&mut self) -> Result<Self::Object, BenchError>;
}

/// The words that are written: the block's address, eight times.
#[inline(always)]
fn words(object: &impl Object) -> [u64; 8] {
    [object.address(); 8]
}

impl AllocLine for OwnedBlocks {
    #[inline(always)]
    unsafe fn alloc_line(&mut self) -> Result<Self::Object, BenchError> {
        let block = self.alloc()?;
        // SAFETY: the block has as many bytes (contract) and was allocated just now; no other code
        // has its address yet.
        unsafe { block.as_raw().as_ptr().cast::<[u64; 8]>().write_unaligned(words(&block)) };
        Ok(block)
    }
}

impl<'m, B: Blocks<Block = Block<'m>>> AllocLine for Baseline<B> {
    #[inline(always)]
    unsafe fn alloc_line(&mut self) -> Result<Self::Object, BenchError> {
        let mut block = self.alloc()?;
        // SAFETY: it was made of as many bytes (contract).
        unsafe { block.write_line(words(&block)) };
        Ok(block)
    }
}

impl<const N: usize> AllocLine for Malloc<N> {
    #[inline(always)]
    unsafe fn alloc_line(&mut self) -> Result<Self::Object, BenchError> {
        let mut block = self.alloc()?;
        block.write_line(words(&block));
        Ok(block)
    }
}

/// Writes 64 bytes of each block when it is allocated.
pub(in crate::suite) struct Line<H>(H);

impl<H: AllocLine> Line<H> {
    /// # Safety
    /// The blocks have at least 64 bytes.
    pub(in crate::suite) unsafe fn new(handle: H) -> Self {
        Self(handle)
    }
}

impl<H: AllocLine> Handle for Line<H> {
    type Object = H::Object;
    #[inline(always)]
    fn alloc(&mut self) -> Result<H::Object, BenchError> {
        // SAFETY: contract of `new`.
        unsafe { self.0.alloc_line() }
    }
    #[inline(always)]
    fn free(&mut self, object: H::Object) -> Result<(), BenchError> {
        self.0.free(object)
    }
}
