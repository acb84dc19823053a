//! VT-d, first stage: the tables of x86 processors.

use super::{Entry, Format};
use crate::access::Access;
use crate::addr::PhysAddr;

/// Intel VT-d first-stage tables, which are those of x86 processors (VT-d specification,
/// "First-Stage Translation" and "First-Stage Paging Entries"; Intel SDM volume 3, 4.5, "4-Level
/// Paging and 5-Level Paging").
///
/// | bits | meaning |
/// | --- | --- |
/// | 0 | P: present |
/// | 1 | R/W: the device may write, too |
/// | 2 | U/S: always set, because requests of devices count as those of user mode |
/// | 5, 6 | A, and D where the device may write: always set, so that the unit never writes an entry |
/// | 7 | PS: at levels 2 and 3: this is a leaf (2 MiB, 1 GiB); elsewhere 0 |
/// | 9 | software: with P = 0, a retired table page was here |
/// | 12..=51 | the address of the memory or of the table page |
///
/// **There is no write-only access: a present entry can be read.** A mapping for
/// [`FromDevice`](crate::access::FromDevice) therefore lets the device read the memory as well,
/// with what it held before. Give it memory without secrets (zeroed, or used for input only), or
/// use [`VtdSecondStage`](super::VtdSecondStage).
///
/// Addresses must be canonical: the bits from the highest that is translated up are all equal. A
/// table of 4 levels translates 48 bits, and the upper half of them is at the end of the 64-bit
/// address space; only the lower half is used here, 47 bits (5 levels: 56). There are no tables of
/// 3 levels.
#[derive(Clone, Copy, Debug)]
pub struct VtdFirstStage;

const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const WAS_LINK: u64 = 1 << 9;
const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;

impl Format for VtdFirstStage {
    const NAME: &'static str = "VT-d first stage";
    const MIN_LEVELS: u8 = 4;
    const MAX_LEVELS: u8 = 5;
    const PHYS_BITS: u32 = 52;

    fn bits(levels: u8) -> u32 {
        11 + 9 * u32::from(levels)
    }

    #[inline]
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64 {
        let write = if access.contains(Access::WRITE) { WRITE | DIRTY } else { 0 };
        let large = if level > 1 { LARGE } else { 0 };
        (phys.raw() & ADDRESS) | PRESENT | USER | ACCESSED | write | large
    }

    #[inline]
    fn link(page: PhysAddr) -> u64 {
        (page.raw() & ADDRESS) | PRESENT | WRITE | USER | ACCESSED
    }

    #[inline]
    fn retired(page: PhysAddr) -> u64 {
        (page.raw() & ADDRESS) | WAS_LINK
    }

    #[inline]
    fn parse(entry: u64, level: u8) -> Entry {
        let phys = PhysAddr::new(entry & ADDRESS);
        if entry & PRESENT == 0 {
            return if level == 1 || entry & WAS_LINK == 0 {
                Entry::Empty
            } else {
                Entry::Retired(phys)
            };
        }
        if level > 1 && entry & LARGE == 0 {
            return Entry::Link(phys);
        }
        let access = if entry & WRITE == 0 { Access::READ } else { Access::READ | Access::WRITE };
        Entry::Leaf { phys, access }
    }

    #[inline]
    fn is_leaf(entry: u64, level: u8) -> bool {
        entry & PRESENT != 0 && (level == 1 || entry & LARGE != 0)
    }
}
