//! [`Page`], an allocated page that frees itself on drop; [`Remote`], which returns many pages at a
//! time, or raw pages, from threads other than the consumer's; and how a page returns from any
//! thread: into the ring, into the spill list if the ring is full, or to its chunk if the pool has
//! been taken down.

use super::config::{RawPage, Tag};
use super::inner::{Inner, PoolRef};
use super::records::State;
use super::ring::{BULK, Closed, Entry};
use crate::addr::Iova;
use crate::dma_pool::FreeError;
use crate::drop_guard::for_all;
use crate::mem::DmaMemory;
use crate::sync::Ordering;
use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

/// A page that frees itself on drop, from any thread; it may outlive its pool.
///
/// A drop goes through the ring. [`PagePool::recycle`](super::PagePool::recycle) is faster for the
/// consumer. Many pages on other threads share one read-modify-write in
/// [`Remote::recycle_all`](super::Remote::recycle_all), which pays where threads contend for the
/// ring; on one thread a drop takes less time.
pub struct Page {
    /// Alive while the page is in use (see `inner`).
    pub(super) shared: NonNull<Inner>,
    pub(super) frame: u32,
    /// The number of bytes that the device may have written since the page was last synced for it.
    pub(super) written: u32,
}

// SAFETY: it is the only owner of its page, and the pool's shared state is `Send` and `Sync`.
unsafe impl Send for Page {}
// SAFETY: through a shared reference its memory and its record are accessed by atomics only.
unsafe impl Sync for Page {}

impl Page {
    #[inline(always)]
    fn shared(&self) -> &Inner {
        // SAFETY: alive while the page is in use, which it is until `self` is dropped or turned
        // into an entry.
        unsafe { self.shared.as_ref() }
    }

    /// Returns the device's address of the page's first byte. The device writes from
    /// [`Config::offset`](super::Config::offset) on.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.shared().iova_of(self.frame)
    }

    /// Returns the page's memory, all of it, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated as long as this value.
        unsafe { self.shared().memory_of(self.frame) }
    }

    /// Names the page's holder, for [`PagePool::holders`](super::PagePool::holders), until the page
    /// is recycled.
    #[inline]
    pub fn tag(&self, tag: Tag) {
        if let Some(record) = self.shared().directory.record(self.frame) {
            record.set_owned(self.shared().name_of(tag));
        }
    }

    /// Syncs what the device wrote for the processor: `len` bytes from
    /// [`Config::offset`](super::Config::offset), at most
    /// [`Config::max_len`](super::Config::max_len). Only those are synced for the device when the
    /// page is recycled. On a coherent machine this only records `len`.
    #[inline]
    pub fn sync_for_cpu(&mut self, len: usize) {
        let config = self.shared().config;
        let len = len.min(config.max_len);
        if let Some(ops) = &self.shared().sync {
            // SAFETY: allocated as long as this value.
            unsafe { self.shared().sync_range(&**ops, self.frame, config.offset, len, false) };
        }
        // At most 2 MiB. After the callback: if that panics, more is synced for the device, not
        // less.
        self.written = u32::try_from(len).unwrap_or(u32::MAX);
    }

    /// Syncs the page for the device and turns it into an entry, which the caller must put into the
    /// ring or the magazine once.
    #[inline(always)]
    pub(super) fn into_entry(self) -> Entry {
        let page = ManuallyDrop::new(self);
        // SAFETY: the page was allocated as owned by this value, which is not dropped; what returns
        // it is forgotten below.
        let returning = unsafe { Returning::new(page.shared, page.frame) };
        // SAFETY: allocated until the entry is used.
        unsafe { page.shared().sync_for_device(page.frame, page.written as usize) };
        core::mem::forget(returning);
        Entry::owned(page.frame)
    }
}

impl Drop for Page {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the page was allocated as owned by this value, and is freed with it.
        let _returning = unsafe { Returning::new(self.shared, self.frame) };
        // SAFETY: allocated until `_returning` is dropped.
        unsafe { self.shared().sync_for_device(self.frame, self.written as usize) };
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page")
            .field("iova", &self.iova())
            .field("len", &self.memory().len())
            .finish()
    }
}

