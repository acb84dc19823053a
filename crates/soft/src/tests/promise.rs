//! The promise under misuse, step by step: the mistakes that the random adversary finds, each case correct
//! and with a known mistake; many owners whose requests are refused or work, without a panic.

use super::harness::{Arena, PAGE, Page};
use crate::{Effect, FaultKind, Port, Random, SoftConfig, SoftIommu, Stage, domain};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange, PageSize};
use pinfold_core::domain::{
    Backend, BackendError, Domain, Revocation, Revoked, TableBackend, Wait,
};
use pinfold_core::invalidate::{WaitError, WaitLimit};
use pinfold_core::known_bad::{self, Mistake};
use pinfold_core::table::{Table, TablePages, VtdSecondStage};
use std::sync::{Arc, Barrier};
use std::task::Poll;
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

/// The time that a flush is in flight.
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
    let pages = unsafe { iommu.table_pages() };
    // SAFETY: where the walker finds them; this is the only table.
    let pages = unsafe { TablePages::new(pages, iommu.table_phys()) }.unwrap();
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
        backend.map(other, part(page, 1), Access::READ, None).unwrap();
    }
    backend.map(first, part(0, 2), Access::READ, None).unwrap();
    let port = iommu.port();
    assert_eq!(word(&port, first.start()), Ok(100));
    let revoke = |range| {
        let revocation = Revocation { range, window: None };
        backend.revoke(revocation, &mut std::iter::empty()).unwrap()
    };
    let began = Instant::now();
    let ticket = revoke(first);
    // Each revocation reclaims the retired pages that can be.
    let (_, _) = (revoke(others[0]), revoke(others[1]));
    backend.map(second, part(2, 2), Access::READ, None).unwrap();
    let found = word(&port, first.start().checked_add(PAGE as u64).unwrap());
    let in_flight = began.elapsed() < IN_FLIGHT;
    assert!(matches!(backend.wait(ticket, Wait::ToDeadline), Poll::Ready(Ok(()))));
    assert_eq!(word(&port, first.start()), Err(FaultKind::NotMapped), "after the flush");
    assert_eq!(word(&port, second.start()), Ok(102));
    backend.unregister_memory(arena.memory()).unwrap();
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
    domain.unregister_memory(arena.memory()).unwrap();
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
    domain.unregister_memory(arena.memory()).unwrap();
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

/// Registers `arena` for as long as `act` runs.
fn with_memory<T>(domain: &Domain, arena: &Arc<Arena>, act: impl FnOnce() -> T) -> T {
    // SAFETY: the arena lives until it is unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let done = act();
    domain.unregister_memory(arena.memory()).unwrap();
    done
}

/// Maps, accesses, revokes and waits, if the configuration can be had at all.
fn try_out(config: SoftConfig) -> Result<(), BackendError> {
    let (domain, bus) = domain(config)?;
    let arena = Arena::new(3);
    let port = bus.port();
    with_memory(&domain, &arena, || {
        let mut owner = domain.local();
        let mapping = domain.map(arena.page(0), Bidirectional)?;
        let own = owner.map(arena.pages(1, 2), FromDevice)?;
        let _ = port.read_u32_acquire(mapping.iova().start());
        let limit = WaitLimit { time_ns: 1_000_000, polls: 10 };
        let (first, second) = (mapping.revoke(), owner.revoke(own));
        let ends = [first.wait_for(limit).is_ok(), owner.wait_for(second, limit).is_ok()];
        domain.release_late();
        let late = ends.iter().filter(|end| !**end).count() as u64;
        let kept = domain.stats().deferred + domain.stats().quarantined;
        // Ten polls may take less than a flush, which then completes before the domain looks for
        // what is late.
        assert!(kept <= late, "{late} waits ended early, and the domain keeps {kept}");
        Ok(())
    })
}

