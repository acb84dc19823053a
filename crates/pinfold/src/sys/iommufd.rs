//! iommufd's system calls (`linux/iommufd.h`), and VFIO's for devices without groups. Linux 6.2;
//! devices since 6.6, maps of a memory file since 6.13.

use super::errno::{Errno, argsz, with_struct};
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// `_IO(';', 0x80 + n)`: each structure has its own size in its first field.
const fn iommu(n: u32) -> u32 {
    ((b';' as u32) << 8) | (0x80 + n)
}

const DESTROY: u32 = iommu(0);
const IOAS_ALLOC: u32 = iommu(1);
const IOAS_IOVA_RANGES: u32 = iommu(4);
const IOAS_MAP: u32 = iommu(5);
const IOAS_UNMAP: u32 = iommu(6);
const IOAS_MAP_FILE: u32 = iommu(15);
const DEVICE_BIND: u32 = ((b';' as u32) << 8) | 118;
const DEVICE_ATTACH: u32 = ((b';' as u32) << 8) | 119;

const MAP_FIXED_IOVA: u32 = 1;
const MAP_WRITEABLE: u32 = 2;
const MAP_READABLE: u32 = 4;

/// `iommu_destroy`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Destroy {
    size: u32,
    id: u32,
}

/// `iommu_ioas_alloc`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Alloc {
    size: u32,
    flags: u32,
    out_ioas_id: u32,
}

/// `iommu_ioas_iova_ranges`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Ranges {
    size: u32,
    ioas_id: u32,
    num_iovas: u32,
    reserved: u32,
    allowed_iovas: u64,
    out_iova_alignment: u64,
}

/// `iommu_ioas_map`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Map {
    size: u32,
    flags: u32,
    ioas_id: u32,
    reserved: u32,
    user_va: u64,
    length: u64,
    iova: u64,
}

/// `iommu_ioas_map_file`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct MapFile {
    size: u32,
    flags: u32,
    ioas_id: u32,
    fd: i32,
    start: u64,
    length: u64,
    iova: u64,
}

/// `iommu_ioas_unmap`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Unmap {
    size: u32,
    ioas_id: u32,
    iova: u64,
    length: u64,
}

/// `vfio_device_bind_iommufd`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Bind {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    out_devid: u32,
}

/// `vfio_device_attach_iommufd_pt`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Attach {
    argsz: u32,
    flags: u32,
    pt_id: u32,
}

// The sizes that the kernel takes for the first version of each (`MIN_SIZE` in
// drivers/iommu/iommufd/main.c).
const _: () = {
    assert!(size_of::<Destroy>() == 8 && size_of::<Alloc>() == 12 && size_of::<Ranges>() == 32);
    assert!(size_of::<Map>() == 40 && size_of::<MapFile>() == 40 && size_of::<Unmap>() == 24);
    assert!(size_of::<Bind>() == 16 && size_of::<Attach>() == 12);
};

/// The identifier of an address space of one iommufd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ioas(u32);

impl Ioas {
    /// Returns the address space that another user of the iommufd calls `id`.
    pub(crate) fn existing(id: u32) -> Self {
        Self(id)
    }
}

/// Allocates an empty address space.
pub(crate) fn alloc(iommufd: BorrowedFd<'_>) -> Result<Ioas, Errno> {
    let mut alloc = Alloc { size: argsz::<Alloc>(), ..Alloc::default() };
    // SAFETY: the structure is the one that the call fills in.
    unsafe { with_struct(iommufd, IOAS_ALLOC, &mut alloc) }?;
    Ok(Ioas(alloc.out_ioas_id))
}

/// Destroys an address space, to which no device may be attached.
pub(crate) fn destroy(iommufd: BorrowedFd<'_>, ioas: Ioas) -> Result<(), Errno> {
    let mut destroy = Destroy { size: argsz::<Destroy>(), id: ioas.0 };
    // SAFETY: the structure is the one that the call reads.
    unsafe { with_struct(iommufd, DESTROY, &mut destroy) }.map(drop)
}

