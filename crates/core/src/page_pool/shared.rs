//! What the consumer and all who hold pages share, and how long it lives.
//!
//! # How long it lives
//!
//! `keep` counts the handles, and the pages that are held by a [`Page`](super::Page) or by fragments. To count each of
//! those as it is handed out would cost a read-modify-write a page; instead the count starts with a bias greater than
//! their number, and when the pool is taken down the bias is replaced by how many are out. From the moment at which the
//! ring is closed each that comes back gives up one. Before it, the last that the giver of a page does to the pool is
//! to store it in the ring, which whoever takes the pool down waits for.

use super::account::{Account, Directory, State};
use super::ring::{Closed, Entry, FRAME_BITS, Ring};
use super::{
    AllocError, Config, Counts, CreateError, FreeError, HideError, Holder, RawPage, SyncOps, Tag, TooManyTags,
};
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::ptr::NonNull;

/// The largest span: more than 30 bits can number the frames of.
const LARGEST_SPAN: u64 = Frame::BYTES << FRAME_BITS;
const LARGEST_RING: u32 = 1 << 20;
const MOST_TAGS: usize = (1 << 24) - 1;
/// More than pages can be out; with as many handles there is still room in 64 bits.
const BIAS: u64 = 1 << 40;

/// How a hidden chunk goes back: known only where the pool was destroyed.
pub(super) type ReleaseHidden<S> = unsafe fn(&S, Frame, Order);

/// A run of the source, cut into pages.
#[derive(Clone, Copy)]
struct Chunk {
    frame: Frame,
    order: Order,
    /// Pages that are not gone, and one more until the pool is taken down. At 0 the chunk goes back.
    out: u32,
    released: bool,
}

struct Chunks<S> {
    /// By frame, ascending.
    list: Vec<Chunk>,
    /// Pages that owners gave back after the ring was closed, before the bias was replaced.
    late_owned: u64,
    /// Pages that came back after the ring was closed.
    late: u64,
    /// How chunks go back that `hide` hid. By then no chunk is added any more.
    hidden: Vec<bool>,
    release_hidden: Option<ReleaseHidden<S>>,
}

/// Pages that met a full ring. It has room for every page, made where the pool grows, so that a free does not allocate.
struct Spill {
    entries: Vec<Entry>,
    /// Second frees that were taken out to make room.
    sifted: u64,
    closed: bool,
}

/// The inside of a pool. No lock is taken while another is held.
pub(super) struct Shared<S: ChunkSource> {
    keep: AtomicU64,
    /// The source's whole span, of which only pages of acquired chunks are reached.
    memory: DmaMemory<'static>,
    iova: Iova,
    pub(super) config: Config,
    pub(super) page_bytes: usize,
    pub(super) sync: Option<Box<dyn SyncOps>>,
    pub(super) directory: Directory,
    pub(super) ring: Ring,
    spill: Mutex<Spill>,
    ring_full: AtomicU64,
    chunks: Mutex<Chunks<S>>,
    tags: Mutex<Vec<String>>,
    name: String,
    source: S,
}

