//! A single port: accesses, faults, counters.

use super::harness::{Arena, PAGE};
use crate::memory::to_usize;
use crate::{Effect, Fault, FaultKind, FaultReason, SoftBus, SoftConfig, SoftIommu, domain};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{BackendError, Domain, PhysTranslator};
use pinfold_core::invalidate::{Flush, Invalidator};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

fn after(iova: Iova, bytes: u64) -> Iova {
    iova.checked_add(bytes).unwrap()
}

fn kind<T>(result: Result<T, Fault>) -> Option<FaultKind> {
    result.err().map(|fault| fault.kind)
}

fn with_arena(pages: usize) -> (Domain, SoftBus, std::sync::Arc<Arena>) {
    let ((domain, bus), arena) = (domain(SoftConfig::default()).unwrap(), Arena::new(pages));
    // SAFETY: the tests unregister the arena, or drop the bus, before the arena.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    (domain, bus, arena)
}

#[test]
fn directions_are_checked_and_faults_are_logged() {
    let (domain, bus, arena) = with_arena(3);
    let port = bus.port();
    let read = domain.map(arena.page(0), ToDevice).unwrap();
    let write = domain.map(arena.page(1), FromDevice).unwrap();
    let (r, w) = (read.iova().start(), write.iova().start());
    assert_eq!(port.read(r, &mut [0; 16]), Ok(()));
    assert_eq!(port.write(r, &[1; 16]), Err(Fault { iova: r, kind: FaultKind::NoWrite }));
    assert_eq!(port.write_u32_release(w, 7), Ok(()));
    assert_eq!(arena.memory().read_u32(PAGE), Ok(7));
    assert_eq!(kind(port.read_u32_acquire(w)), Some(FaultKind::NoRead));
    assert_eq!(kind(port.read_u32_acquire(after(w, 2))), Some(FaultKind::Misaligned));
    assert_eq!(kind(port.write_u64(after(w, 4), 8)), Some(FaultKind::Misaligned));
    assert_eq!(port.write_u64(after(w, 8), 8), Ok(()));
    assert_eq!((arena.memory().read_u64(PAGE + 8), port.read_u64(r)), (Ok(8), Ok(0)));
    assert_eq!(kind(port.read(Iova::new(0), &mut [0])), Some(FaultKind::NotMapped));
    assert_eq!(kind(port.read(Iova::new(1 << 60), &mut [0])), Some(FaultKind::TooWide));
    assert_eq!(kind(port.read(Iova::new(u64::MAX), &mut [0; 2])), Some(FaultKind::TooWide));
    let faults = bus.take_faults().records;
    assert_eq!(
        (faults.len(), faults[0].reason()),
        (5, Some(FaultReason::NoWrite)),
        "two were misaligned"
    );
    drop((read, write));
    assert_eq!(kind(port.read(r, &mut [0])), Some(FaultKind::NotMapped));
    drop(port);
    assert_eq!(bus.stats().faults, 8);
    domain.unregister_memory(arena.memory()).unwrap();
}

#[test]
fn an_access_takes_effect_up_to_the_page_that_faults() {
    let (domain, bus, arena) = with_arena(2);
    let port = bus.port();
    let mapped = domain.map(arena.pages(0, 2), Bidirectional).unwrap();
    let end = mapped.iova().end();
    let from = Iova::new(end.raw() - 100);
    let fault = port.write(from, &[9; 200]).unwrap_err();
    assert_eq!(fault, Fault { iova: end, kind: FaultKind::NotMapped });
    assert_eq!(arena.memory().read_u8(2 * PAGE - 100), Ok(9));
    drop(mapped);
    domain.unregister_memory(arena.memory()).unwrap();
}

#[test]
fn memory_is_registered_once_and_as_a_whole() {
    let (domain, _bus, arena) = with_arena(2);
    let part = arena.memory().part(PAGE, PAGE).unwrap();
    // SAFETY: it is refused.
    let twice = unsafe { domain.register_memory(part) };
    assert!(matches!(twice, Err(BackendError::AlreadyRegistered { .. })));
    let stranger = Arena::new(1);
    let refused = domain.map(stranger.page(0), Bidirectional).unwrap_err();
    assert!(
        matches!(refused.error, BackendError::NotRegistered { .. }) && refused.payload.is_some()
    );
    domain.unregister_memory(arena.memory()).unwrap();
    assert!(domain.map(arena.page(0), Bidirectional).is_err());
}

