//! What `/sys` says of a device.

use super::bdf::Bdf;
use super::error::{Neighbour, OpenError};
use crate::probe::Roots;
use crate::probe::text;
use std::path::{Path, PathBuf};

/// The driver that gives a device to a program.
pub(crate) const VFIO_PCI: &str = "vfio-pci";

/// Drivers that do no DMA of their own: the kernel lets a group be used although they have devices in it.
const HARMLESS: [&str; 3] = [VFIO_PCI, "pci-stub", "pcieport"];

/// What `/sys` says of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) bdf: Bdf,
    /// Its folder below `/sys/bus/pci/devices`.
    pub(crate) folder: PathBuf,
    pub(crate) driver: Option<String>,
    pub(crate) group: Option<Group>,
    /// `vfioN`, where the kernel has a character device for it (Linux 6.6).
    pub(crate) cdev: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Group {
    pub(crate) number: u32,
    /// VFIO made it up: no IOMMU is behind it.
    pub(crate) unprotected: bool,
}

/// The folder of all PCI devices.
pub(crate) fn devices(roots: &Roots) -> PathBuf {
    roots.sys.join("bus/pci/devices")
}

/// Looks the device up.
pub(crate) fn find(roots: &Roots, bdf: Bdf) -> Result<Found, OpenError> {
    let folder = devices(roots).join(bdf.to_string());
    if !folder.is_dir() {
        return Err(OpenError::NoDevice(bdf));
    }
    let group = link_name(&folder.join("iommu_group")).and_then(|name| name.parse().ok());
    let group = group.map(|number| {
        let name = text::word(&roots.sys.join(format!("kernel/iommu_groups/{number}/name")));
        Group { number, unprotected: name.is_some_and(|name| name == "vfio-noiommu") }
    });
    let cdev = text::names(&folder.join("vfio-dev")).into_iter().find(|name| name.starts_with("vfio"));
    Ok(Found { bdf, driver: link_name(&folder.join("driver")), group, cdev, folder })
}

/// The devices of the group that keep it from being used.
pub(crate) fn in_the_way(roots: &Roots, group: u32) -> Vec<Neighbour> {
    let folder = roots.sys.join(format!("kernel/iommu_groups/{group}/devices"));
    let held = |address: String| {
        let driver = link_name(&folder.join(&address).join("driver"))?;
        (!HARMLESS.contains(&driver.as_str())).then_some(Neighbour { address, driver })
    };
    text::names(&folder).into_iter().filter_map(held).collect()
}

/// The last part of where a link leads.
pub(crate) fn link_name(link: &Path) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}
