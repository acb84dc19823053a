//! VT-d, second stage.

use super::{Entry, Format};
use crate::access::Access;
use crate::addr::PhysAddr;

/// Intel VT-d second-stage tables (VT-d specification, "Second-Stage Translation" and "Second-Stage
/// Paging Entries").
///
/// | bits | meaning |
/// | --- | --- |
/// | 0 | R: the device may read |
/// | 1 | W: the device may write |
/// | 7 | at levels 2 and 3: this is a leaf (2 MiB, 1 GiB); elsewhere 0 |
/// | 12..=51 | the address of the memory or of the table page |
/// | 52 | software: with R = W = 0, a retired table page was here |
///
/// There is no present bit: **R = W = 0 is not present, whatever the other bits say**. A link gives
/// R and W both, so that the leaf decides. 3 levels translate 39 bits, 4 levels 48, 5 levels 57
/// (the adjusted guest address widths).
#[derive(Clone, Copy, Debug)]
pub struct VtdSecondStage;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;
const WAS_LINK: u64 = 1 << 52;

impl Format for VtdSecondStage {
    const NAME: &'static str = "VT-d second stage";
    const MIN_LEVELS: u8 = 3;
    const MAX_LEVELS: u8 = 5;
    const PHYS_BITS: u32 = 52;

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64 {
        let read = if access.contains(Access::READ) { READ } else { 0 };
        let write = if access.contains(Access::WRITE) { WRITE } else { 0 };
        let large = if level > 1 { LARGE } else { 0 };
        (phys.raw() & ADDRESS) | read | write | large
    }

    #[inline]
    fn link(page: PhysAddr) -> u64 {
        (page.raw() & ADDRESS) | READ | WRITE
    }

    #[inline]
    fn retired(page: PhysAddr) -> u64 {
        (page.raw() & ADDRESS) | WAS_LINK
    }

    #[inline]
    fn parse(entry: u64, level: u8) -> Entry {
        let phys = PhysAddr::new(entry & ADDRESS);
        if entry & (READ | WRITE) == 0 {
            return if level == 1 || entry & WAS_LINK == 0 {
                Entry::Empty
            } else {
                Entry::Retired(phys)
            };
        }
        if level > 1 && entry & LARGE == 0 {
            return Entry::Link(phys);
        }
        let mut access = Access::empty();
        access.set(Access::READ, entry & READ != 0);
        access.set(Access::WRITE, entry & WRITE != 0);
        Entry::Leaf { phys, access }
    }

    #[inline]
    fn is_leaf(entry: u64, level: u8) -> bool {
        entry & (READ | WRITE) != 0 && (level == 1 || entry & LARGE != 0)
    }
}
