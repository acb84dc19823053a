//! The pages themselves: their entries, and the way to them.

use super::entries;
use super::error::TableError;
use super::format::{ENTRIES, Entry, Format, slot, span};
use super::pages::{Chunks, Page, PageIndex, TablePages};
use super::state::PageState;
use crate::addr::{Iova, PhysAddr};
use crate::sync::Ordering;
use core::marker::PhantomData;

/// A page on the path to an address.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Place<'t> {
    pub(super) page: Page<'t>,
    pub(super) level: u8,
}

/// Consecutive entries of one page.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Run<'t> {
    pub(super) place: Place<'t>,
    pub(super) slot: u16,
    pub(super) len: u16,
}

impl<'t> Run<'t> {
    /// Returns the entries from `iova` to the end of the page, or of `left` bytes.
    #[inline]
    pub(super) fn longest(place: Place<'t>, iova: u64, left: u64) -> Self {
        let slot = slot(iova, place.level);
        let whole = u16::try_from(left / span(place.level)).unwrap_or(ENTRIES);
        Self { place, slot, len: whole.min(ENTRIES - slot) }
    }

    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.len) * span(self.place.level)
    }

    // In range: a slot and a length come from `longest`, or from a range inside a window.
    #[inline]
    fn entries(&self) -> &'static [core::sync::atomic::AtomicU64] {
        let (first, len) = (usize::from(self.slot), usize::from(self.len));
        &self.place.page.memory().entries()[first..first + len]
    }
}

#[derive(Debug)]
pub(super) struct Store<F> {
    chunks: Chunks,
    levels: u8,
    bits: u32,
    phys_bits: u32,
    format: PhantomData<F>,
}

impl<F: Format> Store<F> {
    pub(super) fn new(pages: TablePages, levels: u8) -> Result<Self, TableError> {
        let (chunks, bits) = (Chunks::new(pages)?, F::bits(levels));
        Ok(Self { chunks, levels, bits, phys_bits: F::PHYS_BITS, format: PhantomData })
    }

    pub(super) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    pub(super) fn levels(&self) -> u8 {
        self.levels
    }

    /// Returns how many bits of address are translated.
    #[inline]
    pub(super) fn bits(&self) -> u32 {
        self.bits
    }

    /// Returns how many bits a physical address has.
    #[inline]
    pub(super) fn phys_bits(&self) -> u32 {
        self.phys_bits
    }

    /// Refuses memory beyond `bits` bits from now on.
    pub(super) fn limit_phys(&mut self, bits: u32) -> Result<(), TableError> {
        self.chunks.are_below(bits)?;
        self.phys_bits = bits;
        Ok(())
    }

    #[inline]
    pub(super) fn root_phys(&self) -> PhysAddr {
        self.chunks.root_phys()
    }

