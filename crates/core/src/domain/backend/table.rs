//! [`TableBackend`], which owns its table: it maps by writing the [`Table`], and revokes by clearing
//! it and requesting a flush of an [`Invalidator`]. It pins the table page of each window.

use super::super::error::BackendError;
use super::super::stats::BackendStats;
use super::deferred::DeferredReclaim;
use super::extent::{LastExtent, PhysTranslator};
use super::{Backend, Properties, Revocation, Until, Wait};
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize, PhysAddr, PhysRange};
use crate::drop_guard::{CleanUp, DropGuard};
use crate::invalidate::{Flush, InvalidationQueue, Invalidator, Ticket, WaitError};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::table::{Format, MappedRun, PinnedLeaf, Retired, Table, TableError};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::iter::{empty, once};
use core::task::Poll;

/// The number of attempts of a map while table pages are reclaimed: other owners may take them
/// first each time.
const MAP_ATTEMPTS: u32 = 64;
/// The number of polls of a map that needs table pages for those that another thread is retiring.
const RETIRING_POLLS: u64 = 10_000;

/// Retired pages whose flush is being requested. If the queue panics, they are flushed with the
/// next that are retired.
struct Unflushed<'t, F: Format> {
    table: &'t Table<F>,
    retired: Retired,
}

impl<F: Format> CleanUp for Unflushed<'_, F> {
    fn clean_up(self) {
        // Refused only if the pages belong to another table, which does not happen; they would stay
        // retired.
        let _ = self.table.put_back_retired(self.retired);
    }
}

/// The state that a table backend keeps for a window: the table page that translates it, which is
/// pinned, so that mapping there needs no lookup and shares nothing with other owners; and the
/// registered memory that was last mapped there.
///
/// Opaque to the domain. Dropping it leaves the page pinned for good: the domain closes it.
#[must_use = "the window stays prepared until the domain closes it"]
pub struct WindowToken {
    pin: PinnedLeaf,
    last: LastExtent,
    owner: Arc<dyn Unpins>,
}

impl WindowToken {
    /// Ends the window, when nothing is mapped in it.
    pub fn close(self) {
        self.owner.unpin(self.pin);
    }

    /// Prefetches the table entry of `iova`, which is cleared soon.
    #[inline(always)]
    pub(in crate::domain) fn prefetch(&self, iova: Iova) {
        self.pin.prefetch(iova);
    }
}

impl fmt::Debug for WindowToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowToken").field("pin", &self.pin).finish_non_exhaustive()
    }
}

/// The backend that a pin belongs to.
trait Unpins: Send + Sync {
    fn unpin(&self, pin: PinnedLeaf);
}

/// A [`Backend`] that owns a table of format `F` and flushes through `Q`.
pub struct TableBackend<F: Format, Q: InvalidationQueue + PhysTranslator> {
    name: &'static str,
    pub(super) table: Table<F>,
    pub(super) invalidator: Invalidator<Q>,
    pub(super) deferred: DeferredReclaim,
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> TableBackend<F, Q> {
    /// Creates a backend over an empty `table`, which is flushed through `queue`.
    pub fn new(name: &'static str, queue: Q, table: Table<F>) -> Self {
        Self {
            name,
            table,
            invalidator: Invalidator::new(queue),
            deferred: DeferredReclaim::default(),
        }
    }

    /// Returns where the hardware begins to walk.
    pub fn root(&self) -> PhysAddr {
        self.table.root()
    }

    /// Returns how many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        self.table.bits()
    }

    /// Returns the invalidation queue.
    pub fn queue(&self) -> &Q {
        self.invalidator.queue()
    }

    /// Maps one physical run. If no table page is free but some are retired, waits for these and
    /// tries again.
    ///
    /// Another owner may take the reclaimed pages first, and a parent is retired only after its
    /// last child has been reclaimed, so one attempt is not enough.
    pub(super) fn map_run(
        &self,
        iova: IovaRange,
        phys: PhysAddr,
        access: Access,
    ) -> Result<(), TableError> {
        self.with_pages(|| self.table.map(iova, phys, access))
    }

    /// Attempts `change` again while it lacks table pages and some are retired.
    fn with_pages<T>(&self, change: impl Fn() -> Result<T, TableError>) -> Result<T, TableError> {
        let mut attempts = 0;
        loop {
            let reclaimed = self.deferred.reclaimed(); // before the attempt, or progress made during it would be missed
            let result = change();
            attempts += 1;
            let exhausted = matches!(result, Err(TableError::NoPages { .. }));
            if !exhausted || attempts == MAP_ATTEMPTS || !self.wait_for_retired(reclaimed) {
                return result;
            }
        }
    }

