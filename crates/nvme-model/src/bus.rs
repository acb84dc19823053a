//! The model controller's only way to memory.

use core::fmt;
use pinfold_core::addr::Iova;
use std::sync::Arc;

/// An access that did not land: nothing is mapped there, or not for this kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a device's {kind} of {len} bytes at {iova} did not land")]
pub struct BusFault {
    /// Where it was to begin.
    pub iova: Iova,
    /// How many bytes it was to have.
    pub len: usize,
    /// Read or write.
    pub kind: BusAccess,
}

/// What a device does on its bus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BusAccess {
    /// It reads memory.
    Read,
    /// It writes memory.
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

/// One device's way to memory. Every access that the model makes goes through it.
///
/// An access may cross pages; where a part of it faults, the parts before may have landed, as on a real bus.
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
    /// Writes a `u32` (little-endian) after everything that was written before: what makes a completion visible.
    ///
    /// # Errors
    /// [`BusFault`] where the device may not write it, or `iova` is not a multiple of 4.
    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault>;
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
}
