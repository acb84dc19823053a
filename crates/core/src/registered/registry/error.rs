//! Why a buffer cannot be registered, or found.

use super::index::{BufferIndex, MAX_BUFFERS};
use crate::registered::error::OutsideBuffer;

/// Why a buffer cannot be registered. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// All places of the table are taken.
    #[error("all {capacity} places of the buffer table are taken: unregister one first")]
    Full {
        /// The number of places.
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
        /// The place.
        index: BufferIndex,
    },
    /// The buffer shares memory with one that is registered.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}, which is registered already")]
    Overlaps {
        /// The buffer's address.
        addr: usize,
        /// Its length in bytes.
        len: u64,
        /// The registered buffer that it overlaps.
        with: BufferIndex,
    },
    /// The table could not grow.
    #[error("no memory for another entry of the buffer table")]
    NoMemory,
    /// The table has no such place.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// Why a buffer cannot be found or used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The table has no such place.
    #[error("{index} does not exist: the buffer table has {capacity} places")]
    Beyond {
        /// The place.
        index: BufferIndex,
        /// The number of places.
        capacity: usize,
    },
    /// Nothing is registered there.
    #[error("{index} is not registered")]
    Vacant {
        /// The place.
        index: BufferIndex,
    },
    /// The count of I/O in flight is at its limit.
    #[error("{index} is held {limit} times, which is the limit", limit = u32::MAX)]
    TooManyHolds {
        /// The place.
        index: BufferIndex,
    },
    /// The hold was issued by another table.
    #[error("the hold on {index} was not issued by this table")]
    NotHeld {
        /// The place.
        index: BufferIndex,
    },
    /// The range is not inside the buffer.
    #[error(transparent)]
    Outside(#[from] OutsideBuffer),
}
