//! Each operation by itself: allocation order, counters, checks of frees, fragments, sync, and
//! taking down.

use super::*;

fn fields(counts: Counts) -> [u64; 11] {
    let Counts { fast, slow, slow_high_order, empty, refill, waive, .. } = counts;
    let Counts { cached, cache_full, ring, ring_full, released_refcnt, .. } = counts;
    [
        fast,
        slow,
        slow_high_order,
        empty,
        refill,
        waive,
        cached,
        cache_full,
        ring,
        ring_full,
        released_refcnt,
    ]
}

#[test]
fn fresh_pages_ascend_and_the_last_recycled_is_allocated_first() {
    let heap = Heap::new(4 << 20);
    let mut pool = heap.pool(Config::default());
    let pages: Vec<_> = (0..200).map(|_| pool.alloc().unwrap()).collect();
    for (i, page) in pages.iter().enumerate() {
        assert_eq!(page.iova(), Iova::new(IOVA + i as u64 * 4096), "page {i}");
        assert_eq!(page.memory().len(), 4096);
    }
    let stats = pool.stats();
    // 64, then as many as there are already, twice.
    assert_eq!((stats.in_use, stats.pages, stats.chunks, stats.bytes), (200, 256, 3, 256 * 4096));
    let last = pages.last().unwrap().iova();
    pages.into_iter().for_each(|page| pool.recycle(page));
    assert_eq!(pool.alloc().unwrap().iova(), last);
    drop(pool);
    assert_eq!((heap.count(Use::Free), heap.handles()), (1024, 1));
}

