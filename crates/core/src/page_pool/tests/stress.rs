//! Many threads, and what they share.

use super::*;

/// One consumer hands pages, raw pages and fragments to seven others, who give them back in every way there is; then the pool
/// goes while they still hold some.
#[test]
fn stress_seven_threads_free_pages() {
    for ring in [1, 64, 1024] {
        let heap = Heap::new(8 << 20);
        pages_freed_by_seven_threads(&heap, ring, if cfg!(miri) { 3 } else { 700 });
        assert_eq!(heap.count(Use::Free), 2048, "all is back");
        assert_eq!(heap.handles(), 1, "what was shared is gone");
    }
}

enum Thing {
    Page(Page<Heap>),
    Raw(RawPage),
    Fragment(Fragment<Heap>),
}

fn pages_freed_by_seven_threads(heap: &Heap, ring: u32, rounds: u64) {
    let mut pool = heap.pool(Config { ring, ..Config::default() });
    let remote = pool.remote();
    let hands: [Mutex<Vec<Thing>>; 7] = Default::default();
    let over = AtomicBool::new(false);
    let mut end = None;
    crate::testing::scope(|scope| {
        for me in 0..7 {
            let (remote, hands, over) = (remote.clone(), &hands, &over);
            scope.spawn(move || {
                loop {
                    // Read before the flag: what was put there before the end is seen.
                    let last = over.load(Ordering::Acquire);
                    let mine = std::mem::take(&mut *hands[me].lock());
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
                if let Some(thing) = hand_out(&mut pool, random.below(1 << 24)) {
                    hands[to].lock().push(thing);
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
        assert_eq!((heap.count(Use::Mapping), last.reachable()), (0, None), "the device reaches nothing");
        over.store(true, Ordering::Release);
        end = Some(last);
    });
    let end = end.unwrap();
    assert_eq!((end.pages_out(), end.holders()), (0, Vec::new()));
    assert_eq!(end.counts().waive, 0, "no second free was made");
}

fn hand_out(pool: &mut PagePool<Heap>, dice: usize) -> Option<Thing> {
    // Where there is no more, the others have it.
    let thing = match dice % 4 {
        0 => Thing::Raw(pool.alloc_raw().ok()?),
        1 => Thing::Fragment(pool.alloc_fragment(100 + dice % 900).ok()?),
        _ => Thing::Page(pool.alloc().ok()?),
    };
    match &thing {
        Thing::Page(page) => page.memory().write_u64(64, page.iova().raw()).unwrap(),
        Thing::Raw(page) => pool.memory(*page).unwrap().write_u64(64, page.iova().raw()).unwrap(),
        Thing::Fragment(part) => part.memory().write_u64(0, part.iova().raw()).unwrap(),
    }
    Some(thing)
}

/// Checks that what we hold had no other owner, and frees it.
fn receive(remote: &Remote<Heap>, mine: Vec<Thing>, me: usize) {
    let (mut pages, mut raws) = (Vec::new(), Vec::new());
    for (number, thing) in mine.into_iter().enumerate() {
        match thing {
            Thing::Page(page) => {
                assert_eq!(page.memory().read_u64(64), Ok(page.iova().raw()));
                if (number + me).is_multiple_of(2) { pages.push(page) } else { drop(page) }
            }
            Thing::Raw(page) => raws.push(page),
            Thing::Fragment(part) => {
                assert_eq!(part.memory().read_u64(0), Ok(part.iova().raw()));
                drop(part);
            }
        }
    }
    remote.recycle_all(pages);
    if me.is_multiple_of(2) {
        remote.free_bulk(&raws).unwrap();
    } else {
        raws.into_iter().for_each(|page| remote.free_raw(page).unwrap());
    }
}

/// Two free the same raw pages in the same instant: of each page one free counts, and the other is an error or found late.
#[test]
fn stress_page_pool_of_two_raw_frees_one_counts() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let rounds: usize = if cfg!(miri) { 5 } else { 1500 };
    let (turn, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let shared: Mutex<Vec<RawPage>> = Mutex::default();
    let freed = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        for _ in 0..2 {
            let (remote, turn, done, shared, freed) = (pool.remote(), &turn, &done, &shared, &freed);
            scope.spawn(move || {
                for round in 1..=rounds {
                    while turn.load(Ordering::Acquire) < round {
                        std::thread::yield_now();
                    }
                    let pages = shared.lock().clone();
                    let ok = pages.into_iter().filter(|&page| remote.free_raw(page).is_ok()).count();
                    freed.fetch_add(ok, Ordering::Relaxed);
                    done.fetch_add(1, Ordering::Release);
                }
            });
        }
        for round in 1..=rounds {
            let pages: Vec<_> = (0..20).map(|_| pool.alloc_raw().unwrap()).collect();
            assert_eq!(pages.iter().collect::<HashSet<_>>().len(), 20);
            *shared.lock() = pages;
            turn.store(round, Ordering::Release);
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

/// Read-modify-writes an operation: none on the consumer's path, one for 64 pages where they come back together.
#[cfg(feature = "count-rmw")]
#[test]
fn hot_paths_share_nothing() {
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
    // Many out and back again: the magazine goes to the ring by halves.
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
    assert!(dropped / N as f64 <= 1.0, "one a page that is dropped: {dropped}");
}
