//! The pages themselves: entries, and the count of what each page holds.
//!
//! Each page has one word beside it: a generation and a count. The count is of entries that are not zero (or are about to
//! be written), whatever they are: leaves, links, links retired. Only under the table's lock does it
//! rise from 0, and only under the lock is a page whose count is 0 retired. Elsewhere it rises by a
//! compare-and-swap that proves, by the generation, that the page has not changed its home meanwhile.
//!
//! Between the two is a bit that says that a thread is clearing leaves of the page. Others that clear there wait for a
//! few stores; those that map do not. So a leaf is found and cleared by one thread, and counted out once, even if two
//! clear the same range against the contract; and the page keeps its home until the bit is gone.

use super::TableError;
use super::format::{Entry, Format};
use super::pages::TablePages;
use crate::addr::{Iova, PhysAddr};
use crate::sync::{AtomicU64, Ordering, relax};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::marker::PhantomData;

/// Entries in a page.
pub(super) const ENTRIES: u16 = 512;

/// How many bytes an entry at `level` stands for.
pub(super) const fn span(level: u8) -> u64 {
    1 << (3 + 9 * level as u32)
}

/// The number of the entry for `iova` in a page at `level`.
#[expect(clippy::cast_possible_truncation, reason = "masked to 9 bits")]
pub(super) const fn slot(iova: u64, level: u8) -> u16 {
    (iova / span(level)) as u16 & (ENTRIES - 1)
}

/// A page on the way to an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) page: u32,
    pub(super) level: u8,
}

/// Some entries of one page, one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    pub(super) place: Place,
    pub(super) slot: u16,
    pub(super) len: u16,
}

impl Run {
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.len) * span(self.place.level)
    }
}

/// A page's generation, whether a thread clears leaves of it, and its count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word(u64);

/// A thread clears leaves of the page.
const CLEARING: u64 = 1 << 31;

impl Word {
    pub(super) fn count(self) -> u32 {
        // Bits 0 to 30; the generation is above bit 31.
        u32::try_from(self.0 & (CLEARING - 1)).unwrap_or(u32::MAX)
    }

    /// Whether the page holds nothing, and no thread is about to find that out.
    pub(super) fn is_unused(self) -> bool {
        self.count() == 0 && self.0 & CLEARING == 0
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> 32
    }
}

#[derive(Debug)]
pub(super) struct Store<F> {
    pages: TablePages,
    words: Box<[AtomicU64]>,
    levels: u8,
    format: PhantomData<F>,
}

/// Page 0 is the root.
const ROOT: u32 = 0;

impl<F: Format> Store<F> {
    pub(super) fn new(pages: TablePages, levels: u8) -> Option<Self> {
        let mut words = Vec::new();
        words.try_reserve_exact(pages.count as usize).ok()?;
        words.resize_with(pages.count as usize, || AtomicU64::new(0));
        Some(Self { pages, words: words.into_boxed_slice(), levels, format: PhantomData })
    }

    pub(super) fn levels(&self) -> u8 {
        self.levels
    }

    pub(super) fn capacity(&self) -> u32 {
        self.pages.count
    }

    pub(super) fn root(&self) -> Place {
        Place { page: ROOT, level: self.levels }
    }

    pub(super) fn phys(&self, page: u32) -> PhysAddr {
        PhysAddr::new(self.pages.phys.raw() + u64::from(page) * 4096)
    }

    /// The page at `phys`, if it is one of the table's.
    pub(super) fn page_at(&self, phys: PhysAddr) -> Option<u32> {
        let page = u32::try_from(phys.checked_offset_from(self.pages.phys)? / 4096).ok()?;
        (page < self.pages.count).then_some(page)
    }

    // `page` and `slot` are in range: pages come from the account or from `page_at`, slots from `slot`.
    fn entry(&self, page: u32, slot: u16) -> &core::sync::atomic::AtomicU64 {
        &self.pages.pages[page as usize].entries()[usize::from(slot)]
    }

    pub(super) fn load(&self, place: Place, slot: u16) -> Entry {
        F::parse(self.raw(place.page, slot), place.level)
    }

    /// Entries are real atomics: what loom knows of is the word beside them, which this "writes" with the entry.
    #[cfg(loom)]
    fn switch_to_write(&self, page: u32) {
        self.words[page as usize].fetch_add(0, Ordering::Relaxed);
    }

