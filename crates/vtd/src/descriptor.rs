//! Descriptors of the invalidation queue, 128 bits each ("Queued Invalidation Interface"). Bits that
//! are not named here are reserved, and 0.

use crate::source::SourceId;
use pinfold_core::addr::PhysAddr;
use pinfold_core::invalidate::Scope;

/// A descriptor: the low and the high 64 bits.
pub(crate) type Words = [u64; 2];

/// A device that has a TLB.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct TlbDevice {
    pub(crate) device: SourceId,
    pub(crate) queue_depth: u8,
}

/// "Context-cache Invalidate Descriptor": type 1 in bits 0 to 3; G in bits 4 and 5.
const CONTEXT: u64 = 0x1;
/// "IOTLB Invalidate Descriptor": type 2.
const IOTLB: u64 = 0x2;
/// "Device-TLB Invalidate Descriptor": type 3.
const DEVICE_TLB: u64 = 0x3;
/// "Invalidation Wait Descriptor": type 5.
const WAIT: u64 = 0x5;

/// G: all; one domain; one device (of context entries) or pages (of the IOTLB).
const GLOBAL: u64 = 1 << 4;
const DOMAIN: u64 = 2 << 4;
const NARROW: u64 = 3 << 4;

/// DW and DR of an IOTLB descriptor, bits 6 and 7: writes and reads that used the dropped entries
/// end before the next wait completes.
const DRAIN: u64 = 1 << 6 | 1 << 7;
/// IH, bit 6 of the high half: only leaves have changed.
const LEAF_ONLY: u64 = 1 << 6;
/// SW of a wait, bit 5: writes the status.
const STATUS_WRITE: u64 = 1 << 5;
/// FN of a wait, bit 6: what follows is carried out after it.
const FENCE: u64 = 1 << 6;
/// S of a device TLB descriptor, bit 0 of the high half: more than one page.
const SIZE: u64 = 1;

/// Drops all context entries that are cached.
pub(crate) const fn all_contexts() -> Words {
    [CONTEXT | GLOBAL, 0]
}

/// The identifier that context entries are cached by which are not present ("Caching Mode").
pub(crate) const NOT_PRESENT: u16 = 0;

/// Drops the context entry of one device, which is cached as one of `domain` or as [`NOT_PRESENT`].
/// DID is in bits 16 to 31, SID in 32 to 47; FM, bits 48 and 49, is 0: all bits of the function
/// count.
pub(crate) const fn context(domain: u16, device: SourceId) -> Words {
    [CONTEXT | NARROW | (domain as u64) << 16 | (device.0 as u64) << 32, 0]
}

/// Drops all translations that are cached.
pub(crate) const fn all_translations() -> Words {
    [IOTLB | GLOBAL | DRAIN, 0]
}

/// Drops the translations of a domain in `scope`. AM, bits 0 to 5 of the high half, is the order of
/// the block; the address, bits 12 to 63, is a multiple of its size.
pub(crate) fn translations(domain: u16, scope: Scope, leaf_only: bool) -> Words {
    let did = u64::from(domain) << 16;
    match scope {
        // IH is defined for pages alone.
        Scope::Domain => [IOTLB | DOMAIN | DRAIN | did, 0],
        Scope::Block(block) => {
            let hint = if leaf_only { LEAF_ONLY } else { 0 };
            let high = block.start().raw() | hint | u64::from(block.order());
            [IOTLB | NARROW | DRAIN | did, high]
        }
    }
}

/// Drops the entries of a device's TLB in `scope`. SID is in bits 32 to 47, the flushes that the
/// device can queue (0: 32) in bits 16 to 20. With S, the lowest bit of the page number that is 0
/// gives the size: 2 to the power of one more than its place.
///
/// `throttled` says whether the unit limits flushes by physical function (DIT): then PFSID, bits 12
/// to 15 and 52 to 63, is the device, a physical function. Else these bits are reserved.
pub(crate) fn device_tlb(
    TlbDevice { device, queue_depth }: TlbDevice,
    throttled: bool,
    scope: Scope,
) -> Words {
    let source = u64::from(device.0);
    let function = if throttled { (source & 0xf) << 12 | source >> 4 << 52 } else { 0 };
    let low = DEVICE_TLB | u64::from(queue_depth & 0x1f) << 16 | source << 32 | function;
    let high = match scope {
        // All addresses: every bit but the highest is 1.
        Scope::Domain => (u64::MAX >> 1) & !0xfff | SIZE,
        Scope::Block(block) => match block.order().checked_sub(1) {
            None => block.start().raw(),
            Some(ones) => block.start().raw() | ((1 << ones) - 1) << 12 | SIZE,
        },
    };
    [low, high]
}

/// Writes `data` to `status`, a multiple of 4, when all before it has been carried out. With
/// `fence`, all behind it is carried out afterwards.
///
/// A wait without SW and IF completes unseen; not every implementation accepts one, so that a fence
/// writes too.
pub(crate) const fn wait(status: PhysAddr, data: u32, fence: bool) -> Words {
    let fence = if fence { FENCE } else { 0 };
    [WAIT | STATUS_WRITE | fence | (data as u64) << 32, status.raw()]
}
