//! VFIO's container (`/dev/vfio/vfio`): one address space, and the groups in it.

use super::error::OpenError;
use crate::pci::lookup::PciDevice;
use crate::sys::files::Roots;
use crate::sys::vfio::{container, layout};
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A container. Closing its last descriptor unmaps everything, also when the process is killed.
#[derive(Debug)]
pub(super) struct Container {
    fd: OwnedFd,
    /// Groups stay as long as the container: one of their devices may be opened again.
    groups: Mutex<Vec<(u32, OwnedFd)>>,
}

impl Container {
    /// Opens a container without a group, which can do nothing yet.
    pub(super) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let path = roots.dev.join("vfio/vfio");
        let fd = open_node(&path)?;
        let version = container::api_version(fd.as_fd())
            .map_err(|e| OpenError::of_call("VFIO_GET_API_VERSION", &path, e))?;
        if version != layout::API_VERSION {
            return Err(OpenError::Version(version));
        }
        Ok(Self { fd, groups: Mutex::new(Vec::new()) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Opens the device, after adding its group to the container if it is not in it yet.
    ///
    /// Returns `None` if the group is not viable.
    pub(super) fn open_device(
        &self,
        roots: &Roots,
        device: &PciDevice,
        kind: u32,
    ) -> Result<Option<OwnedFd>, OpenError> {
        let group = device.group.as_ref().ok_or(OpenError::NoIommu(device.bdf))?;
        let Ok(name) = CString::new(device.bdf.to_string()) else { return Ok(None) };
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let path = group.node(roots);
        let failed = |call| {
            let path = &path;
            move |errno| OpenError::of_call(call, path, errno)
        };
        if let Some((_, fd)) = groups.iter().find(|(number, _)| *number == group.number) {
            let device = container::device(fd.as_fd(), &name);
            return device.map(Some).map_err(failed("VFIO_GROUP_GET_DEVICE_FD"));
        }
        let fd = open_node(&path)?;
        if !container::is_viable(fd.as_fd()).map_err(failed("VFIO_GROUP_GET_STATUS"))? {
            return Ok(None);
        }
        container::set_container(fd.as_fd(), self.fd())
            .map_err(failed("VFIO_GROUP_SET_CONTAINER"))?;
        // A failure from here on closes the group's descriptor, which removes the group from the
        // container.
        if groups.is_empty() {
            self.set_iommu(kind, &path)?;
        }
        let device =
            container::device(fd.as_fd(), &name).map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
        groups.push((group.number, fd));
        Ok(Some(device))
    }

    fn set_iommu(&self, kind: u32, path: &Path) -> Result<(), OpenError> {
        let supported = container::has_extension(self.fd(), kind);
        if !supported.map_err(|e| OpenError::of_call("VFIO_CHECK_EXTENSION", path, e))? {
            return Err(OpenError::NoModule {
                missing: "VFIO's driver for the IOMMU".to_owned(),
                type1: true,
            });
        }
        container::set_iommu(self.fd(), kind)
            .map_err(|e| OpenError::of_call("VFIO_SET_IOMMU", path, e))
    }
}

/// Opens a device node.
pub(super) fn open_node(path: &Path) -> Result<OwnedFd, OpenError> {
    container::open(path).map_err(|errno| OpenError::of_call("open", path, errno))
}
