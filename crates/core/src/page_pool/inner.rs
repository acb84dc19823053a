//! The state shared by the consumer and all holders of pages, and how long it lives.
//!
//! # Lifetime
//!
//! `refs` counts the handles, and the pages held by a [`Page`](super::Page) or by fragments.
//! Counting each page as it is allocated would cost a read-modify-write per page; instead the count
//! starts with a bias greater than any number of pages, and taking the pool down replaces the bias
//! by the number of pages in use. Once the ring is closed, each freed page decrements the count.
//! Before that, the last access of a freeing thread to the pool is its store into the ring, and the
//! thread that takes the pool down waits for that store.

use super::config::{Config, RawPage, RevocableSource, SyncOps, Tag};
use super::error::{CreateError, TooManyTags};
use super::records::{Directory, PageRecord, State};
use super::ring::{Entry, FRAME_BITS, Ring};
use super::stats::{Counts, Holder};
use crate::addr::Iova;
use crate::dma_pool::{AllocError, FreeError};
use crate::dma_pool::{ChunkSource, span_memory};
use crate::drop_guard::PanicFlag;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering, unique_number};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, TryReserveError};
use alloc::string::String;
use alloc::vec::Vec;
use core::ptr::NonNull;

/// The largest span in bytes: its frame numbers have [`FRAME_BITS`] bits.
const MAX_SPAN: u64 = Frame::BYTES << FRAME_BITS;
const MAX_RING: u32 = 1 << 20;
const MAX_TAGS: usize = (1 << 24) - 1;
/// More than the number of pages; adding as many handles does not overflow 64 bits.
pub(super) const BIAS: u64 = 1 << 40;

/// The action on a chunk when its last page has been returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OnEmpty {
    /// [`ChunkSource::release`].
    Release,
    /// [`RevocableSource::release_hidden`].
    ReleaseHidden,
    /// Nothing: it has been released, or it is quarantined.
    Nothing,
}

/// A run of the source's frames, cut into pages.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub(super) frame: Frame,
    pub(super) order: Order,
    /// Pages not yet returned for good, plus one until the pool is taken down. At 0 the chunk is
    /// released.
    pub(super) pages_out: u32,
    pub(super) on_empty: OnEmpty,
}

pub(super) struct Chunks {
    /// In ascending order of their frames.
    pub(super) list: Vec<Chunk>,
    /// Pages freed by their owners after the ring was closed and before the bias was replaced.
    pub(super) late_owned: u64,
    /// Pages returned after the ring was closed.
    pub(super) late: u64,
}

/// Pages that met a full ring. Capacity for every page is reserved when the pool grows, so a free
/// never allocates.
pub(super) struct Spill {
    pub(super) entries: Vec<Entry>,
    /// Second frees that were discarded to make room.
    pub(super) discarded: u64,
    pub(super) closed: bool,
}

/// A pool's shared state. No lock is taken while another is held.
pub(super) struct Inner {
    /// References; see the [module](self).
    pub(super) refs: AtomicU64,
    /// The source's whole span, of which only pages of acquired chunks are accessed.
    memory: DmaMemory<'static>,
    iova: Iova,
    pub(super) config: Config,
    pub(super) page_bytes: usize,
    pub(super) sync: Option<Box<dyn SyncOps>>,
    sync_panics: PanicFlag,
    pub(super) directory: Directory,
    pub(super) ring: Ring,
    pub(super) spill: Mutex<Spill>,
    pub(super) ring_full: AtomicU64,
    pub(super) chunks: Mutex<Chunks>,
    /// The number of the pool: unique within the process.
    number: u64,
    tags: Mutex<Vec<String>>,
    name: String,
    pub(super) source: Box<dyn RevocableSource>,
}

