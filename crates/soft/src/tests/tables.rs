//! Tables, walks and units.

use super::harness::{Arena, PAGE};
use crate::device::Device;
use crate::{
    Effect, Fault, FaultKind, Port, SoftBus, SoftConfig, SoftIommu, Stage, UnitQueue, domain,
    domain_over,
};
use pinfold_core::access::{Access, Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{BackendError, Domain, Reservation};
use pinfold_core::invalidate::{
    Descriptor, InvalidationQueue, QueueError, Ticket, WaitError, WaitLimit,
};
use pinfold_core::table::TableError;
use std::sync::Arc;
use std::time::{Duration, Instant};

const WINDOW: u64 = 2 << 20;
const RW: Access = Access::READ.union(Access::WRITE);

fn at(place: &Reservation, offset: u64, len: u64) -> IovaRange {
    IovaRange::new(Iova::new(place.range().start().raw() + offset), len).unwrap()
}

/// Returns a domain with registered memory, and a place for mappings.
fn with_place(
    config: SoftConfig,
    arena: &Arc<Arena>,
    bytes: u64,
) -> (Domain, SoftBus, Reservation) {
    let (domain, bus) = domain(config).unwrap();
    // SAFETY: the tests keep the arena until they have unregistered it.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    let place = domain.reserve_iova(bytes, 1 << 30).unwrap();
    (domain, bus, place)
}

/// Returns the entries that a device without any cached one needs to read all pages of a range: of
/// its IOTLB, and of tables.
fn cost_of_reading(bus: &SoftBus, range: IovaRange) -> (u64, u64) {
    let (before, port) = (bus.stats(), bus.port());
    for page in 0..range.len() / PAGE as u64 {
        port.read_u32_acquire(Iova::new(range.start().raw() + page * PAGE as u64)).unwrap();
    }
    drop(port);
    let after = bus.stats();
    (after.misses - before.misses, after.walk_reads - before.walk_reads)
}

/// A range that was used with 4 KiB pages gets one leaf of 2 MiB, as soon as it is mapped as a
/// whole.
#[test]
fn superpages_return_after_4_kib_use() {
    let arena = Arena::aligned(512, 2 << 20);
    let (domain, bus, place) = with_place(SoftConfig::default(), &arena, 4 * WINDOW);
    let whole = at(&place, WINDOW, WINDOW);
    for _ in 0..3 {
        let small = |page: u64| at(&place, WINDOW + page * PAGE as u64, PAGE as u64);
        let part = |page: usize| arena.memory().part(page * PAGE, PAGE).unwrap();
        let map = |page: u64| {
            // SAFETY: the arena is registered until all of it is unmapped.
            unsafe { domain.map_at(&place, small(page), part(usize::try_from(page).unwrap()), RW) }
                .unwrap()
        };
        let mappings: Vec<_> = (0..512).map(map).collect();
        assert_eq!(cost_of_reading(&bus, whole), (512, 512 + 3));
        mappings.into_iter().for_each(|mapping| domain.unmap_static(mapping).unwrap());
        // SAFETY: as above.
        let mapping = unsafe { domain.map_at(&place, whole, arena.memory(), RW) }.unwrap();
        assert_eq!(cost_of_reading(&bus, whole), (1, 3));
        domain.unmap_static(mapping).unwrap();
    }
    domain.unregister_memory(arena.memory()).unwrap();
}

/// Mappings that share no table page of level 1: 20,000, or 10^6 with `PINFOLD_BIG` (4 GiB of
/// tables), with the default limit.
#[test]
fn a_million_windows_have_a_table_page_each() {
    let windows: u64 = if std::env::var_os("PINFOLD_BIG").is_some() { 1_000_000 } else { 20_000 };
    let arena = Arena::new(1);
    let (domain, bus, place) = with_place(SoftConfig::default(), &arena, windows * WINDOW);
    let place_of = |window: u64| at(&place, window * WINDOW, PAGE as u64);
    // SAFETY: the arena is registered until all mappings are removed.
    let map =
        |window| unsafe { domain.map_at(&place, place_of(window), arena.memory(), RW) }.unwrap();
    let mappings: Vec<_> = (0..windows).map(map).collect();
    assert!(domain.stats().backend.table_pages > windows);
    arena.memory().write_u32(0, 42).unwrap();
    let port = bus.port();
    for window in (0..windows).step_by(997) {
        assert_eq!(port.read_u32_acquire(place_of(window).start()), Ok(42), "window {window}");
    }
    mappings.into_iter().for_each(|mapping| domain.unmap_static(mapping).unwrap());
    let left = domain.stats().backend;
    assert!(left.table_pages + left.table_pages_retired < 256, "{left:?}");
    domain.unregister_memory(arena.memory()).unwrap();
}

/// A limit is no allocation: neither memory nor time is spent on what is not used.
#[test]
fn a_limit_beyond_all_memory_costs_nothing() {
    let arena = Arena::new(1);
    let config = SoftConfig { table_bytes: usize::MAX, ..SoftConfig::default() };
    let (domain, _bus, place) = with_place(config, &arena, WINDOW);
    // SAFETY: the arena is registered until the mapping is removed.
    let mapping =
        unsafe { domain.map_at(&place, at(&place, 0, PAGE as u64), arena.memory(), RW) }.unwrap();
    domain.unmap_static(mapping).unwrap();
    domain.unregister_memory(arena.memory()).unwrap();
}

/// Reserved tables are in memory before the first map, in one piece; other tables are touched by
/// the maps.
#[test]
#[cfg_attr(miri, ignore = "asks the kernel which pages are in memory")]
fn reserved_table_pages_are_in_memory_from_the_start() {
    let resident = |config: SoftConfig| {
        let iommu = SoftIommu::new(config).unwrap();
        // SAFETY: they are used only here, while the IOMMU exists, and no table is attached.
        let pages = unsafe { iommu.table_pages() };
        let mut flags = vec![0u8; pages.len()];
        let start = pages.as_ptr().cast_mut().cast();
        // SAFETY: the range is mapped, and there is a byte for each page of it.
        let result = unsafe { libc::mincore(start, size_of_val(pages), flags.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        (pages.len(), flags.iter().filter(|flag| **flag & 1 == 1).count(), start.addr())
    };
    let reserving = |table_reserved, table_bytes| SoftConfig {
        table_reserved,
        table_bytes,
        ..SoftConfig::default()
    };
    let (pages, in_memory, start) = resident(reserving(5 << 20, 1 << 30));
    assert_eq!(
        (pages, in_memory, start % (2 << 20)),
        (1280, 1280, 0),
        "hugepages need the alignment"
    );
    // Less than the first piece, and more than the limit.
    assert_eq!(resident(reserving(1, 1 << 30)).0, 64);
    let (pages, in_memory, _) = resident(reserving(1 << 20, 3 * PAGE));
    assert_eq!((pages, in_memory), (3, 3));
    let (pages, in_memory, _) = resident(SoftConfig::default());
    assert_eq!((pages, in_memory), (64, 0));
}

/// The same domain over a first-stage table: leaves of both sizes, every direction, the end of its
/// addresses.
#[test]
fn a_first_stage_table_translates_and_grants_reads_with_writes() {
    let config = SoftConfig { stage: Stage::First, ..SoftConfig::default() };
    let arena = Arena::aligned(512 + 3, 2 << 20);
    let (domain, bus, place) = with_place(config, &arena, WINDOW);
    // SAFETY: the arena is registered until it is unmapped.
    let large = unsafe {
        domain.map_at(
            &place,
            at(&place, 0, WINDOW),
            arena.memory().part(0, 512 * PAGE).unwrap(),
            RW,
        )
    };
    let large = large.unwrap();
    assert_eq!(cost_of_reading(&bus, at(&place, 0, WINDOW)), (1, 3));
    let port = bus.port();
    let kind = |result: Result<u32, Fault>| result.map_err(|fault| fault.kind);
    let to = domain.map(arena.page(512), ToDevice).unwrap();
    let from = domain.map(arena.page(513), FromDevice).unwrap();
    let both = domain.map(arena.page(514), Bidirectional).unwrap();
    for (iova, writes) in [(to.iova(), false), (from.iova(), true), (both.iova(), true)] {
        assert_eq!(kind(port.read_u32_acquire(iova.start())), Ok(0), "what is present can be read");
        let written = port.write_u32_release(iova.start(), 7).map_err(|fault| fault.kind);
        assert_eq!(written, if writes { Ok(()) } else { Err(FaultKind::NoWrite) });
    }
    let iova = from.iova().start();
    drop(from.unmap().unwrap());
    assert_eq!(kind(port.read_u32_acquire(iova)), Err(FaultKind::NotMapped));
    for beyond in [1 << 47, 1 << 48, 0xffff_8000_0000_0000] {
        assert_eq!(kind(port.read_u32_acquire(Iova::new(beyond))), Err(FaultKind::TooWide));
    }
    drop((to.unmap().unwrap(), both.unmap().unwrap()));
    domain.unmap_static(large).unwrap();
    domain.unregister_memory(arena.memory()).unwrap();
    let three = SoftConfig { stage: Stage::First, levels: 3, ..SoftConfig::default() };
    let error = crate::domain(three).map(drop).unwrap_err().to_string();
    assert!(error.contains("3 levels"), "{error}");
}

/// Tables that the unit's physical addresses do not reach are refused.
#[test]
fn physical_addresses_have_the_width_of_the_unit() {
    let narrow = SoftConfig { phys_bits: 24, ..SoftConfig::default() };
    let error = domain(narrow).map(drop).unwrap_err();
    assert!(
        matches!(error, BackendError::Table(TableError::PhysOutside { bits: 24, .. })),
        "{error}"
    );
}

// The cost of walks on the timeline.

const STEP: u64 = 197;

fn costly(levels: u8) -> SoftConfig {
    SoftConfig { levels, walk_cost: SoftConfig::WALK_COST, ..SoftConfig::default() }
}

fn with_memory(config: SoftConfig, arena: &Arena) -> (Domain, SoftBus) {
    let (domain, bus) = domain(config).unwrap();
    // SAFETY: the tests unregister the arena before they drop it.
    unsafe { domain.register_memory(arena.memory()) }.unwrap();
    (domain, bus)
}

#[test]
fn a_walk_costs_its_entries_and_a_cached_translation_nothing() {
    for levels in [3, 4, 5] {
        let arena = Arena::new(2);
        let (domain, bus) = with_memory(costly(levels), &arena);
        let (port, mapped) = (bus.port(), domain.map(arena.pages(0, 2), Bidirectional).unwrap());
        let iova = mapped.iova().start();
        let steps = u64::from(levels);
        for _ in 0..3 {
            port.read(iova, &mut [0; 8]).unwrap();
            assert_eq!(port.stats().walk_ns, steps * STEP, "the second time from the IOTLB");
        }
        port.read(iova.checked_add(PAGE as u64).unwrap(), &mut [0; 8]).unwrap();
        assert_eq!(
            port.stats().walk_ns,
            (steps + 1) * STEP,
            "from the cached table page of level 1"
        );
        drop(port);
        assert_eq!(bus.stats().walk_ns, (steps + 1) * STEP);
        drop(mapped.unmap().unwrap());
        domain.unregister_memory(arena.memory()).unwrap();
    }
}

#[test]
fn a_walk_to_a_superpage_costs_one_entry_less() {
    let arena = Arena::aligned(512, 512 * PAGE);
    let (domain, bus) = with_memory(costly(4), &arena);
    let (port, mapped) = (bus.port(), domain.map(arena.pages(0, 512), Bidirectional).unwrap());
    port.read(mapped.iova().start(), &mut vec![0; 512 * PAGE]).unwrap();
    assert_eq!(port.stats().walk_ns, 3 * STEP);
    drop(mapped.unmap().unwrap());
    domain.unregister_memory(arena.memory()).unwrap();
}

/// An IOTLB is filled from a walk, a device's own TLB from the IOTLB: both save it.
#[test]
fn a_device_tlb_saves_the_walk_and_a_fault_pays_for_it() {
    let arena = Arena::new(1);
    let (domain, bus) = with_memory(costly(4), &arena);
    let (port, mapped) =
        (bus.port_with_device_tlb(16), domain.map(arena.page(0), Bidirectional).unwrap());
    for _ in 0..2 {
        port.write(mapped.iova().start(), &[1; 8]).unwrap();
        assert_eq!(port.stats().walk_ns, 4 * STEP);
    }
    // Another entry of the root, which is not present.
    assert!(port.read(Iova::new(1 << 46), &mut [0; 8]).is_err());
    assert_eq!(port.stats().walk_ns, 5 * STEP);
    drop(mapped.unmap().unwrap());
    domain.unregister_memory(arena.memory()).unwrap();
}

#[test]
fn the_walks_of_a_device_follow_one_another_on_the_timeline() {
    let device = Device::new(8, 16, None);
    let mut state = device.state();
    assert_eq!(state.place_walks(500), 0, "nothing to wait for");
    (0..4).for_each(|_| state.count_walk_read(STEP));
    assert_eq!(state.place_walks(1000), 1000 + 4 * STEP);
    assert_eq!(state.place_walks(1100), 1000 + 4 * STEP, "placed once");
    state.count_walk_read(STEP);
    assert_eq!(state.place_walks(1200), 1000 + 5 * STEP, "behind the one before");
    state.count_walk_read(STEP);
    assert_eq!(state.place_walks(5000), 5000 + STEP, "not before the program asks");
    state.count_walk_read(u64::MAX);
    assert_eq!(state.place_walks(6000), u64::MAX, "does not wrap");
}

#[test]
fn only_a_program_that_waits_spends_the_time() {
    let arena = Arena::new(1);
    let cost = Duration::from_millis(50);
    let (domain, bus) =
        with_memory(SoftConfig { walk_cost: cost, ..SoftConfig::default() }, &arena);
    let port = bus.port();
    let attempt = || {
        let mapped = domain.map(arena.page(0), Bidirectional).unwrap();
        let start = Instant::now();
        port.read(mapped.iova().start(), &mut [0; 8]).unwrap();
        let accessed = start.elapsed();
        port.wait_for_walks();
        let waited = start.elapsed();
        drop(mapped.unmap().unwrap());
        // Without a processor an access takes long, too, and the walks are over before the wait.
        (accessed < cost).then_some((accessed, waited))
    };
    let (accessed, waited) = (0..100).find_map(|_| attempt()).expect("an access takes no time");
    assert!(waited >= 4 * cost && waited - accessed >= 3 * cost, "{accessed:?}, {waited:?}");
    domain.unregister_memory(arena.memory()).unwrap();
}

// Devices behind several units.

fn word(port: &Port, at: Iova) -> Result<u32, FaultKind> {
    port.read_u32_acquire(at).map_err(|fault| fault.kind)
}

/// A queue that passes flushes to the first of several units only.
struct FirstOnly(UnitQueue, usize);

impl InvalidationQueue for FirstOnly {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.0.submit(if self.1 > 0 { &[] } else { descriptors }, wait)
    }
    fn completed(&self) -> Ticket {
        self.0.completed()
    }
    fn now_ns(&self) -> Option<u64> {
        self.0.now_ns()
    }
    fn limit(&self) -> WaitLimit {
        self.0.limit()
    }
}

/// Returns what four devices, two behind each of two units, read where a page was unmapped.
fn read_after_unmap((domain, bus): (Domain, SoftBus)) -> [Result<u32, FaultKind>; 4] {
    let ports = [bus.port(), bus.port(), bus.port(), bus.port()];
    let mapping = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
    let iova = mapping.iova().start();
    // Each caches the translation.
    assert!(ports.iter().all(|port| word(port, iova) == Ok(0)));
    let pages = mapping.unmap().unwrap();
    let found = ports.each_ref().map(|port| word(port, iova));
    drop(pages);
    found
}

#[test]
fn an_unmap_reaches_the_devices_of_every_unit() {
    let config = SoftConfig { units: 2, effect: Effect::AtLast, ..SoftConfig::default() };
    let found = read_after_unmap(domain(config.clone()).unwrap());
    assert_eq!(found, [Err(FaultKind::NotMapped); 4]);
    // SAFETY: no reference into the pages is made.
    let wrong = unsafe { domain_over(config, |unit, queue| FirstOnly(queue, unit)) };
    let found = read_after_unmap(wrong.unwrap());
    assert_eq!(
        found,
        [Err(FaultKind::NotMapped), Ok(0), Err(FaultKind::NotMapped), Ok(0)],
        "over the units"
    );
}

#[test]
fn a_device_that_is_gone_is_not_flushed_and_the_others_are() {
    let (domain, bus) = domain(SoftConfig { units: 3, ..SoftConfig::default() }).unwrap();
    let (gone, with_tlb, other) =
        (bus.port_with_device_tlb(16), bus.port_with_device_tlb(16), bus.port());
    drop(gone);
    for _ in 0..50 {
        let mapping = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
        let iova = mapping.iova().start();
        assert_eq!((word(&with_tlb, iova), word(&other, iova)), (Ok(0), Ok(0)));
        drop(mapping.unmap().unwrap());
        assert_eq!(
            [&with_tlb, &other].map(|port| word(port, iova)),
            [Err(FaultKind::NotMapped); 2]
        );
    }
}

#[test]
fn no_units_are_one_and_all_of_them_can_fail() {
    let fails = SoftConfig { units: 0, ..SoftConfig::default() };
    let (one, bus) = domain(fails.clone()).unwrap();
    drop(one.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap().unmap().unwrap());
    let (domain, bus) = domain(SoftConfig { units: u8::MAX, fail_from: Some(1), ..fails }).unwrap();
    let mapping = domain.map(bus.alloc_pages(1).unwrap(), Bidirectional).unwrap();
    let error = mapping.unmap().err();
    assert!(matches!(error, Some(BackendError::Flush(WaitError::UnitFailed { .. }))), "{error:?}");
}

/// With aborts and late completions that each unit draws for itself.
#[test]
fn units_that_abort_on_their_own_are_recovered() {
    let config = SoftConfig {
        units: 2,
        abort_one_in: Some(3),
        late_by: Duration::from_micros(50),
        queue_depth: 4,
        queue_entries: 4,
        ..SoftConfig::default()
    };
    let (domain, bus) = domain(config).unwrap();
    let ports = [bus.port(), bus.port_with_device_tlb(16)];
    for _ in 0..300 {
        let mapping = domain.map(bus.alloc_pages(2).unwrap(), Bidirectional).unwrap();
        let iova = mapping.iova().start();
        assert!(ports.iter().all(|port| word(port, iova) == Ok(0)));
        drop(mapping.unmap().unwrap());
        assert_eq!(ports.each_ref().map(|port| word(port, iova)), [Err(FaultKind::NotMapped); 2]);
    }
    assert!(domain.stats().backend.invalidations.resubmitted > 50);
}
