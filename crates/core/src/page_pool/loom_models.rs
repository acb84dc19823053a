//! Every interleaving (within a bound of preemptions) of threads that return pages with the
//! consumer and with `destroy`.
//!
//! A cell models the memory of each page: the model checker reports two concurrent owners, and
//! accesses of one owner that do not happen before the next owner's or before the release of the
//! chunk.

use super::ring::{Entry, Ring};
use super::*;
use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, SourceError};
use crate::frame::{Frame, FrameError, Order};
use crate::sync::in_all_orders;
use alloc::sync::Arc as Counted;
use alloc::vec::Vec;
use core::ptr::NonNull;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::sync::{LazyLock, Mutex};

/// The frames of the source. Their memory is never accessed; the owner of a frame accesses its cell
/// instead.
struct Inner {
    used: [UnsafeCell<u32>; FRAMES],
    /// A mutex of the standard library, so that it adds no ordering to the model.
    taken: Mutex<[bool; FRAMES]>,
}

// SAFETY: only the owner of a page accesses its cell, which is what loom checks.
unsafe impl Sync for Inner {}

const FRAMES: usize = 4;

#[derive(Clone)]
struct Source(Counted<Inner>);

impl Source {
    fn new() -> Self {
        let used = core::array::from_fn(|_| UnsafeCell::new(0));
        Self(Counted::new(Inner { used, taken: Mutex::default() }))
    }

    fn pool(&self, ring: u32) -> PagePool {
        PagePool::new(self.clone(), "", Config { ring, ..Config::default() }).unwrap()
    }

    /// Accesses a page as its only owner.
    fn touch(&self, iova: Iova) {
        let frame = (iova.raw() / 4096) as usize;
        // SAFETY: the caller owns the page; loom reports a second owner.
        self.0.used[frame].with_mut(|at| unsafe { *at += 1 });
    }

    /// Reads a page as one of its holders.
    fn look(&self, iova: Iova) {
        // SAFETY: the caller holds part of the page; loom reports an owner that writes meanwhile.
        self.0.used[(iova.raw() / 4096) as usize].with(|at| unsafe { *at });
    }

    fn all_back(&self) -> bool {
        !self.0.taken.lock().unwrap().contains(&true)
    }

    fn is_alone(&self) -> bool {
        Counted::strong_count(&self.0) == 1
    }
}

/// The span. Never accessed, and never freed: it is used by all models.
static MEMORY: LazyLock<usize> = LazyLock::new(|| {
    let layout = std::alloc::Layout::from_size_align(FRAMES * 4096, 4096).unwrap();
    // SAFETY: the layout is not empty.
    unsafe { std::alloc::alloc_zeroed(layout) }.expose_provenance()
});

// SAFETY: allocates whole, aligned runs, and none twice before it is released.
unsafe impl ChunkSource for Source {
    fn span(&self) -> NonNull<[u8]> {
        let base = NonNull::new(core::ptr::with_exposed_provenance_mut(*MEMORY)).unwrap();
        NonNull::slice_from_raw_parts(base, FRAMES * 4096)
    }
    fn iova(&self) -> Iova {
        Iova::new(0)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frames = order.frames() as usize;
        let mut taken = self.0.taken.lock().unwrap();
        let at = (0..FRAMES).step_by(frames).find(|&at| !taken[at..at + frames].contains(&true));
        let at = at.ok_or(FrameError::Exhausted { order, frames: FRAMES as u32 })?;
        taken[at..at + frames].fill(true);
        Ok(Frame::new(at as u32).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let first = frame.index() as usize;
        for at in first..first + order.frames() as usize {
            self.touch(Iova::new(at as u64 * 4096));
            assert!(core::mem::take(&mut self.0.taken.lock().unwrap()[at]));
        }
    }
}

// SAFETY: no device accesses the memory.
unsafe impl RevocableSource for Source {
    unsafe fn hide(&self, _frame: Frame, _order: Order) -> Result<(), RevokeError> {
        Ok(())
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.release(frame, order) };
    }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    (builder.preemption_bound, builder.max_branches) = (Some(preemptions), 20_000);
    in_all_orders(|| builder.check(model));
}

fn drain(ring: &Ring, most: u64) -> Vec<u32> {
    let mut got = Vec::new();
    ring.drain(most, |entry| got.push(entry.frame()));
    got
}

