//! Each step of an arena's life fails once: nothing is left behind, or what a device may reach is quarantined.

use super::*;
use crate::Domain;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::dma_pool::Coherent;
use pinfold_core::domain::{BackendError, Reservation, StaticMapping};
use std::sync::{Arc, Mutex};

/// Does what is asked, but for one step; and writes down what was done.
struct Steps {
    fails: &'static str,
    error: Option<BackendError>,
    done: Mutex<Vec<&'static str>>,
    /// What does the steps that do not fail.
    domain: Domain,
}

#[derive(Clone)]
struct Fake(Arc<Steps>);

impl Fake {
    fn failing(fails: &'static str, error: BackendError) -> Self {
        let domain = Domain::soft().unwrap();
        Self(Arc::new(Steps { fails, error: Some(error), done: Mutex::default(), domain }))
    }

    fn step(&self, name: &'static str) -> Result<(), BackendError> {
        self.0.done.lock().unwrap().push(name);
        if self.0.fails == name { Err(self.0.error.clone().unwrap()) } else { Ok(()) }
    }

    fn done(&self) -> Vec<&'static str> {
        self.0.done.lock().unwrap().clone()
    }

    fn build(&self, mapping_policy: MappingPolicy) -> Result<Arena, BuildError> {
        Arena::builder()
            .size(2 << 20)
            .source(Source::Plain)
            .mapping_policy(mapping_policy)
            .build_memory(false)?
            .attach(Box::new(self.clone()))
            .map_err(BuildError::Domain)
    }
}

impl DomainOps for Fake {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.step("register_memory")?;
        // SAFETY: the caller's promise.
        unsafe { self.0.domain.register_memory(memory) }
    }
    fn unregister_memory(&self, memory: DmaMemory) {
        self.step("unregister_memory").unwrap();
        self.0.domain.unregister_memory(memory);
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError> {
        self.step("map_static")?;
        // SAFETY: the caller's promise.
        unsafe { DomainOps::map_static(&self.0.domain, memory) }
    }
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        self.step("reserve")?;
        self.0.domain.reserve(len, align)
    }
    fn release(&self, reservation: Reservation) {
        self.step("release").unwrap();
        drop(reservation);
    }
    unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError> {
        self.step("map_at")?;
        // SAFETY: the caller's promise.
        unsafe { DomainOps::map_at(&self.0.domain, reservation, iova, memory) }
    }
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        self.step("unmap")?;
        self.0.domain.unmap(mapping)
    }
    fn count_quarantined(&self, _bytes: u64) {
        self.step("count_quarantined").unwrap();
    }
}

const REFUSED: BackendError = BackendError::NotPages { addr: 0, len: 0 };
const STUCK: BackendError = BackendError::NotRevoked;

#[test]
fn a_build_that_fails_leaves_nothing() {
    let _alone = alone();
    let before = quarantined_here();
    for (fails, mapping_policy, done) in [
        ("register_memory", MappingPolicy::Whole, vec!["register_memory"]),
        ("map_static", MappingPolicy::Whole, vec!["register_memory", "map_static", "unregister_memory"]),
        ("reserve", MappingPolicy::PerUse, vec!["register_memory", "reserve", "unregister_memory"]),
    ] {
        let fake = Fake::failing(fails, REFUSED);
        assert_eq!(fake.build(mapping_policy).unwrap_err(), BuildError::Domain(REFUSED));
        assert_eq!(fake.done(), done);
    }
    assert_eq!(quarantined_here(), before);
}

#[test]
fn a_build_that_a_device_may_have_seen_keeps_the_memory() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = Fake::failing("map_static", STUCK);
    assert!(fake.build(MappingPolicy::Whole).is_err());
    assert_eq!(fake.done(), ["register_memory", "map_static", "count_quarantined"], "and it is not expelled");
    assert_eq!(quarantined_here() - before, 2 << 20);
}

#[test]
fn an_arena_that_cannot_be_unmapped_is_quarantined() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = Fake::failing("unmap", STUCK);
    let arena = fake.build(MappingPolicy::Whole).unwrap();
    let addr = addr_of(&arena);
    drop(arena);
    assert!(is_mapped(addr));
    assert_eq!(quarantined_here() - before, 2 << 20);
    assert_eq!(fake.done(), ["register_memory", "map_static", "unmap", "count_quarantined"]);
}

