//! The way to a controller's registers.

use pinfold_core::domain::DomainId;

/// A controller's register file (PCI BAR0), reached at byte offsets.
///
/// Implemented by [`PciRegisters`](crate::vfio::PciRegisters) and by the model controller. Accesses are ordered as the calls are: a doorbell written by
/// [`write32`](Self::write32) must not overtake what the caller stored to memory before it.
///
/// A device that has vanished reads as all ones; the driver takes `CSTS == !0` for that. An offset outside the
/// register file reads as all ones too and swallows writes: there is no error to return on a bus.
pub trait Registers: Send + Sync {
    /// Reads the 32 bits at `offset` bytes.
    fn read32(&self, offset: u32) -> u32;
    /// Reads the 64 bits at `offset` bytes.
    fn read64(&self, offset: u32) -> u64;
    /// Writes the 32 bits at `offset` bytes.
    fn write32(&self, offset: u32, value: u32);
    /// Writes the 64 bits at `offset` bytes.
    fn write64(&self, offset: u32, value: u64);

    /// The domain that the device is in; `None` where that is no [`Domain`](pinfold_core::domain::Domain). A controller is
    /// only given memory of it.
    fn domain(&self) -> Option<DomainId> {
        None
    }

    /// Whether the system asks for the device back: it still works, but will be taken away as soon as it is let go. The
    /// driver asks now and then, not for each command.
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