#[test]
fn any_numbers_in_a_configuration_are_refused_or_work() {
    let (none, long) = (Duration::ZERO, Duration::MAX);
    let basic = || SoftConfig { timeout: Duration::from_millis(1), ..SoftConfig::default() };
    let mut configs = Vec::new();
    for number in [0, 1, 2, 3, 4, 5, 6, 63, 64, 65, 255] {
        configs.push(SoftConfig { levels: number, ..basic() });
        configs.push(SoftConfig { levels: number, stage: Stage::First, ..basic() });
        configs.push(SoftConfig { phys_bits: number.into(), ..basic() });
    }
    for number in [0, 1, 4095, 4096, 8192, usize::MAX / 2, usize::MAX] {
        configs.push(SoftConfig { table_bytes: number, ..basic() });
        configs.push(SoftConfig { queue_entries: number, ..basic() });
        configs.push(SoftConfig { contiguous_bytes: Some(number as u64), ..basic() });
    }
    for number in [0, 1, 3, usize::MAX] {
        configs.push(SoftConfig { iotlb_entries: number, ..basic() });
    }
    for number in [0, 1, u64::MAX] {
        configs.push(SoftConfig { queue_depth: number, ..basic() });
        configs.push(SoftConfig { hang_from: Some(number), ..basic() });
        configs.push(SoftConfig { fail_from: Some(number), ..basic() });
        configs.push(SoftConfig { abort_one_in: Some(number), ..basic() });
        configs.push(SoftConfig { seed: number, late_by: Duration::from_nanos(number), ..basic() });
    }
    for effect in [Effect::AtOnce, Effect::AtLast, Effect::AtRandom] {
        for (flush_cost, descriptor_cost, late_by) in
            [(none, long, none), (long, none, none), (none, none, long), (long, long, long)]
        {
            configs.push(SoftConfig { flush_cost, descriptor_cost, late_by, effect, ..basic() });
        }
    }
    for timeout in [none, Duration::from_nanos(1)] {
        configs.push(SoftConfig { timeout, ..basic() });
    }
    for max_leaf in [PageSize::Size4K, PageSize::Size2M] {
        configs.push(SoftConfig { max_leaf, ..basic() });
    }
    let mut worked = 0;
    for mut config in configs {
        for caching_mode in [false, true] {
            config.caching_mode = caching_mode;
            worked += u32::from(try_out(config.clone()).is_ok());
        }
    }
    assert!(worked > 60, "{worked}");
}

/// Thousands of owners, dropped before, between and after their mappings, which other threads end.
#[test]
fn thousands_of_owners_leave_nothing_behind() {
    const OWNERS: usize = 2000;
    let (domain, _bus) =
        domain(SoftConfig { flush_cost: Duration::ZERO, ..SoftConfig::default() }).unwrap();
    let arena = Arena::new(OWNERS);
    let before = domain.stats();
    with_memory(&domain, &arena, || {
        let mut random = Random::new(5);
        let (mut owners, mut mappings) = (Vec::new(), Vec::new());
        for page in 0..OWNERS {
            let mut owner = domain.local();
            mappings.push(owner.map(arena.page(page), FromDevice).unwrap());
            match random.below(3) {
                0 => drop(owner),
                _ => owners.push(owner),
            }
        }
        std::thread::scope(|scope| {
            let (second, shared) = (mappings.split_off(OWNERS / 2), &domain);
            let kept = owners.split_off(owners.len() / 2);
            scope.spawn(move || {
                let mut revoked: Vec<Revoked<Page>> = Vec::new();
                shared.revoke_many(mappings, &mut revoked);
                drop(owners);
                revoked.into_iter().for_each(|one| drop(one.wait().unwrap()));
            });
            scope.spawn(move || {
                for (at, mapping) in second.into_iter().enumerate() {
                    match at % 3 {
                        0 => drop(mapping),
                        1 => drop(mapping.revoke()),
                        _ => drop(mapping.unmap().unwrap()),
                    }
                }
                drop(kept);
            });
        });
    });
    // The buffers retired last are reclaimed by the next operations.
    with_memory(&domain, &arena, || {
        for _ in 0..200 {
            drop(domain.map(arena.page(0), ToDevice).unwrap().unmap().unwrap());
        }
    });
    let after = domain.stats();
    assert_eq!((after.live, after.held_bytes, after.owners, after.windows), (0, 0, 0, 0));
    assert_eq!((after.deferred, after.quarantined), (0, 0));
    assert_eq!(after.iova_extents, before.iova_extents);
    let pages = after.backend.table_pages;
    assert!(pages <= 2 * 64 + 4, "{pages} table pages for nothing but the kept ones");
}

/// Forgotten mappings stay mapped and allocated; everything else goes on.
#[test]
fn forgotten_handles_and_mappings_disturb_nothing_else() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let arena = Arena::new(8);
    with_memory(&domain, &arena, || {
        let mut owner = domain.local();
        let kept = owner.map(arena.page(0), FromDevice).unwrap();
        std::mem::forget(owner.map(arena.page(1), FromDevice).unwrap());
        let revoked = owner.map(arena.page(2), FromDevice).unwrap();
        let at = revoked.iova();
        std::mem::forget(owner.revoke(revoked));
        std::mem::forget(owner);
        let mut other = domain.local();
        let live: Vec<_> =
            (3..8).map(|page| other.map(arena.page(page), FromDevice).unwrap()).collect();
        assert!(
            live.iter()
                .all(|mapping| !mapping.iova().overlaps(&at)
                    && !mapping.iova().overlaps(&kept.iova()))
        );
        // Waits are of a ticket, so those of others complete what was forgotten too.
        drop(other.unmap(kept).unwrap());
        assert!(bus.port().read_u32_acquire(at.start()).is_err());
        let mut revoked = Vec::new();
        other.revoke_many(live, &mut revoked);
        let ended = other
            .wait_many_for(revoked, WaitLimit::within(Duration::from_secs(9)))
            .filter(Result::is_ok);
        assert_eq!(ended.count(), 5);
        let stats = domain.stats();
        assert_eq!((stats.live, stats.held_bytes, stats.quarantined), (1, PAGE as u64, 0));
    });
}