/// Two producers, one of which adds two entries at once, and a consumer that then closes the ring:
/// each placed entry arrives once, in its producer's order.
#[test]
fn loom_ring_delivers_each_entry_once() {
    check(3, || {
        let ring = Arc::new(Ring::new(2).unwrap());
        let put = |ring: Arc<Ring>, entries: Vec<Entry>| {
            thread::spawn(move || match ring.claim(entries.len()) {
                Ok(Some(claim)) => claim.fill(&entries),
                Ok(None) => 0,
                Err(super::ring::Closed) => unreachable!("the ring is closed after the join"),
            })
        };
        let a = put(ring.clone(), [1, 2].map(Entry::owned).into());
        let b = put(ring.clone(), [3].map(Entry::owned).into());
        let mut got = drain(&ring, 2);
        let placed = a.join().unwrap() + b.join().unwrap();
        ring.close(|entry| got.push(entry.frame()));
        assert!(placed >= 2 && got.len() == placed, "{got:?}");
        let position = |entry| got.iter().position(|&at| at == entry);
        assert!(position(2).is_none_or(|two| position(1).is_some_and(|one| one < two)), "{got:?}");
        got.sort_unstable();
        got.dedup();
        assert_eq!(got.len(), placed, "none twice");
    });
}

/// The ring is closed while producers add entries: each entry is either collected or refused.
#[test]
fn loom_ring_closed_during_a_claim() {
    check(3, || {
        let ring = Arc::new(Ring::new(2).unwrap());
        let put = |at: u32| {
            let ring = ring.clone();
            thread::spawn(move || match ring.claim(1) {
                Ok(Some(claim)) => claim.fill(&[Entry::owned(at)]),
                Ok(None) | Err(super::ring::Closed) => 0,
            })
        };
        let (a, b) = (put(1), put(2));
        let mut got = 0;
        ring.close(|_| got += 1);
        assert_eq!(got, a.join().unwrap() + b.join().unwrap());
        assert!(matches!(ring.claim(1), Err(super::ring::Closed)));
    });
}

/// Two threads drop pages, through the ring or the spill list, while the consumer allocates.
#[test]
fn loom_page_pool_drops_against_allocs() {
    check(2, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let held: Vec<_> = (0..2).map(|_| pool.alloc().unwrap()).collect();
        let others: Vec<_> = held
            .into_iter()
            .map(|page| {
                let source = source.clone();
                thread::spawn(move || {
                    source.touch(page.iova());
                    drop(page);
                })
            })
            .collect();
        let mut mine = Vec::new();
        for _ in 0..3 {
            let page = pool.alloc();
            page.iter().for_each(|page| source.touch(page.iova()));
            mine.extend(page);
        }
        others.into_iter().for_each(|other| other.join().unwrap());
        mine.extend(core::iter::from_fn(|| pool.alloc().ok()));
        assert_eq!(mine.len(), FRAMES);
        mine.into_iter().for_each(|page| pool.recycle(page));
        drop(pool);
        assert!(source.all_back() && source.is_alone());
    });
}

/// A page is dropped while the pool is destroyed: it is collected or released later, and the last
/// owner frees the shared state once.
#[test]
fn loom_page_pool_return_against_destroy() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let (page, late) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        let other = {
            let source = source.clone();
            thread::spawn(move || {
                source.touch(page.iova());
                drop(page);
            })
        };
        let end = pool.destroy();
        assert!(matches!(end.pages_out(), 1 | 2));
        drop(end);
        other.join().unwrap();
        assert!(!source.is_alone(), "a page is still in use");
        source.touch(late.iova());
        drop(late);
        assert!(source.all_back() && source.is_alone());
    });
}

/// Two pages are dropped while the pool is destroyed: any of the three threads may be the last
/// owner.
#[test]
fn loom_page_pool_two_returns_against_destroy() {
    check(2, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let pages = [pool.alloc().unwrap(), pool.alloc().unwrap()];
        let others = pages.map(|page| {
            let source = source.clone();
            thread::spawn(move || {
                source.touch(page.iova());
                drop(page);
            })
        });
        drop(pool.destroy());
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(source.all_back() && source.is_alone());
    });
}

/// Two threads drop the fragments of a page while the consumer closes that page: it is freed once.
#[test]
fn loom_page_pool_last_fragment_against_closing_the_page() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let parts = [pool.alloc_fragment(64).unwrap(), pool.alloc_fragment(64).unwrap()];
        let others = parts.map(|part| thread::spawn(move || drop(part)));
        // Starts a new page, so the first one is closed.
        let next = pool.alloc_fragment(4096).unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(pool.stats().in_use, 1);
        source.touch(next.iova());
        drop(next);
        drop(pool.destroy());
        assert!(source.all_back() && source.is_alone());
    });
}

/// Two threads read their fragments of a page and drop them while the consumer allocates all pages:
/// the page's next owner comes after both, whichever is last.
#[test]
fn loom_page_pool_fragments_end_before_the_next_owner() {
    check(2, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let parts = [pool.alloc_fragment(64).unwrap(), pool.alloc_fragment(64).unwrap()];
        let first = parts[0].iova();
        // Starts a new page, so the first one is closed.
        let next = pool.alloc_fragment(4096).unwrap();
        let others = parts.map(|part| {
            let source = source.clone();
            thread::spawn(move || {
                source.look(part.iova());
                drop(part);
            })
        });
        // One more than there are, unless the first is free again.
        let mine: Vec<_> = (0..3).filter_map(|_| pool.alloc().ok()).collect();
        mine.iter().filter(|page| page.iova() == first).for_each(|page| source.touch(page.iova()));
        others.into_iter().for_each(|other| other.join().unwrap());
        drop((mine, next, pool));
        assert!(source.all_back() && source.is_alone());
    });
}