impl<S: ChunkSource> Shared<S> {
    pub(super) fn new(
        source: S,
        name: &str,
        config: Config,
        sync: Option<Box<dyn SyncOps>>,
    ) -> Result<Self, CreateError> {
        let (base, iova) = (source.span(), source.iova());
        // SAFETY: the source, which `self` owns, keeps its runs valid and gives them to nobody else (contract of
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
            chunks: Mutex::new(Chunks {
                list: Vec::new(),
                late_owned: 0,
                late: 0,
                hidden: Vec::new(),
                release_hidden: None,
            }),
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
    pub(super) fn find(&self, page: RawPage) -> Result<(u32, &Account), FreeError> {
        let offset = page.ptr.as_ptr().addr().wrapping_sub(self.memory.addr());
        let aligned = offset & (self.page_bytes - 1) == 0;
        let frame = u32::try_from(offset / 4096).ok().filter(|_| offset < self.memory.len());
        let account = frame.and_then(|frame| Some((frame, self.directory.account(frame)?)));
        match account {
            Some((frame, account)) if aligned && account.state() != State::Absent => {
                if page.iova.raw().wrapping_sub(self.iova.raw()) != offset as u64 {
                    return Err(self.wrong_iova(page, frame));
                }
                Ok((frame, account))
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
        let known = |at: &u32| self.directory.account(*at).is_some_and(|a| a.state() != State::Absent);
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

    /// Whether the page is out in raw form, and nobody has freed it yet.
    #[inline(always)]
    pub(super) fn check_raw(account: &Account, page: RawPage) -> Result<(), FreeError> {
        if account.state() == State::Raw && !account.is_posted() {
            return Ok(());
        }
        let addr = page.ptr.as_ptr().addr();
        Err(match account.state() {
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

    /// A chunk of this order or the largest smaller one that can be had: where its pages start, and how many frames.
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
            if let Some(account) = self.directory.account(frame.index() + page * per_page) {
                account.set_free();
            }
        }
        let total = {
            let mut chunks = self.chunks.lock();
            let at = chunks.list.partition_point(|chunk| chunk.frame < frame);
            chunks.list.insert(at, Chunk { frame, order, out: pages + 1, released: false });
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
        let Some(account) = self.directory.account(entry.frame()) else { return false };
        let ours = match entry.generation() {
            None => true,
            Some(generation) => account.state() == State::Raw && account.generation() == generation,
        };
        if ours {
            account.set_free();
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
        self.each_page(&self.chunks.lock().list, |account| {
            if matches!(account.state(), State::Owned | State::Raw) {
                *pages.entry(account.tag()).or_default() += 1;
            }
        });
        let tags = self.tags.lock();
        let name = |tag: u32| tags.get((tag as usize).checked_sub(1)?).cloned();
        let holder = |(tag, pages)| Holder { name: name(tag), pages, bytes: pages * self.page_bytes as u64 };
        pages.into_iter().map(holder).collect()
    }

    fn each_page(&self, list: &[Chunk], mut each: impl FnMut(&Account)) {
        for chunk in list {
            let (first, end) = (chunk.frame.index(), chunk.frame.index() + chunk.order.frames());
            let pages = (first..end).step_by(self.config.order.frames() as usize);
            pages.filter_map(|frame| self.directory.account(frame)).for_each(&mut each);
        }
    }

    // The end.

    /// Takes the device's access to every chunk away; returns how many bytes it keeps, and why.
    pub(super) fn hide_all(
        &self,
        hide: impl Fn(&S, Frame, Order) -> Result<(), HideError>,
        release_hidden: ReleaseHidden<S>,
    ) -> (u64, Option<HideError>) {
        let (mut bytes, mut why) = (0, None);
        let count = {
            let mut chunks = self.chunks.lock();
            chunks.release_hidden = Some(release_hidden);
            let count = chunks.list.len();
            chunks.hidden.resize(count, false);
            count
        };
        for at in 0..count {
            let Some(chunk) = self.chunks.lock().list.get(at).copied() else { break };
            match hide(&self.source, chunk.frame, chunk.order) {
                Ok(()) => {
                    if let Some(hidden) = self.chunks.lock().hidden.get_mut(at) {
                        *hidden = true;
                    }
                }
                Err(error) => {
                    bytes += u64::from(chunk.order.frames()) * Frame::BYTES;
                    why.get_or_insert(error);
                }
            }
        }
        (bytes, why)
    }

    /// The chunks that have pages out: their bytes, where there are any.
    pub(super) fn still_out(&self) -> (u64, Option<HideError>) {
        let chunks = self.chunks.lock();
        let held = chunks.list.iter().filter(|chunk| !chunk.released);
        let bytes = held.map(|chunk| u64::from(chunk.order.frames()) * Frame::BYTES).sum();
        (bytes, (bytes != 0).then_some(HideError::NotAsked))
    }

    /// Closes the ring; every page that is back, and `own`, those of the consumer, is gone from here, and chunks of which
    /// all are go back to the source. `on_stray` counts second frees that were found late. For the consumer, once.
    pub(super) fn take_down(&self, own: impl IntoIterator<Item = u32>, mut on_stray: impl FnMut()) {
        let mut back = |entry: Entry| {
            let mut chunks = self.chunks.lock();
            if self.accept(entry) {
                self.gone(&mut chunks, entry.frame());
            } else {
                on_stray();
            }
        };
        self.ring.close(&mut back);
        let spilled = {
            let mut spill = self.spill.lock();
            spill.closed = true;
            core::mem::take(&mut spill.entries)
        };
        spilled.into_iter().for_each(&mut back);
        own.into_iter().map(Entry::owned).for_each(back);
        let owned = {
            let mut chunks = self.chunks.lock();
            let mut owned = chunks.late_owned;
            self.each_page(&chunks.list, |account| owned += u64::from(account.state() == State::Owned));
            for chunk in &mut chunks.list {
                chunk.out -= 1;
            }
            owned
        };
        // The caller has a reference of its own, so this does not reach 0.
        self.keep.fetch_sub(BIAS - owned, Ordering::AcqRel);
        let mut at = 0;
        while self.release_if_empty(at) {
            at += 1;
        }
    }

    /// A page that is back is of no more use. Returns which chunk it was of, if that has no other.
    fn gone(&self, chunks: &mut Chunks<S>, frame: u32) -> Option<usize> {
        self.directory.account(frame)?.set_gone();
        let at = chunks.list.partition_point(|chunk| chunk.frame.index() <= frame).checked_sub(1)?;
        let chunk = chunks.list.get_mut(at)?;
        chunk.out -= 1;
        (chunk.out == 0).then_some(at)
    }

    /// Gives a chunk back that has no page left, once. Returns whether there is a chunk of that number.
    fn release_if_empty(&self, at: usize) -> bool {
        let (chunk, release_hidden) = {
            let mut chunks = self.chunks.lock();
            let hidden = chunks.hidden.get(at).copied().unwrap_or(false);
            let release_hidden = chunks.release_hidden.filter(|_| hidden);
            let Some(chunk) = chunks.list.get_mut(at) else { return false };
            if chunk.out != 0 || chunk.released {
                return true;
            }
            chunk.released = true;
            (*chunk, release_hidden)
        };
        match release_hidden {
            // SAFETY: `hide` hid it, it is released once (`released`), and no page of it is out, so nobody reaches it.
            Some(release) => unsafe { release(&self.source, chunk.frame, chunk.order) },
            // SAFETY: acquired with this order, released once, and no page of it is out, so nobody reaches it.
            None => unsafe { self.source.release(chunk.frame, chunk.order) },
        }
        true
    }

    /// A page comes back after the ring was closed.
    fn come_late(&self, entry: Entry) {
        let emptied = {
            let mut chunks = self.chunks.lock();
            if !self.accept(entry) {
                return;
            }
            chunks.late += 1;
            chunks.late_owned += u64::from(entry.generation().is_none());
            self.gone(&mut chunks, entry.frame())
        };
        if let Some(at) = emptied {
            self.release_if_empty(at);
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

/// One reference to what is shared.
pub(super) struct Keep<S: ChunkSource>(NonNull<Shared<S>>);

// SAFETY: it is a counted, shared reference to `Shared`, all of whose parts are `Send` and `Sync`: atomics, locks, the
// source, and a `SyncOps`.
unsafe impl<S: ChunkSource> Send for Keep<S> {}
// SAFETY: as for `Send`.
unsafe impl<S: ChunkSource> Sync for Keep<S> {}

impl<S: ChunkSource> Keep<S> {
    /// The first reference.
    pub(super) fn first(shared: Shared<S>) -> Self {
        shared.keep.fetch_add(1, Ordering::Relaxed);
        Self(NonNull::from(Box::leak(Box::new(shared))))
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> NonNull<Shared<S>> {
        self.0
    }

    /// Takes over a reference that is counted already.
    ///
    /// # Safety
    /// The count has one for it, which nobody else gives up.
    unsafe fn adopt(shared: NonNull<Shared<S>>) -> Self {
        Self(shared)
    }
}

impl<S: ChunkSource> Clone for Keep<S> {
    fn clone(&self) -> Self {
        self.keep.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<S: ChunkSource> core::ops::Deref for Keep<S> {
    type Target = Shared<S>;
    #[inline(always)]
    fn deref(&self) -> &Shared<S> {
        // SAFETY: `self` is one of the references that are counted, and the last one frees it.
        unsafe { self.0.as_ref() }
    }
}

impl<S: ChunkSource> Drop for Keep<S> {
    fn drop(&mut self) {
        if self.keep.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: made by `Box::leak` in `first`, and this was the last reference.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

/// Gives pages back from anywhere: into the ring, what does not fit there below it. Lock-free but where the ring is full
/// or the pool was taken down.
///
/// # Safety
/// Each entry is a raw free, the caller having a [`Keep`] (then it may be mistaken); or a page that was handed out as owned and
/// that is given back this once.
#[inline]
pub(super) unsafe fn give_back<S: ChunkSource>(shared: NonNull<Shared<S>>, entries: &[Entry]) {
    // SAFETY: alive as long as one of the entries is not back (see the module), or as the caller's `Keep`. The pool may go
    // as soon as the ring has the last; `push` does not reach it then.
    match unsafe { shared.as_ref() }.ring.push(entries) {
        Ok(n) if n == entries.len() => {}
        // SAFETY: the pages that remain are not back.
        placed => unsafe { give_back_slow(shared, entries.get(placed.unwrap_or(0)..).unwrap_or_default()) },
    }
}

/// # Safety
/// As for [`give_back`], and there is at least one entry.
#[cold]
unsafe fn give_back_slow<S: ChunkSource>(ptr: NonNull<Shared<S>>, entries: &[Entry]) {
    // SAFETY: alive as long as one of the entries is not back.
    let shared = unsafe { ptr.as_ref() };
    shared.keep.fetch_add(1, Ordering::Relaxed);
    // SAFETY: just counted.
    let keep = unsafe { Keep::adopt(ptr) };
    if keep.spill(entries).is_ok() {
        return;
    }
    for &entry in entries {
        keep.come_late(entry);
        if entry.generation().is_none() {
            // SAFETY: the ring is closed, so the page's own reference is part of the count (`take_down`), or will be before
            // the bias is taken off; it is given up with the page.
            drop(unsafe { Keep::adopt(ptr) });
        }
    }
}

impl<S: ChunkSource> Shared<S> {
    fn spill(&self, entries: &[Entry]) -> Result<(), Closed> {
        let mut spill = self.spill.lock();
        if spill.closed {
            return Err(Closed);
        }
        self.ring_full.fetch_add(entries.len() as u64, Ordering::Relaxed);
        for &entry in entries {
            if spill.entries.len() == spill.entries.capacity() {
                let before = spill.entries.len();
                self.sift(&mut spill.entries);
                spill.sifted += (before - spill.entries.len()) as u64;
            }
            spill.entries.push(entry);
        }
        Ok(())
    }

    /// Takes out what can not count: only second frees make for more entries than there are pages.
    #[cold]
    fn sift(&self, entries: &mut Vec<Entry>) {
        entries.sort_unstable();
        entries.dedup();
        entries.retain(|entry| {
            let account = self.directory.account(entry.frame());
            entry.generation().is_none_or(|generation| {
                account.is_some_and(|a| a.state() == State::Raw && a.generation() == generation)
            })
        });
    }
}
