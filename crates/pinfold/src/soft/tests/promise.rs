//! After `Quiesced`, no access lands: of the real stack, and not of any of the known-bad ones.

use super::harness::{Arena, Gap, PAGE, Verdict, at_once, take_turns};
use super::variants::{HandMade, Mistake, NoFlush, domain, iommu, paged, small_iommu};
use crate::Domain;
use crate::soft::{Effect, FaultKind, Port, SoftConfig, SoftIommu};
use pinfold_core::access::{Access, Both};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{Backend, BackendError};
use pinfold_core::invalidate::WaitError;
use std::sync::Arc;
use std::time::Duration;

const US: Duration = Duration::from_micros(1);

fn configs() -> Vec<SoftConfig> {
    let plain = SoftConfig { flush_cost: 20 * US, ..SoftConfig::default() };
    vec![
        SoftConfig { effect: Effect::AtOnce, ..plain.clone() },
        SoftConfig { effect: Effect::AtLast, ..plain.clone() },
        SoftConfig { late_by: 50 * US, seed: 7, ..plain.clone() },
        SoftConfig { caching_mode: true, ..plain.clone() },
        SoftConfig { levels: 3, iotlb_entries: 8, ..plain },
    ]
}

fn good(verdict: &Verdict, domain: &Domain) {
    assert!(verdict.is_clean(), "{verdict:?} {domain:?}");
    assert!(verdict.landed > 100, "the rogue was idle: {verdict:?}");
    let stats = domain.stats();
    assert_eq!((stats.live, stats.quarantined, stats.maps), (0, 0, stats.unmaps));
    let faults = domain.soft_iommu().unwrap().stats().faults;
    assert!(faults > 0, "the rogue was always lucky");
}

#[test]
fn after_quiesced_no_access_lands() {
    for config in configs() {
        let domain = Domain::soft_with(config).unwrap();
        let verdict = take_turns(&domain, domain.soft_iommu().unwrap(), &Gap::default(), 500);
        good(&verdict, &domain);
    }
}

#[test]
fn stress_after_quiesced_no_access_lands() {
    for config in configs() {
        let domain = Domain::soft_with(config).unwrap();
        let verdict = at_once(&domain, domain.soft_iommu().unwrap(), 2, 500);
        good(&verdict, &domain);
    }
}

fn hand_made(mistake: Mistake, effect: Effect) -> Verdict {
    let (iommu, gap) = (iommu(effect, 200 * US), Gap::default());
    take_turns(&domain(HandMade::new(&iommu, mistake, &gap)), &iommu, &gap, 500)
}

#[test]
fn the_hand_made_control_is_clean() {
    for effect in [Effect::AtOnce, Effect::AtLast, Effect::AtRandom] {
        let verdict = hand_made(Mistake::None, effect);
        assert!(verdict.is_clean() && verdict.landed > 100, "{verdict:?}");
    }
}

#[test]
fn a_flush_left_out_is_caught() {
    let iommu = iommu(Effect::AtLast, US);
    let domain = domain(paged(&iommu, NoFlush(iommu.clone(), 0.into())));
    let verdict = take_turns(&domain, &iommu, &Gap::default(), 500);
    assert!(verdict.leaks > 0 && verdict.damaged > 0, "{verdict:?}");
}

#[test]
fn a_flush_before_the_clear_is_caught() {
    let verdict = hand_made(Mistake::FlushBeforeClear, Effect::AtOnce);
    assert!(verdict.leaks > 0 && verdict.damaged > 0, "{verdict:?}");
}

#[test]
fn a_buffer_given_back_before_its_ticket_is_done_is_caught() {
    let verdict = hand_made(Mistake::NotWaited, Effect::AtLast);
    assert!(verdict.leaks > 0 && verdict.damaged > 0, "{verdict:?}");
}

fn word(port: &Port, at: Iova) -> Result<u32, FaultKind> {
    port.read_u32_acquire(at).map_err(|fault| fault.kind)
}

fn at(start: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), pages * PAGE as u64).unwrap()
}

