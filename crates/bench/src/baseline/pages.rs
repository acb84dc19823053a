//! The page allocator below the baselines: whole 4 KiB pages of one piece of memory.

use super::BaselineError;
use super::block::Block;

/// How many bytes a page has.
pub const PAGE: usize = 4096;

/// Pages of one piece of memory. It stands for `dma_alloc_coherent` at its very cheapest, a push and a pop, so that a
/// comparison is about the pools.
#[derive(Debug)]
pub struct Pages<'m> {
    fresh: Vec<&'m mut [u8]>,
    /// Pages that were given back, by address: the memory is lent out again when all of this is gone.
    back: Vec<usize>,
}

impl<'m> Pages<'m> {
    /// All pages of `memory`, lowest first.
    pub fn new(memory: &'m mut [u8]) -> Self {
        let fresh: Vec<_> = memory.chunks_exact_mut(PAGE).rev().collect();
        Self { back: Vec::with_capacity(fresh.len()), fresh }
    }

    /// Returns one page.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub fn alloc(&mut self) -> Result<&'m mut [u8], BaselineError> {
        self.fresh.pop().ok_or(BaselineError::NoPages(self.back.capacity()))
    }

    /// Takes a page back.
    pub fn free(&mut self, start: usize) {
        self.back.push(start);
    }

    /// Returns how many pages came back.
    pub fn back(&self) -> usize {
        self.back.len()
    }
}

/// Cuts memory into blocks of `size` bytes, highest first, so that a list they are pushed to returns the lowest first.
pub fn blocks(memory: &mut [u8], size: usize) -> impl Iterator<Item = Block<'_>> {
    memory.chunks_exact_mut(size).rev().filter_map(Block::of)
}
