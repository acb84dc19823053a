//! iommufd: an address space (IOAS) of `/dev/iommu`, to which devices are attached without groups.
//! Linux 6.6. Memory of a memory file is mapped by that file, where the kernel can (Linux 6.13): the
//! pages are then the file's, whatever the process has at the address.

use super::context::{DeviceFd, IommuContext, IommuInterface, Limits, Selection, select};
use super::error::OpenError;
use super::vfio::open_node;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::iommufd::{self, Ioas};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory that shows a memory file from its start, by the first address.
#[derive(Debug, Default)]
struct LentFiles(BTreeMap<usize, (usize, Arc<OwnedFd>)>);

impl LentFiles {
    /// Returns the file of all of the memory, and where in the file that begins.
    fn find(&self, addr: usize, len: usize) -> Option<(Arc<OwnedFd>, u64)> {
        let (start, (lent, file)) = self.0.range(..=addr).next_back()?;
        let offset = addr - start;
        let fits = offset.checked_add(len)? <= *lent;
        fits.then(|| (Arc::clone(file), offset as u64))
    }
}

/// An address space, and the descriptor it belongs to.
#[derive(Debug)]
pub(crate) struct Iommufd {
    fd: OwnedFd,
    ioas: Ioas,
    files: Mutex<LentFiles>,
    /// Whether the kernel cannot map files.
    no_files: AtomicBool,
    /// Whether it has mapped one.
    by_file: AtomicBool,
    /// Whether it ends with this value; else it is another user's.
    owned: bool,
}

impl Iommufd {
    fn of(fd: OwnedFd, ioas: Ioas, owned: bool) -> Self {
        let (no_files, by_file) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { fd, ioas, files: Mutex::default(), no_files, by_file, owned }
    }

    /// Ignores poisoning: every change is one call.
    fn files(&self) -> MutexGuard<'_, LentFiles> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file to map memory by, and where in the file that begins.
    fn file_of(&self, addr: NonNull<u8>, len: u64) -> Option<(Arc<OwnedFd>, u64)> {
        if self.no_files.load(Ordering::Relaxed) {
            return None;
        }
        self.files().find(addr.addr().get(), usize::try_from(len).ok()?)
    }

