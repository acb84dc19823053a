//! A software IOMMU for a table that the caller keeps.

use crate::config::SoftConfig;
use crate::lane::LaneQueue;
use crate::port::Port;
use crate::record::FaultReport;
use crate::stats::PortStats;
use crate::unit::Unit;
use pinfold_core::addr::PhysAddr;
use pinfold_core::domain::{BackendError, PhysExtent, PhysTranslator};
use pinfold_core::invalidate::{
    Descriptor, FanOut, InvalidationQueue, QueueError, Ticket, WaitLimit,
};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{TableMemory, TablePage, TablePages};
use std::sync::Arc;

/// A software IOMMU with one address space, without a table at first. A handle: a clone is the same
/// IOMMU.
///
/// For code that keeps its own table. [`domain`](crate::domain()) combines one with a table and a
/// domain.
#[derive(Clone, Debug)]
pub struct SoftIommu(pub(crate) Arc<Unit>);

impl SoftIommu {
    /// Creates a software IOMMU without a table: every access is a fault.
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] if the memory for the table cannot be allocated.
    pub fn new(config: SoftConfig) -> Result<Self, BackendError> {
        Ok(Self(Arc::new(Unit::new(config)?)))
    }

    /// Returns the first pages for its table, initially zero: 64, or what is
    /// [reserved](SoftConfig::table_reserved) if that is more, or as many as the limit
    /// ([`SoftConfig::table_bytes`]) allows. The walker follows links to these only, and to those
    /// of [`table_memory`](Self::table_memory).
    ///
    /// # Safety
    /// They are used only while this IOMMU, a clone of it or a port of it exists. Until the final
    /// [`detach`](Self::detach), they form one table, [`attach`](Self::attach) is called with its
    /// root and its number of levels, and only the table's own
    /// [`Invalidator`](pinfold_core::invalidate::Invalidator) submits to this IOMMU.
    pub unsafe fn table_pages(&self) -> &'static [TablePage] {
        let pages = std::ptr::from_ref(self.0.tables.pages(0));
        // SAFETY: the memory is valid as long as the unit, which the caller's handle keeps alive.
        unsafe { &*pages }
    }

    /// Returns the source of more pages for the same table, up to the limit. It keeps the IOMMU's
    /// memory.
    ///
    /// # Safety
    /// As for [`table_pages`](Self::table_pages).
    pub unsafe fn table_memory(&self) -> SoftTableMemory {
        SoftTableMemory(Arc::clone(&self.0))
    }

    /// Returns the physical address of the [first table pages](Self::table_pages).
    pub fn table_phys(&self) -> PhysAddr {
        self.0.tables.phys(0)
    }

    /// Sets the table: the walker starts at `root`, one of the table pages, with `levels` levels.
    pub fn attach(&self, root: PhysAddr, levels: u8) {
        self.0.attach(root, levels);
    }

    /// Removes the table and drops everything that is cached: every later access is a fault.
    pub fn detach(&self) {
        self.0.detach();
    }

    /// Connects a new device, with caches of its own.
    pub fn port(&self) -> Port {
        Port::new(&self.0, None)
    }

    /// Connects a new device that also has a TLB of its own (ATS), of `entries` translations of 4
    /// KiB.
    pub fn port_with_device_tlb(&self, entries: usize) -> Port {
        Port::new(&self.0, Some(entries))
    }

    /// Returns the sum of the statistics of all ports.
    pub fn stats(&self) -> PortStats {
        self.0.stats()
    }

    /// Reads and clears the fault recording registers, as the handler of the fault interrupt does.
    /// There are eight; once all hold a fault, further ones are lost until this is called.
    pub fn take_faults(&self) -> FaultReport {
        self.0.take_faults()
    }

    /// Executes the flushes that are due, as a waiter's poll does.
    pub fn advance(&self) {
        self.0.advance();
    }

    /// Returns the invalidation queue and the physical side, for the backend that keeps the table.
    /// Dropping it, with the backend, [detaches](Self::detach) the table: ports may outlive it, and
    /// every later access faults.
    pub fn queue(&self) -> SoftQueue {
        SoftQueue { iommu: Arc::clone(&self.0), units: self.0.queues() }
    }
}

/// The source of a table's pages, for
/// [`Table::with_memory`](pinfold_core::table::Table::with_memory). See
/// [`SoftIommu::table_memory`].
#[derive(Debug)]
pub struct SoftTableMemory(Arc<Unit>);

impl TableMemory for SoftTableMemory {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        // SAFETY: whoever made this value has promised it.
        unsafe { self.0.tables.grow(pages) }
    }

    fn advice(&self) -> &'static str {
        "raise `SoftConfig::table_bytes`"
    }
}

/// The side of a [`SoftIommu`] that a backend uses: the queues of all its
/// [units](SoftConfig::units) as one.
#[derive(Debug)]
pub struct SoftQueue {
    iommu: Arc<Unit>,
    units: FanOut<LaneQueue>,
}

impl Drop for SoftQueue {
    fn drop(&mut self) {
        self.iommu.detach();
    }
}

impl InvalidationQueue for SoftQueue {
    #[inline]
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        self.units.submit(descriptors, wait)
    }

    fn accepts(&self) -> usize {
        self.units.accepts()
    }

    fn completed(&self) -> Ticket {
        self.units.completed()
    }

    #[inline]
    fn after_submission(&self) -> (Ticket, Option<u64>) {
        self.units.after_submission()
    }

    fn has_device_tlbs(&self) -> bool {
        self.units.has_device_tlbs()
    }

    fn has_aborted(&self) -> bool {
        self.units.has_aborted()
    }

    fn restart(&self) {
        self.units.restart();
    }

    fn has_failed(&self) -> bool {
        self.units.has_failed()
    }

    fn now_ns(&self) -> Option<u64> {
        Some(self.iommu.now_ns())
    }

    fn limit(&self) -> WaitLimit {
        self.units.limit()
    }

    fn queue_depth(&self) -> u64 {
        self.units.queue_depth()
    }

    fn caches_not_present(&self) -> bool {
        self.units.caches_not_present()
    }
}

impl PhysTranslator for SoftQueue {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one required.
        unsafe { self.iommu.register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) {
        self.iommu.unregister_memory(memory);
    }

    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        self.iommu.extent(memory)
    }

    fn generation(&self) -> u64 {
        self.iommu.generation()
    }
}
