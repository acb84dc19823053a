//! The encoding of an entry in one format of I/O page tables, VT-d's two formats, and the
//! arithmetic of levels.

use crate::access::Access;
use crate::addr::PhysAddr;
use core::sync::atomic::AtomicU64;

/// A decoded entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// An empty entry. A walker faults.
    Empty,
    /// A table page that has been retired from here and not yet reclaimed. A walker faults.
    Retired(PhysAddr),
    /// A table page of the level below.
    Link(PhysAddr),
    /// Memory, of the size of the level's leaf.
    Leaf {
        /// The start of the memory.
        phys: PhysAddr,
        /// The access that the device has.
        access: Access,
    },
}

/// A format of radix tables with 512 entries of 64 bits a page.
///
/// Level 1 has leaves of 4 KiB, level 2 of 2 MiB, level 3 of 1 GiB; the root is the highest level.
/// `parse(link(p), l) == Link(p)`, and so on for each kind; all zero is [`Entry::Empty`]; what
/// `retired` gives must be no present entry to the hardware and not zero. At level 1 there is
/// neither link nor retired page.
pub trait Format: Send + Sync + 'static {
    /// The name of the format.
    const NAME: &'static str;
    /// The fewest levels.
    const MIN_LEVELS: u8;
    /// The most levels, at most 5.
    const MAX_LEVELS: u8;
    /// The number of physical address bits in an entry; a machine may have fewer
    /// ([`Table::with_phys_bits`](super::Table::with_phys_bits)).
    const PHYS_BITS: u32;

    /// Returns the number of address bits that a table of `levels` levels translates, from address
    /// 0 up.
    fn bits(levels: u8) -> u32 {
        12 + 9 * u32::from(levels)
    }

    /// The entry for memory at `phys`; `level` is 1, 2 or 3. It gives `access` at least: more only
    /// where the hardware cannot express less, as the format then documents.
    ///
    /// The address is added to the rest: the leaf of the memory `n` bytes further, for the same
    /// access at the same level, is `n` more, as long as that is an address of
    /// [`PHYS_BITS`](Self::PHYS_BITS).
    fn leaf(phys: PhysAddr, access: Access, level: u8) -> u64;
    /// The entry for a table page of the level below.
    fn link(page: PhysAddr) -> u64;
    /// The entry left where a table page has been retired.
    fn retired(page: PhysAddr) -> u64;
    /// Decodes an entry at `level`.
    fn parse(entry: u64, level: u8) -> Entry;
    /// Whether an entry at `level` maps memory: the result of [`parse`](Self::parse), in a form
    /// that a loop over 512 entries can afford. A value with all bits of an entry that maps memory
    /// must map memory too, so that several entries can be tested by the bits that they have in
    /// common.
    fn is_leaf(entry: u64, level: u8) -> bool {
        matches!(Self::parse(entry, level), Entry::Leaf { .. })
    }
    /// Makes entries that the table has just written visible to a walker that does not look into
    /// the processor's caches (VT-d: extended capability register, "Page-walk Coherency" 0), in the
    /// order of the calls: a page is written back before the link to it. Nothing is to be done for
    /// a walker that does, which is the default.
    ///
    /// Called after every write, before the call of the table that made it returns; so before a
    /// flush is requested.
    #[inline]
    fn write_back(entries: &[AtomicU64]) {
        let _ = entries;
    }
}

// The bits that both of VT-d's formats have.
const WRITE: u64 = 1 << 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = ((1 << 52) - 1) & !0xfff;

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
/// There is no present bit: **R = W = 0 is not present, whatever the other bits are**. A link
/// grants R and W both, so that the leaf decides. 3 levels translate 39 bits, 4 levels 48, 5 levels
/// 57 (the adjusted guest address widths).
#[derive(Clone, Copy, Debug)]
pub struct VtdSecondStage;

const READ: u64 = 1 << 0;
const SECOND_WAS_LINK: u64 = 1 << 52;

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
        (page.raw() & ADDRESS) | SECOND_WAS_LINK
    }

    #[inline]
    fn parse(entry: u64, level: u8) -> Entry {
        let phys = PhysAddr::new(entry & ADDRESS);
        if entry & (READ | WRITE) == 0 {
            return if level == 1 || entry & SECOND_WAS_LINK == 0 {
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
/// with its earlier content. Give it memory without secrets (zeroed, or used for input only), or
/// use [`VtdSecondStage`].
///
/// Addresses must be canonical: the bits from the highest that is translated up are all equal. A
/// table of 4 levels translates 48 bits, and the upper half of them is at the end of the 64-bit
/// address space; only the lower half is used here, 47 bits (5 levels: 56). There are no tables of
/// 3 levels.
#[derive(Clone, Copy, Debug)]
pub struct VtdFirstStage;

const PRESENT: u64 = 1 << 0;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const FIRST_WAS_LINK: u64 = 1 << 9;

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
        (page.raw() & ADDRESS) | FIRST_WAS_LINK
    }

    #[inline]
    fn parse(entry: u64, level: u8) -> Entry {
        let phys = PhysAddr::new(entry & ADDRESS);
        if entry & PRESENT == 0 {
            return if level == 1 || entry & FIRST_WAS_LINK == 0 {
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

/// Entries in a page.
pub(super) const ENTRIES: u16 = 512;

/// Returns how many bytes an entry at `level` covers.
pub(super) const fn span(level: u8) -> u64 {
    1 << (3 + 9 * level as u32)
}

/// Returns the number of the entry for `iova` in a page at `level`.
#[expect(clippy::cast_possible_truncation, reason = "masked to 9 bits")]
pub(super) const fn slot(iova: u64, level: u8) -> u16 {
    (iova / span(level)) as u16 & (ENTRIES - 1)
}