/// Returns the first and the last address of each usable range, and the alignment of mappings.
/// Attaching a device may shrink the ranges.
pub(crate) fn ranges(iommufd: BorrowedFd<'_>, ioas: Ioas) -> Result<(Vec<(u64, u64)>, u64), Errno> {
    /// `iommu_iova_range`.
    #[derive(Clone, Copy, Default)]
    #[repr(C)]
    struct Range {
        start: u64,
        last: u64,
    }
    let mut capacity = 16u32;
    loop {
        let mut list = vec![Range::default(); usize::try_from(capacity).unwrap_or(0)];
        let mut query = Ranges {
            size: argsz::<Ranges>(),
            ioas_id: ioas.0,
            num_iovas: capacity,
            allowed_iovas: list.as_mut_ptr().expose_provenance() as u64,
            ..Ranges::default()
        };
        // SAFETY: the structure is the one that the call fills in; `allowed_iovas` points to
        // `num_iovas` ranges, which nothing else accesses during the call.
        let answer = unsafe { with_struct(iommufd, IOAS_IOVA_RANGES, &mut query) };
        match answer {
            Ok(_) => {
                list.truncate(usize::try_from(query.num_iovas).unwrap_or(0));
                let pairs = list.iter().map(|range| (range.start, range.last)).collect();
                return Ok((pairs, query.out_iova_alignment));
            }
            // The kernel reports how many there are.
            Err(errno)
                if errno.raw() == libc::EMSGSIZE
                    && query.num_iovas > capacity
                    && capacity < 1 << 16 =>
            {
                capacity = query.num_iovas.min(1 << 16);
            }
            Err(errno) => return Err(errno),
        }
    }
}

fn flags(access: Access) -> u32 {
    let mut flags = MAP_FIXED_IOVA;
    if access.contains(Access::READ) {
        flags |= MAP_READABLE;
    }
    if access.contains(Access::WRITE) {
        flags |= MAP_WRITEABLE;
    }
    flags
}

/// Pins the memory and maps it, all or nothing.
///
/// # Safety
/// Until [`unmap`] of the range has returned, or the iommufd and all devices bound to it are
/// closed, the memory from `addr` (`iova.len()` bytes of this process) is mapped, owned by the
/// caller, and no reference into it exists.
pub(crate) unsafe fn map(
    iommufd: BorrowedFd<'_>,
    ioas: Ioas,
    iova: IovaRange,
    addr: NonNull<u8>,
    access: Access,
) -> Result<(), Errno> {
    let mut map = Map {
        size: argsz::<Map>(),
        flags: flags(access),
        ioas_id: ioas.0,
        user_va: addr.as_ptr().expose_provenance() as u64,
        length: iova.len(),
        iova: iova.start().raw(),
        ..Map::default()
    };
    // SAFETY: the structure is the one that the call reads; that a device may access the memory is
    // the caller's promise.
    unsafe { with_struct(iommufd, IOAS_MAP, &mut map) }.map(drop)
}

/// Like [`map`], for the bytes of a memory file from `start` on: the pages are found by the file,
/// and not by an address of the process. `IOMMU_IOAS_MAP_FILE`: Linux 6.13; `ENOTTY` before.
///
/// # Safety
/// As for [`map`], for the memory of this process that shows these bytes of the file.
pub(crate) unsafe fn map_file(
    iommufd: BorrowedFd<'_>,
    ioas: Ioas,
    iova: IovaRange,
    file: BorrowedFd<'_>,
    start: u64,
    access: Access,
) -> Result<(), Errno> {
    let mut map = MapFile {
        size: argsz::<MapFile>(),
        flags: flags(access),
        ioas_id: ioas.0,
        fd: file.as_raw_fd(),
        start,
        length: iova.len(),
        iova: iova.start().raw(),
    };
    // SAFETY: the structure is the one that the call reads; that a device may access the memory is
    // the caller's promise.
    unsafe { with_struct(iommufd, IOAS_MAP_FILE, &mut map) }.map(drop)
}