impl Inner {
    pub(super) fn new(
        source: Box<dyn RevocableSource>,
        name: &str,
        config: Config,
        sync: Option<Box<dyn SyncOps>>,
    ) -> Result<Self, CreateError> {
        // SAFETY: `self` owns the source, and of the span only pages of acquired chunks are
        // accessed.
        let memory = unsafe { span_memory(&source, MAX_SPAN) }?;
        let (config, page_bytes) = checked(config)?;
        let regions = Directory::regions((memory.len() as u64).div_ceil(Frame::BYTES));
        let directory = Directory::new(regions)
            .map_err(|_| CreateError::NoMemory { bytes: Directory::bytes(regions) })?;
        let ring = Ring::new(config.ring).map_err(|_| CreateError::NoMemory {
            bytes: config.ring as usize * size_of::<Entry>(),
        })?;
        Ok(Self {
            refs: AtomicU64::new(BIAS),
            memory,
            iova: source.iova(),
            page_bytes,
            sync,
            sync_panics: PanicFlag::new(),
            directory,
            ring,
            config,
            spill: Mutex::new(Spill { entries: Vec::new(), discarded: 0, closed: false }),
            ring_full: AtomicU64::new(0),
            chunks: Mutex::new(Chunks { list: Vec::new(), late_owned: 0, late: 0 }),
            number: unique_number(),
            tags: Mutex::new(Vec::new()),
            name: name.into(),
            source,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    // Addresses of pages.

    /// Returns the device's address of a frame.
    #[inline(always)]
    pub(super) fn iova_of(&self, frame: u32) -> Iova {
        Iova::new(self.iova.raw().wrapping_add(u64::from(frame) * Frame::BYTES))
    }

    /// Returns the addresses of the page at `frame`.
    ///
    /// # Safety
    /// The frame lies in a chunk that the pool has or had.
    #[inline(always)]
    pub(super) unsafe fn raw_at(&self, frame: u32) -> RawPage {
        let bytes = frame as usize * 4096;
        // SAFETY: the frame belongs to a chunk, which `acquire` checked against the span; the span
        // is one allocation (contract of `DmaMemory::from_raw`).
        let ptr = unsafe { self.memory.as_ptr().add(bytes) };
        RawPage { ptr, iova: self.iova_of(frame) }
    }

    /// Returns the memory of the page at `frame`.
    ///
    /// # Safety
    /// As long as the memory is used, the page is allocated, or the consumer's.
    #[inline]
    pub(super) unsafe fn memory_of(&self, frame: u32) -> DmaMemory<'_> {
        let offset = frame as usize * 4096;
        self.memory.part(offset, self.page_bytes).unwrap_or(DmaMemory::EMPTY)
    }

    /// Finds a raw page's record by its address: a range check and a table look-up. The page may be
    /// in any state.
    #[inline(always)]
    pub(super) fn find(&self, page: RawPage) -> Result<(u32, &PageRecord), FreeError> {
        let offset = page.ptr.as_ptr().addr().wrapping_sub(self.memory.addr());
        let aligned = offset & (self.page_bytes - 1) == 0;
        let frame = u32::try_from(offset / 4096).ok().filter(|_| offset < self.memory.len());
        let record = frame.and_then(|frame| Some((frame, self.directory.record(frame)?)));
        match record {
            Some((frame, record)) if aligned && record.state() != State::Absent => {
                if page.iova.raw().wrapping_sub(self.iova.raw()) != offset as u64 {
                    return Err(self.wrong_iova(page, frame));
                }
                Ok((frame, record))
            }
            _ => Err(self.not_found(page, frame)),
        }
    }

    #[cold]
    fn wrong_iova(&self, page: RawPage, frame: u32) -> FreeError {
        let expected = self.iova_of(frame);
        FreeError::WrongIova { addr: page.ptr.as_ptr().addr(), iova: page.iova, expected }
    }

    #[cold]
    fn not_found(&self, page: RawPage, frame: Option<u32>) -> FreeError {
        let addr = page.ptr.as_ptr().addr();
        let start = frame.map(|frame| frame & !(self.config.order.frames() - 1));
        let known =
            |at: &u32| self.directory.record(*at).is_some_and(|a| a.state() != State::Absent);
        match start.filter(known) {
            Some(start) => {
                let start = self.memory.addr() + start as usize * 4096;
                FreeError::Misaligned { addr, start, count: 1, size: self.page_bytes as u64 }
            }
            None => {
                let start = self.memory.addr();
                FreeError::Foreign { addr, start, end: start.saturating_add(self.memory.len()) }
            }
        }
    }

    /// Checks that the page is allocated raw and not freed yet.
    #[inline(always)]
    pub(super) fn check_raw(record: &PageRecord, page: RawPage) -> Result<(), FreeError> {
        if record.state() == State::Raw && !record.is_remote_freed() {
            return Ok(());
        }
        let addr = page.ptr.as_ptr().addr();
        Err(match record.state() {
            State::Owned => FreeError::Owned { addr },
            _ => FreeError::DoubleFree { addr },
        })
    }

    /// Syncs the page for the device: `len` bytes from [`Config::offset`].
    ///
    /// # Safety
    /// As for [`memory_of`](Self::memory_of).
    #[inline(always)]
    pub(super) unsafe fn sync_for_device(&self, frame: u32, len: usize) {
        if let Some(ops) = &self.sync {
            // SAFETY: contract.
            unsafe { self.sync_range(&**ops, frame, self.config.offset, len, true) };
        }
    }

    /// Syncs a part of a page.
    ///
    /// # Safety
    /// As for [`memory_of`](Self::memory_of).
    #[cold]
    pub(super) unsafe fn sync_range(
        &self,
        ops: &dyn SyncOps,
        frame: u32,
        offset: usize,
        len: usize,
        device: bool,
    ) {
        // SAFETY: contract.
        let Ok(part) = unsafe { self.memory_of(frame) }.part(offset, len) else { return };
        if len == 0 || self.sync_panics.forbids_calls() {
            return;
        }
        let iova = Iova::new(self.iova_of(frame).raw().wrapping_add(offset as u64));
        self.sync_panics
            .call(|| if device { ops.for_device(part, iova) } else { ops.for_cpu(part, iova) });
    }

    // Growth and the spill list, for the consumer.

    /// Acquires a chunk of this order, or of the largest smaller one that is available; returns its
    /// first frame and how many frames it has.
    pub(super) fn acquire(&self, order: Order) -> Result<(u32, u32), AllocError> {
        let mut order = order;
        let frame = loop {
            match self.source.acquire(order) {
                Ok(frame) => break frame,
                Err(error) if order <= self.config.order => return Err(error.into()),
                Err(error) => {
                    order = Order::new(order.get() - 1).ok_or(error)?;
                }
            }
        };
        let bytes = u64::from(order.frames()) * Frame::BYTES;
        let end = frame.offset().checked_add(bytes);
        if end.is_none_or(|end| end > self.memory.len() as u64)
            || !frame.offset().is_multiple_of(bytes)
        {
            // SAFETY: just acquired with this order, and not used.
            unsafe { self.source.release(frame, order) };
            return Err(AllocError::Misplaced { frame, order });
        }
        if self.enter(frame, order).is_err() {
            // SAFETY: just acquired with this order, and not used.
            unsafe { self.source.release(frame, order) };
            return Err(AllocError::NoMemory { bytes, size: self.page_bytes as u64 });
        }
        Ok((frame.index(), order.frames()))
    }

    /// Records a chunk and its pages, and reserves room for them in the spill list. All or nothing.
    fn enter(&self, frame: Frame, order: Order) -> Result<(), TryReserveError> {
        let per_page = self.config.order.frames();
        let pages = order.frames() / per_page;
        self.directory.make_room(frame, order.frames())?;
        // Only the consumer adds chunks, so the room is there below.
        let total = {
            let mut chunks = self.chunks.lock();
            chunks.list.try_reserve(1)?;
            let per_chunk = |chunk: &Chunk| (chunk.order.frames() / per_page) as usize;
            chunks.list.iter().map(per_chunk).sum::<usize>() + pages as usize
        };
        {
            let mut spill = self.spill.lock();
            let more = total.saturating_sub(spill.entries.len());
            spill.entries.try_reserve(more)?;
        }
        for page in 0..pages {
            if let Some(record) = self.directory.record(frame.index() + page * per_page) {
                record.set_free();
            }
        }
        let mut chunks = self.chunks.lock();
        let at = chunks.list.partition_point(|chunk| chunk.frame < frame);
        let chunk = Chunk { frame, order, pages_out: pages + 1, on_empty: OnEmpty::Release };
        chunks.list.insert(at, chunk);
        Ok(())
    }

    /// Returns the number of chunks and their size in bytes.
    pub(super) fn extent(&self) -> (u64, u64) {
        let chunks = self.chunks.lock();
        let frames: u64 = chunks.list.iter().map(|chunk| u64::from(chunk.order.frames())).sum();
        (chunks.list.len() as u64, frames * Frame::BYTES)
    }

    /// Takes at most `most` pages from the spill list.
    pub(super) fn take_spilled(&self, most: usize, each: impl FnMut(Entry)) {
        let mut spill = self.spill.lock();
        let from = spill.entries.len().saturating_sub(most);
        spill.entries.drain(from..).for_each(each);
    }

    /// Returns how many pages have ever met a full ring.
    pub(super) fn ring_full(&self) -> u64 {
        self.ring_full.load(Ordering::Relaxed)
    }

    /// Returns the length of the spill list.
    pub(super) fn spilled(&self) -> u64 {
        self.spill.lock().entries.len() as u64
    }

    /// Returns how many pages are in the ring and the spill list: without the second frees of raw
    /// pages that are there, too. For the consumer. O(entries), and O(pages) if one of them is of a
    /// raw page.
    pub(super) fn returned(&self) -> u64 {
        let (mut owned, mut raw) = (0, 0);
        let mut count = |entry: Entry| match entry.generation() {
            None => owned += 1,
            Some(_) => raw += 1,
        };
        self.ring.each(&mut count);
        self.spill.lock().entries.iter().copied().for_each(count);
        if raw > 0 {
            // The entries of a page may be equal. Its record says once that there is one.
            raw = 0;
            self.each_page(&self.chunks.lock().list, |record| {
                raw += u64::from(record.state() == State::Raw && record.is_remote_freed());
            });
        }
        owned + raw
    }

    /// Marks the page of an entry free and returns true, unless the entry is a second free of a raw
    /// page. For the consumer.
    #[inline(always)]
    pub(super) fn accept(&self, entry: Entry) -> bool {
        let Some(record) = self.directory.record(entry.frame()) else { return false };
        let valid = match entry.generation() {
            None => true,
            Some(generation) => record.state() == State::Raw && record.generation() == generation,
        };
        if valid {
            record.set_free();
        }
        valid
    }

    /// Adds the shared counters to the consumer's own.
    pub(super) fn counts(&self, mut own: Counts) -> Counts {
        own.ring = self.ring.pushed();
        own.ring_full = self.ring_full();
        own.waive += self.spill.lock().discarded;
        own.released_refcnt = self.chunks.lock().late;
        own
    }

    // Holders.

    pub(super) fn tag(&self, name: &str) -> Result<Tag, TooManyTags> {
        let mut tags = self.tags.lock();
        let at = tags.iter().position(|known| known == name).unwrap_or(tags.len());
        if at >= MAX_TAGS {
            return Err(TooManyTags { limit: MAX_TAGS });
        }
        if at == tags.len() {
            tags.push(name.into());
        }
        // At most 2^24.
        Ok(Tag { pool: self.number, name: u32::try_from(at + 1).unwrap_or(0) })
    }

    /// Returns the number of a holder's name: that of no name, if the tag is another pool's.
    #[inline(always)]
    pub(super) fn name_of(&self, tag: Tag) -> u32 {
        if tag.pool == self.number { tag.name } else { Tag::NONE.name }
    }

    /// Returns the holders of pages, by name. O(pages).
    pub(super) fn holders(&self) -> Vec<Holder> {
        let mut pages = BTreeMap::<u32, u64>::new();
        self.each_page(&self.chunks.lock().list, |record| {
            if matches!(record.state(), State::Owned | State::Raw) {
                *pages.entry(record.tag()).or_default() += 1;
            }
        });
        let tags = self.tags.lock();
        let name = |tag: u32| tags.get((tag as usize).checked_sub(1)?).cloned();
        let holder =
            |(tag, pages)| Holder { name: name(tag), pages, bytes: pages * self.page_bytes as u64 };
        pages.into_iter().map(holder).collect()
    }

    /// Calls `each` with the record of every page of the chunks.
    pub(super) fn each_page(&self, list: &[Chunk], mut each: impl FnMut(&PageRecord)) {
        for chunk in list {
            let (first, end) = (chunk.frame.index(), chunk.frame.index() + chunk.order.frames());
            let pages = (first..end).step_by(self.config.order.frames() as usize);
            pages.filter_map(|frame| self.directory.record(frame)).for_each(&mut each);
        }
    }
}

/// Checks the parameters; returns them with the effective `max_len`, and the size of a page.
fn checked(config: Config) -> Result<(Config, usize), CreateError> {
    let Config { order, ring, offset, max_len, max_in_use } = config;
    if order > Order::HUGE {
        return Err(CreateError::Order { order });
    }
    if !ring.is_power_of_two() || ring > MAX_RING {
        return Err(CreateError::Ring { ring, limit: MAX_RING });
    }
    if max_in_use == 0 {
        return Err(CreateError::NoPage);
    }
    let page_bytes = order.frames() as usize * 4096;
    let rest = page_bytes.saturating_sub(offset);
    let max_len = if max_len == 0 { rest } else { max_len };
    if max_len == 0 || max_len > rest {
        return Err(CreateError::Range { offset, max_len, page_bytes });
    }
    Ok((Config { max_len, ..config }, page_bytes))
}

/// A counted reference to the shared state. The last one frees it.
pub(super) struct PoolRef(NonNull<Inner>);

// SAFETY: a counted, shared reference to `Inner`, all of whose fields are `Send` and `Sync`:
// atomics, locks, the source and a `SyncOps`.
unsafe impl Send for PoolRef {}
// SAFETY: as for `Send`.
unsafe impl Sync for PoolRef {}

impl PoolRef {
    /// Creates the first reference.
    pub(super) fn first(shared: Inner) -> Self {
        shared.refs.fetch_add(1, Ordering::Relaxed);
        Self(NonNull::from(Box::leak(Box::new(shared))))
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> NonNull<Inner> {
        self.0
    }

    /// Takes over a reference that has already been counted.
    ///
    /// # Safety
    /// The count includes this reference, and only this value releases it.
    pub(super) unsafe fn adopt(shared: NonNull<Inner>) -> Self {
        Self(shared)
    }
}

impl Clone for PoolRef {
    fn clone(&self) -> Self {
        self.refs.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl core::ops::Deref for PoolRef {
    type Target = Inner;
    #[inline(always)]
    fn deref(&self) -> &Inner {
        // SAFETY: `self` is a counted reference, and only the last one frees the state.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for PoolRef {
    fn drop(&mut self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: created by `Box::leak` in `first`, and this was the last reference.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}
