//! What walks cost on the timeline.

use super::harness::{Arena, PAGE};
use crate::device::Device;
use crate::{SoftBus, SoftConfig, domain};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::Domain;
use std::time::{Duration, Instant};

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
        domain.unregister_memory(arena.memory());
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
    domain.unregister_memory(arena.memory());
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
    domain.unregister_memory(arena.memory());
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
    let (port, mapped) = (bus.port(), domain.map(arena.page(0), Bidirectional).unwrap());
    let start = Instant::now();
    port.read(mapped.iova().start(), &mut [0; 8]).unwrap();
    let accessed = start.elapsed();
    port.wait_for_walks();
    let waited = start.elapsed();
    assert!(waited >= 4 * cost && waited - accessed >= 3 * cost, "{accessed:?}, {waited:?}");
    drop(mapped.unmap().unwrap());
    domain.unregister_memory(arena.memory());
}
