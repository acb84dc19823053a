//! Errors of an address space.

use crate::addr::{Iova, IovaRange};

/// An error of an address space. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IovaError {
    /// An address space has 13 to 57 bits.
    #[error("cannot create an I/O address space of {bits} bits: 13 to 57 are supported")]
    Width {
        /// The requested value.
        bits: u32,
    },
    /// A length of 0, or one that is more than the space.
    #[error(
        "cannot allocate {len:#x} bytes of an I/O address space of {bits} bits: at least 1 byte, and less than all of it"
    )]
    Length {
        /// The requested value.
        len: u64,
        /// The width of the space.
        bits: u32,
    },
    /// An alignment is a power of two from 1 to 1 GiB.
    #[error("cannot align to {align:#x}: use a power of two of at most 1 GiB")]
    Alignment {
        /// The requested value.
        align: u64,
    },
    /// No free range is large enough.
    #[error(
        "no free range of {len:#x} bytes aligned to {align:#x} up to {limit}: the largest free range up to there has \
         {largest_free:#x} bytes; {in_use:#x} bytes of the whole space are in use"
    )]
    Exhausted {
        /// The requested bytes.
        len: u64,
        /// The required alignment.
        align: u64,
        /// The last address that would have done.
        limit: Iova,
        /// The bytes in use in the whole space.
        in_use: u64,
        /// The length in bytes of the largest free range up to the limit, on one side of 4 GiB.
        largest_free: u64,
    },
    /// A range whose start or length is no multiple of 4 KiB.
    #[error("{range}: start and length must be multiples of 4096")]
    Misaligned {
        /// The range.
        range: IovaRange,
    },
    /// A range that is not inside the space.
    #[error("{range} is outside an I/O address space of {bits} bits")]
    Outside {
        /// The range.
        range: IovaRange,
        /// The width of the space.
        bits: u32,
    },
    /// A range that was to be taken is in use, all of it or a part.
    #[error("{range} is not free: {used} is in use")]
    InUse {
        /// The requested range.
        range: IovaRange,
        /// The first part of it that is in use.
        used: IovaRange,
    },
    /// A range that is reserved, all of it or a part.
    #[error("{range} touches {reserved}, which is reserved")]
    Reserved {
        /// The range.
        range: IovaRange,
        /// The reserved range.
        reserved: IovaRange,
    },
    /// A range that was to be freed is free already: freed twice, or never allocated.
    #[error("{range} is free already: it was freed twice, or never allocated")]
    AlreadyFree {
        /// The range.
        range: IovaRange,
    },
    /// A part of a range that was to be freed is free already.
    #[error("{range} cannot be freed: its part {free} is free already")]
    PartlyFree {
        /// The range.
        range: IovaRange,
        /// The first part of it that is free.
        free: IovaRange,
    },
    /// Allocating memory for the metadata failed.
    #[error("cannot allocate {bytes} bytes of metadata for an I/O address space")]
    NoMemory {
        /// The requested memory in bytes.
        bytes: usize,
    },
}
