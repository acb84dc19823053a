//! The domain: its backend, its addresses, its static mappings, and what it holds until a flush completes.

use super::backend::Backend;
use super::error::BackendError;
use super::id::DomainId;
use super::pending::{PendingRelease, PendingReleases};
use super::reservation::{Reservation, StaticMapping};
use super::stats::DomainStats;
use crate::access::Access;
use crate::addr::{Iova, IovaRange, PageSize};
use crate::invalidate::Ticket;
use crate::iova::IovaSpace;
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::fmt;
use core::mem::ManuallyDrop;

#[derive(Default)]
struct Counts {
    maps: AtomicU64,
    maps_fixed: AtomicU64,
    revokes: AtomicU64,
    unmaps: AtomicU64,
    quarantined: AtomicU64,
    quarantined_bytes: AtomicU64,
}

/// Memory that stays mapped for its lifetime.
struct Static {
    iova: IovaRange,
    addr: usize,
    access: Access,
}

/// One I/O address space. See the [module](super).
pub struct Domain {
    id: DomainId,
    backend: Box<dyn Backend>,
    pub(super) iovas: Arc<IovaSpace>,
    /// By their first address.
    statics: Mutex<BTreeMap<Iova, Static>>,
    pending: PendingReleases,
    counts: Counts,
}

impl Domain {
    /// Creates a domain over `backend`, with addresses from `iovas`.
    pub fn new(backend: Box<dyn Backend>, iovas: IovaSpace) -> Self {
        Self {
            id: DomainId::next(),
            backend,
            iovas: Arc::new(iovas),
            statics: Mutex::new(BTreeMap::new()),
            pending: PendingReleases::new(),
            counts: Counts::default(),
        }
    }

    /// Returns the domain's identity.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// Returns the name of the backend.
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Whether mapping memory pins it and charges it to the process: then it need not be locked too.
    pub fn pins(&self) -> bool {
        self.backend.pins()
    }

