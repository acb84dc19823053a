//! `linear`: the DMA pool of Linux up to 6.2, from its description.
//!
//! A list of pages, newest first. A page keeps the offset of its first free block, each free block the offset of the
//! next, inside the block. An alloc scans the list for a page with a free block, a free scans it for the page that
//! holds the address: both grow with the number of pages, which is what seed 000 measured (350 ms and 8,901 ms for
//! 373,959 blocks of 128 bytes).

use super::pages::{PAGE, Pages, read, write};
use super::{BaselineError, Blocks, Offset};

/// No page.
const NONE: usize = usize::MAX;

/// A page's descriptor. A kernel allocates each by itself, so a scan goes from link to link, a cache line each, and no
/// compiler can turn it into a loop over an array.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Page {
    start: Offset,
    /// Offset in the page of its first free block; `PAGE` or more: none.
    first_free: u64,
    in_use: u32,
    /// The next in the list.
    next: usize,
}

/// The pool.
#[derive(Debug)]
pub struct Linear<'m> {
    source: Pages<'m>,
    pages: Vec<Page>,
    /// The first in the list, the newest; beyond all of them: none.
    head: usize,
    size: u64,
}

impl<'m> Linear<'m> {
    /// A pool of blocks of `size` bytes, at least 16 and at most a page.
    pub fn new(source: Pages<'m>, size: u64) -> Self {
        Self { source, pages: Vec::new(), head: NONE, size: size.clamp(16, PAGE) }
    }

    fn grow(&mut self) -> Result<(), BaselineError> {
        let start = self.source.alloc()?;
        let memory = self.source.memory();
        let mut at = 0;
        while at + self.size <= PAGE {
            let next = at + self.size;
            write(&memory, start + at, if next + self.size <= PAGE { next } else { PAGE })?;
            at = next;
        }
        let next = std::mem::replace(&mut self.head, self.pages.len());
        self.pages.push(Page { start, first_free: 0, in_use: 0, next });
        Ok(())
    }

    /// The first page in the list that is looked for.
    fn find(&self, wanted: impl Fn(&Page) -> bool) -> Option<usize> {
        let mut at = self.head;
        while let Some(page) = self.pages.get(at) {
            if wanted(page) {
                return Some(at);
            }
            at = page.next;
        }
        None
    }
}

impl Blocks for Linear<'_> {
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        let with_free = |page: &Page| page.first_free < PAGE;
        let at = match self.find(with_free) {
            Some(at) => at,
            None => {
                self.grow()?;
                self.head
            }
        };
        let (memory, total) = (self.source.memory(), self.pages.len());
        let page = self.pages.get_mut(at).ok_or(BaselineError::NoPages(total))?;
        let block = page.start + page.first_free;
        page.first_free = read(&memory, block)?;
        page.in_use += 1;
        Ok(block)
    }

    fn free(&mut self, block: Offset) -> Result<(), BaselineError> {
        let memory = self.source.memory();
        let at = self.find(|page| page.start <= block && block < page.start + PAGE);
        let page = at.and_then(|at| self.pages.get_mut(at)).ok_or(BaselineError::Foreign(block))?;
        write(&memory, block, page.first_free)?;
        page.first_free = block - page.start;
        page.in_use = page.in_use.saturating_sub(1);
        Ok(())
    }

    fn destroy(mut self) {
        for page in self.pages.drain(..) {
            self.source.free(page.start);
        }
    }
}
