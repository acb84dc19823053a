//! What an arena asks of its domain.

use super::MappingPolicy;
use crate::domain::Domain;
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PageSize};
use pinfold_core::domain::{BackendError, DomainId, Reservation, StaticMapping};
use pinfold_core::mem::DmaMemory;

/// The part of a domain that an arena uses; a seam, so that a test can make any step of it fail.
pub(super) trait Space: Send + Sync {
    /// Makes the memory known.
    ///
    /// # Safety
    /// The caller keeps it valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// The memory goes away: no device reaches it afterwards.
    fn unregister_memory(&self, memory: DmaMemory);
    /// Maps memory for as long as it lives.
    ///
    /// # Safety
    /// Until `unmap` has returned `Ok`, or `unregister_memory` has returned, it stays valid and no reference into it is made.
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError>;
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError>;
    fn release(&self, place: Reservation) {
        drop(place);
    }
    /// Maps memory in a reserved range.
    ///
    /// # Safety
    /// As for `map_static`.
    unsafe fn map_at(
        &self,
        place: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError>;
    /// Strict: no device reaches the memory when this has returned `Ok`.
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError>;
    /// Counts memory that is kept for ever, because a device may reach it for ever.
    fn count_quarantined(&self, bytes: u64);
    /// Which domain it is.
    fn domain(&self) -> Option<DomainId> {
        None
    }
    /// Whether a mapping pins its memory by itself.
    fn pins(&self) -> bool {
        false
    }
}

/// What an arena owns of its domain's address space.
#[derive(Debug)]
pub(super) enum Place {
    /// The mapping of all of it.
    Whole(StaticMapping),
    /// The range in which its chunks are mapped.
    PerUse(Reservation),
}

impl Place {
    pub(super) fn iova(&self) -> IovaRange {
        match self {
            Self::Whole(mapping) => mapping.iova(),
            Self::PerUse(place) => place.range(),
        }
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
    mapping_policy: MappingPolicy,
) -> Result<Place, NotAttached> {
    // SAFETY: the arena unmaps its region only after `unregister_memory` has returned (`Inner::drop`), and here it is expelled on
    // every way out after which the region is dropped.
    unsafe { space.register_memory(memory) }.map_err(|error| NotAttached { error, stuck: false })?;
    let placed = match mapping_policy {
        // SAFETY: the region outlives the mapping, as above; an arena that is exposed whole lends no reference.
        MappingPolicy::Whole => unsafe { space.map_static(memory) }.map(Place::Whole),
        MappingPolicy::PerUse => space.reserve(memory.len() as u64, alignment(memory)).map(Place::PerUse),
    };
    placed.map_err(|error| {
        let stuck = error.stays_reachable();
        if stuck {
            space.count_quarantined(memory.len() as u64);
        } else {
            space.unregister_memory(memory);
        }
        NotAttached { error, stuck }
    })
}

/// Takes the memory, in which nothing is in use any more, out of the domain. Returns whether no device reaches it.
pub(super) fn detach(space: &dyn Space, memory: DmaMemory, place: Place) -> bool {
    match place {
        Place::Whole(mapping) => {
            let iova = mapping.iova();
            if let Err(error) = space.unmap(mapping) {
                tracing::error!(%iova, %error, "an arena could not be taken from its devices");
                space.count_quarantined(memory.len() as u64);
                return false;
            }
        }
        Place::PerUse(place) => space.release(place),
    }
    space.unregister_memory(memory);
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
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).register_memory(memory) }
    }
    fn unregister_memory(&self, memory: DmaMemory) {
        (**self).unregister_memory(memory);
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_static(memory, BOTH) }
    }
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        self.reserve_iova(len, align)
    }
    unsafe fn map_at(
        &self,
        place: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_at(place, iova, memory, BOTH) }
    }
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        self.unmap_static(mapping)
    }
    fn count_quarantined(&self, bytes: u64) {
        (**self).count_quarantined(bytes);
    }
    fn domain(&self) -> Option<DomainId> {
        Some((**self).id())
    }
    fn pins(&self) -> bool {
        (**self).pins()
    }
}