#[test]
fn unregistered_memory_faults_even_if_it_is_mapped_and_cached() {
    let (domain, bus, arena) = with_arena(1);
    let port = bus.port();
    let mapped = domain.map(arena.page(0), Bidirectional).unwrap();
    assert_eq!(port.read(mapped.iova().start(), &mut [0; 8]), Ok(()));
    domain.unregister_memory(arena.memory()).unwrap();
    assert_eq!(kind(port.read(mapped.iova().start(), &mut [0; 8])), Some(FaultKind::NotRegistered));
    drop(mapped.unmap().unwrap());
}

#[test]
fn a_port_outlives_its_bus_and_every_access_faults() {
    let (domain, bus, arena) = with_arena(1);
    let port = bus.port();
    // SAFETY: the arena lives until the domain has been dropped.
    let mapped = unsafe { domain.map_static(arena.memory(), Access::READ) }.unwrap();
    let iova = mapped.iova().start();
    assert_eq!(port.read(iova, &mut [0; 8]), Ok(()));
    drop(mapped); // which leaves it mapped
    drop(domain);
    assert_eq!(kind(port.read(iova, &mut [0; 8])), Some(FaultKind::NotMapped));
}

#[test]
fn hugepages_take_one_walk_and_one_entry() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let arena = Arena::aligned(1024, 512 * PAGE);
    // SAFETY: unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let port = bus.port();
    let mapped = domain.map(arena.pages(0, 1024), Bidirectional).unwrap();
    let mut all = vec![0; 1024 * PAGE];
    port.read(mapped.iova().start(), &mut all).unwrap();
    let stats = port.stats();
    assert_eq!(
        (stats.misses, stats.walk_reads),
        (2, 3 + 1),
        "the second leaf is in a cached table page"
    );
    assert_eq!(stats.bytes_read, 4 << 20);
    drop(mapped);
    domain.unregister_memory(arena.memory()).unwrap();
}

