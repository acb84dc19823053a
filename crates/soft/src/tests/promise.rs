//! The mistakes that the random adversary finds, step by step: each case correct, and with a known
//! mistake.

use super::harness::{Arena, PAGE};
use crate::{Effect, FaultKind, Port, SoftConfig, SoftIommu, domain};
use pinfold_core::access::{Access, Bidirectional};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{Backend, BackendError, TableBackend};
use pinfold_core::invalidate::{WaitError, WaitLimit};
use pinfold_core::known_bad::{self, Mistake};
use pinfold_core::table::{Table, TablePages, VtdSecondStage};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const US: Duration = Duration::from_micros(1);

/// Calls `act` while this thread makes `mistake`.
fn with_mistake<T>(mistake: Mistake, act: impl FnOnce() -> T) -> T {
    known_bad::make(Some(mistake));
    let made = act();
    known_bad::make(None);
    made
}

fn word(port: &Port, at: Iova) -> Result<u32, FaultKind> {
    port.read_u32_acquire(at).map_err(|fault| fault.kind)
}

/// How long a flush is in flight.
const IN_FLIGHT: Duration = Duration::from_millis(20);

/// Repeats what has to happen while a flush is in flight until it did, on a machine where a thread
/// may have to wait for longer.
fn in_flight<R>(mut attempt: impl FnMut() -> Option<R>) -> R {
    (0..1000).find_map(|_| attempt()).unwrap()
}

fn at(start: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), pages * PAGE as u64).unwrap()
}

/// Windows of 2 MiB have a table page each, and there are just enough pages for two of them. The
/// device walks into the first and caches its table page; the first is revoked, and the second is
/// mapped, which needs that page. Returns what the device then reads in the first, at an address
/// that it has not accessed before, and whether the flush may have been in flight then: without a
/// mistake the second map waits for it.
fn walk_through_a_retired_table_page() -> (Result<u32, FaultKind>, bool) {
    let (effect, flush_cost) = (Effect::AtLast, IN_FLIGHT);
    let config = SoftConfig { effect, flush_cost, table_bytes: 5 * PAGE, ..SoftConfig::default() };
    let iommu = SoftIommu::new(config).unwrap();
    // SAFETY: the table holds the IOMMU by its queue.
    let pages = TablePages::new(unsafe { iommu.table_pages() }, iommu.table_phys()).unwrap();
    let table = Table::<VtdSecondStage>::new(pages, 4).unwrap();
    let backend = TableBackend::new("test", iommu.queue(), table);
    iommu.attach(backend.root(), 4);
    let arena = Arena::new(7);
    let (first, second, others) =
        (at(0x4000_0000, 2), at(0x4020_0000, 2), [0, 1, 2].map(|n| at(0x4040_0000 + n * 4096, 1)));
    for (page, word) in (100..107).enumerate() {
        arena.memory().write_u32(page * PAGE, word).unwrap();
    }
    let part = |first, pages| arena.memory().part(first * PAGE, pages * PAGE).unwrap();
    // SAFETY: the arena lives until it is unregistered below.
    unsafe { backend.register_memory(arena.memory()) }.unwrap();
    for (page, other) in (4..).zip(others) {
        backend.map(other, part(page, 1), Access::READ).unwrap();
    }
    backend.map(first, part(0, 2), Access::READ).unwrap();
    let port = iommu.port();
    assert_eq!(word(&port, first.start()), Ok(100));
    let revoke = |range| backend.revoke(&mut std::iter::once((range, None))).unwrap();
    let began = Instant::now();
    let ticket = revoke(first);
    // Each revocation reclaims the retired pages that can be.
    let (_, _) = (revoke(others[0]), revoke(others[1]));
    backend.map(second, part(2, 2), Access::READ).unwrap();
    let found = word(&port, first.start().checked_add(PAGE as u64).unwrap());
    let in_flight = began.elapsed() < IN_FLIGHT;
    backend.wait(ticket, None).unwrap();
    assert_eq!(word(&port, first.start()), Err(FaultKind::NotMapped), "after the flush");
    assert_eq!(word(&port, second.start()), Ok(102));
    backend.unregister_memory(arena.memory());
    iommu.detach();
    (found, in_flight)
}

#[test]
fn a_table_page_is_not_reused_before_its_flush() {
    assert_eq!(walk_through_a_retired_table_page().0, Err(FaultKind::NotMapped));
    let early = with_mistake(Mistake::TablePageEarly, || {
        in_flight(|| {
            let (found, in_flight) = walk_through_a_retired_table_page();
            in_flight.then_some(found)
        })
    });
    assert_eq!(early, Ok(103), "the device reads a page that was never mapped there");
}

