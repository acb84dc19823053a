//! A backend whose table Pinfold keeps itself: a [`Table`] and an [`Invalidator`].

use super::{Backend, BackendError, BackendStats};
use crate::access::Access;
use crate::addr::{IovaRange, PhysAddr, PhysRange};
use crate::invalidate::{Flush, Invalidator, Sink, Ticket, WaitLimit};
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use crate::table::{Format, Retired, Table, TableError, TablePages};
use core::fmt;

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

/// What memory is where: the physical side of an IOMMU.
pub trait Physical: Send + Sync {
    /// The memory may be given to devices from now on.
    ///
    /// # Errors
    /// As for [`Backend::admit`].
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`expel`](Self::expel) has returned.
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// The memory goes away: when this returns, no device reaches it, whatever the table says.
    fn expel(&self, memory: DmaMemory);

    /// The physically contiguous run at the start of `memory`: a multiple of 4096 bytes, not longer than `memory`.
    ///
    /// # Errors
    /// [`BackendError::NotAdmitted`].
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError>;
}

/// Table pages on their way back, and the ticket after which nobody can hold them.
#[derive(Default)]
struct Limbo {
    /// What is being gathered, with the ticket of the last request.
    open: (Retired, Ticket),
    /// What waits for its ticket. It is not added to, so that a steady stream of revocations can not put it off.
    waiting: (Retired, Ticket),
}

/// A [`Backend`] that keeps a table of format `F` and flushes through `S`.
pub struct Paged<F: Format, S: Sink + Physical> {
    name: &'static str,
    table: Table<F>,
    invalidator: Invalidator<S>,
    limbo: Mutex<Limbo>,
}

impl<F: Format, S: Sink + Physical> Paged<F, S> {
    /// An empty table of `levels` levels in `pages`, flushed through `sink`.
    ///
    /// # Errors
    /// [`TableError::Levels`].
    pub fn new(name: &'static str, sink: S, pages: TablePages, levels: u8) -> Result<Self, TableError> {
        Ok(Self {
            name,
            table: Table::new(pages, levels)?,
            invalidator: Invalidator::new(sink),
            limbo: Mutex::new(Limbo::default()),
        })
    }

    /// Where the hardware begins to walk.
    pub fn root(&self) -> PhysAddr {
        self.table.root()
    }

    /// How many bits of address the table translates.
    pub fn bits(&self) -> u32 {
        self.table.bits()
    }

    /// What carries the flushes out.
    pub fn sink(&self) -> &S {
        self.invalidator.sink()
    }

    /// Maps one physical run. When no table page is left but some are retired, it waits for these: once for each
    /// level, because a parent is retired only when its last child has come back.
    fn map_run(&self, iova: IovaRange, phys: PhysAddr, access: Access) -> Result<(), TableError> {
        let mut mapped = self.table.map(iova, phys, access);
        for _ in 1..self.table.levels() {
            if !matches!(mapped, Err(TableError::NoPages { .. })) || !self.wait_for_retired() {
                break;
            }
            mapped = self.table.map(iova, phys, access);
        }
        mapped
    }

    /// Whether table pages came back.
    fn wait_for_retired(&self) -> bool {
        let taken = || {
            let stats = self.table.stats();
            stats.in_use + stats.retired
        };
        let before = taken();
        let last = {
            let mut limbo = self.limbo.lock();
            // What failed maps and earlier reclaims have retired has no ticket yet.
            let had = limbo.open.0.len();
            if self.table.collect(&mut limbo.open.0).is_err() {
                return false;
            }
            self.request_retired(&mut limbo, had);
            limbo.open.1.max(limbo.waiting.1)
        };
        if self.invalidator.wait(last).is_err() {
            return false;
        }
        let mut limbo = self.limbo.lock();
        self.reclaim(&mut limbo);
        self.reclaim(&mut limbo);
        taken() < before
    }

    /// Asks for the flush of table pages that were gathered since there were `had`. What was gathered before has its
    /// ticket.
    fn request_retired(&self, limbo: &mut Limbo, had: u32) {
        if let Some(range) = limbo.open.0.range().filter(|_| limbo.open.0.len() > had) {
            limbo.open.1 = self
                .invalidator
                .request([Flush { range, leaf_only: known_bad::makes(Mistake::LeafFlushForTablePage) }]);
        }
    }

    /// Takes pages back whose ticket is done, and lets those that were gathered meanwhile wait for theirs.
    fn reclaim(&self, limbo: &mut Limbo) {
        let over = known_bad::makes(Mistake::TablePageEarly) || self.invalidator.done() >= limbo.waiting.1;
        if !limbo.waiting.0.is_empty() && over {
            let (retired, _) = core::mem::take(&mut limbo.waiting);
            // A refusal means that the pages are not this table's, which can not be; they then stay retired.
            drop(self.table.reclaim(retired));
        }
        if limbo.waiting.0.is_empty() {
            limbo.waiting = core::mem::take(&mut limbo.open);
        }
    }

