//! The address of a PCI device, and the facts in `/sys` about it.

use crate::sys::files;
use crate::sys::files::Roots;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The driver that gives a device to a program.
pub(crate) const VFIO_PCI: &str = "vfio-pci";

/// Drivers that do no DMA of their own: the kernel allows a group to be used although they have
/// devices in it.
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

/// There is no PCI device at this address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no PCI device {}{}", .0, where_from(Path::new("/sys/bus/pci/devices")))]
pub struct NoDevice(pub Bdf);

/// Returns what lists the devices; if sysfs does not show them, that.
fn where_from(folder: &Path) -> String {
    match std::fs::read_dir(folder) {
        Ok(_) => ": `lspci -D` lists the devices".to_owned(),
        Err(error) => format!(" to be seen here: {}: {error}", folder.display()),
    }
}

/// A device of an IOMMU group, and its driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMember {
    /// Its address.
    pub address: String,
    /// The driver that has it.
    pub driver: String,
}

/// The description of a device in `/sys`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PciDevice {
    pub(crate) bdf: Bdf,
    /// Its directory below `/sys/bus/pci/devices`.
    pub(crate) folder: PathBuf,
    pub(crate) driver: Option<String>,
    pub(crate) group: Option<Group>,
    /// `vfioN`, where the kernel has a character device for it (Linux 6.6).
    pub(crate) cdev: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Group {
    pub(crate) number: u32,
    /// VFIO made the group up: it has no IOMMU.
    pub(crate) unprotected: bool,
}

impl Group {
    /// Returns the group's node below `/dev`.
    pub(crate) fn node(&self, roots: &Roots) -> PathBuf {
        let prefix = if self.unprotected { "noiommu-" } else { "" };
        roots.dev.join(format!("vfio/{prefix}{}", self.number))
    }
}

/// Returns the directory of all PCI devices.
pub(crate) fn devices(roots: &Roots) -> PathBuf {
    roots.sys.join("bus/pci/devices")
}

/// Looks up the device at `bdf`.
pub(crate) fn find(roots: &Roots, bdf: Bdf) -> Result<PciDevice, NoDevice> {
    let folder = devices(roots).join(bdf.to_string());
    if !folder.is_dir() {
        return Err(NoDevice(bdf));
    }
    let group = link_name(&folder.join("iommu_group")).and_then(|name| name.parse().ok());
    let group = group.map(|number| {
        let name = files::word(&roots.sys.join(format!("kernel/iommu_groups/{number}/name")));
        Group { number, unprotected: name.is_some_and(|name| name == "vfio-noiommu") }
    });
    let cdev =
        files::names(&folder.join("vfio-dev")).into_iter().find(|name| name.starts_with("vfio"));
    Ok(PciDevice { bdf, driver: link_name(&folder.join("driver")), group, cdev, folder })
}

/// Returns the devices of the group whose drivers prevent its use through VFIO.
pub(crate) fn blocking_members(roots: &Roots, group: u32) -> Vec<GroupMember> {
    let folder = roots.sys.join(format!("kernel/iommu_groups/{group}/devices"));
    let blocking = |address: String| {
        let driver = link_name(&folder.join(&address).join("driver"))?;
        (!HARMLESS.contains(&driver.as_str())).then_some(GroupMember { address, driver })
    };
    files::names(&folder).into_iter().filter_map(blocking).collect()
}

/// Returns the last component of a link's target.
pub(crate) fn link_name(link: &Path) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

// The address of a PCI device.

/// The address of a PCI function: domain, bus, device, function. `0000:01:00.0`; `01:00.0` means
/// domain 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    pub(crate) domain: u32,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

/// A text that is not the address of a PCI device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a PCI address (example: 0000:01:00.0; `lspci -D` lists them)")]
pub struct InvalidBdf(pub String);

impl FromStr for Bdf {
    type Err = InvalidBdf;

    fn from_str(text: &str) -> Result<Self, InvalidBdf> {
        parse(text).ok_or_else(|| InvalidBdf(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Bdf> {
    let (rest, function) = text.split_once('.')?;
    let (front, device) = rest.rsplit_once(':')?;
    let (domain, bus) = front.split_once(':').unwrap_or(("0000", front));
    let bdf = Bdf {
        domain: hex(domain, 4, 8)?,
        bus: u8::try_from(hex(bus, 2, 2)?).ok()?,
        device: u8::try_from(hex(device, 2, 2)?).ok()?,
        function: u8::try_from(hex(function, 1, 1)?).ok()?,
    };
    (bdf.device < 32 && bdf.function < 8).then_some(bdf)
}

/// Parses a number of `least` to `most` hexadecimal digits.
fn hex(digits: &str, least: usize, most: usize) -> Option<u32> {
    let valid =
        (least..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if valid { u32::from_str_radix(digits, 16).ok() } else { None }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Debug for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_sysfs_does_not_show_are_not_said_to_be_absent() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(where_from(folder.path()), ": `lspci -D` lists the devices");
        let hidden = where_from(&folder.path().join("none"));
        assert!(
            hidden.starts_with(" to be seen here: ") && hidden.contains("No such file"),
            "{hidden}"
        );
    }
}

#[cfg(test)]
mod bdf_tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_and_long_addresses_parse() {
        for (text, long) in [
            ("01:00.0", "0000:01:00.0"),
            ("0000:Af:1f.7", "0000:af:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<Bdf>().unwrap().to_string(), long);
        }
        for text in [
            "",
            "1:0.0",
            "01:20.0",
            "01:00.8",
            "00:01:00.0",
            "01:00",
            "0000:01:00.0 ",
            "../..:0.0",
            "+1:00.0",
        ] {
            assert_eq!(text.parse::<Bdf>(), Err(InvalidBdf(text.to_owned())), "{text}");
        }
    }

    proptest! {
        #[test]
        fn display_and_parse_round_trip(domain in 0u32..=0xf_ffff, bus: u8, device in 0u8..32, function in 0u8..8) {
            let bdf = Bdf { domain, bus, device, function };
            prop_assert_eq!(bdf.to_string().parse(), Ok(bdf));
        }

        #[test]
        fn no_parsed_address_contains_a_slash(text in "[0-9a-f:./]{0,16}") {
            if let Ok(bdf) = text.parse::<Bdf>() {
                prop_assert!(!bdf.to_string().contains('/'));
            }
        }
    }
}
