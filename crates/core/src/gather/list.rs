//! List pages of PRP lists and SGLs: their source, and the record of those that a command holds.

use crate::addr::Iova;
use crate::dma_pool::{AllocError, ChunkSource, DmaPool, FreeError, RawBlock};
use crate::mem::DmaMemory;

/// A list page.
#[derive(Clone, Copy, Debug)]
pub struct ListPage<'l, P> {
    /// The handle that releases it.
    pub page: P,
    /// Its address for the controller.
    pub iova: Iova,
    /// Its memory.
    pub memory: DmaMemory<'l>,
}

/// A source of list pages: a [`DmaPool`]. For PRP lists its blocks are a controller's page long and aligned to it; for
/// SGLs they are all of one size, at least 32 bytes, and aligned to 8.
pub trait ListPages {
    /// The handle that releases a page.
    type Page: Copy;
    /// The error of [`take`](Self::take).
    type TakeError;
    /// The error of [`give`](Self::give).
    type GiveError;

    /// Allocates a page.
    ///
    /// # Errors
    /// If no page is available.
    fn take(&self) -> Result<ListPage<'_, Self::Page>, Self::TakeError>;

    /// Frees a page.
    ///
    /// # Errors
    /// If it is not allocated.
    fn give(&self, page: Self::Page) -> Result<(), Self::GiveError>;
}

/// Why a pool returned no list page.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolTakeError {
    /// The pool has no block.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The block is not the pool's.
    #[error(transparent)]
    Block(#[from] FreeError),
}

impl<S: ChunkSource> ListPages for DmaPool<S> {
    type Page = RawBlock;
    type TakeError = PoolTakeError;
    type GiveError = FreeError;

    fn take(&self) -> Result<ListPage<'_, RawBlock>, PoolTakeError> {
        let page = self.alloc_raw()?;
        Ok(ListPage { page, iova: page.iova(), memory: self.memory(page)? })
    }

    fn give(&self, page: RawBlock) -> Result<(), FreeError> {
        self.free_raw(page)
    }
}

/// The list pages that a command holds, outside memory that the controller can write.
#[derive(Clone, Debug)]
pub(super) struct Held<P, const LISTS: usize> {
    pages: [Option<P>; LISTS],
    count: usize,
}

/// Why no further list page was acquired.
pub(super) enum ListError<E> {
    /// The capacity is reached.
    Full {
        /// The capacity.
        limit: usize,
    },
    /// The source returned an error.
    Take(E),
}

impl<P: Copy, const LISTS: usize> Held<P, LISTS> {
    pub(super) const NONE: Self = Self { pages: [None; LISTS], count: 0 };

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Acquires a page.
    pub(super) fn take<'l, L: ListPages<Page = P>>(
        &mut self,
        pages: &'l L,
    ) -> Result<ListPage<'l, P>, ListError<L::TakeError>> {
        let place = self.pages.get_mut(self.count).ok_or(ListError::Full { limit: LISTS })?;
        let taken = pages.take().map_err(ListError::Take)?;
        *place = Some(taken.page);
        self.count += 1;
        Ok(taken)
    }

    /// Releases all pages; returns the first error after trying all.
    pub(super) fn give<L: ListPages<Page = P>>(&self, pages: &L) -> Result<(), L::GiveError> {
        let mut outcome = Ok(());
        for &page in self.pages.iter().flatten() {
            outcome = outcome.and(pages.give(page));
        }
        outcome
    }
}
