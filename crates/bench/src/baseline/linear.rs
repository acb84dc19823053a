//! `linear`: the DMA pool of Linux up to 6.2, from its description.
//!
//! A list of pages, newest first. A page keeps its first free block, each free block the next one, inside the block. An
//! alloc scans the list for a page with a free block, a free scans it for the page that holds the address: both grow with
//! the number of pages, which is what seed 000 measured (350 ms and 8,901 ms for 373,959 blocks of 128 bytes). The
//! original's lock is around it: [`KernelLock`](super::lock::KernelLock).

use super::block::{Block, FreeList, LEAST};
use super::pages::{PAGE, Pages, blocks};
use super::{BaselineError, Blocks};

/// A page's descriptor, allocated by itself as in a kernel: a scan goes from link to link, a cache line each.
#[derive(Debug)]
#[repr(align(64))]
struct Page<'m> {
    start: usize,
    free: FreeList<'m>,
    in_use: u32,
    /// The next in the list.
    next: Option<Box<Page<'m>>>,
}

/// The pool.
#[derive(Debug)]
pub struct Linear<'m> {
    source: Pages<'m>,
    /// The newest.
    head: Option<Box<Page<'m>>>,
    size: usize,
}

impl<'m> Linear<'m> {
    /// A pool of blocks of `size` bytes, at least 16 and at most a page, a multiple of 8.
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

/// Returns the first page in the list that is looked for.
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
        let at = block.number();
        let addr = usize::try_from(at).unwrap_or(usize::MAX);
        let holds = |page: &Page<'_>| page.start <= addr && addr < page.start + PAGE;
        let page = find(&mut self.head, holds).ok_or(BaselineError::Foreign(at))?;
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
    /// One by one: the list may be longer than the stack is deep.
    fn drop(&mut self) {
        self.destroy();
    }
}
