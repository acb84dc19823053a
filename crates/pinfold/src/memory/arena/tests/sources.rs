//! The sources of an arena on this machine, and each step of its life that fails once: nothing is left
//! behind, or memory that a device may reach is quarantined.

use super::*;
use crate::memory::attachment::fake::{FakeDomain, REACHABLE, REFUSED};
use crate::memory::claim::{Claim, ClaimedFor};
use crate::sys::hugepages;
use crate::sys::limits::MemlockLimit;
use pinfold_core::addr::PageSize;
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn build(bytes: u64, source: Source) -> Result<Arena, BuildError> {
    Arena::builder().size(bytes).source(source).build(&soft())
}

#[test]
fn unavailable_hugepage_sources_are_all_listed() {
    if hugepages::pool(Path::new("/sys"), PageSize::Size2M).is_some_and(|pool| pool.available() > 0)
    {
        return skipped("hugepages are reserved on this machine");
    }
    let error = build(2 << 20, Source::Hugetlb2M).unwrap_err();
    let BuildError::NoMemory { unavailable, .. } = &error else { panic!("{error}") };
    assert_eq!(unavailable.len(), 1);
    assert!(error.to_string().contains("2 MiB are needed, 0 are free"), "{error}");
    let arena = Arena::builder()
        .size(2 << 20)
        .sources([Source::Memfd1G, Source::Hugetlb1G, Source::Memfd2M, Source::Plain])
        .build(&soft())
        .unwrap();
    let unavailable: Vec<Source> =
        arena.report().unavailable.iter().map(|unavailable| unavailable.source).collect();
    assert_eq!(
        unavailable,
        [Source::Memfd1G, Source::Hugetlb1G, Source::Memfd2M],
        "in the order in which they were tried"
    );
}

#[test]
fn transparent_hugepages_are_verified_by_touching_a_page() {
    let arena = Arena::builder()
        .size(8 << 20)
        .sources([Source::Thp, Source::Plain])
        .build(&soft())
        .unwrap();
    match hugepages::thp(Path::new("/sys")) {
        Some(hugepages::Thp::Always | hugepages::Thp::Madvise) => {}
        _ => {
            assert_eq!(arena.report().source, Source::Plain);
            assert_eq!(arena.report().unavailable[0].source, Source::Thp);
            return skipped("no transparent hugepages on this machine");
        }
    }
    if arena.report().source == Source::Plain {
        return skipped(&arena.report().unavailable[0].to_string());
    }
    assert_eq!(addr_of(&arena) % (2 << 20), 0);
    let transparent = || pages::vma_of(addr_of(&arena), arena.len()).unwrap().transparent;
    assert_eq!(transparent(), 2 << 20, "one page was touched to see");
    let all = arena.alloc_zeroed(8 << 20).unwrap();
    assert!(transparent() >= 4 << 20);
    drop(all);
}

#[test]
fn a_size_on_transparent_hugepages_is_rounded_up_to_them() {
    let first = match build(4096, Source::Thp) {
        Ok(first) => first,
        Err(refused) => return skipped(&refused.to_string()),
    };
    assert_eq!(
        (first.report().requested_bytes, first.report().bytes),
        (4096, 2 << 20),
        "rounding is stated"
    );
    for (bytes, rounded) in
        [(1, 2), ((2 << 20) - 1, 2), (2 << 20, 2), ((2 << 20) + 1, 4), (5 << 20, 6)]
    {
        let Ok(arena) = build(bytes, Source::Thp) else { continue };
        assert_eq!(arena.report().bytes, rounded << 20, "{bytes}");
    }
}

#[test]
fn plain_memory_has_pages_of_4_kib() {
    let arena = build(4 << 20, Source::Plain).unwrap();
    let _all = arena.alloc_zeroed(4 << 20).unwrap();
    let vma = pages::vma_of(addr_of(&arena), arena.len()).unwrap();
    assert_eq!((vma.resident, vma.transparent), (4 << 20, 0));
    assert_eq!(arena.report().page_size, PageSize::Size4K);
}

#[test]
fn a_memfd_is_shared_through_its_descriptor() {
    let arena = build(10_000, Source::Memfd).unwrap();
    let report = arena.report();
    assert_eq!((report.requested_bytes, report.bytes), (10_000, 16_384), "rounding is stated");
    let mut buffer = arena.alloc(10_000).unwrap();
    let other = Region::shared(arena.memfd().unwrap(), arena.len()).unwrap();
    other.memory().write_u64(8192, 42).unwrap();
    assert_eq!(buffer.memory().read_u64(8192).unwrap(), 42);
    assert!(buffer.as_slice().is_err(), "another process may write to it");
    assert!(build(4096, Source::Plain).unwrap().memfd().is_none());
}