/// A batch of which any one is refused leaves no address, window or table page behind.
#[test]
fn a_refused_batch_leaves_nothing_wherever_it_is_refused() {
    let (domain, _bus) =
        domain(SoftConfig { flush_cost: Duration::ZERO, ..SoftConfig::default() }).unwrap();
    let (arena, missing) = (Arena::new(600), Arena::new(1));
    let mut refused = 0;
    with_memory(&domain, &arena, || {
        for count in [1, 2, 300, 600] {
            for at in [0, count / 2, count - 1] {
                let mut owner = domain.local();
                let page = |n: usize| if n == at { missing.page(0) } else { arena.page(n) };
                let failed = owner.map_many((0..count).map(page), FromDevice).unwrap_err();
                assert_eq!((failed.index, failed.payloads.len()), (at, count));
                let stats = domain.stats();
                assert_eq!(
                    (stats.live, stats.held_bytes, stats.deferred, stats.quarantined),
                    (0, 0, 0, 0)
                );
                refused += 1;
                assert_eq!(stats.refused, refused);
                let again = owner.map_many((0..count).map(|n| arena.page(n)), FromDevice).unwrap();
                drop(again);
                drop(owner);
                assert_eq!(domain.stats().windows, 0);
            }
        }
    });
}

/// Table memory or addresses run out in the middle of a batch: nothing of it stays mapped, and what
/// fits is mapped afterwards.
#[test]
fn a_batch_that_exhausts_tables_or_addresses_leaves_nothing() {
    const MANY: usize = 4 * 512;
    let tables = SoftConfig { table_bytes: 6 * PAGE, ..SoftConfig::default() };
    for (config, narrow) in [(tables, false), (SoftConfig::default(), true)] {
        let (domain, bus) = domain(SoftConfig { flush_cost: Duration::ZERO, ..config }).unwrap();
        if narrow {
            // All but two windows.
            for (from, to) in [(1 << 20, 4 << 30), ((4 << 30) + (4 << 20), 1 << 48)] {
                domain.reserve_range(IovaRange::new(Iova::new(from), to - from).unwrap()).unwrap();
            }
        }
        let arena = Arena::new(MANY);
        with_memory(&domain, &arena, || {
            let mut owner = domain.local();
            for refused in 1..=3 {
                let failed =
                    owner.map_many((0..MANY).map(|n| arena.page(n)), FromDevice).err().unwrap();
                assert!((1..MANY).contains(&failed.index), "{failed}");
                assert_eq!(failed.payloads.len(), MANY);
                let stats = domain.stats();
                assert_eq!(
                    (stats.live, stats.held_bytes, stats.deferred, stats.quarantined),
                    (0, 0, 0, 0)
                );
                assert_eq!(stats.refused, refused);
            }
            let fits = owner.map_many((0..256).map(|n| arena.page(n)), FromDevice).unwrap();
            assert!(
                fits.iter()
                    .all(|mapping| bus.port().write_u32_release(mapping.iova().start(), 1).is_ok())
            );
            assert!(fits.windows(2).all(|pair| pair[0].iova().end() == pair[1].iova().start()));
        });
    }
}

/// A limit of 0 waits for each; what was revoked is quiesced at once.
#[test]
fn with_a_limit_of_zero_every_revocation_is_strict() {
    let (domain, bus) =
        domain(SoftConfig { flush_cost: Duration::from_micros(50), ..SoftConfig::default() })
            .unwrap();
    domain.set_held_limit(0);
    let arena = Arena::new(4);
    let port = bus.port();
    with_memory(&domain, &arena, || {
        let mut owner = domain.local();
        for _ in 0..20 {
            let mappings = owner.map_many((0..4).map(|n| arena.page(n)), FromDevice).unwrap();
            let at: Vec<Iova> = mappings.iter().map(|mapping| mapping.iova().start()).collect();
            let _ = port.read_u32_acquire(at[0]);
            let mut revoked = Vec::new();
            owner.revoke_many(mappings, &mut revoked);
            assert!(revoked.iter().all(Revoked::is_quiesced));
            assert!(at.iter().all(|at| port.write_u32_release(*at, 1).is_err()));
            revoked.into_iter().for_each(|one| drop(owner.poll(one).unwrap()));
        }
        assert_eq!(domain.stats().limited, 20);
    });
}

/// A table without memory for anything but its root, and a device TLB of any size.
#[test]
fn tables_and_tlbs_of_any_size_can_be_asked_for() {
    let iommu = SoftIommu::new(SoftConfig { table_bytes: 0, ..SoftConfig::default() }).unwrap();
    for entries in [0, 1, 3, usize::MAX] {
        assert!(iommu.port_with_device_tlb(entries).read_u32_acquire(Iova::new(0)).is_err());
    }
}
