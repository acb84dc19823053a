//! Sources that panic, and visits that use the pool: no chunk is lost, and nothing waits for itself.

use super::heap::Heap;
use super::subject::Pool;
use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, Coherent, SourceError};
use crate::frame::{Frame, Order};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A heap each of whose calls may panic: those with a bit in `acquires` and in `releases`.
struct Fragile {
    heap: Arc<Heap>,
    acquires: AtomicUsize,
    releases: AtomicUsize,
    span_panics: AtomicUsize,
}

impl Fragile {
    fn new(mebibytes: usize) -> Arc<Self> {
        Arc::new(Self {
            heap: super::heap(mebibytes),
            acquires: AtomicUsize::new(0),
            releases: AtomicUsize::new(0),
            span_panics: AtomicUsize::new(0),
        })
    }

    /// Panics if the lowest bit is set, and moves on to the next one.
    fn step(bits: &AtomicUsize) {
        let now = bits.load(Ordering::Relaxed);
        bits.store(now >> 1, Ordering::Relaxed);
        if now & 1 != 0 {
            resume_unwind(Box::new("a source"));
        }
    }
}

// SAFETY: all calls are forwarded, unless they panic.
unsafe impl ChunkSource for Fragile {
    fn span(&self) -> NonNull<[u8]> {
        Self::step(&self.span_panics);
        self.heap.span()
    }
    fn iova(&self) -> Iova {
        self.heap.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        // Larger runs are refused: each chunk is one step.
        if order == Order::PAGE {
            Self::step(&self.acquires);
        }
        self.heap.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.heap.release(frame, order) };
        Self::step(&self.releases);
    }
}

fn panics<R>(run: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

/// A pool of eight chunks of a page, all free and in the depot.
fn eight_chunks(source: &Arc<Fragile>) -> Pool {
    source.heap.largest.store(0, Ordering::Relaxed);
    let pool = Pool::builder("panics").block(4096).minimum(0).build(source).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..8).map(|_| local.alloc().unwrap()).collect();
    local.free_many(blocks);
    assert_eq!(source.heap.frames_taken(), 8);
    drop(local);
    pool
}

#[test]
fn a_release_that_panics_loses_no_other_chunk() {
    // The first, the last, two of them, all.
    for releases in [1, 0x80, 0b1010, 0xff] {
        let source = Fragile::new(2);
        let pool = eight_chunks(&source);
        source.releases.store(releases, Ordering::Relaxed);
        assert!(panics(|| pool.shrink()));
        assert_eq!((source.heap.frames_taken(), pool.stats().blocks), (0, 0));
        // The pool is whole: it grows, shrinks and ends.
        drop(pool.alloc().unwrap());
        assert_eq!(pool.shrink(), 4096);
        drop(pool);

        let pool = eight_chunks(&source);
        source.releases.store(releases, Ordering::Relaxed);
        assert!(panics(|| drop(pool)));
        assert_eq!((source.heap.frames_taken(), Arc::strong_count(&source)), (0, 1));
    }
}

#[test]
fn a_release_that_panics_while_its_thread_unwinds_ends_with_it() {
    let source = Fragile::new(2);
    let pool = eight_chunks(&source);
    let coherent = Coherent::new(source.clone(), 4096).unwrap();
    source.releases.store(0b1_0101_0101, Ordering::Relaxed);
    assert!(panics(move || {
        let _owned = (coherent, pool);
        resume_unwind(Box::new("the thread's own"))
    }));
    assert_eq!((source.heap.frames_taken(), source.releases.load(Ordering::Relaxed)), (0, 0));
}

/// At each call of the source in turn, through every call that allocates.
#[test]
fn an_acquire_that_panics_loses_no_block() {
    for at in 0..8 {
        let source = Fragile::new(2);
        source.heap.largest.store(0, Ordering::Relaxed);
        let pool = Pool::builder("panics").block(4096).build(&source).unwrap();
        let mut local = pool.local();
        let panic_at = |at: usize| source.acquires.store(1usize << at, Ordering::Relaxed);
        panic_at(at);
        assert!(panics(|| local.fill_all(&mut [None; 9])));
        assert_eq!((pool.stats().in_use, source.heap.frames_taken()), (0, at));
        panic_at(0);
        let mut slots: Vec<_> = (0..9).map(|_| None).collect();
        assert!(panics(|| local.fill_blocks(&mut slots)));
        assert_eq!(slots.iter().flatten().count(), at);
        slots.clear();
        local.flush();
        let blocks: Vec<_> = (0..at).map(|_| local.alloc_raw().unwrap()).collect();
        panic_at(0);
        assert!(panics(|| pool.alloc()));
        panic_at(0);
        assert!(panics(|| local.alloc()));
        local.free_bulk(&blocks).unwrap();
        drop(local);
        // Every block once, and no more.
        let all: Vec<_> = core::iter::from_fn(|| pool.alloc().ok()).collect();
        assert_eq!(all.len(), 512);
        drop(all);
        pool.destroy().unwrap();
        assert_eq!(source.heap.frames_taken(), 0);
    }
    // A minimum that is acquired in part.
    let source = Fragile::new(2);
    source.heap.largest.store(0, Ordering::Relaxed);
    source.acquires.store(1 << 5, Ordering::Relaxed);
    assert!(panics(|| Pool::builder("panics").block(4096).minimum(8).build(&source)));
    assert_eq!((source.heap.frames_taken(), Arc::strong_count(&source)), (0, 1));
}

#[test]
fn a_span_that_panics_loses_no_run() {
    let source = Fragile::new(2);
    source.span_panics.store(1, Ordering::Relaxed);
    assert!(panics(|| Coherent::new(source.clone(), 4096)));
    assert_eq!((source.heap.frames_taken(), Arc::strong_count(&source)), (0, 1));
}

#[test]
fn a_visit_may_use_the_pool_and_keeps_its_chunks() {
    let source = Fragile::new(2);
    let pool = eight_chunks(&source);
    let (mut seen, mut taken) = (0, Vec::new());
    pool.for_each_block(|_, _| {
        seen += 1;
        // More than there are: the pool grows meanwhile.
        taken.extend((0..2).map(|_| pool.alloc().unwrap()));
        assert_eq!(pool.shrink(), 0);
        pool.for_each_block(|_, _| assert_eq!(pool.shrink(), 0));
        assert_eq!(pool.shrink(), 0, "the outer visit goes on");
    });
    assert_eq!((seen, taken.len()), (8, 16));
    taken.clear();
    // All blocks are free here, and none is lost by the shrink that was refused.
    pool.for_each_block(|_, _| assert_eq!(pool.shrink(), 0));
    assert_eq!((pool.stats().cached, pool.stats().in_depot), (0, 16));
    assert!(panics(|| pool.for_each_block(|_, _| resume_unwind(Box::new("a visit")))));
    assert_eq!(pool.shrink(), 16 * 4096);
}
