//! VFIO's system calls (`linux/vfio.h`), as they are: numbers, layouts, one function a call.
//!
//! What they are used for, and in which order, is the business of [`crate::vfio`]. The first kernel is 3.6 for groups and
//! type1, 4.0 for its second version; where a call is younger its function says so.

pub(crate) mod caps;
pub(crate) mod container;
pub(crate) mod device;
pub(crate) mod layout;

use super::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes an `ioctl` whose argument is a structure that the kernel reads and, for some, fills in. A call that a signal
/// interrupted has changed nothing, and is made again.
///
/// # Safety
/// `T` is the structure that `request` takes, `repr(C)` and of plain numbers; what it says of its own length
/// (`argsz`) and of memory elsewhere is true.
pub(crate) unsafe fn with_struct<T>(fd: BorrowedFd<'_>, request: u32, arg: &mut T) -> Result<i32, Errno> {
    // SAFETY: a structure is a pointer to memory for the time of the call; the rest is the caller's promise.
    unsafe { with_pointer(fd, request, std::ptr::from_mut(arg).cast()) }
}

/// The same by a pointer.
///
/// # Safety
/// As for [`with_struct`], of what `arg` points to.
unsafe fn with_pointer(fd: BorrowedFd<'_>, request: u32, arg: *mut libc::c_void) -> Result<i32, Errno> {
    loop {
        // SAFETY: the caller's promise: `arg` points to what `request` takes.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), arg) };
        if result >= 0 {
            return Ok(result);
        }
        let errno = super::last_errno();
        if errno.raw() != libc::EINTR {
            return Err(errno);
        }
    }
}

/// Makes an `ioctl` whose argument is a number, or none (0).
///
/// # Safety
/// `request` takes a number, not a pointer.
unsafe fn with_number(fd: BorrowedFd<'_>, request: u32, number: libc::c_ulong) -> Result<i32, Errno> {
    // SAFETY: the caller's promise: the kernel takes the argument for a number.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), number) };
    if result >= 0 { Ok(result) } else { Err(super::last_errno()) }
}

/// How long a structure is, as `argsz` wants it.
pub(crate) const fn argsz<T>() -> u32 {
    // No structure here is anywhere near 4 GiB.
    #[expect(clippy::cast_possible_truncation, reason = "a structure of a few words")]
    let bytes = size_of::<T>() as u32;
    bytes
}
