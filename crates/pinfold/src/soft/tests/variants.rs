//! Stacks with one known mistake each. The tests must see every one of them.

use super::harness::Gap;
use crate::soft::{Effect, SoftConfig, SoftIommu};
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PhysRange};
use pinfold_core::domain::{Backend, BackendError, BackendStats, Domain, Paged, Physical};
use pinfold_core::invalidate::{Batch, Flush, Invalidator, Sink, SinkError, Ticket, WaitLimit};
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{Retired, Table, TablePages, VtdSecondStage};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(super) fn iommu(effect: Effect, flush_cost: Duration) -> SoftIommu {
    SoftIommu::new(SoftConfig { effect, flush_cost, ..SoftConfig::default() }).unwrap()
}

/// One with room for so many table pages.
pub(super) fn small_iommu(pages: usize, flush_cost: Duration) -> SoftIommu {
    let config = SoftConfig { effect: Effect::AtLast, flush_cost, ..SoftConfig::default() };
    SoftIommu::new(SoftConfig { table_bytes: pages * 4096, ..config }).unwrap()
}

fn pages(iommu: &SoftIommu) -> TablePages {
    // SAFETY: whoever gets the pages holds the IOMMU in its sink.
    let pages = unsafe { iommu.table_pages() };
    TablePages::new(pages, iommu.table_phys()).unwrap()
}

/// The real stack over any sink.
pub(super) fn paged<S: Sink + Physical>(iommu: &SoftIommu, sink: S) -> Paged<VtdSecondStage, S> {
    let paged = Paged::new("test", sink, pages(iommu), 4).unwrap();
    iommu.attach(paged.root(), 4);
    paged
}

pub(super) fn domain(backend: impl Backend + 'static) -> Domain {
    Domain::new(Box::new(backend), IovaSpace::new(48).unwrap())
}

/// The flush is left out: the batch is thrown away and called done.
pub(super) struct NoFlush(pub(super) SoftIommu, pub(super) AtomicU64);

impl Sink for NoFlush {
    fn submit(&self, _: &Batch, ticket: Ticket) -> Result<(), SinkError> {
        self.1.store(ticket.0, Ordering::SeqCst);
        Ok(())
    }
    fn completed(&self) -> Ticket {
        Ticket(self.1.load(Ordering::SeqCst))
    }
    fn relax(&self, _: u64) {}
    fn limit(&self) -> WaitLimit {
        self.0.limit()
    }
}

impl Physical for NoFlush {
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { self.0.admit(memory) }
    }
    fn expel(&self, memory: DmaMemory) {
        self.0.expel(memory);
    }
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        self.0.run(memory)
    }
}

/// What a hand-made backend does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    /// None: the control.
    None,
    /// The flush is asked for and sent before the entries are cleared.
    FlushBeforeClear,
    /// Table pages are used again at once.
    TablePageFreedEarly,
    /// Every ticket is called done at once.
    NotWaited,
}

/// A table and an invalidator put together by hand, with a mistake.
pub(super) struct HandMade {
    table: Table<VtdSecondStage>,
    invalidator: Invalidator<SoftIommu>,
    retired: Mutex<Retired>,
    mistake: Mistake,
    gap: Gap,
}

impl HandMade {
    pub(super) fn new(iommu: &SoftIommu, mistake: Mistake, gap: &Gap) -> Self {
        let table = Table::new(pages(iommu), 4).unwrap();
        iommu.attach(table.root(), 4);
        let invalidator = Invalidator::new(iommu.clone());
        Self { table, invalidator, retired: Mutex::default(), mistake, gap: Gap::clone(gap) }
    }

    fn clear(&self, ranges: &[IovaRange]) -> Option<Flush> {
        let mut retired = self.retired.lock().unwrap();
        ranges.iter().for_each(|range| self.table.clear(*range, &mut retired).unwrap());
        let range = retired.range();
        if self.mistake == Mistake::TablePageFreedEarly {
            self.table.reclaim(std::mem::take(&mut retired)).unwrap();
        }
        range.map(|range| Flush { range, leaf_only: false })
    }
}

impl Backend for HandMade {
    fn name(&self) -> &'static str {
        "hand-made"
    }
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        unsafe { self.invalidator.sink().admit(memory) }
    }
    fn expel(&self, memory: DmaMemory) {
        self.invalidator.sink().expel(memory);
    }
    fn map(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError> {
        Ok(self.table.map(iova, self.invalidator.sink().run(memory)?.start(), access)?)
    }
    fn revoke(&self, ranges: &mut dyn Iterator<Item = IovaRange>) -> Result<Ticket, BackendError> {
        let ranges: Vec<_> = ranges.collect();
        let leaves = ranges.iter().map(|range| Flush::from(*range));
        let early = self.mistake == Mistake::FlushBeforeClear;
        let (ticket, pages) = if early {
            let ticket = self.invalidator.request(leaves);
            self.invalidator.submit();
            if let Some(gap) = self.gap.lock().unwrap().as_mut() {
                gap();
            }
            (ticket, self.clear(&ranges))
        } else {
            let pages = self.clear(&ranges);
            (self.invalidator.request(leaves), pages)
        };
        let ticket = self.invalidator.request(pages).max(ticket);
        self.invalidator.submit();
        Ok(ticket)
    }
    fn is_done(&self, ticket: Ticket) -> bool {
        self.mistake == Mistake::NotWaited || self.invalidator.is_done(ticket)
    }
    fn wait(&self, ticket: Ticket) -> Result<(), BackendError> {
        if self.mistake == Mistake::NotWaited { Ok(()) } else { Ok(self.invalidator.wait(ticket)?) }
    }
    fn stats(&self) -> BackendStats {
        BackendStats::default()
    }
}
