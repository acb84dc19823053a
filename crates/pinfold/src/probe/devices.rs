//! IOMMU groups, and the device nodes of VFIO and iommufd.

use crate::backend::context::{self, IommuInterface};
use crate::pci::lookup;
use crate::sys::files::Roots;
use crate::sys::process::permit;
use crate::sys::{Errno, files, kernel};
use rustix::fs::{self, AtFlags, Mode, OFlags};
use std::path::{Path, PathBuf};

/// Whether a device node can be used by this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// It can be read and written.
    Allowed,
    /// This user may not open it, or may not see whether it exists.
    Denied,
    /// It does not exist, or no driver is behind it.
    Absent,
}

/// A device node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// The path of the device.
    pub path: String,
    /// Whether it can be used.
    pub access: Access,
    /// The kernel's error, unless it can be used.
    pub errno: Option<Errno>,
    /// The command that permits its use, if its mode or that of a folder is what denies it.
    pub fix: Option<String>,
}

impl Node {
    /// Opens the node and closes it again: a node without a user of its own, for which that has no
    /// effect once its module is loaded. Before, opening it would load the module, so the mode is
    /// checked instead.
    fn open(path: &Path, roots: &Roots, module: &str) -> Self {
        if !roots.sys.join("module").join(module).is_dir() {
            return Self::check(path);
        }
        let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        Self::of(path, opened.map(drop))
    }

    /// Checks the mode: opening the node of a group or a device would keep another program from
    /// opening it meanwhile.
    fn check(path: &Path) -> Self {
        let wanted = fs::Access::READ_OK | fs::Access::WRITE_OK;
        Self::of(path, fs::accessat(fs::CWD, path, wanted, AtFlags::EACCESS))
    }

    fn of(path: &Path, opened: rustix::io::Result<()>) -> Self {
        let access = match opened {
            // Busy: it may be opened, by one program at a time.
            Ok(()) | Err(rustix::io::Errno::BUSY) => Access::Allowed,
            // A node without a driver counts as absent.
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NXIO | rustix::io::Errno::NODEV) => {
                Access::Absent
            }
            Err(_) => Access::Denied,
        };
        let denied = access == Access::Denied;
        let fix = if denied { permit(path) } else { None };
        let errno = opened.err().filter(|_| access != Access::Allowed).map(Errno::from);
        Self { path: path.display().to_string(), access, errno, fix }
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
    /// The command that loads `vfio-pci`, or why none can.
    pub load: Result<String, String>,
    /// The command that loads `iommufd`, or why none can.
    pub load_iommufd: Result<String, String>,
    /// Whether use without an IOMMU is allowed.
    pub noiommu: bool,
    /// The limit of type1 mappings per address space; `None` if it is not loaded or does not report
    /// it.
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
    /// The node that it is opened by, if that does not exist here.
    pub missing: Option<PathBuf>,
}

const MODULES: [&str; 4] = ["vfio", "vfio_pci", "vfio_iommu_type1", "iommufd"];

pub(super) fn vfio(roots: &Roots) -> Vfio {
    let folder = roots.dev.join("vfio");
    let is_group = |name: &String| name.trim_start_matches("noiommu-").parse::<u32>().is_ok();
    let module = |name: &&str| roots.sys.join("module").join(name).is_dir();
    let load = |name: &str| kernel::module(&roots.sys, &roots.modules, name).advice(name);
    let noiommu = roots.sys.join("module/vfio/parameters/enable_unsafe_noiommu_mode");
    Vfio {
        container: Node::open(&folder.join("vfio"), roots, "vfio"),
        groups: nodes(&folder, is_group),
        devices: nodes(&folder.join("devices"), |_| true),
        modules: MODULES.iter().filter(|name| module(name)).map(ToString::to_string).collect(),
        load: load("vfio-pci"),
        load_iommufd: load("iommufd"),
        noiommu: files::word(&noiommu).is_some_and(|word| word == "Y" || word == "1"),
        entries: files::number(
            &roots.sys.join("module/vfio_iommu_type1/parameters/dma_entry_limit"),
        ),
        bound: bound(roots),
    }
}

fn bound(roots: &Roots) -> Vec<Bound> {
    let select = |address: String| {
        let found = lookup::find(roots, address.parse().ok()?).ok()?;
        let unprotected = found.group.as_ref().is_some_and(|group| group.unprotected);
        let selection = context::select(roots, found.cdev.as_deref());
        let (interface, reason) = match unprotected {
            true => (IommuInterface::NoIommu, "name only, because it has no IOMMU".to_owned()),
            false => (selection.interface, selection.reason),
        };
        // The device's group determines the interface, so it exists.
        let group = found.group.as_ref().map(|group| group.node(roots));
        let missing = group.filter(|node| interface != IommuInterface::Iommufd && !node.exists());
        (found.driver.as_deref() == Some(lookup::VFIO_PCI)).then_some(Bound {
            address,
            interface,
            reason,
            missing,
        })
    };
    files::names(&lookup::devices(roots)).into_iter().filter_map(select).collect()
}

fn nodes(folder: &Path, wanted: impl Fn(&String) -> bool) -> Vec<Node> {
    files::names(folder)
        .iter()
        .filter(|name| wanted(name))
        .map(|name| Node::check(&folder.join(name)))
        .collect()
}

/// Opens `/dev/iommu`.
pub(super) fn iommufd(roots: &Roots) -> Node {
    Node::open(&roots.dev.join("iommu"), roots, "iommufd")
}

/// A folder that cannot be listed: its entries are not known to be absent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unreadable {
    /// The folder.
    pub path: PathBuf,
    /// The error.
    pub errno: Errno,
}

/// Returns which of the folders that the probe lists cannot be listed. One that does not exist is
/// listed only if the whole file system is missing.
pub(super) fn unreadable(roots: &Roots) -> Vec<Unreadable> {
    let sys = [
        "kernel/mm/hugepages",
        "kernel/mm/transparent_hugepage",
        "kernel/iommu_groups",
        "class/iommu",
        "bus/pci/devices",
        "devices/system/node",
    ];
    let in_sys = sys.iter().map(|folder| (roots.sys.join(folder), roots.sys.join("kernel")));
    let dev =
        ["vfio", "vfio/devices"].iter().map(|folder| (roots.dev.join(folder), roots.dev.clone()));
    let check = |(path, mounted): (PathBuf, PathBuf)| match std::fs::read_dir(&path) {
        Ok(_) => None,
        Err(error) => {
            let absent = error.kind() == std::io::ErrorKind::NotFound && mounted.is_dir();
            (!absent).then(|| Unreadable { path, errno: Errno::from(&error) })
        }
    };
    in_sys.chain(dev).filter_map(check).collect()
}

pub(super) fn groups(sys: &Path) -> Vec<IommuGroup> {
    let folder = sys.join("kernel/iommu_groups");
    let group = |name: &String| {
        let group = folder.join(name);
        Some(IommuGroup {
            number: name.parse().ok()?,
            kind: files::word(&group.join("type")),
            devices: files::names(&group.join("devices"))
                .into_iter()
                .map(|address| Device {
                    driver: driver(&group.join("devices").join(&address)),
                    address,
                })
                .collect(),
        })
    };
    files::names(&folder).iter().filter_map(group).collect()
}

fn driver(device: &Path) -> Option<String> {
    let link = std::fs::read_link(device.join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}
