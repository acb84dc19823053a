//! Why buffers were not registered with a ring.

use crate::sys::limits::MemlockLimit;
use crate::sys::{Errno, uring};
use pinfold_core::registered::BufferIndex;
use std::os::fd::{AsFd, OwnedFd};

/// Why memory was not registered with a ring. What was registered before still is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The descriptor is none of an io_uring, or of one that can not be used any more.
    #[error("no io_uring, or one that is gone ({errno})")]
    NoRing {
        /// What the system said.
        errno: Errno,
    },
    /// A ring has one table.
    #[error("the ring has a table of buffers already: unregister it first")]
    HasTable,
    /// The table is gone.
    #[error("the ring has no table any more: somebody else has unregistered it")]
    NoTable,
    /// The ring was made for one thread (`IORING_SETUP_SINGLE_ISSUER`).
    #[error("the ring belongs to another thread: register from the one that submits")]
    OtherThread,
    /// More than may be pinned.
    #[error(
        "{asked} bytes asked for, {} pinned or locked already, {} allowed; fix: {}",
        limit.used.unwrap_or(0), limit.soft.unwrap_or(u64::MAX), limit.raise_command(*asked)
    )]
    Memlock {
        /// How many bytes were to be pinned.
        asked: u64,
        /// What holds for the process.
        limit: MemlockLimit,
    },
    /// Memory that can not be pinned: unmapped, not readable and writable, or a device's.
    #[error("the kernel can not pin that memory ({errno}): it must be mapped, writable, and no device's")]
    Memory {
        /// What the system said.
        errno: Errno,
    },
    /// A table has a largest size.
    #[error("a table of {asked} places: 1 to {limit} are possible (1 GiB a place)")]
    Capacity {
        /// How many were asked for.
        asked: usize,
        /// How many are possible.
        limit: usize,
    },
    /// One place holds so much.
    #[error("{len} bytes in one place: 1 to {limit} are possible")]
    Length {
        /// How many bytes were to go in it.
        len: usize,
        /// How many can.
        limit: usize,
    },
    /// The table is not that large.
    #[error("{index} does not exist: the table has {capacity} places")]
    Beyond {
        /// Which place.
        index: BufferIndex,
        /// How many there are.
        capacity: usize,
    },
    /// Nothing is there.
    #[error("{index} is vacant")]
    Vacant {
        /// Which place.
        index: BufferIndex,
    },
    /// No place is vacant.
    #[error("all {capacity} places of the table are taken: clear one first")]
    Full {
        /// How many there are.
        capacity: usize,
    },
    /// Two places with the same memory: an address would have two numbers.
    #[error("{len:#x} bytes at {addr:#x} overlap {with}, which is registered already")]
    Overlaps {
        /// Where the memory starts.
        addr: usize,
        /// How many bytes it has.
        len: usize,
        /// What it overlaps.
        with: BufferIndex,
    },
    /// The kernel is too old.
    #[error("{what} need Linux {since} ({errno})")]
    Unsupported {
        /// What is not to be had.
        what: &'static str,
        /// Which kernel has it.
        since: &'static str,
        /// What the system said.
        errno: Errno,
    },
    /// Something else.
    #[error("io_uring_register: {errno}")]
    System {
        /// What the system said.
        errno: Errno,
    },
}

impl RegisterError {
    /// What `errno` means where `asked` bytes were to be registered.
    pub(super) fn of(errno: Errno, asked: u64) -> Self {
        match errno.raw() {
            libc::ENXIO => Self::NoTable,
            libc::EBADF | libc::EBADFD => Self::NoRing { errno },
            libc::EBUSY => Self::HasTable,
            libc::EEXIST => Self::OtherThread,
            libc::ENOMEM => Self::Memlock { asked, limit: MemlockLimit::here() },
            libc::EFAULT | libc::EOPNOTSUPP => Self::Memory { errno },
            _ => Self::System { errno },
        }
    }

    /// The same of a ring that has no table yet, and may be none.
    pub(super) fn at_first(ring: &OwnedFd, errno: Errno, asked: u64) -> Self {
        // The same number says that the memory can not be pinned and that the descriptor is no ring's; what a ring
        // without a table says to this is another one.
        let not_a_ring = || uring::unregister(ring.as_fd()) == Err(Errno::new(libc::EOPNOTSUPP));
        match errno.raw() {
            libc::EOPNOTSUPP if not_a_ring() => Self::NoRing { errno },
            _ => Self::of(errno, asked),
        }
    }

    pub(super) fn unsupported(errno: Errno, what: &'static str, since: &'static str) -> Self {
        Self::Unsupported { what, since, errno }
    }
}
