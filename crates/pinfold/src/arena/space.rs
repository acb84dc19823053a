//! What an arena asks of its domain.

use super::Exposure;
use crate::domain::Domain;
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PageSize};
use pinfold_core::domain::{BackendError, DomainId};
use pinfold_core::mem::DmaMemory;

/// The part of a domain that an arena uses; a seam, so that a test can make any step of it fail.
pub(super) trait Space: Send + Sync {
    /// Makes the memory known.
    ///
    /// # Safety
    /// The caller keeps it valid until `expel` has returned.
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// The memory goes away: no device reaches it afterwards.
    fn expel(&self, memory: DmaMemory);
    /// Maps memory for as long as it lives.
    ///
    /// # Safety
    /// Until `unmap_static` has returned `Ok`, or `expel` has returned, it stays valid and no reference into it is made.
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<IovaRange, BackendError>;
    fn unmap_static(&self, iova: IovaRange) -> Result<(), BackendError>;
    fn reserve(&self, len: u64, align: u64) -> Result<IovaRange, BackendError>;
    fn release(&self, iova: IovaRange);
    /// Maps memory in a reserved range.
    ///
    /// # Safety
    /// As for `map_static`, until `unmap_at`.
    unsafe fn map_at(&self, iova: IovaRange, memory: DmaMemory) -> Result<(), BackendError>;
    /// Strict: no device reaches the range when this has returned `Ok`.
    fn unmap_at(&self, iova: IovaRange) -> Result<(), BackendError>;
    /// Counts memory that is kept for ever, because a device may reach it for ever.
    fn note_quarantined(&self, bytes: u64);
    /// Which domain it is.
    fn domain(&self) -> Option<DomainId> {
        None
    }
    /// Whether a mapping pins its memory by itself.
    fn pins(&self) -> bool {
        false
    }
}

/// Why an arena did not get into its domain.
#[derive(Debug)]
pub(super) struct NotAttached {
    pub(super) error: BackendError,
    /// A device may reach the memory for ever: it must never be unmapped.
    pub(super) stuck: bool,
}

/// Brings the memory into the domain: all of that, or nothing.
pub(super) fn attach(
    space: &dyn Space,
    memory: DmaMemory,
    exposure: Exposure,
) -> Result<IovaRange, NotAttached> {
    // SAFETY: the arena unmaps its region only after `expel` has returned (`Inner::drop`), and here it is expelled on
    // every way out after which the region is dropped.
    unsafe { space.admit(memory) }.map_err(|error| NotAttached { error, stuck: false })?;
    let placed = match exposure {
        // SAFETY: the region outlives the mapping, as above; an arena that is exposed whole lends no reference.
        Exposure::Whole => unsafe { space.map_static(memory) },
        Exposure::PerUse => space.reserve(memory.len() as u64, alignment(memory)),
    };
    placed.map_err(|error| {
        let stuck = error.stays_reachable();
        if stuck {
            space.note_quarantined(memory.len() as u64);
        } else {
            space.expel(memory);
        }
        NotAttached { error, stuck }
    })
}

/// Takes the memory, in which nothing is in use any more, out of the domain. Returns whether no device reaches it.
pub(super) fn detach(space: &dyn Space, memory: DmaMemory, iova: IovaRange, exposure: Exposure) -> bool {
    match exposure {
        Exposure::Whole => {
            if let Err(error) = space.unmap_static(iova) {
                tracing::error!(%iova, %error, "an arena could not be taken from its devices");
                space.note_quarantined(memory.len() as u64);
                return false;
            }
        }
        Exposure::PerUse => space.release(iova),
    }
    space.expel(memory);
    true
}

/// What to align the IOVA to: 2 MiB, so that a pool's chunks of any order lie at multiples of their size, or 1 GiB where
/// that makes for larger leaves.
fn alignment(memory: DmaMemory) -> u64 {
    let huge = PageSize::Size1G.bytes();
    let fits = memory.len() as u64 >= huge && (memory.addr() as u64).is_multiple_of(huge);
    if fits { huge } else { PageSize::Size2M.bytes() }
}

const BOTH: Access = Access::READ.union(Access::WRITE);

impl Space for Domain {
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).admit(memory) }
    }
    fn expel(&self, memory: DmaMemory) {
        (**self).expel(memory);
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<IovaRange, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_static(memory, BOTH) }
    }
    fn unmap_static(&self, iova: IovaRange) -> Result<(), BackendError> {
        (**self).unmap_static(iova)
    }
    fn reserve(&self, len: u64, align: u64) -> Result<IovaRange, BackendError> {
        self.reserve_iova(len, align)
    }
    fn release(&self, iova: IovaRange) {
        // It was reserved by this arena and is released once, so this does not fail; the addresses would be lost.
        if let Err(error) = self.release_iova(iova) {
            tracing::error!(%iova, %error, "a range of IOVAs could not be given back");
        }
    }
    unsafe fn map_at(&self, iova: IovaRange, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_at(iova, memory, BOTH) }
    }
    fn unmap_at(&self, iova: IovaRange) -> Result<(), BackendError> {
        (**self).unmap_at(iova)
    }
    fn note_quarantined(&self, bytes: u64) {
        (**self).note_quarantined(bytes);
    }
    fn domain(&self) -> Option<DomainId> {
        Some((**self).id())
    }
    fn pins(&self) -> bool {
        (**self).pins()
    }
}
