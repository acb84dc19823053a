//! One registered buffer: its table, what it consists of, and how it is pinned.

use super::footprint::Footprint;
use super::pin::Pins;
use super::survey::{Inspector, RegistrationError, Survey};
use super::unmap_monitor::Monitored;
use crate::memory::OwnedMemory;
use crate::sys::{Errno, bytes};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::folio::Registered;
use pinfold_core::mem::DmaMemory;

/// How a device sees the memory: which addresses a table contains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum View {
    /// The process's own addresses, contiguous: for rings, and for domains where an IOVA equals the
    /// address.
    Process,
    /// Physical addresses: for devices without an IOMMU. Needs `CAP_SYS_ADMIN`, to know the frames.
    Physical,
}

impl View {
    pub(super) fn describe(
        self,
        inspector: &Inspector,
        survey: &Survey,
    ) -> Result<Registered, RegistrationError> {
        let addr = survey.addr();
        match self {
            Self::Process => {
                let whole = Segment { iova: Iova::new(addr as u64), len: survey.len() };
                Ok(Registered::from_segments(addr, [whole])?)
            }
            Self::Physical => {
                let mut survey = survey.clone();
                survey.find_frames(inspector);
                let unknown = survey.pieces().iter().find(|piece| piece.phys.is_none());
                if let Some(piece) = unknown {
                    return Err(RegistrationError::FramesUnknown { addr: piece.addr });
                }
                let segments = survey.pieces().iter().filter_map(|piece| {
                    Some(Segment { iova: Iova::new(piece.phys?.raw()), len: piece.len })
                });
                Ok(Registered::from_segments(addr, segments)?)
            }
        }
    }
}

/// A registered buffer.
#[derive(Debug)]
pub struct Registration {
    pub(super) table: Registered,
    pub(super) survey: Survey,
    pub(super) footprint: Footprint,
    pub(super) pin: PinKind,
    pub(super) access: Access,
    pub(super) monitored: Result<Monitored, Errno>,
    /// The memory, if it was lent to the table.
    pub(super) lent: Option<DmaMemory<'static>>,
    /// The owner of the memory, if it was given up by value.
    pub(super) owned: Option<OwnedMemory>,
}

/// How the memory is kept in place.
#[derive(Debug)]
pub(super) enum PinKind {
    Pinned(Pins),
    Locked { first: usize, last: usize },
}

/// A range to be registered.
pub(super) struct Extent {
    pub(super) addr: usize,
    pub(super) len: u64,
    pub(super) lent: Option<DmaMemory<'static>>,
    pub(super) owned: Option<OwnedMemory>,
}

impl From<DmaMemory<'_>> for Extent {
    fn from(memory: DmaMemory<'_>) -> Self {
        // SAFETY: it is used by `Buffers::memory` only, which lends it for no longer than the table
        // has it.
        let lent = unsafe { memory.extend() };
        Self { addr: memory.addr(), len: memory.len() as u64, lent: Some(lent), owned: None }
    }
}

/// When a buffer that was unregistered or replaced is unpinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Released {
    /// It is: no I/O on it was in flight.
    Now,
    /// When its I/O in flight has completed.
    AfterIo {
        /// The number of holds.
        holds: u32,
    },
}

impl AsRef<Registered> for Registration {
    fn as_ref(&self) -> &Registered {
        &self.table
    }
}

impl Registration {
    /// Returns where every byte is for the device.
    #[inline]
    pub fn table(&self) -> &Registered {
        &self.table
    }

    /// Returns what the memory consisted of when it was pinned, without the frames: a new
    /// [`Survey`] has them.
    pub fn survey(&self) -> &Survey {
        &self.survey
    }

    /// Returns what devices may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns whether its pages keep their frames; otherwise they only stay resident.
    pub fn is_pinned(&self) -> bool {
        matches!(self.pin, PinKind::Pinned(_))
    }

    /// Returns the bytes that the kernel charges to `RLIMIT_MEMLOCK` for it (or would without
    /// `CAP_IPC_LOCK`).
    pub fn charged_bytes(&self) -> u64 {
        match &self.pin {
            PinKind::Pinned(pins) => pins.charged,
            PinKind::Locked { first, last } => (last - first) as u64,
        }
    }

    /// Returns whether it is revoked as soon as its memory is unmapped.
    ///
    /// # Errors
    /// The reason why not: `ENOSYS`, `EPERM` or `EINVAL` if there is no userfaultfd, or none for
    /// such memory, `EBUSY` if another userfaultfd monitors it.
    pub fn revoked_on_unmap(&self) -> Result<(), Errno> {
        self.monitored.map(|_| ())
    }
}

impl Survey {
    /// Returns the bounds of the pages that it touches; hugepages whole, since advice about a part
    /// of one splits it.
    pub(super) fn page_bounds(&self) -> (usize, usize) {
        let mask = |piece: &super::survey::Piece| bytes(piece.page.mask());
        let first = self.pieces().first().map_or(4095, mask);
        let last = self.pieces().last().map_or(4095, mask);
        (self.addr() & !first, self.end().saturating_add(last) & !last)
    }
}

/// Faults pages in and keeps them resident (`mlock`).
pub(super) fn lock(first: usize, last: usize) -> Result<(), Errno> {
    let at = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: locking changes no content; what is not mapped is an error.
    Ok(unsafe { rustix::mm::mlock(at, last - first) }?)
}

/// Reverses [`lock`]; memory that is no longer mapped is not locked either.
pub(super) fn unlock(first: usize, last: usize) {
    let at = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: as for `lock`.
    if let Err(errno) = unsafe { rustix::mm::munlock(at, last - first) } {
        tracing::debug!(first, last, %errno, "memory could not be unlocked");
    }
}
