//! The tree behind a table: it maps and clears run by run, a run being as many entries of one table
//! page as one step covers. Entries are found without the lock if their page is linked already;
//! all of a range is reserved before the first leaf is written, and found mapped before the first
//! is cleared.

use super::change::Locked;
use super::directory::{List, PageDirectory};
use super::error::TableError;
use super::format::{Format, span};
use super::pages::{PageIndex, TableMemory, TablePages};
use super::state::PageState;
use super::store::{Place, Run, Store};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::sync::{AtomicBool, Mutex, Ordering, unique_number};
use alloc::boxed::Box;
use core::fmt;

pub(super) struct Tree<F: Format> {
    /// The number of the table: unique within the process, and never reused.
    pub(super) number: u64,
    pub(super) store: Store<F>,
    pub(super) directory: Mutex<PageDirectory>,
    /// Whether pages wait to be added to the next `clear`.
    pending: AtomicBool,
    /// The source of more pages.
    pub(super) memory: Option<Box<dyn TableMemory>>,
    /// The largest leaf.
    pub(super) max_leaf: PageSize,
}

impl<F: Format> Tree<F> {
    /// Creates an empty tree in `pages`.
    pub(super) fn new(pages: TablePages, levels: u8) -> Result<Self, TableError> {
        let count = pages.count;
        let no_memory = TableError::NoMemory { pages: count };
        let (store, mut directory) = (Store::<F>::new(pages, levels)?, PageDirectory::new());
        let metas = directory.prepare(count).ok_or(no_memory)?;
        directory.add(metas);
        // The first page allocated is the root; it counts one more than it holds and is never
        // empty.
        directory.alloc(PageIndex::NONE, 0).ok_or(no_memory)?;
        let root = store.root();
        store.fill(root.page, 0);
        root.page.renew(0, levels);
        root.page.count(1);
        let (directory, pending) = (Mutex::new(directory), AtomicBool::new(false));
        let number = unique_number();
        let (memory, max_leaf) = (None, PageSize::Size1G);
        Ok(Self { number, store, directory, pending, memory, max_leaf })
    }

    /// Returns the table's pages for a change of its shape.
    pub(super) fn locked<'t, 'd>(&'t self, directory: &'d mut PageDirectory) -> Locked<'t, 'd, F> {
        Locked { store: &self.store, memory: self.memory.as_deref(), directory }
    }

    /// Frees the pages of a list whose flush has completed, and returns how many. Takes the lock
    /// for some of them at a time.
    pub(super) fn reclaim(&self, mut list: List) -> u32 {
        let mut freed = 0;
        while !list.is_empty() {
            let mut directory = self.directory.lock();
            freed += self.locked(&mut directory).reclaim(&mut list);
            self.update_pending(&directory);
        }
        freed
    }

    /// Returns the level of the largest leaf for the remaining bytes of a mapping.
    fn leaf_level(&self, iova: u64, phys: PhysAddr, remaining: u64) -> u8 {
        let fits = |size: PageSize| {
            size <= self.max_leaf
                && (iova | phys.raw()) & size.mask() == 0
                && size.bytes() <= remaining
        };
        if fits(PageSize::Size1G) {
            3
        } else if fits(PageSize::Size2M) {
            2
        } else {
            1
        }
    }

    /// Maps `iova` to the memory from `phys`: reserves all entries, then writes them.
    pub(super) fn map(
        &self,
        iova: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), TableError> {
        match self.reserve(iova, phys, 0) {
            Ok(run) => self.map_rest(iova, phys, access, run),
            Err(error) => {
                self.unreserve(iova, 0);
                Err(error)
            }
        }
    }

    /// Maps a range of which the `first` run is reserved, and reserves the rest before.
    #[inline(never)]
    fn map_rest(
        &self,
        iova: IovaRange,
        phys: PhysAddr,
        access: Access,
        first: Run<'_>,
    ) -> Result<(), TableError> {
        let mut runs = Found::default();
        runs.push(first);
        let mut done = first.bytes();
        while done < iova.len() {
            match self.reserve(iova, phys, done) {
                Ok(run) => {
                    runs.push(run);
                    done += run.bytes();
                }
                Err(error) => {
                    self.unreserve(iova, done);
                    return Err(error);
                }
            }
        }
        let (mut done, mut found) = (0, runs.iter());
        while done < iova.len() {
            let run = found.next().map_or_else(|| self.reserved_run(iova, done), Ok)?;
            self.write(run, PhysAddr::new(phys.raw() + done), access);
            done += run.bytes();
        }
        Ok(())
    }

