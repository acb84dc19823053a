//! Which of the kernel's interfaces gives a device.

use crate::probe::Roots;
use std::path::PathBuf;

/// Which of the kernel's interfaces gives the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum IommuInterface {
    /// iommufd where the kernel has it for the device, else type1.
    #[default]
    Best,
    /// A container with type1 (Linux 4.0).
    Type1,
    /// An address space of `/dev/iommu` (Linux 6.6).
    Iommufd,
    /// Without an IOMMU (Linux 4.5), where the kernel was told to allow that.
    ///
    /// **Nothing is protected.** The device reaches all memory of the machine at its physical address, whatever this program
    /// says, and a revocation takes nothing away: what a wrong or hostile device does with it is beyond this library's
    /// promises. So [`Options::without_iommu`](super::Options::without_iommu), which is `unsafe`, alone opens a device
    /// this way. Arenas must be exposed whole and come from hugetlb pages.
    NoIommu,
}

/// Which of the two it is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    pub(crate) way: IommuInterface,
    pub(crate) why: String,
    /// The device's own node, for iommufd.
    pub(super) node: Option<PathBuf>,
}

/// iommufd where the kernel has it for this device and this user may open it; else type1. Why, in a few words.
pub(crate) fn choose(roots: &Roots, cdev: Option<&str>) -> Choice {
    let type1 = |why: String| Choice { way: IommuInterface::Type1, why, node: None };
    let iommu = roots.dev.join("iommu");
    let node = cdev.map(|cdev| roots.dev.join("vfio/devices").join(cdev));
    for path in [Some(&iommu), node.as_ref()].into_iter().flatten() {
        use rustix::fs::Access;
        match rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK) {
            Ok(()) => {}
            Err(rustix::io::Errno::NOENT) => {
                return type1(format!("type1, for there is no {}", path.display()));
            }
            Err(_) => return type1(format!("type1, for {} may not be opened by this user", path.display())),
        }
    }
    match node {
        None => type1(
            "type1, for the kernel has no device nodes of VFIO (Linux 6.6, VFIO_DEVICE_CDEV)".to_owned(),
        ),
        Some(node) => {
            let why = format!("iommufd, for {} and {} can be opened", iommu.display(), node.display());
            Choice { way: IommuInterface::Iommufd, why, node: Some(node) }
        }
    }
}
