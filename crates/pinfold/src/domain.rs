//! A domain of this process: the core's [`Domain`](pinfold_core::domain::Domain) over one of the backends.

use crate::soft::{Port, SoftConfig, SoftIommu, SoftView};
use crate::vfio::open as vfio;
use pinfold_core::domain::{BackendError, DomainOwner, TableBackend};
use pinfold_core::iova::IovaSpace;
use pinfold_core::share::Shared;
use pinfold_core::table::{TablePages, VtdSecondStage};
use std::fmt;

/// One I/O address space, with the backend that keeps it. A handle: a clone is the same domain.
///
/// What a domain offers whatever its backend (`map`, `revoke_all`, `register_memory`, `map_static`, `stats` ...) is reached
/// through `Deref`: see [`pinfold_core::domain::Domain`].
///
/// The first kernel that has what the backends need: `soft` needs none, `vfio` 4.0, `iommufd` 6.6.
#[derive(Clone)]
pub struct Domain {
    core: Shared<pinfold_core::domain::Domain>,
    behind: Behind,
}

/// What stands behind the backend on the device's side.
#[derive(Clone)]
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
        // SAFETY: the table that uses it holds the IOMMU, by its queue, and with it the memory.
        let pages = unsafe { iommu.table_pages() };
        let pages = TablePages::new(pages, iommu.table_phys())?;
        let paged = TableBackend::<VtdSecondStage, _>::new("soft", iommu.queue(), pages, levels)?;
        iommu.attach(paged.root(), levels);
        let iovas = IovaSpace::new(paged.bits())?;
        let core = pinfold_core::domain::Domain::new(Box::new(paged), iovas);
        Ok(Self::new(core, Behind::Soft(iommu)))
    }

    /// A domain above a backend.
    pub(crate) fn new(core: pinfold_core::domain::Domain, behind: Behind) -> Self {
        Self { core: Shared::new(core), behind }
    }

    /// Returns one thread's handle, whose mappings own a share of the domain: they may outlive every other handle, move
    /// between threads, and be kept in one struct with it.
    ///
    /// `map` of the domain itself returns mappings that borrow it.
    pub fn owner(&self) -> DomainOwner {
        self.core.owner()
    }

    /// What the backend is called: `soft`, or `vfio` and `iommufd` for that of a [device](crate::vfio::Device).
    pub fn name(&self) -> &'static str {
        self.core.backend_name()
    }

    /// A new device's way into the domain, where the devices of this domain are models; `None` where they are real.
    pub fn port(&self) -> Option<Port> {
        self.soft_iommu().map(|iommu| iommu.port())
    }

    /// The software IOMMU, if the domain is behind one: its account and its faults.
    pub fn soft_iommu(&self) -> Option<SoftView<'_>> {
        match &self.behind {
            Behind::Soft(iommu) => Some(SoftView::new(iommu)),
            _ => None,
        }
    }

    /// What real devices of the domain are attached to.
    pub(crate) fn kernel(&self) -> Option<&vfio::Space> {
        match &self.behind {
            Behind::Kernel(space) => Some(space),
            _ => None,
        }
    }
}

impl std::ops::Deref for Domain {
    type Target = pinfold_core::domain::Domain;
    fn deref(&self) -> &Self::Target {
        &self.core
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Domain").field(&self.core).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Buffer};
    use pinfold_core::access::FromDevice;
    use pinfold_core::domain::Mapping;

    /// What a program keeps in one struct.
    struct Driver {
        domain: Domain,
        owner: DomainOwner,
        ring: Vec<Mapping<Buffer, FromDevice>>,
        arena: Arena,
    }

    fn driver() -> Driver {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(2 << 20).build(&domain).unwrap();
        let mut owner = domain.owner();
        let ring = (0..4).map(|_| owner.map(arena.alloc(4096).unwrap(), FromDevice).unwrap()).collect();
        Driver { domain, owner, ring, arena }
    }

    #[test]
    fn mappings_outlive_every_handle_of_their_domain_and_the_table_goes_with_the_last() {
        for last in 0..4 {
            let driver = driver();
            let port = driver.domain.port().unwrap();
            let iova = driver.ring[0].iova().start();
            port.write(iova, b"while mapped").unwrap();
            std::thread::spawn(move || {
                let Driver { domain, owner, ring, arena } = driver;
                let mut parts: Vec<Box<dyn std::any::Any>> =
                    vec![Box::new(ring), Box::new(domain), Box::new(owner), Box::new(arena)];
                let kept = parts.swap_remove(last);
                drop(parts);
                assert_eq!(kept.is::<Vec<Mapping<Buffer, FromDevice>>>(), last == 0);
                drop(kept);
            })
            .join()
            .unwrap();
            port.write(iova, b"afterwards").unwrap_err();
        }
        let Driver { domain, ring, .. } = driver();
        let port = domain.port().unwrap();
        drop(domain);
        for mapping in ring {
            port.write(mapping.iova().start(), b"device").unwrap();
            let iova = mapping.iova().start();
            assert_eq!(&mapping.unmap().unwrap().as_slice().unwrap()[..6], b"device");
            port.write(iova, b"afterwards").unwrap_err();
        }
    }
}
