//! `single`: the page allocator of a kernel, one call per page, from its description.
//!
//! Free runs of 2^order pages are in a list per order under one lock, split by allocs and merged
//! with their buddy by frees. In front of it each owner has lists, as each processor of a kernel
//! has: one of single pages, refilled with 63 at a time and returning 63 when it has more than six
//! times as many, and one of runs of 2 MiB, with batches of 2 by the same rule. The lists of an
//! owner have no lock here; since 6.0 those of a kernel have one, uncontended. Zones and policies,
//! page flags and control groups are left out. All of that flatters the baseline. Links are indices
//! of 4 bytes instead of pointers.

use super::{BaselineError, Blocks};
use pinfold_replay::lock::KernelLock;

/// A page or a run, by its offset in the memory.
pub(crate) type Offset = u64;

/// log2 of the pages of the largest run: 4 MiB, as in kernels.
const LARGEST: u8 = 10;
/// log2 of the pages of a hugepage.
const HUGE: u8 = 9;
const PAGE: u64 = 4096;
const NONE: u32 = u32::MAX;
/// The `order` of a page that is not the first of a free run.
const NOT_FIRST: u8 = u8::MAX;

/// The entry of a page: the order of the free run that starts there, and its neighbours in the list
/// of that order.
#[derive(Clone, Copy, Debug)]
struct Page {
    order: u8,
    next: u32,
    previous: u32,
}

#[derive(Debug)]
struct Runs {
    pages: Vec<Page>,
    heads: [u32; LARGEST as usize + 1],
}

impl Runs {
    fn new(total: u32) -> Self {
        let page = Page { order: NOT_FIRST, next: NONE, previous: NONE };
        let mut runs =
            Self { pages: vec![page; total as usize], heads: [NONE; LARGEST as usize + 1] };
        for run in (0..total >> LARGEST).rev() {
            runs.push(run << LARGEST, LARGEST);
        }
        runs
    }

    fn push(&mut self, first: u32, order: u8) {
        let Some(head) = self.heads.get_mut(usize::from(order)) else { return };
        let next = std::mem::replace(head, first);
        if let Some(page) = self.pages.get_mut(next as usize) {
            page.previous = first;
        }
        if let Some(page) = self.pages.get_mut(first as usize) {
            *page = Page { order, next, previous: NONE };
        }
    }

    fn remove(&mut self, first: u32) {
        let Some(page) = self.pages.get_mut(first as usize) else { return };
        let Page { order, next, previous } = *page;
        page.order = NOT_FIRST;
        if let Some(page) = self.pages.get_mut(next as usize) {
            page.previous = previous;
        }
        match self.pages.get_mut(previous as usize) {
            Some(page) => page.next = next,
            None => {
                if let Some(head) = self.heads.get_mut(usize::from(order)) {
                    *head = next;
                }
            }
        }
    }

    fn alloc(&mut self, order: u8) -> Option<u32> {
        let (found, first) = (order..=LARGEST)
            .zip(self.heads.iter().skip(usize::from(order)))
            .find(|(_, head)| **head != NONE)?;
        let first = *first;
        self.remove(first);
        for half in (order..found).rev() {
            self.push(first + (1 << half), half);
        }
        Some(first)
    }

    fn free(&mut self, mut first: u32, mut order: u8) {
        while order < LARGEST {
            let buddy = first ^ (1 << order);
            if self.pages.get(buddy as usize).is_none_or(|page| page.order != order) {
                break;
            }
            self.remove(buddy);
            first &= buddy;
            order += 1;
        }
        self.push(first, order);
    }

    #[cfg(test)]
    fn free_of(&self, order: u8) -> usize {
        let runs = |page: &Page| {
            if page.order >= order && page.order != NOT_FIRST {
                1 << (page.order - order)
            } else {
                0
            }
        };
        self.pages.iter().map(runs).sum()
    }
}

/// The page allocator that its owners share.
#[derive(Debug)]
pub(crate) struct Buddy {
    runs: KernelLock<Runs>,
    total: u32,
}