    #[inline]
    pub(super) fn root(&self) -> Place<'_> {
        Place { page: self.chunks.root(), level: self.levels }
    }

    #[inline]
    pub(super) fn page(&self, index: PageIndex) -> Page<'_> {
        self.chunks.page(index)
    }

    /// Returns the page at `phys`, if it is one of the table's.
    #[inline]
    pub(super) fn page_at<'t>(&'t self, near: Page<'t>, phys: PhysAddr) -> Option<Page<'t>> {
        self.chunks.page_at(near, phys)
    }

    /// Tells loom, which sees no entry, that those of a pinned page are about to be written.
    #[inline]
    pub(super) fn note_pinned(&self, page: PageIndex) {
        let _ = page;
        #[cfg(loom)]
        note_write(self.page(page));
    }

    /// Returns how many entries of a run, from its first on, are `wanted`.
    #[inline]
    pub(super) fn leading(&self, run: Run<'_>, wanted: impl Fn(u64) -> bool) -> u16 {
        note_read(run.place.page);
        u16::try_from(entries::leading(run.entries(), wanted)).unwrap_or(run.len)
    }

    /// Returns how many entries of a run, from its first on, are 0.
    #[inline]
    pub(super) fn leading_zeros(&self, run: Run<'_>) -> u16 {
        note_read(run.place.page);
        u16::try_from(entries::leading_zeros(run.entries())).unwrap_or(run.len)
    }

    /// Writes the leaves of a run: `first`, and what differs from it by the memory of one leaf, and
    /// so on.
    #[inline]
    pub(super) fn write_run(&self, run: Run<'_>, first: u64) {
        note_write(run.place.page);
        entries::write(run.entries(), first, span(run.place.level));
        F::write_back(run.entries());
    }

    /// Clears the entries of a run.
    #[inline]
    pub(super) fn clear_run(&self, run: Run<'_>) {
        note_write(run.place.page);
        entries::clear(run.entries());
        F::write_back(run.entries());
    }

    #[inline]
    pub(super) fn load(&self, place: Place<'_>, slot: u16) -> Entry {
        F::parse(self.raw(place.page, slot), place.level)
    }

    #[inline]
    pub(super) fn raw(&self, page: Page<'_>, slot: u16) -> u64 {
        note_read(page);
        entry(page, slot).load(Ordering::Acquire)
    }

    pub(super) fn set(&self, page: Page<'_>, slot: u16, value: u64) {
        note_write(page);
        let entry = entry(page, slot);
        entry.store(value, Ordering::Release);
        F::write_back(core::slice::from_ref(entry));
    }

    /// Links a page into an entry if that is empty; returns whether it was.
    pub(super) fn install(&self, page: Page<'_>, slot: u16, child: Page<'_>) -> bool {
        let link = F::link(child.phys());
        note_write(page);
        let entry = entry(page, slot);
        let installed =
            entry.compare_exchange(0, link, Ordering::AcqRel, Ordering::Acquire).is_ok();
        F::write_back(core::slice::from_ref(entry));
        installed
    }

    pub(super) fn fill(&self, page: Page<'_>, value: u64) {
        for slot in 0..ENTRIES {
            entry(page, slot).store(value, Ordering::Relaxed);
        }
        F::write_back(page.memory().entries());
    }

    /// Returns the last page on the path to `iova` that is at level `down_to` or above.
    ///
    /// Exact under the lock, or if the caller has entries below, which keep the path. Otherwise the
    /// path may change meanwhile, and the result must be confirmed.
    #[inline]
    pub(super) fn descend(&self, iova: u64, down_to: u8) -> Result<Place<'_>, TableError> {
        let mut at = self.root();
        while at.level > down_to {
            let raw = self.raw(at.page, slot(iova, at.level));
            let Entry::Link(phys) = F::parse(raw, at.level) else { break };
            let damaged = TableError::Damaged { at: Iova::new(iova), entry: raw };
            at = Place { page: self.page_at(at.page, phys).ok_or(damaged)?, level: at.level - 1 };
        }
        Ok(at)
    }

    /// Returns the same without the lock, confirmed: the page, and a state in which it may be
    /// counted in.
    ///
    /// The acquire load of the state makes the home that is read next at least as new as the page's
    /// present generation. If it is newer, a later read of the state finds a newer generation. A
    /// page that may be counted in is linked at its home, where it is itself counted in its parent,
    /// and so on to the root. Hence: if the generation is still the same *later*, the page was on
    /// the path to `iova` all the while.
    #[inline]
    pub(super) fn descend_unlocked(
        &self,
        iova: u64,
        down_to: u8,
    ) -> Option<(Place<'_>, PageState)> {
        let place = self.descend(iova, down_to).ok()?;
        let state = place.page.state();
        let open = state.is_open() && place.page.is_home_of(iova, place.level);
        open.then_some((place, state))
    }
}

#[inline]
fn entry(page: Page<'_>, slot: u16) -> &'static core::sync::atomic::AtomicU64 {
    &page.memory().entries()[usize::from(slot % ENTRIES)]
}

/// Entries are real atomics, which loom does not see. It switches threads at this access to a word
/// that nothing else uses, so that it orders nothing and shows no thread anything.
#[inline]
fn note_write(page: Page<'_>) {
    let _ = page;
    #[cfg(loom)]
    page.record().entries.fetch_add(0, Ordering::Relaxed);
}

/// Models a read of an entry for loom, as [`note_write`] does a write.
#[inline]
fn note_read(page: Page<'_>) {
    let _ = page;
    #[cfg(loom)]
    page.record().entries.load(Ordering::Relaxed);
}