    /// Allocates an address space without a device.
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let path = roots.dev.join("iommu");
        let fd = open_node(&path)?;
        let ioas = iommufd::alloc(fd.as_fd())
            .map_err(|e| OpenError::of_call("IOMMU_IOAS_ALLOC", &path, e))?;
        Ok(Self::of(fd, ioas, true))
    }

    /// Uses the address space `ioas` of another user's iommufd, and leaves both as they are when it
    /// ends.
    pub(crate) fn import(fd: BorrowedFd<'_>, ioas: u32) -> Result<(Self, Limits), OpenError> {
        let path = format!("descriptor {}", fd.as_raw_fd());
        let of_call = |call, errno| OpenError::of_call(call, path.as_ref(), errno);
        let fd = rustix::io::fcntl_dupfd_cloexec(fd, 0)
            .map_err(|errno| of_call("F_DUPFD_CLOEXEC", Errno::new(errno.raw_os_error())))?;
        let imported = Self::of(fd, Ioas::existing(ioas), false);
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

    fn open_device(
        &self,
        roots: &Roots,
        device: &PciDevice,
    ) -> Result<Option<DeviceFd>, OpenError> {
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
        Ok(Some(fd.into()))
    }

    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        if let Some((file, start)) = self.file_of(addr, iova.len()) {
            let (fd, file) = (self.fd.as_fd(), file.as_fd());
            // SAFETY: the caller's promise is the one required; whoever has lent the file says that
            // the memory shows it.
            match unsafe { iommufd::map_file(fd, self.ioas, iova, file, start, access) } {
                // Before 6.13, or a kernel without memory files. Not asked again.
                Err(errno) if matches!(errno.raw(), libc::ENOTTY | libc::EOPNOTSUPP) => {
                    self.no_files.store(true, Ordering::Relaxed);
                }
                mapped => {
                    if mapped.is_ok() && !self.by_file.load(Ordering::Relaxed) {
                        self.by_file.store(true, Ordering::Relaxed);
                        tracing::debug!("memory is mapped by its file (IOMMU_IOAS_MAP_FILE)");
                    }
                    return mapped;
                }
            }
        }
        // SAFETY: the caller's promise is the one required.
        unsafe { iommufd::map(self.fd.as_fd(), self.ioas, iova, addr, access) }
    }

    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        iommufd::unmap(self.fd.as_fd(), self.ioas, iova)
    }

    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        // Without a duplicate the memory is mapped by its address.
        if let Ok(file) = rustix::io::fcntl_dupfd_cloexec(file, 0) {
            self.files().0.insert(memory.addr(), (memory.len(), Arc::new(file)));
        }
    }

    /// Forgets the files of earlier memory at these addresses.
    fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let end = memory.addr().saturating_add(memory.len());
        let beside = |start: usize, len: usize| start >= end || start + len <= memory.addr();
        self.files().0.retain(|start, (len, _)| beside(*start, *len));
        Ok(())
    }

    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        self.files().0.remove(&memory.addr());
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_core::addr::Iova;

    fn null() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn memory(addr: usize, len: usize) -> DmaMemory<'static> {
        // SAFETY: never accessed.
        unsafe { DmaMemory::from_raw(NonNull::new(addr as *mut u8).unwrap(), len) }
    }

    #[test]
    fn memory_is_found_by_its_file_if_all_of_it_is_in_it() {
        let iommufd = Iommufd::of(null(), Ioas::existing(1), false);
        iommufd.lend_file(memory(0x10000, 0x4000), null().as_fd());
        iommufd.lend_file(memory(0x20000, 0x1000), null().as_fd());
        let start = |addr, len| {
            let addr = NonNull::new(addr as *mut u8).unwrap();
            iommufd.file_of(addr, len).map(|(_, start)| start)
        };
        assert_eq!(start(0x10000, 0x4000), Some(0));
        assert_eq!(start(0x13000, 0x1000), Some(0x3000));
        assert_eq!(start(0x20000, 0x1000), Some(0));
        for (addr, len) in
            [(0xf000, 0x1000), (0x13000, 0x2000), (0x14000, 0x1000), (0x20000, 0x2000)]
        {
            assert_eq!(start(addr, len), None, "{addr:#x} {len:#x}");
        }
        assert_eq!(start(0x10000, u64::MAX), None);
        // Another memory may be there next.
        iommufd.unregister_memory(memory(0x10000, 0x4000)).unwrap();
        assert_eq!(start(0x10000, 0x4000), None);
        assert_eq!(start(0x20000, 0x1000), Some(0));
        // Also where the last one was not unregistered, because a device may reach it.
        for beside in [0x1f000, 0x21000] {
            iommufd.register_memory(memory(beside, 0x1000)).unwrap();
            assert_eq!(start(0x20000, 0x1000), Some(0));
        }
        iommufd.register_memory(memory(0x1f000, 0x1001)).unwrap();
        assert_eq!(start(0x20000, 0x1000), None);
    }

    /// `/dev/null` knows neither call, as a kernel before 6.13 does not know the first.
    #[test]
    fn a_kernel_that_maps_no_files_is_asked_once() {
        let iommufd = Iommufd::of(null(), Ioas::existing(1), false);
        iommufd.lend_file(memory(0x10000, 0x4000), null().as_fd());
        let addr = NonNull::new(0x10000 as *mut u8).unwrap();
        let iova = IovaRange::new(Iova::new(0x10000), 0x1000).unwrap();
        assert!(iommufd.file_of(addr, 0x1000).is_some());
        // SAFETY: nothing is mapped.
        let refused = unsafe { iommufd.map(iova, addr, Access::READ) };
        assert_eq!(refused, Err(Errno::new(libc::ENOTTY)), "of the second call");
        assert!(iommufd.file_of(addr, 0x1000).is_none());
    }
}
