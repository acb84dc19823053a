//! A real controller behind VFIO: its registers in BAR0, its MSI-X interrupts, and its domain.
//!
//! ```no_run
//! use pinfold::{Arena, MappingPolicy};
//! use pinfold_nvme::driver::{Config, Controller};
//! use pinfold_nvme::vfio::PciController;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // After `pinfold bind 0000:01:00.0`:
//! let pci = PciController::open("0000:01:00.0", &Default::default(), 2)?;
//! let rings = Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::Whole);
//! let rings = rings.build(pci.domain())?;
//! let controller = Controller::start(pci.registers(), rings, Config::default())?;
//! let mut queue = match pci.vector(1) {
//!     Some(vector) => controller.create_queue_with(64, vector)?,
//!     None => controller.create_queue(64)?, // polled
//! };
//! # let _ = &mut queue;
//! # Ok(())
//! # }
//! ```

use crate::driver::{self, Error, Vector};
use crate::interrupt::Interrupt;
use crate::registers::Registers;
use crate::spec::offset;
use pinfold::Domain;
use pinfold::pci::Bdf;
use pinfold::vfio::{Bar, Device, DeviceError, Irq, OpenError, Options};
use pinfold_core::domain::DomainId;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Base class, sub-class and programming interface of an NVMe I/O controller.
const NVME_CLASS: u32 = 0x01_0802;

/// Why a controller could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PciError {
    /// The device, or its unit, could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A call to the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device is not an NVMe controller.
    #[error("{bdf} is not an NVMe controller: its class is {class:06x}, not 010802")]
    Class {
        /// The device.
        bdf: Bdf,
        /// Its class.
        class: u32,
    },
    /// BAR0 is too small.
    #[error("{bdf} has {bytes} bytes of registers: a controller has at least 4104")]
    Registers {
        /// The device.
        bdf: Bdf,
        /// The size of BAR0.
        bytes: u64,
    },
    /// The controller could not be disabled.
    #[error("{bdf}: {error}")]
    Driver {
        /// The device.
        bdf: Bdf,
        /// The cause.
        error: Error,
    },
}

// Conditions for taking over a function, independent of who opened it.

pub(crate) fn check_class(bdf: Bdf, class: u32) -> Result<(), PciError> {
    if class == NVME_CLASS { Ok(()) } else { Err(PciError::Class { bdf, class }) }
}

/// Where there is no reset, disabling the controller suffices.
pub(crate) fn check_reset(reset: Result<(), DeviceError>) -> Result<(), PciError> {
    match reset {
        Ok(()) | Err(DeviceError::NoReset(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn check_registers(bdf: Bdf, bytes: u64) -> Result<(), PciError> {
    match bytes < u64::from(offset::DOORBELLS) + 8 {
        true => Err(PciError::Registers { bdf, bytes }),
        false => Ok(()),
    }
}

/// A controller opened through VFIO. A handle: a clone is the same controller.
///
/// It can access memory from [`open`](Self::open) until the last handle and the last of its
/// registers are dropped; then bus mastering is disabled.
#[derive(Clone, Debug)]
pub struct PciController {
    registers: Arc<PciRegisters>,
    vectors: Vec<Arc<Irq>>,
}

impl PciController {
    /// Opens the controller at `address`, as [`from_device`](Self::from_device) does.
    ///
    /// # Errors
    /// [`PciError`]; the device is closed again.
    pub fn open(address: &str, options: &Options, vectors: u32) -> Result<Self, PciError> {
        Self::from_device(Device::open(address, options)?, vectors)
    }

    /// Takes over an open device, of which nothing else may be in use. It is reset where it
    /// supports that, and disabled, before it may access memory, so that nothing an earlier program
    /// left running continues. It gets as many interrupts as it has, at most `vectors`.
    ///
    /// # Errors
    /// [`PciError`]; this handle of the device is dropped.
    pub fn from_device(device: Device, vectors: u32) -> Result<Self, PciError> {
        let bdf = device.address();
        check_class(bdf, device.ids()?.class)?;
        check_reset(device.reset())?;
        let bar = device.bar(0)?;
        check_registers(bdf, bar.len())?;
        let request = device
            .request()
            .inspect_err(|error| tracing::debug!(%error, "removal requests are not reported"));
        let registers = Arc::new(PciRegisters {
            bar,
            request: request.ok(),
            removal_requested: AtomicBool::new(false),
        });
        driver::disable_controller(registers.clone())
            .map_err(|error| PciError::Driver { bdf, error })?;
        let vectors = match device.max_interrupts()?.min(vectors) {
            0 => Vec::new(),
            count => device.interrupts(count)?.into_iter().map(Arc::new).collect(),
        };
        device.set_bus_master(true)?;
        Ok(Self { registers, vectors })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        self.registers.bar.device()
    }

    /// Returns the domain of the device.
    pub fn domain(&self) -> &Domain {
        self.device().domain()
    }

    /// Returns the registers.
    pub fn registers(&self) -> Arc<PciRegisters> {
        self.registers.clone()
    }

    /// Returns the interrupt vector with this number, if there is one. Vector 0 is also the admin
    /// queue's.
    pub fn vector(&self, number: u16) -> Option<Vector> {
        let interrupt: Arc<dyn Interrupt> = self.vectors.get(usize::from(number))?.clone();
        Some(Vector { number, interrupt })
    }
}

/// The registers of a controller behind VFIO.
#[derive(Debug)]
pub struct PciRegisters {
    bar: Bar,
    /// Raised when the kernel requests the device.
    request: Option<Irq>,
    removal_requested: AtomicBool,
}

impl Registers for PciRegisters {
    #[inline]
    fn read32(&self, offset: u32) -> u32 {
        self.bar.read32(offset.into()).unwrap_or(u32::MAX)
    }

    #[inline]
    fn read64(&self, offset: u32) -> u64 {
        self.bar.read64(offset.into()).unwrap_or(u64::MAX)
    }

    #[inline]
    fn write32(&self, offset: u32, value: u32) {
        // On a bus an invalid write is lost without an error.
        let _ = self.bar.write32(offset.into(), value);
    }

    #[inline]
    fn write64(&self, offset: u32, value: u64) {
        let _ = self.bar.write64(offset.into(), value);
    }

    fn domain(&self) -> Option<DomainId> {
        Some(self.bar.device().domain().id())
    }

    fn is_removal_requested(&self) -> bool {
        let asks = |request: &Irq| request.take().is_ok_and(|times| times > 0);
        if self.request.as_ref().is_some_and(asks) {
            self.removal_requested.store(true, Ordering::Relaxed);
        }
        self.removal_requested.load(Ordering::Relaxed)
    }
}

impl Interrupt for Irq {
    fn wait(&self, limit: Duration) -> bool {
        // On an error the caller polls.
        Irq::wait(self, limit).is_ok_and(|times| times > 0)
    }

    fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_an_nvme_controller_is_taken_over() {
        let bdf: Bdf = "0000:01:00.0".parse().unwrap();
        assert!(check_class(bdf, 0x01_08_02).is_ok());
        for class in [0, 0x01_08_01, 0x01_08_03, 0x02_00_00] {
            let refused = check_class(bdf, class);
            assert!(matches!(refused, Err(PciError::Class { class: c, .. }) if c == class));
        }
        assert!(check_registers(bdf, 4104).is_ok() && check_registers(bdf, 1 << 14).is_ok());
        for bytes in [0, 4103] {
            let refused = check_registers(bdf, bytes);
            assert!(matches!(refused, Err(PciError::Registers { bytes: b, .. }) if b == bytes));
        }
    }
}