    pub(super) fn raw(&self, page: u32, slot: u16) -> u64 {
        #[cfg(loom)]
        self.words[page as usize].load(Ordering::Relaxed);
        self.entry(page, slot).load(Ordering::Acquire)
    }

    pub(super) fn set(&self, page: u32, slot: u16, value: u64) {
        #[cfg(loom)]
        self.switch_to_write(page);
        self.entry(page, slot).store(value, Ordering::Release);
    }

    /// Links a page into an entry that must be empty; whether it was.
    pub(super) fn install(&self, page: u32, slot: u16, child: u32) -> bool {
        let link = F::link(self.phys(child));
        #[cfg(loom)]
        self.switch_to_write(page);
        self.entry(page, slot).compare_exchange(0, link, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(super) fn fill(&self, page: u32, value: u64) {
        for slot in 0..ENTRIES {
            self.entry(page, slot).store(value, Ordering::Relaxed);
        }
    }

    pub(super) fn word(&self, page: u32) -> Word {
        Word(self.words[page as usize].load(Ordering::Acquire))
    }

    /// Begins a page's next life, with nothing in it. Under the lock.
    pub(super) fn renew(&self, page: u32) {
        let generation = self.word(page).generation().wrapping_add(1);
        self.words[page as usize].store(generation << 32, Ordering::Release);
    }

    /// Counts `n` more entries. Under the lock, or where the caller's own entries keep the count above 0.
    pub(super) fn count(&self, page: u32, n: u16) {
        self.words[page as usize].fetch_add(u64::from(n), Ordering::AcqRel);
    }

    /// Counts `n` more entries if the page is still in the life that `seen` was read in and holds something.
    pub(super) fn count_if(&self, page: u32, seen: Word, n: u16) -> bool {
        let word = &self.words[page as usize];
        let mut now = seen;
        while now.count() > 0 && now.generation() == seen.generation() {
            let more = now.0 + u64::from(n);
            match word.compare_exchange(now.0, more, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(other) => now = Word(other),
            }
        }
        false
    }

    /// Counts `n` entries less; whether none is left.
    pub(super) fn uncount(&self, page: u32, n: u16) -> bool {
        let before = Word(self.words[page as usize].fetch_sub(u64::from(n), Ordering::AcqRel));
        before.count() == u32::from(n)
    }

    /// Keeps other clears out of the page, if it is still in the life that `seen` was read in and holds something. From
    /// here to [`end_clear`](Self::end_clear) it keeps its home.
    pub(super) fn begin_clear(&self, page: u32, seen: Word) -> bool {
        let word = &self.words[page as usize];
        let mut now = seen;
        let mut spins = 0;
        while now.count() > 0 && now.generation() == seen.generation() {
            if now.0 & CLEARING != 0 {
                relax(spins);
                spins = spins.saturating_add(1);
                now = self.word(page);
                continue;
            }
            match word.compare_exchange(now.0, now.0 | CLEARING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(other) => now = Word(other),
            }
        }
        false
    }

    /// Lets other clears in and counts `n` entries less; whether none is left.
    pub(super) fn end_clear(&self, page: u32, n: u16) -> bool {
        let before = Word(self.words[page as usize].fetch_sub(CLEARING + u64::from(n), Ordering::AcqRel));
        before.count() == u32::from(n)
    }

    /// The last page on the way to `iova` that is at `down_to` or above.
    ///
    /// Exact under the lock, or where the caller has entries below that keep the way as it is. Otherwise the way may
    /// change meanwhile, and the answer must be confirmed.
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

    /// The same without the lock, confirmed: the page, and its word from before the second look.
    ///
    /// The word's acquire makes the second descent see at least everything from before the page's present life
    /// began, so a link to it can only be found at its present home; the home's own home can not have changed
    /// as long as the page is in that life (each is counted in its parent); and so on to the root. Hence: if the
    /// generation is still the same *later*, the page was on the way to `iova` all the while.
    pub(super) fn descend_unlocked(&self, iova: u64, down_to: u8) -> Option<(Place, Word)> {
        let place = self.descend(iova, down_to).ok()?;
        let word = self.word(place.page);
        let same = word.count() > 0 && self.descend(iova, down_to).ok()? == place;
        same.then_some((place, word))
    }
}