    /// Reserves the next run of a mapping by counting its entries, without the lock if its page is
    /// linked already.
    fn reserve(&self, range: IovaRange, phys: PhysAddr, done: u64) -> Result<Run<'_>, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let target = self.leaf_level(iova, PhysAddr::new(phys.raw() + done), left);
        if let Some(run) = self.reserve_linked(iova, left, target) {
            return Ok(run);
        }
        self.reserve_locked(iova, target, left)
    }

    /// Reserves the same with the lock, and links missing pages.
    #[inline(never)]
    fn reserve_locked(&self, iova: u64, target: u8, left: u64) -> Result<Run<'_>, TableError> {
        let mut directory = self.directory.lock();
        self.locked(&mut directory).reserve(iova, target, left)
    }

    /// Reserves the run up to the end of the page or of `left` bytes without the lock, if the page
    /// at level `target` is in use and all of the run is empty.
    #[inline]
    fn reserve_linked(&self, iova: u64, left: u64, target: u8) -> Option<Run<'_>> {
        let (place, state) = self.store.descend_unlocked(iova, target)?;
        let run = Run::longest(place, iova, left);
        (place.level == target && self.reserve_run(run, state)).then_some(run)
    }

    /// Counts the entries of a run if all of them are empty, and its page is still in the
    /// generation of `state`.
    #[inline(always)]
    fn reserve_run(&self, run: Run<'_>, state: PageState) -> bool {
        self.store.leading_zeros(run) == run.len && run.place.page.count_if(state, run.len)
    }

    /// Finds the run again that `reserve` found: the pages on its path are counted, so it has not
    /// changed.
    fn reserved_run(&self, range: IovaRange, done: u64) -> Result<Run<'_>, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let mut run = Run::longest(self.store.descend(iova, 1)?, iova, left);
        run.len = self.store.leading_zeros(run);
        // Only a thread that breaks the contract can have filled one meanwhile.
        if run.len == 0 { Err(TableError::AlreadyMapped { at: Iova::new(iova) }) } else { Ok(run) }
    }

    /// Releases the first `reserved` bytes of a range, none of which were written.
    fn unreserve(&self, range: IovaRange, reserved: u64) {
        let mut done = 0;
        while done < reserved {
            let Ok(run) = self.reserved_run(range, done) else { break };
            self.release(run, range.start().raw() + done);
            done += run.bytes();
        }
        // And the pages that the failed step linked.
        if let Some(iova) = range.start().raw().checked_add(reserved) {
            let mut directory = self.directory.lock();
            self.retire_unused(&mut directory, iova);
        }
    }

    #[inline]
    pub(super) fn write(&self, run: Run<'_>, phys: PhysAddr, access: Access) {
        self.store.write_run(run, F::leaf(phys, access, run.place.level));
    }

    /// Releases the reserved entries of a run that were not written; if its page is then empty,
    /// retires it.
    fn release(&self, run: Run<'_>, iova: u64) {
        if run.place.page.uncount(run.len) {
            let mut directory = self.directory.lock();
            self.retire_unused(&mut directory, iova);
        }
    }

    /// Pins the page of level 1 that translates `window`.
    pub(super) fn pin(&self, window: u64) -> Result<PageIndex, TableError> {
        let mut directory = self.directory.lock();
        let pinned = self.locked(&mut directory).pin(window);
        if pinned.is_err() {
            // The pages that it linked.
            self.retire_unused(&mut directory, window);
        }
        pinned
    }

    /// Removes a pin of a page that holds nothing.
    pub(super) fn unpin(&self, page: PageIndex, retired: &mut List) {
        let mut directory = self.directory.lock();
        self.locked(&mut directory).unpin(page, retired);
    }

    /// Retires the last page on the path to `iova` if it is unused, for the next clear.
    fn retire_unused(&self, directory: &mut PageDirectory, iova: u64) {
        let mut pending: List = core::mem::take(&mut directory.pending);
        self.locked(directory).retire_unused(iova, &mut pending);
        directory.pending = pending;
        self.update_pending(directory);
    }

    fn update_pending(&self, directory: &PageDirectory) {
        let pending = directory.pending.len > 0;
        // All clears read it, so it is written only where it changes.
        if self.pending.load(Ordering::Relaxed) != pending {
            self.pending.store(pending, Ordering::Release);
        }
    }

    /// Whether a retired page is in the place of a larger leaf of a mapping.
    pub(super) fn awaits_room(&self, range: IovaRange, phys: PhysAddr) -> bool {
        let large = PageSize::Size2M;
        if self.max_leaf < large
            || range.len() < large.bytes()
            || (range.start().raw() ^ phys.raw()) & large.mask() != 0
        {
            return false;
        }
        self.locked(&mut self.directory.lock()).awaits_room(range)
    }

    pub(super) fn collect_pending(&self, retired: &mut List) {
        if self.pending.load(Ordering::Acquire) {
            let mut directory = self.directory.lock();
            directory.move_pending(retired);
            self.update_pending(&directory);
        }
    }

    /// Puts back pages that were collected and not flushed.
    pub(super) fn put_back_pending(&self, retired: &mut List) {
        let mut directory = self.directory.lock();
        let mut pending = core::mem::take(&mut directory.pending);
        directory.move_all(retired, &mut pending);
        directory.pending = pending;
        self.update_pending(&directory);
    }
}

