//! Memory in the domains that it is mapped into, its mapping policy, and its count when it can
//! never be returned; the range of it that a ring registers.

#[cfg(test)]
pub(in crate::memory) mod fake;
#[cfg(test)]
mod tests;

use crate::domain::Domain;
use crate::folios;
use pinfold_core::access::Access;
use pinfold_core::addr::{IovaRange, PageSize};
use pinfold_core::domain::{BackendError, DomainId, Reservation, StaticMapping};
use pinfold_core::iova::IovaError;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The operations of a domain that the memory's owner needs. A trait, so that a test can make each
/// of them fail.
pub(super) trait DomainOps: Send + Sync {
    /// Registers the memory.
    ///
    /// # Safety
    /// The caller keeps it valid until `unregister_memory` has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// Unregisters the memory: no device reaches it afterwards.
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;
    /// Maps memory for its lifetime.
    ///
    /// # Safety
    /// Until `unmap` has returned `Ok`, or `unregister_memory` has returned, it stays valid and no
    /// reference into it is made.
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError>;
    /// Like `map_static`, in a reserved range.
    ///
    /// # Safety
    /// As for `map_static`.
    unsafe fn map_static_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError>;
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
        access: Access,
    ) -> Result<StaticMapping, BackendError>;
    /// Strict: no device reaches the memory after this has returned `Ok`.
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError>;
    /// Counts memory that a device may still reach.
    fn count_quarantined(&self, bytes: u64);
    fn id(&self) -> Option<DomainId> {
        None
    }
    /// Returns whether a mapping pins its memory.
    fn pins(&self) -> bool {
        false
    }
    /// Lends the file that registered memory shows from its start.
    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        let _ = (memory, file);
    }
}

/// The part of the domain's address space that the memory has.
enum Place {
    /// The mapping of all of it.
    Whole(StaticMapping),
    /// The range in which chunks are mapped.
    PerUse(Reservation),
}

/// Memory in one domain: registered, and mapped as a whole or chunk by chunk.
pub(super) struct Attachment {
    domain: Box<dyn DomainOps>,
    place: Place,
    iova: IovaRange,
    /// The mapped chunks, by their offset.
    chunks: Mutex<BTreeMap<u64, StaticMapping>>,
}

impl Attachment {
    /// Registers and maps the memory: completely, or not at all, unless the error
    /// [says otherwise](BackendError::stays_reachable).
    fn new(
        domain: Box<dyn DomainOps>,
        memory: DmaMemory,
        file: Option<BorrowedFd<'_>>,
        policy: MappingPolicy,
    ) -> Result<Self, BackendError> {
        // SAFETY: the owner frees the memory only after `unregister_memory` has returned
        // (`Attachments::detach_all`), and never if the error says that it stays reachable; on
        // every other error path it is unregistered below.
        unsafe { domain.register_memory(memory) }?;
        if let Some(file) = file {
            domain.lend_file(memory, file);
        }
        let placed = match policy {
            // SAFETY: the memory outlives the mapping, as above; memory that is mapped whole lends
            // no reference.
            MappingPolicy::Whole => unsafe { map_whole(&*domain, memory) }.map(Place::Whole),
            MappingPolicy::PerUse => reserve(&*domain, memory).map(Place::PerUse),
        };
        let place = match placed {
            Ok(place) => place,
            Err(error) if error.stays_reachable() => {
                domain.count_quarantined(memory.len() as u64);
                return Err(error);
            }
            Err(error) => {
                let reachable = unregister(&*domain, memory).err();
                return Err(reachable.unwrap_or(error));
            }
        };
        let iova = match &place {
            Place::Whole(mapping) => mapping.iova(),
            Place::PerUse(reservation) => reservation.range(),
        };
        Ok(Self { domain, place, iova, chunks: Mutex::default() })
    }