#[test]
fn the_eleven_counters_count_as_documented() {
    let heap = Heap::new(4 << 20);
    let mut pool = heap.pool(Config { ring: 128, ..Config::default() });
    // Two refills from the chunk; the first page of each is slow and met an empty ring.
    let mut pages: Vec<_> = (0..128).map(|_| pool.alloc().unwrap()).collect();
    assert_eq!(fields(pool.counts()), [126, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    pages.extend((0..128).map(|_| pool.alloc().unwrap()));
    // 128 fill the magazine; the next one sends half of it to the ring.
    for page in pages.drain(..129) {
        pool.recycle(page);
    }
    assert_eq!(fields(pool.counts()), [252, 4, 0, 4, 0, 0, 129, 1, 64, 0, 0]);
    // The other 127 go to the ring, which has room for 64.
    pages.clear();
    assert_eq!(fields(pool.counts()), [252, 4, 0, 4, 0, 0, 129, 1, 128, 63, 0]);
    // 65 from the magazine, 2 x 64 from the ring, then 63 from the spill list.
    pages.extend((0..256).map(|_| pool.alloc().unwrap()));
    assert_eq!(fields(pool.counts()), [252 + 65 + 126 + 62, 5, 0, 5, 2, 0, 129, 1, 128, 63, 0]);
    assert_eq!(pool.stats().pages, 256, "no new page was acquired");
    assert!(pool.counts().to_string().contains("rx_pp_recycle_ring_full: 63\n"));
    let end = pool.destroy();
    drop(pages);
    assert_eq!(end.counts().released_refcnt, 256);
}

#[test]
fn larger_pages_have_their_own_counter_up_to_2_mib() {
    for order in [1, 3, 9] {
        let order = Order::new(order).unwrap();
        let heap = Heap::new(16 << 20);
        let mut pool = heap.pool(Config { order, ..Config::default() });
        let bytes = 4096 * order.frames() as usize;
        let mut pages: Vec<_> = (0..4).map(|_| pool.alloc().unwrap()).collect();
        assert_eq!((pool.page_bytes(), pages[3].memory().len()), (bytes, bytes));
        assert_eq!(pages[3].iova().raw() - IOVA, 3 * bytes as u64);
        let counts = pool.counts();
        assert_eq!(counts.slow, 0);
        assert_eq!(counts.slow_high_order, if order == Order::HUGE { 4 } else { 1 });
        pool.recycle(pages.remove(0));
        drop(pages);
        drop(pool);
        assert_eq!(heap.count(Use::Free), 4096);
    }
}

#[test]
fn invalid_parameters_are_refused_and_named() {
    let heap = Heap::new(2 << 20);
    let error = |config| PagePool::new(heap.clone(), "", config).unwrap_err();
    let good = Config::default();
    assert_eq!(
        error(Config { order: Order::GIANT, ..good }),
        CreateError::Order { order: Order::GIANT }
    );
    for ring in [0, 3, 1 << 21] {
        assert_eq!(error(Config { ring, ..good }), CreateError::Ring { ring, limit: 1 << 20 });
    }
    assert_eq!(error(Config { max_in_use: 0, ..good }), CreateError::NoPage);
    for (offset, max_len) in [(4096, 0), (1, 4096), (5000, 1), (0, usize::MAX)] {
        assert!(matches!(error(Config { offset, max_len, ..good }), CreateError::Range { .. }));
    }
}

#[test]
fn pages_in_use_are_limited_exactly_wherever_they_were_returned() {
    for limit in [1, 2, 63, 64, 65, 100, 300] {
        let heap = Heap::new(4 << 20);
        let mut pool = heap.pool(Config { ring: 16, max_in_use: limit, ..Config::default() });
        let mut pages: Vec<_> = (0..limit).map(|_| pool.alloc().unwrap()).collect();
        for refused in 1..4 {
            assert_eq!(pool.alloc().unwrap_err(), AllocError::Limit { limit });
            assert_eq!((pool.stats().in_use, pool.stats().limited), (limit, refused));
        }
        assert!(pool.stats().pages < limit.max(32) * 2, "no more is acquired than is needed");
        assert_eq!(pool.fill(&mut [None, None]), 0);
        assert_eq!((pool.stats().limited, pool.alloc_raw().is_err()), (4, true));
        // Through the magazine, the ring, and past the full ring.
        for round in 0..3 {
            for at in 0..pages.len() {
                let page = pages.swap_remove(0);
                if (at + round) % 3 == 0 { pool.recycle(page) } else { drop(page) }
            }
            pages.extend((0..limit).map(|_| pool.alloc().unwrap()));
            assert!(pool.alloc().is_err());
        }
        assert_eq!(pool.stats().in_use, limit);
        drop(pages);
        // A page with fragments counts as one; when it is idle it is the last one that can be had.
        let mut parts: Vec<_> = (0..limit).map(|_| pool.alloc_fragment(4000).unwrap()).collect();
        assert_eq!(pool.alloc_fragment(4000).unwrap_err(), AllocError::Limit { limit });
        drop(parts.pop());
        let limited = pool.stats().limited;
        assert!(pool.alloc().is_ok());
        assert_eq!(pool.stats().limited, limited, "nothing was refused");
    }
}

#[test]
fn a_wrong_raw_free_is_reported_and_changes_nothing() {
    let heap = Heap::new(4 << 20);
    let order = Order::new(1).unwrap();
    let mut pool = heap.pool(Config { order, ..Config::default() });
    let remote = pool.remote();
    let (owned, raw) = (pool.alloc().unwrap(), pool.alloc_raw().unwrap());
    let at = raw.as_ptr().addr().get();
    let moved = |by: isize| {
        let ptr = NonNull::new(raw.as_ptr().as_ptr().wrapping_offset(by)).unwrap();
        RawPage::from_parts(ptr, Iova::new(raw.iova().raw().wrapping_add_signed(by as i64)))
    };
    let of_owned = RawPage::from_parts(owned.memory().as_ptr(), owned.iova());
    let mismatched = RawPage::from_parts(raw.as_ptr(), Iova::new(5));
    let cases = [
        (moved(-(1 << 30)), "is in no memory of this pool"),
        (moved(3 << 20), "is in no memory of this pool"),
        (moved(64 << 20), "is in no memory of this pool"),
        (moved(1), "is divided into 1 of 8192 bytes"),
        (moved(4096), "is divided into 1 of 8192 bytes"),
        (moved(8192), "it was freed before"),
        (of_owned, "is owned by a value"),
        (mismatched, "for the device, not iova:0x5"),
    ];
    let before = (pool.stats(), pool.counts());
    for (page, message) in cases {
        let error = pool.free_raw(page).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(remote.free_raw(page), Err(error));
        assert_eq!(pool.memory(page).unwrap_err(), error);
    }
    assert_eq!((pool.stats(), pool.counts()), before);
    assert!(pool.memory(raw).is_ok());
    // Freed through one handle, it can be freed again through neither.
    let twice = Err(FreeError::DoubleFree { addr: at });
    pool.free_raw(raw).unwrap();
    assert_eq!((pool.free_raw(raw), remote.free_raw(raw)), (twice, twice));
    let raw = pool.alloc_raw().unwrap();
    assert_eq!(raw.as_ptr().addr().get(), at);
    remote.free_raw(raw).unwrap();
    assert_eq!((pool.free_raw(raw), remote.free_raw(raw)), (twice, twice));
    drop(owned);
    assert_eq!(pool.counts().waive, 0);
}

/// Two frees at the same instant leave an entry of an older generation in the ring.
#[test]
fn a_late_double_free_is_counted_and_frees_nothing() {
    for ring in [1, 64] {
        let heap = Heap::new(2 << 20);
        let mut pool = heap.pool(Config { ring, ..Config::default() });
        let raw = pool.alloc_raw().unwrap();
        let (frame, record) = pool.shared.find(raw).unwrap();
        let stale = ring::Entry::raw(frame, record.generation());
        // SAFETY: a raw free, and `pool` holds a reference.
        let put =
            |pool: &PagePool| unsafe { page::recycle_remotely(pool.shared.as_ptr(), &[stale; 3]) };
        pool.free_raw(raw).unwrap();
        put(&pool);
        let page = pool.alloc().unwrap();
        assert_eq!(page.iova(), raw.iova(), "it is a `Page` now");
        let mut seen = HashSet::from([page.iova()]);
        let mut held = Vec::new();
        while let Ok(next) = pool.alloc() {
            assert!(seen.insert(next.iova()), "allocated twice: {next:?}");
            held.push(next);
        }
        assert_eq!((held.len(), pool.counts().waive), (511, 3));
        put(&pool);
        drop((page, held));
        let end = pool.destroy();
        assert_eq!((end.counts().waive, end.pages_out(), heap.count(Use::Free)), (6, 0, 512));
    }
}

/// Sets the generation of a raw page's record, as so many allocations of it would.
fn at_generation(pool: &PagePool, page: RawPage, generation: u32) {
    pool.shared.find(page).unwrap().1.set_generation(generation);
}

#[test]
fn a_raw_free_is_not_refused_after_2_32_allocations_of_a_page() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config { max_in_use: 1, ..Config::default() });
    let remote = pool.remote();
    let raw = pool.alloc_raw().unwrap();
    pool.free_raw(raw).unwrap();
    for freed_at in [0, 1, u32::MAX - 1, u32::MAX] {
        at_generation(&pool, raw, freed_at.wrapping_sub(1));
        assert_eq!(pool.alloc_raw(), Ok(raw));
        remote.free_raw(raw).unwrap();
        // All others return it through the consumer, so that no free by another thread replaces
        // that one.
        for _ in 0..3 {
            let raw = pool.alloc_raw().unwrap();
            pool.free_raw(raw).unwrap();
        }
        at_generation(&pool, raw, freed_at.wrapping_sub(1));
        let again = pool.alloc_raw().unwrap();
        assert_eq!((again, pool.shared.find(raw).unwrap().1.generation()), (raw, freed_at));
        assert!(pool.memory(raw).is_ok(), "allocated");
        remote.free_raw(raw).unwrap();
        assert!(matches!(remote.free_raw(raw), Err(FreeError::DoubleFree { .. })));
        let raw = pool.alloc_raw().unwrap();
        pool.free_raw(raw).unwrap();
    }
    assert_eq!(pool.counts().waive, 0);
}

