//! VFIO's type1, version 2 (Linux 4.0): a table that the kernel keeps, in a container
//! (`/dev/vfio/vfio`) with the groups in it.

use super::context::{IommuContext, IommuInterface, Limits};
use super::error::OpenError;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::vfio::{container, layout};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The limit of entries of a kernel that does not report it (since Linux 5.1; before, there was no
/// limit).
pub(crate) const DEFAULT_ENTRIES: u64 = 65_535;

/// A container with type1.
#[derive(Debug)]
pub(crate) struct Type1 {
    container: Container,
    /// What is mapped before the first device: a container without a group has no table. `None` from
    /// that device on.
    early: Mutex<Option<BTreeMap<u64, Early>>>,
}

/// A mapping that the first device finds.
#[derive(Debug)]
struct Early {
    iova: IovaRange,
    /// An exposed address.
    addr: usize,
    access: Access,
}

impl Type1 {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let container = Container::open(roots)?;
        Ok(Self { container, early: Mutex::new(Some(BTreeMap::new())) })
    }

    fn early(&self) -> MutexGuard<'_, Option<BTreeMap<u64, Early>>> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps what was mapped before the container had a table.
    fn map_early(&self, early: &BTreeMap<u64, Early>) -> Result<(), Errno> {
        for Early { iova, addr, access } in early.values() {
            let addr = std::ptr::with_exposed_provenance_mut(*addr);
            let addr = NonNull::new(addr).ok_or(Errno::new(libc::EFAULT))?;
            // SAFETY: the caller of `map` promises it until `unmap` has returned, which waits for
            // the lock that is held here, and would have removed the entry before.
            unsafe { container::map(self.container.fd(), *iova, addr, *access) }?;
        }
        Ok(())
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
        let mut early = self.early();
        let opened = self.container.open_device(roots, device, layout::TYPE1_V2)?;
        if let (Some(mappings), Some(_)) = (&*early, &opened) {
            if let Err(errno) = self.map_early(mappings) {
                drop(opened);
                self.container.leave();
                let path = roots.dev.join("vfio/vfio");
                return Err(OpenError::of_call("VFIO_IOMMU_MAP_DMA", &path, errno));
            }
            *early = None;
        }
        Ok(opened)
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        if let Some(early) = &mut *self.early() {
            let addr = addr.as_ptr().expose_provenance();
            early.insert(iova.start().raw(), Early { iova, addr, access });
            return Ok(());
        }
        // SAFETY: the caller's promise is the one required.
        unsafe { container::map(self.container.fd(), iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        if let Some(early) = &mut *self.early() {
            let gone = early.extract_if(iova.start().raw()..iova.end().raw(), |_, _| true);
            return Ok(gone.map(|(_, mapping)| mapping.iova.len()).sum());
        }
        container::unmap(self.container.fd(), iova)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let info = container::info(self.container.fd())?;
        Ok(Limits {
            ranges: info.ranges,
            page_sizes: info.page_sizes,
            entries_left: Some(info.entries_left.unwrap_or(DEFAULT_ENTRIES)),
        })
    }
}

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

    /// Removes all groups, none of whose devices is open: the container then has no table.
    fn leave(&self) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).clear();
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

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::addr::Iova;

    fn range(page: u64, pages: u64) -> IovaRange {
        IovaRange::new(Iova::new(page * 4096), pages * 4096).unwrap()
    }

    #[test]
    fn what_is_unmapped_before_the_first_device_is_not_mapped_for_it() {
        // It answers no call of VFIO.
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        let container = Container { fd, groups: Mutex::new(Vec::new()) };
        let type1 = Type1 { container, early: Mutex::new(Some(BTreeMap::new())) };
        for (page, pages) in [(1, 2), (3, 1), (8, 4)] {
            // SAFETY: no device reaches it, and the address is not followed.
            unsafe { type1.map(range(page, pages), NonNull::dangling(), Access::READ) }.unwrap();
        }
        assert_eq!(type1.unmap(range(1, 3)), Ok(3 * 4096));
        assert_eq!(type1.unmap(range(1, 3)), Ok(0));
        let left = |early: &BTreeMap<u64, Early>| early.values().map(|one| one.iova).collect();
        let iovas: Option<Vec<_>> = type1.early().as_ref().map(left);
        assert_eq!(iovas, Some(vec![range(8, 4)]));
        // From the first device on the kernel is asked.
        *type1.early() = None;
        assert_eq!(type1.unmap(range(8, 4)), Err(Errno::new(libc::ENOTTY)));
        // SAFETY: as above; the call is refused.
        let refused = unsafe { type1.map(range(1, 1), NonNull::dangling(), Access::READ) };
        assert_eq!(refused, Err(Errno::new(libc::ENOTTY)));
    }
}
