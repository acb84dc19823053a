//! Enable and disable, attach and detach, faults, and what a unit must be able to do.

use super::double::{
    Double, Heap, Identity, Lines, Payload, QEMU_CAP, QEMU_ECAP, SNOOPING as CAP,
    SNOOPING_EXTENDED as ECAP,
};
use crate::fault::Reason;
use crate::registers::{FECTL, IECTL, Registers};
use crate::source::SourceId;
use crate::unit::{Attachments, Unit, UnitError, disable};
use crate::write_back::{Coherent, WriteBack};
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::{BackendError, Domain, NotQuiesced};
use pinfold_core::invalidate::{
    Descriptor, Flush, InvalidationQueue, Invalidator, Scope, Ticket, WaitLimit,
};
use pinfold_core::mem::DmaMemory;
use std::cell::RefCell;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) const DEVICE: SourceId = SourceId::new(0, 4, 0);
const OTHER: SourceId = SourceId::new(3, 0, 1);
pub(super) const LIMIT: WaitLimit = WaitLimit { time_ns: u64::MAX, polls: 100_000 };
/// For a flush that cannot complete.
const SHORT: WaitLimit = WaitLimit { time_ns: u64::MAX, polls: 100 };

pub(super) fn enabled<W: WriteBack>(cap: u64, ecap: u64) -> (Double, Arc<Unit<Double, W>>) {
    let double = Double::new(cap, ecap);
    let unit = Unit::<_, W>::new(double.clone(), Box::new(Heap), 48).unwrap();
    unit.enable().unwrap();
    double.state().log.clear();
    (double, unit)
}

pub(super) fn domain<W: WriteBack>(unit: &Arc<Unit<Double, W>>) -> (Domain, Attachments) {
    unit.create_domain(Identity::default(), Box::new(Heap), LIMIT).unwrap()
}

#[test]
fn a_unit_is_enabled_in_the_order_of_the_specification() {
    let double = Double::new(CAP | 1 << 5, ECAP);
    let unit = Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).unwrap();
    assert_eq!(double.access(DEVICE, 0x1234, true), Some(0x1234), "not before it is enabled");
    assert!(double.state().log.is_empty(), "a new unit has been told nothing");
    unit.enable().unwrap();
    let expected = ["root", "queue", "context 1", "wait", "iotlb 1", "wait", "enable"];
    assert_eq!(double.state().log, expected);
    assert_eq!(double.state().pmen, 0, "protected regions end afterwards");
    assert_eq!(double.state().masked, [IECTL, FECTL].into());
    assert_eq!(double.access(DEVICE, 0x1234, true), None);
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
    assert_eq!(double.state().log[7..], ["disable", "wait", "no queue"]);
    assert_eq!(double.access(DEVICE, 0x1234, true), Some(0x1234));
}

#[test]
fn a_unit_is_enabled_once() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    double.state().log.clear();
    let tails = double.counts().0;
    assert!(matches!(unit.enable(), Err(UnitError::InUse { .. })));
    assert_eq!((double.counts().0, double.state().log.len()), (tails, 0), "no register is written");
    // Another program may have taken it since it was looked at.
    let other = Unit::<_, Coherent>::new(Double::new(CAP, ECAP), Box::new(Heap), 48).unwrap();
    other.registers().state().gsts = 1 << 26;
    assert_eq!(other.enable(), Err(UnitError::InUse { status: 1 << 26 }));
    // It is disabled, and enabled again.
    let mapping = domain.map(Payload::new(1), Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
    double.state().log.clear();
    unit.enable().unwrap();
    // The queue is empty: nothing that was in it before is carried out again.
    let expected = ["root", "queue", "context 1", "wait", "iotlb 1", "wait", "enable"];
    assert_eq!(double.state().log, expected);
    drop(mapping.unmap().unwrap());
    assert_eq!(double.access(DEVICE, iova, true), None);
}

#[test]
fn a_unit_is_disabled_when_its_queue_is_empty() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    double.state().holds = true;
    let revoked = mapping.revoke();
    // SAFETY: no device is active.
    let error = unsafe { unit.disable() }.unwrap_err();
    assert!(error.to_string().contains("to empty the queue"), "{error}");
    double.state().holds = false;
    double.run();
    drop(revoked.wait().unwrap());
    // Its queue goes on.
    drop(domain.map(Payload::new(1), FromDevice).unwrap().unmap().unwrap());
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
}

#[test]
fn a_unit_is_not_disabled_before_the_last_descriptor_is_fetched() {
    for count in [1, 128] {
        let (double, unit) = enabled::<Coherent>(CAP, ECAP);
        let (_, attachments) = domain(&unit);
        let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
        double.state().holds = true;
        let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
        queue.submit(&vec![flush; count], None).unwrap();
        // Through the registers alone, as their owner does. SAFETY: no device is active.
        let error = unsafe { disable(unit.registers()) }.unwrap_err();
        assert!(error.to_string().contains("to empty the queue"), "{count}: {error}");
    }
}

