//! The software IOMMU below the baselines, driven as a kernel does: each caller submits its own
//! flush and spins.
#![expect(
    unsafe_code,
    reason = "the memory of the table and the registered memory are kept valid by hand"
)]

use super::api::{Dma, PolicyError};
use super::memory::Memory;
use super::stats::PolicyStats;
use super::table::{LEVELS, Table};
use super::tree::BITS;
use crate::baseline::lock::KernelLock;
use pinfold::soft::{Port, PortStats, SoftConfig, SoftIommu, SoftQueue};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysRange};
use pinfold_core::domain::PhysTranslator;
use pinfold_core::invalidate::{
    Descriptor, Flush, InvalidationQueue, Invalidator, MAX_IN_FLIGHT, QueueError, Ticket, WaitLimit,
};
use pinfold_core::table::TableMemory;
use std::sync::Arc;

/// The queue as a kernel waits for it: spinning, with interrupts off.
#[derive(Debug)]
struct Spinning(SoftQueue);

impl InvalidationQueue for Spinning {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.0.submit(descriptors, wait)
    }

    fn accepts(&self) -> usize {
        self.0.accepts()
    }

    fn completed(&self) -> Ticket {
        self.0.completed()
    }

    fn relax(&self, _: u64) {
        std::hint::spin_loop();
    }

    fn now_ns(&self) -> Option<u64> {
        self.0.now_ns()
    }

    fn limit(&self) -> WaitLimit {
        self.0.limit()
    }

    fn queue_depth(&self) -> u64 {
        self.0.queue_depth()
    }
}

/// An IOMMU with a table that never frees its pages.
#[derive(Debug)]
pub(super) struct Iommu {
    iommu: SoftIommu,
    table: Table,
    invalidator: Invalidator<Spinning>,
    /// Held while flushes are submitted, so that each caller's have a wait of their own.
    submission: KernelLock<()>,
    memory: Arc<Memory>,
}

impl Iommu {
    pub(super) fn new(memory: &Arc<Memory>, config: &SoftConfig) -> Result<Self, PolicyError> {
        let config = SoftConfig { queue_depth: MAX_IN_FLIGHT, levels: LEVELS, ..config.clone() };
        let reserves = config.table_reserved > 0;
        let iommu = SoftIommu::new(config)?;
        // SAFETY: `Self` keeps the IOMMU. The pages form the one table attached here, and only this
        // invalidator submits.
        let memory_of_table = unsafe { iommu.table_memory() };
        // What is reserved; or what is left in one piece, which takes memory as it is used: the
        // baselines' table does not grow. A small limit has been given out with the first piece.
        let rest = if reserves { None } else { memory_of_table.grow(u32::MAX) };
        let (pages, phys) = match rest {
            Some(rest) => (rest.pages(), rest.phys()),
            // SAFETY: as above; no other piece was given out.
            None => (unsafe { iommu.table_pages() }, iommu.table_phys()),
        };
        let table = Table::new(pages, phys);
        iommu.attach(phys, LEVELS);
        let queue = iommu.queue();
        // SAFETY: `drop` unregisters it, and `Self` keeps it until then.
        unsafe { queue.register_memory(memory.dma()) }?;
        let invalidator = Invalidator::new(Spinning(queue));
        Ok(Self {
            iommu,
            table,
            invalidator,
            submission: KernelLock::new(()),
            memory: Arc::clone(memory),
        })
    }

    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(super) fn port(&self) -> Port {
        self.iommu.port()
    }

    pub(super) fn map(
        &self,
        iova: u64,
        memory: PhysRange,
        access: Access,
    ) -> Result<(), PolicyError> {
        self.table.map(iova, memory.start().raw(), memory.len(), access)
    }

    /// Maps all memory at its physical address for its lifetime.
    pub(super) fn map_identity(&self, access: Access) -> Result<(), PolicyError> {
        let memory = self.memory.whole();
        self.table.map_identity(memory.start().raw(), memory.len(), access)
    }

    pub(super) fn clear(&self, iova: u64, len: u64) -> Result<(), PolicyError> {
        self.table.clear(iova, len)
    }

    /// Has the processor load the table entry of what is unmapped soon.
    #[inline]
    pub(super) fn prefetch(&self, dma: &Dma) {
        self.table.prefetch(dma.iova().start().raw());
    }

    /// Flushes ranges that have been cleared, by one submission of the caller's own, and waits.
    pub(super) fn flush(
        &self,
        ranges: impl IntoIterator<Item = IovaRange>,
    ) -> Result<(), PolicyError> {
        let submission = self.submission.lock();
        let ticket = self.invalidator.request(ranges.into_iter().map(Flush::from));
        self.invalidator.submit();
        drop(submission);
        Ok(self.invalidator.wait(ticket)?)
    }

    /// Flushes everything, links included, and waits.
    pub(super) fn flush_all(&self) -> Result<(), PolicyError> {
        let range = IovaRange::new(Iova::new(0), 1 << BITS)?;
        let submission = self.submission.lock();
        let ticket = self.invalidator.request([Flush { range, leaf_only: false }]);
        self.invalidator.submit();
        drop(submission);
        Ok(self.invalidator.wait(ticket)?)
    }

    /// Returns `stats` with what the IOMMU has done.
    pub(super) fn add_to(&self, stats: PolicyStats) -> PolicyStats {
        let PortStats { walk_reads, walk_ns, .. } = self.iommu.stats();
        let table_pages = self.table.pages_used() as u64;
        PolicyStats { walk_reads, walk_ns, table_pages, ..stats }.with(self.invalidator.stats())
    }
}

impl Drop for Iommu {
    fn drop(&mut self) {
        self.invalidator.queue().0.unregister_memory(self.memory.dma());
    }
}
