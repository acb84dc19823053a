//! How a page returns from any thread: into the ring, into the spill list if the ring is full, or
//! to its chunk if the pool has been taken down.

use super::inner::{Inner, PoolRef};
use super::records::State;
use super::ring::{Closed, Entry};
use crate::sync::Ordering;
use alloc::vec::Vec;
use core::ptr::NonNull;

/// Returns pages from any thread: into the ring, and into the spill list what does not fit there.
/// Lock-free unless the ring is full or the pool has been taken down.
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
    for &entry in entries {
        pool.recycle_after_close(entry);
        if entry.generation().is_none() {
            // SAFETY: the ring is closed, so the count includes a reference for this page
            // (`take_down`), or will before the bias is subtracted; it is released with the page.
            drop(unsafe { PoolRef::adopt(ptr) });
        }
    }
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