#[test]
fn an_owner_of_the_registers_alone_disables_translation_and_the_queue() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    // SAFETY: no device is active.
    unsafe { disable(unit.registers()) }.unwrap();
    assert_eq!(double.state().log, ["disable", "no queue"]);
}

/// Without the queue's owner nothing replaces the descriptor, however long the registers are polled.
#[test]
fn a_queue_that_has_stopped_is_reported_at_once() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_, attachments) = domain(&unit);
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    double.state().bad_fetch = true;
    let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
    queue.submit(&[flush], Some(Ticket(1))).unwrap();
    let reads = double.counts().1;
    // SAFETY: no device is active.
    let error = unsafe { disable(unit.registers()) }.unwrap_err().to_string();
    assert!(error.contains("stopped at an error (FSTS, IQE)"), "{error}");
    assert!(double.counts().1 - reads < 20, "{} reads", double.counts().1 - reads);
    assert_eq!(double.state().log.last().unwrap(), "disable", "the queue stays enabled");
    // The unit itself recovers.
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
}

#[test]
fn a_device_that_did_not_answer_does_not_keep_the_queue_enabled() {
    for resumes_at_tail in [false, true] {
        let (double, unit) = enabled::<Coherent>(CAP, ECAP);
        let (_, attachments) = domain(&unit);
        unit.attach(DEVICE, &attachments, Some(4)).unwrap();
        double.state().ats.insert(DEVICE.0);
        let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
        double.state().mute.insert(DEVICE.0);
        double.state().resumes_at_tail = resumes_at_tail;
        queue.submit(&[Descriptor::DeviceTlb(Scope::Domain)], Some(Ticket(1))).unwrap();
        // SAFETY: no device is active.
        unsafe { disable(unit.registers()) }.unwrap();
        assert_eq!(double.state().log.last().unwrap(), "no queue");
    }
}

/// An empty queue may have waits that were fetched and have not completed ("Queued Invalidation
/// Interface": it is quiesced when it is empty and a wait was the last to complete).
#[test]
fn a_queue_is_disabled_when_its_last_wait_has_completed() {
    // A wait that is late, and a part of a batch without one.
    for (delay, wait) in [(3, Some(Ticket(1))), (0, None)] {
        let (double, unit) = enabled::<Coherent>(CAP, ECAP);
        let (_, attachments) = domain(&unit);
        let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
        double.state().delay = delay;
        let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
        queue.submit(&[flush], wait).unwrap();
        assert_eq!(queue.completed(), Ticket(0));
        // SAFETY: no device is active.
        unsafe { unit.disable() }.unwrap();
        assert_eq!(queue.completed(), wait.unwrap_or(Ticket(0)));
        let log = double.state().log.clone();
        assert_eq!(log[log.len() - 3..], ["disable", "wait", "no queue"]);
        // A queue that is not enabled is told nothing.
        let tails = double.counts().0;
        // SAFETY: no device is active.
        unsafe { unit.disable() }.unwrap();
        assert_eq!(double.counts().0, tails);
    }
}

#[test]
fn a_flush_before_enable_is_submitted_after_it() {
    let double = Double::new(CAP, ECAP);
    let unit = Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).unwrap();
    let (domain, attachments) = domain(&unit);
    // Before it is first enabled, and after it is disabled.
    for attached in [None, Some(attachments.id())] {
        let tails = double.counts().0;
        let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
        let late = mapping.revoke().wait_for(SHORT).map(drop).unwrap_err();
        let Some(revoked) = late.revoked else { panic!("it is not lost: {}", late.error) };
        let refused = unit.attach(DEVICE, &attachments, None);
        assert_eq!(refused, Err(UnitError::NotEnabled { what: "attach a device" }));
        let refused = unit.detach(DEVICE, &attachments);
        assert_eq!(refused, Err(UnitError::NotEnabled { what: "detach a device" }));
        assert_eq!(unit.domain_of(DEVICE), attached, "nothing has changed");
        assert_eq!(double.counts().0, tails, "the unit was told nothing");

        unit.enable().unwrap();
        double.state().log.clear();
        drop(revoked.wait().unwrap());
        assert_eq!(double.state().log, ["iotlb 3", "wait"]);
        if attached.is_none() {
            unit.attach(DEVICE, &attachments, None).unwrap();
        }
        // SAFETY: no device is active.
        unsafe { unit.disable() }.unwrap();
    }
}

#[test]
fn a_flush_beside_disable_is_submitted_after_the_next_enable() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, _) = domain(&unit);
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    let revoked = Arc::new(Mutex::new(None));
    let (keeps, its) = (revoked.clone(), double.clone());
    let beside = move || {
        // The unit would not come to it any more.
        its.state().holds = true;
        *keeps.lock().unwrap() = Some(mapping.revoke());
    };
    double.state().beside_no_queue = Some(Box::new(beside));
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
    double.state().holds = false;
    unit.enable().unwrap();
    let revoked = revoked.lock().unwrap().take();
    drop(revoked.expect("the queue was disabled").wait().unwrap());
}

