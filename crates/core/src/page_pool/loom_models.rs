//! Every interleaving (within a bound of preemptions) of those who give pages back with the consumer, and with the end.
//!
//! A page's memory is played by a cell: the model checker objects when two threads have it at once, and when what one
//! did with it does not come before the next one's use, or before the chunk is released.

use super::ring::{Entry, Ring};
use super::*;
use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, SourceError};
use crate::frame::{Frame, FrameError, Order};
use alloc::sync::Arc as Counted;
use alloc::vec::Vec;
use core::ptr::NonNull;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::sync::{LazyLock, Mutex};

/// Frames, none of which is touched: what is done with them is done with `used`.
struct Inner {
    used: [UnsafeCell<u32>; FRAMES],
    /// Not the model checker's: what it keeps is reported, and orders nothing.
    taken: Mutex<[bool; FRAMES]>,
}

// SAFETY: the cells are reached by those who have the page, which is what is checked.
unsafe impl Sync for Inner {}

const FRAMES: usize = 4;

#[derive(Clone)]
struct Source(Counted<Inner>);

impl Source {
    fn new() -> Self {
        let used = core::array::from_fn(|_| UnsafeCell::new(0));
        Self(Counted::new(Inner { used, taken: Mutex::default() }))
    }

    fn pool(&self, ring: u32) -> PagePool<Self> {
        PagePool::new(self.clone(), "", Config { ring, ..Config::default() }).unwrap()
    }

    /// Has its way with a page.
    fn touch(&self, iova: Iova) {
        let frame = (iova.raw() / 4096) as usize;
        // SAFETY: the caller has the page; loom reports a second owner.
        self.0.used[frame].with_mut(|at| unsafe { *at += 1 });
    }

    fn all_back(&self) -> bool {
        !self.0.taken.lock().unwrap().contains(&true)
    }

    fn is_alone(&self) -> bool {
        Counted::strong_count(&self.0) == 1
    }
}

/// Never written, and never released: the models have no end for it.
static MEMORY: LazyLock<usize> = LazyLock::new(|| {
    let layout = std::alloc::Layout::from_size_align(FRAMES * 4096, 4096).unwrap();
    // SAFETY: the layout has bytes.
    unsafe { std::alloc::alloc_zeroed(layout) }.expose_provenance()
});

// SAFETY: as the trait asks: a run is given once until it is released.
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

// SAFETY: it only keeps accounts.
unsafe impl RevocableSource for Source {
    unsafe fn hide(&self, _frame: Frame, _order: Order) -> Result<(), RevokeError> {
        Ok(())
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.release(frame, order) };
    }
}

fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn drain(ring: &Ring, most: u64) -> Vec<u32> {
    let mut got = Vec::new();
    ring.drain(most, |entry| got.push(entry.frame()));
    got
}

/// Two producers, one of two entries at once, and a consumer: each entry arrives once, in its producer's order; what
/// was refused got the error. At the end the ring is closed under a third.
#[test]
fn loom_ring_has_each_entry_once() {
    check(3, || {
        let ring = Arc::new(Ring::new(2));
        let put = |ring: Arc<Ring>, entries: Vec<Entry>| {
            thread::spawn(move || match ring.claim(entries.len()) {
                Ok(Some(claim)) => claim.fill(&entries),
                Ok(None) => 0,
                Err(super::ring::Closed) => unreachable!("it is closed after the join"),
            })
        };
        let a = put(ring.clone(), [1, 2].map(Entry::owned).into());
        let b = put(ring.clone(), [3].map(Entry::owned).into());
        let mut got = drain(&ring, 2);
        let placed = a.join().unwrap() + b.join().unwrap();
        ring.close(|entry| got.push(entry.frame()));
        assert!(placed >= 2 && got.len() == placed, "{got:?}");
        let first = |what| got.iter().position(|&at| at == what);
        assert!(first(2).is_none_or(|two| first(1).is_some_and(|one| one < two)), "{got:?}");
        got.sort_unstable();
        got.dedup();
        assert_eq!(got.len(), placed, "none twice");
    });
}

/// The ring is closed while a producer is at it: either the page is found, or its producer gets the error.
#[test]
fn loom_ring_closed_while_a_page_comes() {
    check(3, || {
        let ring = Arc::new(Ring::new(2));
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

/// Pages are dropped elsewhere while the consumer goes on: through the ring, and, where it is full, below it.
#[test]
fn loom_page_pool_pages_come_back_while_others_go() {
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

/// A page comes back while the pool is destroyed: it is taken down with the pool, or is released after it; and what is
/// shared is freed once, by the last owner.
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
        assert!(!source.is_alone(), "a page is still out");
        source.touch(late.iova());
        drop(late);
        assert!(source.all_back() && source.is_alone());
    });
}

/// The same where nothing stays out, and two come back: the last one may be any of the three.
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

/// Fragments of one page are dropped by two threads while no more are cut: the page comes back once.
#[test]
fn loom_page_pool_last_fragment_against_the_end_of_cutting() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(1);
        let parts = [pool.alloc_fragment(64).unwrap(), pool.alloc_fragment(64).unwrap()];
        let others = parts.map(|part| thread::spawn(move || drop(part)));
        // A new page is begun, so no more is cut of the first.
        let next = pool.alloc_fragment(4096).unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(pool.stats().in_use, 1);
        source.touch(next.iova());
        drop(next);
        drop(pool.destroy());
        assert!(source.all_back() && source.is_alone());
    });
}

/// A raw page is freed twice in one instant, by the consumer and elsewhere: it is allocated once.
#[test]
fn loom_page_pool_raw_page_freed_twice() {
    check(3, || {
        let source = Source::new();
        let mut pool = source.pool(2);
        let remote = pool.remote();
        let raw = pool.alloc_raw().unwrap();
        let other = thread::spawn(move || remote.free_raw(raw).is_ok());
        let here = pool.free_raw(raw).is_ok();
        // It may be a `Page` by the time at which the other one frees it.
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

/// A raw page is freed elsewhere while the pool is destroyed.
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
