//! The pages that a command's list fills: where they come from, and which of them a command holds.

use crate::addr::Iova;
use crate::dma_pool::{AllocError, ChunkSource, DmaPool, FreeError, RawBlock};
use crate::mem::DmaMemory;

/// A page for a list, as its owner hands it out.
#[derive(Clone, Copy, Debug)]
pub struct ListPage<'l, P> {
    /// What it goes back by.
    pub page: P,
    /// Where the controller finds it.
    pub iova: Iova,
    /// Its memory.
    pub memory: DmaMemory<'l>,
}

/// Where list pages come from: a [`DmaPool`]. For PRP lists its blocks are a controller's page long and aligned to it; for
/// SGLs they are all of one size, at least 32 bytes, and aligned to 8.
pub trait ListPages {
    /// What a page goes back by.
    type Page: Copy;
    /// Why there was no page.
    type TakeError;
    /// Why a page was not taken back.
    type GiveError;

    /// A page that nobody else has.
    ///
    /// # Errors
    /// Where there is none.
    fn take(&self) -> Result<ListPage<'_, Self::Page>, Self::TakeError>;

    /// Takes a page back.
    ///
    /// # Errors
    /// Where it was not handed out.
    fn give(&self, page: Self::Page) -> Result<(), Self::GiveError>;
}

/// Why a pool had no list page.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolTakeError {
    /// No block.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A block, but the pool does not know it.
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

/// Why there is no further list page.
pub(super) enum ListError<E> {
    /// There is no room for more than so many.
    Full {
        /// How many.
        limit: usize,
    },
    /// There was none.
    Take(E),
}

impl<P: Copy, const LISTS: usize> Held<P, LISTS> {
    pub(super) const NONE: Self = Self { pages: [None; LISTS], count: 0 };

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// One more.
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

    /// All of them back; the first error, where there is one, after all.
    pub(super) fn give<L: ListPages<Page = P>>(&self, pages: &L) -> Result<(), L::GiveError> {
        let mut outcome = Ok(());
        for &page in self.pages.iter().flatten() {
            outcome = outcome.and(pages.give(page));
        }
        outcome
    }
}
