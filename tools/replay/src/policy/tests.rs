//! Every policy, with a device behind it: what is mapped is reached, and what a policy promises is
//! kept.

mod random;

use super::*;
use pinfold::soft::{FaultKind, Port, SoftConfig};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, PhysRange};
use std::sync::Arc;

const MEMORY: usize = 4 << 20;

fn memory() -> Arc<Memory> {
    Memory::new(MEMORY).unwrap()
}

fn create(kind: PolicyKind, memory: &Arc<Memory>) -> Box<dyn Policy> {
    kind.create(memory, &SoftConfig::default()).unwrap()
}

fn page(memory: &Memory, number: u64) -> PhysRange {
    memory.range(number * 4096, 4096).unwrap()
}

fn fault(result: Result<(), pinfold::soft::Fault>) -> Option<FaultKind> {
    result.err().map(|fault| fault.kind)
}

/// Returns whether a device reaches an address for writes.
fn reaches(port: &Port, iova: Iova) -> bool {
    port.write(iova, &[1; 8]).is_ok()
}

#[test]
fn names_are_unique_and_found() {
    for kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::named(kind.name()), Some(kind));
    }
    assert_eq!(PolicyKind::named("magazine"), None);
}

#[test]
fn a_static_mapping_is_reached_before_and_after() {
    let memory = memory();
    let policy = create(PolicyKind::Static, &memory);
    let (port, mut thread) = (policy.port(), policy.thread());
    let page = page(&memory, 3);
    let (mut freed, mut places) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let dma = thread.map(page, Access::WRITE).unwrap();
        places.push(dma.iova());
        assert!(reaches(&port, dma.iova().start()));
        thread.unmap(dma, &mut freed).unwrap();
        assert!(reaches(&port, places[0].start()));
    }
    assert_eq!((freed, places[0]), (vec![page, page], places[1]));
    assert_eq!(policy.stats().invalidations, 0);
}

#[test]
fn a_device_has_the_access_that_it_was_given() {
    for kind in PolicyKind::ALL {
        let memory = memory();
        let policy = create(kind, &memory);
        let (port, mut thread) = (policy.port(), policy.thread());
        let read = thread.map(page(&memory, 3), Access::READ).unwrap();
        let write = thread.map(memory.range(0x10000, 0x3000).unwrap(), Access::WRITE).unwrap();
        let last = Iova::new(write.iova().end().raw() - 8);
        assert_eq!(fault(port.write(last, &[7; 8])), None, "{}", kind.name());
        assert_eq!(fault(port.read(read.iova().start(), &mut [0; 8])), None, "{}", kind.name());
        let one_way = !matches!(kind, PolicyKind::Identity | PolicyKind::None);
        let expected = one_way.then_some(FaultKind::NoWrite);
        assert_eq!(fault(port.write(read.iova().start(), &[0; 8])), expected, "{}", kind.name());
        let both = thread.map(memory.range(0x10000, 0x3000).unwrap(), Access::all()).unwrap();
        let mut found = [0; 8];
        port.read(Iova::new(both.iova().end().raw() - 8), &mut found).unwrap();
        assert_eq!(found, [7; 8], "{}: both mappings are of the same memory", kind.name());
        let mut freed = Vec::new();
        for dma in [read, write, both] {
            thread.unmap(dma, &mut freed).unwrap();
        }
        thread.settle(&mut freed).unwrap();
        assert_eq!(freed.len(), 3);
    }
}

#[test]
fn after_a_strict_unmap_no_access_succeeds() {
    for kind in PolicyKind::ALL.into_iter().filter(|kind| kind.is_strict()) {
        let memory = memory();
        let policy = create(kind, &memory);
        let (port, mut thread) = (policy.port(), policy.thread());
        for number in 0..200 {
            let dma = thread.map(page(&memory, number), Access::WRITE).unwrap();
            let iova = dma.iova().start();
            assert!(reaches(&port, iova));
            let mut freed = Vec::new();
            thread.unmap(dma, &mut freed).unwrap();
            assert!(!reaches(&port, iova), "{}: reached after unmap {number}", kind.name());
            assert_eq!(freed, [page(&memory, number)]);
        }
        let stats = policy.stats();
        assert_eq!((stats.invalidations, stats.reachable_ns), (200, 0), "{}", kind.name());
        assert!(!stats.reused_while_reachable);
    }
}

#[test]
fn memory_that_pinfold_frees_is_unreachable() {
    for kind in [PolicyKind::Revoke, PolicyKind::Batch] {
        let memory = memory();
        let policy = create(kind, &memory);
        let (port, mut thread) = (policy.port(), policy.thread());
        let (mut freed, mut found, mut iovas) = (Vec::new(), 0, Vec::new());
        for number in 0..500 {
            let dma = thread.map(page(&memory, number), Access::WRITE).unwrap();
            assert!(reaches(&port, dma.iova().start()));
            iovas.push(dma.iova().start());
            thread.unmap(dma, &mut freed).unwrap();
            for range in &freed[found..] {
                let offset = range.start().raw() - memory.whole().start().raw();
                let iova = iovas[usize::try_from(offset / 4096).unwrap()];
                assert!(!reaches(&port, iova), "{}: {range} was freed too early", kind.name());
            }
            found = freed.len();
        }
        assert!(found > 100, "{}: only {found} of 500 freed on the way", kind.name());
        thread.settle(&mut freed).unwrap();
        freed.sort_by_key(PhysRange::start);
        assert_eq!(freed, (0..500).map(|number| page(&memory, number)).collect::<Vec<_>>());
        drop(thread);
        let stats = policy.stats();
        assert!(!stats.reused_while_reachable && stats.reachable_ns > 0);
        assert!((4096..=80 * 4096).contains(&stats.held_bytes_peak), "{}: {stats}", kind.name());
        if kind == PolicyKind::Batch {
            // One for the rest, and one for the table page of the owner's window.
            assert!(stats.waits <= 500 / 16 + 2, "{}: {stats}", kind.name());
        }
    }
}

