//! The kernel's interfaces to a device and its IOMMU: the one through which a device is opened, its
//! limits, and the address space behind each.

use super::error::OpenError;
use crate::pci::lookup::PciDevice;
use crate::sys::Errno;
use crate::sys::files::Roots;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::BackendError;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// The addresses, page sizes and number of mappings that the kernel supports for a domain.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// The first and the last address of each usable range; `None` if the kernel does not report
    /// them (before 5.4).
    pub ranges: Option<Vec<(u64, u64)>>,
    /// One bit for each page size of the IOMMU.
    pub page_sizes: u64,
    /// The number of further mappings that the kernel allows; `None` if it sets no limit.
    pub entries_left: Option<u64>,
}

/// The descriptor of an open device. Dropping it closes the device, and tells its address space then
/// that it has left.
pub(crate) struct DeviceFd {
    fd: OwnedFd,
    #[expect(dead_code, reason = "held, and dropped after the descriptor")]
    left: Left,
}

/// Runs when it is dropped.
struct Left(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(left) = self.0.take() {
            left();
        }
    }
}

impl DeviceFd {
    /// Describes a device whose address space runs `left` when it has been closed.
    pub(super) fn new(fd: OwnedFd, left: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { fd, left: Left(Some(Box::new(left))) }
    }
}

impl From<OwnedFd> for DeviceFd {
    /// Describes a device for which its address space keeps nothing open.
    fn from(fd: OwnedFd) -> Self {
        Self { fd, left: Left(None) }
    }
}

impl AsFd for DeviceFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An I/O address space in the kernel, and the devices attached to it. `map` and `unmap` are one
/// system call each.
pub(crate) trait IommuContext: Send + Sync {
    /// Returns the kernel's interface; never [`IommuInterface::Best`].
    fn interface(&self) -> IommuInterface;

    /// Returns the name of the backend: `vfio` (that is, type1), `iommufd` or `none`.
    fn name(&self) -> &'static str;

    /// Returns the name of the call behind [`map`](Self::map), for messages.
    fn map_call(&self) -> &'static str;

    /// Returns the command that raises the limit of entries, which is `limit` now.
    fn raise_entries(&self, limit: u64) -> String;

    /// Opens a device and attaches it. Returns `None` if its group is not viable.
    fn open_device(&self, roots: &Roots, device: &PciDevice)
    -> Result<Option<DeviceFd>, OpenError>;

    /// Pins the memory from `addr`, as long as `iova`, and gives the devices access to it: all or
    /// nothing.
    ///
    /// # Safety
    /// Until [`unmap`](Self::unmap) of the range has returned, or the value and all its devices are
    /// gone, the memory is mapped in this process and no reference into it exists.
    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno>;

    /// Unmaps any number of whole mappings in the range, and returns how many bytes were mapped
    /// there. No device reaches them when it returns.
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno>;

    /// Returns the current limits.
    fn limits(&self) -> Result<Limits, Errno>;

    /// Like [`Properties::translates`](pinfold_core::domain::Properties::translates).
    fn translates(&self) -> bool {
        true
    }

    /// Returns whether mapped memory counts against `RLIMIT_MEMLOCK`, because the kernel pins it.
    fn is_charged(&self) -> bool {
        self.translates()
    }