#[test]
fn the_callers_memory_is_used_in_place_and_returned_unchanged() {
    let own = Region::anonymous(1 << 20, 4096).unwrap();
    own.memory().write_u8(0, 9).unwrap();
    let flag = |flag| pages::vma_of(own.addr(), own.len()).unwrap().has_flag(flag);
    // SAFETY: `own` lives until the end of the test, longer than the arena, and is not touched
    // meanwhile.
    let builder = unsafe { Arena::builder().caller(own.base(), own.len()) };
    let arena = builder.build(&soft()).unwrap();
    assert_eq!((arena.report().source, arena.len()), (Source::Caller, 1 << 20));
    assert!(flag("dc"));
    let buffer = arena.alloc(1 << 20).unwrap();
    assert_eq!((buffer.memory().addr(), buffer.memory().read_u8(0).unwrap()), (own.addr(), 9));
    assert!(arena.alloc(1).is_err());
    drop((arena, buffer));
    assert!(!flag("dc") && !flag("lo"));
    assert_eq!(own.memory().read_u8(0).unwrap(), 9);
}

#[test]
fn misaligned_memory_of_the_caller_is_refused() {
    let crooked = [(4096, 4097), (4095, 4096)];
    for (base, len) in crooked {
        let at = NonNull::new(std::ptr::without_provenance_mut(base)).unwrap();
        // SAFETY: it is refused before anything is touched.
        let error = unsafe { Arena::builder().caller(at, len) }.build(&soft()).unwrap_err();
        assert_eq!(error, BuildError::CallerAlignment { base, len });
    }
    // SAFETY: as above.
    let none = unsafe { Arena::builder().caller(NonNull::dangling(), 0) };
    assert_eq!(none.build(&soft()).unwrap_err(), BuildError::NoSize);
}

#[test]
fn memory_of_the_caller_that_cannot_be_used_is_refused_unchanged() {
    let own = Region::anonymous(8 << 12, 4096).unwrap();
    let last = own.base().as_ptr().wrapping_add(7 << 12);
    let protect = |rights| {
        // SAFETY: a page of the region, which no pointer is used for.
        unsafe { rustix::mm::mprotect(last.cast(), 4096, rights) }.unwrap();
    };
    // SAFETY: `own` lives until the end of the test, and what is not accessible is refused.
    let build = || unsafe { Arena::builder().caller(own.base(), own.len()) }.build_unmapped();
    protect(rustix::mm::MprotectFlags::READ);
    let Err(BuildError::Inaccessible(refused)) = build() else {
        panic!("its last page is constant")
    };
    assert_eq!((refused.addr, refused.len, refused.failed), (own.addr(), 8 << 12, last.addr()));
    assert!(!pages::vma_of(own.addr(), 4096).unwrap().has_flag("dc"));
    protect(rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE);
    let memory = build().unwrap();
    let again = build().unwrap_err();
    assert!(matches!(&again, BuildError::InUse(in_use) if in_use.other == own.addr()), "{again}");
    assert!(pages::vma_of(own.addr(), own.len()).unwrap().has_flag("dc"), "the first one's");
    drop(memory);
    build().unwrap();
}

#[test]
fn an_arena_claims_its_memory_until_it_is_given_back() {
    let claim = |addr| Claim::memory(addr..addr + 4096, ClaimedFor::Owned);
    let own = build(1 << 20, Source::Plain).unwrap();
    let addr = addr_of(&own);
    assert_eq!(claim(addr).unwrap_err().by, ClaimedFor::Arena);
    let buffer = own.alloc(4096).unwrap();
    drop(own);
    assert!(claim(addr).is_err());
    drop(buffer);
    // Other memory may have the addresses, but not each time.
    let free = || {
        let arena = build(1 << 20, Source::Plain).unwrap();
        let addr = addr_of(&arena);
        drop(arena);
        claim(addr).is_ok()
    };
    assert!((0..20).any(|_| free()));
    // A device may still reach it.
    let fake = FakeDomain::failing("unmap", REACHABLE);
    let quarantined = build_with(&fake, MappingPolicy::Whole).unwrap();
    let addr = addr_of(&quarantined);
    drop(quarantined);
    assert!(claim(addr).is_err());
}

#[test]
fn the_end_takes_no_more_of_the_stack_for_more_domains() {
    let memory = || {
        let memory = Arena::builder().size(4096).build_unmapped().unwrap();
        for _ in 0..2000 {
            memory.map_into(&soft()).unwrap();
        }
        memory
    };
    let (freed, quarantined) = (memory(), memory());
    let _ = quarantined.alloc(4096).unwrap().into_raw();
    let end = std::thread::Builder::new().stack_size(128 << 10).spawn(|| {
        drop((freed, quarantined));
    });
    end.unwrap().join().unwrap();
}

#[test]
fn a_numa_node_is_honoured_or_refused() {
    let missing = Arena::builder().size(4096).numa_node(1000).build(&soft()).unwrap_err();
    assert!(matches!(missing, BuildError::Node { node: 1000, .. }), "{missing}");
    let online = hugepages::online_nodes(Path::new("/sys"));
    assert!(missing.to_string().contains(&format!("online: {online}")), "{missing}");
    let Ok(arena) = Arena::builder().size(4096).source(Source::Plain).numa_node(0).build(&soft())
    else {
        return skipped("this kernel has no NUMA, or no node 0");
    };
    assert_eq!(arena.report().numa_node, Some(0));
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    let line = maps.lines().find(|line| line.starts_with(&format!("{:x} ", addr_of(&arena))));
    assert!(maps.is_empty() || line.unwrap().contains("bind"), "{line:?}");
}

