//! The pages that PRP lists and discard ranges are written to.

use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::frame::{Frame, Order};
use pinfold_core::gather::prp::{ListPage, ListPages};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why there is no page, or why one was not taken back.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListsError {
    /// The source has none.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// What the source gave is not inside it.
    #[error("a list page is not inside its source")]
    BadSource,
}

/// A page for a list.
pub(super) type Page = Frame;

/// Pages of 4096 bytes, kept when they come back.
pub(super) struct Lists<S: ChunkSource> {
    source: S,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Frame>,
    all: usize,
    used_max: usize,
}

impl<S: ChunkSource> fmt::Debug for Lists<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lists").field("state", &*self.state()).finish_non_exhaustive()
    }
}

impl<S: ChunkSource> Lists<S> {
    pub(super) fn new(source: S) -> Result<Self, ListsError> {
        Ok(Self { source, state: Mutex::new(State::default()) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages in use now, and the most that were.
    pub(super) fn used(&self) -> (usize, usize) {
        let state = self.state();
        (state.all - state.free.len(), state.used_max)
    }
}

impl<S: ChunkSource> ListPages for Lists<S> {
    type Page = Page;
    type TakeError = ListsError;
    type GiveError = ListsError;

    fn take(&self) -> Result<ListPage<Page>, ListsError> {
        let mut state = self.state();
        let frame = match state.free.pop() {
            Some(frame) => frame,
            None => {
                let frame = self.source.acquire(Order::PAGE)?;
                state.all += 1;
                // So that `give` never allocates.
                let all = state.all;
                state.free.reserve(all);
                frame
            }
        };
        state.used_max = state.used_max.max(state.all - state.free.len());
        let offset = usize::try_from(frame.offset()).map_err(|_| ListsError::BadSource)?;
        let memory = self.source.memory().part(offset, 4096).map_err(|_| ListsError::BadSource)?;
        let iova = self.source.iova().checked_add(frame.offset()).ok_or(ListsError::BadSource)?;
        Ok(ListPage { page: frame, iova, memory })
    }

    fn give(&self, page: Page) -> Result<(), ListsError> {
        self.state().free.push(page);
        Ok(())
    }
}

impl<S: ChunkSource> Drop for Lists<S> {
    fn drop(&mut self) {
        for frame in std::mem::take(&mut self.state().free) {
            self.source.release(frame, Order::PAGE);
        }
    }
}
