//! The end of a pool: chunks are hidden, pages are gone, chunks go back.

use super::error::RevokeError;
use super::inner::{BIAS, Back, Chunk, Chunks, Inner, ReleaseHidden};
use super::records::State;
use super::ring::Entry;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::sync::Ordering;

impl<S: ChunkSource> Inner<S> {
    /// Takes the device's access to every chunk away; returns how many bytes it keeps, and why.
    pub(super) fn hide_all(
        &self,
        hide: impl Fn(&S, Frame, Order) -> Result<(), RevokeError>,
        release_hidden: ReleaseHidden<S>,
    ) -> (u64, Option<RevokeError>) {
        let (mut bytes, mut why) = (0, None);
        self.chunks.lock().release_hidden = Some(release_hidden);
        for at in 0.. {
            let Some(chunk) = self.chunks.lock().list.get(at).copied() else { break };
            let back = match hide(&self.source, chunk.frame, chunk.order) {
                Ok(()) => Back::ReleaseHidden,
                Err(error) => {
                    bytes += u64::from(chunk.order.frames()) * Frame::BYTES;
                    let back = if error.is_permanent() { Back::Never } else { Back::Release };
                    why.get_or_insert(error);
                    back
                }
            };
            if let Some(chunk) = self.chunks.lock().list.get_mut(at) {
                chunk.back = back;
            }
        }
        (bytes, why)
    }

    /// The chunks that have pages out: their bytes, where there are any.
    pub(super) fn still_out(&self) -> (u64, Option<RevokeError>) {
        let chunks = self.chunks.lock();
        let held = chunks.list.iter().filter(|chunk| chunk.back != Back::Never);
        let bytes = held.map(|chunk| u64::from(chunk.order.frames()) * Frame::BYTES).sum();
        (bytes, (bytes != 0).then_some(RevokeError::NotAsked))
    }

    /// Closes the ring; every page that is back, and `own`, those of the consumer, is gone from here, and chunks of which
    /// all are go back to the source. `on_stray` counts second frees that were found late. For the consumer, once.
    pub(super) fn take_down(&self, own: impl IntoIterator<Item = u32>, mut on_stray: impl FnMut()) {
        let mut back = |entry: Entry| {
            let mut chunks = self.chunks.lock();
            if self.accept(entry) {
                self.gone(&mut chunks, entry.frame());
            } else {
                on_stray();
            }
        };
        self.ring.close(&mut back);
        let spilled = {
            let mut spill = self.spill.lock();
            spill.closed = true;
            core::mem::take(&mut spill.entries)
        };
        spilled.into_iter().for_each(&mut back);
        own.into_iter().map(Entry::owned).for_each(back);
        let owned = {
            let mut chunks = self.chunks.lock();
            let mut owned = chunks.late_owned;
            self.each_page(&chunks.list, |record| owned += u64::from(record.state() == State::Owned));
            for chunk in &mut chunks.list {
                chunk.out -= 1;
            }
            owned
        };
        // The caller has a reference of its own, so this does not reach 0.
        self.keep.fetch_sub(BIAS - owned, Ordering::AcqRel);
        let mut at = 0;
        while self.release_if_empty(at) {
            at += 1;
        }
    }

    /// A page that is back is of no more use. Returns which chunk it was of, if that has no other.
    fn gone(&self, chunks: &mut Chunks<S>, frame: u32) -> Option<usize> {
        self.directory.record(frame)?.set_gone();
        let at = chunks.list.partition_point(|chunk| chunk.frame.index() <= frame).checked_sub(1)?;
        let chunk = chunks.list.get_mut(at)?;
        chunk.out -= 1;
        (chunk.out == 0).then_some(at)
    }

    /// Gives a chunk back that has no page left, once. Returns whether there is a chunk of that number.
    fn release_if_empty(&self, at: usize) -> bool {
        let (chunk, release_hidden) = {
            let mut chunks = self.chunks.lock();
            let release_hidden = chunks.release_hidden;
            let Some(chunk) = chunks.list.get_mut(at) else { return false };
            if chunk.out != 0 {
                return true;
            }
            let gone = Chunk { back: Back::Never, ..*chunk };
            (core::mem::replace(chunk, gone), release_hidden)
        };
        match (chunk.back, release_hidden) {
            (Back::Release, _) => {
                // SAFETY: acquired with this order, released once (`Never` from here on), and no page of it is out, so
                // nothing reaches it.
                unsafe { self.source.release(chunk.frame, chunk.order) };
            }
            (Back::ReleaseHidden, Some(release)) => {
                // SAFETY: `hide` hid it, it is released once, as above, and no page of it is out.
                unsafe { release(&self.source, chunk.frame, chunk.order) };
            }
            (Back::ReleaseHidden, None) | (Back::Never, _) => {}
        }
        true
    }

    /// A page comes back after the ring was closed.
    pub(super) fn recycle_after_close(&self, entry: Entry) {
        let emptied = {
            let mut chunks = self.chunks.lock();
            if !self.accept(entry) {
                return;
            }
            chunks.late += 1;
            chunks.late_owned += u64::from(entry.generation().is_none());
            self.gone(&mut chunks, entry.frame())
        };
        if let Some(at) = emptied {
            self.release_if_empty(at);
        }
    }
}