/// A second free is still in the ring when the page's generation comes round again.
#[test]
fn a_late_free_of_2_32_allocations_ago_frees_nothing() {
    for ring in [1, 64] {
        let heap = Heap::new(2 << 20);
        let mut pool = heap.pool(Config { ring, max_in_use: 2, ..Config::default() });
        let (raw, other) = (pool.alloc_raw().unwrap(), pool.alloc_raw().unwrap());
        let (frame, record) = pool.shared.find(raw).unwrap();
        let generation = record.generation();
        let stale = ring::Entry::raw(frame, generation);
        pool.free_raw(raw).unwrap();
        // SAFETY: raw frees, and `pool` holds a reference.
        unsafe { page::recycle_remotely(pool.shared.as_ptr(), &[stale; 3]) };
        // A right free is there, too.
        pool.remote().free_raw(other).unwrap();
        // As 2^32 allocations would, all of which the magazine serves.
        at_generation(&pool, raw, u32::MAX);
        assert_eq!(pool.alloc_raw(), Ok(raw));
        pool.free_raw(raw).unwrap();
        let pages = [pool.alloc_raw().unwrap(), pool.alloc_raw().unwrap()];
        assert!(pages.contains(&raw) && pages.contains(&other));
        pool.free_raw(raw).unwrap();
        at_generation(&pool, raw, generation.wrapping_sub(1));
        assert_eq!(pool.alloc_raw(), Ok(raw));
        assert_eq!(pool.shared.find(raw).unwrap().1.generation(), generation);
        assert!(matches!(pool.alloc_raw(), Err(AllocError::Limit { .. })), "both are in use");
        assert_eq!((pool.counts().waive, pool.stats().in_use), (3, 2));
        pages.iter().for_each(|&page| pool.free_raw(page).unwrap());
    }
}

