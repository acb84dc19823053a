//! Why a device could not be opened, by VFIO, iommufd or behind a VT-d unit of the program, and the
//! command that fixes it; and why an operation on it failed.

use crate::pci::{Bdf, GroupMember, InvalidBdf, NoDevice};
use crate::sys::process::permit;
use crate::sys::vfio::layout;
use crate::sys::{Errno, files, kernel};
use pinfold_core::domain::BackendError;
use std::fmt;
use std::path::Path;

/// Why a device could not be opened. Nothing is left behind.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The address is malformed.
    #[error(transparent)]
    Address(#[from] InvalidBdf),
    /// There is no such device.
    #[error(transparent)]
    NoDevice(#[from] NoDevice),
    /// The device is bound to another driver, or to none.
    #[error("{bdf} {}: `sudo pinfold bind {bdf}` binds it to VFIO", bound_to(.driver.as_deref()))]
    OtherDriver {
        /// The device.
        bdf: Bdf,
        /// Its driver.
        driver: Option<String>,
    },
    /// No IOMMU translates the device's accesses.
    #[error(
        "{0} is in no IOMMU group: switch the IOMMU on in the firmware and on the kernel's command line \
         (`pinfold doctor` says what is missing)"
    )]
    NoIommu(Bdf),
    /// The IOMMU cannot tell the device from others that belong to the kernel.
    #[error(
        "group {group} of {bdf} is not viable: the IOMMU cannot tell it from {}; bind these to VFIO too: `sudo pinfold bind {}`",
        list(.others, true),
        list(.others, false)
    )]
    NotViable {
        /// The device.
        bdf: Bdf,
        /// Its group.
        group: u32,
        /// The devices of the group that kernel drivers have.
        others: Vec<GroupMember>,
    },
    /// A kernel module is not loaded.
    #[error("{missing} is missing: {}", kernel::load(if *.type1 { "vfio_iommu_type1" } else { "vfio-pci" }))]
    NoModule {
        /// The missing parts.
        missing: String,
        /// Whether it is the module for IOMMUs.
        type1: bool,
    },
    /// This user may not open the node.
    #[error("cannot open {path}: permission denied: {}", permitted(path))]
    Denied {
        /// The device node.
        path: String,
    },
    /// A process has the node open.
    #[error(
        "{path} is open already, in this process or another, and can be open once: `sudo fuser -v {path}` names it"
    )]
    Busy {
        /// The device node.
        path: String,
    },
    /// The kernel has another version of the interface.
    #[error("the kernel has version {0} of VFIO's interface; supported is version 0")]
    Version(i32),
    /// iommufd was requested and is unavailable.
    #[error("{bdf} cannot be opened by iommufd ({reason}): open it by type1")]
    NoIommufd {
        /// The device.
        bdf: Bdf,
        /// The reason.
        reason: String,
    },
    /// A domain without an IOMMU was to be created before its device.
    #[error(
        "a domain without an IOMMU is its device's: open the device with `Options::without_iommu`, which creates it"
    )]
    NoIommuDomain,
    /// The kernel does not keep the domain's table.
    #[error("{0} cannot be opened in a domain whose table the kernel does not keep")]
    OtherDomain(Bdf),
    /// The device has no IOMMU, and `NoIommu` was not requested.
    #[error(
        "{0} has no IOMMU, and VFIO would let it reach all memory: a program that wants that opens it with \
         `Options::without_iommu`"
    )]
    Unprotected(Bdf),
    /// `NoIommu` was requested without taking responsibility for the device's accesses.
    #[error(
        "{0} without an IOMMU would reach all memory: only the unsafe `Options::without_iommu` allows it"
    )]
    NotAcknowledged(Bdf),
    /// `NoIommu` was requested, and the device has an IOMMU.
    #[error("{0} has an IOMMU: open it without `Options::without_iommu`")]
    Protected(Bdf),
    /// `NoIommu` was requested, and the kernel does not allow it.
    #[error("{} has no IOMMU, and the kernel does not allow its use without one: {}", .0, noiommu_mode(NOIOMMU.as_ref()))]
    NoIommuMode(Bdf),
    /// The IOMMU has no small pages.
    #[error("the IOMMU of {bdf} has no pages of 4096 bytes or less (smallest: {}): a kernel with pages of 4 KiB is needed", 1_u64.checked_shl(page_sizes.trailing_zeros()).unwrap_or(0))]
    PageSize {
        /// The device.
        bdf: Bdf,
        /// One bit for each size.
        page_sizes: u64,
    },
    /// Another call failed.
    #[error("{call} on {path} failed: {errno}")]
    Kernel {
        /// The call.
        call: &'static str,
        /// Its file.
        path: String,
        /// The kernel's error.
        errno: Errno,
    },
    /// The address space could not be set up.
    #[error(transparent)]
    Domain(#[from] BackendError),
    /// The device, behind a unit that the program drives, is bound to a kernel driver.
    #[cfg(feature = "vtd")]
    #[error(
        "{bdf} is bound to the kernel driver {driver}, which would go on using it: \
         `echo {bdf} | sudo tee /sys/bus/pci/devices/{bdf}/driver/unbind`"
    )]
    Bound {
        /// The device.
        bdf: Bdf,
        /// Its driver.
        driver: String,
    },
    /// The firmware describes no unit, or its description cannot be read.
    #[cfg(feature = "vtd")]
    #[error("cannot read {}: {errno}: {}", path.display(), match errno.raw() {
        libc::EACCES | libc::EPERM => "run as root",
        _ => "the machine has no VT-d unit, or it is off in the firmware; give a virtual machine one (intel-iommu)",
    })]
    NoDmar {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        errno: Errno,
    },
    /// The firmware's description is wrong.
    #[cfg(feature = "vtd")]
    #[error("the firmware's description of the VT-d units (ACPI table DMAR) is wrong: {0}")]
    Dmar(#[from] pinfold_vtd::dmar::DmarError),
    /// No unit has the device.
    #[cfg(feature = "vtd")]
    #[error("no VT-d unit of the ACPI table DMAR has {0}")]
    NoUnit(Bdf),
    /// The firmware continues to use the device.
    #[cfg(feature = "vtd")]
    #[error(
        "firmware has {bdf} access {} bytes at {start:#x} by physical address (ACPI table DMAR, RMRR), which a domain \
         would end: such a device cannot be opened", .len
    )]
    Reserved {
        /// The device.
        bdf: Bdf,
        /// The first physical address.
        start: u64,
        /// The length in bytes.
        len: u64,
    },
    /// The device's accesses carry the identifier of a bridge.
    #[cfg(feature = "vtd")]
    #[error(
        "device {bdf} is behind the bridge {bridge}, which is not of PCI Express on both sides: accesses from all devices \
         below it may carry one identifier, so that none can have a domain alone: move the device to another slot"
    )]
    Aliased {
        /// The device.
        bdf: Bdf,
        /// The bridge.
        bridge: Bdf,
    },
    /// Physical addresses are hidden.
    #[cfg(feature = "vtd")]
    #[error(
        "physical addresses are hidden from this process (/proc/self/pagemap: {0}): run as root"
    )]
    FramesHidden(Errno),
    /// Physical memory cannot be opened.
    #[cfg(feature = "vtd")]
    #[error("cannot open {}: {errno}: {}", path.display(), match errno.raw() {
        libc::EACCES | libc::EPERM => "run as root, with CAP_SYS_RAWIO; a kernel that is locked down (Secure Boot) never allows it",
        _ => "the kernel needs CONFIG_DEVMEM",
    })]
    PhysMemory {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        errno: Errno,
    },
    /// Another program drives a unit in this way.
    #[cfg(feature = "vtd")]
    #[error("another process drives a VT-d unit through {}: end it first (`sudo fuser -v {}` names it)", .0.display(), .0.display())]
    UnitLocked(std::path::PathBuf),
    /// The registers cannot be mapped.
    #[cfg(feature = "vtd")]
    #[error(
        "cannot map the unit's registers at {at:#x}: {errno}: boot with {BOOT_OPTIONS} (iomem=relaxed allows it)"
    )]
    UnitRegisters {
        /// The physical address.
        at: u64,
        /// The system's error.
        errno: Errno,
    },
    /// The unit is in use.
    #[cfg(feature = "vtd")]
    #[error(
        "the VT-d unit at {at:#x} is enabled (status {status:#x}): boot with {BOOT_OPTIONS}, so that the kernel leaves \
         it; after a program that was killed while it drove the unit, reboot"
    )]
    UnitInUse {
        /// The physical address of its registers.
        at: u64,
        /// Its status register.
        status: u32,
    },
    /// The unit cannot be used.
    #[cfg(feature = "vtd")]
    #[error("the VT-d unit: {0}")]
    Unit(pinfold_vtd::UnitError),
    /// The device cannot be set up.
    #[cfg(feature = "vtd")]
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Boot options with which the kernel leaves the VT-d units alone.
#[cfg(feature = "vtd")]
const BOOT_OPTIONS: &str = "intel_iommu=off intremap=off iomem=relaxed";