#[test]
fn a_queue_of_another_program_is_told_nothing() {
    let double = Double::new(CAP, ECAP);
    let unit = Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).unwrap();
    let (domain, _) = domain(&unit);
    // It was enabled since this program has looked.
    (double.state().gsts, double.state().deaf) = (1 << 31 | 1 << 26, true);
    // SAFETY: no device is active.
    assert!(unsafe { unit.disable() }.is_err());
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    assert!(mapping.revoke().wait_for(SHORT).is_err());
    assert_eq!(double.counts().0, 0);
}

#[test]
fn a_wait_is_limited_by_the_clock_of_the_registers() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, _) = domain(&unit);
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    double.state().holds = true;
    double.state().clock = Some(0);
    let late = mapping.revoke().wait_for(WaitLimit::within(Duration::from_millis(20)));
    let NotQuiesced { revoked: Some(revoked), error } = late.map(drop).unwrap_err() else {
        panic!("the unit has not failed");
    };
    assert!(error.to_string().contains("20 ms"), "{error}");
    double.state().holds = false;
    double.run();
    drop(revoked.wait().unwrap());
}

#[test]
fn a_unit_that_lacks_something_or_is_in_use_is_refused() {
    let refused = |cap, ecap| {
        let unit = Unit::<_, Coherent>::new(Double::new(cap, ecap), Box::new(Heap), 48);
        unit.map(drop).unwrap_err().to_string()
    };
    assert!(refused(CAP, ECAP & !2).contains("(ECAP, QI)"));
    assert!(refused(CAP & !(1 << 54), ECAP).contains("(CAP, DRD and DWD)"));
    assert!(refused(CAP & !(1 << 55), ECAP).contains("(CAP, DRD and DWD)"));
    assert!(refused(CAP | 1 << 4, ECAP).contains("(CAP, RWBF)"));
    assert!(refused(CAP & !(0x1f << 8), ECAP).contains("(CAP, SAGAW)"));
    assert!(refused(CAP, ECAP & !1).contains("(ECAP, C)"));
    for used in [1 << 31, 1 << 26, 1 << 25] {
        let double = Double::new(CAP, ECAP);
        double.state().gsts = used;
        let error =
            Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).map(drop).unwrap_err();
        assert_eq!(error, UnitError::InUse { status: used });
        assert!(error.to_string().contains("intel_iommu=off intremap=off"), "{error}");
    }
    let double = Double::new(CAP, ECAP);
    double.state().deaf = true;
    let unit = Unit::<_, Coherent>::new(double, Box::new(Heap), 48).unwrap();
    assert!(unit.enable().unwrap_err().to_string().contains("to take the root table"));
}

#[test]
fn a_device_reaches_what_its_domain_maps_and_nothing_else() {
    for cap in [CAP, QEMU_CAP, CAP & !(0x3f << 16) | 47 << 16 | 1 << 10, CAP & !(3 << 34)] {
        let (double, unit) = enabled::<Coherent>(cap, ECAP);
        let (first, at_first) = domain(&unit);
        let (second, at_second) = domain(&unit);
        // With caching mode it is remembered that there was nothing.
        assert_eq!(double.access(DEVICE, 0x1000, false), None);
        unit.attach(DEVICE, &at_first, None).unwrap();
        assert_eq!(double.access(OTHER, 0x1000, false), None);
        unit.attach(OTHER, &at_second, None).unwrap();
        assert_eq!(unit.domain_of(DEVICE), Some(at_first.id()));
        assert_eq!(unit.domain_of(SourceId(77)), None);
        let large = first.map(Payload::new(1024), Bidirectional).unwrap();
        let read = second.map(Payload::new(3), ToDevice).unwrap();
        let written = second.map(Payload::new(3), FromDevice).unwrap();
        for page in 0..1024 {
            let (iova, phys) = (large.iova().start().raw(), large.memory().addr() as u64);
            let at = page * 4096 + 8;
            assert_eq!(double.access(DEVICE, iova + at, page % 2 == 0), Some(phys + at));
        }
        let (iova, phys) = (read.iova().start().raw(), read.memory().addr() as u64);
        assert_eq!(double.access(OTHER, iova + 4096, false), Some(phys + 4096));
        assert_eq!(double.access(OTHER, iova + 4096, true), None);
        let iova = written.iova().start().raw();
        assert_eq!(double.access(OTHER, iova, false), None);
        assert!(double.access(OTHER, iova, true).is_some());
        assert_eq!(double.access(OTHER, iova + 3 * 4096, true), None);
    }
}

