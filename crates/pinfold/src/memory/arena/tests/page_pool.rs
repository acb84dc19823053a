//! Page pools on an arena: the mapping is kept while pages are recycled, and revoked at once at the
//! end.

use super::*;
use crate::soft::{Effect, FaultKind, Port, SoftConfig};
use pinfold_core::page_pool::{
    AllocError as PoolAllocError, BulkFreeError, Config, FreeError, Page, PagePool, RawPage,
    RevokeError,
};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const SECRET: u64 = 0x5ec3_e700_0000_0000;
const ROGUE: u64 = 0xbad0_bad0_bad0_bad0;

fn arena_in(domain: &Domain, bytes: u64, mapping_policy: MappingPolicy) -> Arena {
    Arena::builder()
        .size(bytes)
        .source(Source::Plain)
        .mapping_policy(mapping_policy)
        .build(domain)
        .unwrap()
}

fn configs() -> [SoftConfig; 4] {
    let slow = SoftConfig { flush_cost: Duration::from_micros(50), ..SoftConfig::default() };
    [
        SoftConfig { effect: Effect::AtOnce, ..slow.clone() },
        SoftConfig { effect: Effect::AtLast, ..slow.clone() },
        SoftConfig { late_by: Duration::from_micros(80), seed: 7, ..slow.clone() },
        SoftConfig { caching_mode: true, ..slow },
    ]
}

fn keep_secret(page: &Page) {
    for at in (0..4096).step_by(8) {
        page.memory().write_u64(at, SECRET | page.iova().raw()).unwrap();
    }
}

fn is_intact(page: &Page) -> bool {
    (0..4096).step_by(8).all(|at| page.memory().read_u64(at) == Ok(SECRET | page.iova().raw()))
}

fn succeeds(port: &Port, iova: Iova) -> bool {
    let mut word = [0; 8];
    let read = port.read(iova, &mut word).is_ok();
    // Both: an IOTLB entry may allow one of them.
    port.write(iova, &ROGUE.to_ne_bytes()).is_ok() | read
}

#[test]
fn after_destroy_no_access_succeeds_although_pages_are_in_use() {
    for config in configs() {
        let domain = Domain::soft_with(config).unwrap();
        let arena = arena_in(&domain, 8 << 20, MappingPolicy::PerUse);
        // Two devices, each with an IOTLB of its own.
        let ports = [domain.port().unwrap(), domain.port().unwrap()];
        let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
        let mut held: Vec<_> = (0..400).map(|_| pool.alloc().unwrap()).collect();
        let iovas: Vec<_> = held.iter().map(Page::iova).collect();
        // When the pool is destroyed, some pages are free, some are being freed, and the rest is in
        // use.
        held.drain(..100).for_each(|page| pool.recycle(page));
        held.truncate(200);
        for &iova in &iovas {
            assert!(
                ports.iter().all(|port| succeeds(port, iova)),
                "free or not, a page keeps its mapping: {iova}"
            );
        }
        let end = pool.destroy();
        held.iter().for_each(keep_secret);
        for &iova in &iovas {
            assert!(!ports.iter().any(|port| succeeds(port, iova)), "{iova}");
        }
        assert!(held.iter().all(is_intact));
        assert_eq!((end.reachable(), end.pages_out()), (None, 200));
        // The last pages are the ones of a chunk of 128 frames.
        let in_use = arena.stats().frames_in_use;
        assert!((200..512).contains(&in_use), "chunks without a page out are back: {in_use}");
        drop(held);
        assert_eq!(
            (end.pages_out(), arena.stats().frames_in_use, arena.stats().frames_quarantined),
            (0, 0, 0)
        );
        // The program owns the memory again, and the old addresses are unmapped.
        let mut buffer = arena.alloc(4 << 20).unwrap();
        buffer.as_mut_slice().unwrap().fill(7);
        assert!(!iovas.iter().any(|&iova| succeeds(&ports[0], iova)));
        assert!(buffer.as_slice().unwrap().iter().all(|&byte| byte == 7));
    }
}

