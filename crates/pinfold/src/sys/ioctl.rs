//! `ioctl` with the argument kinds of VFIO and iommufd, which encode no size in the request number.

use super::errno::{Errno, last_errno};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes an `ioctl` whose argument is a structure that the kernel reads and, for some requests,
/// fills in. A call that a signal interrupted has changed nothing, and is repeated.
///
/// # Safety
/// `T` is the structure that `request` takes, `repr(C)` and made of plain integers; what it says
/// about its own length (`argsz`) and about memory elsewhere is true.
pub(crate) unsafe fn with_struct<T>(
    fd: BorrowedFd<'_>,
    request: u32,
    arg: &mut T,
) -> Result<i32, Errno> {
    // SAFETY: a structure is a pointer to memory for the duration of the call; the rest is the
    // caller's promise.
    unsafe { with_pointer(fd, request, std::ptr::from_mut(arg).cast()) }
}

/// As [`with_struct`], by pointer.
///
/// # Safety
/// As for [`with_struct`], for what `arg` points to.
pub(crate) unsafe fn with_pointer(
    fd: BorrowedFd<'_>,
    request: u32,
    arg: *mut libc::c_void,
) -> Result<i32, Errno> {
    loop {
        // SAFETY: the caller's promise: `arg` points to what `request` takes.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), arg) };
        if result >= 0 {
            return Ok(result);
        }
        let errno = last_errno();
        if errno.raw() != libc::EINTR {
            return Err(errno);
        }
    }
}

/// Makes an `ioctl` whose argument is an integer, or none (0).
///
/// # Safety
/// `request` takes an integer, not a pointer.
pub(crate) unsafe fn with_number(
    fd: BorrowedFd<'_>,
    request: u32,
    number: libc::c_ulong,
) -> Result<i32, Errno> {
    // SAFETY: the caller's promise: the kernel takes the argument as an integer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request.into(), number) };
    if result >= 0 { Ok(result) } else { Err(last_errno()) }
}

/// Returns the size of a structure as `argsz` carries it.
pub(crate) const fn argsz<T>() -> u32 {
    // No structure here is anywhere near 4 GiB.
    #[expect(clippy::cast_possible_truncation, reason = "a structure of a few words")]
    let bytes = size_of::<T>() as u32;
    bytes
}
