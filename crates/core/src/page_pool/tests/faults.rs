//! Failures of the source at every step, and sources that violate their contract.

use super::*;

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
        let mut attempt = |pool: &mut PagePool<Heap>| -> Result<(), AllocError> {
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
