//! VFIO's type1, version 2: a table that the kernel keeps. Linux 4.0.

use super::container::Container;
use super::context::{IommuContext, Limits};
use super::error::OpenError;
use super::interface::IommuInterface;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::vfio::{container, layout};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// The limit of entries of a kernel that does not report it (since Linux 5.1; before, there was no
/// limit).
const DEFAULT_ENTRIES: u64 = 65_535;

/// A container with type1.
#[derive(Debug)]
pub(crate) struct Type1(Container);

impl Type1 {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        Container::open(roots).map(Self)
    }
}

impl IommuContext for Type1 {
    fn interface(&self) -> IommuInterface {
        IommuInterface::Type1
    }

    fn name(&self) -> &'static str {
        "vfio"
    }

    fn map_call(&self) -> &'static str {
        "VFIO_IOMMU_MAP_DMA"
    }

    fn raise_entries(&self, limit: u64) -> String {
        let more = limit.saturating_mul(2).max(1_000_000);
        format!(
            "echo {more} | sudo tee /sys/module/vfio_iommu_type1/parameters/dma_entry_limit, then start again"
        )
    }

    fn open_device(&self, roots: &Roots, device: &PciDevice) -> Result<Option<OwnedFd>, OpenError> {
        self.0.open_device(roots, device, layout::TYPE1_V2)
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        // SAFETY: the caller's promise is the one required.
        unsafe { container::map(self.0.fd(), iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        container::unmap(self.0.fd(), iova)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let info = container::info(self.0.fd())?;
        Ok(Limits {
            ranges: info.ranges,
            page_sizes: info.page_sizes,
            entries_left: Some(info.entries_left.unwrap_or(DEFAULT_ENTRIES)),
        })
    }
}
