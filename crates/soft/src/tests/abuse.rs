//! Use at the limits: configurations of any numbers, handles dropped in any order and forgotten,
//! many owners. Every request is refused or works; nothing panics, and all that was returned is
//! available again.

use super::harness::{Arena, PAGE, Page};
use crate::{Effect, Random, SoftConfig, SoftIommu, Stage, domain};
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange, PageSize};
use pinfold_core::domain::{BackendError, Domain, Revoked};
use pinfold_core::invalidate::WaitLimit;
use std::sync::Arc;
use std::time::Duration;

/// Registers `arena` for as long as `act` runs.
fn with_memory<T>(domain: &Domain, arena: &Arc<Arena>, act: impl FnOnce() -> T) -> T {
    // SAFETY: the arena lives until it is unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let done = act();
    domain.unregister_memory(arena.memory());
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
