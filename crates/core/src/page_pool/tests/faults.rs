//! Failures of the source at every step, sources that violate their contract, and callbacks that
//! panic at each of their calls: no page is lost or allocated twice.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The n-th chunk is unavailable at first, for all n up to 10^3: the call fails and changes
/// nothing; once the chunk is available, the next call succeeds.
#[test]
fn a_source_that_fails_is_rolled_back_at_every_step() {
    let heap = Heap::new(5 << 20);
    // A chunk is a page, so that a thousand pages are a thousand steps.
    heap.0.largest.store(1, Ordering::Relaxed);
    let mut pool = heap.pool(Config::default());
    let mut held = Vec::new();
    let mut raw = Vec::new();
    let mut fragments = Vec::new();
    for n in 1..=1000usize {
        heap.0.left.store(0, Ordering::Relaxed);
        let before = (pool.stats(), pool.holders());
        let counts = pool.counts();
        let mut attempt = |pool: &mut PagePool| -> Result<(), AllocError> {
            match n % 4 {
                0 => held.push(pool.alloc()?),
                1 => raw.push(pool.alloc_raw()?),
                2 => {
                    let mut slots = [None, None];
                    let full = pool.fill(&mut slots);
                    held.extend(slots.into_iter().flatten());
                    if full == 0 {
                        pool.alloc_raw()?;
                    }
                }
                // A page each; the open page stays open if there is no new one.
                _ => fragments.push(pool.alloc_fragment(4000)?),
            }
            Ok(())
        };
        let error = attempt(&mut pool).unwrap_err();
        assert!(
            matches!(error, AllocError::Source(SourceError::Frames(FrameError::Exhausted { .. }))),
            "{n}"
        );
        assert_eq!((pool.stats(), pool.holders()), before, "{n}");
        assert_eq!(
            Counts { empty: counts.empty, ..pool.counts() },
            counts,
            "only the attempt is counted"
        );
        heap.0.left.store(1, Ordering::Relaxed);
        attempt(&mut pool).unwrap();
        assert_eq!(pool.stats().pages, n as u64);
        assert_eq!(heap.count(Use::Mapped), n);
    }
    assert_eq!(pool.stats().in_use, 1000);
    raw.into_iter().for_each(|page| pool.free_raw(page).unwrap());
    drop((held, fragments));
    let end = pool.destroy();
    assert_eq!((end.pages_out(), heap.count(Use::Free)), (0, 1280));
}

#[test]
fn a_large_chunk_that_is_unavailable_is_replaced_by_a_smaller_one() {
    for largest in [512, 256, 64, 8, 2, 1] {
        let heap = Heap::new(8 << 20);
        heap.0.largest.store(largest, Ordering::Relaxed);
        let mut pool = heap.pool(Config::default());
        let mut slots: Vec<_> = (0..2048).map(|_| None).collect();
        assert_eq!(pool.fill(&mut slots), 2048, "all of the heap, in chunks of {largest} or less");
        assert!(pool.alloc().is_err());
        let distinct: HashSet<_> = slots.iter().flatten().map(Page::iova).collect();
        assert_eq!(distinct.len(), 2048);
        drop(slots);
        assert_eq!(pool.fill_raw(&mut [None; 2048]), 2048, "all of them are recycled");
    }
    let heap = Heap::new(8 << 20);
    heap.0.largest.store(4, Ordering::Relaxed);
    let mut pool = heap.pool(Config { order: Order::new(3).unwrap(), ..Config::default() });
    assert!(pool.alloc().is_err(), "a chunk is never smaller than a page");
    assert_eq!(heap.count(Use::Free), 2048);
}

/// The n-th chunk cannot be hidden: the others are, the reachable bytes are reported, and each
/// chunk is released by the right call.
#[test]
fn a_chunk_that_cannot_be_hidden_is_counted_and_the_others_are_hidden() {
    for quarantines in [false, true] {
        for n in 0..5 {
            let heap = Heap::new(4 << 20);
            heap.0.largest.store(64, Ordering::Relaxed);
            let mut pool = heap.pool(Config::default());
            let held: Vec<_> = (0..5 * 64).map(|_| pool.alloc().unwrap()).collect();
            heap.0.hides.store(n, Ordering::Relaxed);
            heap.0.quarantines.store(quarantines, Ordering::Relaxed);
            let end = pool.destroy();
            assert_eq!((heap.count(Use::Mapped), heap.count(Use::Hidden)), (64, 4 * 64));
            let (bytes, why) = end.reachable().unwrap();
            assert_eq!((bytes, why.is_permanent()), (64 * 4096, quarantines));
            drop(held);
            assert_eq!(end.pages_out(), 0);
            // A quarantined chunk is never released.
            assert_eq!(heap.count(Use::Mapped), if quarantines { 64 } else { 0 });
            assert_eq!(heap.count(Use::Hidden), 0);
        }
    }
}