impl OpenError {
    /// Returns the meaning of a failed call on a device node.
    pub(crate) fn of_call(call: &'static str, path: &Path, errno: Errno) -> Self {
        let name = path.display().to_string();
        match errno.raw() {
            libc::EACCES | libc::EPERM if call == "open" => Self::Denied { path: name },
            libc::ENOENT | libc::ENODEV | libc::ENXIO if call == "open" => {
                Self::NoModule { missing: name, type1: false }
            }
            libc::EBUSY => Self::Busy { path: name },
            _ => Self::Kernel { call, path: name, errno },
        }
    }
}

const NOIOMMU: &str = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

/// Returns what allows the use of devices without an IOMMU, by the switch at `path`.
fn noiommu_mode(path: &Path) -> String {
    match files::all(path) {
        Ok(mode) if mode.starts_with(['Y', '1']) => {
            "it was bound before that was allowed: unbind and bind it again".to_owned()
        }
        Ok(_) => format!("`echo Y | sudo tee {}`, then unbind and bind it again", path.display()),
        Err(errno) => {
            format!("{}: {errno} (a kernel with CONFIG_VFIO_NOIOMMU has it)", path.display())
        }
    }
}

/// Returns what permits this user to open the node.
fn permitted(path: &str) -> String {
    permit(path.as_ref()).map_or_else(
        || "not by its mode; look at the control group of devices, or a security module".to_owned(),
        |command| format!("`{command}`"),
    )
}

