//! Destroying or closing a pool whose pages may still be in use, and what can be asked about it
//! afterwards.

use super::consumer::PagePool;
use super::error::RevokeError;
use super::inner::ReleaseHidden;
use super::pool_ref::PoolRef;
use super::source::RevocableSource;
use super::stats::{Counts, Holder};
use crate::dma_pool::ChunkSource;
use alloc::vec::Vec;
use core::fmt;

/// A pool that has been taken down, to observe who still holds its pages.
///
/// Dropping it does not affect the holders. A raw page that is never freed keeps its chunk
/// allocated.
pub struct Destroyed<S: ChunkSource> {
    shared: PoolRef<S>,
    counts: Counts,
    reachable: (u64, Option<RevokeError>),
}

impl<S: ChunkSource> Destroyed<S> {
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
    /// released with its last page, unless the chunk is [quarantined](RevokeError::is_permanent).
    pub fn reachable(&self) -> Option<(u64, &RevokeError)> {
        self.reachable.1.as_ref().map(|why| (self.reachable.0, why))
    }

    /// Returns the counters; [`Counts::released_refcnt`] still increases.
    pub fn counts(&self) -> Counts {
        self.shared.counts(self.counts)
    }
}

impl<S: ChunkSource> fmt::Debug for Destroyed<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Destroyed")
            .field("pool", &self.shared.name())
            .field("holders", &self.holders())
            .field("reachable", &self.reachable)
            .finish_non_exhaustive()
    }
}

impl<S: RevocableSource> PagePool<S> {
    /// Revokes the device's access to every page at once, also to pages still in use, and releases
    /// the chunks that have none in use. Each other chunk is released with its last page.
    ///
    /// Waits until the source has revoked each chunk, and for frees that are being stored in the
    /// ring. O(pages).
    pub fn destroy(mut self) -> Destroyed<S> {
        // SAFETY: `hide_all` calls it once for each chunk, which was acquired with that order and
        // is not released.
        let hide = |source: &S, frame, order| unsafe { source.hide(frame, order) };
        let release: ReleaseHidden<S> = S::release_hidden;
        let reachable = self.shared.hide_all(hide, release);
        self.take_down();
        Destroyed { shared: self.shared.clone(), counts: self.counts, reachable }
    }
}

impl<S: ChunkSource> PagePool<S> {
    /// Closes the pool and releases the chunks that have no page in use. The device can reach each
    /// other chunk until it is released with its last page; [`destroy`](Self::destroy) revokes them
    /// at once.
    pub fn close(mut self) -> Destroyed<S> {
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

impl<S: ChunkSource> Drop for PagePool<S> {
    fn drop(&mut self) {
        if !self.closed {
            self.take_down();
        }
    }
}
