//! Requests: what owners ask for, merged as far as they abut.

use super::descriptor::PAGE_SHIFT;
use crate::addr::IovaRange;

/// A request: what to drop from the IOMMU's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// The addresses whose entries have changed; a page of which any part is inside is flushed.
    pub range: IovaRange,
    /// Whether only leaf entries changed. A flush that is not leaf-only also drops cached table
    /// pages; it is needed if one of them was retired.
    pub leaf_only: bool,
}

/// A flush of the leaf entries of a range.
impl From<IovaRange> for Flush {
    fn from(range: IovaRange) -> Self {
        Self { range, leaf_only: true }
    }
}

/// The pages `first..end` of a request, or of several that abut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pages {
    pub(super) first: u64,
    pub(super) end: u64,
    pub(super) leaf_only: bool,
}

impl Pages {
    #[inline]
    pub(super) fn new(flush: &Flush) -> Self {
        let (first, last) =
            (flush.range.start().raw() >> PAGE_SHIFT, flush.range.last().raw() >> PAGE_SHIFT);
        Self { first, end: last + 1, leaf_only: flush.leaf_only }
    }

    pub(super) const fn count(&self) -> u64 {
        self.end - self.first
    }

    /// Extends `self` to cover `next` too, if the two abut or overlap. Returns whether they do.
    #[inline]
    pub(super) fn join(&mut self, next: &Self) -> bool {
        if self.first > next.end || next.first > self.end {
            return false;
        }
        self.first = self.first.min(next.first);
        self.end = self.end.max(next.end);
        self.leaf_only &= next.leaf_only;
        true
    }
}

/// How many requests there were, and for how many pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Requested {
    pub(super) flushes: u64,
    /// Of these, those that are not leaf-only.
    pub(super) tables: u64,
    pub(super) pages: u64,
}

impl Requested {
    pub(super) fn count(&mut self, pages: &Pages) {
        self.flushes += 1;
        self.tables += u64::from(!pages.leaf_only);
        self.pages += pages.count();
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.flushes += other.flushes;
        self.tables += other.tables;
        self.pages += other.pages;
    }
}

/// Requests that one owner gathers without a lock, merged with their neighbours, before it makes
/// them all at once by [`Invalidator::request_list`](super::Invalidator::request_list).
///
/// ```
/// use pinfold_core::addr::{Iova, IovaRange};
/// use pinfold_core::invalidate::{Flush, FlushList};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut list = FlushList::new();
/// for page in 0..1000 {
///     // ... clear the entry ...
///     assert!(list.push(Flush::from(IovaRange::new(Iova::new(page << 12), 4096)?)).is_ok());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlushList {
    pages: [Pages; Self::CAPACITY],
    len: usize,
    pub(super) requested: Requested,
}

impl FlushList {
    /// How many requests a list holds that do not abut.
    pub const CAPACITY: usize = 16;

    /// Creates an empty list.
    pub const fn new() -> Self {
        let none = Pages { first: 0, end: 0, leaf_only: true };
        let requested = Requested { flushes: 0, tables: 0, pages: 0 };
        Self { pages: [none; Self::CAPACITY], len: 0, requested }
    }

    /// Whether the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a request, whose entries have been cleared. Constant time: it is merged with the last
    /// one if they abut.
    ///
    /// # Errors
    /// The request, if the list is full.
    pub fn push(&mut self, flush: Flush) -> Result<(), Flush> {
        let pages = Pages::new(&flush);
        let last = self.len.checked_sub(1).and_then(|last| self.pages.get_mut(last));
        if !last.is_some_and(|last| last.join(&pages)) {
            *self.pages.get_mut(self.len).ok_or(flush)? = pages;
            self.len += 1;
        }
        self.requested.count(&pages);
        Ok(())
    }

    pub(super) fn pages(&self) -> &[Pages] {
        self.pages.get(..self.len).unwrap_or_default()
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
        self.requested = Requested::default();
    }
}

impl Default for FlushList {
    fn default() -> Self {
        Self::new()
    }
}
