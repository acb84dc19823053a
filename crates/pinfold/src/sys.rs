//! The system calls, each in a small function with the proof of its unsafe block and the first kernel that has it.
//!
//! By rustix where it has the call, by libc where not (`mbind`, `AF_XDP` sockets).

pub(crate) mod asking;
pub(crate) mod cpu;
pub(crate) mod iommufd;
pub(crate) mod limits;
pub(crate) mod mapping;
pub(crate) mod memfd;
pub(crate) mod numa;
pub(crate) mod pages;
pub(crate) mod region;
pub(crate) mod signals;
pub(crate) mod smaps;
pub(crate) mod uring;
pub(crate) mod userfault;
pub(crate) mod vfio;

use std::fmt;

/// An error number of the system, printed in words.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

impl Errno {
    /// The error with this number (`errno(3)`).
    pub const fn new(raw: i32) -> Self {
        Self(raw)
    }

    /// The number, as in `errno(3)`.
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

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

/// A number of bytes, or an address of this process, that the kernel or the core has in 64 bits. There are no larger
/// ones than fit, where a process has 64-bit addresses.
pub(crate) fn bytes(raw: u64) -> usize {
    usize::try_from(raw).unwrap_or(usize::MAX)
}

/// What the last failed call of libc said.
pub(crate) fn last_errno() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}
