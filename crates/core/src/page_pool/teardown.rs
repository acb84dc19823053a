//! Teardown of a pool whose pages may still be in use: hides its chunks from the device, collects
//! the returned pages, and releases empty chunks; and queries about it afterwards.

use super::consumer::PagePool;
use super::error::RevokeError;
use super::inner::{BIAS, Chunk, Chunks, Inner, OnEmpty, PoolRef};
use super::records::State;
use super::ring::Entry;
use super::stats::{Counts, Holder};
use crate::dma_pool::ChunkSource;
use crate::drop_guard::for_all;
use crate::frame::Frame;
use crate::sync::Ordering;
use alloc::vec::Vec;
use core::fmt;

/// A pool that has been taken down, to observe who still holds its pages.
///
/// Dropping it does not affect the holders. A raw page that is never freed keeps its chunk
/// allocated.
pub struct Destroyed {
    shared: PoolRef,
    counts: Counts,
    reachable: (u64, Option<RevokeError>),
}

impl Destroyed {
    /// Returns the current holders: fewer as pages are returned. O(pages).
    pub fn holders(&self) -> Vec<Holder> {
        self.shared.holders()
    }

    /// Returns how many pages are still in use. O(pages).
    pub fn pages_out(&self) -> u64 {
        self.holders().iter().map(|holder| holder.pages).sum()
    }

    /// Returns how many bytes of chunks the device could still reach after the pool was taken down,
    /// and the first reason; `None` if it reaches nothing. Access to such a chunk ends when it is
    /// released with its last page, unless the chunk is [quarantined](RevokeError::Unmap).
    pub fn reachable(&self) -> Option<(u64, &RevokeError)> {
        self.reachable.1.as_ref().map(|why| (self.reachable.0, why))
    }

    /// Returns the counters; [`Counts::released_refcnt`] still increases.
    pub fn counts(&self) -> Counts {
        self.shared.counts(self.counts)
    }
}

impl fmt::Debug for Destroyed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destroyed")
            .field("pool", &self.shared.name())
            .field("holders", &self.holders())
            .field("reachable", &self.reachable)
            .finish_non_exhaustive()
    }
}

impl PagePool {
    /// Revokes the device's access to every page at once, also to pages still in use, and releases
    /// the chunks that have none in use. Each other chunk is released with its last page.
    ///
    /// Waits until the source has revoked each chunk, if it can, and for frees that are being
    /// stored in the ring. O(pages).
    pub fn destroy(mut self) -> Destroyed {
        let reachable = self.shared.hide_all();
        self.take_down();
        Destroyed { shared: self.shared.clone(), counts: self.counts, reachable }
    }

    /// Closes the pool and releases the chunks that have no page in use. The device can reach each
    /// other chunk until it is released with its last page; [`destroy`](Self::destroy) revokes them
    /// at once.
    pub fn close(mut self) -> Destroyed {
        self.take_down();
        Destroyed {
            shared: self.shared.clone(),
            counts: self.counts,
            reachable: self.shared.still_mapped(),
        }
    }

    /// Retires every page that is not in use. Called once.
    fn take_down(&mut self) {
        self.closed = true;
        self.close_open_page();
        self.counts = self.own_counts();
        let step = self.shared.config.order.frames() as usize;
        let fresh = (self.fresh.0..self.fresh.1).step_by(step);
        let magazine = &mut self.magazine;
        let own = core::iter::from_fn(|| magazine.take_uncounted()).chain(fresh);
        let waive = &mut self.counts.waive;
        self.shared.take_down(own, || *waive += 1);
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        if !self.closed {
            self.take_down();
        }
    }
}

impl Inner {
    /// Revokes the device's access to every chunk; returns how many bytes it can still reach, and
    /// the first reason.
    pub(super) fn hide_all(&self) -> (u64, Option<RevokeError>) {
        let (mut bytes, mut why) = (0, None);
        let count = self.chunks.lock().list.len();
        for_all(0..count, |at| {
            // Quarantined while `hide` runs: if that panics, the device may or may not reach the
            // chunk.
            let quarantine = |chunk: &mut Chunk| {
                core::mem::replace(chunk, Chunk { on_empty: OnEmpty::Nothing, ..*chunk })
            };
            let Some(chunk) = self.chunks.lock().list.get_mut(at).map(quarantine) else { return };
            // SAFETY: called once for each chunk, which was acquired with that order and is not
            // released.
            let hidden = unsafe { self.source.hide(chunk.frame, chunk.order) };
            let on_empty = match hidden {
                Ok(()) => OnEmpty::ReleaseHidden,
                Err(error) => {
                    bytes += u64::from(chunk.order.frames()) * Frame::BYTES;
                    let on_empty =
                        if error.is_permanent() { OnEmpty::Nothing } else { OnEmpty::Release };
                    why.get_or_insert(error);
                    on_empty
                }
            };
            if let Some(chunk) = self.chunks.lock().list.get_mut(at) {
                chunk.on_empty = on_empty;
            }
        });
        (bytes, why)
    }

