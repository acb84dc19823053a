//! The encoding of an entry: one format of I/O page tables, its constants and shifts.

use crate::access::Access;
use crate::addr::PhysAddr;

/// What an entry says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// Nothing is here. A walker faults.
    Empty,
    /// A table page that has been retired from here and not yet reclaimed. A walker faults.
    Retired(PhysAddr),
    /// A table page of the level below.
    Link(PhysAddr),
    /// Memory, of the size of the level's leaf.
    Leaf {
        /// Where the memory starts.
        phys: PhysAddr,
        /// What the device may do.
        access: Access,
    },
}

/// A format of radix tables with 512 entries of 64 bits a page.
///
/// Level 1 has leaves of 4 KiB, level 2 of 2 MiB, level 3 of 1 GiB; the root is the highest level.
/// `parse(link(p), l) == Link(p)`, and so on for each kind; all zero is [`Entry::Empty`]; what `retired` gives must
/// be no present entry to the hardware and not zero. At level 1 there is neither link nor retired page.
pub trait Format: Send + Sync + 'static {
    /// What the format is called.
    const NAME: &'static str;
    /// The fewest levels.
    const MIN_LEVELS: u8;
    /// The most levels, at most 5.
    const MAX_LEVELS: u8;
    /// How many bits of physical address an entry holds.
    const PHYS_BITS: u32;

    /// The entry for memory at `phys`; `level` is 1, 2 or 3.
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64;
    /// The entry for a table page of the level below.
    fn link(page: PhysAddr) -> u64;
    /// The entry left where a table page has been retired.
    fn retired(page: PhysAddr) -> u64;
    /// What an entry at `level` says.
    fn parse(entry: u64, level: u8) -> Entry;
    /// Whether an entry at `level` maps memory: what [`parse`](Self::parse) says, in a form that a loop over 512 entries can
    /// afford.
    fn is_leaf(entry: u64, level: u8) -> bool {
        matches!(Self::parse(entry, level), Entry::Leaf { .. })
    }
}

/// Intel VT-d second-stage tables (VT-d specification, "Second-Stage Translation" and "Second-Stage Paging Entries").
///
/// | bits | meaning |
/// | --- | --- |
/// | 0 | R: the device may read |
/// | 1 | W: the device may write |
/// | 7 | at levels 2 and 3: this is a leaf (2 MiB, 1 GiB); elsewhere 0 |
/// | 12..=51 | the address of the memory or of the table page |
/// | 52 | software: with R = W = 0, a retired table page was here |
///
/// There is no present bit: **R = W = 0 is not present, whatever the other bits say**. A link gives R and W both, so that
/// the leaf decides. 3 levels translate 39 bits, 4 levels 48, 5 levels 57 (the adjusted guest address widths).
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
            return if level == 1 || entry & WAS_LINK == 0 { Entry::Empty } else { Entry::Retired(phys) };
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
