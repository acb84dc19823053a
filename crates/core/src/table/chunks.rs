//! The memory of a table: chunks of pages, and a record beside each page. Chunks are added and
//! never removed.

use super::error::TableError;
use super::page_index::{MAX_CHUNKS, PageIndex};
use super::pages::{TablePage, TablePages};
use crate::addr::PhysAddr;
use crate::sync::AtomicU64;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use spin::Once;

const PAGE_BYTES: u64 = TablePages::PAGE_BYTES as u64;

/// What is known of a page without the lock.
#[derive(Debug)]
pub(super) struct PageRecord {
    /// A generation, some bits and a count: see [`PageState`](super::state::PageState).
    pub(super) state: AtomicU64,
    /// The first address that the page translates, with its level in the lowest bits. Written when
    /// a generation begins, before anything is counted in it.
    pub(super) home: AtomicU64,
}

/// Pages donated together.
#[derive(Debug)]
pub(super) struct Chunk {
    number: usize,
    pages: TablePages,
    records: Box<[PageRecord]>,
}

/// A page of a table: in reach without another look at the chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'t> {
    chunk: &'t Chunk,
    memory: &'static TablePage,
    offset: usize,
}

impl<'t> Page<'t> {
    #[inline]
    pub(super) fn memory(self) -> &'static TablePage {
        self.memory
    }

    #[inline]
    pub(super) fn record(self) -> &'t PageRecord {
        // A chunk has as many records as pages.
        &self.chunk.records[self.offset]
    }

    pub(super) fn phys(self) -> PhysAddr {
        // In range: `TablePages::new` has checked the end of the chunk.
        PhysAddr::new(self.chunk.pages.phys.raw() + self.offset as u64 * PAGE_BYTES)
    }

    pub(super) fn index(self) -> PageIndex {
        PageIndex::new(self.chunk.number, self.offset).unwrap_or(PageIndex::NONE)
    }
}

impl PartialEq for Page<'_> {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self.memory, other.memory)
    }
}

impl Chunk {
    fn new(number: usize, pages: TablePages) -> Result<Self, TableError> {
        let records = zeroed_records(pages.count as usize);
        let records = records.ok_or(TableError::NoMemory { pages: pages.count })?;
        Ok(Self { number, pages, records })
    }

    #[inline]
    fn page(&self, offset: usize) -> Option<Page<'_>> {
        Some(Page { chunk: self, memory: self.pages.pages.get(offset)?, offset })
    }

    /// Returns the page at `phys`, if it is one of the chunk's.
    #[inline]
    fn page_at(&self, phys: PhysAddr) -> Option<Page<'_>> {
        self.page(
            usize::try_from(phys.raw().wrapping_sub(self.pages.phys.raw()) / PAGE_BYTES).ok()?,
        )
    }
}

/// All chunks. Read without a lock; added to under the table's lock.
#[derive(Debug)]
pub(super) struct Chunks {
    root: &'static TablePage,
    first: Chunk,
    others: [Once<Chunk>; MAX_CHUNKS - 1],
    // A thread that reads a link has acquired the addition of the chunk that it points into. (So
    // loom need not see these.)
    len: AtomicUsize,
    capacity: AtomicU32,
}

impl Chunks {
    pub(super) fn new(pages: TablePages) -> Result<Self, TableError> {
        let (others, len) = ([const { Once::new() }; MAX_CHUNKS - 1], AtomicUsize::new(1));
        let bad = TableError::BadPages { phys: pages.phys, len: 0 };
        let (root, capacity) = (pages.pages.first().ok_or(bad)?, AtomicU32::new(pages.count));
        Ok(Self { root, first: Chunk::new(0, pages)?, others, len, capacity })
    }

    /// Adds pages. Under the lock.
    pub(super) fn add(&self, pages: TablePages) -> Result<(), TableError> {
        let count = pages.count;
        let no_memory = TableError::NoMemory { pages: count };
        let len = self.len.load(Ordering::Relaxed);
        let free = self.others.get(len - 1).ok_or(no_memory)?;
        let chunk = Chunk::new(len, pages)?;
        free.call_once(|| chunk);
        self.len.store(len + 1, Ordering::Release);
        self.capacity.fetch_add(count, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the number of pages.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Returns whether another chunk can be added.
    pub(super) fn can_grow(&self) -> bool {
        self.len.load(Ordering::Relaxed) < MAX_CHUNKS
    }

    /// Returns the first page.
    #[inline]
    pub(super) fn root(&self) -> Page<'_> {
        Page { chunk: &self.first, memory: self.root, offset: 0 }
    }

    /// Returns the physical address of the first page.
    #[inline]
    pub(super) fn root_phys(&self) -> PhysAddr {
        self.first.pages.phys
    }

    /// Returns the page of a number that came from the directory.
    #[inline]
    pub(super) fn page(&self, index: PageIndex) -> Page<'_> {
        let chunk = match index.chunk().checked_sub(1) {
            None => Some(&self.first),
            Some(other) => self.others[other].get(),
        };
        match chunk.and_then(|chunk| chunk.page(index.offset())) {
            Some(page) => page,
            None => unreachable!("the number of a page that was never added"),
        }
    }

    /// Returns the page at `phys`, if it is one of these. The chunk of `near` is looked at first,
    /// then the newest, which holds half of the pages if chunks double; O(log pages) then.
    #[inline]
    pub(super) fn page_at<'t>(&'t self, near: Page<'t>, phys: PhysAddr) -> Option<Page<'t>> {
        near.chunk.page_at(phys).or_else(|| self.page_anywhere(phys))
    }

    fn page_anywhere(&self, phys: PhysAddr) -> Option<Page<'_>> {
        self.newest_first().find_map(|chunk| chunk.page_at(phys))
    }

    fn newest_first(&self) -> impl Iterator<Item = &Chunk> {
        let others = self.others.iter().take(self.len.load(Ordering::Acquire) - 1).rev();
        others.filter_map(Once::get).chain([&self.first])
    }

    /// Checks that a physical address of `bits` bits reaches all pages.
    pub(super) fn are_below(&self, bits: u32) -> Result<(), TableError> {
        self.newest_first().try_for_each(|chunk| chunk.pages.are_below(bits))
    }
}

/// Allocates `count` records of 0, which is at least 1; `None` if there is no memory. The system's
/// zeroed memory is not touched before it is used, so a large chunk does not make one map pause.
#[cfg(not(loom))]
fn zeroed_records(count: usize) -> Option<Box<[PageRecord]>> {
    let layout =
        core::alloc::Layout::array::<PageRecord>(count).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the size of the layout is not 0.
    let start = unsafe { alloc::alloc::alloc_zeroed(layout) }.cast::<PageRecord>();
    if start.is_null() {
        return None;
    }
    let records = core::ptr::slice_from_raw_parts_mut(start, count);
    // SAFETY: allocated just now by the global allocator with the layout of `count` records; one of
    // which all bits are 0 is two atomics of 0.
    Some(unsafe { Box::from_raw(records) })
}

#[cfg(loom)]
fn zeroed_records(count: usize) -> Option<Box<[PageRecord]>> {
    let zero = || PageRecord { state: AtomicU64::new(0), home: AtomicU64::new(0) };
    Some((0..count).map(|_| zero()).collect())
}
