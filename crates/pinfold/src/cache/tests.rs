use super::*;
use crate::vfio::fake::{Fake, domain_of};
use crate::{Arena, MappingPolicy, Source};
use pinfold_core::access::FromDevice;
use proptest::prelude::*;

const KIB4: usize = 4096;

fn setting(entries: usize, bytes: u64) -> (Arc<Fake>, Domain, RegistrationCache) {
    let kernel = Arc::new(Fake { entries: Some(65_535), ..Fake::default() });
    let domain = domain_of(&kernel);
    let cache = RegistrationCache::new(&domain, Budget { entries, bytes });
    (kernel, domain, cache)
}

fn arena(domain: &Domain, bytes: u64) -> Arena {
    Arena::builder().size(bytes).source(Source::Plain).build(domain).unwrap()
}

fn buffers(arena: &Arena, count: usize, bytes: usize) -> Vec<Arc<Buffer>> {
    (0..count).map(|_| Arc::new(arena.alloc(bytes).unwrap())).collect()
}

#[test]
fn the_second_time_nothing_is_mapped() {
    let (kernel, domain, cache) = setting(8, 1 << 20);
    let arena = arena(&domain, 4 << 20);
    let buffer = Arc::new(arena.alloc(2 * KIB4).unwrap());
    let iova = cache.hold(&buffer).unwrap().iova();
    let calls = kernel.calls().len();
    for _ in 0..10 {
        let held = cache.hold(&buffer).unwrap();
        assert_eq!(held.iova(), iova);
        // A driver's mapping of it costs no call either, and gives it back.
        let mapped = domain.map(held, FromDevice).unwrap();
        assert!(mapped.is_fixed() && mapped.iova() == iova);
        drop(mapped.unmap().unwrap());
    }
    assert_eq!(kernel.calls().len(), calls);
    let stats = cache.stats();
    assert_eq!((stats.hits, stats.misses, stats.maps, stats.entries, stats.held), (10, 1, 1, 1, 0));
}

/// A map that the device may have seen although it failed: the frames are not given to another owner, and no slice of
/// them is lent.
#[test]
fn what_was_not_mapped_but_may_be_reached_is_kept() {
    use crate::soft::SoftConfig;
    for foreign in [false, true] {
        let config = SoftConfig {
            caching_mode: true,
            hang_from: Some(1),
            timeout: std::time::Duration::from_millis(1),
            table_bytes: 1 << 20,
            ..SoftConfig::default()
        };
        let domain = Domain::soft_with(config).unwrap();
        let home = if foreign { Domain::soft().unwrap() } else { domain.clone() };
        let arena = arena(&home, 2 << 20);
        let all = 2 << 20;
        let cache = RegistrationCache::new(&domain, Budget { entries: 8, bytes: 1 << 30 });
        let mut buffer = Arc::new(arena.alloc(all).unwrap());
        let error = cache.hold(&buffer).unwrap_err();
        assert!(matches!(&error, CacheError::Domain(error) if error.stays_reachable()), "{error}");
        assert!(Arc::get_mut(&mut buffer).is_none(), "no slice of it");
        drop(buffer);
        assert!(arena.alloc(KIB4).is_err(), "the device may reach all frames of the arena");
        let stats = domain.stats();
        assert_eq!((stats.quarantined, stats.quarantined_bytes), (1, all as u64));
        assert_eq!(cache.stats().entries, 0);
    }
}

#[test]
fn what_was_used_longest_ago_makes_room_and_what_is_held_does_not() {
    let (kernel, domain, cache) = setting(3, 1 << 20);
    let arena = arena(&domain, 4 << 20);
    let all = buffers(&arena, 5, KIB4);
    let first = cache.hold(&all[0]).unwrap();
    drop(cache.hold(&all[1]).unwrap());
    drop(cache.hold(&all[2]).unwrap());
    drop(cache.hold(&all[1]).unwrap());
    // 2 is the longest unused that nobody holds.
    drop(cache.hold(&all[3]).unwrap());
    let cached = |i: usize| cache.0.state().slots.find(all[i].memory().addr(), KIB4).is_some();
    assert_eq!((0..5).map(cached).collect::<Vec<_>>(), [true, true, false, true, false]);
    let others = [cache.hold(&all[1]).unwrap(), cache.hold(&all[3]).unwrap()];
    let full = cache.hold(&all[4]).unwrap_err();
    let budget = Budget { entries: 3, bytes: 1 << 20 };
    assert_eq!(full, CacheError::Full { asked: 4096, entries: 3, bytes: 3 * 4096, budget });
    assert!(!cache.forget(&all[0]), "it is held");
    drop((first, others));
    assert!(cache.forget(&all[0]) && cache.forget(&all[0]));
    assert_eq!(cache.clear(), 2);
    assert_eq!(kernel.entries(), 0);
}

