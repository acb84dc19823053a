//! [`PinnedFolios`]: memory that this module pins itself, and where each byte of it is physically.
//!
//! It is pinned by an io_uring of its own, in whose table of buffers the memory is registered: its
//! pages keep their frames until they leave the table (`FOLL_LONGTERM`), whatever the process does
//! to their addresses. `mlock` would keep them resident, and not in their frames.

use super::charge::ring_charge;
use super::survey::{MemoryError, Survey, places};
use crate::sys::kernel::RingRefusal;
use crate::sys::limits::{MemlockLimit, MemlockRefusal};
use crate::sys::pages::Pagemap;
use crate::sys::ring_memory::{locking, ring_bytes};
use crate::sys::{Errno, uring};
use pinfold_core::folio::BufferError;
pub use pinfold_core::folio::Folios;
use pinfold_core::mem::DmaMemory;
use std::os::fd::{AsFd, OwnedFd};

/// Who keeps the pages in their frames.
#[derive(Debug)]
enum Pin {
    /// A ring of this process: a child that `fork` made has its descriptor too.
    Ring { ring: OwnedFd, process: u32 },
    /// A mapping of the memory's owner, or the pool of hugepages that it is from.
    Other,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Self::Ring { ring, process } = self else { return };
        if *process != std::process::id() {
            return;
        }
        // Closing the ring unpins as well, but later.
        if let Err(errno) = uring::unregister(ring.as_fd()) {
            tracing::debug!(%errno, "memory is unpinned when its ring is closed");
        }
    }
}

/// Memory that keeps its frames, and its folios at their physical addresses.
#[derive(Debug)]
pub(crate) struct PinnedFolios {
    table: Folios,
    #[cfg_attr(not(test), expect(dead_code, reason = "held, not read"))]
    pin: Pin,
}

impl PinnedFolios {
    /// Pins the memory, unless a mapping of its owner does (`mapped`), and looks its frames up. Its
    /// owner keeps it mapped meanwhile.
    ///
    /// O(pages of 4 KiB).
    ///
    /// # Errors
    /// [`PinError`]; nothing is pinned then.
    pub(crate) fn new(memory: DmaMemory, mapped: bool) -> Result<Self, PinError> {
        let (addr, len) = (memory.addr(), memory.len());
        let before = survey(memory)?;
        let pin = match mapped {
            true => Pin::Other,
            false => pin(memory).or_else(|error| {
                // The kernel does not move pages of a pool of hugepages while they are mapped.
                if before.is_hugetlb() { Ok(Pin::Other) } else { Err(error) }
            })?,
        };
        if let Pin::Other = pin {
            // The ring faults its pages in.
            touch(memory);
        }
        // Final only now that the pages are resident.
        let pagemap = Pagemap::open().map_err(|errno| MemoryError::Unknown { addr, errno })?;
        let segments =
            survey(memory)?.frames(&pagemap).map_err(|addr| PinError::FramesUnknown { addr })?;
        debug_assert_eq!(segments.iter().map(|segment| segment.len).sum::<u64>(), len as u64);
        Ok(Self { table: Folios::from_segments(addr, segments)?, pin })
    }

    /// Returns whether a ring of this module pins it.
    #[cfg(test)]
    pub(crate) fn is_pinned_here(&self) -> bool {
        matches!(self.pin, Pin::Ring { .. })
    }

    /// Returns where each byte is physically.
    pub(crate) fn table(&self) -> &Folios {
        &self.table
    }
}

fn survey(memory: DmaMemory) -> Result<Survey, MemoryError> {
    Survey::new(memory.addr(), memory.len() as u64)
}

/// Faults the pages in.
fn touch(memory: DmaMemory) {
    for offset in (0..memory.len()).step_by(4096) {
        // Inside, so this does not fail.
        let touched = memory.touch(offset);
        debug_assert_eq!(touched, Ok(()));
    }
}

/// Pins the memory by a ring of its own.
fn pin(memory: DmaMemory) -> Result<Pin, PinError> {
    let (addr, len) = (memory.addr(), memory.len());
    let ring = locking(|| ring_bytes(1), || uring::setup(1))
        .map_err(|errno| PinError::NoRing(RingRefusal::of(errno, (5, 1), 1, len as u64)))?;
    let places = places(addr, len);
    let vectors: Vec<_> = places.iter().map(|&place| uring::vector(Some(place))).collect();
    // The attempt has faulted pages in, so their sizes are known better than before.
    let requested = || ring_charge(places.iter().copied()).unwrap_or(len as u64);
    locking(requested, || uring::register(ring.as_fd(), &vectors)).map_err(|errno| {
        let requested = requested();
        match MemlockRefusal::of(errno, requested) {
            Some(_) => PinError::Memlock { requested, limit: MemlockLimit::here() },
            None => PinError::Refused { addr, len, errno },
        }
    })?;
    Ok(Pin::Ring { ring, process: std::process::id() })
}

/// Why memory has no folios at physical addresses. Nothing is pinned then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The memory cannot be examined, or is no memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The table could not be made.
    #[error(transparent)]
    Table(#[from] BufferError),
    /// No io_uring could be created to pin with.
    #[error("cannot pin memory: no io_uring: {}", .0.with_fix())]
    NoRing(RingRefusal),
    /// The process may not pin that much.
    #[error(
        "cannot pin memory: {}; fix: {}",
        MemlockRefusal { requested: *requested, limit: limit.soft.unwrap_or(u64::MAX) },
        limit.raise_command_for_user(*requested)
    )]
    Memlock {
        /// The bytes that the kernel would charge.
        requested: u64,
        /// The limit of the process.
        limit: MemlockLimit,
    },
    /// The kernel refuses to pin this memory.
    #[error("the kernel refuses to pin {len:#x} bytes at {addr:#x}: {errno}{}", match errno.raw() {
        libc::ENOMEM => ": it has no memory for it; free memory of the machine, or of the control group if that has a limit",
        _ => "",
    })]
    Refused {
        /// Its address.
        addr: usize,
        /// Its length in bytes.
        len: usize,
        /// The error.
        errno: Errno,
    },
    /// The frames are needed, but not visible to the process.
    #[error(
        "where the memory at {addr:#x} lies is not known: /proc/self/pagemap tells it to CAP_SYS_ADMIN only; run as root, \
         or open the device behind an IOMMU"
    )]
    FramesUnknown {
        /// The first address of unknown frame.
        addr: usize,
    },
}
