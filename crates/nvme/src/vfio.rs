//! A real controller, by VFIO: its registers behind BAR0, its interrupts by MSI-X, and the domain that it is in.
//!
//! ```no_run
//! use pinfold::{Arena, MappingPolicy};
//! use pinfold_nvme::driver::{Config, Controller};
//! use pinfold_nvme::vfio::PciController;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pci = PciController::open("0000:01:00.0", &Default::default(), 2)?; // `pinfold bind 0000:01:00.0` before
//! let rings = Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::Whole).build(pci.domain())?;
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

/// Why there is no controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PciError {
    /// The device is not to be had.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A call to the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It is something else.
    #[error("{bdf} is no NVMe controller: its class is {class:06x}, and a controller's is 010802")]
    Class {
        /// The device.
        bdf: Bdf,
        /// What it is.
        class: u32,
    },
    /// Its registers are too few.
    #[error("{bdf} has {bytes} bytes of registers, and a controller has at least 4104")]
    Registers {
        /// The device.
        bdf: Bdf,
        /// How many there are.
        bytes: u64,
    },
    /// It could not be made quiet.
    #[error("{bdf}: {error}")]
    Driver {
        /// The device.
        bdf: Bdf,
        /// Why not.
        error: Error,
    },
}

/// A controller that VFIO gave to this process. A handle: a clone is the same controller.
///
/// It can reach memory from [`open`](Self::open) until the last handle, and the last of its registers, are dropped: then
/// bus mastering is switched off.
#[derive(Clone, Debug)]
pub struct PciController {
    registers: Arc<PciRegisters>,
    vectors: Vec<Arc<Irq>>,
}

impl PciController {
    /// Opens the controller at `address` and makes it quiet, whatever a program before left running in it: it is reset
    /// where it can be by itself, and disabled, before it may reach memory. It gets as many interrupts as it has, at most
    /// `vectors`.
    ///
    /// # Errors
    /// [`PciError`]; the device is closed again.
    pub fn open(address: &str, options: &Options, vectors: u32) -> Result<Self, PciError> {
        let device = Device::open(address, options)?;
        let bdf = device.address();
        let class = device.ids()?.class;
        if class != NVME_CLASS {
            return Err(PciError::Class { bdf, class });
        }
        match device.reset() {
            // Disabling it, below, does what is needed.
            Ok(()) | Err(DeviceError::NoReset(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let bar = device.bar(0)?;
        if bar.len() < u64::from(offset::DOORBELLS) + 8 {
            return Err(PciError::Registers { bdf, bytes: bar.len() });
        }
        let request =
            device.request().inspect_err(|error| tracing::debug!(%error, "no word of an unplugging"));
        let registers =
            Arc::new(PciRegisters { bar, request: request.ok(), removal_requested: AtomicBool::new(false) });
        driver::disable_controller(registers.clone()).map_err(|error| PciError::Driver { bdf, error })?;
        let vectors = match device.max_interrupts()?.min(vectors) {
            0 => Vec::new(),
            count => device.interrupts(count)?.into_iter().map(Arc::new).collect(),
        };
        device.set_bus_master(true)?;
        Ok(Self { registers, vectors })
    }

    /// Where it is.
    pub fn address(&self) -> Bdf {
        self.device().address()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.registers.bar.device()
    }

    /// The address space that it reaches.
    pub fn domain(&self) -> &Domain {
        self.device().domain()
    }

    /// Its registers.
    pub fn registers(&self) -> Arc<PciRegisters> {
        self.registers.clone()
    }

    /// How many interrupts it was given.
    pub fn vectors(&self) -> usize {
        self.vectors.len()
    }

    /// The interrupt with this number, if it was given so many. Number 0 is the admin queue's as well.
    pub fn vector(&self, number: u16) -> Option<Vector> {
        let interrupt: Arc<dyn Interrupt> = self.vectors.get(usize::from(number))?.clone();
        Some(Vector { number, interrupt })
    }
}

/// The registers of a controller behind VFIO.
#[derive(Debug)]
pub struct PciRegisters {
    bar: Bar,
    /// Raised when the kernel asks for the device back.
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
        // On a bus a write to nowhere is lost, and says nothing.
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
