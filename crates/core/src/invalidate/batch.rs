//! A batch: the requests that one wait covers.

use crate::addr::IovaRange;
use alloc::vec::Vec;

/// A request: what to drop from the IOMMU's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// The addresses whose entries have changed.
    pub range: IovaRange,
    /// Whether only leaf entries changed. A flush that is not leaf-only also drops cached table pages; it is needed if
    /// one of them was retired.
    pub leaf_only: bool,
}

/// A flush of the leaf entries of a range.
impl From<IovaRange> for Flush {
    fn from(range: IovaRange) -> Self {
        Self { range, leaf_only: true }
    }
}

/// Flushes that go to an [`InvalidationQueue`](super::InvalidationQueue) together, followed by one wait.
#[derive(Debug)]
pub struct Batch {
    flushes: Vec<Flush>,
    domain_flush: bool,
    merged: u64,
}

impl Batch {
    /// The capacity of a batch; one more flush makes it a flush of the whole domain.
    pub const CAPACITY: usize = 256;

    pub(super) fn new() -> Self {
        Self { flushes: Vec::with_capacity(Self::CAPACITY), domain_flush: false, merged: 0 }
    }

    /// Returns the flushes, in ascending order and disjoint. Empty if the whole domain is to be flushed.
    pub fn flushes(&self) -> &[Flush] {
        &self.flushes
    }

    /// Whether everything cached for the domain is to be dropped, table pages included.
    pub fn is_domain_flush(&self) -> bool {
        self.domain_flush
    }

    /// Whether the batch requests nothing.
    pub fn is_empty(&self) -> bool {
        self.flushes.is_empty() && !self.domain_flush
    }

    /// Returns the number of flushes that the queue carries out.
    pub(super) fn flushes_sent(&self) -> u64 {
        if self.domain_flush { 1 } else { self.flushes.len() as u64 }
    }

    /// Returns how many requests were merged into others since the last call.
    pub(super) fn take_merged(&mut self) -> u64 {
        core::mem::take(&mut self.merged)
    }

    /// Adds a request. Constant time, unless the batch is full: then neighbours are merged first.
    pub(super) fn push(&mut self, flush: Flush) {
        if self.domain_flush || self.flushes.last_mut().is_some_and(|last| join(last, &flush)) {
            self.merged += 1;
            return;
        }
        if self.flushes.len() == Self::CAPACITY {
            self.merge();
        }
        if self.flushes.len() < Self::CAPACITY {
            self.flushes.push(flush);
        } else {
            // All of them and this one are now covered by a single flush.
            self.merged += self.flushes.len() as u64;
            self.flushes.clear();
            self.domain_flush = true;
        }
    }

    /// Merges what abuts or overlaps.
    pub(super) fn merge(&mut self) {
        let before = self.flushes.len();
        self.flushes.sort_unstable_by_key(|flush| flush.range.start());
        self.flushes.dedup_by(|next, kept| join(kept, next));
        self.merged += (before - self.flushes.len()) as u64;
    }

    pub(super) fn clear(&mut self) {
        self.flushes.clear();
        self.domain_flush = false;
    }
}

/// Extends `kept` to cover `next` too, if the two abut or overlap.
fn join(kept: &mut Flush, next: &Flush) -> bool {
    let (a, b) = (kept.range, next.range);
    if a.start().max(b.start()) > a.end().min(b.end()) {
        return false;
    }
    let start = a.start().min(b.start());
    let end = a.end().max(b.end());
    let Some(range) = end.checked_offset_from(start).and_then(|len| IovaRange::new(start, len).ok()) else {
        return false;
    };
    *kept = Flush { range, leaf_only: kept.leaf_only && next.leaf_only };
    true
}