#[test]
fn bytes_are_a_budget_too() {
    let (kernel, domain, cache) = setting(100, 3 * KIB4 as u64);
    let arena = arena(&domain, 4 << 20);
    let all = buffers(&arena, 2, 2 * KIB4);
    drop(cache.hold(&all[0]).unwrap());
    drop(cache.hold(&all[1]).unwrap());
    assert_eq!(kernel.mapped().len(), 1);
    assert_eq!(cache.stats().evictions, 1);
    let large = Arc::new(arena.alloc(4 * KIB4).unwrap());
    assert!(matches!(cache.hold(&large), Err(CacheError::Full { asked: 16384, .. })));
}

#[test]
fn the_kernels_limit_makes_room_where_the_budget_is_larger() {
    let kernel = Arc::new(Fake { entries: Some(2), ..Fake::default() });
    let domain = domain_of(&kernel);
    let cache = RegistrationCache::new(&domain, Budget { entries: 100, bytes: u64::MAX });
    let arena = arena(&domain, 4 << 20);
    let all = buffers(&arena, 3, KIB4);
    for buffer in &all {
        drop(cache.hold(buffer).unwrap());
    }
    assert_eq!((kernel.entries(), cache.stats().evictions), (2, 1));
    let held = (cache.hold(&all[0]).unwrap(), cache.hold(&all[1]).unwrap());
    let refused = cache.hold(&all[2]).unwrap_err();
    assert!(matches!(refused, CacheError::Domain(BackendError::NoEntries { limit: 2, .. })), "{refused}");
    drop(held);
}

#[test]
fn neighbours_share_an_entry() {
    let (kernel, domain, cache) = setting(65_535, u64::MAX);
    // 8 GiB on pages of 4 KiB, none of which is touched: in 8 buffers, then 65,536 buffers of a page each.
    let large = arena(&domain, 8 << 30);
    let eight = buffers(&large, 8, 1 << 30);
    let held = cache.hold_all(&eight).unwrap();
    assert_eq!(kernel.entries(), 1);
    for (held, buffer) in held.iter().zip(&eight) {
        assert!(Arc::ptr_eq(held.buffer(), buffer));
        let offset = buffer.memory().addr() - eight.iter().map(|b| b.memory().addr()).min().unwrap();
        assert_eq!(held.iova().start().raw(), kernel.mapped()[0].0 + offset as u64);
    }
    drop(held);
    assert_eq!(cache.clear(), 1);
    // Each by itself is one, too.
    let alone: Vec<Held> = eight.iter().map(|buffer| cache.hold(buffer).unwrap()).collect();
    assert_eq!(kernel.entries(), 8);
    drop(alone);
    cache.clear();
    let small = arena(&domain, 256 << 20);
    let pages = buffers(&small, 65_536, KIB4);
    let held = cache.hold_all(&pages).unwrap();
    assert_eq!((held.len(), kernel.entries()), (65_536, 1));
}

#[test]
fn all_or_none() {
    let (kernel, domain, cache) = setting(2, u64::MAX);
    let arena = arena(&domain, 4 << 20);
    let all = buffers(&arena, 6, KIB4);
    // Every other one: three runs, of which two fit.
    let apart: Vec<_> = all.iter().step_by(2).cloned().collect();
    assert!(cache.hold_all(&apart).is_err());
    assert_eq!(cache.stats().held, 0);
    assert!(kernel.entries() <= 2);
    cache.clear();
    assert_eq!(cache.hold_all(&all).unwrap().len(), 6);
}

#[test]
fn a_cached_buffer_is_nobodys_alone_and_is_not_freed() {
    let (kernel, domain, cache) = setting(8, 1 << 20);
    let arena = arena(&domain, 4 << 20);
    let mut buffer = Arc::new(arena.alloc(KIB4).unwrap());
    drop(cache.hold(&buffer).unwrap());
    assert!(Arc::get_mut(&mut buffer).is_none(), "no slice of it while the device reaches it");
    drop(buffer);
    assert_eq!((arena.stats().frames_in_use, kernel.entries()), (1, 1));
    drop(cache);
    assert_eq!((arena.stats().frames_in_use, kernel.entries()), (0, 0));
}