#[test]
fn impossible_sizes_are_refused() {
    let build = |bytes| Arena::builder().size(bytes).build(&soft()).unwrap_err();
    assert_eq!(build(0), BuildError::NoSize);
    assert_eq!(build(1 << 60), BuildError::TooLarge { requested: 1 << 60, limit: 1 << 40 });
    assert_eq!(build(u64::MAX), BuildError::TooLarge { requested: u64::MAX, limit: 1 << 40 });
    let none = Arena::builder().size(4096).sources([]).build(&soft()).unwrap_err();
    assert_eq!(none, BuildError::NoSourceNamed);
    let unsafely = Arena::builder().size(4096).source(Source::Caller).build(&soft()).unwrap_err();
    assert_eq!(unsafely, BuildError::NoSourceNamed);
}

#[test]
fn unlockable_memory_is_reported_or_refused_as_configured() {
    let limit = MemlockLimit::here();
    let arena = build(64 << 20, Source::Plain).unwrap();
    if limit.left().is_none_or(|left| left >= 64 << 20) {
        assert_eq!(arena.report().residency, Residency::Locked);
        assert_eq!(arena.stats().pinned_bytes, 64 << 20);
        let vma = pages::vma_of(addr_of(&arena), arena.len()).unwrap();
        assert!(
            vma.has_flag("lo") && vma.resident < 1 << 20,
            "locked, and only as it is touched: {vma:?}"
        );
        return skipped("this user may lock 64 MiB");
    }
    let Residency::NotLocked(why @ NotLocked::Limit { requested, .. }) = arena.report().residency
    else {
        panic!("{:?}", arena.report())
    };
    assert_eq!((requested, arena.stats().pinned_bytes), (64 << 20, 0));
    assert!(why.to_string().contains("67108864 bytes requested"), "{why}");
    let required = Arena::builder()
        .size(64 << 20)
        .source(Source::Plain)
        .pinning(Pinning::Required)
        .build(&soft());
    assert!(matches!(required, Err(BuildError::NotLocked(NotLocked::Limit { .. }))));
}

fn build_with(fake: &FakeDomain, policy: MappingPolicy) -> Result<Arena, BuildError> {
    plain(policy).build_memory(false)?.attach(Box::new(fake.clone())).map_err(BuildError::Domain)
}

fn plain(policy: MappingPolicy) -> ArenaBuilder {
    Arena::builder().size(2 << 20).source(Source::Plain).mapping_policy(policy)
}

/// Between its registration and its maps, so that the domain forgets it with the memory.
#[test]
fn an_arena_with_a_memory_file_lends_it_to_its_domains() {
    let fake = FakeDomain::working();
    let build = |source| {
        let builder =
            Arena::builder().size(4096).source(source).mapping_policy(MappingPolicy::Whole);
        builder.build_memory(false).unwrap().attach(Box::new(fake.clone())).unwrap()
    };
    drop(build(Source::Memfd));
    let lent = ["register_memory", "lend_file", "map_static", "unmap", "unregister_memory"];
    assert_eq!(fake.steps(), lent);
    drop(build(Source::Plain));
    assert!(!fake.steps()[lent.len()..].contains(&"lend_file"));
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
        assert_eq!(build_with(&fake, mapping_policy).unwrap_err(), BuildError::Domain(REFUSED));
        assert_eq!(fake.steps(), steps);
    }
    assert_eq!(quarantined_here(), before);
}

#[test]
fn a_failed_build_that_leaves_memory_reachable_quarantines_it() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = FakeDomain::failing("map_static", REACHABLE);
    assert!(build_with(&fake, MappingPolicy::Whole).is_err());
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
    let arena = build_with(&fake, MappingPolicy::Whole).unwrap();
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
        let arena = build_with(&fake, MappingPolicy::PerUse).unwrap();
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
        let arena = build_with(&fake, MappingPolicy::PerUse).unwrap();
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
    use pinfold_core::page_pool::{Config, PagePool, RevokeError};
    let _alone = alone();
    let before = quarantined_here();
    let timed_out = WaitError::TimedOut { ticket: Ticket::NEVER, waited_ns: 1, polls: 1 };
    for error in [REACHABLE, BackendError::Flush(timed_out)] {
        let fake = FakeDomain::failing("unmap", error);
        let arena = build_with(&fake, MappingPolicy::PerUse).unwrap();
        let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
        let page = pool.alloc().unwrap();
        let end = pool.destroy();
        let (bytes, why) = end.reachable().unwrap();
        assert!(bytes == 64 * 4096 && matches!(why, RevokeError::Unmap(_)), "{why}");
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
