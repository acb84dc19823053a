//! State shared by the consumer and all holders of pages, and its lifetime.
//!
//! # Lifetime
//!
//! `keep` counts the handles, and the pages that are held by a [`Page`](super::Page) or by fragments. To count each of
//! those as it is allocated would cost a read-modify-write per page; instead the count starts with a bias greater than
//! their number, and when the pool is taken down the bias is replaced by the number of pages in use. Once the ring is
//! closed, each freed page decrements the count. Before that, the last access of a freeing thread to the pool is its
//! store into the ring, which the thread that takes the pool down waits for.

use super::config::{Config, Tag};
use super::error::{AllocError, CreateError, FreeError, TooManyTags};
use super::raw::RawPage;
use super::records::{Directory, PageRecord, State};
use super::report::{Counts, Holder};
use super::ring::{Entry, FRAME_BITS, Ring};
use super::source::SyncOps;
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

/// The largest span: more than 30 bits can number the frames of.
const LARGEST_SPAN: u64 = Frame::BYTES << FRAME_BITS;
const LARGEST_RING: u32 = 1 << 20;
const MOST_TAGS: usize = (1 << 24) - 1;
/// More than pages can be out; with as many handles there is still room in 64 bits.
pub(super) const BIAS: u64 = 1 << 40;

/// How a hidden chunk is released: known only if the pool was destroyed.
pub(super) type ReleaseHidden<S> = unsafe fn(&S, Frame, Order);

/// What becomes of a chunk when its last page is back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Back {
    /// It is released.
    Release,
    /// It is released as one that was hidden.
    ReleaseHidden,
    /// Nothing: it went back, or the source gave it up.
    Never,
}

/// A run of the source, cut into pages.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub(super) frame: Frame,
    pub(super) order: Order,
    /// Pages that are not gone, and one more until the pool is taken down. At 0 the chunk is released.
    pub(super) out: u32,
    pub(super) back: Back,
}

pub(super) struct Chunks<S> {
    /// By frame, ascending.
    pub(super) list: Vec<Chunk>,
    /// Pages that owners gave back after the ring was closed, before the bias was replaced.
    pub(super) late_owned: u64,
    /// Pages that came back after the ring was closed.
    pub(super) late: u64,
    /// Known where the pool is being destroyed; by then no chunk is added any more.
    pub(super) release_hidden: Option<ReleaseHidden<S>>,
}

/// Pages that met a full ring. It has room for every page, made where the pool grows, so that a free does not allocate.
pub(super) struct Spill {
    pub(super) entries: Vec<Entry>,
    /// Second frees that were taken out to make room.
    pub(super) sifted: u64,
    pub(super) closed: bool,
}

/// The inside of a pool. No lock is taken while another is held.
pub(super) struct Inner<S: ChunkSource> {
    pub(super) keep: AtomicU64,
    /// The source's whole span, of which only pages of acquired chunks are reached.
    memory: DmaMemory<'static>,
    iova: Iova,
    pub(super) config: Config,
    pub(super) page_bytes: usize,
    pub(super) sync: Option<Box<dyn SyncOps>>,
    pub(super) directory: Directory,
    pub(super) ring: Ring,
    pub(super) spill: Mutex<Spill>,
    pub(super) ring_full: AtomicU64,
    pub(super) chunks: Mutex<Chunks<S>>,
    tags: Mutex<Vec<String>>,
    name: String,
    pub(super) source: S,
}

