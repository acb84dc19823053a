//! The container, its groups, and the maps of type1.

use super::layout;
use super::layout::{
    CAP_DMA_AVAIL, CAP_IOVA_RANGE, DmaMap, DmaUnmap, GroupStatus, INFO_CAPS, INFO_PGSIZES,
    Type1Info,
};
use crate::sys::errno::{Errno, argsz, with_number, with_pointer, with_struct};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// The result of type1's INFO call.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Info {
    /// One bit for each page size.
    pub(crate) page_sizes: u64,
    /// The first and the last address of each usable range; `None` if the kernel does not report
    /// it.
    pub(crate) ranges: Option<Vec<(u64, u64)>>,
    /// The number of further mappings allowed; `None` if the kernel does not report it.
    pub(crate) entries_left: Option<u64>,
}

/// Opens a device node of VFIO.
pub(crate) fn open(path: &std::path::Path) -> Result<OwnedFd, Errno> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Returns the version of the container's interface.
pub(crate) fn api_version(container: BorrowedFd<'_>) -> Result<i32, Errno> {
    // SAFETY: the call takes no argument.
    unsafe { with_number(container, layout::GET_API_VERSION, 0) }
}

/// Returns whether the container supports this kind of IOMMU.
pub(crate) fn has_extension(container: BorrowedFd<'_>, extension: u32) -> Result<bool, Errno> {
    // SAFETY: the call takes the extension's number.
    Ok(unsafe { with_number(container, layout::CHECK_EXTENSION, extension.into()) }? > 0)
}

/// Sets the kind of IOMMU; a group must be in the container.
pub(crate) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> Result<(), Errno> {
    // SAFETY: the call takes the kind's number.
    unsafe { with_number(container, layout::SET_IOMMU, kind.into()) }.map(drop)
}

/// Returns whether no device of the group has a kernel driver.
pub(crate) fn is_viable(group: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut status = GroupStatus { argsz: argsz::<GroupStatus>(), flags: 0 };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(group, layout::GROUP_GET_STATUS, &mut status) }?;
    Ok(status.flags & layout::GROUP_VIABLE != 0)
}

/// Adds the group to the container.
pub(crate) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut fd = container.as_raw_fd();
    // SAFETY: the call takes a pointer to a descriptor's number.
    unsafe { with_struct(group, layout::GROUP_SET_CONTAINER, &mut fd) }.map(drop)
}

/// Opens a device of the group by its name: `0000:01:00.0`.
pub(crate) fn device(group: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let name = name.as_ptr().cast_mut().cast();
    // SAFETY: the call reads a string up to its end, and writes nothing.
    let fd = unsafe { with_pointer(group, layout::GROUP_GET_DEVICE_FD, name) }?;
    // SAFETY: the kernel has just returned this descriptor, so this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns what the container's type1 supports.
pub(crate) fn info(container: BorrowedFd<'_>) -> Result<Info, Errno> {
    let mut head = Type1Info { argsz: argsz::<Type1Info>(), ..Type1Info::default() };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(container, layout::IOMMU_GET_INFO, &mut head) }?;
    let mut found = Info { page_sizes: 4096, ..Info::default() };
    if head.flags & INFO_PGSIZES != 0 {
        found.page_sizes = head.iova_pgsizes;
    }
    if head.flags & INFO_CAPS == 0 {
        return Ok(found);
    }
    let (bytes, filled) = grown(container, layout::IOMMU_GET_INFO, head, head.argsz)?;
    found.ranges = layout::find(&bytes, filled.cap_offset, CAP_IOVA_RANGE).map(layout::pairs);
    found.entries_left = layout::find(&bytes, filled.cap_offset, CAP_DMA_AVAIL)
        .and_then(layout::number)
        .map(u64::from);
    Ok(found)
}

/// Repeats an INFO call with the buffer size that the first one asked for: the structure and the
/// capabilities behind it.
pub(super) fn grown<T: Copy>(
    fd: BorrowedFd<'_>,
    request: u32,
    head: T,
    wanted: u32,
) -> Result<(Vec<u8>, T), Errno> {
    let size = usize::try_from(wanted).unwrap_or(0).clamp(size_of::<T>(), 1 << 20);
    // Words, so that the structure is aligned.
    let mut words = vec![0u64; size.div_ceil(8)];
    let at = words.as_mut_ptr().cast::<T>();
    // SAFETY: `words` has `size` bytes or more, which is at least the size of a `T`, aligned to 8.
    unsafe { at.write(head) };
    // SAFETY: `argsz` is `wanted`; if that is more than `size` (beyond 1 MiB, which no kernel has)
    // the first word is made smaller here. The first field of each INFO structure is its `argsz`.
    unsafe { at.cast::<u32>().write(u32::try_from(size).unwrap_or(0)) };
    // SAFETY: the structure is what the call fills in, with the `argsz` bytes that it says.
    unsafe { with_pointer(fd, request, at.cast()) }?;
    // SAFETY: written above and by the call, which leaves plain integers.
    let filled = unsafe { at.read() };
    Ok((words.iter().flat_map(|word| word.to_ne_bytes()).take(size).collect(), filled))
}

/// Pins the memory and maps it, all or nothing.
///
/// # Safety
/// Until [`unmap`] of the range has returned, or all descriptors of the container, its groups and
/// devices are closed, the memory from `addr` (`iova.len()` bytes of this process) is mapped, owned
/// by the caller, and no reference into it exists.
pub(crate) unsafe fn map(
    container: BorrowedFd<'_>,
    iova: IovaRange,
    addr: NonNull<u8>,
    access: Access,
) -> Result<(), Errno> {
    let mut flags = 0;
    if access.contains(Access::READ) {
        flags |= layout::DMA_READ;
    }
    if access.contains(Access::WRITE) {
        flags |= layout::DMA_WRITE;
    }
    let mut map = DmaMap {
        argsz: argsz::<DmaMap>(),
        flags,
        vaddr: addr.as_ptr().expose_provenance() as u64,
        iova: iova.start().raw(),
        size: iova.len(),
    };
    // SAFETY: the structure is the one that the call reads; that a device may access the memory is
    // the caller's promise.
    unsafe { with_struct(container, layout::IOMMU_MAP_DMA, &mut map) }.map(drop)
}

/// Unmaps and unpins the range, and returns how many bytes were mapped there. No device reaches it
/// when this returns.
pub(crate) fn unmap(container: BorrowedFd<'_>, iova: IovaRange) -> Result<u64, Errno> {
    let mut unmap = DmaUnmap {
        argsz: argsz::<DmaUnmap>(),
        flags: 0,
        iova: iova.start().raw(),
        size: iova.len(),
    };
    // SAFETY: the structure is the one that the call reads and fills in; removing access is always
    // sound.
    unsafe { with_struct(container, layout::IOMMU_UNMAP_DMA, &mut unmap) }?;
    Ok(unmap.size)
}