#[test]
fn memory_is_unregistered_when_nothing_of_it_is_mapped() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let payload = Payload::new(2);
    let (at, len) = (payload.0, payload.1);
    // SAFETY: the payload's, which is dropped at the end; nothing refers into it.
    let memory = unsafe { DmaMemory::from_raw(at, len) };
    // SAFETY: valid until it is unregistered.
    unsafe { domain.register_memory(memory) }.unwrap();
    let mapping = domain.map(payload, FromDevice).unwrap();
    let iova = mapping.iova().start().raw();
    let refused = domain.unregister_memory(memory);
    assert!(matches!(refused, Err(BackendError::NotRevoked)), "{refused:?}");
    assert_eq!(double.access(DEVICE, iova, true), Some(at.addr().get() as u64));
    // Nor while its flush is under way.
    double.state().holds = true;
    let revoked = mapping.revoke();
    let refused = domain.unregister_memory(memory);
    assert!(matches!(refused, Err(BackendError::NotRevoked)), "{refused:?}");
    assert!(double.access(DEVICE, iova, true).is_some(), "the unit has it cached");
    double.state().holds = false;
    double.run();
    let payload = revoked.wait().unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
    domain.unregister_memory(memory).unwrap();
    drop(payload);
}

thread_local! {
    /// The action of another thread when entries are written back next.
    static BESIDE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

/// The pause of a thread between its clear of an entry and the request of the flush.
#[derive(Debug)]
struct Pausing;

impl WriteBack for Pausing {
    const FOR_NON_COHERENT: bool = false;
    fn write_back(_: &[AtomicU64]) {
        if let Some(beside) = BESIDE.take() {
            beside();
        }
    }
}

/// Unregistered memory may be anything's: nothing of it may be cached, although the table has lost
/// it and no flush is requested yet.
#[test]
fn memory_is_unregistered_after_a_flush_of_what_others_have_cleared() {
    let (double, unit) = enabled::<Pausing>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let payload = Payload::new(1);
    let (at, len) = (payload.0, payload.1);
    // SAFETY: the payload's, which is dropped at the end; nothing refers into it.
    let memory = move || unsafe { DmaMemory::from_raw(at, len) };
    // SAFETY: valid until it is unregistered.
    unsafe { domain.register_memory(memory()) }.unwrap();
    let mapping = domain.map(payload, Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    let (its_domain, its_double) = (domain.clone(), double.clone());
    BESIDE.set(Some(Box::new(move || {
        its_domain.unregister_memory(memory()).unwrap();
        assert_eq!(its_double.access(DEVICE, iova, true), None);
    })));
    let revoked = mapping.revoke();
    assert!(BESIDE.take().is_none(), "the clear was seen");
    drop(revoked.wait().unwrap());
}

/// A unit that is disabled has nothing cached that the next `enable` does not flush.
#[test]
fn memory_is_unregistered_at_once_while_the_unit_is_disabled() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let payload = Payload::new(1);
    // SAFETY: the payload's, which is dropped at the end; nothing refers into it.
    let memory = || unsafe { DmaMemory::from_raw(payload.0, payload.1) };
    // SAFETY: valid until it is unregistered.
    unsafe { domain.register_memory(memory()) }.unwrap();
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    double.state().deaf = true;
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap_err();
    assert!(queue.caches(), "it goes on translating");
    double.state().deaf = false;
    // SAFETY: as before.
    unsafe { unit.disable() }.unwrap();
    assert!(!queue.caches());
    domain.unregister_memory(memory()).unwrap();
}

#[test]
fn no_payload_lies_where_writes_are_interrupts() {
    let (_, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, _) = domain(&unit);
    // Everything else.
    reserve(&domain, &[(0, 0xfee0_0000), (0xfef0_0000, 1 << 39)]);
    assert!(domain.map(Payload::new(1), FromDevice).is_err());
}

/// Reserves the parts of a domain's addresses that are not empty.
fn reserve(domain: &Domain, parts: &[(u64, u64)]) {
    for (from, to) in parts.iter().filter(|(from, to)| from < to) {
        domain.reserve_range(IovaRange::new(Iova::new(*from), to - from).unwrap()).unwrap();
    }
}

#[test]
fn the_pages_beside_interrupts_and_below_the_width_are_used() {
    let (interrupts, behind) = (0xfee0_0000, 0xfef0_0000);
    for page in [interrupts - 4096, behind, (1 << 39) - 4096] {
        let (_, unit) = enabled::<Coherent>(CAP, ECAP);
        let (domain, _) = domain(&unit);
        let (below, above) = (page.min(interrupts), page.max(behind));
        reserve(&domain, &[(0, below), (page + 4096, interrupts)]);
        reserve(&domain, &[(behind, above), (above.max(page + 4096), 1 << 39)]);
        let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
        assert_eq!(mapping.iova().start().raw(), page);
    }
    // 4 levels translate 48 bits, of which this unit takes 40.
    let (_, unit) = enabled::<Coherent>(CAP & !(0x3f << 16 | 0x1f << 8) | 39 << 16 | 1 << 10, ECAP);
    let (domain, _) = domain(&unit);
    reserve(&domain, &[(0, interrupts), (behind, 1 << 40)]);
    assert!(domain.map(Payload::new(1), FromDevice).is_err());
}

#[test]
fn what_was_cached_is_reached_until_the_flush_and_not_afterwards() {
    for tlb in [None, Some(8)] {
        let (double, unit) = enabled::<Coherent>(CAP, ECAP);
        let (domain, attachments) = domain(&unit);
        unit.attach(DEVICE, &attachments, tlb).unwrap();
        if tlb.is_some() {
            double.state().ats.insert(DEVICE.0);
        }
        let mapping = domain.map(Payload::new(4), Bidirectional).unwrap();
        let iova = mapping.iova().start().raw();
        assert!(double.access(DEVICE, iova, true).is_some());
        double.state().holds = true;
        double.state().log.clear();
        let revoked = mapping.revoke();
        assert!(double.access(DEVICE, iova, true).is_some(), "it is cached");
        let Err(revoked) = revoked.poll() else { panic!("the flush has not been carried out") };
        double.state().holds = false;
        double.run();
        assert!(revoked.poll().is_ok());
        assert_eq!(double.access(DEVICE, iova, true), None);
        let expected: &[&str] = match tlb {
            None => &["iotlb 3", "wait"],
            Some(_) => &["iotlb 3", "fence", "tlb", "wait"],
        };
        assert_eq!(double.state().log, expected);
    }
}

/// A context entry stays cached as one of the domain that it was of, and no other domain's flush
/// drops it ("Context-cache Invalidate Descriptor").
#[test]
fn a_device_is_attached_until_its_detach_is_flushed() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (first, at_first) = domain(&unit);
    let (_, at_second) = domain(&unit);
    unit.attach(DEVICE, &at_first, None).unwrap();
    let mapping = first.map(Payload::new(1), Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    double.state().holds = true;
    let late = unit.detach(DEVICE, &at_first);
    assert_eq!(late, Err(UnitError::NotFlushed { what: "a context entry" }));
    // The flush is lost: an error replaces what is in the queue.
    double.state().bad_fetch = true;
    double.state().holds = false;
    double.run();
    let refused = UnitError::Attached { device: DEVICE, domain: at_first.id() };
    assert_eq!(unit.attach(DEVICE, &at_second, None), Err(refused));
    assert_eq!(unit.attach(DEVICE, &at_first, None), Err(refused));
    let refused = UnitError::NotAttached { device: DEVICE };
    assert_eq!(unit.detach(DEVICE, &at_second), Err(refused));
    assert!(double.access(DEVICE, iova, true).is_some(), "by the entry that is cached");
    unit.detach(DEVICE, &at_first).unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
    assert_eq!(unit.detach(DEVICE, &at_first), Err(refused));
    unit.attach(DEVICE, &at_second, None).unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
}

#[test]
fn a_detach_that_a_device_did_not_answer_is_repeated() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, Some(4)).unwrap();
    double.state().ats.insert(DEVICE.0);
    let mapping = domain.map(Payload::new(1), Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    double.state().mute.insert(DEVICE.0);
    let late = unit.detach(DEVICE, &attachments);
    assert_eq!(late, Err(UnitError::NotFlushed { what: "a device's TLB" }));
    assert!(double.access(DEVICE, iova, true).is_some(), "by its own TLB");
    double.state().mute.clear();
    unit.detach(DEVICE, &attachments).unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
    // Flushes of the domain no longer name it.
    double.state().log.clear();
    drop(mapping.unmap().unwrap());
    assert_eq!(double.state().log, ["iotlb 3", "wait"]);
}

