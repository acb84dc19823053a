//! An open device, the options for opening it, and its errors.

use crate::backend::context::{DeviceFd, IommuInterface, Limits};
use crate::backend::error::DeviceError;
use crate::domain::Domain;
use crate::pci::Bdf;
use crate::sys::Errno;
use crate::sys::files::Roots;
use crate::sys::vfio::{device, layout};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// The command register in PCI configuration space (PCI Local Bus 3.0, 6.2.2), and its bits used
/// here.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// A PCI device opened through VFIO, in a domain. A handle: a clone is the same device.
///
/// Dropping the last handle, register window and interrupt of the device switches its bus mastering
/// off and closes it; the kernel then resets it if it can. Its [domain](Self::domain) may outlive
/// it.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) bdf: Bdf,
    pub(super) fd: DeviceFd,
    pub(super) domain: Domain,
    pub(super) attachment: Attachment,
    /// One bit for each kind of interrupt that is enabled.
    pub(super) irqs_on: AtomicU32,
}

/// The identification of a device, from configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ids {
    /// The vendor.
    pub vendor: u16,
    /// The vendor's number of the device.
    pub device: u16,
    /// Base class, sub-class and programming interface: `0x010802` is an NVMe controller.
    pub class: u32,
}

impl Device {
    /// Returns its address.
    pub fn address(&self) -> Bdf {
        self.0.bdf
    }

    /// Returns the address space of the device: arenas are built in it, buffers are mapped in it.
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// Returns how the device is attached to its IOMMU, and the addresses that the kernel
    /// translates for it.
    pub fn attachment(&self) -> &Attachment {
        &self.0.attachment
    }

    /// Reads its identification.
    ///
    /// # Errors
    /// [`DeviceError`] if configuration space cannot be read.
    pub fn ids(&self) -> Result<Ids, DeviceError> {
        let (id, class) = (self.config_u32(0)?, self.config_u32(8)?);
        let [v0, v1, d0, d1] = id.to_le_bytes();
        Ok(Ids {
            vendor: u16::from_le_bytes([v0, v1]),
            device: u16::from_le_bytes([d0, d1]),
            class: class >> 8,
        })
    }

    /// Reads 32 bits of configuration space at `offset` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Outside`], [`DeviceError::Kernel`].
    pub fn config_u32(&self, offset: u64) -> Result<u32, DeviceError> {
        let mut bytes = [0; 4];
        self.config_read(offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads configuration space at `offset` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Outside`], [`DeviceError::Kernel`].
    pub fn config_read(&self, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        self.0.region(layout::CONFIG_REGION)?.read(&self.0, offset, to)
    }

    /// Writes configuration space at `offset` bytes. The kernel filters writes that would endanger
    /// other devices.
    ///
    /// # Errors
    /// [`DeviceError::Outside`], [`DeviceError::Kernel`].
    pub fn config_write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        self.0.region(layout::CONFIG_REGION)?.write(&self.0, offset, from)
    }

    /// Switches bus mastering (the device's access to memory) on or off. Decoding of its registers
    /// is switched on with it.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`].
    pub fn set_bus_master(&self, on: bool) -> Result<(), DeviceError> {
        self.0.set_bus_master(on)
    }

    /// Resets the device. It does no DMA afterwards until it is set up again.
    ///
    /// # Errors
    /// [`DeviceError::NoReset`] if it cannot be reset alone; [`DeviceError::Kernel`].
    pub fn reset(&self) -> Result<(), DeviceError> {
        let fd = self.0.fd.as_fd();
        let can = device::can_reset(fd).map_err(|e| self.0.failed("VFIO_DEVICE_GET_INFO", e))?;
        if !can {
            return Err(DeviceError::NoReset(self.0.bdf));
        }
        device::reset(fd).map_err(|e| self.0.failed("VFIO_DEVICE_RESET", e))
    }
}

impl Inner {
    pub(super) fn failed(&self, call: &'static str, errno: Errno) -> DeviceError {
        DeviceError::Kernel { call, bdf: self.bdf, errno }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn region(&self, index: u32) -> Result<Region, DeviceError> {
        let region = device::region(self.fd(), index)
            .map_err(|e| self.failed("VFIO_DEVICE_GET_REGION_INFO", e))?;
        if region.size == 0 {
            return Err(DeviceError::NoRegion { bdf: self.bdf, index });
        }
        Ok(Region { index, region })
    }

    fn set_bus_master(&self, on: bool) -> Result<(), DeviceError> {
        let config = self.region(layout::CONFIG_REGION)?;
        let mut bytes = [0; 2];
        config.read(self, COMMAND, &mut bytes)?;
        let old = u16::from_le_bytes(bytes);
        let new =
            if on { old | COMMAND_MEMORY | COMMAND_BUS_MASTER } else { old & !COMMAND_BUS_MASTER };
        if new == old { Ok(()) } else { config.write(self, COMMAND, &new.to_le_bytes()) }
    }
}

/// A region reached by `pread` and `pwrite`.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) index: u32,
    pub(super) region: device::Region,
}

impl Region {
    /// Returns where the access is in the device's file, if it is inside the region.
    fn position(&self, offset: u64, len: usize) -> Result<u64, DeviceError> {
        let outside =
            DeviceError::Outside { index: self.index, offset, len, size: self.region.size };
        let end = offset.checked_add(len as u64);
        let inside = end.is_some_and(|end| end <= self.region.size);
        self.region.offset.checked_add(offset).filter(|_| inside).ok_or(outside)
    }