/// The page is allocated raw again when the second free of its allocation before arrives.
#[test]
fn a_late_free_of_an_older_allocation_frees_nothing() {
    for ring in [1, 64] {
        let heap = Heap::new(2 << 20);
        let mut pool = heap.pool(Config { ring, max_in_use: 1, ..Config::default() });
        let raw = pool.alloc_raw().unwrap();
        let (frame, record) = pool.shared.find(raw).unwrap();
        let stale = ring::Entry::raw(frame, record.generation());
        pool.free_raw(raw).unwrap();
        assert_eq!(pool.alloc_raw(), Ok(raw));
        // SAFETY: a raw free, and `pool` holds a reference.
        unsafe { page::recycle_remotely(pool.shared.as_ptr(), &[stale; 2]) };
        assert!(matches!(pool.alloc_raw(), Err(AllocError::Limit { .. })), "it is in use");
        assert_eq!((pool.counts().waive, pool.stats().in_use), (2, 1));
        pool.free_raw(raw).unwrap();
    }
}

/// Second frees are in the ring, or the list behind it: what is in use is exact nevertheless.
#[test]
fn second_frees_do_not_count_as_pages() {
    for ring in [1, 2, 64] {
        let heap = Heap::new(2 << 20);
        let mut pool = heap.pool(Config { ring, ..Config::default() });
        let remote = pool.remote();
        let raws: Vec<_> = (0..5).map(|_| pool.alloc_raw().unwrap()).collect();
        let (page, open) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        let entry = |pool: &PagePool, raw: RawPage| {
            let (frame, record) = pool.shared.find(raw).unwrap();
            ring::Entry::raw(frame, record.generation())
        };
        let put = |pool: &PagePool, entry| {
            // SAFETY: raw frees, and `pool` holds a reference.
            unsafe { page::recycle_remotely(pool.shared.as_ptr(), &[entry; 3]) };
        };
        // An entry of a page that the consumer freed, and which is in the magazine.
        let stale = entry(&pool, raws[0]);
        pool.free_raw(raws[0]).unwrap();
        put(&pool, stale);
        assert_eq!(pool.stats().in_use, 6, "ring of {ring}");
        // An entry of the previous allocation, while the page is held.
        assert_eq!(pool.alloc_raw(), Ok(raws[0]));
        assert_eq!(pool.stats().in_use, 7);
        // A copy of the entry of a page that another thread has freed: it is in the ring once.
        let equal = entry(&pool, raws[1]);
        remote.free_raw(raws[1]).unwrap();
        put(&pool, equal);
        drop(page);
        assert_eq!(pool.stats().in_use, 5);
        // The consumer takes all of it.
        let held: Vec<_> = core::iter::from_fn(|| pool.alloc().ok()).collect();
        assert_eq!((pool.stats().in_use, held.len()), (512, 507));
        drop((open, held));
        assert_eq!(pool.stats().in_use, 4, "raw pages");
    }
}

