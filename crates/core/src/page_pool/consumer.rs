//! The consumer's side: the magazine, and what fills it.

use super::config::{Config, Tag};
use super::error::{AllocError, CreateError, FreeError, TooManyTags};
use super::inner::Inner;
use super::keep::{Keep, recycle_remotely};
use super::magazine::{BULK, BULK_PAGES, Magazine};
use super::open::Open;
use super::page::Page;
use super::raw::RawPage;
use super::remote::Remote;
use super::report::{Counts, Holder, PoolStats};
use super::ring::Entry;
use super::source::SyncOps;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

/// The consumer's handle to a page pool: there is one, and it may move between threads. See the [module](super).
///
/// Dropping it is [`close`](Self::close).
pub struct PagePool<S: ChunkSource> {
    pub(super) keep: Keep<S>,
    pub(super) magazine: Magazine,
    pub(super) counts: Counts,
    /// The frames of the newest chunk that were never allocated: the first, and the end.
    pub(super) fresh: (u32, u32),
    pages: u64,
    /// Entries that were taken from below the ring.
    unspilled: u64,
    /// `max_len`, which a page has until something else is said.
    written: u32,
    /// The page of which fragments are cut.
    pub(super) open: Option<Open>,
    pub(super) closed: bool,
}

impl<S: ChunkSource> PagePool<S> {
    /// A pool for devices that are coherent with the processor. No chunk is acquired yet.
    ///
    /// # Errors
    /// [`CreateError`], which names the value and its limit.
    pub fn new(source: S, name: &str, config: Config) -> Result<Self, CreateError> {
        Self::make(source, name, config, None)
    }

