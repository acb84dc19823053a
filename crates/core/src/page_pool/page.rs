//! [`Page`]: an allocated page that frees itself on drop.

use super::config::Tag;
use super::inner::Inner;
use super::recycle::Returning;
use super::ring::Entry;
use crate::addr::Iova;
use crate::mem::DmaMemory;
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
    /// How many bytes the device may have written since the page was last synced for it.
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
        self.shared().raw_at(self.frame).iova
    }

    /// Returns the page's memory, all of it, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.shared().memory_of(self.frame)
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
            self.shared().sync_range(&**ops, self.frame, config.offset, len, false);
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
        page.shared().sync_for_device(page.frame, page.written as usize);
        core::mem::forget(returning);
        Entry::owned(page.frame)
    }
}

impl Drop for Page {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the page was allocated as owned by this value, and is freed with it.
        let _returning = unsafe { Returning::new(self.shared, self.frame) };
        self.shared().sync_for_device(self.frame, self.written as usize);
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
