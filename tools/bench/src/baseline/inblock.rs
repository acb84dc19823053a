//! `inblock`: the DMA pool of Linux since 6.3, from its description.
//!
//! One list of free blocks for the whole pool under one lock, with the link and the DMA address of
//! a block inside the block. Every operation takes constant time and every free writes to the
//! block; a new page is added to the list in ascending order. Frees are not checked. The original
//! also reads the DMA address on alloc, which is left out here.

use super::block::{Block, FreeList, LEAST, PAGE, Pages, blocks};
use super::{BaselineError, Blocks};
use pinfold_replay::lock::KernelLock;

#[derive(Debug)]
struct State<'m> {
    source: Pages<'m>,
    free: FreeList<'m>,
    active: usize,
}

/// A pool.
#[derive(Debug)]
pub(crate) struct InBlock<'m> {
    state: KernelLock<State<'m>>,
    size: usize,
}

impl<'m> InBlock<'m> {
    /// Creates a pool of blocks of `size` bytes, a multiple of 8 between 16 and a page.
    pub(crate) fn new(source: Pages<'m>, size: usize) -> Self {
        let state = State { source, free: FreeList::default(), active: 0 };
        Self { state: KernelLock::new(state), size: size.clamp(LEAST, PAGE) }
    }

    /// Allocates a block, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub(crate) fn alloc_shared(&self) -> Result<Block<'m>, BaselineError> {
        let mut state = self.state.lock();
        loop {
            if let Some(block) = state.free.pop() {
                state.active += 1;
                return Ok(block);
            }
            state.grow(self.size)?;
        }
    }

    /// Frees a block, from any thread.
    #[inline]
    pub(crate) fn free_shared(&self, mut block: Block<'m>) {
        let mut state = self.state.lock();
        block.write(block.address());
        state.free.push(block);
        state.active -= 1;
    }
}

impl State<'_> {
    #[cold]
    #[inline(never)]
    fn grow(&mut self, size: usize) -> Result<(), BaselineError> {
        let page = self.source.alloc()?;
        for mut block in blocks(page, size) {
            block.write(block.address());
            self.free.push(block);
        }
        Ok(())
    }
}

impl<'m> Blocks for &InBlock<'m> {
    type Block = Block<'m>;

    #[inline]
    fn alloc(&mut self) -> Result<Block<'m>, BaselineError> {
        self.alloc_shared()
    }

    #[inline]
    fn free(&mut self, block: Block<'m>) -> Result<(), BaselineError> {
        self.free_shared(block);
        Ok(())
    }
}
