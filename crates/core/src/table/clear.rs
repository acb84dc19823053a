//! How a tree clears: all of a range is found mapped before the first leaf is cleared.

use super::directory::List;
use super::error::TableError;
use super::format::Format;
use super::found::Found;
use super::levels::span;
use super::state::PageState;
use super::store::{Place, Run};
use super::tree::Tree;
use crate::addr::{Iova, IovaRange};

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