impl Buddy {
    /// Creates an allocator of `total` free pages; those beyond a multiple of 1,024 are not used.
    pub(crate) fn new(total: u32) -> Self {
        Self { runs: KernelLock::new(Runs::new(total)), total }
    }

    /// Creates an owner with empty lists.
    pub(crate) fn owner(&self) -> Owner<'_> {
        let pages = List::new(self, 0, 63);
        Owner { pages, huge: List::new(self, HUGE, 2) }
    }
}

#[cfg(test)]
impl Buddy {
    /// Allocates a run of 2^order pages without an owner.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub(crate) fn alloc_run(&self, order: u8) -> Result<Offset, BaselineError> {
        let first =
            self.runs.lock().alloc(order).ok_or(BaselineError::NoPages(self.total as usize))?;
        Ok(u64::from(first) * PAGE)
    }

    /// Frees a run.
    pub(crate) fn free_run(&self, run: Offset, order: u8) {
        if let Ok(first) = u32::try_from(run / PAGE) {
            self.runs.lock().free(first, order);
        }
    }

    /// Returns how many runs of 2^order pages could be allocated; runs in the lists of owners do
    /// not count. O(pages).
    pub(crate) fn free_of(&self, order: u8) -> usize {
        self.runs.lock().free_of(order)
    }
}

/// The list of free runs of one size of an owner.
#[derive(Debug)]
struct List<'b> {
    buddy: &'b Buddy,
    free: Vec<u32>,
    order: u8,
    batch: usize,
}

impl<'b> List<'b> {
    fn new(buddy: &'b Buddy, order: u8, batch: usize) -> Self {
        Self { buddy, free: Vec::with_capacity(6 * batch + 1), order, batch }
    }

    #[inline(always)]
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        let first = match self.free.pop() {
            Some(first) => first,
            None => self.refill()?,
        };
        Ok(u64::from(first) * PAGE)
    }

    #[inline(always)]
    fn free(&mut self, run: Offset) {
        self.free.push(u32::try_from(run / PAGE).unwrap_or(NONE));
        if self.free.len() > 6 * self.batch {
            self.spill();
        }
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Result<u32, BaselineError> {
        let mut runs = self.buddy.runs.lock();
        self.free.extend(std::iter::from_fn(|| runs.alloc(self.order)).take(self.batch));
        self.free.pop().ok_or(BaselineError::NoPages(self.buddy.total as usize))
    }

    /// Returns the oldest runs.
    #[cold]
    #[inline(never)]
    fn spill(&mut self) {
        let mut runs = self.buddy.runs.lock();
        for first in self.free.drain(..self.batch) {
            runs.free(first, self.order);
        }
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        let mut runs = self.buddy.runs.lock();
        for first in self.free.drain(..) {
            runs.free(first, self.order);
        }
    }
}

/// An owner, as a processor of a kernel, with its lists.
#[derive(Debug)]
pub(crate) struct Owner<'b> {
    pages: List<'b>,
    huge: List<'b>,
}

impl Owner<'_> {
    /// Allocates a page.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub(crate) fn alloc_page(&mut self) -> Result<Offset, BaselineError> {
        self.pages.alloc()
    }

    /// Frees a page.
    #[inline]
    pub(crate) fn free_page(&mut self, page: Offset) {
        self.pages.free(page);
    }

    /// Allocates a run of 2 MiB.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub(crate) fn alloc_huge(&mut self) -> Result<Offset, BaselineError> {
        self.huge.alloc()
    }

    /// Frees a run of 2 MiB.
    #[inline]
    pub(crate) fn free_huge(&mut self, run: Offset) {
        self.huge.free(run);
    }
}

impl Blocks for Owner<'_> {
    type Block = Offset;

    #[inline]
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.alloc_page()
    }

    #[inline]
    fn free(&mut self, page: Offset) -> Result<(), BaselineError> {
        self.free_page(page);
        Ok(())
    }
}
