//! A batch: the requests that one wait covers.

use crate::addr::IovaRange;
use alloc::vec::Vec;

/// A request: what to drop from the IOMMU's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// The addresses whose entries are no longer true.
    pub range: IovaRange,
    /// Whether only leaf entries changed. A flush that is not leaf-only also drops the table pages that the IOMMU
    /// holds to walk faster; it is needed when one of them was retired.
    pub leaf_only: bool,
}

/// Flushes that go to a [`InvalidationQueue`](super::InvalidationQueue) together, followed by one wait.
#[derive(Debug)]
pub struct Batch {
    flushes: Vec<Flush>,
    whole: bool,
    absorbed: u64,
}

impl Batch {
    /// How many flushes a batch has room for; one more makes it a flush of the whole domain.
    pub const CAPACITY: usize = 256;

    pub(super) fn new() -> Self {
        Self { flushes: Vec::with_capacity(Self::CAPACITY), whole: false, absorbed: 0 }
    }

    /// The flushes, ascending and apart from each other. Empty where the whole domain is to be flushed.
    pub fn flushes(&self) -> &[Flush] {
        &self.flushes
    }

    /// Whether everything that is cached for the domain is to be dropped, table pages as well.
    pub fn is_domain_flush(&self) -> bool {
        self.whole
    }

    /// Whether the batch asks for nothing.
    pub fn is_empty(&self) -> bool {
        self.flushes.is_empty() && !self.whole
    }

    /// How many flushes the sink carries out.
    pub(super) fn flushes_sent(&self) -> u64 {
        if self.whole { 1 } else { self.flushes.len() as u64 }
    }

    /// How many requests were folded into others since the last call.
    pub(super) fn take_absorbed(&mut self) -> u64 {
        core::mem::take(&mut self.absorbed)
    }

    /// Adds a request. Constant time, except when the room is used up: then neighbours are merged first.
    pub(super) fn push(&mut self, flush: Flush) {
        if self.whole || self.flushes.last_mut().is_some_and(|last| join(last, &flush)) {
            self.absorbed += 1;
            return;
        }
        if self.flushes.len() == Self::CAPACITY {
            self.merge();
        }
        if self.flushes.len() < Self::CAPACITY {
            self.flushes.push(flush);
        } else {
            // All of them and this one are now covered by a single flush.
            self.absorbed += self.flushes.len() as u64;
            self.flushes.clear();
            self.whole = true;
        }
    }

    /// Merges what abuts or overlaps.
    pub(super) fn merge(&mut self) {
        let before = self.flushes.len();
        self.flushes.sort_unstable_by_key(|flush| flush.range.start());
        self.flushes.dedup_by(|next, kept| join(kept, next));
        self.absorbed += (before - self.flushes.len()) as u64;
    }

    pub(super) fn clear(&mut self) {
        self.flushes.clear();
        self.whole = false;
    }
}

/// Makes `kept` cover `next` too, where the two abut or overlap.
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
