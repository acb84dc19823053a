//! An arena's memory in one domain.

use super::report::MappingPolicy;
use crate::domain::Domain;
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PageSize};
use pinfold_core::domain::{BackendError, DomainId, Reservation, StaticMapping};
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The operations of a domain that an arena needs. A trait, so that a test can make each of them fail.
pub(super) trait DomainOps: Send + Sync {
    /// Registers the memory.
    ///
    /// # Safety
    /// The caller keeps it valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// Unregisters the memory: no device reaches it afterwards.
    fn unregister_memory(&self, memory: DmaMemory);
    /// Maps memory for its lifetime.
    ///
    /// # Safety
    /// Until `unmap` has returned `Ok`, or `unregister_memory` has returned, it stays valid and no reference into it
    /// is made.
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError>;
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError>;
    fn release(&self, reservation: Reservation) {
        drop(reservation);
    }
    /// Maps memory in a reserved range.
    ///
    /// # Safety
    /// As for `map_static`.
    unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError>;
    /// Strict: no device reaches the memory after this has returned `Ok`.
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError>;
    /// Counts memory that a device may still reach.
    fn count_quarantined(&self, bytes: u64);
    fn id(&self) -> Option<DomainId> {
        None
    }
    /// Whether a mapping pins its memory.
    fn pins(&self) -> bool {
        false
    }
}

/// The part of the domain's address space that the arena owns.
enum Place {
    /// The mapping of all of it.
    Whole(StaticMapping),
    /// The range in which chunks are mapped.
    PerUse(Reservation),
}

/// Why an arena was not mapped into a domain.
#[derive(Debug)]
pub(super) struct AttachError {
    pub(super) error: BackendError,
    /// A device may still reach the memory: it must never be unmapped from the process.
    pub(super) stuck: bool,
}

/// An arena's memory in one domain: registered, and mapped as a whole or chunk by chunk.
pub(super) struct Attachment {
    domain: Box<dyn DomainOps>,
    place: Place,
    iova: IovaRange,
    /// The mapped chunks, by their offset in the arena.
    chunks: Mutex<BTreeMap<u64, StaticMapping>>,
}

impl Attachment {
    /// Registers and maps the memory: completely, or not at all.
    pub(super) fn new(
        domain: Box<dyn DomainOps>,
        memory: DmaMemory,
        policy: MappingPolicy,
    ) -> Result<Self, AttachError> {
        // SAFETY: the arena unmaps its region only after `unregister_memory` has returned (`Attachments::detach_all`),
        // and never if this function reports it as stuck; on every other error path it is unregistered below.
        unsafe { domain.register_memory(memory) }.map_err(|error| AttachError { error, stuck: false })?;
        let placed = match policy {
            // SAFETY: the region outlives the mapping, as above; an arena that is mapped whole lends no reference.
            MappingPolicy::Whole => unsafe { domain.map_static(memory) }.map(Place::Whole),
            MappingPolicy::PerUse => {
                domain.reserve(memory.len() as u64, alignment(memory)).map(Place::PerUse)
            }
        };
        let place = placed.map_err(|error| {
            let stuck = error.stays_reachable();
            if stuck {
                domain.count_quarantined(memory.len() as u64);
            } else {
                domain.unregister_memory(memory);
            }
            AttachError { error, stuck }
        })?;
        let iova = match &place {
            Place::Whole(mapping) => mapping.iova(),
            Place::PerUse(reservation) => reservation.range(),
        };
        Ok(Self { domain, place, iova, chunks: Mutex::default() })
    }

    /// Unmaps and unregisters the memory, of which nothing is in use; returns whether no device reaches it.
    fn detach(self, memory: DmaMemory) -> bool {
        match self.place {
            Place::Whole(mapping) => {
                let iova = mapping.iova();
                if let Err(error) = self.domain.unmap(mapping) {
                    tracing::error!(%iova, %error, "an arena could not be unmapped");
                    self.domain.count_quarantined(memory.len() as u64);
                    return false;
                }
            }
            Place::PerUse(reservation) => self.domain.release(reservation),
        }
        self.domain.unregister_memory(memory);
        true
    }

    pub(super) fn iova(&self) -> IovaRange {
        self.iova
    }

    /// The part of the arena's address range at `offset`.
    pub(super) fn iova_of(&self, offset: u64, bytes: u64) -> Option<IovaRange> {
        self.iova.part(offset, bytes)
    }

    pub(super) fn domain_id(&self) -> Option<DomainId> {
        self.domain.id()
    }

