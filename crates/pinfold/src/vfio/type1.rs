//! VFIO's container with the second version of type1: the kernel's table since Linux 4.0.

use super::error::OpenError;
use super::lookup::Group;
use super::mapper::{Limits, Mapper};
use super::open::refused;
use crate::probe::Roots;
use crate::sys::Errno;
use crate::sys::vfio::{container, layout};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// What a container allows where it does not say (since Linux 5.1; before, there was no limit).
pub(crate) const USUAL_ENTRIES: u64 = 65_535;

/// A container: one address space, and the groups in it.
///
/// Closing the last of its descriptors takes everything back that is mapped: also when the process is killed.
#[derive(Debug)]
pub(crate) struct Type1 {
    container: OwnedFd,
    /// Groups stay as long as the container: a device of theirs may be opened again.
    groups: Mutex<Vec<(u32, OwnedFd)>>,
}

impl Type1 {
    /// A container without a group, which can do nothing yet.
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let path = roots.dev.join("vfio/vfio");
        let container = open_node(&path)?;
        let version = container::api_version(container.as_fd())
            .map_err(|e| refused("VFIO_GET_API_VERSION", &path, e))?;
        if version != layout::API_VERSION {
            return Err(OpenError::Version(version));
        }
        Ok(Self { container, groups: Mutex::new(Vec::new()) })
    }

    /// Opens a device of the group, which is put into the container first if it is not there yet.
    ///
    /// `Ok(None)` where the group is not viable.
    pub(crate) fn device(
        &self,
        roots: &Roots,
        group: &Group,
        name: &std::ffi::CStr,
        kind: u32,
    ) -> Result<Option<OwnedFd>, OpenError> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let prefix = if group.unprotected { "noiommu-" } else { "" };
        let path = roots.dev.join(format!("vfio/{prefix}{}", group.number));
        if let Some((_, fd)) = groups.iter().find(|(number, _)| *number == group.number) {
            let device = container::device(fd.as_fd(), name);
            return device.map(Some).map_err(|e| refused("VFIO_GROUP_GET_DEVICE_FD", &path, e));
        }
        let fd = open_node(&path)?;
        let viable = container::is_viable(fd.as_fd());
        if !viable.map_err(|e| refused("VFIO_GROUP_GET_STATUS", &path, e))? {
            return Ok(None);
        }
        let first = groups.is_empty();
        container::set_container(fd.as_fd(), self.container.as_fd())
            .map_err(|e| refused("VFIO_GROUP_SET_CONTAINER", &path, e))?;
        // What fails from here on closes the group's descriptor, which takes the group out of the container.
        if first {
            self.settle(kind, &path)?;
        }
        let device =
            container::device(fd.as_fd(), name).map_err(|e| refused("VFIO_GROUP_GET_DEVICE_FD", &path, e))?;
        groups.push((group.number, fd));
        Ok(Some(device))
    }

    fn settle(&self, kind: u32, path: &Path) -> Result<(), OpenError> {
        let container = self.container.as_fd();
        let has = container::has_extension(container, kind);
        if !has.map_err(|e| refused("VFIO_CHECK_EXTENSION", path, e))? {
            return Err(OpenError::NoModule {
                missing: "VFIO's driver for the IOMMU".to_owned(),
                type1: true,
            });
        }
        container::set_iommu(container, kind).map_err(|e| refused("VFIO_SET_IOMMU", path, e))
    }
}

/// Opens a device node.
pub(crate) fn open_node(path: &Path) -> Result<OwnedFd, OpenError> {
    container::open(path).map_err(|errno| refused("open", path, errno))
}

impl Mapper for Type1 {
    fn name(&self) -> &'static str {
        "vfio"
    }

    fn call(&self) -> &'static str {
        "VFIO_IOMMU_MAP_DMA"
    }

    fn more_entries(&self) -> &'static str {
        "echo 1000000 | sudo tee /sys/module/vfio_iommu_type1/parameters/dma_entry_limit"
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { container::map(self.container.as_fd(), iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        container::unmap(self.container.as_fd(), iova)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let info = container::info(self.container.as_fd())?;
        Ok(Limits {
            ranges: info.ranges,
            page_sizes: info.page_sizes,
            entries_left: Some(info.entries_left.unwrap_or(USUAL_ENTRIES)),
        })
    }
}