/// Shows that the test above can fail: a pool that is only closed leaves its pages reachable, and
/// reports it.
#[test]
fn a_closed_pool_leaves_its_pages_reachable() {
    let domain = soft();
    let arena = arena_in(&domain, 2 << 20, MappingPolicy::PerUse);
    let port = domain.port().unwrap();
    let mut pool = PagePool::new(arena, "rx", Config::default()).unwrap();
    let page = pool.alloc().unwrap();
    let end = pool.close();
    keep_secret(&page);
    assert!(succeeds(&port, page.iova()) && !is_intact(&page));
    assert_eq!(end.reachable(), Some((64 * 4096, &RevokeError::NotAsked)));
    let iova = page.iova();
    drop(page);
    assert!(!succeeds(&port, iova), "unmapped with its last page");
}

#[test]
fn stress_page_pool_destroyed_while_devices_write() {
    for config in configs() {
        let domain = Domain::soft_with(config).unwrap();
        let arena = arena_in(&domain, 4 << 20, MappingPolicy::PerUse);
        let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
        let held: Vec<_> = (0..200).map(|_| pool.alloc().unwrap()).collect();
        let iovas: Vec<_> = held.iter().map(Page::iova).collect();
        let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let rounds = AtomicU64::new(0);
        let (mut landed, mut late) = (0u64, 0u64);
        let wait_for = |more: u64| {
            let until = rounds.load(Ordering::Relaxed) + more;
            while rounds.load(Ordering::Relaxed) < until {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            let rogues: Vec<_> = [1, 77]
                .map(|step| {
                    let (port, iovas, stop, over, rounds) =
                        (domain.port().unwrap(), &iovas, &stop, &over, &rounds);
                    scope.spawn(move || {
                        let (mut landed, mut late, mut at) = (0u64, 0u64, step);
                        while !stop.load(Ordering::Relaxed) {
                            at = (at + step) % iovas.len();
                            // Read before the access: one that begins after the end must fault.
                            let after = over.load(Ordering::Acquire);
                            let hit = u64::from(succeeds(&port, iovas[at]));
                            *(if after { &mut late } else { &mut landed }) += hit;
                            rounds.fetch_add(1, Ordering::Relaxed);
                        }
                        (landed, late)
                    })
                })
                .into();
            wait_for(500);
            for _ in 0..500 {
                let page = pool.alloc().unwrap();
                pool.recycle(page);
            }
            let end = pool.destroy();
            over.store(true, Ordering::Release);
            held.iter().for_each(keep_secret);
            wait_for(2000);
            assert!(held.iter().all(is_intact));
            assert_eq!(end.reachable(), None);
            stop.store(true, Ordering::Relaxed);
            for rogue in rogues {
                let (before, after) = rogue.join().unwrap();
                landed += before;
                late += after;
            }
        });
        assert!(landed > 100, "the devices were idle: {landed}");
        assert_eq!(late, 0);
        drop(held);
        assert_eq!(arena.stats().frames_in_use, 0);
    }
}

#[test]
fn pages_are_recycled_without_table_work() {
    let domain = soft();
    let arena = arena_in(&domain, 4 << 20, MappingPolicy::PerUse);
    let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
    let remote = pool.remote();
    let first: Vec<_> = (0..300).map(|_| pool.alloc().unwrap()).collect();
    remote.recycle_all(first);
    let before = (domain.stats(), arena.stats().frames_in_use);
    for _ in 0..100 {
        let pages: Vec<_> = (0..300).map(|_| pool.alloc().unwrap()).collect();
        drop(pages);
        let pages: Vec<_> = (0..300).map(|_| pool.alloc().unwrap()).collect();
        pages.into_iter().for_each(|page| pool.recycle(page));
    }
    assert_eq!((domain.stats(), arena.stats().frames_in_use), before);
    drop((remote, pool));
    assert_eq!(arena.stats().frames_in_use, 0);
}

