//! `inblock`: the DMA pool of Linux since 6.3, from its description.
//!
//! One list of free blocks for the whole pool, the link and the block's own DMA address kept inside the block, under
//! one lock. Constant time, and it writes to every block that it frees; a page that is freshly had is threaded onto
//! the list in ascending order. Nothing checks what is freed. What the original reads on an alloc besides the link, the
//! DMA address beside it, is left out.

use super::block::{Block, FreeList, LEAST};
use super::lock::KernelLock;
use super::pages::{PAGE, Pages, blocks};
use super::{BaselineError, Blocks};

#[derive(Debug)]
struct State<'m> {
    source: Pages<'m>,
    pages: Vec<usize>,
    free: FreeList<'m>,
    active: usize,
}

/// The pool.
#[derive(Debug)]
pub struct InBlock<'m> {
    state: KernelLock<State<'m>>,
    size: usize,
}

impl<'m> InBlock<'m> {
    /// A pool of blocks of `size` bytes, at least 16 and at most a page, a multiple of 8.
    pub fn new(source: Pages<'m>, size: usize) -> Self {
        let state = State { source, pages: Vec::new(), free: FreeList::default(), active: 0 };
        Self { state: KernelLock::new(state), size: size.clamp(LEAST, PAGE) }
    }

    /// Returns one block, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub fn alloc_shared(&self) -> Result<Block<'m>, BaselineError> {
        let mut state = self.state.lock();
        loop {
            if let Some(block) = state.free.pop() {
                state.active += 1;
                return Ok(block);
            }
            state.grow(self.size)?;
        }
    }

    /// Takes a block back, from any thread.
    #[inline]
    pub fn free_shared(&self, mut block: Block<'m>) {
        let mut state = self.state.lock();
        block.write(block.number());
        state.free.push(block);
        state.active -= 1;
    }

    fn give_pages_back(&self) {
        let mut state = self.state.lock();
        while let Some(start) = state.pages.pop() {
            state.source.free(start);
        }
    }
}

impl State<'_> {
    #[cold]
    #[inline(never)]
    fn grow(&mut self, size: usize) -> Result<(), BaselineError> {
        let page = self.source.alloc()?;
        self.pages.push(page.as_ptr().addr());
        for mut block in blocks(page, size) {
            block.write(block.number());
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

    fn destroy(&mut self) {
        self.give_pages_back();
    }
}
