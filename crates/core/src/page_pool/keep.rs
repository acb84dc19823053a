//! The way back of a page, and what keeps the pool alive on it.

use super::inner::Inner;
use super::records::State;
use super::ring::{Closed, Entry};
use crate::dma_pool::ChunkSource;
use crate::sync::Ordering;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::NonNull;

/// One reference to what is shared.
pub(super) struct Keep<S: ChunkSource>(NonNull<Inner<S>>);

// SAFETY: it is a counted, shared reference to `Inner`, all of whose parts are `Send` and `Sync`: atomics, locks, the
// source, and a `SyncOps`.
unsafe impl<S: ChunkSource> Send for Keep<S> {}
// SAFETY: as for `Send`.
unsafe impl<S: ChunkSource> Sync for Keep<S> {}

impl<S: ChunkSource> Keep<S> {
    /// The first reference.
    pub(super) fn first(shared: Inner<S>) -> Self {
        shared.keep.fetch_add(1, Ordering::Relaxed);
        Self(NonNull::from(Box::leak(Box::new(shared))))
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> NonNull<Inner<S>> {
        self.0
    }

    /// Takes over a reference that is counted already.
    ///
    /// # Safety
    /// The count has one for it, which only this value releases.
    unsafe fn adopt(shared: NonNull<Inner<S>>) -> Self {
        Self(shared)
    }
}

impl<S: ChunkSource> Clone for Keep<S> {
    fn clone(&self) -> Self {
        self.keep.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<S: ChunkSource> core::ops::Deref for Keep<S> {
    type Target = Inner<S>;
    #[inline(always)]
    fn deref(&self) -> &Inner<S> {
        // SAFETY: `self` is one of the references that are counted, and the last one frees it.
        unsafe { self.0.as_ref() }
    }
}

impl<S: ChunkSource> Drop for Keep<S> {
    fn drop(&mut self) {
        if self.keep.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: made by `Box::leak` in `first`, and this was the last reference.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

/// Gives pages back from anywhere: into the ring, what does not fit there below it. Lock-free but where the ring is full
/// or the pool was taken down.
///
/// # Safety
/// Each entry is a raw free, the caller having a [`Keep`] (then it may be mistaken); or a page that was allocated as owned and
/// that is freed this once.
#[inline]
pub(super) unsafe fn recycle_remotely<S: ChunkSource>(shared: NonNull<Inner<S>>, entries: &[Entry]) {
    // SAFETY: alive as long as one of the entries is not back (see the module), or as the caller's `Keep`.
    let claim = unsafe { shared.as_ref() }.ring.claim(entries.len());
    // From here the ring waits for what was claimed; the pool may go as soon as it has the last.
    let placed = match claim {
        Ok(Some(claim)) => claim.fill(entries),
        Ok(None) | Err(Closed) => 0,
    };
    if placed < entries.len() {
        // SAFETY: the pages that remain are not back.
        unsafe { recycle_slow(shared, entries.get(placed..).unwrap_or_default()) };
    }
}

/// # Safety
/// As for [`recycle_remotely`], and there is at least one entry.
#[cold]
unsafe fn recycle_slow<S: ChunkSource>(ptr: NonNull<Inner<S>>, entries: &[Entry]) {
    // SAFETY: alive as long as one of the entries is not back.
    let shared = unsafe { ptr.as_ref() };
    shared.keep.fetch_add(1, Ordering::Relaxed);
    // SAFETY: just counted.
    let keep = unsafe { Keep::adopt(ptr) };
    if keep.spill(entries).is_ok() {
        return;
    }
    for &entry in entries {
        keep.recycle_after_close(entry);
        if entry.generation().is_none() {
            // SAFETY: the ring is closed, so the page's own reference is part of the count (`take_down`), or will be before
            // the bias is taken off; it is given up with the page.
            drop(unsafe { Keep::adopt(ptr) });
        }
    }
}

impl<S: ChunkSource> Inner<S> {
    fn spill(&self, entries: &[Entry]) -> Result<(), Closed> {
        let mut spill = self.spill.lock();
        if spill.closed {
            return Err(Closed);
        }
        self.ring_full.fetch_add(entries.len() as u64, Ordering::Relaxed);
        for &entry in entries {
            if spill.entries.len() == spill.entries.capacity() {
                let before = spill.entries.len();
                self.sift(&mut spill.entries);
                spill.sifted += (before - spill.entries.len()) as u64;
            }
            spill.entries.push(entry);
        }
        Ok(())
    }

    /// Removes what cannot count: only second frees make for more entries than there are pages.
    #[cold]
    fn sift(&self, entries: &mut Vec<Entry>) {
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
