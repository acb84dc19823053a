//! A domain of this process: the core's [`Domain`](pinfold_core::domain::Domain) over one of the backends.

use crate::soft::{Port, SoftConfig, SoftIommu, SoftView};
use crate::vfio::open as vfio;
use pinfold_core::domain::{BackendError, TableBackend};
use pinfold_core::iova::IovaSpace;
use pinfold_core::table::{TablePages, VtdSecondStage};
use std::fmt;
use std::sync::Arc;

/// One I/O address space, with the backend that keeps it. A handle: a clone is the same domain.
///
/// What a domain offers whatever its backend (`map`, `revoke_all`, `register_memory`, `map_static`, `stats` ...) is reached
/// through `Deref`: see [`pinfold_core::domain::Domain`].
///
/// The first kernel that has what the backends need: `soft` needs none, `vfio` 4.0, `iommufd` 6.6.
#[derive(Clone)]
pub struct Domain(Arc<Inner>);

struct Inner {
    core: pinfold_core::domain::Domain,
    behind: Behind,
}

/// What stands behind the backend on the device's side.
pub(crate) enum Behind {
    /// Models, that reach memory through ports.
    Soft(SoftIommu),
    /// Real devices, for which the kernel keeps the table.
    Kernel(vfio::Space),
    /// Nothing.
    #[cfg(test)]
    Fake,
}

impl Domain {
    /// A domain behind the software IOMMU, as it is by [default](SoftConfig::default).
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] where memory for its table could not be had.
    pub fn soft() -> Result<Self, BackendError> {
        Self::soft_with(SoftConfig::default())
    }

    /// A domain behind the software IOMMU.
    ///
    /// # Errors
    /// [`BackendError::NoMemory`] as for [`soft`](Self::soft); [`BackendError::Table`] where the configuration asks
    /// for levels that there are not.
    pub fn soft_with(config: SoftConfig) -> Result<Self, BackendError> {
        let levels = config.levels;
        let iommu = SoftIommu::new(config)?;
        // SAFETY: the table that uses it holds the IOMMU, as its sink, and with it the memory.
        let pages = unsafe { iommu.table_pages() };
        let pages = TablePages::new(pages, iommu.table_phys())?;
        let paged = TableBackend::<VtdSecondStage, _>::new("soft", iommu.clone(), pages, levels)?;
        iommu.attach(paged.root(), levels);
        let iovas = IovaSpace::new(paged.bits())?;
        let core = pinfold_core::domain::Domain::new(Box::new(paged), iovas);
        Ok(Self::new(core, Behind::Soft(iommu)))
    }

    /// A domain above a backend.
    pub(crate) fn new(core: pinfold_core::domain::Domain, behind: Behind) -> Self {
        Self(Arc::new(Inner { core, behind }))
    }

    /// What the backend is called: `soft`, or `vfio` and `iommufd` for that of a [device](crate::vfio::Device).
    pub fn name(&self) -> &'static str {
        self.0.core.backend_name()
    }

    /// A new device's way into the domain, where the devices of this domain are models; `None` where they are real.
    pub fn port(&self) -> Option<Port> {
        self.soft_iommu().map(|iommu| iommu.port())
    }

    /// The software IOMMU, if the domain is behind one: its account and its faults.
    pub fn soft_iommu(&self) -> Option<SoftView<'_>> {
        match &self.0.behind {
            Behind::Soft(iommu) => Some(SoftView::new(iommu)),
            _ => None,
        }
    }

    /// What real devices of the domain are attached to.
    pub(crate) fn kernel(&self) -> Option<&vfio::Space> {
        match &self.0.behind {
            Behind::Kernel(space) => Some(space),
            _ => None,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Ports may outlive the domain: from here on they find nothing, not even what was leaked.
        if let Behind::Soft(iommu) = &self.behind {
            iommu.detach();
        }
    }
}

impl std::ops::Deref for Domain {
    type Target = pinfold_core::domain::Domain;
    fn deref(&self) -> &Self::Target {
        &self.0.core
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.0.core).finish()
    }
}
