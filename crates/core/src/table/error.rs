//! Errors of a table.

use crate::addr::{Iova, IovaRange, PhysAddr};

/// Why a table refused. Nothing has changed when one is returned, and no device has seen an entry
/// of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The format has no table of that many levels.
    #[error("a {format} table of {levels} levels: it has {min} to {max}")]
    Levels {
        /// The format's name.
        format: &'static str,
        /// The requested value.
        levels: u8,
        /// The fewest.
        min: u8,
        /// The most.
        max: u8,
    },
    /// The memory for table pages is empty, crooked, or out of the format's reach.
    #[error(
        "{len:#x} bytes at {phys} cannot be table pages: give at least one page of 4096 bytes, aligned to 4096 \
         in memory and in physical address, below 2^52"
    )]
    BadPages {
        /// Their physical address.
        phys: PhysAddr,
        /// Their length in bytes.
        len: usize,
    },
    /// A start or a length is no multiple of 4 KiB.
    #[error("{iova} to {phys}: both addresses and the length must be multiples of 4096")]
    Misaligned {
        /// The range to be mapped.
        iova: IovaRange,
        /// The memory that it was to be mapped to (the range's start again where it was to be
        /// cleared).
        phys: PhysAddr,
    },
    /// The range reaches beyond the addresses that the table's levels translate.
    #[error("{range} reaches beyond the {bits} bits of a table of its levels")]
    Outside {
        /// The range.
        range: IovaRange,
        /// The width of the table's addresses.
        bits: u32,
    },
    /// The memory reaches beyond what an entry can hold.
    #[error("{len:#x} bytes at {phys} reach beyond the {bits} bits of an entry")]
    PhysOutside {
        /// The start of the memory.
        phys: PhysAddr,
        /// Its length in bytes.
        len: u64,
        /// The width of an entry's addresses.
        bits: u32,
    },
    /// A mapping without any access is refused.
    #[error("{range}: a mapping must give access to read, to write, or both")]
    NoAccess {
        /// The range to be mapped.
        range: IovaRange,
    },
    /// Something is mapped there. It is left as it is.
    #[error("{at} is mapped already: clear it first")]
    AlreadyMapped {
        /// The first address in the range that is mapped.
        at: Iova,
    },
    /// The table page there is pinned: its entries are changed through its pin alone.
    #[error("{at} is in a pinned table page: map and clear it through the pin")]
    Pinned {
        /// The first address in the range whose table page is pinned.
        at: Iova,
    },
    /// A range reaches out of the window of a pin.
    #[error("{range} reaches out of {window}, the window of the pin")]
    OutsideWindow {
        /// The range to be mapped or cleared.
        range: IovaRange,
        /// The range that the pinned page translates.
        window: IovaRange,
    },
    /// The start of a window is not a multiple of 2 MiB.
    #[error("{at} is not the start of a window: it must be a multiple of 2 MiB")]
    NoWindow {
        /// The value.
        at: Iova,
    },
    /// Nothing is mapped there.
    #[error("{at} is not mapped")]
    NotMapped {
        /// The first address in the range that is not.
        at: Iova,
    },
    /// A leaf extends beyond the range and is left as it is; to clear it, pass all of it.
    #[error("{range} is part of the larger leaf {leaf}: clear all of it or nothing")]
    PartOfLeaf {
        /// The range to be cleared.
        range: IovaRange,
        /// The leaf that reaches out of it.
        leaf: IovaRange,
    },
    /// No table page is left.
    #[error("all {capacity} table pages are in use or wait for a flush: {advice}")]
    NoPages {
        /// The number of table pages.
        capacity: u32,
        /// How to raise the limit: [`TableMemory::advice`](super::TableMemory::advice).
        advice: &'static str,
    },
    /// No memory for the records of the pages.
    #[error("no memory for the records of {pages} table pages")]
    NoMemory {
        /// The number of pages.
        pages: u32,
    },
    /// The retired or pinned pages are those of another table.
    #[error("the retired or pinned pages belong to the table at {owner}, not to the one at {this}")]
    OtherTable {
        /// The table that they belong to.
        owner: PhysAddr,
        /// The table that was asked.
        this: PhysAddr,
    },
    /// An entry points to a page that is not one of the table's: it was written from outside.
    #[error(
        "the table entry {entry:#x} on the way to {at} was not written by the table: its pages are damaged"
    )]
    Damaged {
        /// The address of the walk.
        at: Iova,
        /// The entry.
        entry: u64,
    },
}
