//! Memory for tests.

use crate::memory::MappedPages;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use std::sync::Arc;

pub(super) const PAGE: usize = 4096;

/// Pages that outlive every device.
pub(super) struct Arena(MappedPages);

impl Arena {
    pub(super) fn new(pages: usize) -> Arc<Self> {
        Self::aligned(pages, PAGE)
    }

    pub(super) fn aligned(pages: usize, align: usize) -> Arc<Self> {
        Arc::new(Self(MappedPages::new("test", pages * PAGE, align).unwrap()))
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        self.0.memory()
    }

    pub(super) fn page(self: &Arc<Self>, page: usize) -> Page {
        Page { arena: Arc::clone(self), first: page, pages: 1 }
    }

    pub(super) fn pages(self: &Arc<Self>, first: usize, pages: usize) -> Page {
        Page { arena: Arc::clone(self), first, pages }
    }
}

/// Pages of an arena.
pub(super) struct Page {
    arena: Arc<Arena>,
    first: usize,
    pages: usize,
}

// SAFETY: the arena lives as long as the page; the tests use each page once; no reference into it
// is made.
unsafe impl Pinned for Page {
    fn memory(&self) -> DmaMemory<'_> {
        self.arena.memory().part(self.first * PAGE, self.pages * PAGE).unwrap()
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}