    /// The same, for devices that are not coherent: `sync` is called with the bytes that change owner.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_sync(
        source: S,
        name: &str,
        config: Config,
        sync: Box<dyn SyncOps>,
    ) -> Result<Self, CreateError> {
        Self::make(source, name, config, Some(sync))
    }

    fn make(
        source: S,
        name: &str,
        config: Config,
        sync: Option<Box<dyn SyncOps>>,
    ) -> Result<Self, CreateError> {
        let shared = Inner::new(source, name, config, sync)?;
        // At most 2 MiB.
        let written = u32::try_from(shared.config.max_len).unwrap_or(u32::MAX);
        Ok(Self {
            keep: Keep::first(shared),
            magazine: Magazine::new(),
            counts: Counts::default(),
            fresh: (0, 0),
            pages: 0,
            unspilled: 0,
            written,
            open: None,
            closed: false,
        })
    }

    /// What the pool is called.
    pub fn name(&self) -> &str {
        self.keep.name()
    }

    /// Where the pool's chunks come from.
    pub fn source(&self) -> &S {
        self.keep.source()
    }

    /// How many bytes a page has.
    pub fn page_bytes(&self) -> usize {
        self.keep.page_bytes
    }

    /// A handle by which other threads give pages back: many at a time, or raw. Dropping a [`Page`] needs none.
    pub fn remote(&self) -> Remote<S> {
        Remote::new(self.keep.clone())
    }

    /// A page. O(1) but for the source.
    ///
    /// # Errors
    /// [`AllocError`] where no page has come back and the source has none.
    #[inline]
    pub fn alloc(&mut self) -> Result<Page<S>, AllocError> {
        self.alloc_for(Tag::NONE)
    }

    /// The same, for a holder that has a name.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_for(&mut self, tag: Tag) -> Result<Page<S>, AllocError> {
        let frame = self.take_owned(tag)?;
        Ok(Page { shared: self.keep.as_ptr(), frame, written: self.written })
    }

    /// Fills the empty slots; returns how many slots are full afterwards. Fewer than all where there are no more.
    #[inline]
    pub fn fill(&mut self, slots: &mut [Option<Page<S>>]) -> usize {
        fill(slots, || self.alloc().ok())
    }

    /// Allocates a raw page: it is in use until it is freed explicitly.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_raw(&mut self) -> Result<RawPage, AllocError> {
        self.alloc_raw_for(Tag::NONE)
    }

    /// The same, for a holder that has a name.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_raw_for(&mut self, tag: Tag) -> Result<RawPage, AllocError> {
        let frame = self.take()?;
        if let Some(record) = self.keep.directory.record(frame) {
            record.set_raw(tag.0);
        }
        Ok(self.keep.raw_at(frame))
    }

    /// Fills the empty slots with raw pages; returns how many slots are full afterwards. Fewer than all where there are
    /// no more.
    #[inline]
    pub fn fill_raw(&mut self, slots: &mut [Option<RawPage>]) -> usize {
        fill(slots, || self.alloc_raw().ok())
    }

    /// Takes a page back into the magazine; one of another pool goes to its own.
    #[inline(always)]
    pub fn recycle(&mut self, page: Page<S>) {
        self.take_back::<true>(page);
    }

    /// Frees a page, and counts neither that nor its allocation: to measure what the counters cost, and for
    /// nothing else.
    #[cfg(any(test, feature = "bench-internals"))]
    #[inline(always)]
    pub fn recycle_uncounted(&mut self, page: Page<S>) {
        self.take_back::<false>(page);
    }

    #[inline(always)]
    fn take_back<const COUNT: bool>(&mut self, page: Page<S>) {
        if page.shared != self.keep.as_ptr() {
            return drop(page);
        }
        let frame = page.into_entry().frame();
        self.put_owned::<COUNT>(frame);
    }

    /// Takes a raw page back into the magazine.
    ///
    /// # Errors
    /// [`FreeError`] where it is not a raw page of this pool that is out; then nothing has changed.
    #[inline]
    pub fn free_raw(&mut self, page: RawPage) -> Result<(), FreeError> {
        let (frame, record) = self.keep.find(page)?;
        Inner::<S>::check_raw(record, page)?;
        record.set_free();
        self.keep.sync_for_device(frame, self.written as usize);
        self.put::<true>(frame);
        Ok(())
    }

    /// The memory of a raw page that is out (all of it).
    ///
    /// # Errors
    /// [`FreeError`] where it is not a raw page of this pool that is out.
    pub fn memory(&self, page: RawPage) -> Result<DmaMemory<'_>, FreeError> {
        let (frame, record) = self.keep.find(page)?;
        Inner::<S>::check_raw(record, page)?;
        Ok(self.keep.memory_of(frame))
    }

    /// A name for holders of pages. The same name is the same tag. O(names).
    ///
    /// # Errors
    /// [`TooManyTags`] after 2^24 names.
    pub fn tag(&self, name: &str) -> Result<Tag, TooManyTags> {
        self.keep.tag(name)
    }

    /// Who holds the pages that are out; those in the ring count as held until the consumer has taken them out. O(pages).
    pub fn holders(&self) -> Vec<Holder> {
        self.keep.holders()
    }

    /// The eleven counters.
    pub fn counts(&self) -> Counts {
        self.keep.counts(self.own_counts())
    }

    /// What the consumer has counted itself.
    pub(super) fn own_counts(&self) -> Counts {
        Counts { fast: self.magazine.fast(), cached: self.magazine.cached(), ..self.counts }
    }

    /// Where the pool's pages are. O(chunks).
    pub fn stats(&self) -> PoolStats {
        let (chunks, bytes) = self.keep.extent();
        let (in_magazine, in_ring) = (self.magazine.len() as u64, self.keep.ring.len());
        let order = self.keep.config.order.get();
        let fresh = u64::from((self.fresh.1 - self.fresh.0) >> order);
        let below = fresh + self.keep.spilled();
        let in_use = self.pages.saturating_sub(in_magazine + in_ring + below);
        PoolStats { in_use, pages: self.pages, in_magazine, in_ring, below, chunks, bytes }
    }

    // The magazine.

    #[inline(always)]
    pub(super) fn take_owned(&mut self, tag: Tag) -> Result<u32, AllocError> {
        let frame = self.take()?;
        if let Some(record) = self.keep.directory.record(frame) {
            record.set_owned(tag.0);
        }
        Ok(frame)
    }

    #[inline(always)]
    pub(super) fn put_owned<const COUNT: bool>(&mut self, frame: u32) {
        if let Some(record) = self.keep.directory.record(frame) {
            record.set_free();
        }
        self.put::<COUNT>(frame);
    }

    #[inline(always)]
    fn take(&mut self) -> Result<u32, AllocError> {
        match self.magazine.take() {
            Some(frame) => Ok(frame),
            None => self.take_slow(),
        }
    }

    #[inline(always)]
    fn put<const COUNT: bool>(&mut self, frame: u32) {
        if self.magazine.put::<COUNT>(frame).is_err() {
            self.put_slow::<COUNT>(frame);
        }
    }

    #[cold]
    fn put_slow<const COUNT: bool>(&mut self, frame: u32) {
        self.counts.cache_full += 1;
        let mut half = [Entry::default(); BULK];
        for (entry, &frame) in half.iter_mut().zip(self.magazine.draw_half()) {
            *entry = Entry::owned(frame);
        }
        // SAFETY: the pages were in the magazine, so each has no owner and is released this once. The pool is alive: `keep`.
        unsafe { recycle_remotely(self.keep.as_ptr(), &half) };
        // There is room now.
        let _ = self.magazine.put::<COUNT>(frame);
    }

    #[cold]
    fn take_slow(&mut self) -> Result<u32, AllocError> {
        if let Some(frame) = self.refill_from_ring() {
            self.counts.refill += 1;
            return Ok(frame);
        }
        self.counts.empty += 1;
        let frame = match self.refill_from_spill() {
            Some(frame) => frame,
            None => match self.refill_from_chunk() {
                Ok(frame) => frame,
                Err(error) => self.take_idle_open().ok_or(error)?,
            },
        };
        if self.keep.config.order == Order::PAGE {
            self.counts.slow += 1;
        } else {
            self.counts.slow_high_order += 1;
        }
        Ok(frame)
    }

    fn refill_from_ring(&mut self) -> Option<u32> {
        let (keep, magazine, waive) = (&self.keep, &mut self.magazine, &mut self.counts.waive);
        loop {
            let mut seen = false;
            keep.ring.drain(BULK as u64, |entry| {
                seen = true;
                // There is room: the magazine is empty, and takes twice as many.
                let placed = keep.accept(entry) && magazine.stock(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.draw();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    fn refill_from_spill(&mut self) -> Option<u32> {
        if self.keep.ring_full() == self.unspilled {
            return None;
        }
        let (keep, magazine, waive) = (&self.keep, &mut self.magazine, &mut self.counts.waive);
        let unspilled = &mut self.unspilled;
        loop {
            let mut seen = false;
            keep.unspill(BULK, |entry| {
                seen = true;
                *unspilled += 1;
                let placed = keep.accept(entry) && magazine.stock(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.draw();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    fn refill_from_chunk(&mut self) -> Result<u32, AllocError> {
        if self.fresh.0 == self.fresh.1 {
            let (first, frames) = self.keep.acquire(self.next_order())?;
            self.fresh = (first, first + frames);
            self.pages += u64::from(frames >> self.keep.config.order.get());
        }
        let step = self.keep.config.order.frames();
        let (first, end) = self.fresh;
        // Pages of 2 MiB are as many as there are chunks, so this is at least one.
        let count = ((end - first) / step).min(BULK_PAGES);
        self.fresh.0 = first + count * step;
        // The last one first, so that they come out of the magazine in ascending order.
        for page in (1..count).rev() {
            let frame = first + page * step;
            self.keep.sync_for_device(frame, self.written as usize);
            // There is room, as above.
            let _ = self.magazine.stock(frame);
        }
        self.keep.sync_for_device(first, self.written as usize);
        Ok(first)
    }

    /// The order of the next chunk: 64 pages, or as much as the pool has, up to 2 MiB.
    fn next_order(&self) -> Order {
        let page = self.keep.config.order.get();
        let has = u8::try_from(self.pages.max(1).ilog2()).unwrap_or(0);
        let most = if cfg!(loom) { 1 } else { Order::HUGE.get() };
        let least = if cfg!(loom) { 0 } else { 6 };
        Order::new((page + has.max(least)).min(most)).unwrap_or(Order::HUGE)
    }
}

const _: () = assert!(Frame::BYTES == 4096);

#[inline(always)]
fn fill<T>(slots: &mut [Option<T>], mut one: impl FnMut() -> Option<T>) -> usize {
    let mut full = 0;
    for slot in slots {
        if slot.is_none() {
            *slot = one();
        }
        full += usize::from(slot.is_some());
    }
    full
}

impl<S: ChunkSource> fmt::Debug for PagePool<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool")
            .field("name", &self.name())
            .field("page_bytes", &self.page_bytes())
            .finish_non_exhaustive()
    }
}
