//! Why a buffer cannot be described, and ranges that are outside one.

use crate::addr::RangeError;

/// The longest buffer: 1 TiB.
pub(super) const MAX_BYTES: u64 = 1 << 40;

/// Why a buffer cannot be described.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BufferError {
    /// A buffer has at least one byte.
    #[error("cannot describe an empty buffer at {addr:#x}: a buffer has at least 1 byte")]
    Empty {
        /// Its address.
        addr: usize,
    },
    /// A buffer must end before the end of the address space.
    #[error("a buffer of {len:#x} bytes at {addr:#x} wraps around the end of the address space")]
    Wraps {
        /// Its address.
        addr: usize,
        /// Its length in bytes.
        len: u64,
    },
    /// A buffer has a largest size.
    #[error(
        "a buffer of at least {len} bytes is longer than {limit}: register it as several",
        limit = MAX_BYTES
    )]
    TooLong {
        /// Its length in bytes, as far as it was counted.
        len: u64,
    },
    /// Segments that are not adjacent for the device meet at a page boundary.
    #[error(
        "a piece of the buffer ends at {addr:#x}, not at the end of a 4 KiB page, and the next is not adjacent"
    )]
    Ragged {
        /// The process's address of the next piece.
        addr: u64,
    },
    /// A piece is not a range of device addresses.
    #[error("cannot describe a piece of the buffer: {0}")]
    Piece(#[from] RangeError),
    /// The table of folios could not be allocated.
    #[error("cannot allocate a table of {folios} folios of {bytes} bytes each")]
    NoMemory {
        /// The number of folios.
        folios: u64,
        /// Bytes of table for each.
        bytes: usize,
    },
}

/// A range that is not inside a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{len} bytes at offset {offset} are not inside a registered buffer of {size} bytes")]
pub struct OutsideBuffer {
    /// Its offset in bytes from the start of the buffer.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The length of the buffer in bytes.
    pub size: u64,
}

/// Checks that `len` bytes at `addr` are neither empty, too long, nor wrapping.
pub(super) fn check_extent(addr: usize, len: u64) -> Result<(), BufferError> {
    if len == 0 {
        return Err(BufferError::Empty { addr });
    }
    if len > MAX_BYTES {
        return Err(BufferError::TooLong { len });
    }
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    end.map(|_| ()).ok_or(BufferError::Wraps { addr, len })
}
