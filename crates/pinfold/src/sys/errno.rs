//! Error numbers of the system.

use std::fmt;

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
