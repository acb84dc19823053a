//! [`PagePool`], the consumer's handle: allocates from its magazine and recycles into it, and
//! refills it from the ring, the spill list, the rest of the newest chunk, and the source.

use super::config::{Config, RawPage, RevocableSource, SyncOps, Tag};
use super::error::{CreateError, TooManyTags};
use super::inner::{Inner, PoolRef};
use super::page::{Page, Remote, recycle_remotely};
use super::records::OpenPage;
use super::ring::{BULK, BULK_PAGES, Entry};
use super::stats::{Counts, Holder, PagePoolStats};
use crate::dma_pool::{AllocError, FreeError};
use crate::frame::Order;
use crate::magazine::Magazine;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

/// The consumer's handle to a page pool: there is one, and it may move between threads. See the
/// [module](super).
///
/// Dropping it is [`close`](Self::close).
pub struct PagePool {
    pub(super) shared: PoolRef,
    pub(super) magazine: CountedPages,
    pub(super) counts: Counts,
    /// The frames of the newest chunk that were never allocated: the first one, and the end.
    pub(super) fresh: (u32, u32),
    pub(super) pages: u64,
    /// Allocs refused at [`Config::max_in_use`](super::Config::max_in_use).
    pub(super) limited: u64,
    /// Entries taken from the spill list.
    pub(super) spill_taken: u64,
    /// `max_len`: the bytes of a page that the device may have written, unless `sync_for_cpu` says
    /// less.
    pub(super) written: u32,
    /// The page that fragments are being cut from.
    pub(super) open: Option<OpenPage>,
    pub(super) closed: bool,
}

impl PagePool {
    /// Creates a pool for devices that are coherent with the processor. Acquires no chunk yet.
    ///
    /// # Errors
    /// [`CreateError`], which names the value and its limit. `source`, a handle, is dropped: pass a
    /// clone if it is still needed.
    pub fn new(
        source: impl RevocableSource + 'static,
        name: &str,
        config: Config,
    ) -> Result<Self, CreateError> {
        Self::make(Box::new(source), name, config, None)
    }

