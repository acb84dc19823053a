//! The runs that a table maps: for diagnostics, and for reports of mappings that were left.

use super::format::{Entry, Format, slot, span};
use super::radix::Table;
use super::store::Place;
use super::tree::Tree;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use core::iter::FusedIterator;

/// Entries that are read while the lock is held once: two table pages. Meanwhile no table page can
/// be linked or retired.
const READS: u32 = 1024;

/// Adjacent leaves of one size that give one access to contiguous memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappedRun {
    /// The addresses: the length is that of all leaves.
    pub iova: IovaRange,
    /// The memory behind the first address.
    pub phys: PhysAddr,
    /// The access that the device has.
    pub access: Access,
    /// The size of each leaf.
    pub page_size: PageSize,
}

impl MappedRun {
    /// Returns the two as one, if `next` continues this one in both address spaces and differs in
    /// nothing else.
    fn joined(&self, next: &Self) -> Option<Self> {
        let adjacent = self.iova.end() == next.iova.start()
            && self.phys.checked_add(self.iova.len()) == Some(next.phys)
            && (self.access, self.page_size) == (next.access, next.page_size);
        let iova = self.iova.merged(&next.iova).filter(|_| adjacent)?;
        Some(Self { iova, ..*self })
    }
}

/// The runs that a table maps, by ascending address. See [`Table::mapped`].
#[derive(Debug)]
#[must_use = "an iterator reads nothing until it is advanced"]
pub struct MappedRuns<'t, F: Format> {
    tree: &'t Tree<F>,
    /// Everything below has been read.
    at: u64,
    /// The last run, to which the next leaf may belong.
    run: Option<MappedRun>,
}

/// Why the reading of entries has stopped.
enum Stop {
    /// The run has ended, and another one has begun.
    Ended(MappedRun),
    /// The lock was held long enough.
    Paused,
    /// There is no more.
    Done,
}

impl<F: Format> Table<F> {
    /// Returns the runs that are mapped, by ascending address, neighbours merged. For tests and
    /// diagnostics.
    ///
    /// O(512 × table pages that hold an entry) for all of them, however large the address space is:
    /// addresses that no page translates are skipped at the highest level that shows it. The lock
    /// is taken for at most 1,024 entries at a time and is not held between two calls of `next`, so
    /// maps, clears and reclaims continue meanwhile; allocates nothing.
    ///
    /// The result is exact if nothing changes meanwhile. Otherwise it may be *torn*: each leaf was
    /// in the table at the moment when it was read, but not all at one moment; a mapping may appear
    /// in part, and one that was moved twice or not at all. Memory that is mapped throughout always
    /// appears, memory that is not mapped throughout never does, and no address appears twice. A
    /// superpage that replaces smaller leaves which have been read in part appears from there on,
    /// so its run does not begin at a multiple of its size. Damaged entries are left out, as a walk
    /// finds nothing there.
    pub fn mapped(&self) -> MappedRuns<'_, F> {
        MappedRuns { tree: &self.0, at: 0, run: None }
    }
}

impl<'t, F: Format> MappedRuns<'t, F> {
    /// Reads entries up to the end of a run.
    fn read(&mut self) -> Stop {
        let store = &self.tree.store;
        // The lock keeps the shape, so that no page changes its meaning under the walk.
        let _shape = self.tree.directory.lock();
        let mut place = store.root();
        for _ in 0..READS {
            if self.at >> store.bits() != 0 {
                return Stop::Done;
            }
            let mut ended = None;
            match store.load(place, slot(self.at, place.level)) {
                Entry::Link(phys) => {
                    if let Some(child) = self.child(place, phys) {
                        place = child;
                        continue;
                    }
                }
                Entry::Leaf { phys, access } => ended = self.add(place.level, phys, access),
                Entry::Empty | Entry::Retired(_) => {}
            }
            // No wrap: a table has at most 57 bits.
            self.at = (self.at | (span(place.level) - 1)) + 1;
            if let Some(run) = ended {
                return Stop::Ended(run);
            }
            if slot(self.at, place.level) == 0 {
                // Behind the end of the page.
                place = store.root();
            }
        }
        Stop::Paused
    }

    /// Returns the page that a link on the path to `at` names, if it holds something. Its entries
    /// are counted before they are written and counted out after they were cleared, so a page that
    /// counts none maps nothing.
    fn child(&self, above: Place<'t>, phys: PhysAddr) -> Option<Place<'t>> {
        let level = above.level - 1;
        let page = self.tree.store.page_at(above.page, phys)?;
        // A damaged link could name a page that is elsewhere in the tree, and a few of them would
        // multiply its entries.
        let holds = page.is_home_of(self.at, level) && page.state().count() > 0;
        holds.then_some(Place { page, level })
    }

    /// Adds the leaf at `at` to the run; if it belongs to another one, begins that and returns the
    /// run.
    fn add(&mut self, level: u8, phys: PhysAddr, access: Access) -> Option<MappedRun> {
        // More than 0 only if the leaf has replaced smaller ones.
        let read = self.at & (span(level) - 1);
        let page_size = PageSize::from_bytes(span(level))?;
        let iova = IovaRange::new(Iova::new(self.at), span(level) - read).ok()?;
        let leaf = MappedRun { iova, phys: phys.checked_add(read)?, access, page_size };
        match self.run.and_then(|run| run.joined(&leaf)) {
            Some(joined) => {
                self.run = Some(joined);
                None
            }
            None => self.run.replace(leaf),
        }
    }
}

impl<F: Format> Iterator for MappedRuns<'_, F> {
    type Item = MappedRun;

    fn next(&mut self) -> Option<MappedRun> {
        loop {
            match self.read() {
                Stop::Ended(run) => return Some(run),
                Stop::Paused => {}
                Stop::Done => return self.run.take(),
            }
        }
    }
}

impl<F: Format> FusedIterator for MappedRuns<'_, F> {}
