//! The encoding of an entry: one format of I/O page tables, its constants and shifts.

use crate::access::Access;
use crate::addr::PhysAddr;
use core::sync::atomic::AtomicU64;

mod first_stage;
mod second_stage;

pub use first_stage::VtdFirstStage;
pub use second_stage::VtdSecondStage;

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
/// `parse(link(p), l) == Link(p)`, and so on for each kind; all zero is [`Entry::Empty`]; what
/// `retired` gives must be no present entry to the hardware and not zero. At level 1 there is
/// neither link nor retired page.
pub trait Format: Send + Sync + 'static {
    /// What the format is called.
    const NAME: &'static str;
    /// The fewest levels.
    const MIN_LEVELS: u8;
    /// The most levels, at most 5.
    const MAX_LEVELS: u8;
    /// How many bits of physical address an entry holds; a machine may have fewer
    /// ([`Table::with_phys_bits`](super::Table::with_phys_bits)).
    const PHYS_BITS: u32;

    /// How many bits of address a table of `levels` levels translates, from address 0 up.
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
    /// What an entry at `level` says.
    fn parse(entry: u64, level: u8) -> Entry;
    /// Whether an entry at `level` maps memory: what [`parse`](Self::parse) says, in a form that a
    /// loop over 512 entries can afford. What has all bits of an entry that maps memory must map
    /// memory too, so that several entries can be tested by the bits that they have in common.
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
