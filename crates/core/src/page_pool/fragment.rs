//! Fragments: parts of one page with different holders.
//!
//! A page has one count of shares. It starts at a *bias* greater than the number of fragments that
//! fit, so allocating a fragment only increments a plain counter of the consumer; when no more are
//! to be cut, one read-modify-write subtracts the unused rest of the bias. The holder of the last
//! share frees the page.

use super::config::Tag;
use super::consumer::PagePool;
use super::inner::Inner;
use super::page::Returning;
use super::records::OpenPage;
use crate::addr::Iova;
use crate::dma_pool::AllocError;
use crate::mem::DmaMemory;
use crate::sync::{AtomicU32, Ordering};
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

/// More than the 2^21 fragments of 1 byte that fit in the largest page.
const BIAS: u32 = 1 << 24;
/// Fragments start at multiples of a cache line, so two holders never share one.
const ALIGN: usize = 64;

/// Releases `shares`; returns whether those were the last.
#[inline]
fn is_last(count: &AtomicU32, shares: u32) -> bool {
    // If these are the only shares left, no other thread changes the count and no read-modify-write
    // is needed.
    count.load(Ordering::Acquire) == shares || count.fetch_sub(shares, Ordering::AcqRel) == shares
}

/// A part of a page. The page is recycled when its last fragment is dropped, on any thread, unless
/// more fragments may still be cut from it: it stays open for them until one does not fit or the
/// pool runs out of pages.
pub struct Fragment {
    /// Alive while the page is in use, and it is in use while a fragment of it exists (see
    /// `inner`).
    shared: NonNull<Inner>,
    frame: u32,
    offset: u32,
    len: u32,
    /// The number of bytes that the device may have written.
    written: u32,
}

// SAFETY: it is the only owner of its bytes, and the pool's shared state is `Send` and `Sync`.
unsafe impl Send for Fragment {}
// SAFETY: through a shared reference its memory is accessed by atomics only.
unsafe impl Sync for Fragment {}

impl Fragment {
    #[inline(always)]
    fn shared(&self) -> &Inner {
        // SAFETY: alive while the page is in use, and this fragment is a share of it.
        unsafe { self.shared.as_ref() }
    }

    /// Returns the device's address of the fragment's first byte.
    pub fn iova(&self) -> Iova {
        // Does not wrap: it lies in the span, whose end fits in 64 bits (`CreateError::Span`).
        Iova::new(self.shared().iova_of(self.frame).raw().wrapping_add(u64::from(self.offset)))
    }

    /// Returns the fragment's memory, to be accessed concurrently with the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated while a fragment of it exists.
        let page = unsafe { self.shared().memory_of(self.frame) };
        // `part` cannot fail: the fragment lies within its page.
        page.part(self.offset as usize, self.len as usize).unwrap_or(DmaMemory::EMPTY)
    }

    /// Syncs the first `len` bytes, which the device wrote, for the processor. Only those are
    /// synced for the device when the fragment is freed.
    pub fn sync_for_cpu(&mut self, len: usize) {
        let written = u32::try_from(len).unwrap_or(u32::MAX).min(self.len);
        if let Some(ops) = &self.shared().sync {
            let (offset, len) = (self.offset as usize, written as usize);
            // SAFETY: allocated while a fragment of it exists.
            unsafe { self.shared().sync_range(&**ops, self.frame, offset, len, false) };
        }
        self.written = written;
    }

    /// Syncs the bytes that the device may have written for it.
    #[inline]
    fn sync_for_device(&self) {
        let shared = self.shared();
        if let Some(ops) = &shared.sync {
            let (offset, len) = (self.offset as usize, self.written as usize);
            // SAFETY: allocated while a fragment of it exists.
            unsafe { shared.sync_range(&**ops, self.frame, offset, len, true) };
        }
    }
}

/// The share of a fragment that ends. Dropping it releases it, and the page with the last one: also
/// if a sync panics.
struct Share(NonNull<Inner>, u32);

