//! The pages themselves: entries, and the count of what each page holds.
//!
//! Each page has one state word beside it: a generation and a count. The count is of entries that are not zero (or are
//! about to be written): leaves, links, links retired. It rises from 0 only under the table's lock, and only under the
//! lock is a page whose count is 0 retired. Otherwise it rises by a compare-and-swap that proves, by the generation, that
//! the page has not changed its home meanwhile.
//!
//! Between the two is a bit that is set while a thread clears leaves of the page. Others that clear there wait for a
//! few stores; those that map do not. So a leaf is found and cleared by one thread, and counted out once, even if two
//! clear the same range against the contract; and the page keeps its home until the bit is cleared.
//!
//! Another bit marks a page that is kept: it stays linked when it is empty, and its count may rise from 0 without the lock. A page
//! is retired only after the bit has been cleared, under the lock, and found empty then: from there on no count succeeds.
//!
//! Another bit marks a pinned page. It counts one entry, whatever it holds: it is never empty, so it keeps its home, and its
//! leaves are neither counted nor cleared but through the pin.

use super::chunks::Chunks;
use super::entries;
use super::error::TableError;
use super::format::{Entry, Format};
use super::page_index::PageIndex;
use crate::addr::{Iova, PhysAddr};
use crate::sync::{Ordering, relax};
use core::marker::PhantomData;

/// Entries in a page.
pub(super) const ENTRIES: u16 = 512;

/// Returns how many bytes an entry at `level` covers.
pub(super) const fn span(level: u8) -> u64 {
    1 << (3 + 9 * level as u32)
}

/// Returns the number of the entry for `iova` in a page at `level`.
#[expect(clippy::cast_possible_truncation, reason = "masked to 9 bits")]
pub(super) const fn slot(iova: u64, level: u8) -> u16 {
    (iova / span(level)) as u16 & (ENTRIES - 1)
}

/// A page on the path to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) page: PageIndex,
    pub(super) level: u8,
}

/// Consecutive entries of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) place: Place,
    pub(super) slot: u16,
    pub(super) len: u16,
}

impl Run {
    /// Returns the entries from `iova` to the end of the page, or of `left` bytes.
    pub(super) fn longest(place: Place, iova: u64, left: u64) -> Self {
        let slot = slot(iova, place.level);
        let whole = u16::try_from(left / span(place.level)).unwrap_or(ENTRIES);
        Self { place, slot, len: whole.min(ENTRIES - slot) }
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.len) * span(self.place.level)
    }
}

/// A page's generation, whether it is pinned, whether a thread is clearing leaves of it, and its count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageState(u64);

/// A thread is clearing leaves of the page.
const CLEARING: u64 = 1 << 31;
/// The page is pinned.
const PINNED: u64 = 1 << 30;
/// The page stays linked when it is empty, and its entries are counted without the lock from 0 on.
const KEPT: u64 = 1 << 29;

impl PageState {
    #[inline]
    pub(super) fn count(self) -> u32 {
        // Bits 0 to 28; the generation is above bit 31.
        u32::try_from(self.0 & (KEPT - 1)).unwrap_or(u32::MAX)
    }

    #[inline]
    pub(super) fn is_kept(self) -> bool {
        self.0 & KEPT != 0
    }

    #[inline]
    pub(super) fn is_pinned(self) -> bool {
        self.0 & PINNED != 0
    }

    /// Whether entries of the page may be counted without the lock.
    #[inline]
    fn is_open(self) -> bool {
        (self.count() > 0 || self.is_kept()) && !self.is_pinned()
    }

    /// Whether the page holds nothing, and no thread is clearing leaves of it.
    #[inline]
    pub(super) fn is_unused(self) -> bool {
        self.count() == 0 && self.0 & CLEARING == 0
    }

    /// Whether taking away `n` entries leaves a page that is to be kept or retired now.
    #[inline]
    fn ends_with(self, n: u16) -> bool {
        self.count() == u32::from(n) && !self.is_kept()
    }

    #[inline]
    pub(super) fn generation(self) -> u64 {
        self.0 >> 32
    }
}

#[derive(Debug)]
pub(super) struct Store<F> {
    chunks: Chunks,
    levels: u8,
    format: PhantomData<F>,
}