#[test]
fn a_unit_without_flushes_of_pages_flushes_the_domain() {
    let (double, unit) = enabled::<Coherent>(CAP & !(1 << 39), ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    double.state().log.clear();
    drop(mapping.unmap().unwrap());
    assert_eq!(double.state().log, ["iotlb 2", "wait"]);
}

/// A flush of the whole domain, a fence, and each device's TLB by its blocks.
#[test]
fn a_unit_without_flushes_of_pages_flushes_the_domain_once_a_batch() {
    let (double, unit) = enabled::<Coherent>(CAP & !(1 << 39), ECAP);
    let (_, attachments) = domain(&unit);
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    let page = |number: u64| IovaRange::new(Iova::new(number << 14), 4096).unwrap();
    let queue = Invalidator::new(queue);
    let flush = || {
        double.state().log.clear();
        let flushes = (0..20).map(|number| Flush { range: page(number), leaf_only: true });
        queue.wait(queue.request_and_submit(flushes)).unwrap();
        double.state().log.clone()
    };
    assert_eq!(flush(), ["iotlb 2", "wait"]);
    unit.attach(DEVICE, &attachments, Some(0)).unwrap();
    double.state().ats.insert(DEVICE.0);
    assert_eq!(flush(), [&["iotlb 2", "fence"][..], &["tlb"; 20], &["wait"]].concat());
}

/// MAMV: the double refuses a descriptor with more.
#[test]
fn a_flush_names_no_more_pages_than_the_unit_allows() {
    for (largest, flushes) in [(18, 1), (2, 1), (1, 2), (0, 4)] {
        let (double, unit) = enabled::<Coherent>(CAP & !(0x3f << 48) | largest << 48, ECAP);
        let (domain, _) = domain(&unit);
        let mapping = domain.map(Payload::new(4), FromDevice).unwrap();
        // Its table page stays.
        let _other = domain.map(Payload::new(1), FromDevice).unwrap();
        double.state().log.clear();
        drop(mapping.unmap().unwrap());
        let log = double.state().log.clone();
        assert_eq!(log, [&["iotlb 3"; 4][..flushes], &["wait"]].concat(), "{largest}");
    }
}

#[test]
fn a_device_that_is_detached_reaches_nothing() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let ((domain, attachments), (_, others)) = (domain(&unit), domain(&unit));
    assert_eq!(unit.detach(DEVICE, &attachments), Err(UnitError::NotAttached { device: DEVICE }));
    unit.attach(DEVICE, &attachments, Some(8)).unwrap();
    double.state().ats.insert(DEVICE.0);
    let id = attachments.id();
    let again = unit.attach(DEVICE, &others, None);
    assert_eq!(again, Err(UnitError::Attached { device: DEVICE, domain: id }));
    assert_eq!(unit.detach(DEVICE, &others), Err(UnitError::NotAttached { device: DEVICE }));
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    double.state().log.clear();
    unit.detach(DEVICE, &attachments).unwrap();
    double.state().ats.clear();
    let expected = ["context 3", "wait", "iotlb 2", "wait", "tlb", "wait"];
    assert_eq!(double.state().log, expected, "each cache after the one that it is filled from");
    assert_eq!(double.access(DEVICE, iova, true), None);
    assert_eq!(unit.domain_of(DEVICE), None);
    // Its TLB is no longer waited for.
    double.state().log.clear();
    drop(mapping.unmap().unwrap());
    assert_eq!(double.state().log, ["iotlb 3", "wait"]);
    unit.attach(DEVICE, &others, None).unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
}

