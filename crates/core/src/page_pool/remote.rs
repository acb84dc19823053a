//! [`Remote`]: returns many pages at a time, or raw pages, from threads other than the consumer's.

use super::config::Tag;
use super::error::{BulkFreeError, FreeError, TooManyTags};
use super::inner::{Inner, PoolRef};
use super::magazine::BULK;
use super::page::Page;
use super::raw::RawPage;
use super::recycle::recycle_remotely;
use super::ring::Entry;
use core::fmt;

/// A handle by which threads other than the consumer's return pages. It may be cloned or shared.
///
/// Its calls are lock-free unless the ring is full or the pool has been taken down. It may outlive
/// the pool: pages returned later go back to the source with their chunk.
pub struct Remote(PoolRef);

impl Clone for Remote {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("pool", &self.0.name()).finish_non_exhaustive()
    }
}

/// Entries collected for the ring, as many as one compare-and-swap adds.
struct Batch<'r> {
    to: &'r PoolRef,
    entries: [Entry; BULK],
    len: usize,
}

impl Batch<'_> {
    fn put(&mut self, entry: Entry) {
        if let Some(slot) = self.entries.get_mut(self.len) {
            *slot = entry;
            self.len += 1;
        }
        if self.len == BULK {
            self.send();
        }
    }

    fn send(&mut self) {
        let entries = self.entries.get(..self.len).unwrap_or_default();
        self.len = 0;
        if !entries.is_empty() {
            // SAFETY: each entry is a raw free, whose `Remote` lends `to`, or a page that was
            // consumed for it.
            unsafe { recycle_remotely(self.to.as_ptr(), entries) };
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.send();
    }
}

impl Remote {
    pub(super) fn new(shared: PoolRef) -> Self {
        Self(shared)
    }

    fn batch(&self) -> Batch<'_> {
        Batch { to: &self.0, entries: [Entry::default(); BULK], len: 0 }
    }

    /// Returns pages, 64 by one compare-and-swap; a page of another pool is returned to that pool.
    pub fn recycle_all(&self, pages: impl IntoIterator<Item = Page>) {
        let mut batch = self.batch();
        for page in pages {
            if page.shared == self.0.as_ptr() {
                batch.put(page.into_entry());
            }
        }
    }

    /// Returns a raw page.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw page of this pool; nothing has changed then.
    #[inline]
    pub fn free_raw(&self, page: RawPage) -> Result<(), FreeError> {
        let entry = self.entry_of(page)?;
        // SAFETY: a raw free, and `self` keeps the pool alive.
        unsafe { recycle_remotely(self.0.as_ptr(), &[entry]) };
        Ok(())
    }

    /// Returns raw pages, 64 by one compare-and-swap.
    ///
    /// # Errors
    /// [`BulkFreeError`] at the first page that is refused, with how many were freed before it.
    pub fn free_bulk(&self, pages: &[RawPage]) -> Result<(), BulkFreeError> {
        let mut batch = self.batch();
        for (freed, &page) in pages.iter().enumerate() {
            batch.put(self.entry_of(page).map_err(|error| BulkFreeError { freed, error })?);
        }
        Ok(())
    }

    #[inline(always)]
    fn entry_of(&self, page: RawPage) -> Result<Entry, FreeError> {
        let (frame, record) = self.0.find(page)?;
        Inner::check_raw(record, page)?;
        let generation = record.generation();
        // First: if it panics, the page stays allocated.
        self.0.sync_for_device(frame, self.0.config.max_len);
        record.remote_free(generation);
        Ok(Entry::raw(frame, generation))
    }

    /// Returns the tag for a holder's name, as [`PagePool::tag`](super::PagePool::tag).
    ///
    /// # Errors
    /// [`TooManyTags`] after 2^24 names.
    pub fn tag(&self, name: &str) -> Result<Tag, TooManyTags> {
        self.0.tag(name)
    }
}
