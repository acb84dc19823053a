//! The interface to a kernel that translates for the devices of a domain.

use super::error::OpenError;
use super::interface::IommuInterface;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// The addresses, page sizes and number of mappings that the kernel supports for a domain.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// The first and the last address of each usable range; `None` if the kernel does not report
    /// them (before 5.4).
    pub ranges: Option<Vec<(u64, u64)>>,
    /// One bit for each page size of the IOMMU.
    pub page_sizes: u64,
    /// How many more mappings the kernel allows; `None` if it sets no limit.
    pub entries_left: Option<u64>,
}

/// An I/O address space in the kernel, and the devices attached to it. `map` and `unmap` are one
/// system call each.
pub(crate) trait IommuContext: Send + Sync {
    /// Returns the kernel's interface; never [`IommuInterface::Best`].
    fn interface(&self) -> IommuInterface;

    /// Returns the name of the backend: `vfio` (that is, type1), `iommufd` or `none`.
    fn name(&self) -> &'static str;

    /// Returns the name of the call behind [`map`](Self::map), for messages.
    fn map_call(&self) -> &'static str;

    /// Returns the command that raises the limit of entries, which is `limit` now.
    fn raise_entries(&self, limit: u64) -> String;

    /// Opens a device and attaches it. Returns `None` if its group is not viable.
    fn open_device(&self, roots: &Roots, device: &PciDevice) -> Result<Option<OwnedFd>, OpenError>;

    /// Pins the memory from `addr`, as long as `iova`, and gives the devices access to it: all or
    /// nothing.
    ///
    /// # Safety
    /// Until [`unmap`](Self::unmap) of the range has returned, or the value and all its devices are
    /// gone, the memory is mapped in this process and no reference into it exists.
    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno>;

    /// Unmaps any number of whole mappings in the range, and returns how many bytes were mapped
    /// there. No device reaches them when it returns.
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno>;

    /// Returns the current limits.
    fn limits(&self) -> Result<Limits, Errno>;

    /// As [`Properties::translates`](pinfold_core::domain::Properties::translates).
    fn translates(&self) -> bool {
        true
    }

    /// Returns whether mapped memory counts against `RLIMIT_MEMLOCK`, because the kernel pins it.
    fn is_charged(&self) -> bool {
        self.translates()
    }

    /// As [`Backend::required_iova`](pinfold_core::domain::Backend::required_iova).
    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }
}
