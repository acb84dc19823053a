//! Why memory was not registered.

use crate::sys::Errno;
use pinfold_core::registered::{BufferError, BufferIndex, IndexError, Registered};

/// Why memory can not be registered as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// It is empty, wraps around the end of the address space, or is too long.
    #[error(transparent)]
    Extent(BufferError),
    /// Nothing is mapped there.
    #[error("nothing is mapped at {addr:#x}")]
    Unmapped {
        /// The first address at which nothing is.
        addr: usize,
    },
    /// The process itself may not write there, so no device may on its behalf.
    #[error("the memory at {addr:#x} is read-only: a device must not write to it; map it writable")]
    ReadOnly {
        /// The first address that is so.
        addr: usize,
    },
    /// The process itself may not access it.
    #[error("the memory at {addr:#x} may not be accessed (PROT_NONE)")]
    NoAccess {
        /// The first address that is so.
        addr: usize,
    },
    /// It is no memory: a device's registers, or pages of the kernel's own.
    #[error(
        "what is mapped at {addr:#x} is no memory, but a device's or the kernel's own: it can not be pinned"
    )]
    Special {
        /// The first address that is so.
        addr: usize,
    },
    /// The system does not tell what is there.
    #[error("what is mapped at {addr:#x} can not be known: {errno}; mount /proc")]
    Unknown {
        /// Where.
        addr: usize,
        /// What the system said.
        errno: Errno,
    },
}

/// Why memory was not registered, or not found. Nothing has changed when one is returned: what was registered before
/// still is.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The memory can not be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It could not be described.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The table has no room for it.
    #[error(transparent)]
    Table(#[from] pinfold_core::registered::RegisterError),
    /// There is no such buffer.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// More would be pinned than the process may.
    #[error(
        "to pin {asked} bytes is too much: {used} of the {allowed} bytes that may be locked are in use; \
         to allow it: {command}"
    )]
    Memlock {
        /// Bytes that the kernel would charge, as far as it can be known.
        asked: u64,
        /// Bytes that it has charged to this process. Others of the same user count too, and can not be seen.
        used: u64,
        /// `RLIMIT_MEMLOCK`.
        allowed: u64,
        /// What raises it.
        command: String,
    },
    /// The kernel does not pin this memory.
    #[error("the kernel does not pin {len:#x} bytes at {addr:#x}: {errno}")]
    NotPinned {
        /// Where it starts.
        addr: usize,
        /// How many bytes.
        len: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// The ring that pins is no longer there.
    #[error("the io_uring that pins the memory is gone: {errno}; make a new table")]
    RingGone {
        /// What the kernel said.
        errno: Errno,
    },
    /// No io_uring could be made to pin with.
    #[error(
        "nothing to pin memory with: io_uring with sparse buffer tables (Linux 5.19) is not to be had: {errno}; \
         if it is switched off: sudo sysctl kernel.io_uring_disabled=0"
    )]
    NoRing {
        /// What the kernel said.
        errno: Errno,
    },
    /// The table is another process's.
    #[error("the table of buffers is that of the process that forked this one: make a new one here")]
    Forked,
    /// The frames are needed, and the process may not know them.
    #[error(
        "where the memory at {addr:#x} lies is not known: /proc/self/pagemap tells it to CAP_SYS_ADMIN only; \
         run as root, or describe it by another view"
    )]
    FramesUnknown {
        /// The first address of which it is not known.
        addr: usize,
    },
    /// The memory went away while it was registered.
    #[error("{index} is revoked: {why} at {addr:#x} while it was registered; unregister it")]
    Gone {
        /// Which one.
        index: BufferIndex,
        /// What became of it.
        why: Gone,
        /// Where.
        addr: usize,
    },
}

/// What became of memory that was registered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Gone {
    /// It was unmapped (`munmap`, or another mapping put over it): the addresses may be anybody's now.
    Unmapped,
    /// It was moved to other addresses (`mremap`).
    Moved,
    /// Its content was given up (`MADV_DONTNEED`, `MADV_REMOVE`, a hole in its file): other pages are there now.
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

/// The end of the memory, and of its last page.
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