#[test]
fn a_misaligned_run_is_released_and_reported() {
    let heap = Heap::new(4 << 20);
    heap.0.shift.store(1, Ordering::Relaxed);
    let mut pool = heap.pool(Config::default());
    let error = pool.alloc().unwrap_err();
    assert_eq!(
        error,
        AllocError::Misplaced { frame: Frame::new(1).unwrap(), order: Order::new(6).unwrap() }
    );
    assert_eq!((pool.stats().pages, heap.count(Use::Free)), (0, 1024));
    heap.0.shift.store(0, Ordering::Relaxed);
    pool.alloc().unwrap();
}

/// A source that returns runs behind its span, and counts those not returned. It hides nothing.
struct Outside(Heap, Arc<AtomicUsize>);

// SAFETY: it breaks the contract, and the pool must find that out before it uses the run.
unsafe impl ChunkSource for Outside {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, _: Order) -> Result<Frame, SourceError> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Ok(Frame::new(1024).unwrap())
    }
    unsafe fn release(&self, frame: Frame, _: Order) {
        assert_eq!(frame.index(), 1024);
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

// SAFETY: as above.
unsafe impl RevocableSource for Outside {}

#[test]
fn a_run_outside_the_span_is_released_and_reported() {
    let (heap, out) = (Heap::new(4 << 20), Arc::new(AtomicUsize::new(0)));
    let mut pool =
        PagePool::new(Outside(heap, Arc::clone(&out)), "outside", Config::default()).unwrap();
    let error = pool.alloc().unwrap_err();
    assert!(matches!(error, AllocError::Misplaced { frame, .. } if frame.index() == 1024));
    assert_eq!((pool.stats().pages, out.load(Ordering::Relaxed)), (0, 0));
}

// A `SyncOps`, or the `hide` of a source, that panics.

/// Panics at the `at`th call, and with `always` at all later ones.
struct Fragile {
    calls: AtomicUsize,
    at: AtomicUsize,
    always: bool,
    /// Calls made by a thread that unwinds, where a second panic would end the process.
    while_unwinding: AtomicUsize,
}

struct Ops(Arc<Fragile>);

impl Ops {
    fn call(&self) {
        if std::thread::panicking() {
            self.0.while_unwinding.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (call, at) =
            (self.0.calls.fetch_add(1, Ordering::Relaxed), self.0.at.load(Ordering::Relaxed));
        if call == at || self.0.always && call > at {
            resume_unwind(Box::new("a sync"));
        }
    }
}

impl SyncOps for Ops {
    fn for_device(&self, _: DmaMemory<'_>, _: Iova) {
        self.call();
    }
    fn for_cpu(&self, _: DmaMemory<'_>, _: Iova) {
        self.call();
    }
}

/// Runs one step, which may panic.
fn step<R>(run: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(run)).ok()
}

/// Every use of a pool that syncs. Raw pages whose free panicked are left in `raw`.
fn use_all(pool: &mut PagePool, raw: &mut Vec<RawPage>) {
    let remote = pool.remote();
    for other_thread in [false, true] {
        let page = step(|| pool.alloc().unwrap());
        step(|| {
            let mut page = page?;
            page.sync_for_cpu(60);
            if other_thread {
                drop(page)
            } else {
                pool.recycle(page)
            }
            Some(())
        });
        step(|| {
            let mut part = pool.alloc_fragment(128).unwrap();
            part.sync_for_cpu(64);
            if other_thread { drop(part) } else { pool.recycle_fragment(part) }
        });
        raw.extend(step(|| pool.alloc_raw().unwrap()));
        raw.retain(|&raw| {
            let freed =
                step(|| if other_thread { remote.free_raw(raw) } else { pool.free_raw(raw) });
            freed.inspect(|freed| assert_eq!(*freed, Ok(()))).is_none()
        });
    }
    let mut slots = [const { None }; 3];
    step(|| pool.fill(&mut slots));
    step(|| remote.recycle_all(slots.into_iter().flatten()));
}

#[test]
fn a_sync_that_panics_loses_no_page() {
    // As many calls as there are in a round, the last of which does not panic.
    let mut calls = usize::MAX;
    let rounds = (0..).flat_map(|at| [true, false].map(|always| (always, at)));
    for (always, at) in rounds {
        if calls <= at {
            break;
        }
        let fragile = Fragile { calls: 0.into(), at: at.into(), always, while_unwinding: 0.into() };
        let (heap, fragile) = (Heap::new(1 << 20), Arc::new(fragile));
        let ops = Box::new(Ops(fragile.clone()));
        let mut pool = PagePool::with_sync(heap.clone(), "", Config::default(), ops).unwrap();
        let mut raw = Vec::new();
        use_all(&mut pool, &mut raw);
        calls = fragile.calls.load(Ordering::Relaxed);
        assert_eq!(fragile.while_unwinding.load(Ordering::Relaxed), 0, "call {at}");
        // Every page is allocated once more. (What was freed is in the ring, or in the magazine.)
        fragile.at.store(usize::MAX, Ordering::Relaxed);
        raw.into_iter().for_each(|raw| pool.free_raw(raw).unwrap());
        let held: Vec<_> = core::iter::from_fn(|| pool.alloc().ok()).collect();
        let distinct: HashSet<_> = held.iter().map(Page::iova).collect();
        assert_eq!((held.len(), distinct.len()), (256, 256), "call {at}, always {always}");
        drop(held);
        let end = pool.destroy();
        assert_eq!(
            (end.pages_out(), heap.count(Use::Free)),
            (0, 256),
            "call {at}, always {always}"
        );
    }
}

/// A source whose second `hide` panics, and each `release` that has a bit set.
struct FragileSource(Heap, AtomicUsize, Arc<AtomicUsize>);

impl FragileSource {
    fn released(&self) {
        let bits = self.2.load(Ordering::Relaxed);
        self.2.store(bits >> 1, Ordering::Relaxed);
        if bits & 1 != 0 {
            resume_unwind(Box::new("a source"));
        }
    }
}

// SAFETY: all calls are forwarded; some panic afterwards.
unsafe impl ChunkSource for FragileSource {
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
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.release(frame, order) };
        self.released();
    }
}

