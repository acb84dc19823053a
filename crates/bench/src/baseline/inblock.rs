//! `inblock`: the DMA pool of Linux since 6.3, from its description.
//!
//! One list of free blocks for the whole pool, the link and the block's own DMA address kept inside the block, under
//! one lock. Constant time, and it writes to every block that it frees; a page that is freshly had is threaded onto
//! the list in ascending order. Nothing checks what is freed.

use super::pages::{PAGE, Pages, read, write};
use super::{BaselineError, Blocks, Offset};
use std::sync::Mutex;

const NONE: u64 = u64::MAX;

#[derive(Debug)]
struct State<'m> {
    source: Pages<'m>,
    pages: Vec<Offset>,
    next: u64,
    active: usize,
}

/// The pool.
#[derive(Debug)]
pub struct InBlock<'m> {
    state: Mutex<State<'m>>,
    size: u64,
}

impl<'m> InBlock<'m> {
    /// A pool of blocks of `size` bytes, at least 16 and at most a page.
    pub fn new(source: Pages<'m>, size: u64) -> Self {
        let state = State { source, pages: Vec::new(), next: NONE, active: 0 };
        Self { state: Mutex::new(state), size: size.clamp(16, PAGE) }
    }

    /// One block, from any thread.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub fn alloc_shared(&self) -> Result<Offset, BaselineError> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.next == NONE {
            state.grow(self.size)?;
        }
        let block = state.next;
        state.next = read(&state.source.memory(), block)?;
        state.active += 1;
        Ok(block)
    }

    /// Takes a block back, from any thread.
    ///
    /// # Errors
    /// Where the block lies outside the memory.
    pub fn free_shared(&self, block: Offset) -> Result<(), BaselineError> {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let memory = state.source.memory();
        write(&memory, block, state.next)?;
        write(&memory, block + 8, block)?;
        state.next = block;
        state.active = state.active.saturating_sub(1);
        Ok(())
    }
}

impl State<'_> {
    fn grow(&mut self, size: u64) -> Result<(), BaselineError> {
        let start = self.source.alloc()?;
        let memory = self.source.memory();
        let blocks = PAGE / size;
        for i in 0..blocks {
            let at = start + i * size;
            write(&memory, at, if i + 1 < blocks { at + size } else { self.next })?;
            write(&memory, at + 8, at)?;
        }
        self.next = start;
        self.pages.push(start);
        Ok(())
    }
}

impl Blocks for &InBlock<'_> {
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.alloc_shared()
    }

    fn free(&mut self, block: Offset) -> Result<(), BaselineError> {
        self.free_shared(block)
    }

    fn destroy(self) {}
}

impl Blocks for InBlock<'_> {
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.alloc_shared()
    }

    fn free(&mut self, block: Offset) -> Result<(), BaselineError> {
        self.free_shared(block)
    }

    fn destroy(self) {
        let mut state = self.state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        while let Some(start) = state.pages.pop() {
            state.source.free(start);
        }
    }
}