/// Why the baselines are no promise: memory is free and reachable, until their queue is flushed.
#[test]
fn lazy_policies_free_memory_that_a_device_reaches() {
    for kind in [PolicyKind::Tree2015, PolicyKind::TreeMerged, PolicyKind::Lazy] {
        let memory = memory();
        let policy = create(kind, &memory);
        let (port, mut thread) = (policy.port(), policy.thread());
        let mut reached = 0;
        // The timer may flush between any two calls, but not each time.
        for number in 0..20 {
            let dma = thread.map(page(&memory, number), Access::WRITE).unwrap();
            let iova = dma.iova().start();
            assert!(reaches(&port, iova));
            let mut freed = Vec::new();
            thread.unmap(dma, &mut freed).unwrap();
            assert_eq!(freed, [page(&memory, number)]);
            reached += u32::from(reaches(&port, iova));
            thread.settle(&mut freed).unwrap();
            assert!(!reaches(&port, iova), "{}: reached after a flush", kind.name());
        }
        assert!(reached > 0, "{}", kind.name());
        assert!(policy.stats().reused_while_reachable && policy.stats().reachable_ns > 0);
    }
}

#[test]
fn the_timer_flushes_what_no_thread_does() {
    for kind in [PolicyKind::Tree2015, PolicyKind::Lazy] {
        let memory = memory();
        let policy = create(kind, &memory);
        let (port, mut thread) = (policy.port(), policy.thread());
        let dma = thread.map(page(&memory, 0), Access::WRITE).unwrap();
        let iova = dma.iova().start();
        assert!(reaches(&port, iova));
        thread.unmap(dma, &mut Vec::new()).unwrap();
        let start = std::time::Instant::now();
        while reaches(&port, iova) {
            assert!(start.elapsed().as_secs() < 60, "{}: not flushed", kind.name());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// A queue that is full flushes, and its addresses are used again.
#[test]
fn full_queues_flush_once_for_all() {
    for (kind, entries) in [(PolicyKind::Tree2015, 250), (PolicyKind::Lazy, 256)] {
        let memory = memory();
        let policy = create(kind, &memory);
        let mut thread = policy.thread();
        let began = std::time::Instant::now();
        for _ in 0..10 * entries {
            let dma = thread.map(page(&memory, 0), Access::WRITE).unwrap();
            thread.unmap(dma, &mut Vec::new()).unwrap();
        }
        let stats = policy.stats();
        // The timer, every 10 ms, and CPUs that the thread has moved between, add some; the latter
        // may also have room left.
        let most = 100 + u64::try_from(began.elapsed().as_millis() / 10).unwrap();
        assert!((3..most).contains(&stats.waits), "{}: {stats}", kind.name());
        assert!(stats.held_bytes_peak >= 200 * 4096, "{}: {stats}", kind.name());
        assert!(stats.entries < 1000, "{}: {stats}", kind.name());
    }
}

#[test]
fn bad_ranges_are_refused() {
    for kind in PolicyKind::ALL {
        let (mine, other) = (memory(), memory());
        let policy = create(kind, &mine);
        let mut thread = policy.thread();
        let odd = mine.range(0x1001, 0x1000).unwrap();
        for range in [odd, mine.range(0x1000, 100).unwrap(), other.whole()] {
            let error = thread.map(range, Access::READ).unwrap_err();
            assert!(matches!(error, PolicyError::Outside { .. }), "{}: {error}", kind.name());
        }
        assert!(error_names_the_limit(thread.map(other.whole(), Access::READ)));
    }
    assert!(Memory::new(usize::MAX).is_err() && memory().range(0, 0).is_none());
}

fn error_names_the_limit(result: Result<Dma, PolicyError>) -> bool {
    result.unwrap_err().to_string().contains("policy's memory phys:")
}

/// A page that is mapped twice stays reachable until both are unmapped.
#[test]
fn identity_counts_the_mappings_of_a_page() {
    let memory = memory();
    let policy = create(PolicyKind::Identity, &memory);
    let (port, mut thread) = (policy.port(), policy.thread());
    let pages = memory.range(0x1000, 0x3000).unwrap();
    let all = thread.map(pages, Access::WRITE).unwrap();
    let one = thread.map(page(&memory, 2), Access::WRITE).unwrap();
    assert_eq!(
        (one.iova().start().raw(), policy.stats().entries),
        (memory.whole().start().raw() + 0x2000, 3)
    );
    let iovas: Vec<Iova> = (0..3).map(|i| Iova::new(all.iova().start().raw() + i * 4096)).collect();
    thread.unmap(all, &mut Vec::new()).unwrap();
    assert_eq!(
        iovas.iter().map(|iova| reaches(&port, *iova)).collect::<Vec<_>>(),
        [false, true, false]
    );
    thread.unmap(one, &mut Vec::new()).unwrap();
    assert!(!reaches(&port, iovas[1]) && policy.stats().entries == 0);
}