#[test]
fn a_chunk_that_cannot_be_mapped_is_freed() {
    assert!(is_gone(|| {
        let fake = Fake::failing("map_at", REFUSED);
        let arena = fake.build(MappingPolicy::PerUse).unwrap();
        assert!(arena.acquire(Order::HUGE).is_err());
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (0, 0));
        let addr = addr_of(&arena);
        drop(arena);
        assert_eq!(fake.done(), ["register_memory", "reserve", "map_at", "release", "unregister_memory"]);
        addr
    }));
}

#[test]
fn a_chunk_that_a_device_keeps_is_never_handed_out_again() {
    let _alone = alone();
    for fails in ["map_at", "unmap"] {
        let fake = Fake::failing(fails, STUCK);
        let arena = fake.build(MappingPolicy::PerUse).unwrap();
        drop(Coherent::new(&arena, 2 << 20));
        assert!(arena.alloc(4096).is_err(), "all of it was the chunk's");
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (512, 512));
        let addr = addr_of(&arena);
        drop(arena);
        assert!(is_mapped(addr));
        assert!(fake.done().contains(&"count_quarantined"));
        assert!(!fake.done().contains(&"unregister_memory"));
    }
}

/// A page pool's chunk cannot be revoked, or not verifiably: the pool reports it, the chunk is requested once,
/// and is never used again.
#[test]
fn a_chunk_that_cannot_be_hidden_is_quarantined_and_counted() {
    use pinfold_core::invalidate::{Ticket, WaitError};
    use pinfold_core::page_pool::{Config, PagePool};
    let _alone = alone();
    let before = quarantined_here();
    let timed_out = WaitError::TimedOut { ticket: Ticket::NEVER, waited_ns: 1, polls: 1 };
    for error in [STUCK, BackendError::Flush(timed_out)] {
        let fake = Fake::failing("unmap", error);
        let arena = fake.build(MappingPolicy::PerUse).unwrap();
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
        assert_eq!(fake.done().iter().filter(|&&done| done == "unmap").count(), 1);
        drop((end, arena));
        assert!(!fake.done().contains(&"unregister_memory"));
    }
    assert_eq!(quarantined_here() - before, 2 * (2 << 20));
}

/// A second domain that refuses leaves the first as it is.
#[test]
fn a_failed_second_domain_leaves_the_first_usable() {
    let before = quarantined_here();
    assert!(is_gone(|| {
        let domain = soft();
        let memory = Arena::builder().size(2 << 20).source(Source::Plain).build_unmapped().unwrap();
        let arena = memory.map_into(&domain).unwrap();
        for step in ["register_memory", "reserve"] {
            let fake = Fake::failing(step, REFUSED);
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
    for stuck_first in [false, true] {
        let before = quarantined_here();
        let domain = soft();
        let port = domain.port().unwrap();
        let fake = Fake::failing("unmap", STUCK);
        let builder = Arena::builder().size(2 << 20).source(Source::Plain);
        let memory = builder.mapping_policy(MappingPolicy::Whole).build_unmapped().unwrap();
        let addr = memory.addr();
        let stuck = || memory.attach(Box::new(fake.clone())).unwrap();
        let first = stuck_first.then(stuck);
        let iova = memory.map_into(&domain).unwrap().iova();
        let second = (!stuck_first).then(stuck);
        port.write(iova, b"early").unwrap();
        drop((first, second, memory));
        assert!(is_mapped(addr));
        assert!(port.write(iova, b"late").is_err(), "unmapped where that is possible");
        assert_eq!(quarantined_here() - before, 2 << 20);
        assert!(fake.done().contains(&"count_quarantined"));
    }
}

#[test]
fn a_domain_that_may_reach_the_memory_after_a_failed_map_quarantines_it() {
    let _alone = alone();
    let before = quarantined_here();
    let fake = Fake::failing("map_static", STUCK);
    let builder = Arena::builder().size(2 << 20).source(Source::Plain);
    let memory = builder.mapping_policy(MappingPolicy::Whole).build_unmapped().unwrap();
    let domain = soft();
    let arena = memory.map_into(&domain).unwrap();
    assert_eq!(memory.attach(Box::new(fake.clone())).unwrap_err(), STUCK);
    let (addr, iova) = (memory.addr(), arena.iova());
    drop((memory, arena));
    assert!(is_mapped(addr) && domain.port().unwrap().write(iova, b"late").is_err());
    assert_eq!(quarantined_here() - before, 2 << 20);
}
