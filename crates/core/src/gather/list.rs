//! List pages of PRP lists and SGLs: their source, and the record of those that a command holds.

use super::LayoutError;
use crate::addr::Iova;
use crate::dma_pool::{AllocError, Block, DmaPool, PoolLocal};
use crate::mem::DmaMemory;

/// A list page: a [`Block`], or memory of one's own.
///
/// The controller reads it at `iova`, all of it in one piece, from [`ListPages::take`] until it is
/// given back, and for good once it is quarantined. A list gives or quarantines each page that it
/// has taken, once, and drops none.
pub trait ListPage {
    /// Returns its address for the controller, which never changes. Of a PRP list a multiple of the
    /// controller's page, of an SGL of 8.
    fn iova(&self) -> Iova;

    /// Returns its memory, the same in each call, aligned to 8. What it contains at first does not
    /// matter. Of a PRP list at least a controller's page, of an SGL at least 32 bytes.
    fn memory(&self) -> DmaMemory<'_>;

    /// Abandons it without freeing it: a controller may still read it.
    fn quarantine(self);
}

impl ListPage for Block {
    fn iova(&self) -> Iova {
        self.iova()
    }

    fn memory(&self) -> DmaMemory<'_> {
        self.memory()
    }

    fn quarantine(self) {
        let _ = self.into_raw();
    }
}

/// A source of list pages: an owner's [`PoolLocal`] of a [`DmaPool`], or the pool itself, which
/// takes a lock; or one's own. Pages may differ in size and need not be adjacent. One that is
/// shorter than [`ListPage`] says, or aligned less, is refused ([`LayoutError::ListPage`]), and given
/// back.
pub trait ListPages {
    /// A page.
    type Page: ListPage;
    /// The error of [`take`](Self::take).
    type TakeError;

    /// Allocates a page: mapped for the controller to read, and the caller's alone.
    ///
    /// # Errors
    /// If no page is available. The list passes it on as [`LayoutError::Take`], after it
    /// has given back what it had taken.
    fn take(&mut self) -> Result<Self::Page, Self::TakeError>;

    /// Frees a page that this source has allocated, and that no controller reads any more.
    fn give(&mut self, page: Self::Page);
}

impl ListPages for PoolLocal {
    type Page = Block;
    type TakeError = AllocError;

    fn take(&mut self) -> Result<Block, AllocError> {
        self.alloc()
    }

    fn give(&mut self, page: Block) {
        self.free(page);
    }
}

impl ListPages for DmaPool {
    type Page = Block;
    type TakeError = AllocError;

    fn take(&mut self) -> Result<Block, AllocError> {
        self.alloc()
    }

    fn give(&mut self, page: Block) {
        drop(page);
    }
}

/// The list pages that a command holds, outside memory that the controller can write. Dropping it
/// quarantines them.
#[derive(Debug)]
pub(super) struct Held<P: ListPage, const LISTS: usize> {
    pages: [Option<P>; LISTS],
    count: usize,
}

impl<P: ListPage, const LISTS: usize> Held<P, LISTS> {
    pub(super) const fn none() -> Self {
        Self { pages: [const { None }; LISTS], count: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Acquires a page; returns its index, its address and its length.
    pub(super) fn take<L: ListPages<Page = P>>(
        &mut self,
        pages: &mut L,
    ) -> Result<(usize, Iova, usize), LayoutError<L::TakeError>> {
        let at = self.count;
        let place = self.pages.get_mut(at).ok_or(LayoutError::TooLong { limit: LISTS })?;
        let page = place.insert(pages.take().map_err(LayoutError::Take)?);
        self.count += 1;
        Ok((at, page.iova(), page.memory().len()))
    }

    /// The memory of a page; none for one that is not held.
    pub(super) fn memory(&self, at: usize) -> DmaMemory<'_> {
        self.pages.get(at).and_then(Option::as_ref).map_or(DmaMemory::EMPTY, P::memory)
    }

    /// Releases all pages.
    pub(super) fn give<L: ListPages<Page = P>>(mut self, pages: &mut L) {
        self.pages.iter_mut().filter_map(Option::take).for_each(|page| pages.give(page));
    }
}

impl<P: ListPage, const LISTS: usize> Drop for Held<P, LISTS> {
    fn drop(&mut self) {
        self.pages.iter_mut().filter_map(Option::take).for_each(P::quarantine);
    }
}