/// Windows of 2 MiB each have a table page of their own, and there are just enough for two of them. The device walks
/// into the first and keeps its table page; the first is revoked, and the second is mapped, which needs that page. What
/// does the device find in the first now, where it has not looked before?
fn walk_through_a_retired_table_page(backend: &dyn Backend, iommu: &SoftIommu) -> Result<u32, FaultKind> {
    let arena = Arena::new(5);
    let (first, second, other) = (at(0x4000_0000, 2), at(0x4020_0000, 2), at(0x4040_0000, 1));
    for (page, word) in (100..105).enumerate() {
        arena.memory().write_u32(page * PAGE, word).unwrap();
    }
    let part = |first, pages| arena.memory().part(first * PAGE, pages * PAGE).unwrap();
    // SAFETY: the arena lives until it is expelled below.
    unsafe { backend.admit(arena.memory()) }.unwrap();
    backend.map(other, part(4, 1), Access::READ).unwrap();
    backend.map(first, part(0, 2), Access::READ).unwrap();
    let port = iommu.port();
    assert_eq!(word(&port, first.start()), Ok(100));
    let ticket = backend.revoke(&mut std::iter::once(first)).unwrap();
    backend.map(second, part(2, 2), Access::READ).unwrap();
    let found = word(&port, first.start().checked_add(PAGE as u64).unwrap());
    backend.wait(ticket).unwrap();
    assert_eq!(word(&port, first.start()), Err(FaultKind::NotMapped), "after the flush");
    assert_eq!(word(&port, second.start()), Ok(102));
    backend.expel(arena.memory());
    found
}

#[test]
fn a_table_page_freed_early_is_caught() {
    let slow = Duration::from_millis(20);
    let right = small_iommu(5, slow);
    let found = walk_through_a_retired_table_page(&paged(&right, right.clone()), &right);
    assert_eq!(found, Err(FaultKind::NotMapped));
    let wrong = small_iommu(5, slow);
    let bad = HandMade::new(&wrong, Mistake::TablePageFreedEarly, &Gap::default());
    let found = walk_through_a_retired_table_page(&bad, &wrong);
    assert_eq!(found, Ok(103), "the device reads what was never mapped there");
}

#[test]
fn an_iova_reused_early_is_caught() {
    let config =
        SoftConfig { effect: Effect::AtLast, flush_cost: Duration::from_millis(20), ..SoftConfig::default() };
    let domain = Domain::soft_with(config).unwrap();
    let arena = Arena::new(2);
    arena.memory().write_u32(0, 100).unwrap();
    arena.memory().write_u32(PAGE, 101).unwrap();
    // SAFETY: the arena lives until it is expelled below.
    unsafe { domain.admit(arena.memory()) }.unwrap();
    let port = domain.port().unwrap();
    let first = domain.map(arena.page(0), Both).unwrap();
    let iova = first.iova();
    assert_eq!(word(&port, iova.start()), Ok(100));
    let first = first.revoke();
    // What the domain itself never does: give the addresses back while the ticket is open.
    domain.release_iova(iova).unwrap();
    domain.reserve_iova(iova.len(), 4096).map(|again| assert_eq!(again, iova)).unwrap();
    // SAFETY: as above.
    unsafe { domain.map_at(iova, arena.memory().part(PAGE, PAGE).unwrap(), Access::READ) }.unwrap();
    assert_eq!(word(&port, iova.start()), Ok(100), "the device is told 101, and finds what was there before");
    drop(first.wait().unwrap());
    assert_eq!(word(&port, iova.start()), Ok(101));
    domain.expel(arena.memory());
}

#[test]
fn a_flush_that_hangs_is_a_typed_error_and_its_buffer_is_not_used_again() {
    let config = SoftConfig { hang_from: Some(2), timeout: 2000 * US, ..SoftConfig::default() };
    let domain = Domain::soft_with(config).unwrap();
    let arena = Arena::new(3);
    // SAFETY: the arena lives until it is expelled below.
    unsafe { domain.admit(arena.memory()) }.unwrap();
    domain.map(arena.page(0), Both).unwrap().unmap().unwrap();
    let mapped = domain.map(arena.page(0), Both).unwrap();
    let iova = mapped.iova();
    let error = mapped.unmap().err();
    assert!(matches!(error, Some(BackendError::Flush(WaitError::TimedOut { .. }))), "{error:?}");
    drop(domain.map(arena.page(1), Both).unwrap());
    let other = domain.map(arena.page(2), Both).unwrap();
    assert!(!other.iova().overlaps(&iova));
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.deferred_bytes, stats.unmaps), (2, 8192, 1));
    assert!(Arc::strong_count(&arena) > 3, "the payloads are held, not dropped");
    domain.expel(arena.memory());
    drop(other);
    // Expelled memory is out of reach although no flush is ever over: it may be freed now.
    assert_eq!(word(&domain.port().unwrap(), iova.start()), Err(FaultKind::NotMapped));
}
