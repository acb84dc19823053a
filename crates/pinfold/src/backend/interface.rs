//! Selects the kernel interface through which a device is opened.

use crate::sys::files::Roots;
use std::fmt;
use std::path::PathBuf;

/// A kernel interface to a device and its IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum IommuInterface {
    /// iommufd if the kernel has it for the device, else type1.
    #[default]
    Best,
    /// A VFIO container with type1 (Linux 4.0).
    Type1,
    /// An address space of `/dev/iommu` (Linux 6.6).
    Iommufd,
    /// No IOMMU (Linux 4.5), where the kernel is configured to allow that.
    ///
    /// **Nothing is protected.** The device reaches all memory of the machine at its physical
    /// address, whatever this program maps, and a revocation revokes nothing: this library cannot
    /// promise anything about a faulty or hostile device. Therefore only
    /// [`Options::without_iommu`](crate::vfio::Options::without_iommu), which is `unsafe`, opens a
    /// device this way. Arenas must be mapped as a whole and consist of hugetlb pages.
    NoIommu,
}

impl fmt::Display for IommuInterface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Best => "best",
            Self::Type1 => "type1",
            Self::Iommufd => "iommufd",
            Self::NoIommu => "no IOMMU",
        })
    }
}

/// The interface that [`IommuInterface::Best`] means for a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selection {
    pub(crate) interface: IommuInterface,
    pub(crate) reason: String,
    /// The device's own node, for iommufd.
    pub(super) node: Option<PathBuf>,
}

/// Returns iommufd if the kernel has it for the device with this character device and this user may
/// open it, else type1, with the reason in a few words.
pub(crate) fn select(roots: &Roots, cdev: Option<&str>) -> Selection {
    let type1 = |reason: String| Selection { interface: IommuInterface::Type1, reason, node: None };
    let iommu = roots.dev.join("iommu");
    let node = cdev.map(|cdev| roots.dev.join("vfio/devices").join(cdev));
    for path in [Some(&iommu), node.as_ref()].into_iter().flatten() {
        use rustix::fs::{self, Access, AtFlags};
        let wanted = Access::READ_OK | Access::WRITE_OK;
        // As the effective user, who opens it.
        match fs::accessat(fs::CWD, path, wanted, AtFlags::EACCESS) {
            Ok(()) => {}
            Err(rustix::io::Errno::NOENT) => {
                return type1(format!("type1, because there is no {}", path.display()));
            }
            Err(_) => {
                return type1(format!("type1, because this user may not open {}", path.display()));
            }
        }
    }
    match node {
        None => type1(
            "type1, because the kernel has no device nodes of VFIO (Linux 6.6, VFIO_DEVICE_CDEV)"
                .to_owned(),
        ),
        Some(node) => {
            let reason = format!(
                "iommufd, because {} and {} can be opened",
                iommu.display(),
                node.display()
            );
            Selection { interface: IommuInterface::Iommufd, reason, node: Some(node) }
        }
    }
}
