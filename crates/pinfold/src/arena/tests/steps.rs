//! Each step of an arena's life fails once: nothing is left behind, or what a device may reach is kept for ever.

use super::*;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::dma_pool::Coherent;
use pinfold_core::domain::BackendError;
use std::sync::{Arc as Shared, Mutex};

/// Does what is asked, but for one step; and writes down what was done.
#[derive(Default)]
struct Steps {
    fails: &'static str,
    error: Option<BackendError>,
    done: Mutex<Vec<&'static str>>,
}

#[derive(Clone)]
struct Fake(Shared<Steps>);

impl Fake {
    fn failing(fails: &'static str, error: BackendError) -> Self {
        Self(Shared::new(Steps { fails, error: Some(error), done: Mutex::default() }))
    }

    fn step(&self, name: &'static str) -> Result<(), BackendError> {
        self.0.done.lock().unwrap().push(name);
        if self.0.fails == name { Err(self.0.error.clone().unwrap()) } else { Ok(()) }
    }

    fn done(&self) -> Vec<&'static str> {
        self.0.done.lock().unwrap().clone()
    }

    fn build(&self, exposure: Exposure) -> Result<Arena, BuildError> {
        Arena::builder()
            .size(2 << 20)
            .source(Source::Plain)
            .exposure(exposure)
            .build_in(Box::new(self.clone()))
    }
}

fn iova(len: u64) -> IovaRange {
    IovaRange::new(Iova::new(1 << 30), len).unwrap()
}

impl Space for Fake {
    unsafe fn admit(&self, _memory: DmaMemory) -> Result<(), BackendError> {
        self.step("admit")
    }
    fn expel(&self, _memory: DmaMemory) {
        self.step("expel").unwrap();
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<IovaRange, BackendError> {
        self.step("map_static").map(|()| iova(memory.len() as u64))
    }
    fn unmap_static(&self, _iova: IovaRange) -> Result<(), BackendError> {
        self.step("unmap_static")
    }
    fn reserve(&self, len: u64, _align: u64) -> Result<IovaRange, BackendError> {
        self.step("reserve").map(|()| iova(len))
    }
    fn release(&self, _iova: IovaRange) {
        self.step("release").unwrap();
    }
    unsafe fn map_at(&self, _iova: IovaRange, _memory: DmaMemory) -> Result<(), BackendError> {
        self.step("map_at")
    }
    fn unmap_at(&self, _iova: IovaRange) -> Result<(), BackendError> {
        self.step("unmap_at")
    }
    fn note_quarantined(&self, _bytes: u64) {
        self.step("note_quarantined").unwrap();
    }
}

const REFUSED: BackendError = BackendError::NotPages { addr: 0, len: 0 };
const STUCK: BackendError = BackendError::NotRevoked;

#[test]
fn a_build_that_fails_leaves_nothing() {
    let _alone = alone();
    let leaked = leaked_here();
    for (fails, exposure, done) in [
        ("admit", Exposure::Whole, vec!["admit"]),
        ("map_static", Exposure::Whole, vec!["admit", "map_static", "expel"]),
        ("reserve", Exposure::PerUse, vec!["admit", "reserve", "expel"]),
    ] {
        let fake = Fake::failing(fails, REFUSED);
        assert_eq!(fake.build(exposure).unwrap_err(), BuildError::Domain(REFUSED));
        assert_eq!(fake.done(), done);
    }
    assert_eq!(leaked_here(), leaked);
}

#[test]
fn a_build_that_a_device_may_have_seen_keeps_the_memory() {
    let _alone = alone();
    let leaked = leaked_here();
    let fake = Fake::failing("map_static", STUCK);
    assert!(fake.build(Exposure::Whole).is_err());
    assert_eq!(fake.done(), ["admit", "map_static", "note_quarantined"], "and it is not expelled");
    assert_eq!(leaked_here() - leaked, 2 << 20);
}

#[test]
fn an_arena_that_can_not_be_taken_from_its_devices_is_kept() {
    let _alone = alone();
    let leaked = leaked_here();
    let fake = Fake::failing("unmap_static", STUCK);
    let arena = fake.build(Exposure::Whole).unwrap();
    let addr = addr_of(&arena);
    drop(arena);
    assert!(is_mapped(addr));
    assert_eq!(leaked_here() - leaked, 2 << 20);
    assert_eq!(fake.done(), ["admit", "map_static", "unmap_static", "note_quarantined"]);
}

#[test]
fn a_chunk_that_can_not_be_mapped_goes_back_to_its_zone() {
    assert!(is_gone(|| {
        let fake = Fake::failing("map_at", REFUSED);
        let arena = fake.build(Exposure::PerUse).unwrap();
        assert!(arena.acquire(Order::HUGE).is_err());
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (0, 0));
        let addr = addr_of(&arena);
        drop(arena);
        assert_eq!(fake.done(), ["admit", "reserve", "map_at", "release", "expel"]);
        addr
    }));
}

#[test]
fn a_chunk_that_a_device_keeps_is_never_handed_out_again() {
    let _alone = alone();
    for fails in ["map_at", "unmap_at"] {
        let fake = Fake::failing(fails, STUCK);
        let arena = fake.build(Exposure::PerUse).unwrap();
        drop(Coherent::new(&arena, 2 << 20));
        assert!(arena.alloc(4096).is_err(), "all of it was the chunk's");
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (512, 512));
        let addr = addr_of(&arena);
        drop(arena);
        assert!(is_mapped(addr));
        assert!(fake.done().contains(&"note_quarantined"));
        assert!(!fake.done().contains(&"expel"));
    }
}

/// A page pool's chunk can not be taken from the device, or not be seen to be: the pool says so, the chunk is asked for once,
/// and is never used again.
#[test]
fn a_chunk_that_can_not_be_hidden_is_lost_and_counted() {
    use pinfold_core::invalidate::{Ticket, WaitError};
    use pinfold_core::page_pool::{Config, PagePool};
    let _alone = alone();
    let leaked = leaked_here();
    let timed_out = WaitError::TimedOut { ticket: Ticket::NEVER, waited_ns: 1, polls: 1 };
    for error in [STUCK, BackendError::Flush(timed_out)] {
        let fake = Fake::failing("unmap_at", error);
        let arena = fake.build(Exposure::PerUse).unwrap();
        let mut pool = PagePool::new(arena.clone(), "rx", Config::default()).unwrap();
        let page = pool.alloc().unwrap();
        let end = pool.destroy();
        let (bytes, why) = end.reachable().unwrap();
        assert!(bytes == 64 * 4096 && why.is_for_ever(), "{why}");
        page.memory().write_u64(0, 1).unwrap();
        drop(page);
        assert_eq!(end.pages_out(), 0);
        let stats = arena.stats();
        assert_eq!((stats.frames_in_use, stats.frames_quarantined), (64, 64));
        assert_eq!(fake.done().iter().filter(|&&done| done == "unmap_at").count(), 1);
        drop((end, arena));
        assert!(!fake.done().contains(&"expel"));
    }
    assert_eq!(leaked_here() - leaked, 2 * (2 << 20));
}
