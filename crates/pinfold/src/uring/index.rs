//! The number of a place in a ring's table, and the reasons why memory has none.

use crate::sys::limits::{MemlockLimit, MemlockRefusal};
use crate::sys::{Errno, uring};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};

/// The number of a place in the table of a ring: what `READ_FIXED` and `WRITE_FIXED` name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferIndex(u16);

impl BufferIndex {
    /// Creates the index with this number.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "buffer:{}", self.0)
    }
}

impl fmt::Debug for BufferIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why memory was not registered with a ring. Earlier registrations are unchanged.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The descriptor is not a usable io_uring.
    #[error("the descriptor is not a usable io_uring ({errno})")]
    NoRing {
        /// The error.
        errno: Errno,
    },
    /// A ring has one table.
    #[error("the ring has a table of buffers already: unregister it first")]
    HasTable,
    /// The table was unregistered by other means.
    #[error("the ring has no table: it was unregistered by other means")]
    NoTable,
    /// The ring is bound to another thread (`IORING_SETUP_SINGLE_ISSUER`).
    #[error(
        "the ring is bound to another thread: register and unregister from the one that submits"
    )]
    OtherThread,
    /// The process may not pin that much.
    #[error(
        "{}; fix: {}",
        MemlockRefusal { requested: *requested, limit: limit.soft.unwrap_or(u64::MAX) },
        limit.raise_command_for_user(*requested)
    )]
    Memlock {
        /// The bytes that the kernel would charge: folios larger than a page whole.
        requested: u64,
        /// The limit of the process.
        limit: MemlockLimit,
    },
    /// The kernel has no memory of its own for the table, or none to fault the buffers in.
    #[error(
        "the kernel has no memory to register {requested} bytes with the ring: free memory of the machine, or of the \
         control group if that has a limit, or register less"
    )]
    NoMemory {
        /// The number of bytes to be pinned.
        requested: u64,
    },
    /// The memory cannot be pinned: unmapped, not readable and writable, or a device's.
    #[error(
        "the kernel cannot pin that memory ({errno}): it must be mapped, writable, and no device's"
    )]
    Memory {
        /// The error.
        errno: Errno,
    },
    /// The capacity is out of range.
    #[error("a table of {requested} places: 1 to {limit} are possible (1 GiB each)")]
    Capacity {
        /// The requested number.
        requested: usize,
        /// The largest number.
        limit: usize,
    },
    /// The memory does not fit one place.
    #[error("{len} bytes in one place: 1 to {limit} are possible")]
    Length {
        /// Its length in bytes.
        len: usize,
        /// The largest length.
        limit: usize,
    },
    /// The ring's table, which the program made, has no such place.
    #[error(
        "the ring's table has no {index}: register a longer one (before Linux 5.13 its places cannot change)"
    )]
    NoPlace {
        /// The place.
        index: BufferIndex,
    },
    /// The memory overlaps another place: an address would have two indices.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}: register the rest")]
    Overlaps {
        /// The address of the memory.
        addr: usize,
        /// Its length in bytes.
        len: usize,
        /// The place that it overlaps.
        with: BufferIndex,
    },
    /// Another error.
    #[error("io_uring_register: {errno}")]
    System {
        /// The error.
        errno: Errno,
    },
}

impl RegisterError {
    /// Explains `errno` of a registration for which the kernel charges `requested` bytes.
    pub(super) fn of(errno: Errno, requested: impl FnOnce() -> u64) -> Self {
        match errno.raw() {
            libc::ENXIO => Self::NoTable,
            libc::EBADF | libc::EBADFD => Self::NoRing { errno },
            libc::EBUSY => Self::HasTable,
            libc::EEXIST => Self::OtherThread,
            libc::ENOMEM => {
                let requested = requested();
                match MemlockRefusal::of(errno, requested) {
                    Some(_) => Self::Memlock { requested, limit: MemlockLimit::here() },
                    None => Self::NoMemory { requested },
                }
            }
            libc::EFAULT | libc::EOPNOTSUPP => Self::Memory { errno },
            _ => Self::System { errno },
        }
    }

    /// Explains `errno` of the first registration with a descriptor, which may not be a ring.
    pub(super) fn at_first(ring: &OwnedFd, errno: Errno, requested: impl FnOnce() -> u64) -> Self {
        // The kernel returns the same number for memory that cannot be pinned and for a descriptor
        // that is no ring; for a ring without a table, unregistering returns another errno.
        let not_a_ring = || uring::unregister(ring.as_fd()) == Err(Errno::new(libc::EOPNOTSUPP));
        match errno.raw() {
            libc::EOPNOTSUPP if not_a_ring() => Self::NoRing { errno },
            _ => Self::of(errno, requested),
        }
    }
}
