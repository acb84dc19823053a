//! From an address to an open device: the checks that a person forgets, in the order in which they fail.

use super::bdf::Bdf;
use super::device::{Device, Inner};
use super::error::OpenError;
use super::iommufd::Iommufd;
use super::lookup::{self, Found, VFIO_PCI};
use super::mapper::{Limits, Mapper, iova_space};
use super::noiommu::NoIommu;
use super::table::KernelTable;
use super::type1::Type1;
use crate::domain::{Behind, Domain};
use crate::probe::Roots;
use crate::sys::Errno;
use crate::sys::vfio::layout;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Which of the kernel's interfaces gives the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Way {
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
    /// promises. Arenas must be exposed whole and come from hugetlb pages.
    NoIommu,
}

/// Which of the two it is to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    pub(crate) way: Way,
    pub(crate) why: String,
    /// The device's own node, for iommufd.
    node: Option<PathBuf>,
}

/// iommufd where the kernel has it for this device and this user may open it; else type1. Why, in a few words.
pub(crate) fn choose(roots: &Roots, cdev: Option<&str>) -> Choice {
    let type1 = |why: String| Choice { way: Way::Type1, why, node: None };
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
            Choice { way: Way::Iommufd, why, node: Some(node) }
        }
    }
}

/// How a device is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    pub(super) way: Way,
    pub(super) iova_bits: u32,
    pub(super) roots: Roots,
}

impl Default for Options {
    fn default() -> Self {
        Self { way: Way::default(), iova_bits: 64, roots: Roots::default() }
    }
}

impl Options {
    /// [`Way::Best`], and a device that reaches 64 bits.
    pub fn new() -> Self {
        Self::default()
    }

    /// By this interface or not at all.
    #[must_use]
    pub fn way(mut self, way: Way) -> Self {
        self.way = way;
        self
    }

    /// How many bits of address the device puts on its bus: no address beyond is handed out. 13 to 64.
    #[must_use]
    pub fn iova_bits(mut self, bits: u32) -> Self {
        self.iova_bits = bits;
        self
    }
}

/// How a device was opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The interface: never [`Way::Best`].
    pub way: Way,
    /// Why this one, in a few words.
    pub why: String,
    /// What the kernel said that it translates.
    pub limits: Limits,
}

impl Device {
    /// Opens the device at `address` (`0000:01:00.0`) in a domain of its own.
    ///
    /// It must be bound to `vfio-pci` (`pinfold bind`). Opening resets nothing; bus mastering is as it was (off, after the
    /// kernel gave the device to VFIO).
    ///
    /// # Errors
    /// [`OpenError`], which names the command that mends it.
    pub fn open(address: &str, options: &Options) -> Result<Self, OpenError> {
        let roots = &options.roots;
        let found = check(options, Bdf::from_str(address)?)?;
        if options.way == Way::NoIommu {
            return without_iommu(options, &found);
        }
        let best = choose(roots, found.cdev.as_deref());
        match (options.way, best) {
            (Way::Best, Choice { way: Way::Iommufd, why, node: Some(node) }) => {
                by_iommufd(options, &found, &node, why)
            }
            (Way::Iommufd, Choice { node: Some(node), .. }) => {
                by_iommufd(options, &found, &node, "iommufd, for it was asked for by name".to_owned())
            }
            (Way::Iommufd, Choice { why, .. }) => Err(OpenError::NoIommufd { bdf: found.bdf, why }),
            (Way::Best | Way::NoIommu, Choice { why, .. }) => by_type1(options, &found, why),
            (Way::Type1, _) => by_type1(options, &found, "type1, for it was asked for by name".to_owned()),
        }
    }
}

/// The device, if it can be opened as far as `/sys` tells.
fn check(options: &Options, bdf: Bdf) -> Result<Found, OpenError> {
    let found = lookup::find(&options.roots, bdf)?;
    if found.driver.as_deref() != Some(VFIO_PCI) {
        let driver = found.driver;
        return Err(OpenError::OtherDriver { bdf, driver });
    }
    let by_name = options.way == Way::NoIommu;
    match &found.group {
        None if by_name => Err(OpenError::NoIommuMode(bdf)),
        None => Err(OpenError::NoIommu(bdf)),
        Some(group) if group.unprotected && !by_name => Err(OpenError::Unprotected(bdf)),
        Some(group) if !group.unprotected && by_name => Err(OpenError::Protected(bdf)),
        Some(_) => Ok(found),
    }
}

