//! VFIO without an IOMMU: nothing is translated and nothing is protected. The device reaches memory
//! at its physical address, and all other memory too.
//!
//! The kernel provides the device and its interrupts and ignores memory: the process pins it itself
//! ([`PinnedMemory`]).

use super::context::{DeviceFd, IommuContext, IommuInterface, Limits};
use super::error::OpenError;
use super::pinned::PinnedMemory;
use super::vfio::Container;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::vfio::layout;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::ptr::NonNull;
use std::sync::Arc;

/// A container that maps nothing, and the physical addresses of what is registered.
#[derive(Debug)]
pub(crate) struct NoIommu {
    container: Arc<Container>,
    memory: PinnedMemory,
}

impl NoIommu {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        Ok(Self { container: Arc::new(Container::open(roots)?), memory: PinnedMemory::default() })
    }
}

impl IommuContext for NoIommu {
    fn interface(&self) -> IommuInterface {
        IommuInterface::NoIommu
    }

    fn name(&self) -> &'static str {
        "none"
    }

    fn map_call(&self) -> &'static str {
        "the lookup of a physical address"
    }

    fn raise_entries(&self, _limit: u64) -> String {
        "there is no limit".to_owned()
    }

    fn open_device(
        &self,
        roots: &Roots,
        device: &PciDevice,
    ) -> Result<Option<DeviceFd>, OpenError> {
        tracing::warn!(bdf = %device.bdf, "opened without an IOMMU: the device can reach all memory of this machine");
        let Some((fd, group)) = self.container.open_device(roots, device, layout::NOIOMMU)? else {
            return Ok(None);
        };
        let container = Arc::clone(&self.container);
        // The container maps nothing that a closed group would unmap.
        Ok(Some(DeviceFd::new(fd, move || {
            container.device_left(group, true);
        })))
    }

    fn translates(&self) -> bool {
        false
    }

    fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.memory.add(memory)
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.memory.remove(memory)
    }

    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        self.memory.place(memory).map(Some)
    }

    /// Does nothing: the device reaches the memory anyway.
    unsafe fn map(&self, _: IovaRange, _: NonNull<u8>, _: Access) -> Result<(), Errno> {
        Ok(())
    }

    /// Does nothing: the device still reaches the memory.
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        Ok(iova.len())
    }

    fn limits(&self) -> Result<Limits, Errno> {
        Ok(Limits { ranges: Some(vec![(0, u64::MAX)]), page_sizes: 4096, entries_left: None })
    }
}