#[test]
fn a_tlb_is_refused_where_the_unit_does_not_support_it() {
    let (_, unit) = enabled::<Coherent>(CAP, ECAP & !(1 << 2));
    let (_, attachments) = domain(&unit);
    let error = unit.attach(DEVICE, &attachments, Some(0)).unwrap_err().to_string();
    assert!(error.contains("(ECAP, DT)"), "{error}");
    assert_eq!(unit.domain_of(DEVICE), None);
    unit.attach(DEVICE, &attachments, None).unwrap();
}

/// With one more, the flush after an abort would not find room in a queue that is empty.
#[test]
fn a_domain_has_no_more_tlbs_than_the_queue_can_flush() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (domain, attachments) = domain(&unit);
    let device = |number: u16| SourceId(0x100 + number);
    for number in 0..252 {
        unit.attach(device(number), &attachments, Some(0)).unwrap();
        double.state().ats.insert(device(number).0);
    }
    let refused = unit.attach(device(252), &attachments, Some(0));
    assert_eq!(refused, Err(UnitError::TooManyTlbs { device: device(252), limit: 252 }));
    assert_eq!(unit.domain_of(device(252)), None);
    unit.attach(device(252), &attachments, None).unwrap();
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(device(251), iova, true).is_some());
    drop(mapping.unmap().unwrap());
    assert_eq!(double.access(device(251), iova, true), None);
    // What is submitted after an abort, in one part.
    let queue = unit.queue_for_test(&attachments, Identity::default(), LIMIT);
    let flush = Descriptor::Iotlb { scope: Scope::Domain, leaf_only: false };
    let all = [flush, Descriptor::Fence, Descriptor::DeviceTlb(Scope::Domain)];
    queue.submit(&all, Some(Ticket(1))).unwrap();
    assert_eq!(queue.completed(), Ticket(1));
    unit.detach(device(0), &attachments).unwrap();
    unit.attach(device(0), &attachments, Some(0)).unwrap();
}

#[test]
fn a_flush_names_the_function_by_which_it_is_limited() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP | 1 << 41);
    let (domain, attachments) = domain(&unit);
    unit.attach(OTHER, &attachments, Some(3)).unwrap();
    double.state().ats.insert(OTHER.0);
    let mapping = domain.map(Payload::new(1), FromDevice).unwrap();
    assert!(double.access(OTHER, mapping.iova().start().raw(), true).is_some());
    drop(mapping.unmap().unwrap());
    unit.detach(OTHER, &attachments).unwrap();
    let log = double.state().log.clone();
    assert_eq!(log.iter().filter(|entry| *entry == "tlb").count(), 2);
    assert!(!log.iter().any(|entry| entry == "error"), "{log:?}");
}

