//! [`IovaSpace`]: checks, and the lock.

use super::error::IovaError;
use super::extent::{Extent, extent_of, range_of};
use super::space::Space;
use super::stats::IovaStats;
use crate::addr::{Iova, IovaRange};
use crate::sync::Mutex;

/// Allocates the addresses of an I/O address space.
///
/// Shared by reference. A lock inside is held for O(log width) steps, whatever is allocated, except
/// by [`stats`](Self::stats) and where an allocation with a limit fails. Freeing whole allocations
/// never allocates memory.
#[derive(Debug)]
pub struct IovaSpace {
    pub(super) space: Mutex<Space>,
    bits: u32,
}

impl IovaSpace {
    /// The unit of allocation in bytes.
    pub const GRANULE: u64 = 4096;
    /// The largest alignment: 1 GiB.
    pub const MAX_ALIGN: u64 = 1 << 30;

    /// Creates a space of `bits` bits (13 to 57), all free except the null page: address 0 is never
    /// allocated.
    ///
    /// # Errors
    /// [`IovaError::Width`]; [`IovaError::NoMemory`].
    pub fn new(bits: u32) -> Result<Self, IovaError> {
        if !(13..=57).contains(&bits) {
            return Err(IovaError::Width { bits });
        }
        let mut space = Space::new(bits)?;
        space.reserve(Extent { start: 0, end: 1 })?;
        Ok(Self { space: Mutex::new(space), bits })
    }

    /// Returns the width of an address in bits.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Allocates `len` bytes at a multiple of `align`, the last byte at or below `limit`: the first
    /// such range. O(log width).
    ///
    /// `len` is rounded up to 4 KiB, and to nothing larger; the returned range has the rounded
    /// length. `align` is a power of two up to 1 GiB; less than 4 KiB is 4 KiB. Unless `limit`
    /// forbids it, addresses above 4 GiB are preferred: those below are left to devices that reach
    /// no others. No allocation crosses the line at 4 GiB, so that a space of 33 bits has none
    /// longer than 4 GiB. ([`alloc_at`](Self::alloc_at) may cross it.)
    ///
    /// For alignments of 4 KiB, 2 MiB and 1 GiB it fails only if there is no such range on either
    /// side of 4 GiB. For one between two of these it may also fail in a fragmented space, if every
    /// free run is shorter than `len + align` and none fits the next page size.
    ///
    /// # Errors
    /// [`IovaError::Length`], [`IovaError::Alignment`], [`IovaError::Exhausted`] (with a `limit`
    /// O(2 MiB regions with a map + free runs up to there)); [`IovaError::NoMemory`] if the
    /// metadata cannot grow.
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
                let last = Iova::new((space.end() * Self::GRANULE) - 1);
                Err(IovaError::Exhausted {
                    len,
                    align,
                    limit: limit.map_or(last, |limit| limit.min(last)),
                    in_use: space.bytes_in_use(),
                    largest_free: space.largest_free(end),
                })
            }
        }
    }

    /// Allocates this range, which must be free: for identity mappings, or addresses fixed
    /// elsewhere. O(log width).
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`],
    /// [`IovaError::InUse`]; [`IovaError::NoMemory`] if the metadata cannot grow.
    pub fn alloc_at(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().alloc_at(extent_of(range))
    }

    /// Frees what was allocated: an allocation, several that abut, or a part. O(log width + 2 MiB
    /// regions in `range` that several allocations had shared).
    ///
    /// Freeing whole allocations needs no memory. Freeing a part needs some (at most 24 nodes and 2
    /// maps, about 10 KiB) if the allocation it belongs to covers a whole 2 MiB region that the
    /// part cuts.
    ///
    /// # Errors
    /// [`IovaError::Misaligned`], [`IovaError::Outside`], [`IovaError::Reserved`];
    /// [`IovaError::AlreadyFree`] if all of it is free, [`IovaError::PartlyFree`] if part of it is;
    /// [`IovaError::NoMemory`] for a part, as above.
    pub fn free(&self, range: IovaRange) -> Result<(), IovaError> {
        self.check(range)?;
        self.space.lock().free(extent_of(range))
    }

    /// Reserves every granule that `range` touches for good: MSI windows, ranges that the host
    /// reports.
    ///
    /// What is reserved already, or beyond the width, may be reserved again. O(log width +
    /// reservations).
    ///
    /// # Errors
    /// [`IovaError::InUse`] if part of it is allocated; [`IovaError::NoMemory`] if the metadata
    /// cannot grow.
    pub fn reserve(&self, range: IovaRange) -> Result<(), IovaError> {
        self.space.lock().reserve(extent_of(range))
    }

    /// Returns the statistics. Walks the whole space, with the lock held: O(2 MiB regions with a
    /// map + free runs + reservations), about 10 ns for each.
    pub fn stats(&self) -> IovaStats {
        self.space.lock().stats()
    }

    /// Returns how much memory the metadata takes: 64 bytes for each 2 MiB region that is neither
    /// free nor allocated as a whole, and about as much for the tree above it where such regions
    /// are neighbours.
    pub fn metadata_bytes(&self) -> usize {
        self.space.lock().metadata_bytes()
    }

    /// Checks that a range is whole granules of this space.
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
