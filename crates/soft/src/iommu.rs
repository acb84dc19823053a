//! A software IOMMU for a table that the caller keeps, and its device side.

use crate::config::{PortStats, SoftConfig, Stage};
use crate::lane::UnitQueue;
use crate::memory::MappedPages;
use crate::port::Port;
use crate::record::FaultReport;
use crate::timer::Timer;
use crate::unit::Unit;
use pinfold_core::addr::{Iova, PhysAddr};
use pinfold_core::domain::{
    BackendError, Domain, DomainId, Generation, PhysExtent, PhysTranslator, Pinned, TableBackend,
};
use pinfold_core::invalidate::{
    Descriptor, FanOut, InvalidationQueue, QueueError, Ticket, WaitLimit,
};
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{
    Format, Table, TableMemory, TablePage, TablePages, VtdFirstStage, VtdSecondStage,
};
use std::sync::Arc;
use std::task::Waker;

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
        self.queue_over(|_, queue| queue)
    }

    /// Returns the queue over what `over` makes of the queue of each unit, by its number.
    pub(crate) fn queue_over<Q: InvalidationQueue>(
        &self,
        over: impl Fn(usize, UnitQueue) -> Q,
    ) -> SoftQueue<Q> {
        let (iommu, units) = (Arc::clone(&self.0), self.0.queues(over));
        SoftQueue { iommu, units, timer: Timer::default() }
    }
}

/// The source of a table's pages, for
/// [`Table::with_memory`](pinfold_core::table::Table::with_memory). See
/// [`SoftIommu::table_memory`].
#[derive(Debug)]
pub struct SoftTableMemory(Arc<Unit>);

impl TableMemory for SoftTableMemory {
    fn grow(&self, pages: u32) -> Option<TablePages> {
        // SAFETY: the constructor's caller has promised it.
        unsafe { self.0.tables.grow(pages) }
    }

    fn advice(&self) -> &'static str {
        "raise `SoftConfig::table_bytes`"
    }
}

/// The side of a [`SoftIommu`] that a backend uses: the queues of all its
/// [units](SoftConfig::units) as one.
#[derive(Debug)]
pub struct SoftQueue<Q = UnitQueue> {
    iommu: Arc<Unit>,
    units: FanOut<Q>,
    timer: Timer,
}

impl<Q> Drop for SoftQueue<Q> {
    fn drop(&mut self) {
        self.iommu.detach();
    }
}

impl<Q: InvalidationQueue> InvalidationQueue for SoftQueue<Q> {
    #[inline]
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let submitted = self.units.submit(descriptors, wait);
        match submitted {
            Ok(()) => self.timer.note_submission(&self.iommu),
            // Requests in flight have no event any more.
            Err(QueueError::Failed) => self.timer.look_again(),
            Err(_) => {}
        }
        submitted
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

    fn wake(&self, ticket: Option<Ticket>, deadline_ns: u64, waker: &Waker) {
        self.timer.wake(&self.iommu, ticket, deadline_ns, waker);
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

impl<Q: InvalidationQueue> PhysTranslator for SoftQueue<Q> {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one required.
        unsafe { self.iommu.register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.iommu.unregister_memory(memory)
    }

    fn overrules_table(&self) -> bool {
        true
    }

    fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        self.iommu.extent(memory)
    }

    fn generation(&self) -> Generation {
        self.iommu.generation()
    }
}

// The device side of a software IOMMU.

/// Creates a domain whose table the software IOMMU walks, and the bus for its devices.
///
/// # Errors
/// [`BackendError::NoMemory`] if the memory for the table cannot be allocated;
/// [`BackendError::Table`] if the configuration asks for an unsupported number of levels, or for
/// physical addresses that do not reach the table.
pub fn domain(config: SoftConfig) -> Result<(Domain, SoftBus), BackendError> {
    // SAFETY: the queues are those of the IOMMU.
    unsafe { domain_over(config, |_, queue| queue) }
}

/// Creates the same over what `over` makes of the queue of each unit, by its number: for tests,
/// whose queues do something wrong.
///
/// # Errors
/// As for [`domain`].
///
/// # Safety
/// A queue that does not execute its descriptors lets devices reach memory that has been returned:
/// then the caller has no reference into such memory.
pub unsafe fn domain_over<Q: InvalidationQueue + 'static>(
    config: SoftConfig,
    over: impl Fn(usize, UnitQueue) -> Q,
) -> Result<(Domain, SoftBus), BackendError> {
    let iommu = SoftIommu::new(config.clone())?;
    let queue = iommu.queue_over(over);
    match config.stage {
        Stage::First => with_table::<VtdFirstStage, _>(&config, iommu, queue),
        Stage::Second => with_table::<VtdSecondStage, _>(&config, iommu, queue),
    }
}