/// Frees of one raw page at the same instant are alike: of those that meet a full ring one stays,
/// so that the list, which has room for each page once, never grows.
#[test]
fn equal_frees_do_not_make_the_spill_list_grow() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config { ring: 1, ..Config::default() });
    let raws: Vec<_> = (0..3).map(|_| pool.alloc_raw().unwrap()).collect();
    let entry = |raw: &RawPage| {
        let (frame, record) = pool.shared.find(*raw).unwrap();
        ring::Entry::raw(frame, record.generation())
    };
    let entries: Vec<_> = raws.iter().map(entry).collect();
    let room = pool.shared.spill.lock().entries.capacity();
    let mut sent = 0;
    while sent < 4 * room {
        // SAFETY: raw frees, and `pool` holds a reference.
        unsafe { page::recycle_remotely(pool.shared.as_ptr(), &entries) };
        sent += entries.len();
    }
    assert_eq!(pool.shared.spill.lock().entries.capacity(), room);
    let held: Vec<_> = core::iter::from_fn(|| pool.alloc().ok()).collect();
    assert_eq!((held.len(), pool.counts().waive), (512, sent as u64 - 3), "each page once");
}

#[test]
fn a_tag_of_another_pool_names_no_holder() {
    let (heap, other) = (Heap::new(2 << 20), Heap::new(2 << 20));
    let (mut pool, other) = (heap.pool(Config::default()), other.pool(Config::default()));
    let (tag, foreign) = (pool.tag("here").unwrap(), other.tag("elsewhere").unwrap());
    assert_ne!(tag, foreign);
    let (page, raw) = (pool.alloc_for(foreign).unwrap(), pool.alloc_raw_for(foreign).unwrap());
    page.tag(foreign);
    assert_eq!(pool.holders().iter().map(|holder| holder.name.clone()).collect::<Vec<_>>(), [None]);
    page.tag(tag);
    assert!(pool.holders().iter().any(|holder| holder.name.as_deref() == Some("here")));
    pool.free_raw(raw).unwrap();
}

#[test]
fn fill_fills_empty_slots_only_and_is_partial_when_pages_run_out() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let mut slots: Vec<Option<Page>> = (0..600).map(|_| None).collect();
    slots[3] = Some(pool.alloc().unwrap());
    let third = slots[3].as_ref().unwrap().iova();
    assert_eq!(pool.fill(&mut slots), 512);
    assert_eq!(slots[3].as_ref().unwrap().iova(), third);
    assert!(slots[512..].iter().all(Option::is_none));
    assert!(matches!(pool.alloc(), Err(AllocError::Source(_))));
    let mut raw = [None; 2];
    assert_eq!(pool.fill_raw(&mut raw), 0);
    slots.truncate(1);
    assert_eq!(pool.fill_raw(&mut raw), 2);
}

#[test]
fn the_open_page_is_allocated_when_it_is_the_last_free_one() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let mut pages: Vec<_> = (0..511).map(|_| pool.alloc().unwrap()).collect();
    for round in 0..3 {
        let (first, second) = (pool.alloc_fragment(64).unwrap(), pool.alloc_fragment(64).unwrap());
        let at = first.iova();
        pool.recycle_fragment(first);
        assert!(pool.alloc().is_err(), "a fragment of the open page is in use");
        drop(second);
        assert_eq!(pool.stats().in_use, 512);
        // As a page, raw, and for a fragment that does not fit into the rest.
        match round {
            0 => {
                let page = pool.alloc().unwrap();
                assert_eq!(page.iova(), at);
                assert!(pool.alloc().is_err() && pool.alloc_fragment(64).is_err());
                pool.recycle(page);
            }
            1 => {
                let page = pool.alloc_raw().unwrap();
                assert_eq!(page.iova(), at);
                pool.free_raw(page).unwrap();
            }
            _ => {
                let large = pool.alloc_fragment(4096).unwrap();
                assert_eq!(large.iova(), at);
                assert!(pool.alloc_fragment(64).is_err());
                assert_eq!(pool.stats().in_use, 512);
            }
        }
    }
    pages.clear();
    assert_eq!(pool.stats().in_use, 1, "the open page");
    drop(pool);
    assert_eq!(heap.count(Use::Free), 512);
}

