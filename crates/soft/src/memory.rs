//! The memory that the software IOMMU may access, and the memory of its table.

use pinfold_core::addr::PhysAddr;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{MAX_CHUNKS, TablePage, TablePages};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

const PAGE: usize = 4096;

/// Registered memory, by address.
#[derive(Debug, Default)]
pub(super) struct Registry(BTreeMap<usize, DmaMemory<'static>>);

impl Registry {
    /// Adds memory. It stays here, and in the caches of devices, until it is removed and dropped
    /// from all of them.
    pub(super) fn add(&mut self, memory: DmaMemory<'static>) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        // The last of the entries that begin before the end of `memory` reaches furthest.
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

    /// Allocates the memory for all of it now, on hugepages where it is aligned to them and the
    /// kernel has some.
    pub(super) fn touch(&self) {
        #[cfg(not(miri))]
        // SAFETY: `base..base + len` is part of the mapping of `new`, which lives as long as
        // `self`; the advice changes no contents and removes no access. An error means plain pages.
        unsafe {
            libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE)
        };
        for offset in (0..self.len).step_by(PAGE) {
            // A new page holds zeroes, so nothing changes.
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

// The memory of the table: chunks of pages, allocated as the table grows.

/// Pages of the first chunk.
const FIRST: usize = 64;
/// The size of a hugepage.
const HUGE: usize = 2 << 20;

/// The number of a page: its chunk, and its place there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageNumber {
    chunk: u32,
    page: u32,
}

impl PageNumber {
    /// Returns the number in 48 bits.
    pub(super) fn pack(self) -> u64 {
        u64::from(self.chunk) << 32 | u64::from(self.page)
    }

    /// Returns the number that was packed.
    #[expect(clippy::cast_possible_truncation, reason = "the halves of what was packed")]
    pub(super) fn unpack(packed: u64) -> Self {
        Self { chunk: (packed >> 32) as u32, page: packed as u32 }
    }
}

/// The pages of the table. Chunks are added, and freed together.
#[derive(Debug)]
pub(super) struct Tables {
    chunks: [OnceLock<MappedPages>; MAX_CHUNKS],
    /// Chunks that can be read.
    len: AtomicUsize,
    /// The pages that may still be added.
    left: Mutex<usize>,
}

impl Tables {
    /// Allocates the first pages of `bytes` at most, and touches those of the first `reserved`
    /// bytes.
    pub(super) fn new(bytes: usize, reserved: usize) -> Result<Self, BackendError> {
        let pages = bytes.div_ceil(PAGE).max(1);
        let (chunks, len) = ([const { OnceLock::new() }; MAX_CHUNKS], AtomicUsize::new(0));
        let tables = Self { chunks, len, left: Mutex::new(pages) };
        let reserved = reserved.div_ceil(PAGE);
        let first =
            tables.add(FIRST.max(reserved), if reserved < HUGE / PAGE { PAGE } else { HUGE })?;
        if let Some(memory) =
            tables.chunks.get(first).and_then(OnceLock::get).filter(|_| reserved > 0)
        {
            memory.touch();
        }
        Ok(tables)
    }

    /// Allocates a chunk of `pages` pages, or of those that are left, aligned to `align`, and
    /// returns its number.
    fn add(&self, pages: usize, align: usize) -> Result<usize, BackendError> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (what, pages) = ("the table of a software IOMMU", pages.min(*left));
        let number = self.len.load(Ordering::Relaxed);
        let error = BackendError::NoMemory { what, bytes: pages * PAGE, code: libc::ENOMEM };
        let place = self.chunks.get(number).filter(|_| pages > 0).ok_or(error)?;
        let memory = MappedPages::new(what, pages * PAGE, align)?;
        place.get_or_init(|| memory);
        *left -= pages;
        self.len.store(number + 1, Ordering::Release);
        Ok(number)
    }

    /// Allocates a chunk for a table that grows.
    ///
    /// # Safety
    /// The pages are used only while `self` exists, and form one table with the others.
    pub(super) unsafe fn grow(&self, pages: u32) -> Option<TablePages> {
        let number = self.add(to_usize(pages.into()), PAGE).ok()?;
        let (pages, phys) = (std::ptr::from_ref(self.pages(number)), self.phys(number));
        // SAFETY: the chunk is freed with `self`, which lives while the pages are used, as the
        // caller promises.
        let pages = unsafe { &*pages };
        // SAFETY: the walker finds the chunk's pages there; they are given to one table.
        unsafe { TablePages::new(pages, phys) }.ok()
    }

    /// Returns the pages of a chunk; none if there is no such chunk.
    pub(super) fn pages(&self, chunk: usize) -> &[TablePage] {
        let Some(memory) = self.chunks.get(chunk).and_then(OnceLock::get) else { return &[] };
        // SAFETY: the mapping is zeroed, aligned to 4096 and a multiple of 4096 bytes, and lives
        // until `self` is dropped; it is accessed through such slices only.
        unsafe { std::slice::from_raw_parts(memory.start().as_ptr().cast(), memory.len() / PAGE) }
    }

    /// Returns the address of the first page of a chunk, for the table and for the walker.
    pub(super) fn phys(&self, chunk: usize) -> PhysAddr {
        let memory = self.chunks.get(chunk).and_then(OnceLock::get);
        PhysAddr::new(memory.map_or(0, |memory| memory.start().addr().get() as u64))
    }

    /// Returns a page.
    pub(super) fn page(&self, number: PageNumber) -> Option<&TablePage> {
        self.pages(to_usize(number.chunk.into())).get(to_usize(number.page.into()))
    }

    /// Returns the number of the page at `addr`, if it is one of these. The chunks double in size,
    /// so this is O(log pages); the newest is looked at first.
    pub(super) fn page_at(&self, addr: u64) -> Option<PageNumber> {
        let chunks = self.chunks.iter().enumerate().take(self.len.load(Ordering::Acquire));
        chunks.rev().find_map(|(chunk, memory)| {
            let memory = memory.get()?;
            let offset = to_usize(addr.checked_sub(memory.start().addr().get() as u64)?);
            let page = u32::try_from(offset / PAGE).ok().filter(|_| offset < memory.len())?;
            Some(PageNumber { chunk: u32::try_from(chunk).ok()?, page })
        })
    }
}

// Conversions between the 64 bits of addresses and this machine's integers.

/// Converts an address or an offset. One that does not fit (on 32 bits) becomes an address where
/// nothing is.
#[inline]
pub(crate) fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
