//! `rbtree`: the DMA pool of the 2022 patches, from their description.
//!
//! Pages are in a tree by address, and those with a free block also in a list linked through their
//! descriptors: an alloc uses the first page of the list, a free finds its page in O(log n). The
//! tree is the standard library's B-tree instead of a red-black tree, which flatters the baseline
//! because it is shallower. A [`KernelLock`](super::lock::KernelLock) around it models the lock of
//! the original.
#![expect(
    unsafe_code,
    reason = "the links of the list are raw pointers to descriptors that the tree owns"
)]

use super::api::{BaselineError, Blocks};
use super::block::{Block, FreeList, LEAST};
use super::pages::{PAGE, Pages, blocks};
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// The descriptor of a page, allocated separately as in a kernel.
#[derive(Debug)]
struct Page<'m> {
    free: FreeList<'m>,
    in_use: u32,
    /// The next page with a free block.
    next: Option<PageRef<'m>>,
}

/// A page in the tree of the pool. Only `grow` creates one.
#[derive(Debug)]
struct PageRef<'m>(NonNull<Page<'m>>);

impl Clone for PageRef<'_> {
    fn clone(&self) -> Self {
        *self
    }
}

impl Copy for PageRef<'_> {}

/// A pool.
#[derive(Debug)]
pub struct RbTree<'m> {
    source: Pages<'m>,
    pages: BTreeMap<u64, PageRef<'m>>,
    /// The first page with a free block.
    available: Option<PageRef<'m>>,
    size: usize,
}

// SAFETY: it owns the descriptors that it points to: `grow` makes them, its drop frees them, and
// their content is `Send`.
unsafe impl Send for RbTree<'_> {}

impl<'m> RbTree<'m> {
    /// Creates a pool of blocks of `size` bytes, a multiple of 8 between 16 and a page.
    pub fn new(source: Pages<'m>, size: usize) -> Self {
        Self { source, pages: BTreeMap::new(), available: None, size: size.clamp(LEAST, PAGE) }
    }

    fn grow(&mut self) -> Result<PageRef<'m>, BaselineError> {
        let memory = self.source.alloc()?;
        let start = memory.as_ptr().addr() as u64;
        let mut free = FreeList::default();
        blocks(memory, self.size).for_each(|block| free.push(block));
        let page = Box::new(Page { free, in_use: 0, next: self.available });
        let at = PageRef(NonNull::from(Box::leak(page)));
        self.pages.insert(start, at);
        self.available = Some(at);
        Ok(at)
    }

    #[inline(always)]
    fn page(&mut self, at: PageRef<'m>) -> &mut Page<'m> {
        // SAFETY: `grow` made it from a box that only the drop of this pool frees; `self` is
        // borrowed exclusively, and no reference to a page outlives such a borrow.
        unsafe { &mut *at.0.as_ptr() }
    }
}

impl<'m> Blocks for RbTree<'m> {
    type Block = Block<'m>;

    #[inline]
    fn alloc(&mut self) -> Result<Block<'m>, BaselineError> {
        loop {
            let at = match self.available {
                Some(at) => at,
                None => self.grow()?,
            };
            let page = self.page(at);
            let (block, next) = (page.free.pop(), page.next);
            page.in_use += u32::from(block.is_some());
            if page.free.is_empty() {
                self.available = next;
            }
            if let Some(block) = block {
                return Ok(block);
            }
        }
    }

    #[inline]
    fn free(&mut self, block: Block<'m>) -> Result<(), BaselineError> {
        let address = block.address();
        let found = self.pages.range(..=address).next_back();
        let (_, at) = found
            .filter(|(start, _)| address < **start + PAGE as u64)
            .ok_or(BaselineError::Foreign(address))?;
        let (at, first) = (*at, self.available);
        let page = self.page(at);
        let was_full = page.free.is_empty();
        page.free.push(block);
        page.in_use -= 1;
        if was_full {
            page.next = first;
            self.available = Some(at);
        }
        Ok(())
    }

    fn destroy(&mut self) {
        self.available = None;
        while let Some((start, at)) = self.pages.pop_first() {
            self.source.free(usize::try_from(start).unwrap_or(usize::MAX));
            // SAFETY: `grow` leaked it from a box. It was just removed from the tree and the list
            // was emptied above, so this is its last use.
            drop(unsafe { Box::from_raw(at.0.as_ptr()) });
        }
    }
}

impl Drop for RbTree<'_> {
    fn drop(&mut self) {
        self.destroy();
    }
}