#[test]
fn an_arena_that_is_exposed_whole_needs_no_entry_and_another_domains_is_made_known() {
    let (kernel, domain, cache) = setting(8, 1 << 20);
    let whole = Arena::builder()
        .size(4 << 20)
        .source(Source::Plain)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain)
        .unwrap();
    let buffer = Arc::new(whole.alloc(KIB4).unwrap());
    assert_eq!(cache.hold(&buffer).unwrap().iova().start(), buffer.fixed_iova().unwrap());
    assert_eq!((kernel.entries(), cache.stats().entries), (1, 0));
    // An arena that is exposed whole elsewhere means nothing here.
    let (_, elsewhere, _) = setting(8, 1 << 20);
    for mapping_policy in [MappingPolicy::Whole, MappingPolicy::PerUse] {
        let foreign = Arena::builder().size(4 << 20).source(Source::Plain).mapping_policy(mapping_policy);
        let foreign = foreign.build(&elsewhere).unwrap();
        let buffer = Arc::new(foreign.alloc(KIB4).unwrap());
        drop(cache.hold(&buffer).unwrap());
        assert_eq!(kernel.entries(), 2);
        assert!(cache.forget(&buffer));
        assert_eq!(kernel.entries(), 1);
        drop(cache.hold(&buffer).unwrap());
        cache.clear();
    }
}

/// Domains choose the same addresses. A buffer's place in its own domain must not be taken for an entry of this one, which
/// would then not be held.
#[test]
fn a_place_in_another_domain_is_no_place_in_this_one() {
    let (home, domain) = (Domain::soft().unwrap(), Domain::soft().unwrap());
    let arena = Arena::builder()
        .size(4 << 20)
        .source(Source::Plain)
        .mapping_policy(MappingPolicy::Whole)
        .build(&home)
        .unwrap();
    let buffer = Arc::new(arena.alloc(4 << 20).unwrap());
    let cache = RegistrationCache::new(&domain, Budget { entries: 8, bytes: 1 << 30 });
    drop(cache.hold(&buffer).unwrap());
    let held = cache.hold(&buffer).unwrap();
    assert_eq!(held.iova().start(), buffer.fixed_iova().unwrap(), "the same address in both");
    assert_eq!((cache.stats().held, cache.clear()), (1, 0), "it is held");
    domain.port().unwrap().write(held.iova().start(), &[1]).unwrap();
}

/// The same of what another domain's cache holds.
#[test]
fn what_another_domains_cache_holds_is_mapped_afresh() {
    let (_, home, _) = setting(8, 1 << 20);
    let arena = arena(&home, 4 << 20);
    let buffer = Arc::new(arena.alloc(KIB4).unwrap());
    let (_kernel, _elsewhere, other) = setting(8, 1 << 20);
    let (_kernel, domain, cache) = setting(8, 1 << 20);
    let held = other.hold(&buffer).unwrap();
    let here = cache.hold(&buffer).unwrap().iova();
    assert_eq!(held.iova(), here, "the same address in both");
    let mapped = domain.map(held, FromDevice).unwrap();
    assert!(!mapped.is_fixed() && mapped.iova() != here, "the cache may take its entry back at any time");
}

#[test]
fn what_is_not_taken_back_is_kept_for_ever() {
    let (kernel, domain, cache) = setting(8, 1 << 20);
    let arena = arena(&domain, 4 << 20);
    drop(cache.hold(&Arc::new(arena.alloc(KIB4).unwrap())).unwrap());
    *kernel.unmap_fails.lock().unwrap() = Some(libc::EIO);
    assert_eq!(cache.clear(), 1);
    assert_eq!((domain.stats().quarantined, arena.stats().frames_in_use), (1, 1));
}

proptest! {
    #[test]
    fn it_agrees_with_a_list(steps in proptest::collection::vec((0usize..12, 0u8..4), 1..200)) {
        const ENTRIES: usize = 4;
        let (kernel, domain, cache) = setting(ENTRIES, u64::MAX);
        let arena = arena(&domain, 4 << 20);
        let all = buffers(&arena, 12, KIB4);
        // What is cached, longest unused first; what is held.
        let (mut cached, mut held): (Vec<usize>, Vec<(usize, Held)>) = (Vec::new(), Vec::new());
        for (i, what) in steps {
            if what == 0 {
                if let Some(at) = held.iter().position(|(which, _)| *which == i) {
                    drop(held.remove(at));
                    if !held.iter().any(|(which, _)| *which == i) {
                        cached.retain(|which| *which != i);
                        cached.push(i);
                    }
                }
                continue;
            }
            let is_held = |which: &usize| held.iter().any(|(h, _)| h == which);
            let got = cache.hold(&all[i]);
            if !cached.contains(&i) {
                if cached.len() == ENTRIES {
                    match cached.iter().position(|which| !is_held(which)) {
                        Some(oldest) => drop(cached.remove(oldest)),
                        None => {
                            prop_assert!(got.is_err());
                            continue;
                        }
                    }
                }
                cached.push(i);
            }
            held.push((i, got.unwrap()));
            prop_assert_eq!(kernel.entries(), cached.len());
            let inside = |which: &usize| cache.0.state().slots.find(all[*which].memory().addr(), KIB4).is_some();
            prop_assert!(cached.iter().all(inside));
        }
        drop(held);
        prop_assert_eq!(cache.stats().held, 0);
        drop(cache);
        prop_assert_eq!(kernel.entries(), 0);
    }
}
