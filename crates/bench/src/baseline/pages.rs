//! The page allocator below the baselines: whole 4 KiB pages of one memory range.

use super::api::BaselineError;
use super::block::Block;

/// The bytes of a page.
pub const PAGE: usize = 4096;

/// Pages of one memory range. It models `dma_alloc_coherent` at its cheapest, a push and a pop, so
/// that a comparison is about the pools.
#[derive(Debug)]
pub struct Pages<'m> {
    fresh: Vec<&'m mut [u8]>,
    /// The addresses of freed pages. Their memory is used again only after the whole allocator is
    /// gone.
    freed: Vec<usize>,
}

impl<'m> Pages<'m> {
    /// Creates an allocator of all pages of `memory`, lowest first.
    pub fn new(memory: &'m mut [u8]) -> Self {
        let fresh: Vec<_> = memory.chunks_exact_mut(PAGE).rev().collect();
        Self { freed: Vec::with_capacity(fresh.len()), fresh }
    }

    /// Allocates a page.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub fn alloc(&mut self) -> Result<&'m mut [u8], BaselineError> {
        self.fresh.pop().ok_or(BaselineError::NoPages(self.freed.capacity()))
    }

    /// Frees a page.
    pub fn free(&mut self, start: usize) {
        self.freed.push(start);
    }

    /// Returns how many pages were freed.
    pub fn freed(&self) -> usize {
        self.freed.len()
    }
}

/// Cuts memory into blocks of `size` bytes, highest first, so a list they are pushed to returns the
/// lowest first.
pub fn blocks(memory: &mut [u8], size: usize) -> impl Iterator<Item = Block<'_>> {
    memory.chunks_exact_mut(size).rev().filter_map(Block::of)
}
