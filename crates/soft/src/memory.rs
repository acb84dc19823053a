//! The memory that the software IOMMU may access.

use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
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
    allocated: NonNull<u8>,
    layout: Layout,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is accessed as `TablePage`s or as `DmaMemory` only, which are atomics.
unsafe impl Send for HeapPages {}
// SAFETY: as for `Send`.
unsafe impl Sync for HeapPages {}

impl HeapPages {
    /// Allocates at least `bytes`, and at least a page, aligned to `align` (a power of two).
    ///
    /// The alignment is made here: the standard allocator writes zeros to aligned memory, which would take all of a large
    /// allocation at once instead of page by page as it is used.
    pub(super) fn new(what: &'static str, bytes: usize, align: usize) -> Result<Self, BackendError> {
        let error = BackendError::NoMemory { what, bytes, code: libc::ENOMEM };
        let align = align.max(PAGE);
        let len = bytes.max(PAGE).checked_next_multiple_of(PAGE).ok_or(error.clone())?;
        let with_slack = len.checked_add(align).ok_or(error.clone())?;
        let layout = Layout::from_size_align(with_slack, align_of::<u64>()).map_err(|_| error.clone())?;
        // SAFETY: the size of the layout is not 0.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(error)?;
        let skip = allocated.addr().get().next_multiple_of(align) - allocated.addr().get();
        // SAFETY: `skip` is less than `align`, and `len + align` bytes were allocated.
        let base = unsafe { allocated.add(skip) };
        Ok(Self { allocated, layout, base, len })
    }

    /// Returns the start of the memory, for table pages.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the number of bytes: a multiple of 4096.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: allocated until `drop`; no reference into it exists.
        unsafe { DmaMemory::from_raw(self.base, self.len) }
    }
}

impl Drop for HeapPages {
    fn drop(&mut self) {
        // SAFETY: `allocated` came from `alloc_zeroed` with this layout, and is freed once.
        unsafe { dealloc(self.allocated.as_ptr(), self.layout) }
    }
}
