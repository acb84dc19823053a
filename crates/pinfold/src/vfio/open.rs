//! Opens a device by its address, and checks the common omissions in the order in which they fail.

use super::device::{Attachment, Device, Inner, Options};
use crate::backend::context::{
    DeviceFd, IommuContext, IommuInterface, Limits, gaps, has_iommufd, iova_space, select, usable,
};
use crate::backend::error::OpenError;
use crate::backend::iommufd::Iommufd;
use crate::backend::kernel_table::KernelTable;
use crate::backend::none::NoIommu;
use crate::backend::vfio::{DEFAULT_ENTRIES, Type1};
use crate::domain::{DeviceSide, Domain};
use crate::pci::Bdf;
use crate::pci::lookup::{self, PciDevice, VFIO_PCI};
use crate::sys::files::Roots;
use pinfold_core::addr::IovaRange;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::os::fd::BorrowedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

impl Device {
    /// Opens the device at `address` (`0000:01:00.0`) in a domain of its own.
    ///
    /// It must be bound to `vfio-pci` (`pinfold bind`). Opening does not reset it; bus mastering
    /// stays as it was (off, after a bind).
    ///
    /// # Errors
    /// [`OpenError`], which names the command that fixes it.
    pub fn open(address: &str, options: &Options) -> Result<Self, OpenError> {
        let bdf = Bdf::from_str(address)?;
        check_acknowledged(bdf, options.interface, options)?;
        let found = lookup::find(&options.roots, bdf)?;
        let best = select(&options.roots, found.cdev.as_deref());
        let by_name = |name: &str| format!("{name}, as requested");
        let (interface, reason) = match options.interface {
            IommuInterface::Best => (best.interface, best.reason),
            IommuInterface::Type1 => (IommuInterface::Type1, by_name("type1")),
            IommuInterface::Iommufd if best.interface != IommuInterface::Iommufd => {
                return Err(OpenError::NoIommufd { bdf, reason: best.reason });
            }
            IommuInterface::Iommufd => (IommuInterface::Iommufd, by_name("iommufd")),
            IommuInterface::NoIommu => (IommuInterface::NoIommu, by_name("no IOMMU")),
        };
        check(&found, interface)?;
        let context = open_context(interface, &options.roots)?;
        let fd = open_device(&*context, &options.roots, &found)?;
        let limits = limits(&*context, bdf)?;
        let iovas = iova_space(&limits, options.iova_bits)?;
        let domain = domain(context, limits.entries_left, iovas);
        let attachment = Attachment { interface, reason, limits };
        Ok(Self(Arc::new(Inner { bdf, fd, domain, attachment, irqs_on: AtomicU32::new(0) })))
    }

