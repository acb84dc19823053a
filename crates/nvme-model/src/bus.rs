//! The model controller's only access to memory: a bus, such as the port of a software IOMMU.

use core::fmt;
use pinfold::soft::Port;
use pinfold_core::addr::Iova;
use pinfold_core::domain::DomainId;
use std::sync::Arc;

/// A faulted access: nothing is mapped there, or not for this kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a device's {kind} of {len} bytes at {iova} faulted")]
pub struct BusFault {
    /// The address.
    pub iova: Iova,
    /// The length in bytes.
    pub len: usize,
    /// Read or write.
    pub kind: BusAccess,
}

/// A kind of access on the bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BusAccess {
    /// A read of memory.
    Read,
    /// A write to memory.
    Write,
}

impl fmt::Display for BusAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// One device's access to memory. Every access of the model goes through it.
///
/// An access may cross pages; where a part of it faults, earlier parts may have been performed, as
/// on a real bus.
pub trait Bus: Send + Sync + 'static {
    /// Reads memory into `to`.
    ///
    /// # Errors
    /// [`BusFault`] where the device may not read all of it.
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault>;
    /// Writes `from` to memory.
    ///
    /// # Errors
    /// [`BusFault`] where the device may not write all of it.
    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault>;
    /// Writes a `u32` (little-endian) after all earlier writes, which makes a completion visible.
    ///
    /// # Errors
    /// [`BusFault`] where the device may not write it, or `iova` is not a multiple of 4.
    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault>;

    /// Returns the domain whose mappings the device reaches, so that a driver refuses memory of
    /// another; `None` if that is no [`Domain`](pinfold_core::domain::Domain), or is not known.
    fn domain(&self) -> Option<DomainId> {
        None
    }
}

impl<B: Bus + ?Sized> Bus for Arc<B> {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        (**self).read(iova, to)
    }
    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        (**self).write(iova, from)
    }
    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        (**self).write_u32_release(iova, value)
    }
    fn domain(&self) -> Option<DomainId> {
        (**self).domain()
    }
}

// The port of a software IOMMU as the model's bus.

impl Bus for Port {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        let len = to.len();
        Port::read(self, iova, to).map_err(|fault| BusFault {
            iova: fault.iova,
            len,
            kind: BusAccess::Read,
        })
    }

    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        let len = from.len();
        Port::write(self, iova, from).map_err(|fault| BusFault {
            iova: fault.iova,
            len,
            kind: BusAccess::Write,
        })
    }

    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        // The port writes in native order.
        Port::write_u32_release(self, iova, value.to_le()).map_err(|fault| BusFault {
            iova: fault.iova,
            len: 4,
            kind: BusAccess::Write,
        })
    }

    fn domain(&self) -> Option<DomainId> {
        Port::domain(self)
    }
}