    /// Unmaps and unregisters the memory, of which nothing is in use; returns whether no device
    /// reaches it.
    fn detach(self, memory: DmaMemory) -> bool {
        match self.place {
            Place::Whole(mapping) => {
                let iova = mapping.iova();
                if let Err(error) = self.domain.unmap(mapping) {
                    tracing::error!(%iova, %error, "memory could not be unmapped");
                    self.domain.count_quarantined(memory.len() as u64);
                    return false;
                }
            }
            Place::PerUse(reservation) => self.domain.release(reservation),
        }
        unregister(&*self.domain, memory).is_ok()
    }

    pub(super) fn iova(&self) -> IovaRange {
        self.iova
    }

    /// Returns the part of the address range at `offset`.
    pub(super) fn iova_of(&self, offset: u64, bytes: u64) -> Option<IovaRange> {
        self.iova.part(offset, bytes)
    }

    /// Returns whether all of the memory is mapped.
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.place, Place::Whole(_))
    }

    /// Returns whether the kernel keeps all of the memory in its frames for as long as this lasts.
    fn pins(&self) -> bool {
        self.is_whole() && self.domain.pins()
    }

    pub(super) fn domain_id(&self) -> Option<DomainId> {
        self.domain.id()
    }

    pub(super) fn count_quarantined(&self, bytes: u64) {
        self.domain.count_quarantined(bytes);
    }

    /// Maps a chunk at `offset` for `access`; does nothing if the memory is mapped as a whole, for
    /// any access.
    ///
    /// # Safety
    /// Until `unmap_chunk` has returned `Ok` for `offset`, the memory stays valid and no reference
    /// into it is made.
    pub(super) unsafe fn map_chunk(
        &self,
        offset: u64,
        memory: DmaMemory,
        access: Access,
    ) -> Result<(), BackendError> {
        let Place::PerUse(reservation) = &self.place else { return Ok(()) };
        // The address range is as long as the memory, so a run always has its part of it.
        let Some(iova) = self.iova_of(offset, memory.len() as u64) else { return Ok(()) };
        // SAFETY: the caller's promise.
        let mapping = unsafe { self.domain.map_at(reservation, iova, memory, access) }?;
        self.chunks().insert(offset, mapping);
        Ok(())
    }

    /// Unmaps the chunk at `offset`. Fails if it is not mapped, also because an earlier call has
    /// failed.
    pub(super) fn unmap_chunk(&self, offset: u64) -> Result<(), BackendError> {
        match self.place {
            Place::Whole(_) => Ok(()),
            Place::PerUse(_) => {
                let mapping = self.chunks().remove(&offset).ok_or(BackendError::NotRevoked)?;
                self.domain.unmap(mapping)
            }
        }
    }

    /// Locks the map, which a panic while the lock was held has left consistent.
    fn chunks(&self) -> MutexGuard<'_, BTreeMap<u64, StaticMapping>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The domains that memory is mapped into: a list that only grows, read without a lock.
#[derive(Default)]
pub(super) struct Attachments {
    first: OnceLock<Box<Link>>,
    growing: Mutex<()>,
    /// A failed `add` has left the memory reachable for a device.
    reachable: AtomicBool,
}

struct Link {
    attachment: Arc<Attachment>,
    next: OnceLock<Box<Self>>,
}

impl Drop for Attachments {
    fn drop(&mut self) {
        // One after the other: there may be more than the stack has room for.
        let mut link = self.first.take();
        while let Some(mut current) = link {
            link = current.next.take();
        }
    }
}

impl Attachments {
    pub(super) fn find(&self, id: DomainId) -> Option<&Arc<Attachment>> {
        self.find_by(|attachment| attachment.domain_id() == Some(id))
    }

    /// Returns whether a domain pins all of the memory until it is detached.
    pub(super) fn pins(&self) -> bool {
        self.find_by(Attachment::pins).is_some()
    }

    fn find_by(&self, found: impl Fn(&Attachment) -> bool) -> Option<&Arc<Attachment>> {
        let mut link = self.first.get();
        while let Some(Link { attachment, next }) = link.map(|link| &**link) {
            if found(attachment) {
                return Some(attachment);
            }
            link = next.get();
        }
        None
    }

