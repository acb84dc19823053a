//! Access to a controller's registers.

use pinfold_core::domain::DomainId;

/// A controller's registers (PCI BAR0), accessed at byte offsets.
///
/// Implemented by [`PciRegisters`](crate::vfio::PciRegisters) and by the model controller. Accesses
/// are ordered as the calls are: a doorbell written by [`write32`](Self::write32) must not overtake
/// earlier stores to memory.
///
/// A device that is gone reads as all ones; the driver checks for `CSTS == !0`. An offset outside
/// the registers also reads as all ones, and writes to it are lost: a bus returns no errors.
pub trait Registers: Send + Sync {
    /// Reads the 32 bits at `offset` bytes.
    fn read32(&self, offset: u32) -> u32;
    /// Reads the 64 bits at `offset` bytes.
    fn read64(&self, offset: u32) -> u64;
    /// Writes the 32 bits at `offset` bytes.
    fn write32(&self, offset: u32, value: u32);
    /// Writes the 64 bits at `offset` bytes.
    fn write64(&self, offset: u32, value: u64);

    /// Returns the device's domain; `None` where that is no
    /// [`Domain`](pinfold_core::domain::Domain). Only memory of that domain is passed to the
    /// controller.
    fn domain(&self) -> Option<DomainId> {
        None
    }

    /// Returns whether the system requests the device: it still works, and is removed once it is
    /// released. The driver checks this periodically, not for each command.
    fn is_removal_requested(&self) -> bool {
        false
    }
}

impl<R: Registers + ?Sized> Registers for std::sync::Arc<R> {
    fn read32(&self, offset: u32) -> u32 {
        (**self).read32(offset)
    }
    fn read64(&self, offset: u32) -> u64 {
        (**self).read64(offset)
    }
    fn write32(&self, offset: u32, value: u32) {
        (**self).write32(offset, value);
    }
    fn write64(&self, offset: u32, value: u64) {
        (**self).write64(offset, value);
    }
    fn domain(&self) -> Option<DomainId> {
        (**self).domain()
    }
    fn is_removal_requested(&self) -> bool {
        (**self).is_removal_requested()
    }
}
