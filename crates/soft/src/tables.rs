//! The memory of the table: chunks of pages, allocated as the table grows.

use crate::int::to_usize;
use crate::memory::MappedPages;
use pinfold_core::addr::PhysAddr;
use pinfold_core::domain::BackendError;
use pinfold_core::table::{MAX_CHUNKS, TablePage, TablePages};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

const PAGE: usize = TablePages::PAGE_BYTES;
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
        TablePages::new(unsafe { &*pages }, phys).ok()
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
