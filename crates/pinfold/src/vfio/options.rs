//! Options for opening a device, and what was chosen.

use crate::backend::context::Limits;
use crate::backend::interface::IommuInterface;
use crate::sys::files::Roots;
use std::fmt;

/// How to open a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    pub(super) interface: IommuInterface,
    /// Whether the caller has taken responsibility for a device without an IOMMU.
    pub(super) acknowledged: bool,
    pub(super) iova_bits: u32,
    pub(super) roots: Roots,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            interface: IommuInterface::default(),
            acknowledged: false,
            iova_bits: 64,
            roots: Roots::default(),
        }
    }
}

impl Options {
    /// Returns the default: [`IommuInterface::Best`], and a device that issues addresses of 64
    /// bits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens by this interface only. [`IommuInterface::NoIommu`] is refused: see
    /// [`without_iommu`](Self::without_iommu).
    #[must_use]
    pub fn interface(mut self, interface: IommuInterface) -> Self {
        self.interface = interface;
        self
    }

    /// Opens by [`IommuInterface::NoIommu`]: nothing translates the device's accesses, and nothing
    /// protects against them.
    ///
    /// # Safety
    /// A device opened with these options, or with a clone of them, reaches all memory of the
    /// machine at its physical address. For each such device the caller guarantees, until its bus
    /// mastering is off for good, that
    /// - it makes only the accesses that its driver requested;
    /// - all code with a handle to the device, its registers or its domain is trusted with all
    ///   physical memory, and passes to the device only addresses of live mappings of that domain,
    ///   or of live arenas in it;
    /// - no mapping ends and no arena is dropped while the device may still use the addresses: a
    ///   revocation, an unmap and a quarantine do not stop it.
    #[must_use]
    pub unsafe fn without_iommu(mut self) -> Self {
        (self.interface, self.acknowledged) = (IommuInterface::NoIommu, true);
        self
    }

    /// Sets how many address bits the device issues, 13 to 64: no address beyond is allocated.
    #[must_use]
    pub fn iova_bits(mut self, bits: u32) -> Self {
        self.iova_bits = bits;
        self
    }
}

/// How a device is attached to its IOMMU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attachment {
    /// The interface: never [`IommuInterface::Best`].
    pub interface: IommuInterface,
    /// The reason for this interface, in a few words.
    pub reason: String,
    /// What the kernel translates.
    pub limits: Limits,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        match self.limits.entries_left {
            Some(entries) => write!(f, "; at most {entries} mappings"),
            None => Ok(()),
        }
    }
}