impl<F: Format> fmt::Debug for Tree<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree")
            .field("format", &F::NAME)
            .field("levels", &self.store.levels())
            .finish_non_exhaustive()
    }
}

impl<F: Format> Tree<F> {
    /// Clears `range`, all of which must be mapped, in whole leaves. Pages that became empty are
    /// added to `retired`.
    pub(super) fn clear(&self, range: IovaRange, retired: &mut List) -> Result<(), TableError> {
        let start = range.start().raw();
        let (place, state) = self.begin_clear(start)?;
        let first = self.leaf_run(place, range, 0);
        match first {
            // All in one table page.
            Ok(run) if run.bytes() == range.len() => {
                self.finish_clear(run, run.len, start, retired);
                Ok(())
            }
            _ => {
                self.finish_clear(Run { place, slot: 0, len: 0 }, 0, start, retired);
                self.clear_all(range, (first?, state), retired)
            }
        }
    }

    /// Clears a range of several table pages, of which the first run was `found`.
    #[inline(never)]
    fn clear_all(
        &self,
        range: IovaRange,
        first: (Run<'_>, PageState),
        retired: &mut List,
    ) -> Result<(), TableError> {
        let mut runs = Found::default();
        runs.push(first);
        let mut done = first.0.bytes();
        while done < range.len() {
            let (run, state) = self.mapped_run(range, done)?;
            runs.push((run, state));
            done += run.bytes();
        }
        // All of it is mapped, and the caller owns it: from here on nothing fails.
        let (mut done, mut found) = (0, runs.iter());
        while done < range.len() {
            done += self.clear_run(range, done, found.next(), retired)?;
        }
        Ok(())
    }

    /// Clears the next run of a range, which was `found` before. Returns the bytes cleared.
    fn clear_run(
        &self,
        range: IovaRange,
        done: u64,
        found: Option<(Run<'_>, PageState)>,
        retired: &mut List,
    ) -> Result<u64, TableError> {
        let iova = range.start().raw() + done;
        let place = match found {
            // In the same generation the page is where it was.
            Some((run, state)) if run.place.page.begin_clear(state) => run.place,
            _ => self.begin_clear(iova)?.0,
        };
        // Found again, because a thread that breaks the contract may have cleared some.
        let run = self.leaf_run(place, range, done);
        match run {
            Ok(run) => self.finish_clear(run, run.len, iova, retired),
            Err(_) => self.finish_clear(Run { place, slot: 0, len: 0 }, 0, iova, retired),
        }
        run.map(|run| run.bytes())
    }

    /// Clears `run` in a page from which other clears are excluded, and admits them again.
    #[inline]
    fn finish_clear(&self, run: Run<'_>, cleared: u16, iova: u64, retired: &mut List) {
        self.store.clear_run(run);
        if run.place.page.end_clear(cleared) {
            self.retire_emptied(iova, retired);
        }
    }

    #[inline(never)]
    fn retire_emptied(&self, iova: u64, retired: &mut List) {
        let mut directory = self.directory.lock();
        self.locked(&mut directory).retire_unused(iova, retired);
    }

    /// Returns the page of the leaf at `iova`, and excludes other clears from it.
    #[inline]
    fn begin_clear(&self, iova: u64) -> Result<(Place<'_>, PageState), TableError> {
        if let Some((place, state)) = self.store.descend_unlocked(iova, 1)
            && place.page.begin_clear(state)
        {
            return Ok((place, state));
        }
        self.begin_clear_locked(iova)
    }

    #[inline(never)]
    fn begin_clear_locked(&self, iova: u64) -> Result<(Place<'_>, PageState), TableError> {
        // The lock keeps the shape, so a page whose clear cannot begin holds nothing. (A thread
        // that has begun one needs no lock to end it, so it may be waited for here.)
        let _shape = self.directory.lock();
        let place = self.store.descend(iova, 1)?;
        let state = place.page.state();
        if place.page.begin_clear(state) {
            return Ok((place, state));
        }
        Err(self.not_cleared(place, iova))
    }

    /// Returns why no leaf of the page at `place` can be cleared. Under the lock.
    fn not_cleared(&self, place: Place<'_>, iova: u64) -> TableError {
        let at = Iova::new(iova);
        if place.page.state().is_pinned() {
            TableError::Pinned { at }
        } else {
            TableError::NotMapped { at }
        }
    }

    /// Returns the next run of mapped leaves of a range, confirmed, and the state of its page.
    fn mapped_run(&self, range: IovaRange, done: u64) -> Result<(Run<'_>, PageState), TableError> {
        let iova = range.start().raw() + done;
        if let Some((place, state)) = self.store.descend_unlocked(iova, 1)
            && let Ok(run) = self.leaf_run(place, range, done)
            && place.page.state().generation() == state.generation()
        {
            return Ok((run, state));
        }
        let _shape = self.directory.lock();
        let place = self.store.descend(iova, 1)?;
        let state = place.page.state();
        if state.is_pinned() {
            return Err(self.not_cleared(place, iova));
        }
        Ok((self.leaf_run(place, range, done)?, state))
    }

    /// Returns the leaves at `place` from `done` bytes into a range, up to its end.
    #[inline]
    fn leaf_run<'t>(
        &self,
        place: Place<'t>,
        range: IovaRange,
        done: u64,
    ) -> Result<Run<'t>, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let level = place.level;
        let mut run = Run::longest(place, iova, left);
        let inside = iova & (span(level) - 1);
        if run.len == 0 || inside != 0 {
            return Err(self.part_of_leaf(run, range, iova));
        }
        run.len = self.store.leading(run, |raw| F::is_leaf(raw, level));
        if run.len == 0 { Err(TableError::NotMapped { at: Iova::new(iova) }) } else { Ok(run) }
    }