    /// Returns the bytes of the chunks that a closed pool still holds, which the device can reach,
    /// and the reason if there are any.
    pub(super) fn still_mapped(&self) -> (u64, Option<RevokeError>) {
        let chunks = self.chunks.lock();
        let held = chunks.list.iter().filter(|chunk| chunk.on_empty != OnEmpty::Nothing);
        let bytes = held.map(|chunk| u64::from(chunk.order.frames()) * Frame::BYTES).sum();
        (bytes, (bytes != 0).then_some(RevokeError::NotAsked))
    }

    /// Closes the ring and the spill list, retires their pages and the consumer's `own`, and
    /// releases the chunks whose pages have all been returned. `on_stale` is called for each second
    /// free found here. For the consumer, once.
    pub(super) fn take_down(&self, own: impl IntoIterator<Item = u32>, mut on_stale: impl FnMut()) {
        let mut retire = |entry: Entry| {
            let mut chunks = self.chunks.lock();
            if self.accept(entry) {
                self.page_returned(&mut chunks, entry.frame());
            } else {
                on_stale();
            }
        };
        self.ring.close(&mut retire);
        let spilled = {
            let mut spill = self.spill.lock();
            spill.closed = true;
            core::mem::take(&mut spill.entries)
        };
        spilled.into_iter().for_each(&mut retire);
        own.into_iter().map(Entry::owned).for_each(retire);
        let owned = {
            let mut chunks = self.chunks.lock();
            let mut owned = chunks.late_owned;
            self.each_page(&chunks.list, |record| {
                owned += u64::from(record.state() == State::Owned)
            });
            for chunk in &mut chunks.list {
                chunk.pages_out -= 1;
            }
            owned
        };
        // The caller holds a reference of its own, so this does not reach 0.
        self.refs.fetch_sub(BIAS - owned, Ordering::AcqRel);
        let count = self.chunks.lock().list.len();
        for_all(0..count, |at| self.release_if_empty(at));
    }

    /// Records that a page has been returned for good. Returns the index of its chunk if that is
    /// now empty.
    fn page_returned(&self, chunks: &mut Chunks, frame: u32) -> Option<usize> {
        self.directory.record(frame)?.set_returned();
        let at =
            chunks.list.partition_point(|chunk| chunk.frame.index() <= frame).checked_sub(1)?;
        let chunk = chunks.list.get_mut(at)?;
        chunk.pages_out -= 1;
        (chunk.pages_out == 0).then_some(at)
    }

    /// Releases the chunk at this index once, if no page of it is in use.
    fn release_if_empty(&self, at: usize) {
        let chunk = {
            let mut chunks = self.chunks.lock();
            let Some(chunk) = chunks.list.get_mut(at).filter(|chunk| chunk.pages_out == 0) else {
                return;
            };
            let released = Chunk { on_empty: OnEmpty::Nothing, ..*chunk };
            core::mem::replace(chunk, released)
        };
        match chunk.on_empty {
            OnEmpty::Release => {
                // SAFETY: acquired with this order, released once (`Nothing` from here on), and
                // none of its pages is in use, so nothing accesses it.
                unsafe { self.source.release(chunk.frame, chunk.order) };
            }
            OnEmpty::ReleaseHidden => {
                // SAFETY: `hide` returned `Ok` for it, and the rest is as above.
                unsafe { self.source.release_hidden(chunk.frame, chunk.order) };
            }
            OnEmpty::Nothing => {}
        }
    }

    /// Returns a page after the ring was closed.
    pub(super) fn recycle_after_close(&self, entry: Entry) {
        let emptied = {
            let mut chunks = self.chunks.lock();
            if !self.accept(entry) {
                return;
            }
            chunks.late += 1;
            chunks.late_owned += u64::from(entry.generation().is_none());
            self.page_returned(&mut chunks, entry.frame())
        };
        if let Some(at) = emptied {
            self.release_if_empty(at);
        }
    }
}
