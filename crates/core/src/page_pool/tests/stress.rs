//! Threads that free concurrently, and the number of read-modify-writes on the hot paths.

use super::*;

/// A consumer passes pages, raw pages and fragments to seven threads, which free them in every way;
/// then the pool is destroyed while they still hold some.
#[test]
fn stress_seven_threads_free_pages() {
    for ring in [1, 64, 1024] {
        let heap = Heap::new(8 << 20);
        pages_freed_by_seven_threads(&heap, ring, if cfg!(miri) { 3 } else { 700 });
        assert_eq!(heap.count(Use::Free), 2048, "all frames are released");
        assert_eq!(heap.handles(), 1, "the shared state is freed");
    }
}

enum Held {
    Page(Page),
    Raw(RawPage),
    Fragment(Fragment),
}

fn pages_freed_by_seven_threads(heap: &Heap, ring: u32, rounds: u64) {
    let mut pool = heap.pool(Config { ring, ..Config::default() });
    let remote = pool.remote();
    let inboxes: [Mutex<Vec<Held>>; 7] = Default::default();
    let over = AtomicBool::new(false);
    let mut end = None;
    crate::testing::scope(|scope| {
        for me in 0..7 {
            let (remote, inboxes, over) = (remote.clone(), &inboxes, &over);
            scope.spawn(move || {
                loop {
                    // Read before the inbox: everything put there before the end is seen.
                    let last = over.load(Ordering::Acquire);
                    let mine = std::mem::take(&mut *inboxes[me].lock());
                    let idle = mine.is_empty();
                    receive(&remote, mine, me);
                    if idle && last {
                        return;
                    }
                    if idle {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut random = crate::testing::Random::new(1);
        for round in 0..rounds {
            for _ in 0..40 {
                let to = random.below(7);
                if let Some(held) = alloc_any(&mut pool, random.below(1 << 24)) {
                    inboxes[to].lock().push(held);
                }
            }
            if round % 5 == 0 {
                let page = pool.alloc();
                page.into_iter().for_each(|page| pool.recycle(page));
                let _ = (pool.stats(), pool.counts(), pool.holders());
            }
            std::thread::yield_now();
        }
        let last = pool.destroy();
        assert_eq!(
            (heap.count(Use::Mapped), last.reachable()),
            (0, None),
            "the device reaches nothing"
        );
        over.store(true, Ordering::Release);
        end = Some(last);
    });
    let end = end.unwrap();
    assert_eq!((end.pages_out(), end.holders()), (0, Vec::new()));
    assert_eq!(end.counts().waive, 0, "there was no second free");
}

/// Allocates a page, a raw page or a fragment, and writes its address into it. `None`: the other
/// threads hold all pages.
fn alloc_any(pool: &mut PagePool, random: usize) -> Option<Held> {
    let held = match random % 4 {
        0 => Held::Raw(pool.alloc_raw().ok()?),
        1 => Held::Fragment(pool.alloc_fragment(100 + random % 900).ok()?),
        _ => Held::Page(pool.alloc().ok()?),
    };
    match &held {
        Held::Page(page) => page.memory().write_u64(64, page.iova().raw()).unwrap(),
        Held::Raw(page) => pool.memory(*page).unwrap().write_u64(64, page.iova().raw()).unwrap(),
        Held::Fragment(part) => part.memory().write_u64(0, part.iova().raw()).unwrap(),
    }
    Some(held)
}

/// Checks that no other owner has written to the pages, and frees them.
fn receive(remote: &Remote, mine: Vec<Held>, me: usize) {
    let (mut pages, mut raws) = (Vec::new(), Vec::new());
    for (number, held) in mine.into_iter().enumerate() {
        match held {
            Held::Page(page) => {
                assert_eq!(page.memory().read_u64(64), Ok(page.iova().raw()));
                if (number + me).is_multiple_of(2) { pages.push(page) } else { drop(page) }
            }
            Held::Raw(page) => raws.push(page),
            Held::Fragment(part) => {
                assert_eq!(part.memory().read_u64(0), Ok(part.iova().raw()));
                drop(part);
            }
        }
    }
    remote.recycle_all(pages);
    raws.into_iter().for_each(|page| remote.free_raw(page).unwrap());
}

/// Two threads free the same raw pages at the same time: of each page one free is valid, and the
/// other is an error or is detected late.
#[test]
fn stress_page_pool_of_two_raw_frees_one_is_valid() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let rounds: usize = if cfg!(miri) { 5 } else { 1500 };
    let (started, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let shared: Mutex<Vec<RawPage>> = Mutex::default();
    let freed = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        for _ in 0..2 {
            let (remote, started, done, shared, freed) =
                (pool.remote(), &started, &done, &shared, &freed);
            scope.spawn(move || {
                for round in 1..=rounds {
                    while started.load(Ordering::Acquire) < round {
                        std::thread::yield_now();
                    }
                    let pages = shared.lock().clone();
                    let ok =
                        pages.into_iter().filter(|&page| remote.free_raw(page).is_ok()).count();
                    freed.fetch_add(ok, Ordering::Relaxed);
                    done.fetch_add(1, Ordering::Release);
                }
            });
        }
        for round in 1..=rounds {
            let pages: Vec<_> = (0..20).map(|_| pool.alloc_raw().unwrap()).collect();
            assert_eq!(pages.iter().collect::<HashSet<_>>().len(), 20);
            *shared.lock() = pages;
            started.store(round, Ordering::Release);
            while done.load(Ordering::Acquire) < 2 * round {
                std::thread::yield_now();
            }
        }
    });
    let end = pool.destroy();
    let waived = end.counts().waive;
    assert_eq!((rounds * 20) as u64 + waived, freed.load(Ordering::Relaxed) as u64);
    assert_eq!((end.pages_out(), heap.count(Use::Free)), (0, 512));
}

/// Read-modify-writes per operation: none on the consumer's path, one for 64 pages that are
/// returned together.
#[cfg(feature = "count-rmw")]
#[test]
fn counted_hot_paths_share_nothing() {
    use crate::sync::{rmw_count, rmw_reset};
    const N: u64 = 100_000;
    let heap = Heap::new(8 << 20);
    let mut pool = heap.pool(Config::default());
    let remote = pool.remote();
    let page = pool.alloc().unwrap();
    pool.recycle(page);
    let each = |work: &mut dyn FnMut()| {
        rmw_reset();
        work();
        rmw_count() as f64
    };
    let local = each(&mut || {
        for _ in 0..N {
            let page = pool.alloc().unwrap();
            pool.recycle(page);
            let raw = pool.alloc_raw().unwrap();
            pool.free_raw(raw).unwrap();
        }
    });
    assert!(local == 0.0, "{local}");
    // More pages than the magazine holds: it goes to the ring by halves.
    let mut held = Vec::with_capacity(512);
    let waves = each(&mut || {
        for _ in 0..N / 512 {
            held.extend((0..512).map(|_| pool.alloc().unwrap()));
            held.drain(..).for_each(|page| pool.recycle(page));
        }
    });
    assert!(waves / N as f64 <= 0.02, "{waves}");
    let by_remote = each(&mut || {
        for _ in 0..N / 512 {
            held.extend((0..512).map(|_| pool.alloc().unwrap()));
            remote.recycle_all(held.drain(..));
        }
    });
    assert!(by_remote / N as f64 <= 0.02, "{by_remote}");
    let dropped = each(&mut || {
        for _ in 0..N / 512 {
            held.extend((0..512).map(|_| pool.alloc().unwrap()));
            held.clear();
        }
    });
    assert!(dropped / N as f64 <= 1.0, "one per dropped page: {dropped}");
}