    /// Creates a pool for devices that are not coherent: `sync` is called with the bytes that
    /// change owner.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_sync(
        source: impl RevocableSource + 'static,
        name: &str,
        config: Config,
        sync: Box<dyn SyncOps>,
    ) -> Result<Self, CreateError> {
        Self::make(Box::new(source), name, config, Some(sync))
    }

    fn make(
        source: Box<dyn RevocableSource>,
        name: &str,
        config: Config,
        sync: Option<Box<dyn SyncOps>>,
    ) -> Result<Self, CreateError> {
        let shared = Inner::new(source, name, config, sync)?;
        // At most 2 MiB.
        let written = u32::try_from(shared.config.max_len).unwrap_or(u32::MAX);
        Ok(Self {
            shared: PoolRef::first(shared),
            magazine: CountedPages::new(),
            counts: Counts::default(),
            fresh: (0, 0),
            pages: 0,
            limited: 0,
            spill_taken: 0,
            written,
            open: None,
            closed: false,
        })
    }

    /// Returns the pool's name.
    fn name(&self) -> &str {
        self.shared.name()
    }

    /// Returns the size of a page in bytes.
    pub(super) fn page_bytes(&self) -> usize {
        self.shared.page_bytes
    }

    /// Returns a handle by which other threads free raw pages, or many pages at a time. Dropping a
    /// [`Page`] needs none.
    pub fn remote(&self) -> Remote {
        Remote::new(self.shared.clone())
    }

    /// Allocates a page. O(1), except for the source.
    ///
    /// # Errors
    /// [`AllocError`] if no page is free and the source has no chunk.
    #[inline]
    pub fn alloc(&mut self) -> Result<Page, AllocError> {
        self.alloc_for(Tag::NONE)
    }

    /// Allocates a page for a named holder.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_for(&mut self, tag: Tag) -> Result<Page, AllocError> {
        let frame = self.take_owned(tag)?;
        Ok(Page { shared: self.shared.as_ptr(), frame, written: self.written })
    }

    /// Fills the empty slots in order, until pages run out; returns how many slots are full
    /// afterwards. O(slots), except for the source.
    #[inline]
    pub fn fill(&mut self, slots: &mut [Option<Page>]) -> usize {
        self.fill_for(slots, Tag::NONE)
    }

    /// Fills the empty slots with pages for a named holder, as [`fill`](Self::fill).
    #[inline]
    pub fn fill_for(&mut self, slots: &mut [Option<Page>], tag: Tag) -> usize {
        // Identified by its frame: a page that has passed through a `Result` is written in parts
        // and read back whole, which a processor cannot do before the parts have left its store
        // buffer.
        let (shared, written) = (self.shared.as_ptr(), self.written);
        fill(slots, || self.take_owned(tag).ok().map(|frame| Page { shared, frame, written }))
    }

    /// Allocates a raw page, which is in use until it is freed explicitly.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub fn alloc_raw(&mut self) -> Result<RawPage, AllocError> {
        self.alloc_raw_for(Tag::NONE)
    }

    /// Allocates a raw page for a named holder.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    #[inline]
    pub(super) fn alloc_raw_for(&mut self, tag: Tag) -> Result<RawPage, AllocError> {
        let frame = self.take()?;
        if let Some(record) = self.shared.directory.record(frame) {
            if record.is_last_generation() {
                core::hint::cold_path();
                return Ok(self.start_generations_again(frame, tag));
            }
            record.set_raw(self.shared.name_of(tag));
        }
        // SAFETY: a page of the pool.
        Ok(unsafe { self.shared.raw_at(frame) })
    }

    /// Fills the empty slots with raw pages, as [`fill`](Self::fill).
    #[inline]
    pub fn fill_raw(&mut self, slots: &mut [Option<RawPage>]) -> usize {
        fill(slots, || self.alloc_raw().ok())
    }

    /// Returns a page to the magazine; a page of another pool is returned to that pool.
    #[inline(always)]
    pub fn recycle(&mut self, page: Page) {
        if page.shared != self.shared.as_ptr() {
            return drop(page);
        }
        let frame = page.into_entry().frame();
        self.put_owned(frame);
    }

    /// Returns a raw page to the magazine.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw page of this pool; nothing has changed then.
    // Not left to the compiler: what else is in the crate has changed its choice, by 16
    // instructions a pair.
    #[inline(always)]
    pub fn free_raw(&mut self, page: RawPage) -> Result<(), FreeError> {
        let (frame, record) = self.shared.find(page)?;
        Inner::check_raw(record, page)?;
        // First: if it panics, the page stays allocated.
        // SAFETY: allocated raw until it is free below.
        unsafe { self.shared.sync_for_device(frame, self.written as usize) };
        record.set_free();
        self.put(frame);
        Ok(())
    }

    /// Returns all of the memory of an allocated raw page, to be accessed by tests.
    #[cfg(all(test, not(loom)))]
    pub(super) fn memory(&self, page: RawPage) -> Result<crate::mem::DmaMemory<'_>, FreeError> {
        let (frame, record) = self.shared.find(page)?;
        Inner::check_raw(record, page)?;
        // SAFETY: allocated raw (checked above). Who frees it meanwhile breaks the rule of every
        // access to a raw page: its addresses are used by its owner.
        Ok(unsafe { self.shared.memory_of(frame) })
    }

    /// Returns the tag for a holder's name; the same name gives the same tag. O(names).
    ///
    /// # Errors
    /// [`TooManyTags`] after 2^24 names.
    pub fn tag(&self, name: &str) -> Result<Tag, TooManyTags> {
        self.shared.tag(name)
    }

    /// Returns the holders of the pages in use. Pages in the ring count as held until the consumer
    /// takes them out. O(pages).
    pub fn holders(&self) -> Vec<Holder> {
        self.shared.holders()
    }

    /// Returns the eleven counters.
    pub fn counts(&self) -> Counts {
        self.shared.counts(self.own_counts())
    }

    /// Returns the consumer's own counts.
    pub(super) fn own_counts(&self) -> Counts {
        Counts { fast: self.magazine.fast(), cached: self.magazine.cached(), ..self.counts }
    }

    /// Returns where the pool's pages are. O(chunks and pages in the ring), and O(pages) while raw
    /// pages are there.
    pub fn stats(&self) -> PagePoolStats {
        let (chunks, bytes) = self.shared.extent();
        let (in_magazine, in_ring) = (self.magazine.len() as u64, self.shared.ring.len());
        let below = self.fresh_pages() + self.shared.spilled();
        let free = in_magazine + self.fresh_pages() + self.shared.returned();
        let in_use = self.pages.saturating_sub(free);
        PagePoolStats {
            in_use,
            pages: self.pages,
            in_magazine,
            in_ring,
            below,
            chunks,
            bytes,
            limited: self.limited,
        }
    }

    // The magazine.

    #[inline(always)]
    pub(super) fn take_owned(&mut self, tag: Tag) -> Result<u32, AllocError> {
        let frame = self.take()?;
        if let Some(record) = self.shared.directory.record(frame) {
            record.set_owned(self.shared.name_of(tag));
        }
        Ok(frame)
    }

    #[inline(always)]
    pub(super) fn put_owned(&mut self, frame: u32) {
        if let Some(record) = self.shared.directory.record(frame) {
            record.set_free();
        }
        self.put(frame);
    }

    #[inline(always)]
    fn take(&mut self) -> Result<u32, AllocError> {
        match self.magazine.take() {
            Some(frame) => Ok(frame),
            None => self.take_slow(),
        }
    }

    #[inline(always)]
    fn put(&mut self, frame: u32) {
        if !self.magazine.put(frame) {
            self.put_slow(frame);
        }
    }

    #[cold]
    fn put_slow(&mut self, frame: u32) {
        self.counts.cache_full += 1;
        let mut half = [Entry::default(); BULK];
        for (entry, &frame) in half.iter_mut().zip(self.magazine.take_half_uncounted()) {
            *entry = Entry::owned(frame);
        }
        // SAFETY: the pages were in the magazine, so they have no owner and are released once;
        // `shared` keeps the pool alive.
        unsafe { recycle_remotely(self.shared.as_ptr(), &half) };
        // There is room now.
        self.magazine.put(frame);
    }
}

