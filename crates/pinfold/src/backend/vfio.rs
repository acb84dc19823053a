//! VFIO's type1, version 2 (Linux 4.0): a table that the kernel keeps, in a container
//! (`/dev/vfio/vfio`) with the groups in it.

use super::context::{DeviceFd, IommuContext, IommuInterface, Limits};
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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The limit of entries of a kernel that does not report it (since Linux 5.1; before, there was no
/// limit).
pub(crate) const DEFAULT_ENTRIES: u64 = 65_535;

/// A container with type1.
#[derive(Debug)]
pub(crate) struct Type1(Arc<Shared>);

/// The state that a container shares with its devices.
#[derive(Debug)]
struct Shared {
    container: Container,
    /// Its lock is taken before that of the container's groups.
    table: Mutex<Mapped>,
}

/// The mappings of a container.
#[derive(Debug)]
enum Mapped {
    /// The container has no group, and so no table: the first device gets these mappings.
    Early(BTreeMap<u64, Early>),
    /// The kernel keeps the table: the bytes mapped there, or about to be.
    InKernel(u64),
}

/// A mapping for the first device.
#[derive(Debug)]
struct Early {
    iova: IovaRange,
    /// An exposed address.
    addr: usize,
    access: Access,
}

impl Type1 {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        Ok(Self::new(Container::open(roots)?))
    }

    fn new(container: Container) -> Self {
        let table = Mutex::new(Mapped::Early(BTreeMap::new()));
        Self(Arc::new(Shared { container, table }))
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Mapped> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the memory that was mapped before the container had a table, and returns its bytes.
    fn map_early(&self, early: &BTreeMap<u64, Early>) -> Result<u64, Errno> {
        let mut mapped = 0;
        for Early { iova, addr, access } in early.values() {
            let addr = std::ptr::with_exposed_provenance_mut(*addr);
            let addr = NonNull::new(addr).ok_or(Errno::new(libc::EFAULT))?;
            // SAFETY: the caller of `map` promises it until `unmap` has returned, which waits for
            // the lock that is held here, and would have removed the entry before.
            unsafe { container::map(self.container.fd(), *iova, addr, *access) }?;
            mapped += iova.len();
        }
        Ok(mapped)
    }

    /// Counts bytes that are unmapped, or were not mapped.
    fn count_unmapped(&self, bytes: u64) {
        let mut table = self.table();
        if let Mapped::InKernel(mapped) = &mut *table {
            *mapped = mapped.saturating_sub(bytes);
        }
        self.close_groups(&mut table, Container::close_unused);
    }

    /// Closes groups by `close`, whose argument is whether it may close all, and whose result is
    /// whether it has.
    fn close_groups(&self, table: &mut Mapped, close: impl FnOnce(&Container, bool) -> bool) {
        // With the last group the kernel unmaps everything: where something is mapped it stays open.
        let is_empty = matches!(table, Mapped::InKernel(0));
        if close(&self.container, is_empty) && is_empty {
            *table = Mapped::Early(BTreeMap::new());
        }
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

    fn open_device(
        &self,
        roots: &Roots,
        device: &PciDevice,
    ) -> Result<Option<DeviceFd>, OpenError> {
        let shared = &self.0;
        let mut table = shared.table();
        let opened = shared.container.open_device(roots, device, layout::TYPE1_V2)?;
        let Some((fd, group)) = opened else { return Ok(None) };
        if let Mapped::Early(early) = &*table {
            match shared.map_early(early) {
                Ok(mapped) => *table = Mapped::InKernel(mapped),
                Err(errno) => {
                    drop(fd);
                    // That unmaps nothing but the maps made just now.
                    shared.container.device_left(group, true);
                    let path = roots.dev.join("vfio/vfio");
                    return Err(OpenError::of_call("VFIO_IOMMU_MAP_DMA", &path, errno));
                }
            }
        }
        let shared = Arc::clone(shared);
        Ok(Some(DeviceFd::new(fd, move || {
            let mut table = shared.table();
            shared.close_groups(&mut table, |container, all| container.device_left(group, all));
        })))
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        match &mut *self.0.table() {
            Mapped::Early(early) => {
                let addr = addr.as_ptr().expose_provenance();
                early.insert(iova.start().raw(), Early { iova, addr, access });
                return Ok(());
            }
            // Before the call, so that the last group stays open.
            Mapped::InKernel(mapped) => *mapped = mapped.saturating_add(iova.len()),
        }
        // SAFETY: the caller's promise is the one required.
        let mapped = unsafe { container::map(self.0.container.fd(), iova, addr, access) };
        if mapped.is_err() {
            self.0.count_unmapped(iova.len());
        }
        mapped
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        if let Mapped::Early(early) = &mut *self.0.table() {
            let gone = early.extract_if(iova.start().raw()..iova.end().raw(), |_, _| true);
            return Ok(gone.map(|(_, mapping)| mapping.iova.len()).sum());
        }
        let bytes = container::unmap(self.0.container.fd(), iova)?;
        self.0.count_unmapped(bytes);
        Ok(bytes)
    }

    fn limits(&self) -> Result<Limits, Errno> {
        let info = container::info(self.0.container.fd())?;
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
    groups: Mutex<Vec<Group>>,
}

/// A group of the container.
#[derive(Debug)]
struct Group {
    number: u32,
    fd: OwnedFd,
    /// The number of its open devices in this container. A group without devices stays open only as
    /// the last one, which keeps the container's table.
    devices: u32,
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

    /// Opens the device, after adding its group to the container if it is not in it yet. Returns its
    /// descriptor and the number of its group, whose device has [left](Self::device_left) when that
    /// is closed.
    ///
    /// Returns `None` if the group is not viable.
    pub(super) fn open_device(
        &self,
        roots: &Roots,
        device: &PciDevice,
        kind: u32,
    ) -> Result<Option<(OwnedFd, u32)>, OpenError> {
        let group = device.group.as_ref().ok_or(OpenError::NoIommu(device.bdf))?;
        let Ok(name) = CString::new(device.bdf.to_string()) else { return Ok(None) };
        let number = group.number;
        let mut groups = self.groups();
        let path = group.node(roots);
        let failed = |call| {
            let path = &path;
            move |errno| OpenError::of_call(call, path, errno)
        };
        if let Some(group) = groups.iter_mut().find(|group| group.number == number) {
            let device = container::device(group.fd.as_fd(), &name);
            let device = device.map_err(failed("VFIO_GROUP_GET_DEVICE_FD"))?;
            group.devices += 1;
            return Ok(Some((device, number)));
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
        add_group(&mut groups, Group { number, fd, devices: 1 });
        Ok(Some((device, number)))
    }

    fn groups(&self) -> MutexGuard<'_, Vec<Group>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a device of a group has been closed, and closes groups as
    /// [`close_unused`](Self::close_unused) does.
    pub(super) fn device_left(&self, number: u32, all: bool) -> bool {
        let mut groups = self.groups();
        if let Some(group) = groups.iter_mut().find(|group| group.number == number) {
            group.devices = group.devices.saturating_sub(1);
        }
        close_unused(&mut groups, all)
    }

    /// Closes the groups that have no open device, so that others can open them; the last one only
    /// if `all` may be closed, which unmaps everything. Returns whether there is no group now: the
    /// container then has no table.
    fn close_unused(&self, all: bool) -> bool {
        close_unused(&mut self.groups(), all)
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

/// Adds a group that has a device. It keeps the container's table from now on, and not one whose
/// devices have left.
fn add_group(groups: &mut Vec<Group>, group: Group) {
    groups.push(group);
    close_unused(groups, false);
}

/// Like [`Container::close_unused`].
fn close_unused(groups: &mut Vec<Group>, all: bool) -> bool {
    let in_use = groups.iter().any(|group| group.devices > 0);
    if in_use || all {
        groups.retain(|group| group.devices > 0);
    } else {
        groups.truncate(1);
    }
    groups.is_empty()
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

    /// A container with groups of `groups` devices each. It answers no call of VFIO.
    fn type1(groups: &[u32]) -> Type1 {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let group = |(number, &devices)| Group { number, fd: null(), devices };
        let groups = (0..).zip(groups).map(group).collect();
        Type1::new(Container { fd: null(), groups: Mutex::new(groups) })
    }

    fn numbers(type1: &Type1) -> Vec<u32> {
        type1.0.container.groups().iter().map(|group| group.number).collect()
    }

    /// Does what dropping a device does.
    fn device_left(type1: &Type1, group: u32) {
        let mut table = type1.0.table();
        type1.0.close_groups(&mut table, |container, all| container.device_left(group, all));
    }

    #[test]
    fn what_is_unmapped_before_the_first_device_is_not_mapped_for_it() {
        let type1 = type1(&[]);
        for (page, pages) in [(1, 2), (3, 1), (8, 4)] {
            // SAFETY: no device reaches it, and the address is not followed.
            unsafe { type1.map(range(page, pages), NonNull::dangling(), Access::READ) }.unwrap();
        }
        assert_eq!(type1.unmap(range(1, 3)), Ok(3 * 4096));
        assert_eq!(type1.unmap(range(1, 3)), Ok(0));
        let Mapped::Early(early) = &*type1.0.table() else { panic!("there was no device") };
        assert!(early.values().map(|one| one.iova).eq([range(8, 4)]));
    }

    #[test]
    fn from_the_first_device_on_the_kernel_is_asked() {
        let type1 = type1(&[1]);
        *type1.0.table() = Mapped::InKernel(4 * 4096);
        assert_eq!(type1.unmap(range(8, 4)), Err(Errno::new(libc::ENOTTY)));
        // SAFETY: no device reaches it; the call is refused.
        let refused = unsafe { type1.map(range(1, 1), NonNull::dangling(), Access::READ) };
        assert_eq!(refused, Err(Errno::new(libc::ENOTTY)));
        assert!(matches!(*type1.0.table(), Mapped::InKernel(bytes) if bytes == 4 * 4096));
    }

    #[test]
    fn a_group_is_closed_with_its_last_device() {
        let type1 = type1(&[2, 1, 1]);
        *type1.0.table() = Mapped::InKernel(4096);
        for (group, left) in [(0, &[0, 1, 2][..]), (1, &[0, 2]), (0, &[2])] {
            device_left(&type1, group);
            assert_eq!(numbers(&type1), left);
        }
        // With the last one everything would be unmapped.
        device_left(&type1, 2);
        assert_eq!(numbers(&type1), [2]);
        assert!(matches!(*type1.0.table(), Mapped::InKernel(4096)));
        // It follows the mapped bytes.
        type1.0.count_unmapped(4095);
        assert_eq!(numbers(&type1), [2]);
        type1.0.count_unmapped(1);
        assert!(numbers(&type1).is_empty());
        let Mapped::Early(early) = &*type1.0.table() else { panic!("no group is left") };
        assert!(early.is_empty());
    }

    #[test]
    fn a_group_that_kept_the_table_is_closed_when_another_has_a_device() {
        let type1 = type1(&[1]);
        *type1.0.table() = Mapped::InKernel(4096);
        device_left(&type1, 0);
        assert_eq!(numbers(&type1), [0]);
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        add_group(&mut type1.0.container.groups(), Group { number: 7, fd, devices: 1 });
        assert_eq!(numbers(&type1), [7]);
    }

    #[test]
    fn the_last_group_is_closed_where_nothing_is_mapped() {
        let type1 = type1(&[1]);
        *type1.0.table() = Mapped::InKernel(0);
        // A device is open: the last mapping does not matter.
        type1.0.count_unmapped(0);
        assert_eq!(numbers(&type1), [0]);
        assert!(matches!(*type1.0.table(), Mapped::InKernel(0)));
        device_left(&type1, 0);
        assert!(numbers(&type1).is_empty());
        assert!(matches!(&*type1.0.table(), Mapped::Early(early) if early.is_empty()));
    }

    #[test]
    fn a_device_leaves_after_it_was_closed() {
        let (reader, writer) = std::io::pipe().unwrap();
        let left = Arc::new(Mutex::new(None));
        let seen = Arc::clone(&left);
        let device = DeviceFd::new(writer.into(), move || {
            // It ends where the other side is closed.
            *seen.lock().unwrap() = Some(rustix::io::read(&reader, &mut [0_u8; 1]));
        });
        assert_eq!(*left.lock().unwrap(), None);
        drop(device);
        assert_eq!(*left.lock().unwrap(), Some(Ok(0)));
    }
}