/// Everything that the unit reads is written back: it finds nothing else.
#[test]
fn a_unit_that_does_not_snoop_finds_what_was_written_back() {
    let (double, unit) = enabled::<Lines>(QEMU_CAP, QEMU_ECAP);
    let (domain, attachments) = domain(&unit);
    unit.attach(DEVICE, &attachments, None).unwrap();
    for _ in 0..3 {
        let mapping = domain.map(Payload::new(700), Bidirectional).unwrap();
        let (iova, phys) = (mapping.iova().start().raw(), mapping.memory().addr() as u64);
        for page in 0..700 {
            assert_eq!(double.access(DEVICE, iova + page * 4096, true), Some(phys + page * 4096));
        }
        drop(mapping.unmap().unwrap());
        assert_eq!(double.access(DEVICE, iova, true), None);
    }
    let mapping = domain.map(Payload::new(1), Bidirectional).unwrap();
    let iova = mapping.iova().start().raw();
    assert!(double.access(DEVICE, iova, true).is_some());
    let (faults, _) = unit.take_faults(&attachments);
    assert!(matches!(faults[..], [fault, ..] if fault.reason != Reason::RootReserved));
    unit.detach(DEVICE, &attachments).unwrap();
    assert_eq!(double.access(DEVICE, iova, true), None);
    let (faults, _) = unit.take_stray_faults();
    assert!(matches!(faults[..], [fault] if fault.reason == Reason::NoContextEntry));
}

#[test]
fn faults_are_read_in_order_decoded_and_freed() {
    // Four records.
    let (double, unit) = enabled::<Coherent>(CAP | 3 << 40, ECAP);
    let (domain, attachments) = domain(&unit);
    assert_eq!(unit.take_faults(&attachments), (vec![], false));
    double.access(DEVICE, 0x5678, true);
    unit.attach(DEVICE, &attachments, None).unwrap();
    let mapping = domain.map(Payload::new(1), ToDevice).unwrap();
    let iova = mapping.iova().start().raw();
    double.access(DEVICE, iova + 0x123, true);
    double.access(DEVICE, 1 << 40, false);
    let (faults, lost) = unit.take_faults(&attachments);
    assert!(!lost);
    let reasons: Vec<_> = faults.iter().map(|fault| fault.reason).collect();
    assert_eq!(reasons, [Reason::NoWrite, Reason::BeyondWidth]);
    assert_eq!(
        faults[0].to_string(),
        format!(
            "device 00:04.0 was refused a write to the page at {}: not mapped for writing",
            mapping.iova().start()
        )
    );
    assert!(!faults[1].write && faults[1].page.raw() == 1 << 40);
    let (faults, lost) = unit.take_stray_faults();
    assert!(matches!(faults[..], [fault] if fault.reason == Reason::NoRootEntry), "before it");
    assert!(!lost);
    // Around the end of the records.
    for page in 1..=4 {
        double.access(OTHER, page << 12, false);
    }
    let (faults, lost) = unit.take_stray_faults();
    assert!(!lost);
    let pages: Vec<_> = faults.iter().map(|fault| fault.page.raw() >> 12).collect();
    assert_eq!(pages, [1, 2, 3, 4]);
    assert_eq!(unit.take_stray_faults(), (vec![], false));
    assert_eq!(unit.registers().read32(crate::registers::FSTS), 0);
}

#[test]
fn each_domain_has_the_faults_of_its_own_devices() {
    let (double, unit) = enabled::<Coherent>(CAP | 7 << 40, ECAP);
    let (_first, at_first) = domain(&unit);
    let (_second, at_second) = domain(&unit);
    unit.attach(DEVICE, &at_first, None).unwrap();
    unit.attach(OTHER, &at_second, None).unwrap();
    let stray = SourceId::new(0, 5, 0);
    for (page, device) in (1..).zip([DEVICE, OTHER, stray, OTHER, DEVICE]) {
        double.access(device, page << 12, false);
    }
    let pages = |(faults, lost): (Vec<crate::fault::Fault>, bool)| {
        let pages = faults.iter().map(|fault| (fault.device, fault.page.raw() >> 12));
        (pages.collect::<Vec<_>>(), lost)
    };
    // Those of the others are kept when one owner asks.
    assert_eq!(pages(unit.take_faults(&at_second)), (vec![(OTHER, 2), (OTHER, 4)], false));
    assert_eq!(pages(unit.take_faults(&at_second)), (vec![], false));
    assert_eq!(pages(unit.take_faults(&at_first)), (vec![(DEVICE, 1), (DEVICE, 5)], false));
    assert_eq!(pages(unit.take_stray_faults()), (vec![(stray, 3)], false));
    // A device that changes its domain: what it did before belongs to the first.
    double.access(DEVICE, 6 << 12, true);
    unit.detach(DEVICE, &at_first).unwrap();
    double.access(DEVICE, 7 << 12, true);
    unit.attach(DEVICE, &at_second, None).unwrap();
    double.access(DEVICE, 8 << 12, true);
    // SAFETY: no device is active.
    unsafe { unit.disable() }.unwrap();
    unit.enable().unwrap();
    assert_eq!(pages(unit.take_faults(&at_second)), (vec![(DEVICE, 8)], false));
    assert_eq!(pages(unit.take_faults(&at_first)), (vec![(DEVICE, 6)], false));
    assert_eq!(pages(unit.take_stray_faults()), (vec![(DEVICE, 7)], false));
    // Without an owner.
    drop(at_second);
    double.access(OTHER, 9 << 12, false);
    assert_eq!(pages(unit.take_faults(&at_first)), (vec![], false));
    assert_eq!(pages(unit.take_stray_faults()), (vec![(OTHER, 9)], false));
}

