//! [`PagePool`], the consumer's handle: allocates from its magazine and recycles into it.

use super::config::{Config, RevocableSource, SyncOps, Tag};
use super::error::{AllocError, CreateError, FreeError, TooManyTags};
use super::inner::{Inner, PoolRef};
use super::magazine::{BULK, Magazine};
use super::page::Page;
use super::raw::RawPage;
use super::records::OpenPage;
use super::recycle::recycle_remotely;
use super::remote::Remote;
use super::ring::Entry;
use super::stats::{Counts, Holder, PagePoolStats};
use crate::mem::DmaMemory;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

/// The consumer's handle to a page pool: there is one, and it may move between threads. See the
/// [module](super).
///
/// Dropping it is [`close`](Self::close).
pub struct PagePool {
    pub(super) shared: PoolRef,
    pub(super) magazine: Magazine,
    pub(super) counts: Counts,
    /// The frames of the newest chunk that were never allocated: the first one, and the end.
    pub(super) fresh: (u32, u32),
    pub(super) pages: u64,
    /// Allocs refused at [`Config::max_in_use`](super::Config::max_in_use).
    pub(super) limited: u64,
    /// Entries taken from the spill list.
    pub(super) spill_taken: u64,
    /// `max_len`: what the device may have written of a page, unless `sync_for_cpu` says less.
    pub(super) written: u32,
    /// The page that fragments are being cut from.
    pub(super) open: Option<OpenPage>,
    pub(super) closed: bool,
}

impl PagePool {
    /// Creates a pool for devices that are coherent with the processor. Acquires no chunk yet.
    ///
    /// # Errors
    /// [`CreateError`], which names the value and its limit.
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
            magazine: Magazine::new(),
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
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// Returns the size of a page in bytes.
    pub fn page_bytes(&self) -> usize {
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
        // By its frame: a page that has passed through a `Result` is written in parts and read back
        // whole, which a processor cannot do before the parts have left its store buffer.
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
    pub fn alloc_raw_for(&mut self, tag: Tag) -> Result<RawPage, AllocError> {
        let frame = self.take()?;
        if let Some(record) = self.shared.directory.record(frame) {
            record.set_raw(self.shared.name_of(tag));
        }
        Ok(self.shared.raw_at(frame))
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
        self.shared.sync_for_device(frame, self.written as usize);
        record.set_free();
        self.put(frame);
        Ok(())
    }

    /// Returns all of the memory of an allocated raw page.
    ///
    /// # Errors
    /// [`FreeError`] if it is not an allocated raw page of this pool.
    pub fn memory(&self, page: RawPage) -> Result<DmaMemory<'_>, FreeError> {
        let (frame, record) = self.shared.find(page)?;
        Inner::check_raw(record, page)?;
        Ok(self.shared.memory_of(frame))
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

    /// Returns what the consumer itself has counted.
    pub(super) fn own_counts(&self) -> Counts {
        Counts { fast: self.magazine.fast(), cached: self.magazine.cached(), ..self.counts }
    }

    /// Returns where the pool's pages are. O(chunks).
    pub fn stats(&self) -> PagePoolStats {
        let (chunks, bytes) = self.shared.extent();
        let (in_magazine, in_ring) = (self.magazine.len() as u64, self.shared.ring.len());
        let below = self.fresh_pages() + self.shared.spilled();
        let in_use = self.pages.saturating_sub(in_magazine + in_ring + below);
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
        if self.magazine.put(frame).is_err() {
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
        let _ = self.magazine.put(frame);
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
