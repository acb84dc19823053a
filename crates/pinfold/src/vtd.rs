//! A PCI device behind a VT-d unit that this program takes from the kernel (feature `vtd`, x86-64, as
//! root): the program keeps the tables and the queue, and a revocation is a store and a flush
//! instead of a system call.
//!
//! For machines that serve one program, and for experiments. **The whole machine is concerned**: while
//! the unit is enabled, every other device behind it reaches nothing, and if the program is killed,
//! the unit goes on with tables in memory that the kernel gives to others. So opening is `unsafe`.
//! For everything else there is [`vfio`](crate::vfio).
//!
//! ```no_run
//! use pinfold::vtd::Device;
//! use pinfold::{Arena, FromDevice};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Booted with intel_iommu=off intremap=off iomem=relaxed; no kernel driver has the device.
//! // SAFETY: this machine has no other use, and the program is not killed.
//! let device = unsafe { Device::open("0000:01:00.0") }?;
//! let arena = Arena::builder().size(64 << 20).build(device.domain())?;
//! let registers = device.bar(0)?;
//! device.set_bus_master(true)?;
//! let mapping = device.domain().map(arena.alloc(4096)?, FromDevice)?;
//! # let _ = (registers, mapping);
//! # Ok(())
//! # }
//! ```
//!
//! | step | of the kernel |
//! | --- | --- |
//! | registers of the unit | `/dev/mem`, where `/sys/firmware/acpi/tables/DMAR` says |
//! | physical addresses | `/proc/self/pagemap`; the memory is pinned by an io_uring |
//! | tables | hugepages of 2 MiB, which are not freed before the process ends |
//! | registers and bus mastering of the device | `/sys/bus/pci/devices/BDF`: `resource0`, `config` |
//!
//! Interrupts are not set up: a driver polls. Devices for which firmware reserves memory are refused,
//! and devices behind a bridge to conventional PCI, whose identifier their accesses carry; and so is
//! a unit that the kernel has enabled.

mod open;

use crate::backend::vtd::{FlushLines, UnitRegisters};
use crate::domain::{DeviceSide, Domain};
use crate::pci::Bdf;
use crate::sys::Errno;
use crate::sys::window::{Register, Window};
use crate::vfio::{DeviceError, Ids};
use pinfold_vtd::unit::Attachments;
use pinfold_vtd::{SourceId, Unit};
use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

pub use crate::backend::error::OpenError;
pub use pinfold_vtd::fault::{Fault, Reason};

/// The command register in PCI configuration space (PCI Local Bus 3.0, 6.2.2), and its bits used
/// here.
const COMMAND: u64 = 4;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTX: u16 = 1 << 10;

/// A PCI device behind a unit of this program's, in a domain. A handle: a clone is the same device.
///
/// Dropping the last handle and register window of the device switches its bus mastering off and
/// detaches it. The unit is disabled when its [domain](Self::domain) and all memory in it are gone.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    bdf: Bdf,
    source: SourceId,
    /// Its directory in sysfs.
    folder: PathBuf,
    config: File,
    domain: Domain,
}

type HostUnit = Unit<UnitRegisters, FlushLines>;

/// The unit, and what attaches devices to the domain.
struct UnitSide {
    unit: Arc<HostUnit>,
    attachments: Attachments,
}

impl DeviceSide for UnitSide {}

impl UnitSide {
    fn warn(&self, faults: Vec<Fault>) {
        for fault in faults {
            tracing::warn!(%fault, "the unit has refused an access");
        }
    }

    fn warn_of_strays(&self) {
        let (faults, is_short) = self.unit.take_stray_faults();
        self.warn(faults);
        if is_short {
            tracing::warn!("more accesses were refused than there was room to note");
        }
    }
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

    /// Reads its identification.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`] if configuration space cannot be read.
    pub fn ids(&self) -> Result<Ids, DeviceError> {
        let mut head = [0; 12];
        self.0.read_config(0, &mut head)?;
        let [v0, v1, d0, d1, _, _, _, _, _, class @ ..] = head;
        let class = u32::from_le_bytes([class[0], class[1], class[2], 0]);
        Ok(Ids {
            vendor: u16::from_le_bytes([v0, v1]),
            device: u16::from_le_bytes([d0, d1]),
            class,
        })
    }

    /// Switches bus mastering (the device's access to memory) on or off. Decoding of its registers
    /// is switched on with it, and its interrupt line, which nothing would answer, off.
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
        let path = self.0.folder.join("reset");
        if !path.exists() {
            return Err(DeviceError::NoReset(self.0.bdf));
        }
        std::fs::write(path, "1").map_err(|error| self.0.failed("a write to reset", &error))
    }

    /// Returns the registers of a BAR (0 to 5), mapped.
    ///
    /// # Errors
    /// [`DeviceError::NoRegion`] if the device has no such BAR; [`DeviceError::Kernel`].
    pub fn bar(&self, index: u8) -> Result<Bar, DeviceError> {
        let none = DeviceError::NoRegion { bdf: self.0.bdf, index: index.into() };
        if index > 5 {
            return Err(none);
        }
        let path = self.0.folder.join(format!("resource{index}"));
        let file = match File::options().read(true).write(true).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(none),
            file => file.map_err(|error| self.0.failed("open of a BAR", &error))?,
        };
        let size = file.metadata().map_err(|error| self.0.failed("stat of a BAR", &error))?.len();
        let window = Window::new(file.as_fd(), 0, crate::sys::bytes(size));
        let window = window.map_err(|errno| self.0.refused("mmap of a BAR", errno))?;
        Ok(Bar { device: self.clone(), index: index.into(), window })
    }

    /// Returns the device's accesses that the unit has refused since the last call, the oldest first,
    /// and whether it had to leave some out. Those of other devices are logged as warnings.
    pub fn take_faults(&self) -> (Vec<Fault>, bool) {
        let Some(side) = self.0.domain.device_side::<UnitSide>() else {
            return (Vec::new(), false);
        };
        let faults = side.unit.take_faults(&side.attachments);
        // What was left out may have been the device's, and is reported so.
        side.warn_of_strays();
        faults
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("bdf", &self.0.bdf).finish_non_exhaustive()
    }
}

