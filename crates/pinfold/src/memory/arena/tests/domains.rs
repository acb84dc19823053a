//! Arenas without a domain, and in several; page pools on an arena, which keep the mapping while pages
//! are recycled, and revoke it at the end.

use super::*;
use crate::soft::{Effect, FaultKind, Port, SoftConfig};
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::dma_pool::{ChunkSource, DmaPool};
use pinfold_core::page_pool::{Config, FreeError, Page, PagePool, RawPage, RevokeError};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

fn unmapped(policy: MappingPolicy) -> ArenaMemory {
    Arena::builder()
        .size(2 << 20)
        .source(Source::Plain)
        .mapping_policy(policy)
        .build_unmapped()
        .unwrap()
}

#[test]
fn an_arena_without_a_domain_allocates_and_unmaps() {
    assert!(is_gone(|| {
        let memory = unmapped(MappingPolicy::PerUse);
        let addr = memory.addr();
        let mut buffer = memory.alloc(8192).unwrap();
        buffer.as_mut_slice().unwrap().fill(7);
        drop(memory);
        assert!(
            is_mapped(addr) && buffer.as_slice().unwrap()[8191] == 7,
            "a buffer keeps its arena"
        );
        drop(buffer);
        addr
    }));
}

#[test]
fn a_buffer_can_be_older_than_its_domain() {
    let memory = unmapped(MappingPolicy::PerUse);
    let mut buffer = memory.alloc(4096).unwrap();
    buffer.as_mut_slice().unwrap()[..5].copy_from_slice(b"early");
    let domain = soft();
    let unknown = domain.map(buffer, ToDevice).unwrap_err();
    assert!(matches!(unknown.error, BackendError::NotRegistered { .. }), "{unknown}");
    let _arena = memory.map_into(&domain).unwrap();
    let mapping = domain.map(unknown.payload.unwrap(), ToDevice).unwrap();
    let mut read = [0; 5];
    domain.port().unwrap().read(mapping.iova().start(), &mut read).unwrap();
    assert_eq!(&read, b"early");
}

#[test]
fn two_domains_reach_the_same_memory_at_their_own_addresses() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        let memory = unmapped(policy);
        let domains = [soft(), soft()];
        // So that the domains do not choose the same addresses.
        let _shift = domains[1].reserve_iova(2 << 20, 2 << 20).unwrap();
        let arenas = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
        assert_ne!(arenas[0].iova(), arenas[1].iova());
        assert_ne!(ChunkSource::domain(&arenas[0]), ChunkSource::domain(&arenas[1]));
        let buffer = memory.alloc(4096).unwrap();
        let fixed = arenas.each_ref().map(|arena| arena.iova_of(&buffer));
        assert_eq!(fixed.iter().all(Option::is_some), policy == MappingPolicy::Whole);
        // From one device to the other, without a copy.
        let mapping = domains[0].map(buffer, FromDevice).unwrap();
        assert_eq!(mapping.is_fixed(), policy == MappingPolicy::Whole);
        domains[0].port().unwrap().write(mapping.iova().start(), b"frame").unwrap();
        let buffer = mapping.unmap().unwrap();
        let mapping = domains[1].map(buffer, ToDevice).unwrap();
        let mut read = [0; 5];
        domains[1].port().unwrap().read(mapping.iova().start(), &mut read).unwrap();
        assert_eq!(&read, b"frame");
    }
}

#[test]
fn each_domain_reaches_the_chunks_of_its_own_pools_only() {
    let memory = unmapped(MappingPolicy::PerUse);
    let domains = [soft(), soft()];
    let arenas = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
    let builder = DmaPool::builder("ring").block(4096).align(4096);
    let pools = arenas.each_ref().map(|arena| builder.clone().build(arena).unwrap());
    let blocks = pools.each_ref().map(|pool| pool.alloc().unwrap());
    let ports = domains.each_ref().map(|domain| domain.port().unwrap());
    for (i, other) in [(0, 1), (1, 0)] {
        ports[i].write(blocks[i].iova(), b"mine").unwrap();
        let offset = blocks[i].iova().raw() - arenas[i].iova().raw();
        let there = arenas[other].iova().checked_add(offset).unwrap();
        assert!(ports[other].write(there, b"theirs").is_err());
    }
}