    /// Maps the memory, and the file that it shows from its start, into a domain; returns the existing attachment if it is mapped there
    /// already. After an error that leaves the memory [reachable](BackendError::stays_reachable),
    /// `detach_all` never succeeds.
    pub(super) fn add(
        &self,
        domain: Box<dyn DomainOps>,
        memory: DmaMemory,
        file: Option<BorrowedFd<'_>>,
        policy: MappingPolicy,
    ) -> Result<Arc<Attachment>, BackendError> {
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attachment) = domain.id().and_then(|id| self.find(id)) {
            return Ok(Arc::clone(attachment));
        }
        let attachment = Attachment::new(domain, memory, file, policy).inspect_err(|error| {
            if error.stays_reachable() {
                self.reachable.store(true, Ordering::Relaxed);
            }
        })?;
        let attachment = Arc::new(attachment);
        let mut end = &self.first;
        while let Some(link) = end.get() {
            end = &link.next;
        }
        // This thread alone adds, so the end is empty.
        end.get_or_init(|| {
            Box::new(Link { attachment: Arc::clone(&attachment), next: OnceLock::new() })
        });
        Ok(attachment)
    }

    /// Detaches the memory from all domains, also after a failure; returns whether no device
    /// reaches it.
    pub(super) fn detach_all(&mut self, memory: DmaMemory) -> bool {
        let mut detached = !*self.reachable.get_mut();
        let mut link = self.first.take();
        while let Some(current) = link {
            let Link { attachment, mut next } = *current;
            link = next.take();
            // The handles are gone: each of them holds the memory. (If one were left, it could
            // still map chunks.)
            detached &=
                Arc::into_inner(attachment).is_some_and(|attachment| attachment.detach(memory));
        }
        detached
    }
}

/// Unregisters the memory, of which nothing is mapped any more. If a device may still reach it, that
/// is counted, and it must not be released.
fn unregister(domain: &dyn DomainOps, memory: DmaMemory) -> Result<(), BackendError> {
    domain.unregister_memory(memory).inspect_err(|error| {
        let (addr, len) = (memory.addr(), memory.len());
        tracing::error!(addr, len, %error, "memory could not be unregistered");
        domain.count_quarantined(len as u64);
    })
}

/// Maps all of `memory` for its lifetime, with leaves as large as its pages: memory that begins
/// within a hugepage gets addresses that begin as far within a leaf.
///
/// # Safety
/// As for [`DomainOps::map_static`].
unsafe fn map_whole(
    domain: &dyn DomainOps,
    memory: DmaMemory,
) -> Result<StaticMapping, BackendError> {
    let reserved = folios::leaf(memory).and_then(|leaf| {
        let (before, len) = (memory.addr() as u64 & leaf.mask(), memory.len() as u64);
        // If no such addresses are free, smaller leaves suffice: they are only slower.
        let reservation = domain.reserve(before + len, leaf.bytes()).ok()?;
        Some((reservation.range().part(before, len)?, reservation))
    });
    match reserved {
        // SAFETY: the caller's promise is the one required.
        None => unsafe { domain.map_static(memory) },
        // The mapping keeps the reservation.
        // SAFETY: the caller's promise is the one required.
        Some((iova, all)) => unsafe { domain.map_static_at(&all, iova, memory) },
    }
}