fn without_iommu(options: &Options, found: &Found) -> Result<Device, OpenError> {
    let bdf = found.bdf;
    tracing::warn!(%bdf, "opened without an IOMMU: the device can read and write all memory of this machine");
    let group = found.group.as_ref().ok_or(OpenError::NoIommu(bdf))?;
    let space = Arc::new(NoIommu::open(&options.roots)?);
    let opened = space.device(&options.roots, group, &name(bdf)?)?;
    let fd = opened.ok_or(OpenError::NotViable { bdf, group: group.number, others: Vec::new() })?;
    finish(options, bdf, space, fd, Way::NoIommu, "no IOMMU, for that was asked for by name".to_owned())
}

fn by_iommufd(options: &Options, found: &Found, node: &Path, why: String) -> Result<Device, OpenError> {
    let space = Arc::new(Iommufd::open(&options.roots)?);
    let opened = space.device(node);
    let group = found.group.as_ref().map(|group| group.number);
    let fd = opened.map_err(|error| match (&error, group) {
        // The kernel says no more than that somebody owns the group.
        (OpenError::Busy { .. } | OpenError::Kernel { .. }, Some(group)) => {
            let others = lookup::in_the_way(&options.roots, group);
            if others.is_empty() { error } else { OpenError::NotViable { bdf: found.bdf, group, others } }
        }
        _ => error,
    })?;
    finish(options, found.bdf, space, fd, Way::Iommufd, why)
}

fn by_type1(options: &Options, found: &Found, why: String) -> Result<Device, OpenError> {
    let bdf = found.bdf;
    let group = found.group.as_ref().ok_or(OpenError::NoIommu(bdf))?;
    let container = Arc::new(Type1::open(&options.roots)?);
    let opened = container.device(&options.roots, group, &name(bdf)?, layout::TYPE1_V2)?;
    let Some(fd) = opened else {
        let others = lookup::in_the_way(&options.roots, group.number);
        return Err(OpenError::NotViable { bdf, group: group.number, others });
    };
    finish(options, bdf, container, fd, Way::Type1, why)
}

/// The domain above the kernel's table, and the device in it.
fn finish<M: Mapper + 'static>(
    options: &Options,
    bdf: Bdf,
    mapper: Arc<M>,
    fd: OwnedFd,
    way: Way,
    why: String,
) -> Result<Device, OpenError> {
    let limits = mapper.limits().map_err(|errno| OpenError::Kernel {
        call: "the INFO call",
        path: bdf.to_string(),
        errno,
    })?;
    // The stack maps pieces of 4 KiB; larger ones of IOMMUs that have no such pages are nothing that it could cut.
    if limits.page_sizes.trailing_zeros() > 12 {
        return Err(OpenError::PageSize { bdf, page_sizes: limits.page_sizes });
    }
    let iovas = iova_space(&limits, options.iova_bits)?;
    let table = KernelTable::new(mapper, limits.entries_left);
    let domain = Domain::new(pinfold_core::domain::Domain::new(Box::new(table), iovas), Behind::Kernel);
    let chosen = Chosen { way, why, limits };
    Ok(Device(Arc::new(Inner { bdf, fd, domain, chosen })))
}

/// The device's name as the kernel wants it.
fn name(bdf: Bdf) -> Result<CString, OpenError> {
    CString::new(bdf.to_string()).map_err(|_| OpenError::NoDevice(bdf))
}

/// What the kernel's refusal means.
pub(super) fn refused(call: &'static str, path: &Path, errno: Errno) -> OpenError {
    let name = path.display().to_string();
    match errno.raw() {
        libc::EACCES | libc::EPERM if call == "open" => OpenError::Denied { path: name },
        libc::ENOENT | libc::ENODEV | libc::ENXIO if call == "open" => {
            OpenError::NoModule { missing: name, type1: false }
        }
        libc::EBUSY => OpenError::Busy { path: name },
        _ => OpenError::Kernel { call, path: name, errno },
    }
}