#[test]
fn an_arena_mapped_whole_reports_that_its_pages_stay_reachable() {
    let domain = soft();
    let arena = arena_in(&domain, 2 << 20, MappingPolicy::Whole);
    let port = domain.port().unwrap();
    let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
    let page = pool.alloc().unwrap();
    let end = pool.destroy();
    let (bytes, why) = end.reachable().unwrap();
    assert_eq!((bytes, why, why.is_permanent()), (64 * 4096, &RevokeError::Permanent, false));
    assert!(succeeds(&port, page.iova()));
    drop(page);
    assert_eq!(arena.stats().frames_in_use, 0);
}

/// The IOMMU hangs when the pool is destroyed: "timed out" is not "completed".
#[test]
fn a_flush_that_hangs_quarantines_the_pages() {
    let _alone = alone();
    let before = quarantined_here();
    let config = SoftConfig {
        hang_from: Some(1),
        timeout: Duration::from_millis(2),
        ..SoftConfig::default()
    };
    let domain = Domain::soft_with(config).unwrap();
    let arena = arena_in(&domain, 2 << 20, MappingPolicy::PerUse);
    let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
    let page = pool.alloc().unwrap();
    let end = pool.destroy();
    let (bytes, why) = end.reachable().unwrap();
    assert!(bytes == 64 * 4096 && why.is_permanent(), "{why}");
    drop(page);
    let stats = arena.stats();
    assert_eq!((stats.frames_in_use, stats.frames_quarantined), (64, 64));
    drop((end, arena));
    assert_eq!(
        quarantined_here() - before,
        2 << 20,
        "a device may write there, so the memory stays"
    );
}

#[test]
fn a_wrong_free_is_a_typed_error_and_changes_nothing() {
    let domain = soft();
    let arena = arena_in(&domain, 4 << 20, MappingPolicy::PerUse);
    let other = arena_in(&domain, 2 << 20, MappingPolicy::PerUse);
    let mut pool = PagePool::new(arena.clone(), "one", Config::default()).unwrap();
    let mut neighbour = PagePool::new(arena.clone(), "another", Config::default()).unwrap();
    let mut stranger = PagePool::new(other.clone(), "elsewhere", Config::default()).unwrap();
    let raw = pool.alloc_raw().unwrap();
    let before = (pool.stats(), pool.counts());
    for page in [neighbour.alloc_raw().unwrap(), stranger.alloc_raw().unwrap()] {
        assert!(matches!(pool.free_raw(page), Err(FreeError::Foreign { .. })));
        assert!(matches!(pool.remote().free_raw(page), Err(FreeError::Foreign { .. })));
        assert!(matches!(pool.memory(page), Err(FreeError::Foreign { .. })));
    }
    let buffer = arena.alloc(4096).unwrap();
    let of_buffer = RawPage::from_parts(buffer.memory().as_ptr(), raw.iova());
    assert!(matches!(pool.free_raw(of_buffer), Err(FreeError::Foreign { .. })));
    assert_eq!((pool.stats(), pool.counts()), before);
    let addr = raw.as_ptr().as_ptr().addr();
    let remote = pool.remote();
    remote.free_raw(raw).unwrap();
    let twice = FreeError::DoubleFree { addr };
    assert_eq!(remote.free_bulk(&[raw]), Err(BulkFreeError { freed: 0, error: twice }));
    assert_eq!(pool.free_raw(raw), Err(twice));
    // Also after the pool is destroyed.
    let late = pool.alloc_raw().unwrap();
    drop(pool);
    remote.free_raw(late).unwrap();
    assert!(matches!(remote.free_raw(late), Err(FreeError::DoubleFree { .. })));
}

#[test]
fn a_pool_of_a_full_arena_is_an_error() {
    let domain = soft();
    let arena = arena_in(&domain, 1 << 20, MappingPolicy::PerUse);
    let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc().ok()).collect();
    assert_eq!(held.len(), 256, "all of it");
    let error = pool.alloc().unwrap_err();
    assert!(matches!(error, PoolAllocError::Source(_)), "{error}");
    drop(held);
    pool.alloc().unwrap();
    let port = domain.port().unwrap();
    let past = Iova::new(arena.iova().raw() + (1 << 20));
    let fault = port.write_u32_release(past, 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotMapped);
}
