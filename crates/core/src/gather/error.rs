//! The errors of profiles and of gathering.

use crate::addr::{Iova, RangeError};

/// Why a profile is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A device accepts at least one segment.
    #[error("a device must accept at least 1 segment, not 0")]
    NoSegments,
    /// The alignment is a power of two.
    #[error("alignment {align} is invalid: it must be a power of two, or 1 for none")]
    Align {
        /// The value.
        align: u64,
    },
    /// The boundary is a power of two, at least the alignment.
    #[error(
        "boundary {boundary} is invalid: it must be 0 for none, or a power of two of at least {align}"
    )]
    Boundary {
        /// The value.
        boundary: u64,
        /// The alignment.
        align: u64,
    },
    /// A segment has room for at least one aligned unit.
    #[error("segments of at most {max_segment_bytes} bytes cannot be aligned to {align} bytes")]
    SegmentBytes {
        /// The value.
        max_segment_bytes: u64,
        /// The alignment.
        align: u64,
    },
}

/// Why a device cannot accept the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// A segment is not a range of addresses.
    #[error("cannot gather a segment: {0}")]
    Range(#[from] RangeError),
    /// A segment begins or ends where the device does not accept it.
    #[error(
        "{len} bytes at {iova}: the device accepts multiples of {align} bytes for start and length"
    )]
    Misaligned {
        /// Where it starts, after merging with its neighbours.
        iova: Iova,
        /// How many bytes it has.
        len: u64,
        /// The alignment of the profile.
        align: u64,
    },
    /// The device accepts fewer segments.
    #[error("{needed} segments, but at most {limit} are accepted at once: split the transfer")]
    TooMany {
        /// The number of segments.
        needed: u64,
        /// The limit of the device, or of the caller's array.
        limit: u64,
    },
}
