//! From an address to an open device: the checks that a person forgets, in the order in which they fail.

use super::bdf::Bdf;
use super::choice::{Choice, IommuInterface, choose};
use super::device::{Device, Inner};
use super::error::OpenError;
use super::iommufd::Iommufd;
use super::lookup::{self, Found, VFIO_PCI};
use super::mapper::{Limits, Mapper, gaps, iova_space};
use super::noiommu::NoIommu;
use super::table::KernelTable;
use super::type1::Type1;
use crate::domain::{Behind, Domain};
use crate::probe::Roots;
use crate::sys::Errno;
use crate::sys::vfio::layout;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// How a device is opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    pub(super) way: IommuInterface,
    /// Whether the caller has taken responsibility for a device without translation.
    pub(super) vouched: bool,
    pub(super) iova_bits: u32,
    pub(super) roots: Roots,
}

impl Default for Options {
    fn default() -> Self {
        Self { way: IommuInterface::default(), vouched: false, iova_bits: 64, roots: Roots::default() }
    }
}

impl Options {
    /// [`IommuInterface::Best`], and a device that reaches 64 bits.
    pub fn new() -> Self {
        Self::default()
    }

    /// By this interface or not at all. [`IommuInterface::NoIommu`] is refused here: see [`without_iommu`](Self::without_iommu).
    #[must_use]
    pub fn way(mut self, way: IommuInterface) -> Self {
        self.way = way;
        self
    }

    /// By [`IommuInterface::NoIommu`]: nothing translates what the device does, and nothing protects against it.
    ///
    /// # Safety
    /// A device that is opened with these options, or with a clone of them, reaches all memory of the machine at its
    /// physical address. For each one the caller answers that, until its bus mastering is off for good:
    /// - it makes no access but those that its driver asked for;
    /// - whoever has a handle to the device, its registers or its domain is trusted with all physical memory, and gives the
    ///   device only addresses that a live mapping of that domain, or a live arena in it, has named;
    /// - no mapping ends and no arena goes while the device may still use the addresses: a revocation, an unmap and a
    ///   quarantine take nothing away from it.
    #[must_use]
    pub unsafe fn without_iommu(mut self) -> Self {
        (self.way, self.vouched) = (IommuInterface::NoIommu, true);
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
    /// The interface: never [`IommuInterface::Best`].
    pub way: IommuInterface,
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
        let bdf = Bdf::from_str(address)?;
        vouched(bdf, options.way, options)?;
        let found = lookup::find(&options.roots, bdf)?;
        let best = choose(&options.roots, found.cdev.as_deref());
        let by_name = |name: &str| format!("{name}, for it was asked for by name");
        let (way, why) = match options.way {
            IommuInterface::Best => (best.way, best.why),
            IommuInterface::Type1 => (IommuInterface::Type1, by_name("type1")),
            IommuInterface::Iommufd if best.way != IommuInterface::Iommufd => {
                return Err(OpenError::NoIommufd { bdf: found.bdf, why: best.why });
            }
            IommuInterface::Iommufd => (IommuInterface::Iommufd, by_name("iommufd")),
            IommuInterface::NoIommu => (IommuInterface::NoIommu, by_name("no IOMMU")),
        };
        check(&found, way)?;
        let space = Space::new(way, options)?;
        let fd = space.device(options, &found)?;
        let limits = limits(&space, found.bdf)?;
        let iovas = iova_space(&limits, options.iova_bits)?;
        let table = KernelTable::new(space.mapper(), limits.entries_left);
        let core = pinfold_core::domain::Domain::new(Box::new(table), iovas);
        let domain = Domain::new(core, Behind::Kernel(space));
        let chosen = Chosen { way, why, limits };
        Ok(Self(Arc::new(Inner { bdf: found.bdf, fd, domain, chosen, irqs_on: AtomicU32::new(0) })))
    }

