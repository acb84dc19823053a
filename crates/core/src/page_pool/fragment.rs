//! Fragments: several holders of one page.
//!
//! The page has one count of shares. It starts with a *bias* greater than the number of fragments that can be cut, so
//! that allocating one is a plain subtraction by the consumer; when no more are to be cut, what is left of the bias is
//! taken off by one read-modify-write. The owner of the last share frees the page.

use super::config::Tag;
use super::consumer::PagePool;
use super::error::AllocError;
use super::inner::Inner;
use super::keep::recycle_remotely;
use super::open::Open;
use super::ring::Entry;
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::mem::DmaMemory;
use crate::sync::{AtomicU32, Ordering};
use core::fmt;
use core::ptr::NonNull;

/// More than the 2^21 fragments of 1 byte that fit in the largest page.
const BIAS: u32 = 1 << 24;
/// Fragments start at multiples of this, a cache line: two holders never share one.
const ALIGN: usize = 64;

/// Gives `shares` back; returns whether those were the last.
#[inline]
fn is_last(count: &AtomicU32, shares: u32) -> bool {
    // If no share but ours is left, no other thread can change the count, and no read-modify-write is needed.
    count.load(Ordering::Acquire) == shares || count.fetch_sub(shares, Ordering::AcqRel) == shares
}

/// A share of a page: some bytes of it. The page is recycled when its last fragment is dropped, from whatever thread,
/// unless more fragments may still be cut of it; then it stays open for them until a fragment does not fit or the pool
/// runs out of pages.
pub struct Fragment<S: ChunkSource> {
    /// Alive as long as the page is out, which it is as long as one of its fragments is there (see `inner`).
    shared: NonNull<Inner<S>>,
    frame: u32,
    offset: u32,
    len: u32,
    /// How many bytes the device may have written.
    written: u32,
}

// SAFETY: it is the one owner of its bytes, of a pool whose shared part is `Send` and `Sync`.
unsafe impl<S: ChunkSource> Send for Fragment<S> {}
// SAFETY: by a shared reference its memory is reached by atomics.
unsafe impl<S: ChunkSource> Sync for Fragment<S> {}

impl<S: ChunkSource> Fragment<S> {
    #[inline(always)]
    fn shared(&self) -> &Inner<S> {
        // SAFETY: alive as long as the page is out, to which this is a share.
        unsafe { self.shared.as_ref() }
    }

    /// Returns the device's address of the fragment's first byte.
    pub fn iova(&self) -> Iova {
        // No wrap: it lies in the span, whose end fits (`CreateError::Span`).
        Iova::new(self.shared().raw_at(self.frame).iova.raw().wrapping_add(u64::from(self.offset)))
    }

    /// The fragment's memory, to be read and written beside the device.
    pub fn memory(&self) -> DmaMemory<'_> {
        let page = self.shared().memory_of(self.frame);
        // It was cut out of the page.
        page.part(self.offset as usize, self.len as usize).unwrap_or(DmaMemory::EMPTY)
    }

    /// Gives the processor the first `len` bytes, which the device wrote; when the fragment goes back, only those are
    /// synced for the device.
    pub fn sync_for_cpu(&mut self, len: usize) {
        self.written = u32::try_from(len).unwrap_or(u32::MAX).min(self.len);
        if let Some(ops) = &self.shared().sync {
            let (offset, len) = (self.offset as usize, self.written as usize);
            self.shared().sync_range(&**ops, self.frame, offset, len, false);
        }
    }

    /// Releases the share. Returns whether it was the last, so that the page must be freed.
    #[inline]
    fn release(&self) -> bool {
        let shared = self.shared();
        if let Some(ops) = &shared.sync {
            shared.sync_range(&**ops, self.frame, self.offset as usize, self.written as usize, true);
        }
        shared.directory.record(self.frame).is_some_and(|record| is_last(record.shares(), 1))
    }
}

impl<S: ChunkSource> Drop for Fragment<S> {
    fn drop(&mut self) {
        if self.release() {
            // SAFETY: the page was allocated as owned, to its fragments, and is freed with the last of them, this one.
            unsafe { recycle_remotely(self.shared, &[Entry::owned(self.frame)]) };
        }
    }
}

impl<S: ChunkSource> fmt::Debug for Fragment<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fragment").field("iova", &self.iova()).field("len", &self.len).finish()
    }
}

impl<S: ChunkSource> PagePool<S> {
    /// `len` bytes of a page that is shared with other fragments, at a multiple of 64. O(1) but for the source.
    ///
    /// Fragments are cut from [`Config::offset`](super::Config::offset) on, within
    /// [`Config::max_len`](super::Config::max_len); where one does not fit any more a new page is begun.
    ///
    /// # Errors
    /// [`AllocError::Fragment`] where it fits in no page; else as [`alloc`](Self::alloc).
    pub fn alloc_fragment(&mut self, len: usize) -> Result<Fragment<S>, AllocError> {
        let config = self.keep.config;
        let first = config.offset.next_multiple_of(ALIGN);
        let end = config.offset + config.max_len;
        let limit = end.saturating_sub(first);
        if len == 0 || len > limit {
            return Err(AllocError::Fragment { len, limit });
        }
        let fits = self.open.filter(|open| open.at <= end && end - open.at >= len);
        let open = match fits {
            Some(open) => open,
            None => {
                let frame = self.take_owned(Tag::NONE)?;
                if let Some(record) = self.keep.directory.record(frame) {
                    record.shares().store(BIAS, Ordering::Relaxed);
                }
                self.end_fragments();
                Open { frame, at: first, cut: 0 }
            }
        };
        let at = open.at.saturating_add(len).next_multiple_of(ALIGN);
        self.open = Some(Open { at, cut: open.cut + 1, ..open });
        // A page has at most 2^21 bytes.
        let of = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let (shared, offset, len) = (self.keep.as_ptr(), of(open.at), of(len));
        Ok(Fragment { shared, frame: open.frame, offset, len, written: len })
    }

    /// Takes a fragment back; where it is its page's last, the page goes to the magazine.
    pub fn recycle_fragment(&mut self, fragment: Fragment<S>) {
        if fragment.shared != self.keep.as_ptr() {
            return drop(fragment);
        }
        let last = fragment.release();
        let frame = fragment.frame;
        core::mem::forget(fragment);
        if last {
            self.put_owned::<true>(frame);
        }
    }

    /// The open page, where all of its fragments are back: no more are cut of it. For when there is no other page.
    #[cold]
    pub(super) fn take_idle_open(&mut self) -> Option<u32> {
        let open = self.open?;
        // Acquire: what the holders of the fragments did comes before the page's next use.
        let count = self.keep.directory.record(open.frame)?.shares().load(Ordering::Acquire);
        if count != BIAS - open.cut {
            return None;
        }
        self.end_fragments();
        self.magazine.draw()
    }

    /// Closes the open page: no more fragments are cut from it. It is freed with its last fragment.
    pub(super) fn end_fragments(&mut self) {
        let Some(open) = self.open.take() else { return };
        let last = |count: &AtomicU32| is_last(count, BIAS - open.cut);
        if self.keep.directory.record(open.frame).is_some_and(|record| last(record.shares())) {
            self.put_owned::<true>(open.frame);
        }
    }
}