impl Inner {
    fn failed(&self, call: &'static str, error: &std::io::Error) -> DeviceError {
        self.refused(call, Errno::from(error))
    }

    fn refused(&self, call: &'static str, errno: Errno) -> DeviceError {
        DeviceError::Kernel { call, bdf: self.bdf, errno }
    }

    fn read_config(&self, offset: u64, to: &mut [u8]) -> Result<(), DeviceError> {
        let read = self.config.read_exact_at(to, offset);
        read.map_err(|error| self.failed("a read of config", &error))
    }

    fn set_bus_master(&self, on: bool) -> Result<(), DeviceError> {
        let mut bytes = [0; 2];
        self.read_config(COMMAND, &mut bytes)?;
        let old = u16::from_le_bytes(bytes);
        let new = if on {
            old | COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_NO_INTX
        } else {
            old & !COMMAND_BUS_MASTER
        };
        if new == old {
            return Ok(());
        }
        let written = self.config.write_all_at(&new.to_le_bytes(), COMMAND);
        written.map_err(|error| self.failed("a write to config", &error))
    }

    /// Powers the device and its registers on through the kernel, or ends that.
    fn enable(&self, on: bool) -> Result<(), DeviceError> {
        let word = if on { "1" } else { "0" };
        let written = std::fs::write(self.folder.join("enable"), word);
        written.map_err(|error| self.failed("a write to enable", &error))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // No handle is left, so nothing may receive what the device would still write.
        if let Err(error) = self.set_bus_master(false) {
            tracing::error!(%error, "cannot switch bus mastering off");
        }
        if let Some(side) = self.domain.device_side::<UnitSide>() {
            let UnitSide { unit, attachments } = side;
            if let Err(error) = unit.detach(self.source, attachments) {
                tracing::debug!(%error, "not detached");
            }
            let (own, lost) = unit.take_faults(attachments);
            side.warn(own);
            side.warn_of_strays();
            if lost {
                tracing::warn!("the unit has refused an access, and had no record free for it");
            }
        }
        if let Err(error) = self.enable(false) {
            tracing::debug!(%error, "the device stays enabled");
        }
    }
}

/// The registers of a BAR, mapped into this process.
///
/// Registers are little-endian on the bus; values here are the host's. An access is volatile, has
/// exactly the width of the call, and a write is ordered after all earlier stores of the thread to
/// memory. A device that is unplugged reads as all ones.
#[derive(Debug)]
pub struct Bar {
    device: Device,
    index: u32,
    window: Window,
}

impl Bar {
    /// Returns its size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an existing BAR is not empty")]
    pub fn len(&self) -> u64 {
        self.window.len() as u64
    }

    /// Returns its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn outside(&self, offset: u64, len: usize) -> DeviceError {
        DeviceError::Outside { index: self.index, offset, len, size: self.len() }
    }

    #[inline]
    fn read<T: Register>(&self, offset: u64) -> Result<T, DeviceError> {
        let at = usize::try_from(offset).ok();
        at.and_then(|at| self.window.read(at)).ok_or_else(|| self.outside(offset, size_of::<T>()))
    }

    #[inline]
    fn write<T: Register>(&self, offset: u64, value: T) -> Result<(), DeviceError> {
        let at = usize::try_from(offset).ok();
        let written = at.and_then(|at| self.window.write(at, value));
        written.ok_or_else(|| self.outside(offset, size_of::<T>()))
    }

    /// Reads the 32 bits at `offset` bytes.
    ///
    /// # Errors
    /// [`DeviceError::Outside`] if they are not inside or not aligned.
    #[inline]
    pub fn read32(&self, offset: u64) -> Result<u32, DeviceError> {
        self.read(offset)
    }

    /// Reads the 64 bits at `offset` bytes.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn read64(&self, offset: u64) -> Result<u64, DeviceError> {
        self.read(offset)
    }

    /// Writes the 32 bits at `offset` bytes.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn write32(&self, offset: u64, value: u32) -> Result<(), DeviceError> {
        self.write(offset, value)
    }

    /// Writes the 64 bits at `offset` bytes.
    ///
    /// # Errors
    /// As for [`read32`](Self::read32).
    #[inline]
    pub fn write64(&self, offset: u64, value: u64) -> Result<(), DeviceError> {
        self.write(offset, value)
    }
}