    /// Opens the device at `address` in the domain of another one: both reach the same memory at the same addresses, by one
    /// entry and one pin. The way is the domain's; where that is [`IommuInterface::NoIommu`], `options` must be those of
    /// [`Options::without_iommu`].
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::OtherDomain`] where the domain is not one of VFIO's, and [`OpenError::Domain`] where
    /// something is mapped at an address that this device does not reach.
    pub fn open_in(address: &str, domain: &Domain, options: &Options) -> Result<Self, OpenError> {
        let bdf = Bdf::from_str(address)?;
        let space = domain.kernel().ok_or(OpenError::OtherDomain(bdf))?;
        let way = space.way();
        vouched(bdf, way, options)?;
        let found = lookup::find(&options.roots, bdf)?;
        check(&found, way)?;
        let fd = space.device(options, &found)?;
        let limits = limits(space, bdf)?;
        for gap in gaps(&limits, options.iova_bits) {
            domain.reserve_range(gap)?;
        }
        let chosen = Chosen { way, why: "that of its domain".to_owned(), limits };
        Ok(Self(Arc::new(Inner { bdf, fd, domain: domain.clone(), chosen, irqs_on: AtomicU32::new(0) })))
    }
}

/// Refuses a device without an IOMMU unless the caller has taken responsibility for it.
fn vouched(bdf: Bdf, way: IommuInterface, options: &Options) -> Result<(), OpenError> {
    if way == IommuInterface::NoIommu && !options.vouched { Err(OpenError::Unvouched(bdf)) } else { Ok(()) }
}

/// Whether the device can be opened that way, as far as `/sys` tells.
fn check(found: &Found, way: IommuInterface) -> Result<(), OpenError> {
    let bdf = found.bdf;
    if found.driver.as_deref() != Some(VFIO_PCI) {
        let driver = found.driver.clone();
        return Err(OpenError::OtherDriver { bdf, driver });
    }
    let by_name = way == IommuInterface::NoIommu;
    match &found.group {
        None if by_name => Err(OpenError::NoIommuMode(bdf)),
        None => Err(OpenError::NoIommu(bdf)),
        Some(group) if group.unprotected && !by_name => Err(OpenError::Unprotected(bdf)),
        Some(group) if !group.unprotected && by_name => Err(OpenError::Protected(bdf)),
        Some(_) => Ok(()),
    }
}

/// What the kernel translates for the devices that are in it.
fn limits(space: &Space, bdf: Bdf) -> Result<Limits, OpenError> {
    let failed = |errno| OpenError::Kernel { call: "the INFO call", path: bdf.to_string(), errno };
    let limits = space.mapper().limits().map_err(failed)?;
    // The stack maps pieces of 4 KiB; larger ones of IOMMUs that have no such pages are nothing that it could cut.
    if limits.page_sizes.trailing_zeros() > 12 {
        return Err(OpenError::PageSize { bdf, page_sizes: limits.page_sizes });
    }
    Ok(limits)
}

/// The kernel's side of a domain: what its devices are attached to. A handle.
#[derive(Clone, Debug)]
pub(crate) enum Space {
    Type1(Arc<Type1>),
    Iommufd(Arc<Iommufd>),
    NoIommu(Arc<NoIommu>),
}

impl Space {
    fn new(way: IommuInterface, options: &Options) -> Result<Self, OpenError> {
        let roots = &options.roots;
        Ok(match way {
            IommuInterface::Best | IommuInterface::Type1 => Self::Type1(Arc::new(Type1::open(roots)?)),
            IommuInterface::Iommufd => Self::Iommufd(Arc::new(Iommufd::open(roots)?)),
            IommuInterface::NoIommu => Self::NoIommu(Arc::new(NoIommu::open(roots)?)),
        })
    }

    fn way(&self) -> IommuInterface {
        match self {
            Self::Type1(_) => IommuInterface::Type1,
            Self::Iommufd(_) => IommuInterface::Iommufd,
            Self::NoIommu(_) => IommuInterface::NoIommu,
        }
    }

    fn mapper(&self) -> Arc<dyn Mapper> {
        match self {
            Self::Type1(space) => Arc::clone(space) as Arc<dyn Mapper>,
            Self::Iommufd(space) => Arc::clone(space) as Arc<dyn Mapper>,
            Self::NoIommu(space) => Arc::clone(space) as Arc<dyn Mapper>,
        }
    }

    /// Opens a device, attached.
    fn device(&self, options: &Options, found: &Found) -> Result<OwnedFd, OpenError> {
        let (bdf, roots) = (found.bdf, &options.roots);
        let group = found.group.as_ref().ok_or(OpenError::NoIommu(bdf))?;
        let name = CString::new(bdf.to_string()).map_err(|_| OpenError::NoDevice(bdf))?;
        let opened = match self {
            Self::Type1(space) => space.device(roots, group, &name, layout::TYPE1_V2),
            Self::Iommufd(space) => match choose(roots, found.cdev.as_deref()) {
                Choice { node: Some(node), .. } => space.device(&node).map(Some),
                Choice { why, .. } => Err(OpenError::NoIommufd { bdf, why }),
            },
            Self::NoIommu(space) => {
                tracing::warn!(%bdf, "opened without an IOMMU: the device can reach all memory of this machine");
                space.device(roots, group, &name)
            }
        };
        // Some calls say no more than that somebody owns the group.
        let unclear = matches!(opened, Ok(None) | Err(OpenError::Busy { .. } | OpenError::Kernel { .. }));
        let others = if unclear { lookup::in_the_way(roots, group.number) } else { Vec::new() };
        match opened {
            Ok(Some(fd)) => Ok(fd),
            Err(error) if others.is_empty() => Err(error),
            _ => Err(OpenError::NotViable { bdf, group: group.number, others }),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: &str = "ffff:ff:1f.7";

    fn no_iommu(options: &Options) -> OpenError {
        Device::open(ADDRESS, options).unwrap_err()
    }

    #[test]
    fn no_safe_call_opens_a_device_without_an_iommu() {
        let bdf = Bdf::from_str(ADDRESS).unwrap();
        let by_name = Options::new().way(IommuInterface::NoIommu);
        assert_eq!(no_iommu(&by_name), OpenError::Unvouched(bdf));
        // Nor into the domain of such a device: that responsibility covers other devices.
        assert_eq!(vouched(bdf, IommuInterface::NoIommu, &Options::new()), Err(OpenError::Unvouched(bdf)));
        // SAFETY: there is no such device, so none is opened.
        let answered = unsafe { Options::new().without_iommu() };
        assert_eq!(no_iommu(&answered), OpenError::NoDevice(bdf));
        assert_eq!(vouched(bdf, IommuInterface::NoIommu, &answered), Ok(()));
        assert_eq!(vouched(bdf, IommuInterface::Type1, &Options::new()), Ok(()));
    }
}