fn bound_to(driver: Option<&str>) -> String {
    driver.map_or("has no driver".to_owned(), |driver| {
        format!("is bound to the kernel driver {driver}")
    })
}

fn list(others: &[GroupMember], with_driver: bool) -> String {
    let one = |n: &GroupMember| {
        if with_driver { format!("{} (driver {})", n.address, n.driver) } else { n.address.clone() }
    };
    let separator = if with_driver { ", " } else { " " };
    others.iter().map(one).collect::<Vec<_>>().join(separator)
}

// Errors of an open device.

/// Why an operation on an open device failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no such region.
    #[error("{bdf} has no {}: its BARs are among 0 to 5", RegionName(*index))]
    NoRegion {
        /// The device.
        bdf: Bdf,
        /// The index: 0 to 5 are the BARs.
        index: u32,
    },
    /// An access beyond a region, or not aligned to its size.
    #[error(
        "{len} bytes at offset {offset:#x} of {}, which has {size:#x} bytes: not inside, or not aligned to their length",
        RegionName(*index)
    )]
    Outside {
        /// The region.
        index: u32,
        /// The offset in bytes from its start.
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

/// A region of a device, in words.
struct RegionName(u32);

impl fmt::Display for RegionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bar @ 0..=5 => write!(f, "BAR {bar}"),
            6 => f.write_str("the expansion ROM"),
            layout::CONFIG_REGION => f.write_str("configuration space"),
            other => write!(f, "region {other}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_for_no_iommu_is_advised_only_while_it_is_off() {
        let folder = tempfile::tempdir().unwrap();
        let switch = folder.path().join("switch");
        assert!(noiommu_mode(&switch).contains("CONFIG_VFIO_NOIOMMU"));
        for (mode, advises) in [("N\n", true), ("0\n", true), ("Y\n", false), ("1\n", false)] {
            std::fs::write(&switch, mode).unwrap();
            assert_eq!(noiommu_mode(&switch).contains("sudo tee"), advises, "{mode}");
        }
    }

    #[test]
    fn an_iommu_without_small_pages_names_what_is_needed() {
        let bdf = "0000:01:00.0".parse().unwrap();
        // What a kernel with pages of 64 KiB reports on Arm.
        let error = OpenError::PageSize { bdf, page_sizes: 0x2000_0000 | 0x1_0000 };
        assert_eq!(
            error.to_string(),
            "the IOMMU of 0000:01:00.0 has no pages of 4096 bytes or less (smallest: 65536): a kernel with pages of 4 KiB is needed"
        );
    }
}
