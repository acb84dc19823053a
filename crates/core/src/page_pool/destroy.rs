//! The end of a pool, with pages still out.

use super::consumer::PagePool;
use super::error::RevokeError;
use super::inner::ReleaseHidden;
use super::keep::Keep;
use super::report::{Counts, Holder};
use super::source::RevocableSource;
use crate::dma_pool::ChunkSource;
use alloc::vec::Vec;
use core::fmt;

/// What is left of a pool that was taken down: who holds its pages, now and later.
///
/// Dropping it changes nothing for the holders. A raw page that is never freed keeps its chunk allocated.
pub struct Destroyed<S: ChunkSource> {
    keep: Keep<S>,
    counts: Counts,
    reachable: (u64, Option<RevokeError>),
}

impl<S: ChunkSource> Destroyed<S> {
    /// Who holds pages *now*: it gets shorter as they come back. O(pages).
    pub fn holders(&self) -> Vec<Holder> {
        self.keep.holders()
    }

    /// How many pages are still out. O(pages).
    pub fn pages_out(&self) -> u64 {
        self.holders().iter().map(|holder| holder.pages).sum()
    }

    /// How many bytes of chunks the device could still reach when the pool had been taken down, and why (the first reason).
    /// Each such chunk is revoked when it is released to the source, with its last page, unless it
    /// [never](RevokeError::is_permanent) can be. `None`: it reaches nothing.
    pub fn reachable(&self) -> Option<(u64, &RevokeError)> {
        self.reachable.1.as_ref().map(|why| (self.reachable.0, why))
    }

    /// The counters; [`Counts::released_refcnt`] still counts.
    pub fn counts(&self) -> Counts {
        self.keep.counts(self.counts)
    }
}

impl<S: ChunkSource> fmt::Debug for Destroyed<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destroyed")
            .field("pool", &self.keep.name())
            .field("holders", &self.holders())
            .field("reachable", &self.reachable)
            .finish_non_exhaustive()
    }
}

impl<S: RevocableSource> PagePool<S> {
    /// Takes the device's access to every page away, at once, although pages may still be out; then gives those chunks back of which
    /// no page is. The others go back with their last page.
    ///
    /// Waits for the source to take each chunk away (strictly), and for frees that are just being stored in the ring. O(pages).
    pub fn destroy(mut self) -> Destroyed<S> {
        // SAFETY: `hide_all` calls it once for each chunk, which was acquired with that order and is not released.
        let hide = |source: &S, frame, order| unsafe { source.hide(frame, order) };
        let release: ReleaseHidden<S> = S::release_hidden;
        let reachable = self.keep.hide_all(hide, release);
        self.take_down();
        Destroyed { keep: self.keep.clone(), counts: self.counts, reachable }
    }
}

impl<S: ChunkSource> PagePool<S> {
    /// Releases the chunks without pages in use. The device reaches each of the others until it is released with its last
    /// page; [`destroy`](Self::destroy) revokes them at once.
    pub fn close(mut self) -> Destroyed<S> {
        self.take_down();
        Destroyed { keep: self.keep.clone(), counts: self.counts, reachable: self.keep.still_out() }
    }

    /// Every page that is not out is gone after it. Once.
    fn take_down(&mut self) {
        self.closed = true;
        self.end_fragments();
        self.counts = self.own_counts();
        let step = self.keep.config.order.frames() as usize;
        let fresh = (self.fresh.0..self.fresh.1).step_by(step);
        let magazine = &mut self.magazine;
        let own = core::iter::from_fn(|| magazine.draw()).chain(fresh);
        let waive = &mut self.counts.waive;
        self.keep.take_down(own, || *waive += 1);
    }
}

impl<S: ChunkSource> Drop for PagePool<S> {
    fn drop(&mut self) {
        if !self.closed {
            self.take_down();
        }
    }
}