impl<F: Format> Store<F> {
    pub(super) fn new(levels: u8) -> Self {
        Self { chunks: Chunks::new(), levels, format: PhantomData }
    }

    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    pub(super) fn levels(&self) -> u8 {
        self.levels
    }

    pub(super) fn root(&self) -> Place {
        Place { page: PageIndex::ROOT, level: self.levels }
    }

    pub(super) fn phys(&self, page: PageIndex) -> PhysAddr {
        self.chunks.phys(page)
    }

    /// Returns the page at `phys`, if it is one of the table's.
    pub(super) fn page_at(&self, phys: PhysAddr) -> Option<PageIndex> {
        self.chunks.page_at(phys)
    }

    // `page` and `slot` are in range: pages come from the directory or from `page_at`, slots from `slot`.
    fn entry(&self, page: PageIndex, slot: u16) -> &core::sync::atomic::AtomicU64 {
        &self.chunks.page(page).entries()[usize::from(slot)]
    }

    fn run(&self, run: Run) -> &[core::sync::atomic::AtomicU64] {
        let (first, len) = (usize::from(run.slot), usize::from(run.len));
        &self.chunks.page(run.place.page).entries()[first..first + len]
    }

    /// Returns how many entries of a run, from its first on, are `wanted`.
    #[inline]
    pub(super) fn leading(&self, run: Run, wanted: impl Fn(u64) -> bool) -> u16 {
        self.note_read(run.place.page);
        u16::try_from(entries::leading(self.run(run), wanted)).unwrap_or(run.len)
    }

    /// Writes the leaves of a run.
    #[inline]
    pub(super) fn write_run(&self, run: Run, entry: impl Fn(u64) -> u64) {
        self.note_write(run.place.page);
        entries::write(self.run(run), entry);
    }

    /// Clears the entries of a run.
    #[inline]
    pub(super) fn clear_run(&self, run: Run) {
        self.note_write(run.place.page);
        entries::clear(self.run(run));
    }

    pub(super) fn load(&self, place: Place, slot: u16) -> Entry {
        F::parse(self.raw(place.page, slot), place.level)
    }

    /// Entries are real atomics, which loom does not see: it sees the state word, which this "writes" with the entry.
    #[cfg_attr(not(loom), expect(clippy::unused_self, reason = "used under loom"))]
    fn note_write(&self, page: PageIndex) {
        let _ = page;
        #[cfg(loom)]
        self.chunks.state(page).fetch_add(0, Ordering::Relaxed);
    }

    /// The same for reads.
    #[cfg_attr(not(loom), expect(clippy::unused_self, reason = "used under loom"))]
    fn note_read(&self, page: PageIndex) {
        let _ = page;
        #[cfg(loom)]
        self.chunks.state(page).load(Ordering::Relaxed);
    }

    pub(super) fn raw(&self, page: PageIndex, slot: u16) -> u64 {
        self.note_read(page);
        self.entry(page, slot).load(Ordering::Acquire)
    }

    pub(super) fn set(&self, page: PageIndex, slot: u16, value: u64) {
        self.note_write(page);
        self.entry(page, slot).store(value, Ordering::Release);
    }

