//! Devices behind several units.

use crate::{Effect, FaultKind, Port, SoftConfig, domain};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Iova;
use pinfold_core::domain::BackendError;
use pinfold_core::invalidate::WaitError;
use pinfold_core::known_bad::{self, Mistake};
use std::time::Duration;

fn word(port: &Port, at: Iova) -> Result<u32, FaultKind> {
    port.read_u32_acquire(at).map_err(|fault| fault.kind)
}

/// Returns what four devices, two behind each of two units, read where a page was unmapped.
fn read_after_unmap() -> [Result<u32, FaultKind>; 4] {
    let config = SoftConfig { units: 2, effect: Effect::AtLast, ..SoftConfig::default() };
    let (domain, bus) = domain(config).unwrap();
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
    assert_eq!(read_after_unmap(), [Err(FaultKind::NotMapped); 4]);
    known_bad::make(Some(Mistake::FirstUnitOnly));
    let found = read_after_unmap();
    known_bad::make(None);
    assert_eq!(
        found,
        [Err(FaultKind::NotMapped), Ok(0), Err(FaultKind::NotMapped), Ok(0)],
        "in turns"
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
