//! One registered buffer: its table, what it is made of, and what keeps it.

use super::error::RegistrationError;
use super::footprint::Footprint;
use super::pin::Pins;
use super::survey::{Eyes, Survey};
use super::watch::Watched;
use crate::memory::OwnedMemory;
use crate::sys::{Errno, bytes};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::mem::DmaMemory;
use pinfold_core::registered::Registered;

/// How a device sees the memory: what the addresses in a table are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum View {
    /// By the process's own addresses, one after the other: for rings, for the software IOMMU, and for domains where an
    /// IOVA equals the address.
    Process,
    /// By where it lies in memory: for devices without an IOMMU. Takes the right to know the frames.
    PhysTranslator,
}

impl View {
    pub(super) fn describe(self, eyes: &Eyes, survey: &Survey) -> Result<Registered, RegistrationError> {
        let addr = survey.addr();
        match self {
            Self::Process => {
                let whole = Segment { iova: Iova::new(addr as u64), len: survey.len() };
                Ok(Registered::from_segments(addr, [whole])?)
            }
            Self::PhysTranslator => {
                let mut survey = survey.clone();
                survey.find_frames(eyes);
                let unknown = survey.pieces().iter().find(|piece| piece.phys.is_none());
                if let Some(piece) = unknown {
                    return Err(RegistrationError::FramesUnknown { addr: piece.addr });
                }
                let segments = survey
                    .pieces()
                    .iter()
                    .filter_map(|piece| Some(Segment { iova: Iova::new(piece.phys?.raw()), len: piece.len }));
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
    pub(super) keeper: Keeper,
    pub(super) access: Access,
    pub(super) watched: Result<Watched, Errno>,
    /// The memory, where it was lent to the table.
    pub(super) lent: Option<DmaMemory<'static>>,
    /// What keeps the memory, where it was given up.
    pub(super) owned: Option<OwnedMemory>,
}

/// What keeps the memory where it is.
#[derive(Debug)]
pub(super) enum Keeper {
    Pinned(Pins),
    Locked { first: usize, last: usize },
}

impl AsRef<Registered> for Registration {
    fn as_ref(&self) -> &Registered {
        &self.table
    }
}

impl Registration {
    /// Where every byte is for the device.
    #[inline]
    pub fn table(&self) -> &Registered {
        &self.table
    }

    /// What the memory is made of, and by what means that is known, as it was when the pages were pinned. Without their
    /// frames: a [`Survey`] of its own has them.
    pub fn survey(&self) -> &Survey {
        &self.survey
    }

    /// What devices may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether its pages stay in their frames; else they only stay in memory.
    pub fn is_pinned(&self) -> bool {
        matches!(self.keeper, Keeper::Pinned(_))
    }

    /// Bytes that the kernel has charged to `RLIMIT_MEMLOCK` for it (or would, but for `CAP_IPC_LOCK`).
    pub fn charged_bytes(&self) -> u64 {
        match &self.keeper {
            Keeper::Pinned(pins) => pins.charged,
            Keeper::Locked { first, last } => (last - first) as u64,
        }
    }

    /// Whether it is revoked as soon as its memory goes away; why not.
    ///
    /// # Errors
    /// What the kernel said: `ENOSYS`, `EPERM` or `EINVAL` where there is no userfaultfd, or none for such memory,
    /// `EBUSY` where somebody else has one for it.
    pub fn watched(&self) -> Result<(), Errno> {
        self.watched.map(|_| ())
    }
}

impl Survey {
    /// The bounds of the pages that it touches. Hugepages are taken whole: what the kernel is told about a part of one
    /// divides it.
    pub(super) fn page_bounds(&self) -> (usize, usize) {
        let mask = |piece: &super::survey::Piece| bytes(piece.page.mask());
        let first = self.pieces().first().map_or(4095, mask);
        let last = self.pieces().last().map_or(4095, mask);
        (self.addr() & !first, self.end().saturating_add(last) & !last)
    }
}

/// Keeps pages in memory, and brings them in. `mlock`: since the first Linux.
pub(super) fn lock(first: usize, last: usize) -> Result<(), Errno> {
    let at = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: locking changes no content; what is not mapped is an error.
    Ok(unsafe { rustix::mm::mlock(at, last - first) }?)
}

/// Takes [`lock`] back; what is no longer mapped is not locked either.
pub(super) fn unlock(first: usize, last: usize) {
    let at = std::ptr::with_exposed_provenance_mut(first);
    // SAFETY: as for `lock`.
    if let Err(errno) = unsafe { rustix::mm::munlock(at, last - first) } {
        tracing::debug!(first, last, %errno, "memory was not unlocked");
    }
}
