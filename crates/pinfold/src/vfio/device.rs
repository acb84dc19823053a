//! An open device.

use super::bar::Bar;
use super::bdf::Bdf;
use super::error::DeviceError;
use super::irq::{self, Irq};
use super::open::Chosen;
use crate::domain::Domain;
use crate::sys::Errno;
use crate::sys::vfio::{device, layout};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// PCI's command register in configuration space (PCI Local Bus 3.0, 6.2.2), and the bits of it that are used here.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// A PCI device that VFIO gave to this process, in a domain. A handle: a clone is the same device.
///
/// When the last handle, register window and interrupt of it is gone the device is kept from memory (bus mastering off)
/// and closed; the kernel then resets it where it can. Its [domain](Self::domain) may live on.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) bdf: Bdf,
    pub(super) fd: OwnedFd,
    pub(super) domain: Domain,
    pub(super) chosen: Chosen,
    /// A bit for each kind of interrupt that is on.
    pub(super) irqs_on: AtomicU32,
}

/// What configuration space says of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ids {
    /// Who made it.
    pub vendor: u16,
    /// Which it is, by its maker's count.
    pub device: u16,
    /// Base class, sub-class and programming interface: `0x010802` is an NVMe controller.
    pub class: u32,
}

impl Device {
    /// Its address.
    pub fn address(&self) -> Bdf {
        self.0.bdf
    }

    /// The address space that the device reaches: arenas are built in it, buffers are mapped in it.
    pub fn domain(&self) -> &Domain {
        &self.0.domain
    }

    /// How it was opened, and what the kernel allows it.
    pub fn chosen(&self) -> &Chosen {
        &self.0.chosen
    }

    /// What it is.
    ///
    /// # Errors
    /// [`DeviceError`] where configuration space can not be read.
    pub fn ids(&self) -> Result<Ids, DeviceError> {
        let (id, class) = (self.config_u32(0)?, self.config_u32(8)?);
        let [v0, v1, d0, d1] = id.to_le_bytes();
        Ok(Ids {
            vendor: u16::from_le_bytes([v0, v1]),
            device: u16::from_le_bytes([d0, d1]),
            class: class >> 8,
        })
    }

    /// The registers behind a BAR (0 to 5), mapped where the kernel allows it.
    ///
    /// # Errors
    /// [`DeviceError::NoRegion`] where the device has none; [`DeviceError::Kernel`].
    pub fn bar(&self, index: u8) -> Result<Bar, DeviceError> {
        if index > 5 {
            return Err(DeviceError::NoRegion { bdf: self.0.bdf, index: index.into() });
        }
        Bar::new(self.clone(), index.into())
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

    /// Writes configuration space at `offset` bytes. The kernel lets through what does not endanger others.
    ///
    /// # Errors
    /// [`DeviceError::Outside`], [`DeviceError::Kernel`].
    pub fn config_write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        self.0.region(layout::CONFIG_REGION)?.write(&self.0, offset, from)
    }

    /// Lets the device reach memory, or keeps it from all memory. Decoding of its registers is switched on with it.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`].
    pub fn set_bus_master(&self, on: bool) -> Result<(), DeviceError> {
        self.0.set_bus_master(on)
    }

    /// Resets the device. It does no DMA afterwards, until it is set up again.
    ///
    /// # Errors
    /// [`DeviceError::NoReset`] where it can not be reset by itself; [`DeviceError::Kernel`].
    pub fn reset(&self) -> Result<(), DeviceError> {
        let fd = self.0.fd.as_fd();
        let can = device::can_reset(fd).map_err(|e| self.0.failed("VFIO_DEVICE_GET_INFO", e))?;
        if !can {
            return Err(DeviceError::NoReset(self.0.bdf));
        }
        device::reset(fd).map_err(|e| self.0.failed("VFIO_DEVICE_RESET", e))
    }

    /// How many interrupts by message (MSI-X, else MSI) it has.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`].
    pub fn max_interrupts(&self) -> Result<u32, DeviceError> {
        irq::kind(&self.0).map(|(_, count)| count)
    }

    /// Switches the device's first `count` interrupts by message (MSI-X, else MSI) on, each with an eventfd. All that
    /// will be used must be asked for at once. They are switched off when the last of them is dropped.
    ///
    /// # Errors
    /// [`DeviceError::Interrupts`] where there are fewer; [`DeviceError::InterruptsOn`] where some of them are on; [`DeviceError::Kernel`].
    pub fn interrupts(&self, count: u32) -> Result<Vec<Irq>, DeviceError> {
        irq::enable(&self.0, count)
    }

    /// What is raised when the kernel asks for the device back, because it is being unplugged or unbound. The kernel
    /// waits, and asks again from time to time, until the device is closed. Linux 4.0.
    ///
    /// # Errors
    /// [`DeviceError::Interrupts`] where the kernel does not tell; [`DeviceError::Kernel`].
    pub fn request(&self) -> Result<Irq, DeviceError> {
        irq::request(&self.0)
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
        let region =
            device::region(self.fd(), index).map_err(|e| self.failed("VFIO_DEVICE_GET_REGION_INFO", e))?;
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
        let new = if on { old | COMMAND_MEMORY | COMMAND_BUS_MASTER } else { old & !COMMAND_BUS_MASTER };
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
    fn place(&self, offset: u64, len: usize) -> Result<u64, DeviceError> {
        let outside = DeviceError::Outside { index: self.index, offset, len, size: self.region.size };
        let end = offset.checked_add(len as u64);
        let inside = end.is_some_and(|end| end <= self.region.size);
        self.region.offset.checked_add(offset).filter(|_| inside).ok_or(outside)
    }

    /// Reads; what is within 1, 2, 4 or 8 bytes and aligned is one access of the device.
    pub(super) fn read(&self, of: &Inner, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        let (at, len) = (self.place(offset, to.len())?, to.len());
        let got = rustix::io::pread(of.fd(), to, at).map_err(|e| of.failed("pread", e.into()))?;
        if got == len { Ok(()) } else { Err(of.failed("pread", Errno::new(libc::EIO))) }
    }

    /// Writes, likewise.
    pub(super) fn write(&self, of: &Inner, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        let at = self.place(offset, from.len())?;
        let put = rustix::io::pwrite(of.fd(), from, at).map_err(|e| of.failed("pwrite", e.into()))?;
        if put == from.len() { Ok(()) } else { Err(of.failed("pwrite", Errno::new(libc::EIO))) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Nobody is left who could use what the device would still write.
        if let Err(error) = self.set_bus_master(false) {
            tracing::debug!(%error, "bus mastering was not switched off; closing the device does it");
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("bdf", &self.0.bdf)
            .field("way", &self.0.chosen.way)
            .finish_non_exhaustive()
    }
}
