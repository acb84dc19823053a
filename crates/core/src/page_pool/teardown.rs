//! Taking a pool down: hides its chunks from the device, collects the returned pages, and releases
//! empty chunks.

use super::error::RevokeError;
use super::inner::{BIAS, Chunk, Chunks, Inner, OnEmpty, ReleaseHidden};
use super::records::State;
use super::ring::Entry;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::sync::Ordering;

impl<S: ChunkSource> Inner<S> {
    /// Revokes the device's access to every chunk; returns how many bytes it can still reach, and
    /// the first reason.
    pub(super) fn hide_all(
        &self,
        hide: impl Fn(&S, Frame, Order) -> Result<(), RevokeError>,
        release_hidden: ReleaseHidden<S>,
    ) -> (u64, Option<RevokeError>) {
        let (mut bytes, mut why) = (0, None);
        self.chunks.lock().release_hidden = Some(release_hidden);
        for at in 0.. {
            // Quarantined while `hide` runs: if that panics, the device may or may not reach the
            // chunk.
            let quarantine = |chunk: &mut Chunk| {
                core::mem::replace(chunk, Chunk { on_empty: OnEmpty::Nothing, ..*chunk })
            };
            let Some(chunk) = self.chunks.lock().list.get_mut(at).map(quarantine) else { break };
            let on_empty = match hide(&self.source, chunk.frame, chunk.order) {
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
        }
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
        let mut at = 0;
        while self.release_if_empty(at) {
            at += 1;
        }
    }

    /// Records that a page has been returned for good. Returns the index of its chunk if that is
    /// now empty.
    fn page_returned(&self, chunks: &mut Chunks<S>, frame: u32) -> Option<usize> {
        self.directory.record(frame)?.set_returned();
        let at =
            chunks.list.partition_point(|chunk| chunk.frame.index() <= frame).checked_sub(1)?;
        let chunk = chunks.list.get_mut(at)?;
        chunk.pages_out -= 1;
        (chunk.pages_out == 0).then_some(at)
    }

    /// Releases the chunk at this index once, if no page of it is in use. Returns whether there is
    /// such a chunk.
    fn release_if_empty(&self, at: usize) -> bool {
        let (chunk, release_hidden) = {
            let mut chunks = self.chunks.lock();
            let release_hidden = chunks.release_hidden;
            let Some(chunk) = chunks.list.get_mut(at) else { return false };
            if chunk.pages_out != 0 {
                return true;
            }
            let released = Chunk { on_empty: OnEmpty::Nothing, ..*chunk };
            (core::mem::replace(chunk, released), release_hidden)
        };
        match (chunk.on_empty, release_hidden) {
            (OnEmpty::Release, _) => {
                // SAFETY: acquired with this order, released once (`Nothing` from here on), and
                // none of its pages is in use, so nothing accesses it.
                unsafe { self.source.release(chunk.frame, chunk.order) };
            }
            (OnEmpty::ReleaseHidden, Some(release)) => {
                // SAFETY: `hide` returned `Ok` for it, and the rest is as above.
                unsafe { release(&self.source, chunk.frame, chunk.order) };
            }
            (OnEmpty::ReleaseHidden, None) | (OnEmpty::Nothing, _) => {}
        }
        true
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
