//! The table pages that a caller donates.

use super::TableError;
use crate::addr::PhysAddr;
use crate::mem::DmaMemory;
use core::sync::atomic::AtomicU64;

/// Memory for table pages, donated to one table.
#[derive(Debug)]
pub struct TablePages {
    pub(super) memory: DmaMemory<'static>,
    pub(super) phys: PhysAddr,
    pub(super) count: u32,
}

impl TablePages {
    /// How many bytes a table page has.
    pub const PAGE_BYTES: usize = 4096;

    /// The table pages in `memory`, which the hardware finds at `phys`. They need not be zero.
    ///
    /// The memory is a table's from here on: nobody else may write it, and it must not be mapped for any device.
    ///
    /// # Errors
    /// [`TableError::BadPages`] where there is not one page, or where either address or the length is no multiple of
    /// 4096, or the end is beyond 2^52.
    pub fn new(memory: DmaMemory<'static>, phys: PhysAddr) -> Result<Self, TableError> {
        let bad = TableError::BadPages { phys, len: memory.len() };
        let count = u32::try_from(memory.len() / Self::PAGE_BYTES).map_err(|_| bad)?;
        let aligned =
            (memory.addr() | memory.len()).is_multiple_of(Self::PAGE_BYTES) && phys.is_aligned(4096);
        let end = phys.checked_add(u64::from(count) * 4096).ok_or(bad)?;
        if count == 0 || count == u32::MAX || !aligned || end.raw() > 1 << 52 {
            return Err(bad);
        }
        Ok(Self { memory, phys, count })
    }

    /// All entries of all pages, 512 a page.
    pub(super) fn entries(&self) -> &[AtomicU64] {
        let first = self.memory.as_ptr().cast::<AtomicU64>();
        // SAFETY: `new` checked that the memory is aligned to 4096 and holds `count` pages of 512 words; the contract of
        // `DmaMemory::from_raw` keeps it valid and reached only by atomics for as long as it is used, and the
        // slice lives no longer than the borrow of `self`.
        unsafe { core::slice::from_raw_parts(first.as_ptr(), self.count as usize * 512) }
    }
}