#[test]
fn mapping_twice_into_a_domain_returns_the_same_addresses() {
    let (memory, domain) = (unmapped(MappingPolicy::Whole), soft());
    let first = memory.map_into(&domain).unwrap();
    let second = first.map_into(&domain).unwrap();
    assert_eq!((first.iova(), domain.stats().static_mappings), (second.iova(), 1));
    assert!(first.is_same(&second));
}

/// Handles, buffers and domains are dropped in every order: the memory is unmapped from both
/// domains and the process.
#[test]
fn every_drop_order_unmaps_everywhere() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        for order in 0..24 {
            assert!(is_gone(|| {
                let memory = unmapped(policy);
                let addr = memory.addr();
                let domains = [soft(), soft()];
                let handles = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
                let iovas = handles.each_ref().map(|arena| arena.iova());
                let ports = domains.each_ref().map(|domain| domain.port().unwrap());
                let kept = domains.clone();
                let mut values: Vec<Box<dyn std::any::Any>> = vec![
                    Box::new(memory.alloc(4096).unwrap()),
                    Box::new(memory),
                    Box::new(handles),
                    Box::new(domains),
                ];
                let mut code = order;
                while !values.is_empty() {
                    let at = code % values.len();
                    code /= values.len();
                    drop(values.remove(at));
                }
                for (port, iova) in ports.iter().zip(iovas) {
                    assert!(port.write(iova, b"late").is_err());
                }
                assert!(kept.iter().all(|domain| domain.stats().static_mappings == 0));
                addr
            }));
        }
    }
}

#[test]
fn stress_threads_map_one_arena_into_many_domains() {
    let memory = unmapped(MappingPolicy::Whole);
    let domains: Vec<Domain> = (0..6).map(|_| soft()).collect();
    std::thread::scope(|scope| {
        for shift in 0..4 {
            let (memory, domains) = (&memory, &domains);
            scope.spawn(move || {
                for at in 0..domains.len() {
                    let domain = &domains[(at + shift) % domains.len()];
                    let arena = memory.map_into(domain).unwrap();
                    let buffer = memory.alloc(4096).unwrap();
                    let fixed = arena.iova_of(&buffer).unwrap();
                    let mapping = domain.map(buffer, Bidirectional).unwrap();
                    domain.port().unwrap().write(mapping.iova().start(), b"x").unwrap();
                    let _ = fixed;
                }
            });
        }
    });
    assert!(domains.iter().all(|domain| domain.stats().static_mappings == 1));
    drop(memory);
    assert!(domains.iter().all(|domain| domain.stats().static_mappings == 0));
}

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
    assert_eq!((bytes, why), (64 * 4096, &RevokeError::Permanent));
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
    assert!(bytes == 64 * 4096 && matches!(why, RevokeError::Unmap(_)), "{why}");
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
    }
    let buffer = arena.alloc(4096).unwrap();
    let of_buffer = RawPage::from_parts(buffer.memory().as_ptr(), raw.iova());
    assert!(matches!(pool.free_raw(of_buffer), Err(FreeError::Foreign { .. })));
    assert_eq!((pool.stats(), pool.counts()), before);
    let addr = raw.as_ptr().as_ptr().addr();
    let remote = pool.remote();
    remote.free_raw(raw).unwrap();
    let twice = FreeError::DoubleFree { addr };
    assert_eq!(remote.free_raw(raw), Err(twice));
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
    assert!(matches!(error, AllocError::Source(_)), "{error}");
    drop(held);
    pool.alloc().unwrap();
    let port = domain.port().unwrap();
    let past = Iova::new(arena.iova().raw() + (1 << 20));
    let fault = port.write_u32_release(past, 1).unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotMapped);
}