    /// Waits until retired table pages have been reclaimed, by any thread, since `reclaimed` was
    /// read. Returns false if none are retired, or their flush fails.
    pub(super) fn wait_for_retired(&self, reclaimed: u64) -> bool {
        for polls in 0..RETIRING_POLLS {
            // Pages that failed maps and earlier reclaims have retired have no ticket yet.
            let mut pending = Retired::new();
            if self.table.collect_retired(&mut pending).is_err() {
                return false;
            }
            self.flush_retired(pending);
            if self.invalidator.wait(self.deferred.last()).is_err() {
                return false;
            }
            self.reclaim_all();
            // In this order: a page stops being retired before it counts as reclaimed.
            let retired = self.table.stats().retired;
            let progress = self.deferred.progress();
            if progress.reclaimed != reclaimed {
                return true;
            }
            if retired == 0 && !progress.goes_on {
                return false;
            }
            // Another thread has retired them and has not yet deferred them, or is reclaiming them.
            self.queue().relax(polls);
        }
        false
    }

    /// Waits for the retired table pages in the place of superpages of a mapping: once for a range
    /// that was used with 4 KiB leaves before. If their flush does not complete, the mapping gets
    /// these leaves again.
    pub(super) fn make_room(&self, iova: IovaRange, phys: PhysAddr) {
        // An error is found by the map, too.
        if self.table.awaits_room(iova, phys) == Ok(true) {
            self.wait_for_retired(self.deferred.reclaimed());
        }
    }

    /// Requests the flushes of retired table pages, of links as well as leaves, and defers their
    /// reclaim until then.
    pub(super) fn flush_retired(&self, retired: Retired) -> Ticket {
        if retired.is_empty() {
            return Ticket::COMPLETED;
        }
        let retired = DropGuard::new(Unflushed { table: &self.table, retired });
        let ticket = match self.table.retired_ranges(&retired.retired) {
            Ok(ranges) => self
                .invalidator
                .request_and_submit(ranges.map(|range| Flush { range, leaf_only: false })),
            // Pages of another table, which does not happen; they would stay retired.
            Err(_) => return Ticket::COMPLETED,
        };
        self.deferred.add(&self.table, retired.into_inner().retired, ticket);
        ticket
    }

    /// Reclaims retired table pages whose flush has completed: no walker can hold them.
    fn reclaim(&self) {
        let is_completed = |ticket| {
            known_bad::makes(Mistake::TablePageEarly) || self.invalidator.completed() >= ticket
        };
        self.deferred.reclaim(&self.table, is_completed);
    }

    /// Reclaims all retired table pages whose flush has completed: those that waited for it, and
    /// then those gathered meanwhile.
    fn reclaim_all(&self) {
        self.reclaim();
        self.reclaim();
    }

    /// Clears `first` and the ranges behind it, then requests the flush and submits it if the queue is
    /// not full: in this order, or a walk between the two would stay cached. Takes no lock while it
    /// clears.
    #[inline(always)]
    fn clear_and_flush<'r>(
        &self,
        first: Revocation<'r>,
        rest: &mut (impl Iterator<Item = Revocation<'r>> + ?Sized),
    ) -> Result<Ticket, TableError> {
        #[cfg(any(test, feature = "known-bad"))]
        if known_bad::makes(Mistake::FlushBeforeClear) {
            return self.flush_then_clear(first, rest);
        }
        self.reclaim();
        let mut retired = Retired::new();
        self.clear_one(first, &mut retired)?;
        match rest.next() {
            // One range, which needs no list.
            None if retired.is_empty() => {
                Ok(self.invalidator.request_and_submit([Flush::from(first.range)]))
            }
            second => self.clear_rest(first.range, &mut second.into_iter().chain(rest), retired),
        }
    }

