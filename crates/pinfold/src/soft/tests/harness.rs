//! Memory for tests.

use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

pub(super) const PAGE: usize = 4096;

/// Pages that outlive every device.
pub(super) struct Arena {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is reached through `DmaMemory` only.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    pub(super) fn new(pages: usize) -> Arc<Self> {
        Self::aligned(pages, PAGE)
    }

    pub(super) fn aligned(pages: usize, align: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(pages * PAGE, align).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Arc::new(Self { base, layout })
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated until drop; no reference into it is made.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }

    pub(super) fn page(self: &Arc<Self>, page: usize) -> Page {
        Page { arena: Arc::clone(self), first: page, pages: 1 }
    }

    pub(super) fn pages(self: &Arc<Self>, first: usize, pages: usize) -> Page {
        Page { arena: Arc::clone(self), first, pages }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: from `alloc_zeroed` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// Pages of an arena.
pub(super) struct Page {
    arena: Arc<Arena>,
    first: usize,
    pages: usize,
}

// SAFETY: the arena lives as long as the page; the tests hand each page out once; no reference into it is made.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        self.arena.memory().part(self.first * PAGE, self.pages * PAGE).unwrap()
    }
    fn fixed_iova(&self) -> Option<(DomainId, Iova)> {
        None
    }
}
