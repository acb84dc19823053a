//! Retired table pages.

use super::directory::List;
use super::page_index::PageIndex;
use crate::addr::{Iova, IovaRange, PhysAddr};

/// Table pages that have been unlinked and that a walker may still hold.
///
/// Flush first, then [`Table::reclaim`](super::Table::reclaim). Dropping it leaves the pages retired for good: the right
/// end if a flush never completes.
///
/// The pages are a list threaded through the table's directory, so that collecting them allocates nothing.
#[derive(Debug, Default)]
#[must_use = "flush, then free the pages with `Table::reclaim`"]
pub struct Retired {
    pub(super) list: List,
    /// The root of the table that the pages belong to.
    pub(super) owner: Option<PhysAddr>,
}

impl Retired {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there are none: then a flush of the cleared leaves alone suffices.
    pub fn is_empty(&self) -> bool {
        self.list.head == PageIndex::NONE
    }

    /// Returns the number of pages.
    pub fn len(&self) -> u32 {
        self.list.len
    }

    /// Returns what the flush must cover *besides* the ranges that were cleared, leaves and links both (VT-d:
    /// invalidation hint 0): the addresses that the retired pages translated. `None` if there are none.
    ///
    /// It need not be near what was cleared: pages of a failed map, or of higher levels that became
    /// empty by a [`reclaim`](super::Table::reclaim), are added to the next `clear`.
    pub fn range(&self) -> Option<IovaRange> {
        let bytes = self.list.end.checked_sub(self.list.start)?;
        IovaRange::new(Iova::new(self.list.start), bytes).ok()
    }
}
