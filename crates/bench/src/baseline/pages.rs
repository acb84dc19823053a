//! The page allocator below the baselines: whole 4 KiB pages of one piece of memory, last freed first.

use super::{BaselineError, Offset};
use pinfold_core::mem::DmaMemory;

/// How many bytes a page has.
pub const PAGE: u64 = 4096;

/// Pages of one piece of memory. It stands for `dma_alloc_coherent` at its very cheapest, a push and a pop, so that a
/// comparison is about the pools.
#[derive(Clone, Debug)]
pub struct Pages<'m> {
    memory: DmaMemory<'m>,
    free: Vec<u32>,
    total: usize,
}

impl<'m> Pages<'m> {
    /// All pages of `memory`, lowest first.
    pub fn new(memory: DmaMemory<'m>) -> Self {
        let total = memory.len() / 4096;
        let free = (0..u32::try_from(total).unwrap_or(u32::MAX)).rev().collect();
        Self { memory, free, total }
    }

    /// The memory itself.
    pub fn memory(&self) -> DmaMemory<'m> {
        self.memory
    }

    /// One page.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.free.pop().map(|page| u64::from(page) * PAGE).ok_or(BaselineError::NoPages(self.total))
    }

    /// Takes a page back.
    pub fn free(&mut self, page: Offset) {
        if let Ok(page) = u32::try_from(page / PAGE) {
            self.free.push(page);
        }
    }
}

/// Reads a `u64` link at an offset of the memory.
///
/// # Errors
/// Where it lies outside.
#[inline]
pub fn read(memory: &DmaMemory<'_>, at: Offset) -> Result<u64, BaselineError> {
    Ok(memory.read_u64(usize::try_from(at).unwrap_or(usize::MAX))?)
}

/// Writes a `u64` link at an offset of the memory.
///
/// # Errors
/// Where it lies outside.
#[inline]
pub fn write(memory: &DmaMemory<'_>, at: Offset, link: u64) -> Result<(), BaselineError> {
    Ok(memory.write_u64(usize::try_from(at).unwrap_or(usize::MAX), link)?)
}