    /// Opens the device at `address` in the domain of another device: both reach the same memory at
    /// the same addresses, with one entry and one pin. The interface is the domain's; for
    /// [`IommuInterface::NoIommu`], `options` must be those of [`Options::without_iommu`].
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::OtherDomain`] if the kernel does not keep the domain's table,
    /// and [`OpenError::Domain`] if something is mapped at an address that this device cannot
    /// reach.
    pub fn open_in(address: &str, domain: &Domain, options: &Options) -> Result<Self, OpenError> {
        let bdf = Bdf::from_str(address)?;
        let KernelContext(context) = domain.device_side().ok_or(OpenError::OtherDomain(bdf))?;
        let interface = context.interface();
        check_acknowledged(bdf, interface, options)?;
        let found = lookup::find(&options.roots, bdf)?;
        check(&found, interface)?;
        let fd = open_device(&**context, &options.roots, &found)?;
        let limits = limits(&**context, bdf)?;
        for gap in gaps(&limits, options.iova_bits) {
            domain.reserve_range(gap)?;
        }
        let attachment = Attachment { interface, reason: "that of its domain".to_owned(), limits };
        Ok(Self(Arc::new(Inner {
            bdf,
            fd,
            domain: domain.clone(),
            attachment,
            irqs_on: AtomicU32::new(0),
        })))
    }
}

impl Domain {
    /// Creates a domain for real devices before there is one: [`Device::open_in`] opens each of them in
    /// it. Memory may be mapped before, and the first device finds it.
    ///
    /// Its addresses are those that every IOMMU of VFIO translates: 39 bits, without the window of
    /// interrupts. With [`IommuInterface::Type1`] memory is pinned when the first device is opened;
    /// where that fails, the device is not opened, and the domain is as before.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::NoIommuDomain`] for [`IommuInterface::NoIommu`].
    pub fn vfio(options: &Options) -> Result<Self, OpenError> {
        let interface = match options.interface {
            IommuInterface::NoIommu => return Err(OpenError::NoIommuDomain),
            IommuInterface::Best if has_iommufd(&options.roots) => IommuInterface::Iommufd,
            IommuInterface::Best => IommuInterface::Type1,
            interface => interface,
        };
        let entries = (interface == IommuInterface::Type1).then_some(DEFAULT_ENTRIES);
        let iovas = iova_space(&Limits::default(), options.iova_bits)?;
        Ok(domain(open_context(interface, &options.roots)?, entries, iovas))
    }

    /// Creates a domain over an address space that exists: `ioas` of `iommufd`, which is duplicated. It
    /// maps at addresses in `window` only (`None`: all that the kernel translates there), so that they
    /// are no other user's. [`Device::open_in`] opens further devices in it.
    ///
    /// Dropping the domain and everything that belongs to it ends its mappings; the address space,
    /// its devices and other users' mappings stay as they are. The kernel unmaps the mappings that
    /// a process leaves behind only when no process has the iommufd any more.
    ///
    /// # Errors
    /// [`OpenError::Kernel`]: it is no iommufd, or has no such address space. [`OpenError::Domain`]: no
    /// usable address is in the window.
    ///
    /// # Safety
    /// Until the domain and everything in it have ended, no other user of the iommufd gives devices
    /// access to the domain's mapped memory except through this address space (`IOMMU_IOAS_COPY`,
    /// `IOMMU_IOAS_CHANGE_PROCESS`): the domain could not revoke that.
    pub unsafe fn import(
        iommufd: BorrowedFd<'_>,
        ioas: u32,
        window: Option<IovaRange>,
        options: &Options,
    ) -> Result<Self, OpenError> {
        let (context, mut limits) = Iommufd::import(iommufd, ioas)?;
        // Without a device the kernel translates every address, and the first device fewer.
        if limits.ranges.as_deref() == Some(&[(0, u64::MAX)]) {
            limits.ranges = None;
        }
        if let Some(window) = window {
            let (first, last) = (window.start().raw(), window.end().raw() - 1);
            let within = |(from, to): (u64, u64)| (from.max(first), to.min(last));
            limits.ranges = Some(usable(&limits).into_iter().map(within).collect());
        }
        let iovas = iova_space(&limits, options.iova_bits)?;
        Ok(domain(Arc::new(context), None, iovas))
    }
}

/// Returns the domain of a context.
fn domain(context: Arc<dyn IommuContext>, entries: Option<u64>, iovas: IovaSpace) -> Domain {
    let table = KernelTable::new(Arc::clone(&context), entries);
    let core = pinfold_core::domain::Domain::new(Arc::new(table), iovas);
    Domain::new(core, KernelContext(context))
}

/// Refuses a device without an IOMMU unless the caller has taken responsibility for it.
fn check_acknowledged(
    bdf: Bdf,
    interface: IommuInterface,
    options: &Options,
) -> Result<(), OpenError> {
    let refused = interface == IommuInterface::NoIommu && !options.acknowledged;
    if refused { Err(OpenError::NotAcknowledged(bdf)) } else { Ok(()) }
}

/// Checks in `/sys` whether the device can be opened by the interface.
fn check(found: &PciDevice, interface: IommuInterface) -> Result<(), OpenError> {
    let bdf = found.bdf;
    if found.driver.as_deref() != Some(VFIO_PCI) {
        let driver = found.driver.clone();
        return Err(OpenError::OtherDriver { bdf, driver });
    }
    let no_iommu = interface == IommuInterface::NoIommu;
    match &found.group {
        None if no_iommu => Err(OpenError::NoIommuMode(bdf)),
        None => Err(OpenError::NoIommu(bdf)),
        Some(group) if group.unprotected && !no_iommu => Err(OpenError::Unprotected(bdf)),
        Some(group) if !group.unprotected && no_iommu => Err(OpenError::Protected(bdf)),
        Some(_) => Ok(()),
    }
}

