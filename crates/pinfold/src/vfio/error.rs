//! Errors of an open device.

use crate::pci::Bdf;
use crate::sys::Errno;

/// Why an operation on an open device failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no such region.
    #[error("{bdf} has no region {index}")]
    NoRegion {
        /// The device.
        bdf: Bdf,
        /// Which: 0 to 5 are its BARs.
        index: u32,
    },
    /// An access beyond a region, or not aligned to its size.
    #[error(
        "{len} bytes at offset {offset:#x} of region {index}, which has {size:#x}: not inside, or not aligned"
    )]
    Outside {
        /// Which region.
        index: u32,
        /// Where, in bytes from its start.
        offset: u64,
        /// How many bytes.
        len: usize,
        /// How many bytes the region has.
        size: u64,
    },
    /// More interrupts than there are.
    #[error("{asked} interrupts of {bdf}, which has {has} by message")]
    Interrupts {
        /// The device.
        bdf: Bdf,
        /// How many were asked for.
        asked: u32,
        /// How many there are.
        has: u32,
    },
    /// They can not be switched on piece by piece.
    #[error("interrupts of {0} are on already: ask for all of them at once, or drop those first")]
    InterruptsOn(Bdf),
    /// The device can not be reset by itself.
    #[error("{0} can not be reset by itself")]
    NoReset(Bdf),
    /// A call failed.
    #[error("{call} of {bdf} failed: {errno}")]
    Kernel {
        /// Which call.
        call: &'static str,
        /// The device.
        bdf: Bdf,
        /// What the kernel said.
        errno: Errno,
    },
}
