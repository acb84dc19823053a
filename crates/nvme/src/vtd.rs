//! A real controller behind a VT-d unit that the program takes from the kernel ([`pinfold::vtd`];
//! feature `vtd`): its registers in BAR0, and its domain. Its queues are polled.
//!
//! ```no_run
//! use pinfold::{Arena, MappingPolicy};
//! use pinfold_nvme::driver::{Config, Controller};
//! use pinfold_nvme::vtd::UnitController;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // SAFETY: this machine has no other use, and the program is not killed.
//! let device = unsafe { pinfold::vtd::Device::open("0000:01:00.0") }?;
//! let pci = UnitController::from_device(device)?;
//! let rings = Arena::builder().size(4 << 20).mapping_policy(MappingPolicy::Whole);
//! let rings = rings.build(pci.domain())?;
//! let controller = Controller::start(pci.registers(), rings, Config::default())?;
//! let mut queue = controller.create_queue(64)?;
//! # let _ = &mut queue;
//! # Ok(())
//! # }
//! ```

use crate::driver;
use crate::registers::Registers;
use crate::vfio::{PciError, check_class, check_registers, check_reset};
use pinfold::Domain;
use pinfold::vtd::{Bar, Device};
use pinfold_core::domain::DomainId;
use std::sync::Arc;

/// A controller behind a unit of the program's. A handle: a clone is the same controller.
///
/// It can access memory from [`from_device`](Self::from_device) until the last handle and the last
/// of its registers are dropped; then bus mastering is disabled.
#[derive(Clone, Debug)]
pub struct UnitController {
    registers: Arc<UnitRegisters>,
}

impl UnitController {
    /// Takes over an open device, of which nothing else may be in use. It is reset where it
    /// supports that, and disabled, before it may access memory, so that nothing that the kernel's
    /// driver left running continues.
    ///
    /// # Errors
    /// [`PciError`]; this handle of the device is dropped.
    pub fn from_device(device: Device) -> Result<Self, PciError> {
        let bdf = device.address();
        check_class(bdf, device.ids()?.class)?;
        check_reset(device.reset())?;
        let bar = device.bar(0)?;
        check_registers(bdf, bar.len())?;
        let registers = Arc::new(UnitRegisters(bar));
        driver::disable_controller(registers.clone())
            .map_err(|error| PciError::Driver { bdf, error })?;
        device.set_bus_master(true)?;
        Ok(Self { registers })
    }

    /// Returns the domain of the device.
    pub fn domain(&self) -> &Domain {
        self.registers.0.device().domain()
    }

    /// Returns the registers.
    pub fn registers(&self) -> Arc<UnitRegisters> {
        self.registers.clone()
    }
}

/// The registers of a controller behind a unit of the program's.
#[derive(Debug)]
pub struct UnitRegisters(Bar);

impl Registers for UnitRegisters {
    #[inline]
    fn read32(&self, offset: u32) -> u32 {
        self.0.read32(offset.into()).unwrap_or(u32::MAX)
    }

    #[inline]
    fn read64(&self, offset: u32) -> u64 {
        self.0.read64(offset.into()).unwrap_or(u64::MAX)
    }

    #[inline]
    fn write32(&self, offset: u32, value: u32) {
        // On a bus an invalid write is lost without an error.
        let _ = self.0.write32(offset.into(), value);
    }

    #[inline]
    fn write64(&self, offset: u32, value: u64) {
        let _ = self.0.write64(offset.into(), value);
    }

    fn domain(&self) -> Option<DomainId> {
        Some(self.0.device().domain().id())
    }
}