    /// Clears the ranges behind the `first` one.
    fn clear_rest<'r>(
        &self,
        first: IovaRange,
        rest: &mut dyn Iterator<Item = Revocation<'r>>,
        mut retired: Retired,
    ) -> Result<Ticket, TableError> {
        // Pages that were retired are flushed, and submitted, behind these.
        let (mut failed, is_last) = (None, Cell::new(retired.is_empty()));
        let cleared = rest.map_while(|one| {
            let cleared = self.clear_one(one, &mut retired);
            is_last.set(retired.is_empty());
            failed = cleared.err();
            failed.is_none().then_some(one.range)
        });
        let flushes = once(first).chain(cleared).map(Flush::from);
        let mut ticket = self.invalidator.request_and_submit_if(flushes, || is_last.get());
        if !retired.is_empty() {
            ticket = ticket.max(self.flush_retired(retired));
        }
        failed.map_or(Ok(ticket), Err)
    }

    #[inline]
    fn clear_one(
        &self,
        Revocation { range, window }: Revocation<'_>,
        retired: &mut Retired,
    ) -> Result<(), TableError> {
        match window {
            Some(window) => self.table.clear_pinned(&window.pin, range),
            None => self.table.clear(range, retired),
        }
    }

    /// Does what [`clear_and_flush`](Self::clear_and_flush) does, in the wrong order.
    #[cfg(any(test, feature = "known-bad"))]
    fn flush_then_clear<'r>(
        &self,
        first: Revocation<'r>,
        rest: &mut (impl Iterator<Item = Revocation<'r>> + ?Sized),
    ) -> Result<Ticket, TableError> {
        let ranges: alloc::vec::Vec<_> = once(first).chain(rest).collect();
        self.reclaim();
        let flushes = ranges.iter().map(|one| Flush { range: one.range, leaf_only: false });
        let ticket = self.invalidator.request(flushes);
        self.invalidator.submit();
        let mut retired = Retired::new();
        ranges.into_iter().try_for_each(|one| self.clear_one(one, &mut retired))?;
        self.deferred.add(&self.table, retired, ticket);
        Ok(ticket)
    }

    /// Whether the unit caches entries that are not present, so that a map has to flush them.
    #[inline]
    fn caches_not_present(&self) -> bool {
        self.queue().caches_not_present()
    }

    /// Flushes entries that a device may have cached as not present, at any level.
    fn flush_not_present(&self, iova: IovaRange) -> Result<(), WaitError> {
        if !self.caches_not_present() {
            return Ok(());
        }
        self.invalidator.wait(self.invalidator.request([Flush { range: iova, leaf_only: false }]))
    }

    /// Undoes the first `mapped` bytes of a map that failed with `error`.
    pub(super) fn roll_back(
        &self,
        iova: IovaRange,
        window: Option<&WindowToken>,
        mapped: u64,
        error: BackendError,
    ) -> BackendError {
        let Some(range) = iova.part(0, mapped) else { return error };
        let incomplete = |flush| BackendError::RollbackIncomplete { iova, flush };
        match self.clear_and_flush(Revocation { range, window }, &mut empty()) {
            Ok(_) if known_bad::makes(Mistake::RollbackNotAwaited) => error,
            Ok(ticket) => self.invalidator.wait(ticket).map_or_else(incomplete, |()| error),
            Err(_) => BackendError::NotRevoked,
        }
    }

    /// Returns the physical run at the start of `memory`, which is mapped in `window`.
    #[inline]
    fn run(
        &self,
        window: Option<&WindowToken>,
        memory: DmaMemory,
    ) -> Result<PhysRange, BackendError> {
        match window {
            Some(window) => window.last.run(self.queue(), memory),
            None => self.queue().run(memory),
        }
    }

    /// Maps `memory` run by run.
    fn map_runs(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        window: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let len = memory.len() as u64;
        let not_registered =
            || BackendError::NotRegistered { addr: memory.addr(), len: memory.len() };
        if iova.len() != len {
            return Err(BackendError::LengthsDiffer { iova, memory_bytes: memory.len() });
        }
        let mut mapped = 0;
        while mapped < len {
            let step = || {
                let at = usize::try_from(mapped).map_err(|_| not_registered())?;
                let rest = memory.part(at, memory.len() - at).map_err(|_| not_registered())?;
                let run = self.run(window, rest)?;
                let piece = iova.part(mapped, run.len()).ok_or_else(not_registered)?;
                match window {
                    Some(window) => {
                        self.table.map_pinned(&window.pin, piece, run.start(), access)?;
                    }
                    None => {
                        if run.len() >= PageSize::Size2M.bytes() {
                            self.make_room(piece, run.start());
                        }
                        self.map_run(piece, run.start(), access)?;
                    }
                }
                Ok(run.len())
            };
            mapped += match step() {
                Ok(bytes) => bytes,
                Err(error) => return Err(self.roll_back(iova, window, mapped, error)),
            };
        }
        self.flush_not_present(iova).map_err(|flush| {
            let error = BackendError::MapNotFlushed { iova, flush };
            self.roll_back(iova, window, len, error)
        })
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> TableBackend<F, Q> {
    /// Returns whether the table maps any of registered memory, or may do so, if there is no memory
    /// for the check. O(runs of the memory × log, and mapped runs × log).
    fn maps_any_of(&self, memory: DmaMemory) -> Result<bool, BackendError> {
        let (mut runs, mut done) = (Vec::<PhysRange>::new(), 0);
        while let Some(rest) = memory.len().checked_sub(done).filter(|rest| *rest > 0) {
            let Ok(rest) = memory.part(done, rest) else { return Ok(true) };
            let run = self.queue().run(rest)?;
            if runs.try_reserve(1).is_err() {
                return Ok(true);
            }
            done = done.saturating_add(usize::try_from(run.len()).unwrap_or(usize::MAX));
            runs.push(run);
        }
        runs.sort_unstable_by_key(PhysRange::start);
        Ok(self.table.mapped().any(|mapped| {
            let (first, last) = (mapped.phys.raw(), mapped.phys.raw() + (mapped.iova.len() - 1));
            let behind = runs.partition_point(|run| run.start().raw() + (run.len() - 1) < first);
            runs.get(behind).is_some_and(|run| run.start().raw() <= last)
        }))
    }
}

impl<F, Q> Backend for TableBackend<F, Q>
where
    F: Format + 'static,
    Q: InvalidationQueue + PhysTranslator + 'static,
{
    fn properties(&self) -> Properties {
        Properties::new(self.name)
    }

    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that `register_memory` requires.
        unsafe { self.queue().register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        if !self.queue().overrules_table() {
            // What was cleared may be cached until a flush after it has completed, and the thread
            // that cleared it may not have requested its own yet.
            let is_quiet = !self.maps_any_of(memory)?
                && (!self.queue().caches() || self.invalidator.flush_all().is_ok());
            if !is_quiet {
                return Err(BackendError::NotRevoked);
            }
        }
        self.queue().unregister_memory(memory)
    }

    fn window(self: Arc<Self>, window: IovaRange) -> Option<WindowToken> {
        // Without a pin it is mapped as any other range.
        let pin = self.with_pages(|| self.table.pin(window.start())).ok()?;
        Some(WindowToken { pin, last: LastExtent::new(), owner: self })
    }

    fn map(
        &self,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
        window: Option<&WindowToken>,
    ) -> Result<(), BackendError> {
        let Some(token) = window else {
            self.reclaim();
            return self.map_runs(iova, memory, access, None);
        };
        // The usual case, in one piece: as `map_runs` does it.
        if let Ok(run) = token.last.run(self.queue(), memory)
            && run.len() == iova.len()
            && memory.len() as u64 == iova.len()
            && !self.caches_not_present()
        {
            return Ok(self.table.map_pinned(&token.pin, iova, run.start(), access)?);
        }
        self.map_runs(iova, memory, access, window)
    }

    fn revoke<'w>(
        &self,
        first: Revocation<'w>,
        rest: &mut dyn Iterator<Item = Revocation<'w>>,
    ) -> Result<Ticket, BackendError> {
        Ok(self.clear_and_flush(first, rest)?)
    }

    fn wait(&self, ticket: Ticket, wait: Wait<'_>) -> Poll<Result<(), BackendError>> {
        let waited = match wait {
            Wait::Not => self.invalidator.check(ticket),
            Wait::Wake(until, waker) => {
                let to_deadline = until == Until::Deadline;
                let check = || match self.invalidator.check(ticket) {
                    Poll::Ready(Err(WaitError::TimedOut { .. })) if !to_deadline => Poll::Pending,
                    checked => checked,
                };
                if let Poll::Ready(waited) = check() {
                    return Poll::Ready(waited.map_err(Into::into));
                }
                self.invalidator.wake(ticket, to_deadline, waker);
                // It may have completed before the waker was registered.
                check()
            }
            Wait::ToDeadline => Poll::Ready(self.invalidator.wait(ticket)),
            Wait::For(limit) => Poll::Ready(self.invalidator.wait_for(ticket, limit)),
        };
        waited.map_err(Into::into)
    }

    fn mapped(&self) -> Option<Box<dyn Iterator<Item = MappedRun> + '_>> {
        Some(Box::new(self.table.mapped()))
    }

    fn stats(&self) -> BackendStats {
        let table = self.table.stats();
        BackendStats {
            invalidations: self.invalidator.stats(),
            table_pages: table.in_use.into(),
            table_pages_retired: table.retired.into(),
            ..BackendStats::default()
        }
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> Unpins for TableBackend<F, Q> {
    fn unpin(&self, pin: PinnedLeaf) {
        let mut retired = Retired::new();
        // Refused only if something is mapped there: then the page stays pinned, and the pin is
        // leaked.
        if self.table.unpin(pin, &mut retired).is_ok() {
            self.flush_retired(retired);
        }
    }
}

impl<F: Format, Q: InvalidationQueue + PhysTranslator> fmt::Debug for TableBackend<F, Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableBackend").field("name", &self.name).finish_non_exhaustive()
    }
}
