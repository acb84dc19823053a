//! I/O virtual addresses: which ranges are free. (The face is fixed; the inside is being written.)
#![allow(clippy::todo, dead_code, unused_variables, missing_debug_implementations)]

use crate::addr::{Iova, IovaRange};

mod error;
pub use error::IovaError;

/// What an address space holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Extents {
    /// How many runs of free addresses (one that crosses 4 GiB counts twice).
    pub free: usize,
    /// How many runs of allocated addresses; ranges that abut are one.
    pub allocated: usize,
    /// How many bytes are allocated.
    pub bytes_in_use: u64,
    /// How many bytes are reserved, the null page among them.
    pub bytes_reserved: u64,
    /// How many bytes the largest free run has.
    pub largest_free: u64,
}

/// An I/O address space's account of free addresses.
pub struct IovaSpace {
    bits: u32,
}

impl IovaSpace {
    /// How many bytes the unit of allocation has.
    pub const GRANULE: u64 = 4096;

    /// A space of `bits` bits (13 to 57), all free but for the null page.
    ///
    /// # Errors
    /// [`IovaError::Width`].
    pub fn new(bits: u32) -> Result<Self, IovaError> {
        todo!()
    }
    /// A free range of `len` bytes, rounded up to 4 KiB and to nothing larger, at a multiple of `align`, its last
    /// byte at or below `limit`. Without a limit below 4 GiB, addresses above are taken first.
    ///
    /// # Errors
    /// See [`IovaError`]; nothing has changed.
    pub fn alloc(&self, len: u64, align: u64, limit: Option<Iova>) -> Result<IovaRange, IovaError> {
        todo!()
    }
    /// Takes this range, which must be free.
    ///
    /// # Errors
    /// See [`IovaError`]; nothing has changed.
    pub fn alloc_at(&self, range: IovaRange) -> Result<(), IovaError> {
        todo!()
    }
    /// Gives back what was allocated. Needs no memory.
    ///
    /// # Errors
    /// See [`IovaError`]; nothing has changed.
    pub fn free(&self, range: IovaRange) -> Result<(), IovaError> {
        todo!()
    }
    /// Keeps this range from ever being handed out.
    ///
    /// # Errors
    /// See [`IovaError`]; nothing has changed.
    pub fn reserve(&self, range: IovaRange) -> Result<(), IovaError> {
        todo!()
    }
    /// What it holds. O(1).
    pub fn extents(&self) -> Extents {
        todo!()
    }
}