    /// Prepares memory that may be mapped from now on, if the kernel does not pin mapped memory. No
    /// two such memories overlap.
    fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let _ = memory;
        Ok(())
    }

    /// Reverses [`register_memory`](Self::register_memory), when nothing of it is mapped.
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let _ = memory;
        Ok(())
    }

    /// Lends the file that registered memory shows from its start: the memory may be mapped by it,
    /// until it is unregistered.
    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        let _ = (memory, file);
    }

    /// Like [`Backend::required_iova`](pinfold_core::domain::Backend::required_iova).
    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }
}

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
    /// address, regardless of this program's mappings, and a revocation revokes nothing: this
    /// library cannot promise anything about a faulty or hostile device. Therefore only
    /// [`Options::without_iommu`](crate::vfio::Options::without_iommu), which is `unsafe`, opens a
    /// device this way. Arenas must be mapped as a whole, and be contiguous in physical memory, as
    /// a hugepage is.
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
        match may_open(path) {
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

/// Returns whether the kernel has iommufd for devices, and this user may open it.
pub(crate) fn has_iommufd(roots: &Roots) -> bool {
    roots.dev.join("vfio/devices").is_dir() && may_open(&roots.dev.join("iommu")).is_ok()
}

/// Checks whether a node can be opened, as the effective user, who opens it.
fn may_open(path: &Path) -> Result<(), rustix::io::Errno> {
    use rustix::fs::{self, Access, AtFlags};
    fs::accessat(fs::CWD, path, Access::READ_OK | Access::WRITE_OK, AtFlags::EACCESS)
}

/// The usable ranges of a kernel that does not report them: the narrowest IOMMU of x86, without its
/// interrupt window.
const DEFAULT_RANGES: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

/// Returns the addresses that may be allocated: those that the kernel translates, within the `bits`
/// that the device reaches.
pub(crate) fn iova_space(limits: &Limits, bits: u32) -> Result<IovaSpace, BackendError> {
    let reach =
        usable(limits).iter().map(|(_, last)| u64::BITS - last.leading_zeros()).max().unwrap_or(0);
    // A width below the minimum of `IovaSpace` is an error; one above its maximum is used in part.
    let space = IovaSpace::new(reach.min(bits).min(57))?;
    for gap in gaps(limits, bits) {
        space.reserve(gap)?;
    }
    Ok(space)
}

/// Returns what lies between the usable ranges, after them, and beyond `bits`.
pub(crate) fn gaps(limits: &Limits, bits: u32) -> Vec<IovaRange> {
    let mut gaps = Vec::new();
    let mut free_from = 0u64;
    let beyond = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
    for (first, last) in usable(limits).into_iter().chain([(u64::MAX, u64::MAX)]) {
        // A range need not begin or end at a page: the granules that it does not fill are reserved
        // with the gap.
        let gap = first.saturating_sub(free_from);
        gaps.extend(IovaRange::new(Iova::new(free_from), gap));
        free_from = free_from.max(last.saturating_add(1));
    }
    gaps.extend(IovaRange::new(Iova::new(beyond), u64::MAX - beyond));
    gaps
}

/// Returns the usable ranges in ascending order.
pub(crate) fn usable(limits: &Limits) -> Vec<(u64, u64)> {
    let mut ranges = limits.ranges.clone().unwrap_or_else(|| DEFAULT_RANGES.to_vec());
    ranges.retain(|(first, last)| first <= last);
    ranges.sort_unstable();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(ranges: &[(u64, u64)]) -> Limits {
        Limits { ranges: Some(ranges.to_vec()), ..Limits::default() }
    }

    #[test]
    fn the_interrupt_window_is_never_allocated() {
        for limits in [limits(&DEFAULT_RANGES), Limits::default()] {
            let space = iova_space(&limits, 32).unwrap();
            let window = IovaRange::new(Iova::new(0xfee0_0000), 0x10_0000).unwrap();
            assert!(space.alloc_at(window).is_err());
            let mut got = 0u64;
            while let Ok(range) = space.alloc(1 << 20, 4096, None) {
                assert!(!range.overlaps(&window) && range.end().raw() <= 1 << 32, "{range}");
                got += range.len();
            }
            assert_eq!(
                got,
                (1 << 32) - (2 << 20),
                "all but the window and the piece that the null page breaks"
            );
        }
    }

    #[test]
    fn the_width_is_the_smaller_of_iommu_and_device() {
        assert_eq!(iova_space(&limits(&DEFAULT_RANGES), 64).unwrap().bits(), 39);
        assert_eq!(iova_space(&limits(&DEFAULT_RANGES), 36).unwrap().bits(), 36);
        assert_eq!(iova_space(&limits(&[(0, u64::MAX)]), 64).unwrap().bits(), 57);
        assert!(iova_space(&limits(&[]), 64).is_err(), "nothing is translated");
    }

    proptest! {
        #[test]
        fn nothing_outside_the_ranges_is_allocated(ranges in proptest::collection::vec((0u64..1 << 24, 0u64..1 << 24), 1..6)) {
            let limits = limits(&ranges);
            if let Ok(space) = iova_space(&limits, 24) {
                while let Ok(got) = space.alloc(0x4000, 0x1000, None) {
                    let inside = |at: u64| ranges.iter().any(|(first, last)| (*first..=*last).contains(&at));
                    prop_assert!((got.start().raw()..got.end().raw()).step_by(0x400).all(inside), "{got}");
                }
            }
        }
    }
}