    /// Returns why a clear from `iova` on covers no whole leaf there.
    #[cold]
    fn part_of_leaf(&self, run: Run<'_>, range: IovaRange, iova: u64) -> TableError {
        let level = run.place.level;
        if !F::is_leaf(self.store.raw(run.place.page, run.slot), level) {
            return TableError::NotMapped { at: Iova::new(iova) };
        }
        let leaf = IovaRange::new(Iova::new(iova & !(span(level) - 1)), span(level));
        TableError::PartOfLeaf { range, leaf: leaf.unwrap_or(range) }
    }
}

/// Table pages whose runs are remembered; the runs of more are found again by a walk. 8 pages of
/// leaves of 4 KiB are 16 MiB.
const REMEMBERED: usize = 8;

/// The first few of a sequence of values.
pub(super) struct Found<T> {
    values: [Option<T>; REMEMBERED],
    len: usize,
}

impl<T> Default for Found<T> {
    fn default() -> Self {
        Self { values: [const { None }; REMEMBERED], len: 0 }
    }
}

impl<T: Copy> Found<T> {
    /// Adds a value, unless there are too many.
    pub(super) fn push(&mut self, value: T) {
        if let Some(place) = self.values.get_mut(self.len) {
            *place = Some(value);
            self.len += 1;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = T> {
        self.values.iter().copied().flatten()
    }
}