/// Reserves addresses for all of `memory`, aligned to 2 MiB, so that a pool's chunks of any order
/// are aligned to their size; to 1 GiB where that allows larger leaves. Where no such addresses are
/// free, to less: a pool then has smaller chunks, or says when it is created that it needs more.
fn reserve(domain: &dyn DomainOps, memory: DmaMemory) -> Result<Reservation, BackendError> {
    let (len, huge) = (memory.len() as u64, PageSize::Size1G.bytes());
    let aligned_to = |size: PageSize| match domain.reserve(len, size.bytes()) {
        // If no range is long enough, no alignment helps.
        Err(BackendError::Iova(IovaError::Exhausted { largest_free, .. }))
            if largest_free >= len =>
        {
            None
        }
        reserved => Some(reserved),
    };
    let fits = len >= huge && (memory.addr() as u64).is_multiple_of(huge);
    fits.then(|| aligned_to(PageSize::Size1G))
        .flatten()
        .or_else(|| aligned_to(PageSize::Size2M))
        .unwrap_or_else(|| domain.reserve(len, PageSize::Size4K.bytes()))
}

/// The access of a device to memory that is mapped as a whole, and to a pool's chunks.
pub(super) const READ_WRITE: Access = Access::READ.union(Access::WRITE);

impl DomainOps for Domain {
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).register_memory(memory) }
    }
    fn unregister_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        (**self).unregister_memory(memory)
    }
    unsafe fn map_static(&self, memory: DmaMemory) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_static(memory, READ_WRITE) }
    }
    unsafe fn map_static_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
    ) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_static_at(reservation, iova, memory, READ_WRITE) }
    }
    fn reserve(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        self.reserve_iova(len, align)
    }
    unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that the domain asks for.
        unsafe { (**self).map_at(reservation, iova, memory, access) }
    }
    fn unmap(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        Ok(self.unmap_static(mapping)?)
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
    fn lend_file(&self, memory: DmaMemory, file: BorrowedFd<'_>) {
        self.lend_file(memory, file);
    }
}

// When memory is mapped.

/// The part of an arena, or of owned memory, that the devices of its domains can reach.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MappingPolicy {
    /// All of it, for its lifetime: mapped once, without table work afterwards. A device may write
    /// any byte at any time, so buffers lend no slices.
    Whole,
    /// Only memory in use: a pool's chunks while the pool has them, a buffer while it is mapped.
    #[default]
    PerUse,
}

// The count of quarantined memory, which is never returned, since a device may still reach it.

static QUARANTINED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns how many bytes of arenas, of [`OwnedMemory`](super::OwnedMemory) and of their buffers
/// this process has quarantined: memory that was in use when its arena was dropped, or that a
/// device may reach for good. A buffer that a domain has quarantined keeps its arena, which is not
/// counted. What waits for a flush that is only late is in
/// [`deferred_bytes`](crate::deferred_bytes).
pub fn quarantined_bytes() -> u64 {
    QUARANTINED_BYTES.load(Ordering::Relaxed) + pinfold_core::domain::quarantined_bytes()
}

/// Counts memory that is leaked from here on.
pub(super) fn count_quarantined(bytes: u64) {
    QUARANTINED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    #[cfg(test)]
    QUARANTINED_HERE.set(QUARANTINED_HERE.get() + bytes);
}

#[cfg(test)]
thread_local! {
    static QUARANTINED_HERE: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Returns the bytes that this thread has quarantined: the count of the process moves while other
/// tests quarantine memory, too.
#[cfg(test)]
pub(super) fn quarantined_here() -> u64 {
    let (all, here) = (quarantined_bytes(), QUARANTINED_HERE.get());
    assert!(all >= here, "the count of the process includes this thread's: {all} {here}");
    here
}

// Memory to be registered with a ring.

/// The address range of memory that is to be registered with a ring. It gives no access to the
/// memory.
///
/// Of an arena it is [`ArenaMemory::fixed`](crate::arena::ArenaMemory::fixed), of the program's own
/// memory [`OwnedMemory::fixed`](crate::OwnedMemory::fixed).
#[derive(Clone, Copy, Debug)]
pub struct Fixed<'m> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    lent: PhantomData<&'m ()>,
}

impl<'m> From<DmaMemory<'m>> for Fixed<'m> {
    fn from(memory: DmaMemory<'m>) -> Self {
        Self { addr: memory.addr(), len: memory.len(), lent: PhantomData }
    }
}
