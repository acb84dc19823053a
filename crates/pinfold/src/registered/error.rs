//! Why memory was not registered.

use crate::sys::Errno;
use crate::sys::kernel::RingRefusal;
use pinfold_core::registered::{BufferError, BufferIndex, IndexError, Registered};

/// Why memory cannot be registered as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// It is empty, wraps around the end of the address space, or is too long.
    #[error(transparent)]
    Extent(BufferError),
    /// Part of it is unmapped.
    #[error("nothing is mapped at {addr:#x}")]
    Unmapped {
        /// The first unmapped address.
        addr: usize,
    },
    /// The process may not write to it, so no device may on its behalf.
    #[error("the memory at {addr:#x} is read-only: a device must not write to it; map it writable")]
    ReadOnly {
        /// The first such address.
        addr: usize,
    },
    /// The process may not access it.
    #[error("the memory at {addr:#x} may not be accessed (PROT_NONE)")]
    NoAccess {
        /// The first such address.
        addr: usize,
    },
    /// It is not ordinary memory: a device's registers, or pages of the kernel.
    #[error(
        "the mapping at {addr:#x} is not ordinary memory but a device's or the kernel's: it cannot be pinned"
    )]
    Special {
        /// The first such address.
        addr: usize,
    },
    /// The mapping cannot be inspected.
    #[error("the mapping at {addr:#x} cannot be inspected: {errno}; mount /proc")]
    Unknown {
        /// The address.
        addr: usize,
        /// The error.
        errno: Errno,
    },
}

/// Why memory was not registered, or not found. Nothing has changed then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The memory cannot be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory could not be described.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The table cannot hold it.
    #[error(transparent)]
    Table(#[from] pinfold_core::registered::RegisterError),
    /// There is no such buffer in the table.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The process may not pin that much.
    #[error(
        "cannot pin {requested} bytes: {used} of {allowed} bytes that may be locked are in use by this process, and others of \
         its user may have the rest; fix: {command}"
    )]
    Memlock {
        /// Bytes that the kernel would charge, as far as known.
        requested: u64,
        /// Bytes that it has charged to this process. Those of the user's other processes count,
        /// too, but are unknown.
        used: u64,
        /// `RLIMIT_MEMLOCK`.
        allowed: u64,
        /// The shell command that raises it.
        command: String,
    },
    /// The kernel refuses to pin this memory.
    #[error("the kernel refuses to pin {len:#x} bytes at {addr:#x}: {errno}")]
    NotPinned {
        /// Its address.
        addr: usize,
        /// Its length in bytes.
        len: u64,
        /// The error.
        errno: Errno,
    },
    /// The ring that pins was closed.
    #[error("the io_uring that pins the memory was closed: {errno}; create a new table")]
    RingGone {
        /// The error.
        errno: Errno,
    },
    /// No io_uring could be created to pin with.
    #[error("cannot pin memory: no io_uring with a sparse table of buffers: {}", .0.with_fix())]
    NoRing(RingRefusal),
    /// The table belongs to the parent process.
    #[error("the table of buffers belongs to the parent process: create a new one after the fork")]
    Forked,
    /// The frames are needed, but not visible to the process.
    #[error(
        "where the memory at {addr:#x} lies is not known: /proc/self/pagemap tells it to CAP_SYS_ADMIN only; \
         run as root, or describe it by another view"
    )]
    FramesUnknown {
        /// The first address of unknown frame.
        addr: usize,
    },
    /// The memory was unmapped, moved or discarded while it was registered.
    #[error("{index} is revoked: {why} at {addr:#x} while it was registered; unregister it")]
    Gone {
        /// The buffer.
        index: BufferIndex,
        /// What happened.
        why: Gone,
        /// Where.
        addr: usize,
    },
}

/// What happened to registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Gone {
    /// It was unmapped (`munmap`, or another mapping over it): the addresses may have been reused.
    Unmapped,
    /// It was moved to other addresses (`mremap`).
    Moved,
    /// Its content was discarded (`MADV_DONTNEED`, `MADV_REMOVE`, a hole in its file): other pages
    /// are there now.
    Discarded,
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unmapped => "memory was unmapped",
            Self::Moved => "memory was moved",
            Self::Discarded => "the content of memory was discarded",
        })
    }
}

/// Returns the end of the memory, and of its last page.
pub(super) fn check_extent(addr: usize, len: u64) -> Result<(usize, usize), MemoryError> {
    let extent = |error| Err(MemoryError::Extent(error));
    if len == 0 {
        return extent(BufferError::Empty { addr });
    }
    if len > Registered::MAX_BYTES {
        return extent(BufferError::TooLong { len });
    }
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    let page_end = end.and_then(|end| end.checked_next_multiple_of(4096));
    match end.zip(page_end) {
        Some(ends) => Ok(ends),
        None => extent(BufferError::Wraps { addr, len }),
    }
}
