//! The memory of a table: pages that a caller donates, at once or as the table grows, and a record
//! beside each page. Pages are added in chunks and never removed.

use super::error::TableError;
use crate::addr::PhysAddr;
use crate::sync;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use spin::Once;

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
    /// The size of a table page in bytes.
    pub const PAGE_BYTES: usize = 4096;

    /// The table pages `pages`, which the hardware finds at `phys`. They need not be zero.
    ///
    /// # Errors
    /// [`TableError::BadPages`] where there is not one page, or more than 2^27 - 1, or where `phys`
    /// is no multiple of 4096, or the end is beyond 2^52.
    ///
    /// # Safety
    /// If hardware walks the table: the pages are contiguous at `phys`, or it would follow links to
    /// other memory and take its contents for entries. They are one table's from here on: nothing
    /// else writes them, and no device reaches them.
    pub unsafe fn new(pages: &'static [TablePage], phys: PhysAddr) -> Result<Self, TableError> {
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

    /// Creates those of a test, which no hardware walks.
    #[cfg(test)]
    pub(crate) fn of_a_test(
        pages: &'static [TablePage],
        phys: PhysAddr,
    ) -> Result<Self, TableError> {
        // SAFETY: no hardware walks them; a test that changes them besides the table says so.
        unsafe { Self::new(pages, phys) }
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

/// The source of a table's pages, beyond those that it was created with.
///
/// ```
/// use pinfold_core::addr::PhysAddr;
/// use pinfold_core::table::{Table, TableMemory, TablePage, TablePages, VtdSecondStage};
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// Pages from the heap, at made-up physical addresses one after the other.
/// struct Heap(AtomicU64);
///
/// impl TableMemory for Heap {
///     fn grow(&self, pages: u32) -> Option<TablePages> {
///         let phys = self.0.fetch_add(u64::from(pages) * 4096, Ordering::Relaxed);
///         let pages = (0..pages).map(|_| TablePage::filled(0)).collect();
///         // SAFETY: no hardware walks the table; the pages are nobody else's.
///         unsafe { TablePages::new(Vec::leak(pages), PhysAddr::new(phys)) }.ok()
///     }
///     fn advice(&self) -> &'static str {
///         "add memory to the machine"
///     }
/// }
///
/// let heap = Heap(AtomicU64::new(1 << 20));
/// let first = heap.grow(1).ok_or("no memory")?;
/// let table = Table::<VtdSecondStage>::new(first, 3)?.with_memory(Box::new(heap));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait TableMemory: Send + Sync {
    /// Returns more pages for the same table, or `None` if there are none.
    ///
    /// A table asks for as many `pages` as it has, so that it grows in
    /// [`MAX_CHUNKS`] steps at most; fewer are accepted where there are no more.
    /// It is called with the table's lock held: it must not use the table.
    fn grow(&self, pages: u32) -> Option<TablePages>;

    /// Returns the advice to the user when no page is left: names the option that raises the limit.
    /// Part of [`TableError::NoPages`].
    fn advice(&self) -> &'static str;
}

/// The most pieces of memory that one table consists of. Pieces that double in size reach 2^27
/// pages, 512 GiB, long before.
pub const MAX_CHUNKS: usize = 32;

/// The number of a page among those donated to a table: its chunk in the upper 5 bits, its place
/// there in the lower 27.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageIndex(u32);

const OFFSET_BITS: u32 = 27;
const _: () = assert!(MAX_CHUNKS == 1 << (u32::BITS - OFFSET_BITS));

impl PageIndex {
    /// The number of no page.
    pub(super) const NONE: Self = Self(u32::MAX);
    /// The most pages of a chunk; the last number is that of no page.
    pub(super) const MAX_OFFSET: u32 = (1 << OFFSET_BITS) - 1;

    /// Returns the number of a page, unless there is no such.
    #[inline]
    pub(super) fn new(chunk: usize, offset: usize) -> Option<Self> {
        let (chunk, offset) = (u32::try_from(chunk).ok()?, u32::try_from(offset).ok()?);
        (chunk < 1 << (u32::BITS - OFFSET_BITS) && offset < Self::MAX_OFFSET)
            .then_some(Self(chunk << OFFSET_BITS | offset))
    }

    #[inline]
    pub(super) const fn chunk(self) -> usize {
        (self.0 >> OFFSET_BITS) as usize
    }

    #[inline]
    pub(super) const fn offset(self) -> usize {
        (self.0 & Self::MAX_OFFSET) as usize
    }
}

const PAGE_BYTES: u64 = TablePages::PAGE_BYTES as u64;

/// The record of a page that is read without the lock.
#[derive(Debug)]
pub(super) struct PageRecord {
    /// A generation, some bits and a count: see [`PageState`](super::state::PageState).
    pub(super) state: sync::AtomicU64,
    /// The first address that the page translates, with its level in the lowest bits. Written when
    /// a generation begins, before anything is counted in it.
    pub(super) home: sync::AtomicU64,
    /// Represents the entries, which loom does not see: see
    /// [`Store::raw`](super::store::Store::raw).
    #[cfg(loom)]
    pub(super) entries: sync::AtomicU64,
}

/// Pages donated together.
#[derive(Debug)]
pub(super) struct Chunk {
    number: usize,
    pages: TablePages,
    records: Box<[PageRecord]>,
}

/// A page of a table, with its chunk, so that no access searches the chunks again.
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
    let word = || sync::AtomicU64::new(0);
    Some((0..count).map(|_| PageRecord { state: word(), home: word(), entries: word() }).collect())
}