    pub(super) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Registers the memory: only registered memory can be mapped.
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`], [`BackendError::NotPages`].
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has returned.
    pub unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        check_pages(memory)?;
        // SAFETY: the caller's promise is the one that `register_memory` requires.
        unsafe { self.backend.register_memory(memory) }
    }

    /// Unregisters the memory: after this returns, no device of this domain reaches it, whatever is mapped.
    pub fn unregister_memory(&self, memory: DmaMemory) {
        self.backend.unregister_memory(memory);
    }

    /// Maps memory for its lifetime, at addresses of the domain's choice.
    ///
    /// # Errors
    /// [`BackendError`].
    ///
    /// # Safety
    /// Until [`unmap_static`](Self::unmap_static) has returned `Ok`, or the memory has been
    /// [unregistered](Self::unregister_memory), the caller keeps it valid and creates no reference into it.
    pub unsafe fn map_static(
        &self,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        let iova = self.map_fresh(memory, access).map_err(|(_, error)| error)?;
        self.statics.lock().insert(iova.start(), Static { iova, addr: memory.addr(), access });
        Ok(Reservation::new(&self.iovas, iova).mapping(iova))
    }

    /// Unmaps what [`map_static`](Self::map_static) or [`map_at`](Self::map_at) mapped, and waits.
    ///
    /// # Errors
    /// A device may reach the memory for good: the caller must never reuse it (and counts it with
    /// [`count_quarantined`](Self::count_quarantined)). Its addresses are not reused. [`BackendError::NotRevoked`] also if
    /// the mapping belongs to another domain; nothing has changed there.
    pub fn unmap_static(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        let iova = mapping.iova();
        if !mapping.is_in(&self.iovas) {
            return Err(BackendError::NotRevoked);
        }
        {
            let mut statics = self.statics.lock();
            if statics.get(&iova.start()).is_some_and(|s| s.iova == iova) {
                statics.remove(&iova.start());
            }
        }
        let ticket = self.backend.revoke(&mut core::iter::once(iova))?;
        self.backend.wait(ticket)?;
        mapping.release();
        Ok(())
    }

    /// Reserves `len` bytes of the address space, aligned to `align` bytes, for [`map_at`](Self::map_at).
    ///
    /// # Errors
    /// [`BackendError::Iova`] if there is no such range, [`BackendError::NoTranslation`] if the backend does not
    /// [translate](Backend::translates).
    pub fn reserve_iova(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        Ok(Reservation::new(&self.iovas, self.alloc_iova(len, align)?))
    }

    /// Excludes `range` from allocation for good: addresses that no device reaches.
    ///
    /// # Errors
    /// [`BackendError::Iova`] if part of it is in use.
    pub fn reserve_range(&self, range: IovaRange) -> Result<(), BackendError> {
        Ok(self.iovas.reserve(range)?)
    }

    /// Maps memory at a part of a reserved range.
    ///
    /// # Errors
    /// [`BackendError`], also if something is mapped there. [`BackendError::NotReserved`] if `iova` is not part of
    /// `reservation`, or that belongs to another domain. If a device [may reach](BackendError::stays_reachable) the memory
    /// in spite of the error, `reservation` is never released.
    ///
    /// # Safety
    /// As for [`map_static`](Self::map_static).
    pub unsafe fn map_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        check_pages(memory)?;
        if !reservation.is_in(&self.iovas) || !reservation.range().covers(&iova) {
            return Err(BackendError::NotReserved { iova });
        }
        self.backend.map(iova, memory, access).inspect_err(|error| {
            if error.stays_reachable() {
                reservation.quarantine();
            }
        })?;
        Ok(reservation.mapping(iova))
    }

    /// Returns where `memory` is mapped for its lifetime, if this domain has it mapped at `start`. O(log statics).
    pub fn static_at(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let iova = IovaRange::new(start, memory.len() as u64).ok()?;
        let here = |s: &Static| {
            s.access.contains(access)
                && s.iova.covers(&iova)
                && iova.start().checked_offset_from(s.iova.start())
                    == memory.addr().checked_sub(s.addr).map(|offset| offset as u64)
        };
        let statics = self.statics.lock();
        let (_, nearest) = statics.range(..=start).next_back()?;
        here(nearest).then_some(iova)
    }

    /// Maps memory at addresses of the domain's choice. An error comes with the addresses through which a device may
    /// still reach the memory, if any.
    pub(super) fn map_fresh(
        &self,
        memory: DmaMemory,
        access: Access,
    ) -> Result<IovaRange, (Option<IovaRange>, BackendError)> {
        let iova = self.alloc_for(memory).map_err(|error| (None, error))?;
        let Err(error) = self.backend.map(iova, memory, access) else { return Ok(iova) };
        if error.stays_reachable() {
            return Err((Some(iova), error));
        }
        self.release_iova(iova).map_err(|error| (None, error))?;
        Err((None, error))
    }

    fn alloc_for(&self, memory: DmaMemory) -> Result<IovaRange, BackendError> {
        check_pages(memory)?;
        if let Some(required) = self.backend.required_iova(memory)? {
            self.iovas.alloc_at(required)?;
            return Ok(required);
        }
        self.alloc_iova(memory.len() as u64, alignment(memory))
    }

    pub(super) fn alloc_iova(&self, len: u64, align: u64) -> Result<IovaRange, BackendError> {
        if !self.backend.translates() {
            return Err(BackendError::NoTranslation);
        }
        Ok(self.iovas.alloc(len, align, None)?)
    }

    /// Releases addresses that no device can reach.
    pub(super) fn release_iova(&self, iova: IovaRange) -> Result<(), BackendError> {
        Ok(self.iovas.free(iova)?)
    }

    pub(super) fn count_map(&self, fixed: bool) {
        self.counts.maps_fixed.fetch_add(u64::from(fixed), Ordering::Relaxed);
        self.counts.maps.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_revoked(&self) {
        self.counts.revokes.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases the addresses of a mapping that no device can reach.
    pub(super) fn finish_unmap(&self, iova: IovaRange, fixed: bool) {
        let released = known_bad::makes(Mistake::IovaEarly);
        if !fixed && !released && self.release_iova(iova).is_err() {
            // Not allocated here, which cannot happen; if it did, not reusing them is the safe side.
            self.count_quarantined(0);
        }
        self.counts.unmaps.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes over a buffer that a device may still reach: until its flush completes if that is `late`, else for good
    /// (quarantined).
    pub(super) fn keep_reachable<P: Send + 'static>(
        &self,
        payload: P,
        iova: IovaRange,
        late: Option<Ticket>,
    ) {
        let Some(ticket) = late else {
            core::mem::forget(payload);
            return self.count_quarantined(iova.len());
        };
        let payload = ManuallyDrop::new(Box::new(payload) as Box<dyn Send>);
        self.pending.push(PendingRelease { payload, iova, ticket });
    }

    /// Drops the buffers whose late flush has completed, and returns how many are still held. O(1) while none is.
    ///
    /// Maps, revocations and waits do this too; a program that makes none calls it to recover its memory.
    pub fn release_late(&self) -> u64 {
        let first = self.pending.first();
        if first == Ticket::NEVER {
            return 0;
        }
        let failed = self.backend.has_failed();
        if failed || self.backend.is_completed(first) {
            // One by one: a drop may do anything, so it runs without the lock.
            while let Some(release) = self.pending.pop(|ticket| self.backend.is_completed(ticket)) {
                self.finish_unmap(release.iova, false);
                drop(ManuallyDrop::into_inner(release.payload));
            }
        }
        if failed {
            while let Some(release) = self.pending.pop(|_| true) {
                self.count_quarantined(release.iova.len());
            }
        }
        self.pending.counts().0
    }

    /// Counts memory that its owner quarantined, because a device may reach it for good.
    pub fn count_quarantined(&self, bytes: u64) {
        self.counts.quarantined.fetch_add(1, Ordering::Relaxed);
        self.counts.quarantined_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the statistics.
    pub fn stats(&self) -> DomainStats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // `revokes` before `maps`: a mapping made and revoked in between must not make `live` negative.
        let revokes = get(&self.counts.revokes);
        let maps = get(&self.counts.maps);
        let (deferred, deferred_bytes) = self.pending.counts();
        DomainStats {
            maps,
            maps_fixed: get(&self.counts.maps_fixed),
            revokes,
            unmaps: get(&self.counts.unmaps),
            live: maps.saturating_sub(revokes),
            deferred,
            deferred_bytes,
            quarantined: get(&self.counts.quarantined),
            quarantined_bytes: get(&self.counts.quarantined_bytes),
            static_mappings: self.statics.lock().len() as u64,
            iova_extents: self.iovas.stats().free as u64,
            backend: self.backend.stats(),
        }
    }
}

impl Drop for Domain {
    /// What is still pending stays leaked: its flush can no longer be observed.
    fn drop(&mut self) {
        self.release_late();
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("backend", &self.backend.name()).finish_non_exhaustive()
    }
}

pub(super) const PAGE_BYTES: usize = 4096;

pub(super) fn check_pages(memory: DmaMemory) -> Result<(), BackendError> {
    let (addr, len) = (memory.addr(), memory.len());
    let pages = len > 0 && (addr | len).is_multiple_of(PAGE_BYTES);
    if pages { Ok(()) } else { Err(BackendError::NotPages { addr, len }) }
}

/// Returns the alignment that lets the table use its largest leaves.
pub(super) fn alignment(memory: DmaMemory) -> u64 {
    let usable = |size: &PageSize| {
        memory.len() as u64 >= size.bytes() && (memory.addr() as u64).is_multiple_of(size.bytes())
    };
    PageSize::ALL.iter().rev().find(|size| usable(size)).map_or(PageSize::Size4K.bytes(), |size| size.bytes())
}
