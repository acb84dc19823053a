//! The open batch: the requests that one wait will cover.

use super::flush::{FlushList, Pages, Requested};
use crate::sync::count_steps;
use alloc::vec::Vec;

/// Requests that gather until they are submitted together, followed by one wait.
#[derive(Debug)]
pub(super) struct Batch {
    pages: Vec<Pages>,
    domain_flush: bool,
    merged: u64,
    /// The pages requested.
    requested: u64,
}

/// What requesters change, under a lock.
pub(super) struct Open {
    pub(super) batch: Batch,
    /// The ticket of the open batch.
    pub(super) ticket: u64,
    /// All that was ever requested.
    pub(super) requested: Requested,
}

impl Open {
    pub(super) fn new() -> Self {
        Self { batch: Batch::new(), ticket: 1, requested: Requested::default() }
    }
}

impl Batch {
    /// How many requests a batch holds that were not merged. One more merges those that abut, or
    /// makes it a flush of the whole domain.
    pub(super) const CAPACITY: usize = 256;
    /// The room that a merge has to make at least, because it happens under the lock that all
    /// requesters need: so there is one for a list of requests at most. That many descriptors cost
    /// about as much as a flush of the domain.
    const ROOM: usize = FlushList::CAPACITY;

    pub(super) fn new() -> Self {
        Self {
            pages: Vec::with_capacity(Self::CAPACITY),
            domain_flush: false,
            merged: 0,
            requested: 0,
        }
    }

    /// Returns the pages to flush. Once [merged](Self::merge), in ascending order, and no two abut.
    /// Empty if the whole domain is to be flushed.
    pub(super) fn pages(&self) -> &[Pages] {
        &self.pages
    }

    /// Whether everything cached for the domain is to be dropped, table pages included.
    pub(super) const fn is_domain_flush(&self) -> bool {
        self.domain_flush
    }

    /// Whether the batch requests nothing.
    pub(super) const fn is_empty(&self) -> bool {
        self.pages.is_empty() && !self.domain_flush
    }

    /// Returns how many requests were merged into others.
    pub(super) const fn merged(&self) -> u64 {
        self.merged
    }

    /// Returns how many pages were requested, those requested twice counted twice.
    pub(super) const fn requested(&self) -> u64 {
        self.requested
    }

    /// Adds a request. Constant time, unless the batch is full: then neighbours are merged first.
    #[inline]
    pub(super) fn push(&mut self, pages: Pages) {
        count_steps(1);
        self.requested = self.requested.saturating_add(pages.count());
        if self.domain_flush || self.pages.last_mut().is_some_and(|last| last.join(&pages)) {
            self.merged += 1;
            return;
        }
        if self.pages.len() == Self::CAPACITY {
            self.merge_all();
            if self.pages.len() > Self::CAPACITY - Self::ROOM {
                // All of them and this one are now covered by a single flush.
                self.merged += self.pages.len() as u64;
                self.pages.clear();
                self.domain_flush = true;
                return;
            }
        }
        self.pages.push(pages);
    }

    /// Counts requests that were merged into others before they were pushed.
    pub(super) fn count_merged(&mut self, merged: u64) {
        self.merged += merged;
    }

    /// Merges what abuts or overlaps.
    #[inline]
    pub(super) fn merge(&mut self) {
        if self.pages.len() > 1 {
            self.merge_all();
        }
    }

    fn merge_all(&mut self) {
        let before = self.pages.len();
        count_steps(before);
        self.pages.sort_unstable_by_key(|pages| pages.first);
        self.pages.dedup_by(|next, kept| kept.join(next));
        self.merged += (before - self.pages.len()) as u64;
    }

    pub(super) fn clear(&mut self) {
        self.pages.clear();
        (self.domain_flush, self.merged, self.requested) = (false, 0, 0);
    }
}
