//! The memory that the software IOMMU may access.

use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::ptr::NonNull;

const PAGE: usize = 4096;

/// Registered memory, by address.
#[derive(Debug, Default)]
pub(super) struct Registry(BTreeMap<usize, DmaMemory<'static>>);

impl Registry {
    /// Adds memory. It stays here, and in the caches of devices, until it is removed and dropped
    /// from all of them.
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

/// Owned, zeroed pages, of a mapping of their own.
#[derive(Debug)]
pub(super) struct MappedPages {
    mapped: NonNull<u8>,
    mapped_bytes: usize,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is accessed as `TablePage`s or as `DmaMemory` only, which are atomics.
unsafe impl Send for MappedPages {}
// SAFETY: as for `Send`.
unsafe impl Sync for MappedPages {}

impl MappedPages {
    /// Maps at least `bytes`, and at least a page, aligned to `align` (a power of two).
    ///
    /// Not from the allocator, which writes zeros to memory that it has used before: a table that
    /// grows by 4 MiB would pause for half a millisecond. A new mapping is zeroed page by page as
    /// it is used.
    pub(super) fn new(
        what: &'static str,
        bytes: usize,
        align: usize,
    ) -> Result<Self, BackendError> {
        let error = |code| BackendError::NoMemory { what, bytes, code };
        let (align, no_memory) = (align.max(PAGE), || error(libc::ENOMEM));
        let len = bytes.max(PAGE).checked_next_multiple_of(PAGE).ok_or_else(no_memory)?;
        // A mapping begins at a multiple of the page size.
        let mapped_bytes = len.checked_add(align - PAGE).ok_or_else(no_memory)?;
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, access, kind, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(error(
                std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM),
            ));
        }
        let mapped = NonNull::new(mapped.cast::<u8>()).ok_or_else(no_memory)?;
        let skip = mapped.addr().get().next_multiple_of(align) - mapped.addr().get();
        // SAFETY: `skip` is at most `align - PAGE`, and `len + align - PAGE` bytes are mapped.
        let base = unsafe { mapped.add(skip) };
        Ok(Self { mapped, mapped_bytes, base, len })
    }

    /// Returns the start of the memory, for table pages.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the number of bytes: a multiple of 4096.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Takes the memory for all of it now, on hugepages where it is aligned to them and the kernel
    /// has some.
    pub(super) fn touch(&self) {
        #[cfg(not(miri))]
        // SAFETY: `base..base + len` is part of the mapping of `new`, which lives as long as
        // `self`; the advice changes no contents and removes no access. An error means plain pages.
        unsafe {
            libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE)
        };
        for offset in (0..self.len).step_by(PAGE) {
            // What a new page holds, so nothing changes.
            let _ = self.memory().write_u64(offset, 0);
        }
    }

    pub(super) fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: mapped until `drop`; no reference into it exists.
        unsafe { DmaMemory::from_raw(self.base, self.len) }
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing refers to any more, and which is unmapped
        // once.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.mapped_bytes) };
    }
}