impl Share {
    /// Releases the share. Returns whether it was the last, so that the page must be freed.
    #[inline]
    fn release(self) -> bool {
        ManuallyDrop::new(self).is_last()
    }

    #[inline]
    fn is_last(&self) -> bool {
        // SAFETY: alive while the page is in use, which it is while it has this share.
        let shared = unsafe { self.0.as_ref() };
        shared.directory.record(self.1).is_some_and(|record| is_last(record.shares(), 1))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.is_last() {
            // SAFETY: the page was allocated as owned by its fragments, and this was the last of
            // them.
            drop(unsafe { Returning::new(self.0, self.1) });
        }
    }
}

impl Drop for Fragment {
    fn drop(&mut self) {
        let _share = Share(self.shared, self.frame);
        self.sync_for_device();
    }
}

impl fmt::Debug for Fragment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fragment").field("iova", &self.iova()).field("len", &self.len).finish()
    }
}

impl PagePool {
    /// Allocates `len` bytes of a page that is shared with other fragments, at a multiple of 64.
    /// O(1), except for the source.
    ///
    /// Fragments are cut from [`Config::offset`](super::Config::offset) on, within
    /// [`Config::max_len`](super::Config::max_len); if one does not fit into the current page, a
    /// new page is started.
    ///
    /// # Errors
    /// [`AllocError::Length`] if it fits in no page; otherwise as [`alloc`](Self::alloc).
    pub fn alloc_fragment(&mut self, len: usize) -> Result<Fragment, AllocError> {
        let config = self.shared.config;
        let first = config.offset.next_multiple_of(ALIGN);
        let end = config.offset + config.max_len;
        let limit = end.saturating_sub(first);
        if len == 0 || len > limit {
            return Err(AllocError::Length { len, limit });
        }
        let fits = self.open.filter(|open| open.at <= end && end - open.at >= len);
        let open = match fits {
            Some(open) => open,
            None => {
                let frame = self.take_owned(Tag::NONE)?;
                if let Some(record) = self.shared.directory.record(frame) {
                    record.shares().store(BIAS, Ordering::Relaxed);
                }
                self.close_open_page();
                OpenPage { frame, at: first, cut: 0 }
            }
        };
        let at = open.at.saturating_add(len).next_multiple_of(ALIGN);
        self.open = Some(OpenPage { at, cut: open.cut + 1, ..open });
        // A page has at most 2^21 bytes.
        let narrow = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let (shared, offset, len) = (self.shared.as_ptr(), narrow(open.at), narrow(len));
        Ok(Fragment { shared, frame: open.frame, offset, len, written: len })
    }

    /// Frees a fragment; if it is the last of its page, the page goes to the magazine.
    pub fn recycle_fragment(&mut self, fragment: Fragment) {
        if fragment.shared != self.shared.as_ptr() {
            return drop(fragment);
        }
        let fragment = ManuallyDrop::new(fragment);
        let share = Share(fragment.shared, fragment.frame);
        fragment.sync_for_device();
        if share.release() {
            self.put_owned(fragment.frame);
        }
    }

    /// Takes the open page if all of its fragments have been freed. Used when no other page is
    /// available.
    #[cold]
    pub(super) fn take_idle_open_page(&mut self) -> Option<u32> {
        let open = self.open?;
        // Acquire: the holders' accesses happen before the page's next use.
        let count = self.shared.directory.record(open.frame)?.shares().load(Ordering::Acquire);
        if count != BIAS - open.cut {
            return None;
        }
        self.close_open_page();
        self.magazine.take_uncounted()
    }

    /// Closes the open page: no more fragments are cut from it, and it is freed with its last
    /// fragment.
    pub(super) fn close_open_page(&mut self) {
        let Some(open) = self.open.take() else { return };
        let last = |count: &AtomicU32| is_last(count, BIAS - open.cut);
        if self.shared.directory.record(open.frame).is_some_and(|record| last(record.shares())) {
            self.put_owned(open.frame);
        }
    }
}