    pub(super) fn count_quarantined(&self, bytes: u64) {
        self.domain.count_quarantined(bytes);
    }

    /// Maps a chunk at `offset`; does nothing if the arena is mapped as a whole.
    ///
    /// # Safety
    /// Until `unmap_chunk` has returned `Ok` for `offset`, the memory stays valid and no reference into it is made.
    pub(super) unsafe fn map_chunk(&self, offset: u64, memory: DmaMemory) -> Result<(), BackendError> {
        let Place::PerUse(reservation) = &self.place else { return Ok(()) };
        // The address range is as long as the region, so a run always has its part of it.
        let Some(iova) = self.iova_of(offset, memory.len() as u64) else { return Ok(()) };
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.domain.map_at(reservation, iova, memory) }?;
        self.chunks().insert(offset, mapping);
        Ok(())
    }

    /// Unmaps the chunk at `offset`. Fails if it is not mapped, also because an earlier call has failed.
    pub(super) fn unmap_chunk(&self, offset: u64) -> Result<(), BackendError> {
        match self.place {
            Place::Whole(_) => Ok(()),
            Place::PerUse(_) => {
                let mapping = self.chunks().remove(&offset).ok_or(BackendError::NotRevoked)?;
                self.domain.unmap(mapping)
            }
        }
    }

    /// A panic while the lock was held left the map consistent.
    fn chunks(&self) -> MutexGuard<'_, BTreeMap<u64, StaticMapping>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The domains that an arena is mapped into: a list that only grows, read without a lock.
#[derive(Default)]
pub(super) struct Attachments {
    first: OnceLock<Box<Link>>,
    growing: Mutex<()>,
}

struct Link {
    attachment: Arc<Attachment>,
    next: OnceLock<Box<Self>>,
}

/// The right to add to the list.
pub(super) struct Growing<'a> {
    list: &'a Attachments,
    _lock: MutexGuard<'a, ()>,
}

impl Attachments {
    pub(super) fn first(&self) -> Option<&Attachment> {
        self.first.get().map(|link| &*link.attachment)
    }

    pub(super) fn find(&self, id: DomainId) -> Option<&Arc<Attachment>> {
        let mut link = self.first.get();
        while let Some(Link { attachment, next }) = link.map(|link| &**link) {
            if attachment.domain_id() == Some(id) {
                return Some(attachment);
            }
            link = next.get();
        }
        None
    }

    pub(super) fn lock(&self) -> Growing<'_> {
        Growing { list: self, _lock: self.growing.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Detaches the memory from all domains; returns whether no device reaches it.
    pub(super) fn detach_all(&mut self, memory: DmaMemory) -> bool {
        let mut detached = true;
        let mut link = self.first.take();
        while let Some(current) = link {
            let Link { attachment, mut next } = *current;
            link = next.take();
            // The handles are gone: each of them holds the arena. (If one were left, it could still map chunks.)
            detached &= Arc::into_inner(attachment).is_some_and(|attachment| attachment.detach(memory));
        }
        detached
    }
}

impl Growing<'_> {
    pub(super) fn push(&mut self, attachment: Attachment) -> Arc<Attachment> {
        let attachment = Arc::new(attachment);
        let mut end = &self.list.first;
        while let Some(link) = end.get() {
            end = &link.next;
        }
        // This thread alone adds, so the end is empty.
        end.get_or_init(|| Box::new(Link { attachment: Arc::clone(&attachment), next: OnceLock::new() }));
        attachment
    }
}

/// The alignment of the arena's address range: 2 MiB, so that a pool's chunks of any order are aligned to their size,
/// or 1 GiB where that allows larger leaves.
fn alignment(memory: DmaMemory) -> u64 {
    let huge = PageSize::Size1G.bytes();
    let fits = memory.len() as u64 >= huge && (memory.addr() as u64).is_multiple_of(huge);
    if fits { huge } else { PageSize::Size2M.bytes() }
}

const READ_WRITE: Access = Access::READ.union(Access::WRITE);

impl DomainOps for Domain {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).register_memory(memory) }
    }
    fn unregister_memory(&self, memory: DmaMemory) {
        (**self).unregister_memory(memory);
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_static(memory, READ_WRITE) }
    }
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        self.reserve_iova(len, align)
    }
    unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_at(reservation, iova, memory, READ_WRITE) }
    }
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        self.unmap_static(mapping)
    }
    fn count_quarantined(&self, bytes: u64) {
        (**self).count_quarantined(bytes);
    }
    fn id(&self) -> Option<DomainId> {
        Some((**self).id())
    }
    fn pins(&self) -> bool {
        (**self).pins()
    }
}
