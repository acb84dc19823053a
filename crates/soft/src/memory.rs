//! The memory that the software IOMMU may access.

use crate::int::to_usize;
use pinfold_core::addr::PhysAddr;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::TablePage;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// Registered memory, by address.
#[derive(Debug, Default)]
pub(super) struct Registry(BTreeMap<usize, DmaMemory<'static>>);

impl Registry {
    /// Adds memory. It stays here, and in the caches of devices, until it is removed and dropped from all of them.
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

    /// Removes the memory, and returns whether exactly this memory was registered.
    pub(super) fn remove(&mut self, memory: DmaMemory) -> bool {
        let same = self.0.get(&memory.addr()).is_some_and(|other| other.len() == memory.len());
        same && self.0.remove(&memory.addr()).is_some()
    }

    /// Returns the registered memory that contains `addr..addr + len`.
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<DmaMemory<'static>> {
        let (_, memory) = self.0.range(..=addr).next_back()?;
        inside(*memory, addr, len).map(|_| *memory)
    }
}

/// Returns the part `addr..addr + len` of `memory`, if it is inside.
pub(super) fn inside(memory: DmaMemory<'_>, addr: usize, len: usize) -> Option<DmaMemory<'_>> {
    memory.part(addr.checked_sub(memory.addr())?, len).ok()
}

/// Owned, zeroed pages of the heap.
#[derive(Debug)]
pub(super) struct HeapPages {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is accessed as `TablePage`s or as `DmaMemory` only, which are atomics.
unsafe impl Send for HeapPages {}
// SAFETY: as for `Send`.
unsafe impl Sync for HeapPages {}

impl HeapPages {
    /// Allocates at least `bytes`, and at least a page, aligned to `align` (a power of two).
    pub(super) fn new(what: &'static str, bytes: usize, align: usize) -> Result<Self, BackendError> {
        let error = BackendError::NoMemory { what, bytes, code: libc::ENOMEM };
        let rounded = bytes.max(PAGE).checked_next_multiple_of(PAGE).ok_or(error.clone())?;
        let layout = Layout::from_size_align(rounded, align.max(PAGE)).map_err(|_| error.clone())?;
        // SAFETY: the size of the layout is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        Ok(Self { base: NonNull::new(base).ok_or(error)?, layout })
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated until `drop`; no reference into it exists.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }
}

impl Drop for HeapPages {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this layout, and is freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// The pages of the table.
#[derive(Debug)]
pub(super) struct TableMemory(HeapPages);

impl TableMemory {
    pub(super) fn new(bytes: usize) -> Result<Self, BackendError> {
        HeapPages::new("the table of a software IOMMU", bytes, PAGE).map(Self)
    }

    pub(super) fn pages(&self) -> &[TablePage] {
        let pages = self.0.layout.size() / PAGE;
        // SAFETY: the allocation is zeroed, aligned to 4096 and a multiple of 4096 bytes, and lives until `drop`; it is
        // accessed through such slices only.
        unsafe { std::slice::from_raw_parts(self.0.base.as_ptr().cast(), pages) }
    }

    /// Returns the address of the first page, for the table and for the walker.
    pub(super) fn phys(&self) -> PhysAddr {
        PhysAddr::new(self.0.base.as_ptr().addr() as u64)
    }

    /// Returns the number of the page at `addr`, if it is one of these.
    pub(super) fn page_at(&self, addr: u64) -> Option<usize> {
        let page = to_usize(addr.checked_sub(self.phys().raw())? / PAGE as u64);
        (page < self.pages().len()).then_some(page)
    }
}
