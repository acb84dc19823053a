//! Descriptors and capabilities, bit by bit.

use super::double::{
    Double, Heap, Identity, QEMU_CAP, QEMU_ECAP, SNOOPING as CAP, SNOOPING_EXTENDED as ECAP,
};
use crate::descriptor::{self, TlbDevice};
use crate::registers::Capabilities;
use crate::source::SourceId;
use crate::unit::Unit;
use crate::write_back::Coherent;
use pinfold_core::addr::{Iova, IovaRange, PhysAddr};
use pinfold_core::invalidate::{
    Descriptor, Flush, InvalidationQueue, Invalidator, QueueError, Scope, Ticket, WaitLimit,
};
use std::sync::Mutex;

/// Keeps the descriptors that it is given.
struct Kept(Mutex<Vec<Descriptor>>);

impl InvalidationQueue for Kept {
    fn submit(&self, descriptors: &[Descriptor], _: Option<Ticket>) -> Result<(), QueueError> {
        self.0.lock().unwrap().extend(descriptors);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(0)
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: 0, polls: 0 }
    }
    fn max_order(&self) -> u32 {
        40
    }
}

/// The block of 2^`order` pages at page `page`.
fn block(page: u64, order: u32) -> Scope {
    let invalidator = Invalidator::new(Kept(Mutex::new(Vec::new())));
    let range = IovaRange::new(Iova::new(page << 12), 4096 << order).unwrap();
    invalidator.request_and_submit([Flush { range, leaf_only: true }]);
    let kept = invalidator.queue().0.lock().unwrap().clone();
    match kept[..] {
        [Descriptor::Iotlb { scope, .. }] => scope,
        _ => panic!("{kept:?}"),
    }
}

#[test]
fn descriptors_have_the_bits_of_the_specification() {
    let device = SourceId::new(0x12, 3, 4);
    assert_eq!(device.0, 0x121c);
    assert_eq!(device.to_string(), "12:03.4");
    assert_eq!(descriptor::all_contexts(), [0x11, 0]);
    assert_eq!(descriptor::context(0xabcd, device), [0x121c_abcd_0031, 0]);
    assert_eq!(descriptor::all_translations(), [0xd2, 0]);
    assert_eq!(descriptor::translations(0xabcd, Scope::Domain, true), [0xabcd_00e2, 0]);
    assert_eq!(descriptor::translations(7, block(0x1200, 9), true), [0x7_00f2, 0x120_0049]);
    assert_eq!(descriptor::translations(7, block(0x1234, 0), false), [0x7_00f2, 0x123_4000]);
    let status = PhysAddr::new(0x1_2345_6780);
    assert_eq!(
        descriptor::wait(status, 0x89ab_cdef, false),
        [0x89ab_cdef_0000_0025, 0x1_2345_6780]
    );
    assert_eq!(descriptor::wait(status, 0, true), [0x65, 0x1_2345_6780]);
}

#[test]
fn a_device_tlb_flush_tells_its_size_by_the_lowest_zero() {
    let device = |queue_depth| TlbDevice { device: SourceId(0x121c), queue_depth };
    let flush = |scope| descriptor::device_tlb(device(5), false, scope);
    assert_eq!(flush(block(0x1234, 0)), [0x121c_0005_0003, 0x123_4000]);
    assert_eq!(flush(block(0x1234, 1)), [0x121c_0005_0003, 0x123_4001]);
    assert_eq!(flush(block(0x1234, 2))[1], 0x123_5001);
    assert_eq!(flush(block(0x1200, 9))[1], 0x12f_f001);
    assert_eq!(flush(Scope::Domain)[1], 0x7fff_ffff_ffff_f001);
    // The depth has five bits, of which all 0 stand for 32.
    let depth = descriptor::device_tlb(device(32), false, Scope::Domain)[0];
    assert_eq!(depth, 0x121c_0000_0003);
    // PFSID in two parts, which are reserved where flushes are not limited by it.
    let throttled = descriptor::device_tlb(device(5), true, block(0x1234, 0));
    assert_eq!(throttled, [0x1210_121c_0005_c003, 0x123_4000]);
}

#[test]
fn capabilities_of_a_known_unit_are_read() {
    let known = Capabilities { cap: QEMU_CAP, ecap: QEMU_ECAP };
    assert_eq!(known.domains(), 1 << 16);
    assert!(known.caching_mode() && known.flushes_pages() && known.drains());
    assert!(!known.throttles_by_function());
    assert!(Capabilities { cap: 0, ecap: 1 << 41 }.throttles_by_function());
    assert!(known.queued_invalidation() && !known.coherent() && !known.device_tlbs());
    assert!(!known.needs_write_buffer_flush() && !known.has_protected_regions());
    assert!(
        known.has_levels(3) && !known.has_levels(4) && !known.has_levels(5) && !known.has_levels(2)
    );
    assert_eq!((known.address_bits(), known.levels()), (39, Some(3)));
    assert_eq!(known.has_large_leaves(), (true, true));
    assert_eq!((known.fault_offset(), known.fault_records(), known.end()), (0x220, 1, 0x230));
    assert_eq!(known.max_order(), 18);
    // aw-bits=48: 3 and 4 levels.
    let wide = Capabilities { cap: QEMU_CAP & !(0x3f << 16) | 47 << 16 | 1 << 10, ecap: 0 };
    assert_eq!((wide.address_bits(), wide.levels()), (48, Some(4)));
    let narrow = Capabilities { cap: QEMU_CAP & !(0x3f << 16) | 56 << 16, ecap: 0 };
    assert_eq!(narrow.levels(), Some(3), "the most that there are");
    assert_eq!(Capabilities { cap: 0, ecap: 0 }.levels(), None);
    assert_eq!(Capabilities { cap: 7, ecap: 0 }.domains(), 16, "7 is reserved");
}

#[test]
fn identifiers_are_not_given_out_twice_nor_beyond_the_last() {
    // 16 domains; and 2^16, of which there are as many as words on a page.
    for (cap, end) in [(CAP & !7, 16), (CAP, 512)] {
        let unit = Unit::<_, Coherent>::new(Double::new(cap, ECAP), Box::new(Heap), 48).unwrap();
        let create = || {
            let limit = WaitLimit { time_ns: u64::MAX, polls: 1 };
            unit.create_domain(Identity::default(), Box::new(Heap), limit)
        };
        let ids: Vec<u16> = std::iter::from_fn(|| create().ok()).map(|(_, at)| at.id()).collect();
        assert_eq!(ids, (2..end).collect::<Vec<_>>());
        let error = create().unwrap_err().to_string();
        // They have ended: `ids` keeps none of them.
        let limit = format!("the unit has created all {} domains that it can", end - 2);
        assert!(error.starts_with(&limit), "{error}");
    }
}
