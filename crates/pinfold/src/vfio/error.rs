//! Why a device is not had, and the command that mends it.

use super::bdf::{Bdf, NotBdf};
use crate::sys::Errno;
use pinfold_core::domain::BackendError;

/// Another device of a group, and who has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its address.
    pub address: String,
    /// The driver that has it.
    pub driver: String,
}

/// Why a device could not be opened. Nothing is left behind.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The address is none.
    #[error(transparent)]
    Address(#[from] NotBdf),
    /// No such device.
    #[error("there is no PCI device {0}: `lspci -D` lists those that there are")]
    NoDevice(Bdf),
    /// Another driver has the device, or none.
    #[error("{bdf} is {}: `sudo pinfold bind {bdf}` gives it to VFIO", had_by(.driver.as_deref()))]
    OtherDriver {
        /// The device.
        bdf: Bdf,
        /// Who has it.
        driver: Option<String>,
    },
    /// No IOMMU translates what the device does.
    #[error(
        "{0} is in no IOMMU group: switch the IOMMU on in the firmware and on the kernel's command line \
         (`pinfold doctor` says what is missing)"
    )]
    NoIommu(Bdf),
    /// Devices that the IOMMU can not tell from this one belong to the kernel.
    #[error(
        "group {group} of {bdf} is not viable: the IOMMU can not tell it from {}; give these to VFIO too: `sudo pinfold bind {}`",
        list(.others, true),
        list(.others, false)
    )]
    NotViable {
        /// The device.
        bdf: Bdf,
        /// Its group.
        group: u32,
        /// The devices of the group that the kernel's drivers have.
        others: Vec<Neighbour>,
    },
    /// The kernel's modules are not there.
    #[error("{missing} is not there: `sudo modprobe vfio-pci`{}", if *.type1 { " and `sudo modprobe vfio_iommu_type1`" } else { "" })]
    NoModule {
        /// What is missing.
        missing: String,
        /// Whether it is the module for IOMMUs.
        type1: bool,
    },
    /// This user may not open it.
    #[error("{path} may not be opened by this user: `sudo chown $USER {path}`")]
    Denied {
        /// The device node.
        path: String,
    },
    /// Another process has it.
    #[error("{path} is open in another process: one at a time can have it; `sudo fuser -v {path}` names it")]
    Busy {
        /// The device node.
        path: String,
    },
    /// The kernel speaks another version of the interface.
    #[error("the kernel speaks version {0} of VFIO's interface, and this program version 0")]
    Version(i32),
    /// iommufd was asked for by name.
    #[error("{bdf} can not be had by iommufd ({why}): open it by type1")]
    NoIommufd {
        /// The device.
        bdf: Bdf,
        /// Why not.
        why: String,
    },
    /// The domain is none of VFIO's.
    #[error("{0} can not be put into a domain that the kernel does not keep")]
    OtherDomain(Bdf),
    /// Without an IOMMU, but not asked for.
    #[error(
        "{0} has no IOMMU, and VFIO would let it reach all memory: a program that wants that opens it with \
         `Options::without_iommu`"
    )]
    Unprotected(Bdf),
    /// Without an IOMMU, and nobody answers for what it may reach.
    #[error(
        "{0} was to be opened without an IOMMU, where it reaches all memory: only `Options::without_iommu` allows it"
    )]
    Unvouched(Bdf),
    /// Asked for without an IOMMU, and it has one.
    #[error("{0} has an IOMMU: open it with it")]
    Protected(Bdf),
    /// Asked for without an IOMMU, and the kernel does not allow it.
    #[error(
        "{0} has no IOMMU, and the kernel does not allow it to be used without: \
         `echo Y | sudo tee /sys/module/vfio/parameters/enable_unsafe_noiommu_mode`, then unbind and bind it again"
    )]
    NoIommuMode(Bdf),
    /// The IOMMU has no small pages.
    #[error("the IOMMU of {bdf} has no pages of 4096 bytes or less (sizes: {page_sizes:#x})")]
    PageSize {
        /// The device.
        bdf: Bdf,
        /// A bit for each size.
        page_sizes: u64,
    },
    /// Another call failed.
    #[error("{call} of {path} failed: {errno}")]
    Kernel {
        /// Which call.
        call: &'static str,
        /// Of what.
        path: String,
        /// What the kernel said.
        errno: Errno,
    },
    /// The address space could not be set up.
    #[error(transparent)]
    Domain(#[from] BackendError),
}

fn had_by(driver: Option<&str>) -> String {
    driver.map_or("without a driver".to_owned(), |driver| format!("the kernel driver {driver}'s"))
}

fn list(others: &[Neighbour], with_driver: bool) -> String {
    let one = |n: &Neighbour| {
        if with_driver { format!("{} (driver {})", n.address, n.driver) } else { n.address.clone() }
    };
    let separator = if with_driver { ", " } else { " " };
    others.iter().map(one).collect::<Vec<_>>().join(separator)
}

/// Why something could not be done with an open device.
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