    /// Links a page into an entry if that is empty; returns whether it was.
    pub(super) fn install(&self, page: PageIndex, slot: u16, child: PageIndex) -> bool {
        let link = F::link(self.phys(child));
        self.note_write(page);
        self.entry(page, slot).compare_exchange(0, link, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(super) fn fill(&self, page: PageIndex, value: u64) {
        for slot in 0..ENTRIES {
            self.entry(page, slot).store(value, Ordering::Relaxed);
        }
    }

    pub(super) fn state(&self, page: PageIndex) -> PageState {
        PageState(self.chunks.state(page).load(Ordering::Acquire))
    }

    /// Begins a page's next generation, with nothing in it. Under the lock.
    pub(super) fn renew(&self, page: PageIndex) {
        let generation = self.state(page).generation().wrapping_add(1);
        self.chunks.state(page).store(generation << 32, Ordering::Release);
    }

    /// Counts `n` more entries. Under the lock, or while the caller's own entries keep the count above 0.
    pub(super) fn count(&self, page: PageIndex, n: u16) {
        self.chunks.state(page).fetch_add(u64::from(n), Ordering::AcqRel);
    }

    /// Pins a linked page that holds nothing; returns whether it does. Under the lock.
    pub(super) fn pin(&self, page: PageIndex) -> bool {
        let seen = self.state(page);
        let word = self.chunks.state(page);
        // Fails if a thread that breaks the contract has begun to clear there.
        let pinned = seen.0 + (PINNED | 1);
        seen.is_unused() && word.compare_exchange(seen.0, pinned, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Removes the pin of a page that holds nothing. Under the lock.
    pub(super) fn unpin(&self, page: PageIndex) {
        self.chunks.state(page).fetch_sub(PINNED | 1, Ordering::AcqRel);
    }

    /// Counts `n` more entries if the page is still in the generation of `seen` and not empty.
    pub(super) fn count_if(&self, page: PageIndex, seen: PageState, n: u16) -> bool {
        let word = self.chunks.state(page);
        let mut now = seen;
        while now.is_open() && now.generation() == seen.generation() {
            let more = now.0 + u64::from(n);
            match word.compare_exchange(now.0, more, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(other) => now = PageState(other),
            }
        }
        false
    }

    /// Keeps a linked page that holds nothing; returns whether it does. Under the lock.
    pub(super) fn keep(&self, page: PageIndex) -> bool {
        let seen = self.state(page);
        let kept = seen.0 | KEPT;
        let word = self.chunks.state(page);
        // Fails if another thread has begun to clear there: it decides again when it ends.
        seen.is_unused() && word.compare_exchange(seen.0, kept, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the keeping of a page: if it is empty, it can be retired from here on. Under the lock.
    pub(super) fn unkeep(&self, page: PageIndex) {
        self.chunks.state(page).fetch_and(!KEPT, Ordering::AcqRel);
    }

    /// Counts `n` entries less; returns whether none is left and the page is not kept.
    pub(super) fn uncount(&self, page: PageIndex, n: u16) -> bool {
        let before = PageState(self.chunks.state(page).fetch_sub(u64::from(n), Ordering::AcqRel));
        before.ends_with(n)
    }

    /// Excludes other clears from the page if it is still in the generation of `seen` and not empty. From
    /// here to [`end_clear`](Self::end_clear) it keeps its home.
    pub(super) fn begin_clear(&self, page: PageIndex, seen: PageState) -> bool {
        let word = self.chunks.state(page);
        let mut now = seen;
        let mut spins = 0;
        while now.is_open() && now.generation() == seen.generation() {
            if now.0 & CLEARING != 0 {
                relax(spins);
                spins = spins.saturating_add(1);
                now = self.state(page);
                continue;
            }
            match word.compare_exchange(now.0, now.0 | CLEARING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(other) => now = PageState(other),
            }
        }
        false
    }

    /// Admits other clears and counts `n` entries less; returns whether none is left and the page is not kept.
    pub(super) fn end_clear(&self, page: PageIndex, n: u16) -> bool {
        let before = PageState(self.chunks.state(page).fetch_sub(CLEARING + u64::from(n), Ordering::AcqRel));
        before.count() == u32::from(n)
    }

    /// Returns the last page on the path to `iova` that is at level `down_to` or above.
    ///
    /// Exact under the lock, or if the caller has entries below, which keep the path. Otherwise the path may
    /// change meanwhile, and the result must be confirmed.
    pub(super) fn descend(&self, iova: u64, down_to: u8) -> Result<Place, TableError> {
        let mut at = self.root();
        while at.level > down_to {
            let raw = self.raw(at.page, slot(iova, at.level));
            let Entry::Link(phys) = F::parse(raw, at.level) else { break };
            let damaged = TableError::Damaged { at: Iova::new(iova), entry: raw };
            at = Place { page: self.page_at(phys).ok_or(damaged)?, level: at.level - 1 };
        }
        Ok(at)
    }

    /// Returns the same without the lock, confirmed: the page, and its state from before the second descent.
    ///
    /// The acquire load of the state makes the second descent see at least everything from before the page's present
    /// generation, so a link to it can only be found at its present home; the home's own home cannot have changed
    /// during that generation (each page is counted in its parent); and so on to the root. Hence: if the
    /// generation is still the same *later*, the page was on the path to `iova` all the while.
    pub(super) fn descend_unlocked(&self, iova: u64, down_to: u8) -> Option<(Place, PageState)> {
        let place = self.descend(iova, down_to).ok()?;
        let state = self.state(place.page);
        let same = state.is_open() && self.descend(iova, down_to).ok()? == place;
        same.then_some((place, state))
    }
}
