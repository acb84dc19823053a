//! Runs: as many entries of one table page as one step of a map or a clear covers, found and counted in and out,
//! without the lock where their page is there already.

use super::change::Locked;
use super::directory::{List, PageDirectory};
use super::store::{ENTRIES, Place, Run, slot, span};
use super::{Entry, Format, Retired, Table, TableError};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr};
use crate::sync::Ordering;

impl<F: Format> Table<F> {
    /// The level of the largest leaf for what is left of a mapping.
    pub(super) fn target(&self, iova: u64, phys: u64, left: u64) -> u8 {
        let fits = |size: PageSize| {
            size <= self.max_leaf && (iova | phys) & size.mask() == 0 && size.bytes() <= left
        };
        if fits(PageSize::Size1G) {
            3
        } else if fits(PageSize::Size2M) {
            2
        } else {
            1
        }
    }

    /// Counts the next run of a mapping as taken, without the lock where its page is there already.
    pub(super) fn reserve(&self, range: IovaRange, phys: PhysAddr, done: u64) -> Result<Run, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let target = self.target(iova, phys.raw() + done, left);
        if let Some((place, word)) = self.store.descend_unlocked(iova, target)
            && place.level == target
            && let Some(run) = self.all_empty(place, iova, left)
            && self.store.count_if(place.page, word, run.len)
        {
            return Ok(run);
        }
        let mut account = self.account.lock();
        Locked { store: &self.store, account: &mut account }.reserve(iova, target, left)
    }

    /// The whole run up to the end of the page or of the range, if all of it is empty.
    pub(super) fn all_empty(&self, place: Place, iova: u64, left: u64) -> Option<Run> {
        let run = self.longest(place, iova, left);
        let empty = (0..run.len).all(|i| self.store.raw(place.page, run.slot + i) == 0);
        empty.then_some(run)
    }

    pub(super) fn longest(&self, place: Place, iova: u64, left: u64) -> Run {
        let slot = slot(iova, place.level);
        let whole = u16::try_from(left / span(place.level)).unwrap_or(ENTRIES);
        Run { place, slot, len: whole.min(ENTRIES - slot) }
    }

    /// The run that `reserve` found, found again: its way is counted, so it has not changed.
    pub(super) fn reserved_run(&self, range: IovaRange, done: u64) -> Result<Run, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let mut run = self.longest(self.store.descend(iova, 1)?, iova, left);
        let empty = (0..run.len).take_while(|i| self.store.raw(run.place.page, run.slot + i) == 0).count();
        run.len = u16::try_from(empty).unwrap_or(run.len);
        // Only somebody who writes entries that are not theirs can have filled one meanwhile.
        if run.len == 0 { Err(TableError::AlreadyMapped { at: Iova::new(iova) }) } else { Ok(run) }
    }

    pub(super) fn unreserve(&self, range: IovaRange, reserved: u64) {
        let mut done = 0;
        while done < reserved {
            let Ok(run) = self.reserved_run(range, done) else { break };
            self.release(run, range.start().raw() + done);
            done += run.bytes();
        }
        // And what the run that failed made before it failed.
        if let Some(iova) = range.start().raw().checked_add(reserved) {
            let mut account = self.account.lock();
            self.trim(&mut account, iova, None);
        }
    }

    pub(super) fn write(&self, run: Run, phys: PhysAddr, access: Access) {
        let mut at = phys.raw();
        for i in 0..run.len {
            self.store.set(run.place.page, run.slot + i, F::leaf(PhysAddr::new(at), access, run.place.level));
            at += span(run.place.level);
        }
    }

    /// Counts out the entries of a run that were reserved and not written; if its page is empty then, retires it.
    fn release(&self, run: Run, iova: u64) {
        if self.store.uncount(run.place.page, run.len) {
            let mut account = self.account.lock();
            self.trim(&mut account, iova, None);
        }
    }

    /// Clears the next run of mapped leaves of a range, if it has `least` bytes at least; else none. Returns the bytes
    /// that were cleared.
    pub(super) fn clear_run(
        &self,
        range: IovaRange,
        done: u64,
        least: u64,
        retired: &mut Retired,
    ) -> Result<u64, TableError> {
        let iova = range.start().raw() + done;
        let place = self.begin_clear(iova)?;
        let found = self.leaf_run(place, range, done);
        let cleared = match &found {
            Ok(run) if run.bytes() >= least => {
                for i in 0..run.len {
                    self.store.set(run.place.page, run.slot + i, 0);
                }
                run.len
            }
            _ => 0,
        };
        if self.store.end_clear(place.page, cleared) {
            let mut account = self.account.lock();
            self.trim(&mut account, iova, Some(retired));
        }
        found.map(|run| u64::from(cleared) * span(run.place.level))
    }

    /// The page of the leaf at `iova`, with other clears kept out of it.
    fn begin_clear(&self, iova: u64) -> Result<Place, TableError> {
        if let Some((place, word)) = self.store.descend_unlocked(iova, 1)
            && self.store.begin_clear(place.page, word)
        {
            return Ok(place);
        }
        // The lock keeps the shape, so a page whose clear cannot begin holds nothing. (A thread that has begun one needs no lock
        // to end it, so it may be waited for here.)
        let _shape = self.account.lock();
        let place = self.store.descend(iova, 1)?;
        if self.store.begin_clear(place.page, self.store.word(place.page)) {
            return Ok(place);
        }
        Err(TableError::NotMapped { at: Iova::new(iova) })
    }

    fn trim(&self, account: &mut PageDirectory, iova: u64, into: Option<&mut Retired>) {
        match into {
            Some(retired) => Locked { store: &self.store, account }.trim(iova, &mut retired.list),
            None => {
                let mut pending: List = core::mem::take(&mut account.pending);
                Locked { store: &self.store, account }.trim(iova, &mut pending);
                account.pending = pending;
                self.note_pending(account);
            }
        }
    }

    pub(super) fn note_pending(&self, account: &PageDirectory) {
        self.pending.store(account.pending.len > 0, Ordering::Release);
    }

    pub(super) fn collect_pending(&self, retired: &mut Retired) {
        if self.pending.load(Ordering::Acquire) {
            let mut account = self.account.lock();
            account.move_pending(&mut retired.list);
            self.note_pending(&account);
        }
    }

    /// The next run of mapped leaves of a range, confirmed.
    pub(super) fn mapped_run(&self, range: IovaRange, done: u64) -> Result<Run, TableError> {
        let iova = range.start().raw() + done;
        if let Some((place, word)) = self.store.descend_unlocked(iova, 1)
            && let Ok(run) = self.leaf_run(place, range, done)
            && self.store.word(place.page).generation() == word.generation()
        {
            return Ok(run);
        }
        let _shape = self.account.lock();
        self.leaf_run(self.store.descend(iova, 1)?, range, done)
    }

    /// The leaves at `place` from `done` bytes into a range: as many as lie in the range.
    pub(super) fn leaf_run(&self, place: Place, range: IovaRange, done: u64) -> Result<Run, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let is_leaf = |i| matches!(self.store.load(place, i), Entry::Leaf { .. });
        let mut run = self.longest(place, iova, left);
        if !is_leaf(run.slot) {
            return Err(TableError::NotMapped { at: Iova::new(iova) });
        }
        let inside = iova & (span(place.level) - 1);
        if run.len == 0 || inside != 0 {
            let leaf = IovaRange::new(Iova::new(iova - inside), span(place.level));
            return Err(TableError::PartOfLeaf { range, leaf: leaf.unwrap_or(range) });
        }
        let leaves = (0..run.len).take_while(|i| is_leaf(run.slot + i)).count();
        run.len = u16::try_from(leaves).unwrap_or(run.len);
        Ok(run)
    }
}
