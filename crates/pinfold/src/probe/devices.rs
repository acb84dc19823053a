//! IOMMU groups, and the device nodes of VFIO and iommufd.

use crate::backend::interface::{self, IommuInterface};
use crate::pci::lookup;
use crate::sys::roots::Roots;
use crate::sys::text;
use rustix::fs::Access as Mode;
use std::path::Path;

/// Whether a device node can be used by this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// It can be read and written.
    Allowed,
    /// It exists, but this user may not open it.
    Denied,
    /// It does not exist.
    Absent,
}

/// A device node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Where it is.
    pub path: String,
    /// Whether it can be used.
    pub access: Access,
}

impl Node {
    pub(super) fn check(path: &Path) -> Self {
        let access = match rustix::fs::access(path, Mode::READ_OK | Mode::WRITE_OK) {
            Ok(()) => Access::Allowed,
            Err(_) if path.symlink_metadata().is_ok() => Access::Denied,
            Err(_) => Access::Absent,
        };
        Self { path: path.display().to_string(), access }
    }
}

/// Devices that the IOMMU cannot tell apart: a program gets all of them or none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IommuGroup {
    /// Its number, as VFIO's `/dev/vfio/NUMBER` has it.
    pub number: u32,
    /// The type of the kernel's default domain: `DMA`, `DMA-FQ`, `identity` ...
    pub kind: Option<String>,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// A device of an IOMMU group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its address: `0000:01:00.0`.
    pub address: String,
    /// Its driver, if it has one; `vfio-pci` makes it available to programs.
    pub driver: Option<String>,
}

/// The state of VFIO.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vfio {
    /// `/dev/vfio/vfio`, the container.
    pub container: Node,
    /// `/dev/vfio/NUMBER`: groups that are bound to VFIO; `noiommu-NUMBER` without an IOMMU.
    pub groups: Vec<Node>,
    /// `/dev/vfio/devices/vfioN`: bound devices as character devices, for iommufd (Linux 6.6).
    pub devices: Vec<Node>,
    /// Its modules that are loaded or built in: `vfio`, `vfio_pci`, `vfio_iommu_type1`.
    pub modules: Vec<String>,
    /// Whether use without an IOMMU is allowed.
    pub noiommu: bool,
    /// The limit of type1 mappings per address space; `None` if it is not loaded or does not report it.
    pub entries: Option<u64>,
    /// The devices bound to it.
    pub bound: Vec<Bound>,
}

/// A device bound to VFIO, and how it would be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    /// Its address: `0000:01:00.0`.
    pub address: String,
    /// The interface.
    pub interface: IommuInterface,
    /// The reason for it.
    pub reason: String,
}

const MODULES: [&str; 4] = ["vfio", "vfio_pci", "vfio_iommu_type1", "iommufd"];

pub(super) fn vfio(roots: &Roots) -> Vfio {
    let folder = roots.dev.join("vfio");
    let is_group = |name: &String| name.trim_start_matches("noiommu-").parse::<u32>().is_ok();
    let module = |name: &&str| roots.sys.join("module").join(name).is_dir();
    let noiommu = roots.sys.join("module/vfio/parameters/enable_unsafe_noiommu_mode");
    Vfio {
        container: Node::check(&folder.join("vfio")),
        groups: nodes(&folder, is_group),
        devices: nodes(&folder.join("devices"), |_| true),
        modules: MODULES.iter().filter(|name| module(name)).map(ToString::to_string).collect(),
        noiommu: text::word(&noiommu).is_some_and(|word| word == "Y" || word == "1"),
        entries: text::number(&roots.sys.join("module/vfio_iommu_type1/parameters/dma_entry_limit")),
        bound: bound(roots),
    }
}

fn bound(roots: &Roots) -> Vec<Bound> {
    let select = |address: String| {
        let found = lookup::find(roots, address.parse().ok()?).ok()?;
        let unprotected = found.group.as_ref().is_some_and(|group| group.unprotected);
        let selection = interface::select(roots, found.cdev.as_deref());
        let (interface, reason) = match unprotected {
            true => (IommuInterface::NoIommu, "name only, because it has no IOMMU".to_owned()),
            false => (selection.interface, selection.reason),
        };
        (found.driver.as_deref() == Some(lookup::VFIO_PCI)).then_some(Bound { address, interface, reason })
    };
    text::names(&lookup::devices(roots)).into_iter().filter_map(select).collect()
}

fn nodes(folder: &Path, wanted: impl Fn(&String) -> bool) -> Vec<Node> {
    text::names(folder)
        .iter()
        .filter(|name| wanted(name))
        .map(|name| Node::check(&folder.join(name)))
        .collect()
}

pub(super) fn groups(sys: &Path) -> Vec<IommuGroup> {
    let folder = sys.join("kernel/iommu_groups");
    let group = |name: &String| {
        let group = folder.join(name);
        Some(IommuGroup {
            number: name.parse().ok()?,
            kind: text::word(&group.join("type")),
            devices: text::names(&group.join("devices"))
                .into_iter()
                .map(|address| Device { driver: driver(&group.join("devices").join(&address)), address })
                .collect(),
        })
    };
    text::names(&folder).iter().filter_map(group).collect()
}

fn driver(device: &Path) -> Option<String> {
    let link = std::fs::read_link(device.join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}