/// Returns the limits of the kernel's translation for the attached devices.
fn limits(context: &dyn IommuContext, bdf: Bdf) -> Result<Limits, OpenError> {
    let failed = |errno| OpenError::Kernel { call: "the INFO call", path: bdf.to_string(), errno };
    let limits = context.limits().map_err(failed)?;
    // The stack maps pieces of 4 KiB, which an IOMMU with only larger pages cannot.
    if limits.page_sizes.trailing_zeros() > 12 {
        return Err(OpenError::PageSize { bdf, page_sizes: limits.page_sizes });
    }
    Ok(limits)
}

/// The device side of a domain whose table the kernel keeps.
struct KernelContext(Arc<dyn IommuContext>);

impl DeviceSide for KernelContext {
    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        self.0.lend_file(memory, file);
    }
}

fn open_context(
    interface: IommuInterface,
    roots: &Roots,
) -> Result<Arc<dyn IommuContext>, OpenError> {
    Ok(match interface {
        IommuInterface::Best | IommuInterface::Type1 => Arc::new(Type1::open(roots)?),
        IommuInterface::Iommufd => Arc::new(Iommufd::open(roots)?),
        IommuInterface::NoIommu => Arc::new(NoIommu::open(roots)?),
    })
}

/// Opens the device, attached to `context`.
fn open_device(
    context: &dyn IommuContext,
    roots: &Roots,
    device: &PciDevice,
) -> Result<DeviceFd, OpenError> {
    let group = device.group.as_ref().ok_or(OpenError::NoIommu(device.bdf))?.number;
    let opened = context.open_device(roots, device);
    // Some calls report no more than that the group has another owner.
    let unclear =
        matches!(opened, Ok(None) | Err(OpenError::Busy { .. } | OpenError::Kernel { .. }));
    let others = if unclear { lookup::blocking_members(roots, group) } else { Vec::new() };
    match opened {
        Ok(Some(fd)) => Ok(fd),
        Err(error) if others.is_empty() => Err(error),
        _ => Err(OpenError::NotViable { bdf: device.bdf, group, others }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::NoDevice;
    use std::os::fd::AsFd;

    const ADDRESS: &str = "ffff:ff:1f.7";

    fn open(options: &Options) -> OpenError {
        Device::open(ADDRESS, options).unwrap_err()
    }

    #[test]
    fn no_safe_call_opens_a_device_without_an_iommu() {
        let bdf = Bdf::from_str(ADDRESS).unwrap();
        let by_name = Options::new().interface(IommuInterface::NoIommu);
        assert_eq!(open(&by_name), OpenError::NotAcknowledged(bdf));
        // Nor in the domain of such a device: its `Options` cover other devices.
        assert_eq!(
            check_acknowledged(bdf, IommuInterface::NoIommu, &Options::new()),
            Err(OpenError::NotAcknowledged(bdf))
        );
        // SAFETY: the device does not exist, so none is opened.
        let acknowledged = unsafe { Options::new().without_iommu() };
        assert_eq!(open(&acknowledged), OpenError::NoDevice(NoDevice(bdf)));
        assert_eq!(check_acknowledged(bdf, IommuInterface::NoIommu, &acknowledged), Ok(()));
        assert_eq!(check_acknowledged(bdf, IommuInterface::Type1, &Options::new()), Ok(()));
    }

    #[test]
    fn what_is_no_iommufd_is_not_imported() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: it is refused.
        let refused = unsafe { Domain::import(file.as_fd(), 1, None, &Options::new()) };
        let Err(OpenError::Kernel { call, errno, .. }) = refused else { panic!("imported") };
        assert_eq!((call, errno.raw()), ("IOMMU_IOAS_IOVA_RANGES", libc::ENOTTY));
    }
}