/// Creates the only table that uses the IOMMU's pages, and the domain over it.
fn with_table<F: Format, Q: InvalidationQueue + 'static>(
    config: &SoftConfig,
    iommu: SoftIommu,
    queue: SoftQueue<Q>,
) -> Result<(Domain, SoftBus), BackendError> {
    // SAFETY: the table that uses the pages holds the IOMMU, by its queue and its source of pages,
    // and with it the memory. It is the only one, and neither the domain nor the bus gives access
    // to the IOMMU.
    let pages = unsafe { iommu.table_pages() };
    // SAFETY: as above.
    let more = unsafe { iommu.table_memory() };
    // SAFETY: `table_phys` is where the walker finds them; the table is the only one that uses them.
    let pages = unsafe { TablePages::new(pages, iommu.table_phys()) }?;
    let table = Table::<F>::new(pages, config.levels)?.with_phys_bits(config.phys_bits)?;
    let table = table.with_memory(Box::new(more)).with_max_leaf(config.max_leaf);
    let backend = TableBackend::new("soft", queue, table);
    iommu.attach(backend.root(), config.levels);
    let iovas = IovaSpace::new(backend.bits())?;
    Ok((Domain::new(Arc::new(backend), iovas), SoftBus(iommu)))
}

/// The bus of the device models behind a [`domain`]. A handle: a clone is the same bus. Without the
/// domain every access is a fault.
///
/// It does not give access to the table and the invalidation queue, which belong to the domain:
/// with another root, or with another queue's tickets, a device could reach revoked memory.
///
/// ```compile_fail,E0599
/// # fn example(bus: pinfold_soft::SoftBus) {
/// bus.attach(pinfold_core::addr::PhysAddr::new(0x1000), 1);
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # fn example(bus: pinfold_soft::SoftBus) {
/// let _ = pinfold_core::invalidate::Invalidator::new(bus);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SoftBus(SoftIommu);

impl SoftBus {
    /// Connects a new device, with caches of its own.
    pub fn port(&self) -> Port {
        self.0.port()
    }

    /// Connects a new device that also has a TLB of its own (ATS), of `entries` translations of 4
    /// KiB: it keeps its translations until they are flushed by a descriptor of its own, behind
    /// that of the IOTLB.
    pub fn port_with_device_tlb(&self, entries: usize) -> Port {
        self.0.port_with_device_tlb(entries)
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

    /// Allocates zeroed pages that can be mapped into the domain: for tests and models that have no
    /// arena.
    ///
    /// # Errors
    /// [`BackendError::NoMemory`].
    pub fn alloc_pages(&self, pages: usize) -> Result<Pages, BackendError> {
        let memory =
            MappedPages::new("pages of a software IOMMU", pages.saturating_mul(4096), 4096)?;
        let pages = Pages { memory, iommu: self.0.clone() };
        // SAFETY: `Pages` unregisters the memory before it is freed.
        unsafe { self.0.0.register_memory(pages.memory()) }?;
        Ok(pages)
    }
}

/// Zeroed pages that are registered with a software IOMMU.
#[derive(Debug)]
pub struct Pages {
    memory: MappedPages,
    iommu: SoftIommu,
}

impl Pages {
    /// Returns their memory, while no device can access it.
    pub fn memory(&self) -> DmaMemory<'_> {
        self.memory.memory()
    }
}

// SAFETY: the memory is valid until `drop`; no reference into it is ever made; each value has its
// own.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        self.memory.memory()
    }

    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Refused only where it is not registered, which it has been since it was made.
        let _ = self.iommu.0.unregister_memory(self.memory.memory());
    }
}