/// Maps a second buffer while the flush of a first is in flight. Returns whether they had the same
/// addresses, and what a device reads there; `None` if it may have been too late to be in flight.
fn map_while_a_flush_is_in_flight() -> Option<(bool, Result<u32, FaultKind>)> {
    let (effect, flush_cost) = (Effect::AtLast, IN_FLIGHT);
    let config = SoftConfig { effect, flush_cost, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    let arena = Arena::new(2);
    arena.memory().write_u32(0, 100).unwrap();
    arena.memory().write_u32(PAGE, 101).unwrap();
    // SAFETY: the arena lives until it is unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let port = bus.port();
    let first = domain.map(arena.page(0), Bidirectional).unwrap();
    assert_eq!(word(&port, first.iova().start()), Ok(100));
    let began = Instant::now();
    let first = first.revoke();
    let second = domain.map(arena.page(1), Bidirectional).unwrap();
    let found = (second.iova() == first.iova(), word(&port, second.iova().start()));
    let in_flight = began.elapsed() < IN_FLIGHT;
    drop((first, second));
    domain.unregister_memory(arena.memory());
    in_flight.then_some(found)
}

#[test]
fn an_iova_is_not_reused_before_its_flush() {
    assert_eq!(in_flight(map_while_a_flush_is_in_flight), (false, Ok(101)));
    let early = with_mistake(Mistake::IovaEarly, || in_flight(map_while_a_flush_is_in_flight));
    assert_eq!(early, (true, Ok(100)), "the device reads the previous buffer, not 101");
}

#[test]
fn a_flush_that_hangs_is_an_error_and_its_buffer_is_not_reused() {
    let config = SoftConfig { hang_from: Some(2), timeout: 2000 * US, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    let arena = Arena::new(3);
    // SAFETY: the arena lives until it is unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    domain.map(arena.page(0), Bidirectional).unwrap().unmap().unwrap();
    let mapped = domain.map(arena.page(0), Bidirectional).unwrap();
    let iova = mapped.iova();
    let error = mapped.unmap().err();
    assert!(matches!(error, Some(BackendError::Flush(WaitError::TimedOut { .. }))), "{error:?}");
    drop(domain.map(arena.page(1), Bidirectional).unwrap());
    let other = domain.map(arena.page(2), Bidirectional).unwrap();
    assert!(!other.iova().overlaps(&iova));
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.deferred_bytes, stats.unmaps), (2, 8192, 1));
    assert!(Arc::strong_count(&arena) > 3, "the payloads are held, not dropped");
    domain.unregister_memory(arena.memory());
    drop(other);
    // Unregistered memory faults although no flush ever completes: it may be freed now.
    assert_eq!(word(&bus.port(), iova.start()), Err(FaultKind::NotMapped));
}

/// A queue that never answers costs a waiter its own limit: it gets the buffer's `Revoked` back,
/// and the domain goes on.
#[test]
fn a_wait_with_a_limit_returns_late_flushes() {
    let (domain, bus) = domain(SoftConfig { hang_from: Some(1), ..SoftConfig::default() }).unwrap();
    let mut owner = domain.local();
    let pages = |n: usize| (0..n).map(|_| bus.alloc_pages(1).unwrap());
    let mut revoked = Vec::new();
    let mappings = owner.map_many(pages(4), Bidirectional).unwrap();
    owner.revoke_many(mappings, &mut revoked);
    let start = Instant::now();
    let one = revoked.pop().unwrap().wait_for(WaitLimit::within(2000 * US)).unwrap_err();
    assert!(
        matches!(one.error.late_ticket(), Some(ticket) if ticket == one.revoked.as_ref().unwrap().ticket())
    );
    revoked.extend(one.revoked);
    let late = owner.wait_many_for(revoked, WaitLimit::within(2000 * US));
    let late: Vec<_> = late.filter_map(|outcome| outcome.unwrap_err().revoked).collect();
    let waited = start.elapsed();
    assert!(
        late.len() == 4 && waited >= 4000 * US && waited < Duration::from_secs(60),
        "{waited:?}"
    );
    // Others map, and their devices read.
    let other = domain.map(pages(1).next().unwrap(), Bidirectional).unwrap();
    assert_eq!(word(&bus.port(), other.iova().start()), Ok(0));
    let stats = domain.stats();
    assert_eq!((stats.live, stats.deferred, stats.quarantined), (1, 0, 0));
}

/// A unit that dies ends all waits at once, also that for what was in flight, and once for each:
/// what cannot be quiesced is quarantined, and a wait that begins later ends too.
#[test]
fn a_queue_that_dies_is_reported_to_every_waiter_at_once() {
    const WAITERS: usize = 4;
    let (flush_cost, timeout) = (Duration::from_secs(120), Duration::from_secs(240));
    // The second batch is refused while the first is in flight.
    let config = SoftConfig {
        fail_from: Some(2),
        flush_cost,
        timeout,
        queue_depth: 4,
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let (start, ready) = (Instant::now(), Barrier::new(WAITERS));
    let errors: Vec<_> = std::thread::scope(|scope| {
        let waiter = |_| {
            scope.spawn(|| {
                let mapping = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
                ready.wait();
                mapping.revoke().wait().err().unwrap()
            })
        };
        let waiters: Vec<_> = (0..WAITERS).map(waiter).collect();
        waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect()
    });
    for failed in errors {
        let is_dead = matches!(failed.error, BackendError::Flush(WaitError::UnitFailed { .. }));
        assert!(is_dead && failed.revoked.is_none(), "{failed}");
    }
    let late = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
    assert_eq!(word(&bus.port(), late.iova().start()), Ok(0), "maps need no flush");
    assert!(matches!(late.unmap().err(), Some(BackendError::Flush(WaitError::UnitFailed { .. }))));
    assert!(start.elapsed() < flush_cost, "nothing waited for a deadline");
    assert_eq!((domain.stats().quarantined, domain.stats().deferred), (WAITERS as u64 + 1, 0));
}