// SAFETY: all calls are forwarded, unless they panic.
unsafe impl RevocableSource for FragileSource {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        if self.1.fetch_add(1, Ordering::Relaxed) == 1 {
            resume_unwind(Box::new("a source"));
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.hide(frame, order) }
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.release_hidden(frame, order) };
        self.released();
    }
}

/// A pool with four chunks of 64 pages, all of them allocated.
fn four_chunks(heap: &Heap, releases: &Arc<AtomicUsize>) -> (PagePool, Vec<Page>) {
    heap.0.largest.store(64, Ordering::Relaxed);
    let source = FragileSource(heap.clone(), 0.into(), Arc::clone(releases));
    let mut pool = PagePool::new(source, "", Config::default()).unwrap();
    let held = (0..256).map(|_| pool.alloc().unwrap()).collect();
    (pool, held)
}

#[test]
fn a_chunk_whose_hide_panics_is_quarantined_and_the_others_are_hidden() {
    let heap = Heap::new(1 << 20);
    let (pool, held) = four_chunks(&heap, &Arc::default());
    assert!(step(|| pool.destroy()).is_none());
    assert_eq!((heap.count(Use::Mapped), heap.count(Use::Hidden)), (64, 192));
    drop(held);
    // The second may be reachable.
    assert_eq!((heap.count(Use::Free), heap.count(Use::Mapped)), (192, 64));
    assert_eq!(heap.handles(), 1, "the shared state is freed");
}

#[test]
fn a_release_that_panics_when_a_pool_ends_loses_no_other_chunk() {
    for releases in [1, 0b1000, 0b1010, 0b1111] {
        for end in [drop::<PagePool>, |pool: PagePool| drop(pool.close())] {
            let (heap, bits) = (Heap::new(1 << 20), Arc::new(AtomicUsize::new(releases)));
            let (pool, held) = four_chunks(&heap, &bits);
            drop(held);
            assert!(step(|| end(pool)).is_none());
            assert_eq!((heap.count(Use::Free), heap.handles()), (256, 1), "{releases:#b}");
        }
    }
    // And while the thread unwinds: that does not end the process.
    let (heap, bits) = (Heap::new(1 << 20), Arc::new(AtomicUsize::new(0b1010)));
    let owned = four_chunks(&heap, &bits);
    let ends = step(move || {
        let (_pool, _held) = owned;
        resume_unwind(Box::new("the thread's own"))
    });
    assert!(ends.is_none() && heap.count(Use::Free) == 256 && heap.handles() == 1);
}

/// The last pages of several chunks are in one batch.
#[test]
fn a_release_that_panics_after_the_end_loses_no_other_page() {
    for releases in [1, 0b0110, 0b1111] {
        let (heap, bits) = (Heap::new(1 << 20), Arc::new(AtomicUsize::new(releases)));
        let (pool, held) = four_chunks(&heap, &bits);
        let remote = pool.remote();
        let end = pool.close();
        let (last, rest): (Vec<_>, Vec<_>) =
            held.into_iter().enumerate().partition(|(at, _)| at % 64 == 0);
        drop(rest);
        assert_eq!(end.pages_out(), 4);
        assert!(step(|| remote.recycle_all(last.into_iter().map(|(_, page)| page))).is_none());
        assert_eq!((heap.count(Use::Free), end.pages_out()), (256, 0), "{releases:#b}");
        drop((end, remote));
        assert_eq!(heap.handles(), 1, "the shared state is freed");
    }
}
