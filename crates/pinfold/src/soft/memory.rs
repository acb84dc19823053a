//! The memory that the software IOMMU may touch.

use super::to_usize;
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::TablePage;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// Memory that was admitted, by address.
#[derive(Debug, Default)]
pub(super) struct Registry(BTreeMap<usize, DmaMemory<'static>>);

impl Registry {
    /// The memory stays in here, and in what a device has found, until it is removed and forgotten by all devices.
    pub(super) fn add(&mut self, memory: DmaMemory<'static>) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        // Of the entries that begin before the end of `memory`, the last one reaches furthest.
        let before = self.0.range(..addr.saturating_add(len)).next_back();
        if before.is_some_and(|(start, other)| start + other.len() > addr) {
            return Err(BackendError::AlreadyRegistered { addr, len });
        }
        self.0.insert(addr, memory);
        Ok(())
    }

    /// Whether exactly this memory was there.
    pub(super) fn remove(&mut self, memory: DmaMemory) -> bool {
        let same = self.0.get(&memory.addr()).is_some_and(|other| other.len() == memory.len());
        same && self.0.remove(&memory.addr()).is_some()
    }

    /// The admitted memory in which `addr..addr + len` lies.
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<DmaMemory<'static>> {
        let (_, memory) = self.0.range(..=addr).next_back()?;
        inside(*memory, addr, len).map(|_| *memory)
    }

    pub(super) fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let refused = BackendError::NotRegistered { addr, len };
        if self.find(addr, len).is_none() {
            return Err(refused);
        }
        PhysRange::new(PhysAddr::new(addr as u64), len as u64).map_err(|_| refused)
    }
}

/// The part `addr..addr + len` of `memory`, if it is one.
pub(super) fn inside(memory: DmaMemory<'_>, addr: usize, len: usize) -> Option<DmaMemory<'_>> {
    memory.part(addr.checked_sub(memory.addr())?, len).ok()
}

/// Owned, zeroed, page-aligned memory for the table.
#[derive(Debug)]
pub(super) struct TableMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is reached as `TablePage`s only, which are atomics.
unsafe impl Send for TableMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for TableMemory {}

impl TableMemory {
    pub(super) fn new(bytes: usize) -> Result<Self, BackendError> {
        let refused =
            BackendError::NoMemory { what: "the table of a software IOMMU", bytes, code: libc::ENOMEM };
        let rounded = bytes.max(PAGE).checked_next_multiple_of(PAGE).ok_or(refused.clone())?;
        let layout = Layout::from_size_align(rounded, PAGE).map_err(|_| refused.clone())?;
        // SAFETY: the size of the layout is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        Ok(Self { base: NonNull::new(base).ok_or(refused)?, layout })
    }

    pub(super) fn pages(&self) -> &[TablePage] {
        // SAFETY: the allocation is one, zeroed, aligned to 4096 and a multiple of 4096 bytes, and lives until `drop`;
        // it is reached through such slices only.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.layout.size() / PAGE) }
    }

    /// Where the first page is, for the table and for the walker.
    pub(super) fn phys(&self) -> PhysAddr {
        PhysAddr::new(self.base.as_ptr().addr() as u64)
    }

    /// The number of the page at `addr`, if there is one.
    pub(super) fn page_at(&self, addr: u64) -> Option<usize> {
        let page = to_usize(addr.checked_sub(self.phys().raw())? / PAGE as u64);
        (page < self.pages().len()).then_some(page)
    }
}

impl Drop for TableMemory {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and is freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}