#[test]
fn fragments_share_a_page_and_the_last_one_frees_it() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config { offset: 100, max_len: 3000, ..Config::default() });
    for len in [0, 3100 - 128 + 1] {
        let limit = 3100 - 128;
        assert_eq!(pool.alloc_fragment(len).unwrap_err(), AllocError::Length { len, limit });
    }
    let cut: Vec<_> = (0..4).map(|_| pool.alloc_fragment(1000).unwrap()).collect();
    let at: Vec<_> = cut.iter().map(|fragment| fragment.iova().raw() - IOVA).collect();
    // The third would end at 3176, beyond what the device may write.
    assert_eq!(at, [128, 1152, 4096 + 128, 4096 + 1152]);
    assert_eq!(cut[1].memory().len(), 1000);
    assert_eq!(pool.stats().in_use, 2);
    let mut cut = cut.into_iter();
    let mut next = || cut.next().unwrap();
    drop(next());
    assert_eq!(pool.counts().ring, 0, "one share of the first page is in use");
    drop(next());
    assert_eq!(pool.counts().ring, 1);
    pool.recycle_fragment(next());
    pool.recycle_fragment(next());
    assert_eq!(pool.counts().cached, 0, "more may be cut from the second page");
    let large = pool.alloc_fragment(2972).unwrap();
    assert_eq!(pool.counts().cached, 1, "it is closed");
    let end = pool.destroy();
    assert_eq!((end.pages_out(), heap.count(Use::Hidden)), (1, 64));
    drop(large);
    assert_eq!((end.pages_out(), heap.count(Use::Free)), (0, 512));
}

#[test]
fn what_the_consumer_has_counted_stays_when_the_pool_ends() {
    for destroy in [true, false] {
        let heap = Heap::new(2 << 20);
        let mut pool = heap.pool(Config::default());
        for _ in 0..3 {
            let page = pool.alloc().unwrap();
            pool.recycle(page);
        }
        let counts = pool.counts();
        assert!(counts.fast > 0 && counts.cached > 0, "{counts:?}");
        let ended = if destroy { pool.destroy() } else { pool.close() }.counts();
        assert_eq!((ended.fast, ended.cached), (counts.fast, counts.cached));
    }
}

#[test]
fn a_fragment_that_fits_exactly_is_of_the_open_page() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config { max_len: 3072, ..Config::default() });
    let cut: Vec<_> = (0..4).map(|_| pool.alloc_fragment(1024).unwrap()).collect();
    let at: Vec<_> = cut.iter().map(|fragment| fragment.iova().raw() - IOVA).collect();
    assert_eq!(at, [0, 1024, 2048, 4096]);
}

#[test]
fn only_bytes_that_the_device_may_have_written_are_synced() {
    #[derive(Default)]
    struct Seen(Mutex<Vec<(bool, u64, usize)>>);
    struct Ops(Arc<Seen>);
    impl SyncOps for Ops {
        fn for_device(&self, memory: DmaMemory<'_>, iova: Iova) {
            self.0.0.lock().push((true, iova.raw() - IOVA, memory.len()));
        }
        fn for_cpu(&self, memory: DmaMemory<'_>, iova: Iova) {
            self.0.0.lock().push((false, iova.raw() - IOVA, memory.len()));
        }
    }
    let (heap, seen) = (Heap::new(2 << 20), Arc::new(Seen::default()));
    let config = Config { offset: 256, max_len: 2048, ..Config::default() };
    let mut pool = PagePool::with_sync(heap, "", config, Box::new(Ops(seen.clone()))).unwrap();
    let take = || core::mem::take(&mut *seen.0.lock());
    let mut page = pool.alloc().unwrap();
    let fresh = take();
    assert_eq!((fresh.len(), fresh.contains(&(true, 256, 2048))), (64, true));
    page.sync_for_cpu(60);
    pool.recycle(page);
    assert_eq!(take(), [(false, 256, 60), (true, 256, 60)]);
    let mut page = pool.alloc().unwrap();
    page.sync_for_cpu(9000);
    drop(page);
    assert_eq!(take(), [(false, 256, 2048), (true, 256, 2048)]);
    drop(pool.alloc().unwrap());
    let raw = pool.alloc_raw().unwrap();
    pool.free_raw(raw).unwrap();
    assert_eq!(take().iter().filter(|s| s.0 && s.2 == 2048).count(), 2);
    let (tag, mut slots) = (pool.tag("array").unwrap(), [None, None]);
    assert_eq!(pool.fill_for(&mut slots, tag), 2);
    // Those without a name are in the ring.
    assert!(pool.holders().iter().any(|h| (h.name.as_deref(), h.pages) == (Some("array"), 2)));
    slots.into_iter().flatten().for_each(|page| pool.recycle(page));
    assert_eq!(take().iter().filter(|s| s.0 && s.2 == 2048).count(), 2);
    let mut fragment = pool.alloc_fragment(128).unwrap();
    take();
    let at = fragment.iova().raw() - IOVA;
    fragment.sync_for_cpu(64);
    drop(fragment);
    assert_eq!(take(), [(false, at, 64), (true, at, 64)]);
}