/// Returns pages from any thread: into the ring, and into the spill list what does not fit there.
/// Takes no lock unless the ring is full or the pool has been taken down.
///
/// # Safety
/// Each entry is either a raw free whose caller holds a [`PoolRef`] (the free itself may be wrong),
/// or a page that was allocated as owned and is freed exactly once.
#[inline]
pub(super) unsafe fn recycle_remotely(shared: NonNull<Inner>, entries: &[Entry]) {
    // SAFETY: alive until the last of the entries has been returned (see `inner`), or while the
    // caller's `PoolRef` is.
    let claim = unsafe { shared.as_ref() }.ring.claim(entries.len());
    // The ring now waits for the claimed slots; once the last one is filled, the pool may be freed.
    let placed = match claim {
        Ok(Some(claim)) => claim.fill(entries),
        Ok(None) | Err(Closed) => 0,
    };
    if placed < entries.len() {
        // SAFETY: the remaining pages have not been returned.
        unsafe { recycle_slow(shared, entries.get(placed..).unwrap_or_default()) };
    }
}

/// A page that is returned when this is dropped: also if the [`SyncOps`](super::SyncOps) panics
/// that is called in between.
pub(super) struct Returning(NonNull<Inner>, u32);

impl Returning {
    /// # Safety
    /// The page was allocated as owned, and is freed by nothing else unless this is forgotten.
    #[inline(always)]
    pub(super) unsafe fn new(shared: NonNull<Inner>, frame: u32) -> Self {
        Self(shared, frame)
    }
}

impl Drop for Returning {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: allocated as owned and freed here alone (contract of `new`).
        unsafe { recycle_remotely(self.0, &[Entry::owned(self.1)]) };
    }
}

/// # Safety
/// As for [`recycle_remotely`], and there is at least one entry.
#[cold]
unsafe fn recycle_slow(ptr: NonNull<Inner>, entries: &[Entry]) {
    // SAFETY: alive until the last of the entries has been returned.
    let shared = unsafe { ptr.as_ref() };
    shared.refs.fetch_add(1, Ordering::Relaxed);
    // SAFETY: counted in the line above.
    let pool = unsafe { PoolRef::adopt(ptr) };
    if pool.spill(entries).is_ok() {
        return;
    }
    // All of them, also if the source panics for one.
    for_all(entries, |&entry| {
        // SAFETY: the ring is closed, so the count includes a reference for this page
        // (`take_down`), or will before the bias is subtracted; it is released with the page.
        let _page = entry.generation().is_none().then(|| unsafe { PoolRef::adopt(ptr) });
        pool.recycle_after_close(entry);
    });
}

impl Inner {
    /// Adds entries that met a full ring to the spill list.
    fn spill(&self, entries: &[Entry]) -> Result<(), Closed> {
        let mut spill = self.spill.lock();
        if spill.closed {
            return Err(Closed);
        }
        self.ring_full.fetch_add(entries.len() as u64, Ordering::Relaxed);
        for &entry in entries {
            if spill.entries.len() == spill.entries.capacity() {
                let before = spill.entries.len();
                self.discard_stale(&mut spill.entries);
                spill.discarded += (before - spill.entries.len()) as u64;
            }
            spill.entries.push(entry);
        }
        Ok(())
    }

    /// Removes stale entries. There are more entries than pages only if raw pages were freed twice.
    #[cold]
    fn discard_stale(&self, entries: &mut Vec<Entry>) {
        entries.sort_unstable();
        entries.dedup();
        entries.retain(|entry| {
            let record = self.directory.record(entry.frame());
            entry.generation().is_none_or(|generation| {
                record.is_some_and(|a| a.state() == State::Raw && a.generation() == generation)
            })
        });
    }
}

/// A handle by which threads other than the consumer's return pages. It may be cloned or shared.
///
/// Its calls take no lock unless the ring is full or the pool has been taken down. It may outlive
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

    #[inline(always)]
    fn entry_of(&self, page: RawPage) -> Result<Entry, FreeError> {
        let (frame, record) = self.0.find(page)?;
        Inner::check_raw(record, page)?;
        let generation = record.generation();
        // First: if it panics, the page stays allocated.
        // SAFETY: allocated raw (checked above), and the caller frees it here.
        unsafe { self.0.sync_for_device(frame, self.0.config.max_len) };
        record.remote_free(generation);
        Ok(Entry::raw(frame, generation))
    }
}
