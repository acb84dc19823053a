//! The device side of a software IOMMU.

use crate::config::{SoftConfig, Stage};
use crate::iommu::SoftIommu;
use crate::memory::MappedPages;
use crate::port::Port;
use crate::record::FaultReport;
use crate::stats::PortStats;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{BackendError, Domain, DomainId, Pinned, TableBackend};
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use pinfold_core::table::{Format, Table, TablePages, VtdFirstStage, VtdSecondStage};

/// Creates a domain whose table the software IOMMU walks, and the bus for its devices.
///
/// # Errors
/// [`BackendError::NoMemory`] if the memory for the table cannot be allocated;
/// [`BackendError::Table`] if the configuration asks for an unsupported number of levels, or for
/// physical addresses that do not reach the table.
pub fn domain(config: SoftConfig) -> Result<(Domain, SoftBus), BackendError> {
    let iommu = SoftIommu::new(config.clone())?;
    match config.stage {
        Stage::First => with_table::<VtdFirstStage>(&config, iommu),
        Stage::Second => with_table::<VtdSecondStage>(&config, iommu),
    }
}

/// Creates the only table that uses the IOMMU's pages, and the domain over it.
fn with_table<F: Format>(
    config: &SoftConfig,
    iommu: SoftIommu,
) -> Result<(Domain, SoftBus), BackendError> {
    // SAFETY: the table that uses the pages holds the IOMMU, by its queue and its source of pages,
    // and with it the memory. It is the only one, and neither the domain nor the bus gives access
    // to the IOMMU.
    let pages = unsafe { iommu.table_pages() };
    // SAFETY: as above.
    let more = unsafe { iommu.table_memory() };
    let pages = TablePages::new(pages, iommu.table_phys())?;
    let table = Table::<F>::new(pages, config.levels)?.with_phys_bits(config.phys_bits)?;
    let table = table.with_memory(Box::new(more)).with_max_leaf(config.max_leaf);
    let backend = TableBackend::new("soft", iommu.queue(), table);
    iommu.attach(backend.root(), config.levels);
    let iovas = IovaSpace::new(backend.bits())?;
    Ok((Domain::new(Box::new(backend), iovas), SoftBus(iommu)))
}

/// The bus of the device models behind a [`domain`]. A handle: a clone is the same bus. Without the
/// domain every access is a fault.
///
/// It does not give access to the table and the invalidation queue, which belong to the domain:
/// with another root, or with another queue's tickets, a device could reach what was revoked.
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
    /// KiB: it keeps what it has found until it is flushed by a descriptor of its own, behind that
    /// of the IOTLB.
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
        self.iommu.0.unregister_memory(self.memory.memory());
    }
}
