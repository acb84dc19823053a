//! The tree behind a table, and how it maps: run by run, a run being as many entries of one table
//! page as one step covers. They are found and counted without the lock if their page is linked
//! already.

use super::change::Locked;
use super::directory::{List, PageDirectory};
use super::error::TableError;
use super::format::Format;
use super::found::Found;
use super::memory::TableMemory;
use super::page_index::PageIndex;
use super::pages::TablePages;
use super::state::PageState;
use super::store::{Run, Store};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::sync::{AtomicBool, Mutex, Ordering, unique_number};
use alloc::boxed::Box;
use core::fmt;

pub(super) struct Tree<F: Format> {
    /// Which table this is: unique within the process, and never reused.
    pub(super) number: u64,
    pub(super) store: Store<F>,
    pub(super) directory: Mutex<PageDirectory>,
    /// Whether pages wait to be added to the next `clear`.
    pending: AtomicBool,
    /// Where more pages come from.
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

    /// Reserves the same with the lock, and links what is missing.
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

    /// Puts back what was collected and not flushed.
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
