//! The memory of a table: chunks of pages, and a state word beside each page. Chunks are added and never removed.

use super::error::TableError;
use super::memory::MAX_CHUNKS;
use super::page_index::PageIndex;
use super::pages::{TablePage, TablePages};
use crate::addr::PhysAddr;
use crate::sync::AtomicU64;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use spin::Once;

/// Pages donated together.
#[derive(Debug)]
struct Chunk {
    pages: &'static [TablePage],
    phys: PhysAddr,
    bytes: u64,
    states: Box<[AtomicU64]>,
}

/// All chunks. Read without a lock; added to under the table's lock.
#[derive(Debug)]
pub(super) struct Chunks {
    chunks: [Once<Chunk>; MAX_CHUNKS],
    // Whoever reads a link has acquired the addition of the chunk that it points into. (So loom need not see these.)
    len: AtomicUsize,
    capacity: AtomicU32,
}

impl Chunks {
    pub(super) fn new() -> Self {
        let chunks = [const { Once::new() }; MAX_CHUNKS];
        Self { chunks, len: AtomicUsize::new(0), capacity: AtomicU32::new(0) }
    }

    /// Adds pages. Under the lock.
    pub(super) fn add(&self, pages: TablePages) -> Result<(), TableError> {
        let no_memory = TableError::NoMemory { pages: pages.count };
        let len = self.len.load(Ordering::Relaxed);
        let free = self.chunks.get(len).ok_or(no_memory)?;
        let states = zeroed_words(pages.count as usize).ok_or(no_memory)?;
        let bytes = u64::from(pages.count) * TablePages::PAGE_BYTES as u64;
        free.call_once(|| Chunk { pages: pages.pages, phys: pages.phys, bytes, states });
        self.len.store(len + 1, Ordering::Release);
        self.capacity.fetch_add(pages.count, Ordering::Relaxed);
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

    // Pages come from the directory or from `page_at`, so their chunks exist.
    #[inline]
    fn chunk(&self, page: PageIndex) -> &Chunk {
        match self.chunks[page.chunk()].get() {
            Some(chunk) => chunk,
            None => unreachable!("a page of a chunk that was never added"),
        }
    }

    #[inline]
    pub(super) fn page(&self, page: PageIndex) -> &'static TablePage {
        &self.chunk(page).pages[page.offset()]
    }

    #[inline]
    pub(super) fn state(&self, page: PageIndex) -> &AtomicU64 {
        &self.chunk(page).states[page.offset()]
    }

    pub(super) fn phys(&self, page: PageIndex) -> PhysAddr {
        // In range: `TablePages::new` has checked the end of the chunk.
        PhysAddr::new(self.chunk(page).phys.raw() + page.offset() as u64 * TablePages::PAGE_BYTES as u64)
    }

    /// Returns the page at `phys`, if it is one of these. O(chunks), that is O(log pages) if chunks double; the newest, which
    /// then holds half of the pages, is looked at first.
    #[inline]
    pub(super) fn page_at(&self, phys: PhysAddr) -> Option<PageIndex> {
        let len = self.len.load(Ordering::Acquire);
        for (number, chunk) in self.chunks.iter().enumerate().take(len).rev() {
            let chunk = chunk.get()?;
            let offset = phys.raw().wrapping_sub(chunk.phys.raw());
            if offset < chunk.bytes {
                return PageIndex::new(number, usize::try_from(offset / TablePages::PAGE_BYTES as u64).ok()?);
            }
        }
        None
    }
}

/// Allocates `count` words of 0, which is at least 1; `None` if there is no memory. The system's zeroed memory is not
/// touched before it is used, so a large chunk does not make one map pause.
#[cfg(not(loom))]
fn zeroed_words(count: usize) -> Option<Box<[AtomicU64]>> {
    let layout = core::alloc::Layout::array::<AtomicU64>(count).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the size of the layout is not 0.
    let start = unsafe { alloc::alloc::alloc_zeroed(layout) }.cast::<AtomicU64>();
    if start.is_null() {
        return None;
    }
    let words = core::ptr::slice_from_raw_parts_mut(start, count);
    // SAFETY: allocated just now by the global allocator with the layout of `count` words; an atomic of which all bits are 0 is
    // valid.
    Some(unsafe { Box::from_raw(words) })
}

#[cfg(loom)]
fn zeroed_words(count: usize) -> Option<Box<[AtomicU64]>> {
    Some((0..count).map(|_| AtomicU64::new(0)).collect())
}