/// Fills the empty slots until `one` returns `None`; returns how many slots are full.
#[inline(always)]
fn fill<T>(slots: &mut [Option<T>], mut one: impl FnMut() -> Option<T>) -> usize {
    let mut full = 0;
    let mut rest = slots.iter_mut();
    for slot in rest.by_ref() {
        if slot.is_none() {
            *slot = one();
            if slot.is_none() {
                break;
            }
        }
        full += 1;
    }
    full + rest.filter(|slot| slot.is_some()).count()
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool")
            .field("name", &self.name())
            .field("page_bytes", &self.page_bytes())
            .finish_non_exhaustive()
    }
}

impl PagePool {
    #[cold]
    pub(super) fn take_slow(&mut self) -> Result<u32, AllocError> {
        if let Some(frame) = self.refill_from_ring() {
            self.counts.refill += 1;
            return Ok(frame);
        }
        self.counts.empty += 1;
        let frame = match self.refill_from_spill() {
            Some(frame) => frame,
            None => match self.refill_from_chunk() {
                Ok(frame) => frame,
                Err(error) => self.take_idle_open_page().ok_or_else(|| {
                    self.limited += u64::from(matches!(error, AllocError::Limit { .. }));
                    error
                })?,
            },
        };
        if self.shared.config.order == Order::PAGE {
            self.counts.slow += 1;
        } else {
            self.counts.slow_high_order += 1;
        }
        Ok(frame)
    }

