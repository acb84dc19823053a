//! How a tree clears: all of a range is found mapped before the first leaf is cleared.

use super::directory::List;
use super::error::TableError;
use super::format::Format;
use super::found::Found;
use super::store::{PageState, Place, Run, span};
use super::tree::Tree;
use crate::addr::{Iova, IovaRange};

impl<F: Format> Tree<F> {
    /// Clears `range`, all of which must be mapped, in whole leaves. Pages that became empty are added to `retired`.
    pub(super) fn clear(&self, range: IovaRange, retired: &mut List) -> Result<(), TableError> {
        let start = range.start().raw();
        let (place, state) = self.begin_clear(start)?;
        let first = self.leaf_run(place, range, 0);
        match first {
            // The usual case: all in one table page.
            Ok(run) if run.bytes() == range.len() => {
                self.finish_clear(run, run.len, start, retired);
                return Ok(());
            }
            _ => self.finish_clear(Run { place, slot: 0, len: 0 }, 0, start, retired),
        }
        let mut runs = Found::default();
        runs.push((first?, state));
        let mut done = first?.bytes();
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
        found: Option<(Run, PageState)>,
        retired: &mut List,
    ) -> Result<u64, TableError> {
        let iova = range.start().raw() + done;
        let place = match found {
            // In the same generation the page is where it was.
            Some((run, state)) if self.store.begin_clear(run.place.page, state) => run.place,
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
    fn finish_clear(&self, run: Run, cleared: u16, iova: u64, retired: &mut List) {
        self.store.clear_run(run);
        if self.store.end_clear(run.place.page, cleared) {
            let mut directory = self.directory.lock();
            self.locked(&mut directory).keep_or_retire_unused(iova, retired);
        }
    }

    /// Returns the page of the leaf at `iova`, and excludes other clears from it.
    fn begin_clear(&self, iova: u64) -> Result<(Place, PageState), TableError> {
        if let Some((place, state)) = self.store.descend_unlocked(iova, 1)
            && self.store.begin_clear(place.page, state)
        {
            return Ok((place, state));
        }
        // The lock keeps the shape, so a page whose clear cannot begin holds nothing. (A thread that has begun one needs no lock
        // to end it, so it may be waited for here.)
        let _shape = self.directory.lock();
        let place = self.store.descend(iova, 1)?;
        let state = self.store.state(place.page);
        if self.store.begin_clear(place.page, state) {
            return Ok((place, state));
        }
        Err(self.not_cleared(place, iova))
    }

    /// Returns why no leaf of the page at `place` can be cleared. Under the lock.
    fn not_cleared(&self, place: Place, iova: u64) -> TableError {
        let at = Iova::new(iova);
        if self.store.state(place.page).is_pinned() {
            TableError::Pinned { at }
        } else {
            TableError::NotMapped { at }
        }
    }

    /// Returns the next run of mapped leaves of a range, confirmed, and the state of its page.
    fn mapped_run(&self, range: IovaRange, done: u64) -> Result<(Run, PageState), TableError> {
        let iova = range.start().raw() + done;
        if let Some((place, state)) = self.store.descend_unlocked(iova, 1)
            && let Ok(run) = self.leaf_run(place, range, done)
            && self.store.state(place.page).generation() == state.generation()
        {
            return Ok((run, state));
        }
        let _shape = self.directory.lock();
        let place = self.store.descend(iova, 1)?;
        let state = self.store.state(place.page);
        if state.is_pinned() {
            return Err(self.not_cleared(place, iova));
        }
        Ok((self.leaf_run(place, range, done)?, state))
    }

    /// Returns the leaves at `place` from `done` bytes into a range, up to its end.
    #[inline]
    fn leaf_run(&self, place: Place, range: IovaRange, done: u64) -> Result<Run, TableError> {
        let (iova, left) = (range.start().raw() + done, range.len() - done);
        let level = place.level;
        let mut run = Run::longest(place, iova, left);
        let inside = iova & (span(level) - 1);
        if run.len == 0 || inside != 0 {
            if !F::is_leaf(self.store.raw(place.page, run.slot), level) {
                return Err(TableError::NotMapped { at: Iova::new(iova) });
            }
            let leaf = IovaRange::new(Iova::new(iova - inside), span(level));
            return Err(TableError::PartOfLeaf { range, leaf: leaf.unwrap_or(range) });
        }
        run.len = self.store.leading(run, |raw| F::is_leaf(raw, level));
        if run.len == 0 { Err(TableError::NotMapped { at: Iova::new(iova) }) } else { Ok(run) }
    }
}
