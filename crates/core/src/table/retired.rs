//! Table pages on their way out.

use super::directory::{List, NONE};
use crate::addr::{Iova, IovaRange, PhysAddr};

/// Table pages that have been taken out of a table and that a walker may still hold.
///
/// Flush first, then [`Table::reclaim`](super::Table::reclaim). Dropping it loses the pages for good (they stay counted
/// as retired): that is the right end where a flush never finishes.
///
/// The pages are a list threaded through the table's own account, so that collecting them allocates nothing.
#[derive(Debug, Default)]
#[must_use = "flush, then give the pages back with `Table::reclaim`"]
pub struct Retired {
    pub(super) list: List,
    /// The root of the table that the pages belong to.
    pub(super) owner: Option<PhysAddr>,
}

impl Retired {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is nothing to give back: then a flush of the cleared leaves alone will do.
    pub fn is_empty(&self) -> bool {
        self.list.head == NONE
    }

    /// How many pages.
    pub fn len(&self) -> u32 {
        self.list.len
    }

    /// What the flush must cover *besides* the ranges that were cleared, leaves and links both (VT-d: invalidation
    /// hint 0): the addresses that went through the retired pages. `None` where there are none.
    ///
    /// It may lie elsewhere than what was cleared: pages of a map that failed, or of higher levels that became
    /// empty by a [`reclaim`](super::Table::reclaim), are handed to the next `clear`.
    pub fn range(&self) -> Option<IovaRange> {
        let bytes = self.list.end.checked_sub(self.list.start)?;
        IovaRange::new(Iova::new(self.list.start), bytes).ok()
    }
}
