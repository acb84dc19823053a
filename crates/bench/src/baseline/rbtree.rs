//! `rbtree`: the DMA pool of the 2022 patches (seeds 000 and 001), from their description.
//!
//! Pages in a tree by address, and those with a free block in a list besides: an alloc takes the list's first page, a
//! free finds its page in O(log n). The tree is the standard library's B-tree where the patches have a red-black one,
//! which flatters the baseline: it is shallower.

use super::pages::{PAGE, Pages, read, write};
use super::{BaselineError, Blocks, Offset};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
struct Page {
    first_free: u64,
    in_use: u32,
}

/// The pool.
#[derive(Debug)]
pub struct RbTree<'m> {
    source: Pages<'m>,
    pages: BTreeMap<Offset, Page>,
    /// Pages that have a free block; the last is the list's head.
    available: Vec<Offset>,
    size: u64,
}

impl<'m> RbTree<'m> {
    /// A pool of blocks of `size` bytes, at least 16 and at most a page.
    pub fn new(source: Pages<'m>, size: u64) -> Self {
        Self { source, pages: BTreeMap::new(), available: Vec::new(), size: size.clamp(16, PAGE) }
    }

    fn grow(&mut self) -> Result<Offset, BaselineError> {
        let start = self.source.alloc()?;
        let memory = self.source.memory();
        let mut at = 0;
        while at + self.size <= PAGE {
            let next = at + self.size;
            write(&memory, start + at, if next + self.size <= PAGE { next } else { PAGE })?;
            at = next;
        }
        self.pages.insert(start, Page { first_free: 0, in_use: 0 });
        self.available.push(start);
        Ok(start)
    }
}

impl Blocks for RbTree<'_> {
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        let start = match self.available.last() {
            Some(start) => *start,
            None => self.grow()?,
        };
        let memory = self.source.memory();
        let page = self.pages.get_mut(&start).ok_or(BaselineError::Foreign(start))?;
        let block = start + page.first_free;
        page.first_free = read(&memory, block)?;
        page.in_use += 1;
        if page.first_free >= PAGE {
            self.available.pop();
        }
        Ok(block)
    }

    fn free(&mut self, block: Offset) -> Result<(), BaselineError> {
        let memory = self.source.memory();
        let (start, page) = self
            .pages
            .range_mut(..=block)
            .next_back()
            .filter(|(start, _)| block < *start + PAGE)
            .ok_or(BaselineError::Foreign(block))?;
        write(&memory, block, page.first_free)?;
        if page.first_free >= PAGE {
            self.available.push(*start);
        }
        page.first_free = block - start;
        page.in_use = page.in_use.saturating_sub(1);
        Ok(())
    }

    fn destroy(mut self) {
        for start in self.pages.keys() {
            self.source.free(*start);
        }
    }
}