#[test]
fn destroy_hides_at_once_and_names_the_holders() {
    let heap = Heap::new(8 << 20);
    let mut pool = heap.pool(Config::default());
    let remote = pool.remote();
    let (rx, tx) = (pool.tag("receive queue 3").unwrap(), pool.tag("transmit").unwrap());
    assert_eq!((pool.tag("receive queue 3"), rx == tx), (Ok(rx), false));
    let mut held: Vec<_> = (0..100).map(|_| pool.alloc_for(rx).unwrap()).collect();
    held[7].tag(tx);
    let raw = pool.alloc_raw_for(tx).unwrap();
    let plain = pool.alloc().unwrap();
    pool.recycle(held.pop().unwrap());
    drop(held.pop());
    let end = pool.destroy();
    assert_eq!(heap.count(Use::Mapped), 0, "the device reaches nothing");
    assert_eq!(end.reachable(), None);
    let holders = |end: &Destroyed| -> BTreeMap<String, u64> {
        let named = |h: Holder| (h.name.clone().unwrap_or_default(), h.pages);
        end.holders().into_iter().map(named).collect()
    };
    let expected = [("", 1), ("receive queue 3", 97), ("transmit", 2)];
    assert_eq!(holders(&end), expected.map(|(name, pages)| (name.to_owned(), pages)).into());
    // The holders' memory is still valid.
    held[0].memory().write_u64(8, 7).unwrap();
    remote.recycle_all(held);
    assert_eq!(
        holders(&end),
        [("", 1), ("transmit", 1)].map(|(name, pages)| (name.to_owned(), pages)).into()
    );
    remote.free_raw(raw).unwrap();
    assert!(matches!(remote.free_raw(raw), Err(FreeError::DoubleFree { .. })));
    drop(plain);
    assert_eq!((end.pages_out(), heap.count(Use::Free)), (0, 2048));
    assert_eq!(end.counts().released_refcnt, 100);
    drop((end, remote));
    assert_eq!(heap.handles(), 1, "the shared state is freed");
}

#[test]
fn a_page_keeps_its_pool_alive_after_all_handles_are_dropped() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let (page, fragment) = (pool.alloc().unwrap(), pool.alloc_fragment(64).unwrap());
    drop(pool);
    assert_eq!((heap.count(Use::Mapped), heap.handles()), (64, 2));
    page.memory().write_u8(1, 1).unwrap();
    drop(page);
    assert_eq!((heap.count(Use::Mapped), heap.handles()), (64, 2));
    drop(fragment);
    assert_eq!((heap.count(Use::Mapped), heap.handles()), (0, 1));
}

#[test]
fn chunks_that_cannot_be_hidden_are_reported() {
    let heap = Heap::new(2 << 20);
    heap.0.hides.store(0, Ordering::Relaxed);
    let mut pool = heap.pool(Config::default());
    let page = pool.alloc().unwrap();
    let end = pool.destroy();
    assert_eq!(end.reachable(), Some((64 * 4096, &RevokeError::Permanent)));
    drop(page);
    assert_eq!(heap.count(Use::Free), 512);
    let mut pool = heap.pool(Config::default());
    let page = pool.alloc().unwrap();
    let end = pool.close();
    assert_eq!(end.reachable(), Some((64 * 4096, &RevokeError::NotAsked)));
    drop(page);
    assert_eq!(heap.count(Use::Free), 512);
}

/// A raw page that is never freed keeps its chunk allocated, and the source gets no wrong call.
#[test]
fn a_raw_page_that_is_never_freed_keeps_its_chunk() {
    let heap = Heap::new(2 << 20);
    let mut pool = heap.pool(Config::default());
    let raw = pool.alloc_raw().unwrap();
    let end = pool.destroy();
    assert_eq!(end.pages_out(), 1);
    drop(end);
    assert_eq!((heap.count(Use::Hidden), heap.handles()), (64, 1));
    assert_eq!(raw.iova().raw(), IOVA);
}
