//! Errors of the table of registered buffers.

use super::index::{BufferIndex, MAX_BUFFERS};
use crate::registered::error::OutsideBuffer;

/// Why a buffer was not registered. Nothing has changed when one is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// All places of the table are taken.
    #[error("all {capacity} places of the buffer table are taken: unregister one first")]
    Full {
        /// How many there are.
        capacity: usize,
    },
    /// A table has a largest size.
    #[error(
        "cannot create a buffer table of {asked} places: 1 to {limit} are supported",
        limit = MAX_BUFFERS
    )]
    Capacity {
        /// The requested number.
        asked: usize,
    },
    /// The place is taken by another buffer.
    #[error("{index} is registered already: unregister it first")]
    Taken {
        /// Which place.
        index: BufferIndex,
    },
    /// The buffer shares memory with one that is registered.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}, which is registered already")]
    Overlaps {
        /// Where the buffer starts in the process.
        addr: usize,
        /// How many bytes it has.
        len: u64,
        /// The one that it overlaps.
        with: BufferIndex,
    },
    /// The table could not grow.
    #[error("no memory for another entry of the buffer table")]
    NoMemory,
    /// The table has no such place.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// Why a buffer was not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The table is not that large.
    #[error("{index} does not exist: the buffer table has {capacity} places")]
    Beyond {
        /// Which place.
        index: BufferIndex,
        /// How many there are.
        capacity: usize,
    },
    /// Nothing is registered there.
    #[error("{index} is not registered")]
    Vacant {
        /// Which place.
        index: BufferIndex,
    },
    /// The count of I/O in flight is at its limit.
    #[error("{index} is held {limit} times, which is the limit", limit = u32::MAX)]
    TooManyHolds {
        /// Which place.
        index: BufferIndex,
    },
    /// The hold was issued by another table.
    #[error("the hold on {index} was not issued by this table")]
    NotHeld {
        /// Which place.
        index: BufferIndex,
    },
    /// The range is not inside the buffer.
    #[error(transparent)]
    Outside(#[from] OutsideBuffer),
}
