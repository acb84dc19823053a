//! The table pages that a caller donates.

use super::error::TableError;
use super::page_index::PageIndex;
use crate::addr::PhysAddr;
use core::sync::atomic::AtomicU64;

/// One table page: 512 entries.
///
/// It is reached as words of 8 bytes and in no other way: an entry is written whole, and a walker
/// reads it whole. So it is not [`DmaMemory`](crate::mem::DmaMemory), whose accesses are atomics of
/// one byte.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct TablePage([AtomicU64; 512]);

const _: () = assert!(size_of::<TablePage>() == TablePages::PAGE_BYTES);

impl TablePage {
    /// A page all entries of which are `entry`.
    pub fn filled(entry: u64) -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(entry)))
    }

    /// The entries.
    pub fn entries(&self) -> &[AtomicU64; 512] {
        &self.0
    }
}

/// Memory for table pages, donated to one table.
#[derive(Debug)]
pub struct TablePages {
    pub(super) pages: &'static [TablePage],
    pub(super) phys: PhysAddr,
    pub(super) count: u32,
}

impl TablePages {
    /// How many bytes a table page has.
    pub const PAGE_BYTES: usize = 4096;

    /// The table pages `pages`, which the hardware finds at `phys`. They need not be zero.
    ///
    /// They are a table's from here on: nothing else may write them, and they must not be mapped
    /// for any device.
    ///
    /// # Errors
    /// [`TableError::BadPages`] where there is not one page, or more than 2^27 - 1, or where `phys`
    /// is no multiple of 4096, or the end is beyond 2^52.
    pub fn new(pages: &'static [TablePage], phys: PhysAddr) -> Result<Self, TableError> {
        let bad = TableError::BadPages { phys, len: size_of_val(pages) };
        let count = u32::try_from(pages.len()).map_err(|_| bad)?;
        let end = phys.checked_add(u64::from(count) * 4096).ok_or(bad)?;
        if count == 0
            || count > PageIndex::MAX_OFFSET
            || !phys.is_aligned(4096)
            || end.raw() > 1 << 52
        {
            return Err(bad);
        }
        Ok(Self { pages, phys, count })
    }

    /// Returns the pages.
    pub const fn pages(&self) -> &'static [TablePage] {
        self.pages
    }

    /// Returns where the hardware finds the first of them.
    pub const fn phys(&self) -> PhysAddr {
        self.phys
    }

    /// Checks that a physical address of `bits` bits reaches all of them.
    pub(super) fn are_below(&self, bits: u32) -> Result<(), TableError> {
        let len = u64::from(self.count) * Self::PAGE_BYTES as u64;
        // No wrap: the end is at most 2^52.
        if (self.phys.raw() + (len - 1)) >> bits != 0 {
            return Err(TableError::PhysOutside { phys: self.phys, len, bits });
        }
        Ok(())
    }
}