/// The consumer has the last fragment, or the rest of the page, while another thread drops the
/// other: it reuses the page at once.
#[test]
fn loom_page_pool_a_consumer_frees_the_page_of_a_fragment() {
    for ends in 0..3 {
        check(3, move || {
            let source = Source::new();
            let config = Config { ring: 1, max_in_use: 1, ..Config::default() };
            let mut pool = PagePool::new(source.clone(), "", config).unwrap();
            let part = pool.alloc_fragment(64).unwrap();
            let iova = part.iova();
            let mine = (ends == 0).then(|| pool.alloc_fragment(64).unwrap());
            let other = {
                let source = source.clone();
                thread::spawn(move || {
                    source.look(part.iova());
                    drop(part);
                })
            };
            if let Some(mine) = mine {
                source.look(mine.iova());
                pool.recycle_fragment(mine);
            }
            // With one page, it is the open page that is taken, or closed, if its fragments have
            // ended.
            let next = if ends == 1 {
                pool.alloc_fragment(4096).map(|part| part.iova()).ok()
            } else {
                None
            };
            let page = pool.alloc().ok();
            for at in page.iter().map(Page::iova).chain(next) {
                assert_eq!(at, iova);
                source.touch(at);
            }
            other.join().unwrap();
            drop((page, pool));
            assert!(source.all_back() && source.is_alone());
        });
    }
}

/// A raw page is freed twice at the same time, by the consumer and through a `Remote`: one free is
/// valid.
#[test]
fn loom_page_pool_raw_page_freed_twice() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(2);
        let remote = pool.remote();
        let raw = pool.alloc_raw().unwrap();
        let other = thread::spawn(move || remote.free_raw(raw).is_ok());
        let here = pool.free_raw(raw).is_ok();
        // By the time of the other free it may be allocated as a `Page`.
        let page = pool.alloc().unwrap();
        source.touch(page.iova());
        let there = other.join().unwrap();
        assert!(here || there);
        let mut all: Vec<_> = core::iter::from_fn(|| pool.alloc().ok()).chain([page]).collect();
        all.sort_by_key(Page::iova);
        all.dedup_by_key(|page| page.iova());
        assert_eq!(all.len(), FRAMES, "each page once, and none is lost");
        assert_eq!(pool.counts().waive, u64::from(here && there));
        drop((all, pool));
        assert!(source.all_back() && source.is_alone());
    });
}

/// A raw page is freed through a `Remote` while the pool is destroyed.
#[test]
fn loom_page_pool_raw_return_against_destroy() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let remote = pool.remote();
        let raw = pool.alloc_raw().unwrap();
        let other = {
            let source = source.clone();
            thread::spawn(move || {
                source.touch(raw.iova());
                remote.free_raw(raw).unwrap();
                assert!(remote.free_raw(raw).is_err());
            })
        };
        let end = pool.destroy();
        other.join().unwrap();
        assert_eq!(end.pages_out(), 0);
        drop(end);
        assert!(source.all_back() && source.is_alone());
    });
}

/// A source whose end loom reports unless all of its uses come before it.
struct Watched(Source, UnsafeCell<u32>);

// SAFETY: the source is; the cell is loom's, which reports what is not ordered.
unsafe impl Send for Watched {}
// SAFETY: as for `Send`.
unsafe impl Sync for Watched {}

// SAFETY: as the source.
unsafe impl ChunkSource for Watched {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.0.release(frame, order) };
        // SAFETY: written by the drop only.
        self.1.with(|cell| assert_eq!(unsafe { *cell }, 0));
    }
}

// SAFETY: it cannot revoke, so there is nothing to guarantee.
unsafe impl RevocableSource for Watched {}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: exclusive; loom reports a use that is not ordered before.
        self.1.with_mut(|cell| unsafe { *cell = 1 });
    }
}

/// Every use of the pool by a thread happens before its state ends with the last reference, on
/// another thread.
#[test]
fn loom_page_pool_ends_after_the_uses_of_all_references() {
    check(2, || {
        let source = Source::new();
        let watched = Watched(source.clone(), UnsafeCell::new(0));
        let mut pool = PagePool::new(watched, "", Config { ring: 2, ..Config::default() }).unwrap();
        let page = pool.alloc().unwrap();
        let end = pool.close();
        let other = thread::spawn(move || drop(page));
        drop(end);
        other.join().unwrap();
        assert!(source.all_back() && source.is_alone());
    });
}