    /// Reads from the region; an aligned read of 1, 2, 4 or 8 bytes is one access to the device.
    pub(super) fn read(&self, of: &Inner, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        let (at, len) = (self.position(offset, to.len())?, to.len());
        let got = rustix::io::pread(of.fd(), to, at).map_err(|e| of.failed("pread", e.into()))?;
        if got == len { Ok(()) } else { Err(of.failed("pread", Errno::new(libc::EIO))) }
    }

    /// Writes, as [`read`](Self::read) does.
    pub(super) fn write(&self, of: &Inner, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        let at = self.position(offset, from.len())?;
        let put =
            rustix::io::pwrite(of.fd(), from, at).map_err(|e| of.failed("pwrite", e.into()))?;
        if put == from.len() { Ok(()) } else { Err(of.failed("pwrite", Errno::new(libc::EIO))) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // No handle is left, so nothing may receive what the device would still write.
        if let Err(error) = self.set_bus_master(false) {
            tracing::debug!(%error, "cannot switch bus mastering off; closing the device does");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("bdf", &self.0.bdf)
            .field("interface", &self.0.attachment.interface)
            .finish_non_exhaustive()
    }
}

// Options for opening a device, and the attachment that was chosen.

/// The options for opening a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    pub(super) interface: IommuInterface,
    /// Whether the caller has taken responsibility for a device without an IOMMU.
    pub(super) acknowledged: bool,
    pub(super) iova_bits: u32,
    pub(super) roots: Roots,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            interface: IommuInterface::default(),
            acknowledged: false,
            iova_bits: 64,
            roots: Roots::default(),
        }
    }
}

impl Options {
    /// Returns the default: [`IommuInterface::Best`], and a device that issues addresses of 64
    /// bits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens by this interface only. [`IommuInterface::NoIommu`] is refused: see
    /// [`without_iommu`](Self::without_iommu).
    #[must_use]
    pub fn interface(mut self, interface: IommuInterface) -> Self {
        self.interface = interface;
        self
    }

    /// Opens by [`IommuInterface::NoIommu`]: nothing translates the device's accesses, and nothing
    /// protects against them.
    ///
    /// # Safety
    /// A device opened with these options, or with a clone of them, reaches all memory of the
    /// machine at its physical address. For each such device the caller guarantees, until its bus
    /// mastering is off for good, that
    /// - it makes only the accesses that its driver requested;
    /// - all code with a handle to the device, its registers or its domain is trusted with all
    ///   physical memory, and passes to the device only addresses of live mappings of that domain,
    ///   or of live arenas in it;
    /// - no mapping ends and no arena is dropped while the device may still use the addresses: a
    ///   revocation, an unmap and a quarantine do not stop it.
    #[must_use]
    pub unsafe fn without_iommu(mut self) -> Self {
        (self.interface, self.acknowledged) = (IommuInterface::NoIommu, true);
        self
    }

    /// Sets how many address bits the device issues, 13 to 64: no address beyond is allocated.
    #[must_use]
    pub fn iova_bits(mut self, bits: u32) -> Self {
        self.iova_bits = bits;
        self
    }
}

/// The attachment of a device to its IOMMU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attachment {
    /// The interface: never [`IommuInterface::Best`].
    pub interface: IommuInterface,
    /// The reason for this interface, in a few words.
    pub reason: String,
    /// The limits of the kernel's translation.
    pub limits: Limits,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match self.limits.entries_left {
            Some(entries) => write!(f, "; at most {entries} mappings"),
            None => Ok(()),
        }
    }
}
