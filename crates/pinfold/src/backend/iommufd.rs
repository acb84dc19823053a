//! iommufd: an address space (IOAS) of `/dev/iommu`, to which devices are attached without groups.
//! Linux 6.6.

use super::context::{IommuContext, IommuInterface, Limits, Selection, select};
use super::error::OpenError;
use super::vfio::open_node;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::iommufd::{self, Ioas};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// An address space, and the descriptor it belongs to.
#[derive(Debug)]
pub(crate) struct Iommufd {
    fd: OwnedFd,
    ioas: Ioas,
    /// Whether it ends with this value; else it is another user's.
    owned: bool,
}

impl Iommufd {
    /// Allocates an address space without a device.
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let path = roots.dev.join("iommu");
        let fd = open_node(&path)?;
        let ioas = iommufd::alloc(fd.as_fd())
            .map_err(|e| OpenError::of_call("IOMMU_IOAS_ALLOC", &path, e))?;
        Ok(Self { fd, ioas, owned: true })
    }

    /// Uses the address space `ioas` of another user's iommufd, and leaves both as they are when it
    /// ends.
    pub(crate) fn import(fd: BorrowedFd<'_>, ioas: u32) -> Result<(Self, Limits), OpenError> {
        let path = format!("descriptor {}", fd.as_raw_fd());
        let of_call = |call, errno| OpenError::of_call(call, path.as_ref(), errno);
        let fd = rustix::io::fcntl_dupfd_cloexec(fd, 0)
            .map_err(|errno| of_call("F_DUPFD_CLOEXEC", Errno::new(errno.raw_os_error())))?;
        let imported = Self { fd, ioas: Ioas::existing(ioas), owned: false };
        // The first call that names the address space: no iommufd, or it has none of this number.
        let call = "IOMMU_IOAS_IOVA_RANGES";
        let limits = imported.limits().map_err(|errno| of_call(call, errno))?;
        Ok((imported, limits))
    }
}

impl IommuContext for Iommufd {
    fn interface(&self) -> IommuInterface {
        IommuInterface::Iommufd
    }

    fn name(&self) -> &'static str {
        "iommufd"
    }

    fn map_call(&self) -> &'static str {
        "IOMMU_IOAS_MAP"
    }

    /// It has no limit of its own: memory for its tables is charged to the process's control group.
    fn raise_entries(&self, _limit: u64) -> String {
        "give the program's control group more memory".to_owned()
    }

    fn open_device(&self, roots: &Roots, device: &PciDevice) -> Result<Option<OwnedFd>, OpenError> {
        let path = match select(roots, device.cdev.as_deref()) {
            Selection { node: Some(node), .. } => node,
            Selection { reason, .. } => {
                return Err(OpenError::NoIommufd { bdf: device.bdf, reason });
            }
        };
        let fd = open_node(&path)?;
        iommufd::bind(fd.as_fd(), self.fd.as_fd())
            .map_err(|e| OpenError::of_call("VFIO_DEVICE_BIND_IOMMUFD", &path, e))?;
        // A failure here closes the device's descriptor, which detaches it from the iommufd.
        iommufd::attach(fd.as_fd(), self.ioas)
            .map_err(|e| OpenError::of_call("VFIO_DEVICE_ATTACH_IOMMUFD_PT", &path, e))?;
        Ok(Some(fd))
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        // SAFETY: the caller's promise is the one required.
        unsafe { iommufd::map(self.fd.as_fd(), self.ioas, iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        iommufd::unmap(self.fd.as_fd(), self.ioas, iova)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let (ranges, alignment) = iommufd::ranges(self.fd.as_fd(), self.ioas)?;
        // It reports an alignment instead of page sizes: from that one on all are possible.
        Ok(Limits {
            ranges: Some(ranges),
            page_sizes: alignment.wrapping_neg(),
            entries_left: None,
        })
    }
}

impl Drop for Iommufd {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // Devices that are still open keep it (EBUSY); closing their descriptors frees it then.
        if let Err(errno) = iommufd::destroy(self.fd.as_fd(), self.ioas) {
            tracing::debug!(%errno, "an address space is freed with its descriptor");
        }
    }
}