impl<S: ChunkSource> Inner<S> {
    pub(super) fn new(
        source: S,
        name: &str,
        config: Config,
        sync: Option<Box<dyn SyncOps>>,
    ) -> Result<Self, CreateError> {
        let (base, iova) = (source.span(), source.iova());
        // SAFETY: the source, which `self` owns, keeps its runs valid and allocates them to no other caller (contract of
        // `ChunkSource`); of the span only pages of acquired chunks are ever reached.
        let memory = unsafe { DmaMemory::<'static>::from_raw(base.cast(), base.len()) };
        let span = memory.len() as u64;
        if span == 0 || span > LARGEST_SPAN || iova.checked_add(span).is_none() {
            return Err(CreateError::Span { len: memory.len(), iova, limit: LARGEST_SPAN });
        }
        let (config, page_bytes) = checked(config)?;
        Ok(Self {
            keep: AtomicU64::new(BIAS),
            memory,
            iova,
            page_bytes,
            sync,
            directory: Directory::new(span.div_ceil(Frame::BYTES)),
            ring: Ring::new(config.ring),
            config,
            spill: Mutex::new(Spill { entries: Vec::new(), sifted: 0, closed: false }),
            ring_full: AtomicU64::new(0),
            chunks: Mutex::new(Chunks { list: Vec::new(), late_owned: 0, late: 0, release_hidden: None }),
            tags: Mutex::new(Vec::new()),
            name: name.into(),
            source,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn source(&self) -> &S {
        &self.source
    }

    // Where pages are.

    #[inline(always)]
    pub(super) fn raw_at(&self, frame: u32) -> RawPage {
        let offset = u64::from(frame) * Frame::BYTES;
        #[expect(clippy::cast_possible_truncation, reason = "less than the span, which is a usize")]
        let bytes = offset as usize;
        // SAFETY: the frame is of a chunk, which lies inside the source's memory, one allocation (contract of
        // `DmaMemory::from_raw`, checked against the span in `acquire`).
        let ptr = unsafe { self.memory.as_ptr().add(bytes) };
        RawPage { ptr, iova: Iova::new(self.iova.raw().wrapping_add(offset)) }
    }

    /// The memory of a page that is out.
    #[inline]
    pub(super) fn memory_of(&self, frame: u32) -> DmaMemory<'_> {
        let offset = frame as usize * 4096;
        self.memory.part(offset, self.page_bytes).unwrap_or(DmaMemory::EMPTY)
    }

    /// Finds a raw page by its address: a range check and a table. It is one of the pool's; who has it is not said.
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
        let expected = self.raw_at(frame).iova;
        FreeError::WrongIova { addr: page.ptr.as_ptr().addr(), iova: page.iova, expected }
    }

    #[cold]
    fn not_found(&self, page: RawPage, frame: Option<u32>) -> FreeError {
        let addr = page.ptr.as_ptr().addr();
        let start = frame.map(|frame| frame & !(self.config.order.frames() - 1));
        let known = |at: &u32| self.directory.record(*at).is_some_and(|a| a.state() != State::Absent);
        match start.filter(known) {
            Some(start) => {
                let page = self.raw_at(start).ptr.as_ptr().addr();
                FreeError::Misaligned { addr, page, page_bytes: self.page_bytes }
            }
            None => {
                let start = self.memory.addr();
                FreeError::Foreign { addr, start, end: start.saturating_add(self.memory.len()) }
            }
        }
    }

    /// Whether the page is allocated in raw form, and not freed yet.
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

    /// The device gets what it may write of the page: `len` bytes from where it starts to write.
    #[inline(always)]
    pub(super) fn sync_for_device(&self, frame: u32, len: usize) {
        if let Some(ops) = &self.sync {
            self.sync_range(&**ops, frame, self.config.offset, len, true);
        }
    }

    #[cold]
    pub(super) fn sync_range(&self, ops: &dyn SyncOps, frame: u32, offset: usize, len: usize, device: bool) {
        let Ok(part) = self.memory_of(frame).part(offset, len) else { return };
        if len == 0 {
            return;
        }
        let iova = Iova::new(self.raw_at(frame).iova.raw().wrapping_add(offset as u64));
        if device { ops.for_device(part, iova) } else { ops.for_cpu(part, iova) }
    }

    // What the consumer does below the ring.

    /// Acquires a chunk of this order or the largest smaller one that is available: where its pages start, and how many frames.
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
        if end.is_none_or(|end| end > self.memory.len() as u64) || !frame.offset().is_multiple_of(bytes) {
            // SAFETY: just acquired with this order, and not used.
            unsafe { self.source.release(frame, order) };
            return Err(AllocError::Misplaced { frame, order });
        }
        self.enter(frame, order);
        Ok((frame.index(), order.frames()))
    }

    fn enter(&self, frame: Frame, order: Order) {
        let per_page = self.config.order.frames();
        let pages = order.frames() / per_page;
        self.directory.make_room(frame, order.frames());
        for page in 0..pages {
            if let Some(record) = self.directory.record(frame.index() + page * per_page) {
                record.set_free();
            }
        }
        let total = {
            let mut chunks = self.chunks.lock();
            let at = chunks.list.partition_point(|chunk| chunk.frame < frame);
            chunks.list.insert(at, Chunk { frame, order, out: pages + 1, back: Back::Release });
            chunks.list.iter().map(|chunk| (chunk.order.frames() / per_page) as usize).sum::<usize>()
        };
        let mut spill = self.spill.lock();
        let more = total.saturating_sub(spill.entries.len());
        spill.entries.reserve(more);
    }

    /// How many chunks, and how many bytes they have.
    pub(super) fn extent(&self) -> (u64, u64) {
        let chunks = self.chunks.lock();
        let frames: u64 = chunks.list.iter().map(|chunk| u64::from(chunk.order.frames())).sum();
        (chunks.list.len() as u64, frames * Frame::BYTES)
    }

    /// Takes at most `most` of the pages that met a full ring.
    pub(super) fn unspill(&self, most: usize, each: impl FnMut(Entry)) {
        let mut spill = self.spill.lock();
        let from = spill.entries.len().saturating_sub(most);
        spill.entries.drain(from..).for_each(each);
    }

    /// How many pages ever met a full ring.
    pub(super) fn ring_full(&self) -> u64 {
        self.ring_full.load(Ordering::Relaxed)
    }

    /// How many of those are still there.
    pub(super) fn spilled(&self) -> u64 {
        self.spill.lock().entries.len() as u64
    }

    /// Whether an entry that came out of the ring is a page that came back, which it then is: free. For the consumer.
    #[inline(always)]
    pub(super) fn accept(&self, entry: Entry) -> bool {
        let Some(record) = self.directory.record(entry.frame()) else { return false };
        let ours = match entry.generation() {
            None => true,
            Some(generation) => record.state() == State::Raw && record.generation() == generation,
        };
        if ours {
            record.set_free();
        }
        ours
    }

    pub(super) fn counts(&self, mut own: Counts) -> Counts {
        own.ring = self.ring.pushed();
        own.ring_full = self.ring_full();
        own.waive += self.spill.lock().sifted;
        own.released_refcnt = self.chunks.lock().late;
        own
    }

    // Holders.

    pub(super) fn tag(&self, name: &str) -> Result<Tag, TooManyTags> {
        let mut tags = self.tags.lock();
        let at = tags.iter().position(|known| known == name).unwrap_or(tags.len());
        if at >= MOST_TAGS {
            return Err(TooManyTags { limit: MOST_TAGS });
        }
        if at == tags.len() {
            tags.push(name.into());
        }
        // At most 2^24.
        Ok(Tag(u32::try_from(at + 1).unwrap_or(0)))
    }

    /// Who holds the pages that are out, by name. O(pages).
    pub(super) fn holders(&self) -> Vec<Holder> {
        let mut pages = BTreeMap::<u32, u64>::new();
        self.each_page(&self.chunks.lock().list, |record| {
            if matches!(record.state(), State::Owned | State::Raw) {
                *pages.entry(record.tag()).or_default() += 1;
            }
        });
        let tags = self.tags.lock();
        let name = |tag: u32| tags.get((tag as usize).checked_sub(1)?).cloned();
        let holder = |(tag, pages)| Holder { name: name(tag), pages, bytes: pages * self.page_bytes as u64 };
        pages.into_iter().map(holder).collect()
    }

    pub(super) fn each_page(&self, list: &[Chunk], mut each: impl FnMut(&PageRecord)) {
        for chunk in list {
            let (first, end) = (chunk.frame.index(), chunk.frame.index() + chunk.order.frames());
            let pages = (first..end).step_by(self.config.order.frames() as usize);
            pages.filter_map(|frame| self.directory.record(frame)).for_each(&mut each);
        }
    }
}

fn checked(config: Config) -> Result<(Config, usize), CreateError> {
    let Config { order, ring, offset, max_len } = config;
    if order > Order::HUGE {
        return Err(CreateError::Order { order });
    }
    if !ring.is_power_of_two() || ring > LARGEST_RING {
        return Err(CreateError::Ring { ring, limit: LARGEST_RING });
    }
    let page_bytes = order.frames() as usize * 4096;
    let rest = page_bytes.saturating_sub(offset);
    let max_len = if max_len == 0 { rest } else { max_len };
    if max_len == 0 || max_len > rest {
        return Err(CreateError::Range { offset, max_len, page_bytes });
    }
    Ok((Config { max_len, ..config }, page_bytes))
}
