//! `single`: the page allocator of a kernel, one call for each page, from its description.
//!
//! Free runs of 2^order pages in a list for each order, split on the way out and merged with their buddy on the way
//! back, under one lock; before it a list of single pages, which goes to the runs for 63 at a time, as each processor
//! of a kernel has one. What a kernel does besides (zones and policies, page flags, control groups) is left out, which
//! flatters the baseline.

use super::{BaselineError, Blocks, Offset};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// log2 of the pages of the largest run: 4 MiB, as in kernels.
const LARGEST: u8 = 10;
const BATCH: usize = 63;
/// The most that the list of single pages keeps.
const HIGH: usize = 6 * BATCH;
const PAGE: u64 = 4096;
const NONE: u32 = u32::MAX;
/// What stands in `order` for a page that is not the first of a free run.
const TAKEN: u8 = u8::MAX;

/// A page's entry: the order of the free run that it begins, and its neighbours in that order's list.
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
        let page = Page { order: TAKEN, next: NONE, previous: NONE };
        let mut runs = Self { pages: vec![page; total as usize], heads: [NONE; LARGEST as usize + 1] };
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
        page.order = TAKEN;
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

    fn take(&mut self, order: u8) -> Option<u32> {
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

    fn give(&mut self, mut first: u32, mut order: u8) {
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

    fn free_of(&self, order: u8) -> usize {
        let runs = |page: &Page| {
            if page.order >= order && page.order != TAKEN { 1 << (page.order - order) } else { 0 }
        };
        self.pages.iter().map(runs).sum()
    }
}

/// The page allocator.
#[derive(Debug)]
pub struct Buddy {
    runs: Mutex<Runs>,
    singles: Mutex<Vec<u32>>,
    total: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Buddy {
    /// `total` pages, all free; what goes beyond a multiple of 1,024 is not used.
    pub fn new(total: u32) -> Self {
        let singles = Vec::with_capacity(HIGH + BATCH);
        Self { runs: Mutex::new(Runs::new(total)), singles: Mutex::new(singles), total }
    }

    fn none(&self) -> BaselineError {
        BaselineError::NoPages(self.total as usize)
    }

    /// A run of 2^order pages.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    pub fn alloc_run(&self, order: u8) -> Result<Offset, BaselineError> {
        let first = lock(&self.runs).take(order).ok_or_else(|| self.none())?;
        Ok(u64::from(first) * PAGE)
    }

    /// Takes a run back.
    pub fn free_run(&self, run: Offset, order: u8) {
        if let Ok(first) = u32::try_from(run / PAGE) {
            lock(&self.runs).give(first, order);
        }
    }

    /// One page, through the list of single ones.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline]
    pub fn alloc_page(&self) -> Result<Offset, BaselineError> {
        let mut singles = lock(&self.singles);
        if singles.is_empty() {
            let mut runs = lock(&self.runs);
            singles.extend(std::iter::from_fn(|| runs.take(0)).take(BATCH));
        }
        let page = singles.pop().ok_or_else(|| self.none())?;
        Ok(u64::from(page) * PAGE)
    }

    /// Takes a page back.
    #[inline]
    pub fn free_page(&self, page: Offset) {
        let Ok(page) = u32::try_from(page / PAGE) else { return };
        let mut singles = lock(&self.singles);
        singles.push(page);
        if singles.len() > HIGH {
            let mut runs = lock(&self.runs);
            for page in singles.drain(..BATCH) {
                runs.give(page, 0);
            }
        }
    }

    /// How many runs of 2^order pages could be had, one after the other. O(pages).
    pub fn free_of(&self, order: u8) -> usize {
        let mut runs = lock(&self.runs);
        for page in lock(&self.singles).drain(..) {
            runs.give(page, 0);
        }
        runs.free_of(order)
    }
}

impl Blocks for &Buddy {
    #[inline]
    fn alloc(&mut self) -> Result<Offset, BaselineError> {
        self.alloc_page()
    }

    #[inline]
    fn free(&mut self, page: Offset) -> Result<(), BaselineError> {
        self.free_page(page);
        Ok(())
    }

    fn destroy(self) {}
}
