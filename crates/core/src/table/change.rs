//! Changes of a table's shape: pages linked, retired, relinked, reclaimed. All of it under the
//! lock.

use super::directory::{List, PAGES_A_HOLD, PageDirectory};
use super::error::TableError;
use super::format::{ENTRIES, Entry, Format, slot, span};
use super::pages::{PageIndex, TableMemory, TablePages};
use super::store::{Place, Run, Store};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PhysAddr};
use crate::known_bad::{self, Mistake};

/// The table's pages and their directory, with the lock held.
pub(super) struct Locked<'t, 'd, F> {
    pub(super) store: &'t Store<F>,
    pub(super) memory: Option<&'t dyn TableMemory>,
    pub(super) directory: &'d mut PageDirectory,
}

impl<'t, F: Format> Locked<'t, '_, F> {
    /// Links the path to `iova` down to level `target` if possible, and reserves the run of empty
    /// entries there, at most `most` bytes, by counting them. Nothing is written to them.
    ///
    /// If a table page that holds no mapping (it waits to be reclaimed) is in place of a larger
    /// leaf, the run consists of leaves in that page.
    pub(super) fn reserve(
        &mut self,
        iova: u64,
        mut target: u8,
        most: u64,
    ) -> Result<Run<'t>, TableError> {
        let (mut at, mut linked) = (self.store.root(), false);
        loop {
            // Only these are ever pinned.
            if at.level == 1 && at.page.state().is_pinned() {
                return Err(TableError::Pinned { at: Iova::new(iova) });
            }
            let raw = self.store.raw(at.page, slot(iova, at.level));
            match F::parse(raw, at.level) {
                // A linked page that is not retired: nothing changes on the way to it.
                Entry::Link(phys) if at.level > target => {
                    at = self.child_at(at, iova, raw, phys)?
                }
                Entry::Leaf { .. } => {
                    return Err(TableError::AlreadyMapped { at: Iova::new(iova) });
                }
                Entry::Empty if at.level == target => break,
                Entry::Empty => {
                    self.provide(u32::from(at.level - target))?;
                    at = self.extend(at, iova)?;
                    linked = true;
                }
                Entry::Link(phys) | Entry::Retired(phys) => {
                    let child = self.child_at(at, iova, raw, phys)?;
                    if at.level == target {
                        if let Some(mapped) =
                            self.first_leaf(child, iova & !(span(at.level) - 1))?
                        {
                            return Err(TableError::AlreadyMapped { at: Iova::new(mapped) });
                        }
                        target -= 1;
                    }
                    self.relink(child.page.index());
                    at = child;
                }
            }
        }
        // A page that was linked just now is empty.
        let run =
            if linked { Run::longest(at, iova, most) } else { self.empty_run(at, iova, most)? };
        at.page.count(run.len);
        Ok(run)
    }

    /// Links the path to `window` down to level 1, and pins the page there, which must hold
    /// nothing.
    pub(super) fn pin(&mut self, window: u64) -> Result<PageIndex, TableError> {
        // As the first entry would be reserved, so that a page links or returns in the same way.
        let run = self.reserve(window, 1, span(1))?;
        let page = run.place.page;
        page.uncount(run.len);
        if page.pin() {
            return Ok(page.index());
        }
        let at = self.first_leaf(run.place, window)?.unwrap_or(window);
        Err(TableError::AlreadyMapped { at: Iova::new(at) })
    }

    /// Removes the pin of a page that holds nothing, and retires it.
    pub(super) fn unpin(&mut self, page: PageIndex, into: &mut List) {
        self.store.page(page).unpin();
        self.retire_if_empty(page, into);
    }

    /// Returns the empty entries from `iova` on; a link ends them, a leaf is an error.
    fn empty_run(&self, place: Place<'t>, iova: u64, most: u64) -> Result<Run<'t>, TableError> {
        let longest = Run::longest(place, iova, most);
        let empty = self.store.leading_zeros(longest);
        if empty < longest.len {
            let at = Iova::new(iova + u64::from(empty) * span(place.level));
            let entry = self.store.raw(place.page, longest.slot + empty);
            match F::parse(entry, place.level) {
                Entry::Leaf { .. } => return Err(TableError::AlreadyMapped { at }),
                // Neither zero nor what a table writes: the run would have no length.
                Entry::Empty if entry != 0 => return Err(TableError::Damaged { at, entry }),
                Entry::Empty | Entry::Link(_) | Entry::Retired(_) => {}
            }
        }
        Ok(Run { len: empty, ..longest })
    }

    /// Grows the table until `pages` pages are free: from the source, by as many pages as the table
    /// has, and at least by `pages`.
    fn provide(&mut self, pages: u32) -> Result<(), TableError> {
        while pages > self.directory.available {
            let capacity = self.store.chunks().capacity();
            let more = capacity.max(pages).min(PageIndex::MAX_OFFSET);
            let can_grow = self.store.chunks().can_grow();
            let source = self.memory.filter(|_| can_grow);
            if let Some(new) = source.and_then(|memory| memory.grow(more)) {
                self.donate(new)?;
                continue;
            }
            return Err(self.no_pages());
        }
        Ok(())
    }

    /// Adds pages to the table.
    pub(super) fn donate(&mut self, pages: TablePages) -> Result<(), TableError> {
        pages.are_below(self.store.phys_bits())?;
        let no_memory = TableError::NoMemory { pages: pages.count };
        self.store.chunks().capacity().checked_add(pages.count).ok_or(no_memory)?;
        let metas = self.directory.prepare(pages.count).ok_or(no_memory)?;
        self.store.chunks().add(pages)?;
        self.directory.add(metas);
        Ok(())
    }

    fn no_pages(&self) -> TableError {
        let advice =
            self.memory.map_or("donate more, or reclaim what is retired", |memory| memory.advice());
        TableError::NoPages { capacity: self.store.chunks().capacity(), advice }
    }

    /// Returns the page that an entry links, or linked until it was retired.
    fn child(&self, place: Place<'t>, iova: u64) -> Result<Place<'t>, TableError> {
        let raw = self.store.raw(place.page, slot(iova, place.level));
        match F::parse(raw, place.level) {
            Entry::Link(phys) | Entry::Retired(phys) => self.child_at(place, iova, raw, phys),
            Entry::Empty | Entry::Leaf { .. } => {
                Err(TableError::Damaged { at: Iova::new(iova), entry: raw })
            }
        }
    }

    /// Returns the page at `phys`, which entry `raw` of `place` links, or linked until it was
    /// retired.
    #[inline]
    fn child_at(
        &self,
        place: Place<'t>,
        iova: u64,
        raw: u64,
        phys: PhysAddr,
    ) -> Result<Place<'t>, TableError> {
        let page =
            self.store.page_at(place.page, phys).filter(|page| self.directory.has(page.index()));
        let page = page.ok_or(TableError::Damaged { at: Iova::new(iova), entry: raw })?;
        Ok(Place { page, level: place.level - 1 })
    }

    /// Returns the first address that is mapped through `place`, whose first address is `base`.
    fn first_leaf(&self, place: Place<'t>, base: u64) -> Result<Option<u64>, TableError> {
        if place.page.state().count() == 0 {
            return Ok(None);
        }
        for index in 0..ENTRIES {
            let iova = base + u64::from(index) * span(place.level);
            match self.store.load(place, index) {
                Entry::Leaf { .. } => return Ok(Some(iova)),
                Entry::Link(_) => {
                    let found = self.first_leaf(self.child(place, iova)?, iova)?;
                    if found.is_some() {
                        return Ok(found);
                    }
                }
                Entry::Empty | Entry::Retired(_) => {}
            }
        }
        Ok(None)
    }

    /// Links a new page below `at` on the path to `iova`.
    fn extend(&mut self, at: Place<'t>, iova: u64) -> Result<Place<'t>, TableError> {
        let (here, level) = (slot(iova, at.level), at.level - 1);
        let new = self.directory.alloc(at.page.index(), here).ok_or_else(|| self.no_pages())?;
        let page = self.store.page(new.page);
        if new.dirty || known_bad::POISONS {
            self.store.fill(page, 0);
        }
        page.renew(iova, level);
        // Leaves are written without the lock: a thread that maps the same addresses at the same
        // time, against the contract, finds them in use instead of corrupting the table.
        if !self.store.install(at.page, here, page) {
            self.directory.free(new.page);
            return Err(TableError::AlreadyMapped { at: Iova::new(iova) });
        }
        at.page.count(1);
        Ok(Place { page, level })
    }

    /// Links a retired page again, at its home: a walker that still holds the old link is then
    /// correct.
    fn relink(&mut self, page: PageIndex) {
        let meta = self.directory.of(page);
        if meta.retired {
            meta.retired = false;
            let (parent, slot) = (meta.parent, meta.slot);
            self.directory.retired -= 1;
            let link = F::link(self.store.page(page).phys());
            self.store.set(self.store.page(parent), slot, link);
        }
    }

    /// Returns the last page on the path to `iova`; `None` if the path is damaged.
    fn last_page(&self, iova: u64) -> Option<PageIndex> {
        let page = self.store.descend(iova, 1).ok()?.page.index();
        self.directory.has(page).then_some(page)
    }

    /// Whether a retired page is in the place of a 2 MiB leaf of `range`: it can be a leaf after
    /// that page's flush. O(2 MiB pieces).
    pub(super) fn awaits_room(&self, range: IovaRange) -> bool {
        let (mut at, end) = (range.start().raw().next_multiple_of(span(2)), range.end().raw());
        while at.checked_add(span(2)).is_some_and(|next| next <= end) {
            let Ok(place) = self.store.descend(at, 2) else { return false };
            // A retired page of a higher level is linked again by the map.
            let entry = self.store.load(place, slot(at, place.level));
            if place.level == 2 && matches!(entry, Entry::Retired(_)) {
                return true;
            }
            at = (at | (span(place.level) - 1)).saturating_add(1);
        }
        false
    }

    /// Retires the last page on the path to `iova` if it is unused.
    pub(super) fn retire_unused(&mut self, iova: u64, into: &mut List) {
        if let Some(page) = self.last_page(iova) {
            self.retire_if_empty(page, into);
        }
    }

    /// The entry that was the link stays counted in the parent until the page is reclaimed.
    pub(super) fn retire_if_empty(&mut self, page: PageIndex, into: &mut List) {
        let meta = self.directory.of(page);
        // A page that was relinked may still be on a list; reclaiming the list checks it again.
        let skip = meta.retired || meta.listed || meta.parent == PageIndex::NONE;
        let this = self.store.page(page);
        let state = this.state();
        // A thread that is clearing leaves of it checks again afterwards.
        if skip || !state.is_unused() {
            return;
        }
        meta.retired = true;
        let (parent, slot) = (meta.parent, meta.slot);
        self.store.set(self.store.page(parent), slot, F::retired(this.phys()));
        self.directory.retired += 1;
        if known_bad::makes(Mistake::TablePageEarlyAt(this.level())) {
            return self.free(page, into);
        }
        self.directory.of(page).listed = true;
        self.directory.push(into, page);
    }

    /// Frees the first pages of a list whose flush has completed, as many as one hold of the lock
    /// is for, and returns how many.
    pub(super) fn reclaim(&mut self, list: &mut List) -> u32 {
        let mut pending = core::mem::take(&mut self.directory.pending);
        let mut freed = 0;
        for _ in 0..PAGES_A_HOLD {
            let Some(page) = self.directory.pop(list) else { break };
            let meta = self.directory.of(page);
            meta.listed = false;
            if !meta.retired {
                // Relinked since. If it is empty again, it needs another flush.
                self.retire_if_empty(page, &mut pending);
                continue;
            }
            self.free(page, &mut pending);
            freed += 1;
        }
        self.directory.pending = pending;
        freed
    }

    /// Frees a retired page, which no walker can hold. If its parent is then empty, retires that.
    fn free(&mut self, page: PageIndex, into: &mut List) {
        let meta = self.directory.of(page);
        let (parent_index, slot) = (meta.parent, meta.slot);
        let (this, parent) = (self.store.page(page), self.store.page(parent_index));
        self.store.set(parent, slot, 0);
        self.directory.retired -= 1;
        if let Some(trap) = known_bad::trap() {
            self.store.fill(
                this,
                F::leaf(PhysAddr::new(trap), Access::READ | Access::WRITE, this.level()),
            );
        }
        self.directory.free(page);
        if parent.uncount(1) {
            self.retire_if_empty(parent_index, into);
        }
    }
}
