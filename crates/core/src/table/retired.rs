//! Retired table pages.

use super::directory::{List, PAGES_A_HOLD};
use super::format::Format;
use super::levels::span;
use super::page_index::PageIndex;
use super::tree::Tree;
use crate::addr::{Iova, IovaRange, PhysAddr};
use core::marker::PhantomData;

/// Table pages that have been unlinked and that a walker may still hold.
///
/// Flush first, then [`Table::reclaim`](super::Table::reclaim). Dropping it leaves the pages
/// retired for good: the right end if a flush never completes. Those that a map has linked again
/// meanwhile then stay linked for good.
///
/// The pages are a list threaded through the table's directory, so that collecting them allocates
/// nothing.
#[derive(Debug, Default)]
#[must_use = "flush, then free the pages with `Table::reclaim`"]
pub struct Retired {
    pub(super) list: List,
    /// The number of the table that the pages belong to, and its root.
    pub(super) owner: Option<(u64, PhysAddr)>,
}

impl Retired {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there are none: then a flush of the cleared leaves alone suffices.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the number of pages.
    pub fn len(&self) -> u32 {
        self.list.len
    }
}

/// The addresses that retired pages translated, neighbours merged: at most 64 pages into one range.
/// See [`Table::retired_ranges`](super::Table::retired_ranges).
///
/// It takes the table's lock once for each range, and holds it for none.
#[derive(Debug)]
pub struct RetiredRanges<'a, F: Format> {
    pub(super) tree: &'a Tree<F>,
    pub(super) next: PageIndex,
    /// While they are borrowed, the pages stay on their list.
    pub(super) retired: PhantomData<&'a Retired>,
}

impl<F: Format> Iterator for RetiredRanges<'_, F> {
    type Item = IovaRange;

    fn next(&mut self) -> Option<IovaRange> {
        let mut directory = self.tree.directory.lock();
        let mut merged: Option<(u64, u64)> = None;
        for _ in 0..PAGES_A_HOLD {
            if self.next == PageIndex::NONE {
                break;
            }
            let meta = directory.of(self.next);
            let page = self.tree.store.page(self.next);
            let (start, end) = (page.base(), page.base() + span(page.level() + 1));
            merged = match merged {
                None => Some((start, end)),
                Some((first, last)) if start <= last && first <= end => {
                    Some((first.min(start), last.max(end)))
                }
                Some(_) => break,
            };
            self.next = meta.next;
        }
        let (start, end) = merged?;
        IovaRange::new(Iova::new(start), end - start).ok()
    }
}