/// PFO: the unit does not say whose access it had no record for.
#[test]
fn a_fault_without_a_record_is_reported_to_every_owner_once() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_first, at_first) = domain(&unit);
    let (_second, at_second) = domain(&unit);
    unit.attach(DEVICE, &at_first, None).unwrap();
    unit.attach(OTHER, &at_second, None).unwrap();
    double.access(DEVICE, 1 << 12, false);
    double.access(OTHER, 2 << 12, false);
    let fsts = || unit.registers().read32(crate::registers::FSTS);
    assert_eq!(fsts() & 3, 3, "PFO and PPF");
    let (faults, lost) = unit.take_faults(&at_first);
    assert_eq!((faults.len(), lost), (1, true));
    assert_eq!(fsts(), 0);
    assert_eq!(unit.take_faults(&at_first), (vec![], false));
    assert_eq!(unit.take_faults(&at_second), (vec![], true));
    assert_eq!(unit.take_faults(&at_second), (vec![], false));
    assert_eq!(unit.take_stray_faults(), (vec![], true));
    // Although the records were freed since, as by an earlier read.
    double.state().fsts |= 1;
    assert_eq!(unit.take_faults(&at_second), (vec![], true));
    assert_eq!(fsts(), 0);
    // The unit records again.
    double.access(OTHER, 3 << 12, false);
    assert_eq!(unit.take_faults(&at_second).0.len(), 1);
}

#[test]
fn an_owner_that_takes_no_faults_has_the_first_ones_kept() {
    let (double, unit) = enabled::<Coherent>(CAP, ECAP);
    let (_first, at_first) = domain(&unit);
    let (_second, at_second) = domain(&unit);
    unit.attach(DEVICE, &at_first, None).unwrap();
    unit.attach(OTHER, &at_second, None).unwrap();
    for page in 1..=257 {
        double.access(DEVICE, page << 12, false);
        assert_eq!(unit.take_faults(&at_second), (vec![], false));
    }
    double.access(OTHER, 1 << 12, false);
    let (faults, lost) = unit.take_faults(&at_second);
    assert_eq!((faults.len(), lost), (1, false), "nothing of it is another domain's");
    let (faults, lost) = unit.take_faults(&at_first);
    let last = faults.last().map(|fault| fault.page.raw() >> 12);
    assert_eq!((faults.len(), last, lost), (256, Some(256), true));
}

#[test]
fn what_an_earlier_owner_has_left_is_forgotten() {
    let double = Double::new(CAP | 3 << 40, ECAP);
    for page in 1..=6 {
        double.state().record_fault(OTHER.0, page << 12);
    }
    // All errors of the queue.
    double.state().fsts |= 0x70;
    let unit = Unit::<_, Coherent>::new(double.clone(), Box::new(Heap), 48).unwrap();
    unit.enable().unwrap();
    assert!(!double.state().log.iter().any(|entry| entry == "error"));
    assert_eq!(double.state().log.len(), 7, "no flush was given twice");
    assert_eq!((unit.take_stray_faults(), unit.wrong_answers()), ((vec![], false), 0));
    // And what comes now is reported.
    double.access(DEVICE, 0x5678, true);
    assert_eq!(unit.take_stray_faults().0.len(), 1);
}

#[test]
fn an_atomic_operation_that_is_refused_has_written() {
    let write = |kind: u64| crate::fault::Fault::decode(0, 1 << 63 | 5 << 32 | kind).unwrap().write;
    let (t1, t2) = (1 << 62, 1 << 28);
    // PP, bit 31, and PRIV, bit 29, tell nothing of it.
    let others = 1 << 31 | 1 << 29;
    assert_eq!([0, t1, t1 | others, t1 | t2].map(write), [true, false, false, true]);
}

#[test]
fn each_reason_has_words() {
    let text = |code: u64| {
        crate::fault::Fault::decode(0, 1 << 63 | code << 32).unwrap().reason.to_string()
    };
    let all: std::collections::BTreeSet<String> = (1..=14).map(text).collect();
    assert_eq!(all.len(), 14);
    assert_eq!(text(14), "reason 14");
    assert_eq!(crate::fault::Fault::decode(0, 0), None);
}
