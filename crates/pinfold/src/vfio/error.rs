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
        /// The index: 0 to 5 are the BARs.
        index: u32,
    },
    /// An access beyond a region, or not aligned to its size.
    #[error(
        "{len} bytes at offset {offset:#x} of region {index}, which has {size:#x}: not inside, or not aligned"
    )]
    Outside {
        /// The region.
        index: u32,
        /// In bytes from its start.
        offset: u64,
        /// The length of the access.
        len: usize,
        /// The size of the region.
        size: u64,
    },
    /// The device has fewer interrupts.
    #[error("cannot enable {asked} interrupts of {bdf}: it has {has} message-signalled ones")]
    Interrupts {
        /// The device.
        bdf: Bdf,
        /// The number requested.
        asked: u32,
        /// The number it has.
        has: u32,
    },
    /// Interrupts cannot be enabled in several steps.
    #[error(
        "interrupts of {0} are enabled already: enable all of them at once, or drop those first"
    )]
    InterruptsOn(Bdf),
    /// The device cannot be reset alone.
    #[error("{0} cannot be reset alone")]
    NoReset(Bdf),
    /// A call failed.
    #[error("{call} on {bdf} failed: {errno}")]
    Kernel {
        /// The call.
        call: &'static str,
        /// The device.
        bdf: Bdf,
        /// The kernel's error.
        errno: Errno,
    },
}
