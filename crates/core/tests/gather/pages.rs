//! List pages in ordinary memory, and what a controller sees there.

use pinfold_core::addr::Iova;
use pinfold_core::gather::prp::{ListPage, ListPages};
use pinfold_core::mem::DmaMemory;
use std::cell::RefCell;
use std::ptr::NonNull;

/// Where the first page is for the controller; any other address that it reads is a mistake.
pub(crate) const LISTS: u64 = 0x7f10_0000_0000;

/// A few pages of one size. It knows which are out.
#[derive(Debug)]
pub(crate) struct Pages {
    bytes: usize,
    memory: Vec<u64>,
    free: RefCell<Vec<usize>>,
}

impl Pages {
    /// `count` pages of `bytes` bytes, a multiple of 8; they hold what no controller may believe.
    pub(crate) fn new(bytes: u64, count: usize) -> Self {
        let bytes = usize::try_from(bytes).expect("a small page");
        let memory = vec![0xdead_beef_dead_beef; bytes / 8 * count];
        Self { bytes, memory, free: RefCell::new((0..count).rev().collect()) }
    }

    fn part(&self, offset: usize, len: usize) -> DmaMemory<'_> {
        let base = NonNull::from(self.memory.as_slice()).cast::<u8>();
        // SAFETY: the vector is alive as long as `self`, never resized, and reached by nothing but
        // this.
        let whole = unsafe { DmaMemory::from_raw(base, self.memory.len() * 8) };
        whole.part(offset, len).expect("inside the pages")
    }

    /// Returns what the controller reads there.
    pub(crate) fn read(&self, iova: u64) -> u64 {
        let offset =
            usize::try_from(iova.checked_sub(LISTS).expect("a list page")).expect("a list page");
        u64::from_le(self.part(offset, 8).read_u64(0).expect("a list page"))
    }

    /// Returns the number of allocated pages.
    pub(crate) fn out(&self) -> usize {
        self.memory.len() * 8 / self.bytes - self.free.borrow().len()
    }
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Page<'p> {
    pages: &'p Pages,
    at: usize,
}

impl ListPage for Page<'_> {
    fn iova(&self) -> Iova {
        Iova::new(LISTS + (self.at * self.pages.bytes) as u64)
    }

    fn memory(&self) -> DmaMemory<'_> {
        self.pages.part(self.at * self.pages.bytes, self.pages.bytes)
    }

    fn quarantine(self) {}
}

impl<'p> ListPages for &'p Pages {
    type Page = Page<'p>;
    type TakeError = &'static str;

    fn take(&mut self) -> Result<Page<'p>, &'static str> {
        let at = self.free.borrow_mut().pop().ok_or("none left")?;
        Ok(Page { pages: self, at })
    }

    fn give(&mut self, page: Page<'p>) {
        let mut free = self.free.borrow_mut();
        assert!(!free.contains(&page.at), "given twice");
        free.push(page.at);
    }
}
