//! Each step of an arena's life fails once: nothing is left behind, or what a device may reach is
//! quarantined.

use super::*;
use crate::memory::attachment::fake::{FakeDomain, REACHABLE, REFUSED};
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn build(fake: &FakeDomain, policy: MappingPolicy) -> Result<Arena, BuildError> {
    plain(policy).build_memory(false)?.attach(Box::new(fake.clone())).map_err(BuildError::Domain)
}

fn plain(policy: MappingPolicy) -> ArenaBuilder {
    Arena::builder().size(2 << 20).source(Source::Plain).mapping_policy(policy)
}

#[test]
fn a_build_that_fails_leaves_nothing() {
    let _alone = alone();
    let before = quarantined_here();
    for (fails, mapping_policy, steps) in [
        ("register_memory", MappingPolicy::Whole, vec!["register_memory"]),
        (
            "map_static",
            MappingPolicy::Whole,
            vec!["register_memory", "map_static", "unregister_memory"],
        ),
        ("reserve", MappingPolicy::PerUse, vec!["register_memory", "reserve", "unregister_memory"]),
    ] {
        let fake = FakeDomain::failing(fails, REFUSED);
        assert_eq!(build(&fake, mapping_policy).unwrap_err(), BuildError::Domain(REFUSED));
        assert_eq!(fake.steps(), steps);
    }
    assert_eq!(quarantined_here(), before);
}

#[test]
fn a_failed_build_that_leaves_memory_reachable_quarantines_it() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = FakeDomain::failing("map_static", REACHABLE);
    assert!(build(&fake, MappingPolicy::Whole).is_err());
    assert_eq!(
        fake.steps(),
        ["register_memory", "map_static", "count_quarantined"],
        "it stays registered"
    );
    assert_eq!(quarantined_here() - before, 2 << 20);
}

#[test]
fn an_arena_that_cannot_be_unmapped_is_quarantined() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = FakeDomain::failing("unmap", REACHABLE);
    let arena = build(&fake, MappingPolicy::Whole).unwrap();
    let addr = addr_of(&arena);
    drop(arena);
    assert!(is_mapped(addr));
    assert_eq!(quarantined_here() - before, 2 << 20);
    assert_eq!(fake.steps(), ["register_memory", "map_static", "unmap", "count_quarantined"]);
}

#[test]
fn a_chunk_that_cannot_be_mapped_is_freed() {
    assert!(is_gone(|| {
        let fake = FakeDomain::failing("map_at", REFUSED);
        let arena = build(&fake, MappingPolicy::PerUse).unwrap();
        assert!(arena.acquire(Order::HUGE).is_err());
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (0, 0));
        let addr = addr_of(&arena);
        drop(arena);
        assert_eq!(
            fake.steps(),
            ["register_memory", "reserve", "map_at", "release", "unregister_memory"]
        );
        addr
    }));
}

#[test]
fn a_chunk_that_a_device_may_reach_is_never_allocated_again() {
    let _alone = alone();
    for fails in ["map_at", "unmap"] {
        let fake = FakeDomain::failing(fails, REACHABLE);
        let arena = build(&fake, MappingPolicy::PerUse).unwrap();
        drop(Coherent::new(&arena, 2 << 20));
        assert!(arena.alloc(4096).is_err(), "all of it was the chunk's");
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (512, 512));
        let addr = addr_of(&arena);
        drop(arena);
        assert!(is_mapped(addr));
        assert!(fake.steps().contains(&"count_quarantined"));
        assert!(!fake.steps().contains(&"unregister_memory"));
    }
}

/// A page pool's chunk cannot be revoked, or not verifiably: the pool reports it, the chunk is
/// requested once, and is never used again.
#[test]
fn a_chunk_that_cannot_be_hidden_is_quarantined_and_counted() {
    use pinfold_core::invalidate::{Ticket, WaitError};
    use pinfold_core::page_pool::{Config, PagePool};
    let _alone = alone();
    let before = quarantined_here();
    let timed_out = WaitError::TimedOut { ticket: Ticket::NEVER, waited_ns: 1, polls: 1 };
    for error in [REACHABLE, BackendError::Flush(timed_out)] {
        let fake = FakeDomain::failing("unmap", error);
        let arena = build(&fake, MappingPolicy::PerUse).unwrap();
        let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
        let page = pool.alloc().unwrap();
        let end = pool.destroy();
        let (bytes, why) = end.reachable().unwrap();
        assert!(bytes == 64 * 4096 && why.is_permanent(), "{why}");
        page.memory().write_u64(0, 1).unwrap();
        drop(page);
        assert_eq!(end.pages_out(), 0);
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (64, 64));
        assert_eq!(fake.steps().iter().filter(|&&step| step == "unmap").count(), 1);
        drop((end, arena));
        assert!(!fake.steps().contains(&"unregister_memory"));
    }
    assert_eq!(quarantined_here() - before, 2 * (2 << 20));
}