#[test]
fn caching_mode_caches_an_absent_entry_until_the_map_flushes() {
    let config = SoftConfig { caching_mode: true, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    let arena = Arena::new(1);
    // SAFETY: unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let port = bus.port();
    let place = domain.reserve_iova(4096, 4096).unwrap();
    let range = place.range();
    for _ in 0..2 {
        assert_eq!(kind(port.read(range.start(), &mut [0; 8])), Some(FaultKind::NotMapped));
    }
    assert_eq!(port.stats().walk_reads, 1, "the second time from the cache");
    // SAFETY: as above.
    let mapping =
        unsafe { domain.map_at(&place, range, arena.memory(), pinfold_core::access::Access::READ) }
            .unwrap();
    assert_eq!(port.read(range.start(), &mut [0; 8]), Ok(()));
    assert_eq!(domain.stats().backend.invalidations.waits, 1);
    domain.unmap_static(mapping).unwrap();
    domain.unregister_memory(arena.memory()).unwrap();
}

/// Mappings that share no table page: the table grows through many chunks, and the device finds all
/// of them. At the limit the error names the option.
#[test]
fn table_memory_grows_as_it_is_used_up_to_a_limit() {
    const WINDOWS: u64 = 1500;
    // Four levels down to the first page, and one page of level 2 for 512 windows.
    let pages = to_usize(2 + WINDOWS.div_ceil(512) + WINDOWS);
    let config = SoftConfig { table_bytes: pages * PAGE, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
    let arena = Arena::new(2);
    // SAFETY: unregistered below.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let page = arena.memory().part(0, PAGE).unwrap();
    page.write_u32(0, 42).unwrap();
    let port = bus.port();
    let place = domain.reserve_iova(2 << 30 << 2, 1 << 30).unwrap();
    let at =
        |window: u64| IovaRange::new(after(place.range().start(), window << 21), 4096).unwrap();
    // SAFETY: as above.
    let map = |window| unsafe {
        domain.map_at(&place, at(window), page, pinfold_core::access::Access::READ)
    };
    let mappings: Vec<_> = (0..WINDOWS).map(|window| map(window).unwrap()).collect();
    for window in 0..WINDOWS {
        assert_eq!(port.read_u32_acquire(at(window).start()), Ok(42), "window {window}");
    }
    let full = map(WINDOWS).unwrap_err().to_string();
    assert!(full.contains("SoftConfig::table_bytes"), "{full}");
    for mapping in mappings {
        domain.unmap_static(mapping).unwrap();
    }
    domain.unregister_memory(arena.memory()).unwrap();
}

/// Writes a table one level at a time, with explicit flushes, so that what is cached at each level
/// shows.
#[test]
fn absent_entries_are_cached_until_a_flush_above_leaves() {
    let config = SoftConfig { caching_mode: true, effect: Effect::AtOnce, ..SoftConfig::default() };
    let iommu = SoftIommu::new(config).unwrap();
    let arena = Arena::new(1);
    let invalidator = Invalidator::new(iommu.queue());
    // SAFETY: the IOMMU is detached below, before the arena is freed.
    unsafe { invalidator.queue().register_memory(arena.memory()) }.unwrap();
    // SAFETY: `iommu` lives longer than the test's use of them.
    let (tables, port) = (unsafe { iommu.table_pages() }, iommu.port());
    iommu.attach(iommu.table_phys(), 4);
    let iova = Iova::new(0x0123_4567_8000);
    let range = IovaRange::new(iova, 4096).unwrap();
    let flush = |leaf_only| {
        let ticket = invalidator.request([Flush { range, leaf_only }]);
        invalidator.wait(ticket).unwrap();
    };
    let look = || {
        let before = port.stats().walk_reads;
        let found = kind(port.read(iova, &mut [0; 8]));
        (found, port.stats().walk_reads - before)
    };
    let absent = Some(FaultKind::NotMapped);
    // From the root down: the entry of each level is absent, is cached as absent, and is then
    // written.
    for (page, level) in [4u64, 3, 2, 1].into_iter().enumerate() {
        assert_eq!(look(), (absent, page as u64 + 1), "level {level}");
        let next = iommu.table_phys().raw() + (page as u64 + 1) * 4096;
        let entry = if level == 1 { arena.memory().addr() as u64 } else { next } | 3;
        let slot = to_usize(iova.raw() >> (3 + 9 * level) & 511);
        tables[page].entries()[slot].store(entry, Ordering::Release);
        assert_eq!(look(), (absent, 0), "cached at level {level}");
        if level > 1 {
            flush(true);
            assert_eq!(look(), (absent, 0), "a flush of leaves keeps it: level {level}");
        }
        flush(level == 1);
    }
    assert_eq!(look().0, None);
    iommu.detach();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn reads_and_writes_agree_with_a_slice(
        steps in proptest::collection::vec((any::<bool>(), 0usize..5 * PAGE, 1usize..3 * PAGE, any::<u8>()), 1..40),
    ) {
        let (domain, bus, arena) = with_arena(6);
        let port = bus.port();
        let mapped = domain.map(arena.pages(0, 6), Bidirectional).unwrap();
        let mut model = vec![0u8; 6 * PAGE];
        for (write, offset, len, byte) in steps {
            let iova = after(mapped.iova().start(), offset as u64);
            let fits = (offset + len).min(model.len());
            if write {
                let landed = port.write(iova, &vec![byte; len]);
                model[offset..fits].fill(byte);
                prop_assert_eq!(landed.is_ok(), offset + len <= model.len());
            } else {
                let mut found = vec![0; fits - offset];
                port.read(iova, &mut found).unwrap();
                prop_assert_eq!(&found[..], &model[offset..fits]);
            }
        }
        drop(mapped);
        domain.unregister_memory(arena.memory()).unwrap();
    }
}

/// An extent holds for as long as nothing is unregistered.
#[test]
fn extents_end_at_pieces_and_registrations() {
    use pinfold_core::addr::{PhysAddr, PhysRange};
    use pinfold_core::domain::PhysExtent;
    let pieces = SoftConfig { contiguous_bytes: Some(8192), ..SoftConfig::default() };
    for (config, contiguous) in [(SoftConfig::default(), 5 * 4096), (pieces, 8192)] {
        let iommu = SoftIommu::new(config).unwrap();
        let arena = Arena::aligned(5, 8192);
        // SAFETY: it is unregistered before it is freed.
        unsafe { iommu.0.register_memory(arena.memory()) }.unwrap();
        let queue = iommu.queue();
        let (base, last) = (arena.memory().addr(), arena.memory().part(4 * 4096, 4096).unwrap());
        let extent = queue.extent(last).unwrap();
        let (at, len) = if contiguous == 8192 { (base + 16384, 4096) } else { (base, 5 * 4096) };
        let phys = PhysRange::new(PhysAddr::new(at as u64), len).unwrap();
        assert_eq!(extent, PhysExtent::new(at, phys));
        assert_eq!(queue.run(arena.memory()).unwrap().len(), contiguous);
        assert_eq!(queue.run(last).unwrap().start(), PhysAddr::new(last.addr() as u64));
        let before = queue.generation();
        queue.unregister_memory(arena.memory()).unwrap();
        assert_ne!(queue.generation(), before);
        assert!(matches!(queue.run(last), Err(BackendError::NotRegistered { .. })));
    }
}

/// The device's own TLB outlasts a flush of the IOTLB, and not a flush of its own.
#[test]
fn a_device_tlb_is_flushed_by_its_own_descriptor() {
    use pinfold_core::invalidate::{Descriptor, InvalidationQueue, Scope, Ticket};
    let iommu = SoftIommu::new(SoftConfig {
        flush_cost: std::time::Duration::ZERO,
        ..SoftConfig::default()
    });
    let iommu = iommu.unwrap();
    let queue = iommu.queue();
    assert!(!queue.has_device_tlbs());
    let (plain, device) = (iommu.port(), iommu.port_with_device_tlb(16));
    assert!(queue.has_device_tlbs());
    let arena = Arena::new(1);
    // SAFETY: unregistered below, before it is freed.
    unsafe { queue.register_memory(arena.memory()) }.unwrap();
    // SAFETY: one table of one level, attached here; the queue below is the only one.
    let pages = unsafe { iommu.table_pages() };
    pages[0].entries()[1].store(arena.memory().addr() as u64 | 3, Ordering::Release);
    iommu.attach(iommu.table_phys(), 1);
    let at = Iova::new(4096);
    assert_eq!((plain.read_u64(at), device.read_u64(at)), (Ok(0), Ok(0)));
    pages[0].entries()[1].store(0, Ordering::Release);
    let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: true };
    queue.submit(&[flush], Some(Ticket(1))).unwrap();
    assert_eq!(queue.completed(), Ticket(1), "a flush that costs nothing completes at once");
    assert_eq!(
        (kind(plain.read_u64(at)), device.read_u64(at)),
        (Some(FaultKind::NotMapped), Ok(0))
    );
    queue.submit(&[Descriptor::DeviceTlb(Scope::Domain)], Some(Ticket(2))).unwrap();
    assert_eq!(kind(device.read_u64(at)), Some(FaultKind::NotMapped));
    drop(device);
    assert!(!queue.has_device_tlbs());
    queue.unregister_memory(arena.memory()).unwrap();
}

/// A batch larger than the queue goes in parts, although nothing else is in flight that a waiter
/// would poll for.
#[test]
fn a_batch_larger_than_the_queue_completes() {
    let config = SoftConfig { queue_entries: 4, ..SoftConfig::default() };
    let iommu = SoftIommu::new(config).unwrap();
    let invalidator = Invalidator::new(iommu.queue());
    let apart = |page: u64| Flush::from(IovaRange::new(Iova::new(page << 16), 4096).unwrap());
    let ticket = invalidator.request_and_submit((0..50).map(apart));
    invalidator.wait(ticket).unwrap();
    let stats = invalidator.stats();
    assert_eq!((stats.sent, stats.waits, stats.timed_out), (50, 1, 0));
    assert!(stats.parts >= 13, "{stats}");
}

/// The unit records the accesses that it has blocked: the device, the access, and the reason.
/// Accesses that the device itself refuses are not recorded.
#[test]
fn blocked_requests_are_recorded_until_they_are_handled() {
    let (domain, bus) = domain(SoftConfig::default()).unwrap();
    let (first, second) = (bus.port(), bus.port_with_device_tlb(16));
    let mapping = domain.map(bus.alloc_pages(1).unwrap(), FromDevice).unwrap();
    let at = mapping.iova().start();
    let beyond = at.checked_add(PAGE as u64).unwrap();
    assert!(first.read_u64(at).is_err() && second.write_u64(beyond, 1).is_err());
    assert!(first.read_u64(Iova::new(1 << 60)).is_err() && first.read_u64(Iova::new(3)).is_err());
    assert!(second.write_u64(at, 1).is_ok());
    let report = bus.take_faults();
    let found: Vec<_> = report
        .records
        .iter()
        .map(|r| (r.source_id(), r.is_read(), r.page(), r.reason().unwrap()))
        .collect();
    let expected = [
        (first.source_id(), true, at, FaultReason::NoRead),
        (second.source_id(), false, beyond, FaultReason::NoWrite),
        (first.source_id(), true, Iova::new(1 << 60), FaultReason::TooWide),
    ];
    assert_eq!((&found[..], report.overflow), (&expected[..], false));
    assert!(first.source_id() != second.source_id());
    // Without its domain the device has no table.
    (0..9).for_each(|_| assert!(first.read_u64(at).is_err()));
    drop(mapping);
    drop(domain);
    let report = bus.take_faults();
    assert!(report.records.len() == 8 && report.overflow);
    assert!(first.read_u64(at).is_err());
    assert_eq!(bus.take_faults().records[0].reason(), Some(FaultReason::NoTable));
}
