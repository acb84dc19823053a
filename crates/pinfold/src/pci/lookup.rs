//! What `/sys` says about a PCI device.

use super::bdf::Bdf;
use crate::sys::files;
use crate::sys::files::Roots;
use std::path::{Path, PathBuf};

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

/// What `/sys` says about a device.
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
