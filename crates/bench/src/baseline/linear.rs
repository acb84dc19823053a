//! `linear`: the DMA pool of Linux up to 6.2, from its description.
//!
//! A list of pages, newest first; each page has a list of its free blocks, linked inside the
//! blocks. An alloc scans for a page with a free block, a free scans for the page that contains the
//! address. Both grow with the number of pages: the published times for 373,959 blocks of 128 bytes
//! are 350 ms and 8,901 ms. A [`KernelLock`](super::lock::KernelLock) around it models the lock of
//! the original.

use super::api::{BaselineError, Blocks};
use super::block::{Block, FreeList, LEAST};
use super::pages::{PAGE, Pages, blocks};

/// The descriptor of a page, allocated separately as in a kernel: a scan follows the links, one
/// cache line each.
#[derive(Debug)]
#[repr(align(64))]
struct Page<'m> {
    start: usize,
    free: FreeList<'m>,
    in_use: u32,
    /// The next page.
    next: Option<Box<Page<'m>>>,
}

/// A pool.
#[derive(Debug)]
pub struct Linear<'m> {
    source: Pages<'m>,
    /// The newest page.
    head: Option<Box<Page<'m>>>,
    size: usize,
}

impl<'m> Linear<'m> {
    /// Creates a pool of blocks of `size` bytes, a multiple of 8 between 16 and a page.
    pub fn new(source: Pages<'m>, size: usize) -> Self {
        Self { source, head: None, size: size.clamp(LEAST, PAGE) }
    }

    fn grow(&mut self) -> Result<(), BaselineError> {
        let memory = self.source.alloc()?;
        let start = memory.as_ptr().addr();
        let mut free = FreeList::default();
        blocks(memory, self.size).for_each(|block| free.push(block));
        let next = self.head.take();
        self.head = Some(Box::new(Page { start, free, in_use: 0, next }));
        Ok(())
    }
}

/// Returns the first page in the list for which `wanted` is true.
fn find<'p, 'm>(
    mut at: &'p mut Option<Box<Page<'m>>>,
    wanted: impl Fn(&Page<'m>) -> bool,
) -> Option<&'p mut Page<'m>> {
    while !wanted(at.as_deref()?) {
        at = &mut at.as_mut()?.next;
    }
    at.as_deref_mut()
}

impl<'m> Blocks for Linear<'m> {
    type Block = Block<'m>;

    fn alloc(&mut self) -> Result<Block<'m>, BaselineError> {
        loop {
            if let Some(page) = find(&mut self.head, |page| !page.free.is_empty())
                && let Some(block) = page.free.pop()
            {
                page.in_use += 1;
                return Ok(block);
            }
            self.grow()?;
        }
    }

    fn free(&mut self, block: Block<'m>) -> Result<(), BaselineError> {
        let at = block.address();
        let addr = usize::try_from(at).unwrap_or(usize::MAX);
        let contains = |page: &Page<'_>| page.start <= addr && addr < page.start + PAGE;
        let page = find(&mut self.head, contains).ok_or(BaselineError::Foreign(at))?;
        page.free.push(block);
        page.in_use -= 1;
        Ok(())
    }

    fn destroy(&mut self) {
        let mut at = self.head.take();
        while let Some(page) = at {
            self.source.free(page.start);
            at = page.next;
        }
    }
}

impl Drop for Linear<'_> {
    /// Frees the pages one by one: a recursive drop could overflow the stack.
    fn drop(&mut self) {
        self.destroy();
    }
}