/// A second domain that refuses leaves the first as it is.
#[test]
fn a_failed_second_domain_leaves_the_first_usable() {
    let before = quarantined_here();
    assert!(is_gone(|| {
        let domain = soft();
        let memory = plain(MappingPolicy::PerUse).build_unmapped().unwrap();
        let arena = memory.map_into(&domain).unwrap();
        for step in ["register_memory", "reserve"] {
            let fake = FakeDomain::failing(step, REFUSED);
            assert_eq!(memory.attach(Box::new(fake.clone())).unwrap_err(), REFUSED);
        }
        drop(Coherent::new(&arena, 8192).unwrap());
        memory.addr()
    }));
    assert_eq!(quarantined_here(), before);
}

/// One of two domains cannot unmap: the memory is unmapped from the other, and quarantined.
#[test]
fn a_domain_that_cannot_unmap_quarantines_the_arena_for_all() {
    let _alone = alone();
    for first_fails in [false, true] {
        let before = quarantined_here();
        let domain = soft();
        let port = domain.port().unwrap();
        let fake = FakeDomain::failing("unmap", REACHABLE);
        let memory = plain(MappingPolicy::Whole).build_unmapped().unwrap();
        let addr = memory.addr();
        let attach = || memory.attach(Box::new(fake.clone())).unwrap();
        let first = first_fails.then(attach);
        let iova = memory.map_into(&domain).unwrap().iova();
        let second = (!first_fails).then(attach);
        port.write(iova, b"early").unwrap();
        drop((first, second, memory));
        assert!(is_mapped(addr));
        assert!(port.write(iova, b"late").is_err(), "unmapped where that is possible");
        assert_eq!(quarantined_here() - before, 2 << 20);
        assert!(fake.steps().contains(&"count_quarantined"));
    }
}

#[test]
fn a_domain_that_reaches_memory_after_a_failed_map_quarantines() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = FakeDomain::failing("map_static", REACHABLE);
    let memory = plain(MappingPolicy::Whole).build_unmapped().unwrap();
    let domain = soft();
    let arena = memory.map_into(&domain).unwrap();
    assert_eq!(memory.attach(Box::new(fake.clone())).unwrap_err(), REACHABLE);
    let (addr, iova) = (memory.addr(), arena.iova());
    drop((memory, arena));
    assert!(is_mapped(addr) && domain.port().unwrap().write(iova, b"late").is_err());
    assert_eq!(quarantined_here() - before, 2 << 20);
}

/// The mappings of a domain that pins are charged to RLIMIT_MEMLOCK: locked as well, the memory
/// would count twice.
#[test]
fn memory_is_locked_again_if_a_pinning_domain_refuses() {
    let memory = plain(MappingPolicy::Whole).build_unmapped().unwrap();
    if memory.report().residency != Residency::Locked {
        return skipped("RLIMIT_MEMLOCK does not allow to lock 2 MiB");
    }
    let is_locked = || pages::vma_of(memory.addr(), memory.len()).unwrap().has_flag("lo");
    let attach = |fake: FakeDomain| memory.attach(Box::new(fake));
    assert!(is_locked());
    let seen = Arc::new(AtomicBool::new(true));
    let refuses = FakeDomain::failing("map_static", REFUSED).pinning();
    let observes = {
        let (seen, addr, len) = (Arc::clone(&seen), memory.addr(), memory.len());
        move || seen.store(pages::vma_of(addr, len).unwrap().has_flag("lo"), Ordering::Relaxed)
    };
    assert_eq!(attach(refuses.observed(observes)).unwrap_err(), REFUSED);
    assert!(!seen.load(Ordering::Relaxed), "unlocked while it is mapped");
    assert_eq!((memory.report().residency, is_locked()), (Residency::Locked, true));
    let _does_not_pin = attach(FakeDomain::working()).unwrap();
    assert_eq!((memory.report().residency, is_locked()), (Residency::Locked, true));
    let _pins = attach(FakeDomain::working().pinning()).unwrap();
    assert_eq!((memory.report().residency, is_locked()), (Residency::ByMapping, false));
    let refuses = FakeDomain::failing("map_static", REFUSED).pinning();
    assert_eq!(attach(refuses).unwrap_err(), REFUSED);
    assert_eq!(
        (memory.report().residency, is_locked()),
        (Residency::ByMapping, false),
        "the other domain pins it"
    );
}