/// Unmaps and unpins the range, and returns how many bytes were mapped there. No device reaches it
/// when this returns.
pub(crate) fn unmap(iommufd: BorrowedFd<'_>, ioas: Ioas, iova: IovaRange) -> Result<u64, Errno> {
    let mut unmap = Unmap {
        size: argsz::<Unmap>(),
        ioas_id: ioas.0,
        iova: iova.start().raw(),
        length: iova.len(),
    };
    // SAFETY: the structure is the one that the call reads and fills in; removing access is always
    // sound.
    unsafe { with_struct(iommufd, IOAS_UNMAP, &mut unmap) }?;
    Ok(unmap.length)
}

/// Binds a VFIO device, opened by its own node, to the iommufd. `VFIO_DEVICE_BIND_IOMMUFD`: Linux
/// 6.6.
pub(crate) fn bind(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut bind = Bind { argsz: argsz::<Bind>(), iommufd: iommufd.as_raw_fd(), ..Bind::default() };
    // SAFETY: the structure is the one that the call reads and fills in.
    unsafe { with_struct(device, DEVICE_BIND, &mut bind) }.map(drop)
}

/// Attaches a bound device to the address space. `VFIO_DEVICE_ATTACH_IOMMUFD_PT`: Linux 6.6.
pub(crate) fn attach(device: BorrowedFd<'_>, ioas: Ioas) -> Result<(), Errno> {
    let mut attach = Attach { argsz: argsz::<Attach>(), flags: 0, pt_id: ioas.0 };
    // SAFETY: the structure is the one that the call reads and fills in.
    unsafe { with_struct(device, DEVICE_ATTACH, &mut attach) }.map(drop)
}

/// Structures and numbers against those that bindgen generates from the kernel's header.
#[cfg(test)]
mod tests {
    use super::*;
    use iommufd_bindings::iommufd as theirs;
    use std::mem::{align_of, offset_of};

    /// The same size, alignment, and place of every field.
    macro_rules! same {
        ($ours:ty, $theirs:ty: $($field:ident),*) => {
            assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), stringify!($ours));
            assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), stringify!($ours));
            $(assert_eq!(offset_of!($ours, $field), offset_of!($theirs, $field), stringify!($ours.$field));)*
        };
    }

    #[test]
    fn structures_are_laid_out_as_the_kernel_has_them() {
        same!(Destroy, theirs::iommu_destroy: size, id);
        same!(Alloc, theirs::iommu_ioas_alloc: size, flags, out_ioas_id);
        same!(Map, theirs::iommu_ioas_map: size, flags, ioas_id, user_va, length, iova);
        same!(MapFile, theirs::iommu_ioas_map_file: size, flags, ioas_id, fd, start, length, iova);
        same!(Unmap, theirs::iommu_ioas_unmap: size, ioas_id, iova, length);
        same!(Ranges, theirs::iommu_ioas_iova_ranges:
            size, ioas_id, num_iovas, allowed_iovas, out_iova_alignment);
    }

    #[test]
    fn constants_equal_the_kernels() {
        let call = |number: u32| u32::from(theirs::IOMMUFD_TYPE) << 8 | number;
        let pairs = [
            (DESTROY, call(theirs::IOMMUFD_CMD_DESTROY)),
            (IOAS_ALLOC, call(theirs::IOMMUFD_CMD_IOAS_ALLOC)),
            (IOAS_IOVA_RANGES, call(theirs::IOMMUFD_CMD_IOAS_IOVA_RANGES)),
            (IOAS_MAP, call(theirs::IOMMUFD_CMD_IOAS_MAP)),
            (IOAS_UNMAP, call(theirs::IOMMUFD_CMD_IOAS_UNMAP)),
            (IOAS_MAP_FILE, call(theirs::IOMMUFD_CMD_IOAS_MAP_FILE)),
            (MAP_FIXED_IOVA, theirs::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA),
            (MAP_WRITEABLE, theirs::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE),
            (MAP_READABLE, theirs::iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE),
        ];
        for (number, (ours, theirs)) in pairs.into_iter().enumerate() {
            assert_eq!(ours, theirs, "constant {number}");
        }
    }
}
