//! The software IOMMU: an adversary.
//!
//! Devices that are models reach memory through a [`Port`], which translates every access as an IOMMU does. It is as
//! unpleasant as the specification lets it be:
//!
//! - its IOTLB keeps every entry until it is told to drop it, or until the room is needed;
//! - its walk caches hold table pages of every level, and a flush of leaves alone leaves them there;
//! - each request of a batch takes effect at a time of its own, and batches complete late and out of order if it is so
//!   [configured](SoftConfig); completions are published in order, as the sequence of an invalidation queue is;
//! - with caching mode it also caches entries that are not present, at every level;
//! - it decodes table entries by itself, not by the core's code that wrote them.
//!
//! It does no harm that a real IOMMU could not do either: it only touches memory that was admitted to it, so that
//! a wrong entry is a [`Fault`] and not a wild access. "PhysTranslator" addresses are addresses in this process.
//!
//! Its cost model is a time line and not a thread: a batch that is submitted at t completes at max(t, previous) + cost,
//! and later at random. What is due takes effect when a waiter polls.
//! So a waiter really waits, also on two cores.

use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::{BackendError, PhysTranslator};
use pinfold_core::invalidate::{Batch, InvalidationQueue, QueueError, Ticket, WaitLimit};
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::TablePage;
use std::sync::Arc;

mod config;
mod fault;
mod line;
mod memory;
mod port;
#[cfg(test)]
mod tests;
mod tlb;
mod unit;
mod walk;

pub use config::{Effect, SoftConfig};
pub use fault::{Fault, FaultKind};
pub use port::{Port, PortStats};

use unit::Unit;

/// An address or an offset as a number of this machine. What does not fit (on 32 bits) is where nothing is.
#[inline]
fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// A software IOMMU with one address space. A handle: a clone is the same one.
///
/// [`Domain::soft`](crate::Domain::soft) is the short way to one with a domain in front.
#[derive(Clone, Debug)]
pub struct SoftIommu(Arc<Unit>);

impl SoftIommu {
    /// A software IOMMU without a table: every access is a fault.
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] where memory for the table could not be had.
    pub fn new(config: SoftConfig) -> Result<Self, BackendError> {
        Ok(Self(Arc::new(Unit::new(config)?)))
    }

    /// The pages for its table, zero at first. The walker follows links to these only.
    ///
    /// # Safety
    /// They are used only as long as this IOMMU, a clone of it or a port of it is there. Until it has been
    /// [detached](Self::detach) for good, one table is made of them, [`attach`](Self::attach) is given its root and its
    /// number of levels, and one [`Invalidator`](pinfold_core::invalidate::Invalidator) submits to this IOMMU: that of the
    /// table.
    pub unsafe fn table_pages(&self) -> &'static [TablePage] {
        let pages = std::ptr::from_ref(self.0.tables.pages());
        // SAFETY: the memory is valid as long as the unit, which the caller's handle keeps.
        unsafe { &*pages }
    }

    /// Where the walker finds them.
    pub fn table_phys(&self) -> PhysAddr {
        self.0.tables.phys()
    }

    /// Lets the walker begin at `root`, one of the [table pages](Self::table_pages), with `levels` levels.
    pub fn attach(&self, root: PhysAddr, levels: u8) {
        self.0.attach(root, levels);
    }

    /// Takes the table away and drops all that is cached: from here on every access is a fault.
    pub fn detach(&self) {
        self.0.detach();
    }

    /// Returns the invalidation queue and the physical side for a table's backend. Dropping it, with the backend,
    /// [detaches](Self::detach) the table: ports may outlive it, and find nothing from then on.
    pub fn queue(&self) -> SoftQueue {
        SoftQueue(self.clone())
    }

    /// A new device's way to memory, with caches of its own.
    pub fn port(&self) -> Port {
        Port::new(&self.0)
    }

    /// What all ports have done so far.
    pub fn stats(&self) -> PortStats {
        self.0.stats()
    }

    /// The last faults, oldest first; at most 64.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.faults()
    }
}

/// The software IOMMU behind a domain, as far as others than the domain may have to do with it. Its table and its queue are
/// the domain's alone: with another root, or with another queue's tickets, a device reaches what was revoked.
///
/// ```compile_fail,E0599
/// # fn example(domain: pinfold::Domain) -> Option<()> {
/// let iommu = domain.soft_iommu()?;
/// iommu.attach(pinfold_core::addr::PhysAddr::new(0x1000), 1);
/// # Some(()) }
/// ```
///
/// ```compile_fail,E0277
/// # fn example(domain: pinfold::Domain) -> Option<()> {
/// let iommu = domain.soft_iommu()?;
/// let _ = pinfold_core::invalidate::Invalidator::new(iommu);
/// # Some(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SoftView<'d>(&'d SoftIommu);

impl<'d> SoftView<'d> {
    pub(crate) fn new(iommu: &'d SoftIommu) -> Self {
        Self(iommu)
    }

    /// A new device's way to memory, with caches of its own.
    pub fn port(&self) -> Port {
        self.0.port()
    }

    /// What all ports have done so far.
    pub fn stats(&self) -> PortStats {
        self.0.stats()
    }

    /// The last faults, oldest first; at most 64.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.faults()
    }

    /// Lets the flushes that are due take effect, as a waiter's poll does.
    pub fn advance(&self) {
        let _ = self.0.0.completed();
    }
}

/// The side of a [`SoftIommu`] that a backend uses.
#[derive(Debug)]
pub struct SoftQueue(SoftIommu);

impl Drop for SoftQueue {
    fn drop(&mut self) {
        self.0.detach();
    }
}

impl InvalidationQueue for SoftQueue {
    fn submit(&self, batch: &Batch, ticket: Ticket) -> Result<(), QueueError> {
        self.0.0.submit(batch, ticket);
        Ok(())
    }

    fn completed(&self) -> Ticket {
        self.0.0.completed()
    }

    fn relax(&self, polls: u64) {
        if polls < 64 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    fn now_ns(&self) -> Option<u64> {
        Some(self.0.0.now_ns())
    }

    fn limit(&self) -> WaitLimit {
        let time_ns = u64::try_from(self.0.0.config.timeout.as_nanos()).unwrap_or(u64::MAX);
        WaitLimit { time_ns, polls: u64::MAX }
    }

    fn queue_depth(&self) -> u64 {
        self.0.0.config.queue_depth
    }

    fn caches_not_present(&self) -> bool {
        self.0.0.config.caching_mode
    }
}

impl PhysTranslator for SoftQueue {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the registry asks for.
        unsafe { self.0.0.register_memory(memory) }
    }

    fn unregister_memory(&self, memory: DmaMemory) {
        self.0.0.unregister_memory(memory);
    }

    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError> {
        self.0.0.run(memory)
    }
}