    fn refill_from_ring(&mut self) -> Option<u32> {
        let (shared, magazine, waive) = (&self.shared, &mut self.magazine, &mut self.counts.waive);
        loop {
            let mut seen = false;
            shared.ring.drain(BULK as u64, |entry| {
                seen = true;
                // There is room: the magazine is empty and holds twice as many.
                let placed = shared.accept(entry) && magazine.put_uncounted(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.take_uncounted();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    /// Allocates a raw page whose generations start again, after taking every entry out of the ring
    /// and the spill list: a second free that was left there would be mistaken for a free of the
    /// allocation that has the same generation, 2^32 allocations later.
    #[cold]
    #[inline(never)]
    fn start_generations_again(&mut self, frame: u32, tag: Tag) -> RawPage {
        let mut entries = Vec::new();
        self.shared.ring.drain(u64::from(self.shared.config.ring), |entry| entries.push(entry));
        self.shared.take_spilled(usize::MAX, |entry| {
            self.spill_taken += 1;
            entries.push(entry);
        });
        for entry in entries {
            if self.shared.accept(entry) {
                self.put(entry.frame());
            } else {
                self.counts.waive += 1;
            }
        }
        if let Some(record) = self.shared.directory.record(frame) {
            record.set_raw(self.shared.name_of(tag));
        }
        // SAFETY: a page of the pool.
        unsafe { self.shared.raw_at(frame) }
    }

    fn refill_from_spill(&mut self) -> Option<u32> {
        if self.shared.ring_full() == self.spill_taken {
            return None;
        }
        let (shared, magazine, waive) = (&self.shared, &mut self.magazine, &mut self.counts.waive);
        let spill_taken = &mut self.spill_taken;
        loop {
            let mut seen = false;
            shared.take_spilled(BULK, |entry| {
                seen = true;
                *spill_taken += 1;
                let placed = shared.accept(entry) && magazine.put_uncounted(entry.frame());
                *waive += u64::from(!placed);
            });
            let frame = magazine.take_uncounted();
            if frame.is_some() || !seen {
                return frame;
            }
        }
    }

    /// Pages that were allocated once stay in circulation: held, in the ring, the spill list or the
    /// magazine. So the limit on pages in use is a limit on the pages that are brought into
    /// circulation here, and costs nothing elsewhere: the other places are empty now, so when no
    /// more may be, all of them are held.
    fn refill_from_chunk(&mut self) -> Result<u32, AllocError> {
        let limit = self.shared.config.max_in_use;
        let left = limit.saturating_sub(self.pages - self.fresh_pages());
        if left == 0 {
            return Err(AllocError::Limit { limit });
        }
        if self.fresh.0 == self.fresh.1 {
            let (first, frames) = self.shared.acquire(self.next_order(left))?;
            self.fresh = (first, first + frames);
            self.pages += u64::from(frames >> self.shared.config.order.get());
        }
        let step = self.shared.config.order.frames();
        let (first, end) = self.fresh;
        // At least one: a chunk has at least the order of a page.
        let most = u32::try_from(left).unwrap_or(u32::MAX).min(BULK_PAGES);
        let count = ((end - first) / step).min(most);
        let pages = (0..count).map(|page| first + page * step);
        // First: if one of them panics, all of these pages stay fresh.
        pages.clone().for_each(|frame| {
            // SAFETY: of the newest chunk, never allocated.
            unsafe { self.shared.sync_for_device(frame, self.written as usize) }
        });
        self.fresh.0 = first + count * step;
        // There is room, as above.
        self.magazine.fill_uncounted(pages.skip(1));
        Ok(first)
    }

    /// Returns how many pages of the newest chunk were never allocated.
    pub(super) fn fresh_pages(&self) -> u64 {
        u64::from((self.fresh.1 - self.fresh.0) >> self.shared.config.order.get())
    }

    /// Returns the order of the next chunk: 64 pages, or as many as the pool has, up to 2 MiB; but
    /// no more than a chunk of `left` pages needs.
    fn next_order(&self, left: u64) -> Order {
        let page = self.shared.config.order.get();
        // At most 2^9 pages.
        let needed = u8::try_from(left.clamp(1, 512).next_power_of_two().ilog2()).unwrap_or(0);
        let pool = u8::try_from(self.pages.max(1).ilog2()).unwrap_or(0);
        let max = if cfg!(loom) { 1 } else { Order::HUGE.get() };
        let min = if cfg!(loom) { 0 } else { 6 };
        Order::new((page + pool.max(min).min(needed)).min(max)).unwrap_or(Order::HUGE)
    }
}

const CAPACITY: usize = 2 * BULK;
const _: () = assert!(CAPACITY <= crate::magazine::LIMIT);

/// The consumer's pages: a magazine that counts puts and takes at no cost. The number of puts is
/// the magazine's, and that of takes follows from it and the pages left.
#[derive(Debug)]
pub(super) struct CountedPages {
    pages: Magazine<[u32; CAPACITY], true>,
    /// Uncounted puts less uncounted takes, modulo 2^64.
    moved: u64,
}

impl CountedPages {
    pub(super) fn new() -> Self {
        Self { pages: Magazine::empty([0; CAPACITY]), moved: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Takes the page that was put in last, and counts it.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u32> {
        self.pages.pop()
    }

    /// Puts a page in, and counts it; returns whether there was room.
    #[inline(always)]
    pub(super) fn put(&mut self, page: u32) -> bool {
        self.pages.push(page)
    }

    /// Puts a page in without counting it, for a refill; returns whether there was room.
    #[inline(always)]
    pub(super) fn put_uncounted(&mut self, page: u32) -> bool {
        let placed = self.pages.push_uncounted(page);
        self.moved = self.moved.wrapping_add(u64::from(placed));
        placed
    }

    /// Puts as many of `pages` in as there is room for, without counting them; they are taken in
    /// this order. There were none.
    fn fill_uncounted(&mut self, pages: impl ExactSizeIterator<Item = u32>) {
        self.moved = self.moved.wrapping_add(self.pages.fill(pages) as u64);
    }

    /// Takes a page without counting it.
    pub(super) fn take_uncounted(&mut self) -> Option<u32> {
        let page = self.pages.pop()?;
        self.moved = self.moved.wrapping_sub(1);
        Some(page)
    }

    /// Takes the upper half of a full magazine without counting it, in the order in which it was
    /// put in.
    pub(super) fn take_half_uncounted(&mut self) -> &[u32] {
        let half = self.pages.pop_many(BULK);
        self.moved = self.moved.wrapping_sub(half.len() as u64);
        half
    }

    /// Returns the number of counted puts.
    pub(super) fn cached(&self) -> u64 {
        self.pages.pushed()
    }

    /// Returns the number of counted takes.
    pub(super) fn fast(&self) -> u64 {
        self.cached().wrapping_add(self.moved).wrapping_sub(self.len() as u64)
    }
}