    /// Clears, then asks for the flush: in this order, or a walk between the two would stay cached.
    fn clear(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, TableError> {
        #[cfg(any(test, feature = "known-bad"))]
        if known_bad::makes(Mistake::FlushBeforeClear) {
            return self.flush_then_clear(ranges);
        }
        let mut limbo = self.limbo.lock();
        self.reclaim(&mut limbo);
        let retired_before = limbo.open.0.len();
        let mut failed = None;
        let flushes = ranges.map_while(|range| match self.table.clear(range, &mut limbo.open.0) {
            Ok(()) => Some(Flush { range, leaf_only: true }),
            Err(error) => {
                failed = Some(error);
                None
            }
        });
        let mut ticket = self.invalidator.request(flushes);
        if limbo.open.0.len() > retired_before {
            self.request_retired(&mut limbo, retired_before);
            ticket = ticket.max(limbo.open.1);
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(ticket),
        }
    }

    /// The same in the wrong order.
    #[cfg(any(test, feature = "known-bad"))]
    fn flush_then_clear(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, TableError> {
        let ranges: alloc::vec::Vec<_> = ranges.collect();
        let mut limbo = self.limbo.lock();
        self.reclaim(&mut limbo);
        let flushes = ranges.iter().map(|range| Flush { range: *range, leaf_only: false });
        let ticket = self.invalidator.request(flushes);
        self.invalidator.submit();
        limbo.open.1 = limbo.open.1.max(ticket);
        ranges.into_iter().try_for_each(|range| self.table.clear(range, &mut limbo.open.0))?;
        Ok(ticket)
    }

    /// Takes back the part of a map that had been done when `error` came.
    fn roll_back(&self, iova: IovaRange, done: u64, error: BackendError) -> BackendError {
        let Some(part) = iova.part(0, done) else { return error };
        let stuck = |flush| BackendError::Stuck { iova, flush };
        match self.clear(&mut core::iter::once(part)) {
            Ok(_) if known_bad::makes(Mistake::RollbackNotAwaited) => error,
            Ok(ticket) => self.invalidator.wait(ticket).map_or_else(stuck, |()| error),
            Err(_) => BackendError::NotRevoked,
        }
    }
}

impl<F: Format, S: Sink + Physical> Backend for Paged<F, S> {
    fn name(&self) -> &'static str {
        self.name
    }

    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that `admit` asks for.
        unsafe { self.sink().admit(memory) }
    }

    fn expel(&self, memory: DmaMemory) {
        self.sink().expel(memory);
    }

    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError> {
        let len = memory.len() as u64;
        let not_admitted = || BackendError::NotAdmitted { addr: memory.addr(), len: memory.len() };
        if iova.len() != len {
            return Err(BackendError::LengthsDiffer { iova, memory_bytes: memory.len() });
        }
        let mut done = 0;
        while done < len {
            let step = || {
                let at = usize::try_from(done).map_err(|_| not_admitted())?;
                let rest = memory.part(at, memory.len() - at).map_err(|_| not_admitted())?;
                let run = self.sink().run(rest)?;
                let piece = iova.part(done, run.len()).ok_or_else(not_admitted)?;
                self.map_run(piece, run.start(), access)?;
                Ok(run.len())
            };
            done += match step() {
                Ok(mapped) => mapped,
                Err(error) => return Err(self.roll_back(iova, done, error)),
            };
        }
        if self.sink().caches_absent() && !known_bad::makes(Mistake::MapNotFlushed) {
            // The device may have cached that nothing is here, at any level.
            let ticket = self.invalidator.request([Flush { range: iova, leaf_only: false }]);
            if let Err(flush) = self.invalidator.wait(ticket) {
                return Err(self.roll_back(iova, len, BackendError::NotAnnounced { iova, flush }));
            }
        }
        Ok(())
    }

    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError> {
        let ticket = self.clear(ranges);
        self.invalidator.submit();
        Ok(ticket?)
    }

    fn is_done(&self, ticket: Ticket) -> bool {
        self.invalidator.is_done(ticket)
    }

    fn wait(&self, ticket: Ticket) -> Result<(), BackendError> {
        Ok(self.invalidator.wait(ticket)?)
    }

    fn wait_for(&self, ticket: Ticket, limit: WaitLimit) -> Result<(), BackendError> {
        Ok(self.invalidator.wait_for(ticket, limit)?)
    }

    fn has_failed(&self) -> bool {
        self.invalidator.has_failed()
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

impl<F: Format, S: Sink + Physical> fmt::Debug for Paged<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paged").field("name", &self.name).finish_non_exhaustive()
    }
}
