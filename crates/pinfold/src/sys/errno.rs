//! Error numbers of the system, and `ioctl`, which returns them.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

/// An error number of the system, printed in words.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

impl Errno {
    /// Creates the error with this number (`errno(3)`).
    pub const fn new(raw: i32) -> Self {
        Self(raw)
    }

    /// Returns the number, as in `errno(3)`.
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

impl From<&std::io::Error> for Errno {
    /// Returns `EIO` for an error that has no number.
    fn from(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl std::error::Error for Errno {}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.0), f)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the error of the last libc call that failed in this thread.
pub(crate) fn last_errno() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// Converts a byte count or an address of this process from the 64 bits in which the kernel and the
/// core pass it. Saturates on 32-bit targets.
pub(crate) fn bytes(raw: u64) -> usize {
    usize::try_from(raw).unwrap_or(usize::MAX)
}

// `ioctl` with the argument kinds of VFIO and iommufd, which encode no size in the request number.

/// Calls an `ioctl` whose argument is a structure that the kernel reads and, for some requests,
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

/// Like [`with_struct`], by pointer.
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

/// Calls an `ioctl` whose argument is an integer, or none (0).
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
    // Every structure here is far smaller than 4 GiB.
    #[expect(clippy::cast_possible_truncation, reason = "a structure of a few words")]
    let bytes = size_of::<T>() as u32;
    bytes
}
