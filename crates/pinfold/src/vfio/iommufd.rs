//! iommufd: an address space (IOAS) of `/dev/iommu`, to which devices are attached without groups. Linux 6.6.

use super::error::OpenError;
use super::mapper::{Limits, Mapper};
use super::open::refused;
use super::type1::open_node;
use crate::probe::Roots;
use crate::sys::Errno;
use crate::sys::iommufd::{self, Ioas};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

/// An address space, and the descriptor that it is a part of.
#[derive(Debug)]
pub(crate) struct Iommufd {
    fd: OwnedFd,
    ioas: Ioas,
}

impl Iommufd {
    /// An address space without a device.
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let path = roots.dev.join("iommu");
        let fd = open_node(&path)?;
        let ioas = iommufd::alloc(fd.as_fd()).map_err(|e| refused("IOMMU_IOAS_ALLOC", &path, e))?;
        Ok(Self { fd, ioas })
    }

    /// Opens a device by its node, and attaches it.
    pub(crate) fn device(&self, path: &Path) -> Result<OwnedFd, OpenError> {
        let device = open_node(path)?;
        iommufd::bind(device.as_fd(), self.fd.as_fd())
            .map_err(|e| refused("VFIO_DEVICE_BIND_IOMMUFD", path, e))?;
        // What fails here closes the device's descriptor, which takes it out of the iommufd.
        iommufd::attach(device.as_fd(), self.ioas)
            .map_err(|e| refused("VFIO_DEVICE_ATTACH_IOMMUFD_PT", path, e))?;
        Ok(device)
    }
}

impl Mapper for Iommufd {
    fn name(&self) -> &'static str {
        "iommufd"
    }

    fn call(&self) -> &'static str {
        "IOMMU_IOAS_MAP"
    }

    /// It has no limit of its own: memory for its tables is charged to the process's control group.
    fn more_entries(&self) -> &'static str {
        "give the program's control group more memory"
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { iommufd::map(self.fd.as_fd(), self.ioas, iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        iommufd::unmap(self.fd.as_fd(), self.ioas, iova)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let (ranges, alignment) = iommufd::ranges(self.fd.as_fd(), self.ioas)?;
        // It says an alignment, and no page sizes: from that one on all are possible.
        Ok(Limits { ranges: Some(ranges), page_sizes: alignment.wrapping_neg(), entries_left: None })
    }
}

impl Drop for Iommufd {
    fn drop(&mut self) {
        // Devices that are still open keep it (EBUSY); their descriptors' end takes it away then.
        if let Err(errno) = iommufd::destroy(self.fd.as_fd(), self.ioas) {
            tracing::debug!(%errno, "an address space goes with its descriptor");
        }
    }
}
