//! I/O virtual addresses: which ranges of an address space are free.
//!
//! An [`IovaSpace`] keeps the *free* extents, not the allocated ones: mappings that abut leave nothing between them, so
//! tens of thousands of static mappings are a handful of entries. The extents are in balanced trees, one below 4 GiB
//! and one above, and each subtree knows its largest gap; a search for a fit goes down once and is never linear,
//! under a 32-bit limit either. The first fit is taken: addresses stay dense, so they share table pages.
//!
//! **A free needs no memory.** A range that comes back may split an allocated run and become an extent of its own, for
//! which a node is needed; the allocation has set it aside. (In kernels freeing may need memory, and then
//! fails exactly when memory is short.)
//!
//! The account does not know where one allocation ends and the next begins: whole allocations, several abutting
//! ones, or parts may be freed. Only who frees *more pieces than were allocated* can meet [`IovaError::Pieces`].
//!
//! Owners' windows and magazines (a later part) stand above this and take whole pieces from it.

use crate::addr::{Iova, IovaRange};
use crate::sync::Mutex;
use space::{Space, extent_of, range_of};

mod error;
mod space;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod tree;

pub use error::IovaError;

/// What an address space holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IovaStats {
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
///
/// Shared by reference; a lock inside, held for O(log n) steps and never while memory is waited for on a free.
#[derive(Debug)]
pub struct IovaSpace {
    space: Mutex<Space>,
    bits: u32,
}

impl IovaSpace {
    /// How many bytes the unit of allocation has.
    pub const GRANULE: u64 = 4096;
    /// The largest alignment that can be asked for: 1 GiB.
    pub const MAX_ALIGN: u64 = 1 << 30;

    /// A space of `bits` bits (13 to 57), all free but for the null page: address 0 is never handed out.
    ///
    /// # Errors
    /// [`IovaError::Width`]; [`IovaError::NoMemory`].
    pub fn new(bits: u32) -> Result<Self, IovaError> {
        if !(13..=57).contains(&bits) {
            return Err(IovaError::Width { bits });
        }
        let mut space = Space::new(bits)?;
        space.reserve(tree::Extent { start: 0, end: 1 })?;
        Ok(Self { space: Mutex::new(space), bits })
    }

    /// How many bits an address has.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// A free range of `len` bytes at a multiple of `align`, its last byte at or below `limit`. O(log n).
    ///
    /// `len` is rounded up to 4 KiB, and to nothing larger; the range that is returned has the rounded length. `align` is
    /// a power of two up to 1 GiB; less than 4 KiB is 4 KiB. Unless `limit` forbids it, addresses above 4 GiB are
    /// taken first: those below are left to the devices that reach no others.
    ///
    /// For alignments of 4 KiB, 2 MiB and 1 GiB it fails only where there is no such range. For one between
    /// two of these it may fail with a fragmented space too, where every free extent is shorter than
    /// `len + align` and none would do for the next page size.
    ///
    /// # Errors
    /// [`IovaError::Length`], [`IovaError::Alignment`], [`IovaError::Exhausted`]; [`IovaError::NoMemory`] where the
    /// account can not grow.
    pub fn alloc(&self, len: u64, align: u64, limit: Option<Iova>) -> Result<IovaRange, IovaError> {
        if len == 0 || len > 1 << self.bits {
            return Err(IovaError::Length { len, bits: self.bits });
        }
        if !align.is_power_of_two() || align > Self::MAX_ALIGN {
            return Err(IovaError::Alignment { align });
        }
        let end = limit.map_or(u64::MAX, |last| last.raw().saturating_add(1)) / Self::GRANULE;
        let granules = len.div_ceil(Self::GRANULE);
        let mut space = self.space.lock();
        match space.alloc(granules, align.div_ceil(Self::GRANULE), end)? {
            Some(taken) => Ok(range_of(taken)),
            None => {
                let held = space.stats();
                let last = Iova::new((space.end() * Self::GRANULE) - 1);
                Err(IovaError::Exhausted {
                    len,
                    align,
                    limit: limit.map_or(last, |limit| limit.min(last)),
                    in_use: held.bytes_in_use,
                    largest_free: held.largest_free,
                })
            }
        }
    }

    /// Takes this range, which must be free: identity, or addresses that something else has fixed. O(log n).
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`], [`IovaError::InUse`];
    /// [`IovaError::NoMemory`] where the account can not grow.
    pub fn alloc_at(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().alloc_at(extent_of(range))
    }

    /// Gives back what was allocated. O(log n); needs no memory.
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`]; [`IovaError::AlreadyFree`] where all
    /// of it is free, [`IovaError::PartlyFree`] where some of it is; [`IovaError::Pieces`].
    pub fn free(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().free(extent_of(range))
    }

    /// Keeps every granule that `range` touches from ever being handed out: MSI windows, what the host reports.
    ///
    /// What is reserved already, or lies beyond the width, may be reserved again. O(log n + reservations).
    ///
    /// # Errors
    /// [`IovaError::InUse`] where some of it is allocated; [`IovaError::NoMemory`] where the account can not grow.
    pub fn reserve(&self, range: IovaRange) -> Result<(), IovaError> {
        self.space.lock().reserve(extent_of(range))
    }

    /// What it holds. O(reservations).
    pub fn stats(&self) -> IovaStats {
        self.space.lock().stats()
    }

    /// The door: after it a range is whole granules of this space.
    fn check(&self, range: IovaRange) -> Result<(), IovaError> {
        if !range.is_aligned(Self::GRANULE) {
            return Err(IovaError::Misaligned { range });
        }
        if range.end().raw() > 1 << self.bits {
            return Err(IovaError::Outside { range, bits: self.bits });
        }
        Ok(())
    }
}
