//! A domain: one I/O address space, and the life of a mapping in it.
//!
//! ```text
//! map(buffer, direction) -> Mapping --revoke()--> Revoked(ticket) --wait()/poll()--> the buffer again
//! ```
//!
//! - **strict**: [`Mapping::unmap`] revokes and waits. After it returns no device can reach the buffer.
//! - **revoke**: [`Mapping::revoke`] returns at once. The buffer, its pages and its I/O virtual addresses are held by
//!   the [`Revoked`] and can neither be reused nor read until the ticket is done.
//! - [`Domain::revoke_all`] takes many mappings back with one flush.
//!
//! "Timed out" is not "completed", nor is it "never": a flush past its deadline is *late*. [`Revoked::wait`] then gives the
//! `Revoked` back, to be waited for again; one that is dropped leaves its buffer with the domain, which holds it until
//! the flush completes ([`DomainStats::deferred`], [`Domain::release_late`]). Only where that can never be (the unit has
//! failed, or access could not be taken back) the buffer goes into *quarantine*: it is leaked with its addresses,
//! and counted ([`DomainStats::quarantined`]).
//!
//! Memory that is mapped for as long as it lives (an arena that is exposed whole, the chunks of a pool) is mapped with
//! [`Domain::map_static`] or [`Domain::map_at`] by whoever owns it.

use crate::access::{Access, Direction};
use crate::addr::{Iova, IovaRange, PageSize};
use crate::invalidate::Ticket;
use crate::iova::IovaSpace;
use crate::known_bad::{self, Mistake};
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;
use pending::PendingReleases;

mod backend;
mod future;
mod mapping;
mod owner;
mod payload;
mod pending;
mod reservation;
mod table_backend;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use backend::{Backend, BackendError, BackendStats};
pub use future::Quiesced;
pub use mapping::{MapError, Mapping, NotQuiesced, Revoked, Unrevoked};
pub use owner::DomainOwner;
pub use payload::{DomainId, Payload};
pub use reservation::{Reservation, StaticMapping};
pub use table_backend::{PhysTranslator, TableBackend};

/// Memory that can be mapped: pinned, and owned by the value.
///
/// # Safety
/// The results of all methods never change. Until the value is dropped, all memory that they return stays where it is,
/// valid, and the value's alone (if the value is leaked, for good). While the value is not borrowed, no reference into the
/// memory exists. A value with a `fixed_iova` has one piece.
pub unsafe trait Pinned: Send + 'static {
    /// The memory. Start and length are multiples of 4096.
    fn memory(&self) -> DmaMemory<'_>;

    /// Returns the address at which the memory is mapped in `domain` for as long as the value lives (an arena that is
    /// mapped whole), if it is.
    fn fixed_iova(&self, domain: DomainId) -> Option<Iova>;

    /// Returns piece `index` of memory that is scattered in this process; `None` after the last. The first is
    /// [`memory`](Self::memory).
    ///
    /// The pieces are mapped one behind the other at one contiguous range of I/O virtual addresses.
    fn piece(&self, index: usize) -> Option<DmaMemory<'_>> {
        (index == 0).then(|| self.memory())
    }

    /// Returns the offset and the length, in the mapped range, of part `index` of what is to be transferred; `None` after
    /// the last. By default one extent: all of the memory.
    ///
    /// For payloads that are not whole pages, and for those of several parts.
    fn extent(&self, index: usize) -> Option<(u64, u64)> {
        (index == 0).then(|| (0, pieces(self).map(|piece| piece.len() as u64).sum()))
    }
}

fn pieces<P: Pinned + ?Sized>(payload: &P) -> impl Iterator<Item = DmaMemory<'_>> {
    (0..).map_while(|index| payload.piece(index))
}

/// What a domain has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct DomainStats {
    /// Buffers mapped.
    pub maps: u64,
    /// Of these, ones that needed no table work, because they are mapped for as long as they live.
    pub maps_fixed: u64,
    /// Mappings taken back.
    pub revokes: u64,
    /// Buffers given back after their ticket was done.
    pub unmaps: u64,
    /// Mappings that a device may use now: neither given back nor in quarantine.
    pub live: u64,
    /// Buffers that the domain holds until their flush, which is late, completes.
    pub deferred: u64,
    /// Bytes of these.
    pub deferred_bytes: u64,
    /// Buffers that were leaked, because a device may reach them for ever.
    pub quarantined: u64,
    /// Bytes of these.
    pub quarantined_bytes: u64,
    /// Pieces of memory that are mapped for as long as they live.
    pub static_mappings: u64,
    /// Free extents that the account of I/O virtual addresses holds.
    pub iova_extents: u64,
    /// The backend's account.
    pub backend: BackendStats,
}

#[derive(Default)]
struct Counts {
    maps: AtomicU64,
    maps_fixed: AtomicU64,
    revokes: AtomicU64,
    unmaps: AtomicU64,
    quarantined: AtomicU64,
    quarantined_bytes: AtomicU64,
}

/// Memory that is mapped for as long as it lives.
struct Static {
    iova: IovaRange,
    addr: usize,
    access: Access,
}

/// One I/O address space.
pub struct Domain {
    id: DomainId,
    backend: Box<dyn Backend>,
    iovas: Arc<IovaSpace>,
    /// By their first address.
    statics: Mutex<BTreeMap<Iova, Static>>,
    pending: PendingReleases,
    counts: Counts,
}

impl Domain {
    /// A domain whose table `backend` keeps, and whose addresses come from `iovas`.
    pub fn new(backend: Box<dyn Backend>, iovas: IovaSpace) -> Self {
        let (statics, pending) = (Mutex::new(BTreeMap::new()), PendingReleases::new());
        Self {
            id: DomainId::next(),
            backend,
            iovas: Arc::new(iovas),
            statics,
            pending,
            counts: Counts::default(),
        }
    }

    /// Which domain it is.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// What the backend is called.
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Whether a mapping pins its memory, and charges it to the process: then locking it too would be charged twice.
    pub fn pins(&self) -> bool {
        self.backend.pins()
    }

    /// Makes the memory known: only memory that was admitted can be mapped.
    ///
    /// # Errors
    /// [`BackendError::AlreadyRegistered`], [`BackendError::NotPages`].
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has returned.
    pub unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError> {
        check_pages(memory)?;
        // SAFETY: the caller's promise is the one that `register_memory` asks for.
        unsafe { self.backend.register_memory(memory) }
    }

    /// The memory goes away: when this returns, no device of this domain reaches it, whatever is still mapped.
    pub fn unregister_memory(&self, memory: DmaMemory) {
        self.backend.unregister_memory(memory);
    }

    /// Maps `payload` for the device; it moves into the mapping, which borrows the domain.
    ///
    /// [`DomainOwner::map`] returns a mapping that owns a share of the domain instead.
    ///
    /// # Errors
    /// [`MapError`], with the payload wherever no device can reach it.
    pub fn map<P: Pinned, D: Direction>(
        &self,
        payload: P,
        direction: D,
    ) -> Result<Mapping<P, D, &Self>, MapError<P>> {
        let (payload, iova, fixed) = self.map_payload(payload, direction)?;
        Ok(Mapping::new(self, payload, iova, fixed))
    }

    /// Returns the payload with its addresses, and whether it stays mapped for its lifetime.
    fn map_payload<P: Pinned, D: Direction>(
        &self,
        payload: P,
        _: D,
    ) -> Result<(P, IovaRange, bool), MapError<P>> {
        self.release_late();
        let fixed = payload.fixed_iova(self.id);
        if let Some(iova) = fixed.and_then(|at| self.static_at(at, payload.memory(), D::ACCESS)) {
            self.counts.maps_fixed.fetch_add(1, Ordering::Relaxed);
            self.counts.maps.fetch_add(1, Ordering::Relaxed);
            return Ok((payload, iova, true));
        }
        let mapped = match payload.piece(1) {
            None => self.map_fresh(payload.memory(), D::ACCESS),
            Some(_) => self.map_pieces(&payload, D::ACCESS),
        };
        match mapped {
            Ok(iova) => {
                self.counts.maps.fetch_add(1, Ordering::Relaxed);
                Ok((payload, iova, false))
            }
            Err((Some(iova), error)) => {
                self.keep_reachable(payload, iova, error.late_ticket());
                Err(MapError { payload: None, error })
            }
            Err((None, error)) => Err(MapError { payload: Some(payload), error }),
        }
    }

    /// Revokes many mappings with one flush, and appends them to `revoked`. Reads and writes may be mixed: each item
    /// is a [`Mapping`], or an [`Unrevoked`], which is a mapping of any direction.
    ///
    /// Allocates nothing where `revoked` has the capacity for them.
    pub fn revoke_all<P: Pinned, H: Deref<Target = Self>, M: Into<Unrevoked<P, H>>>(
        &self,
        mappings: impl IntoIterator<Item = M>,
        revoked: &mut Vec<Revoked<P, H>>,
    ) {
        self.release_late();
        let first = revoked.len();
        for mapping in mappings {
            let mapping = mapping.into();
            revoked.push(if mapping.belongs_to(self) { mapping.into_revoked() } else { mapping.revoke() });
        }
        let new = revoked.get_mut(first..).unwrap_or_default();
        let mut ranges = new.iter().filter(|new| !new.is_revoked()).filter_map(Revoked::to_revoke);
        let ticket = self.backend.revoke(&mut ranges).unwrap_or(Ticket::NEVER);
        for revoked in new.iter_mut().filter(|new| !new.is_revoked()) {
            revoked.set_revoked(ticket);
        }
    }

    /// Maps memory for as long as it lives, at addresses of the domain's choice.
    ///
    /// # Errors
    /// [`BackendError`].
    ///
    /// # Safety
    /// Until [`unmap_static`](Self::unmap_static) has returned `Ok`, or the memory has been
    /// [expelled](Self::unregister_memory), the caller keeps it valid and takes no reference into it.
    pub unsafe fn map_static(
        &self,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        let iova = self.map_fresh(memory, access).map_err(|(_, error)| error)?;
        self.statics.lock().insert(iova.start(), Static { iova, addr: memory.addr(), access });
        Ok(Reservation::new(&self.iovas, iova).mapping(iova))
    }

    /// Takes back what [`map_static`](Self::map_static) or [`map_at`](Self::map_at) gave, and waits.
    ///
    /// # Errors
    /// A device may reach the memory for ever: the caller must never use it again (count it with
    /// [`count_quarantined`](Self::count_quarantined)). Its addresses are not used again. [`BackendError::NotRevoked`] where
    /// the mapping is another domain's; nothing has changed there.
    pub fn unmap_static(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        let iova = mapping.iova();
        if !mapping.is_of(self) {
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

    /// Sets `len` bytes of the address space aside, aligned to `align` bytes, for [`map_at`](Self::map_at).
    ///
    /// # Errors
    /// [`BackendError::Iova`] where there is no such range, [`BackendError::NoTranslation`] where the backend does not
    /// [translate](Backend::translates).
    pub fn reserve_iova(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        Ok(Reservation::new(&self.iovas, self.alloc_iova(len, align)?))
    }

    fn alloc_iova(&self, len: u64, align: u64) -> Result<IovaRange, BackendError> {
        if !self.backend.translates() {
            return Err(BackendError::NoTranslation);
        }
        Ok(self.iovas.alloc(len, align, None)?)
    }

    /// Keeps `range` from ever being handed out: a device does not reach it.
    ///
    /// # Errors
    /// [`BackendError::Iova`] where some of it is in use.
    pub fn reserve_range(&self, range: IovaRange) -> Result<(), BackendError> {
        Ok(self.iovas.reserve(range)?)
    }

    /// Releases addresses that no device can reach.
    fn release_iova(&self, iova: IovaRange) -> Result<(), BackendError> {
        Ok(self.iovas.free(iova)?)
    }

    /// Maps memory at a part of a reserved range.
    ///
    /// # Errors
    /// [`BackendError`]; among others where something is mapped there. [`BackendError::NotReserved`] where `iova` is no
    /// part of `place`, or that is another domain's. Where a device [may reach](BackendError::stays_reachable) the memory
    /// all the same, `place` is never released.
    ///
    /// # Safety
    /// Until [`unmap_static`](Self::unmap_static) has returned `Ok`, or the memory has been [expelled](Self::unregister_memory), the
    /// caller keeps it valid and takes no reference into it.
    pub unsafe fn map_at(
        &self,
        place: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        check_pages(memory)?;
        if !place.has(self, iova) {
            return Err(BackendError::NotReserved { iova });
        }
        self.backend.map(iova, memory, access).inspect_err(|error| {
            if error.stays_reachable() {
                place.keep();
            }
        })?;
        Ok(place.mapping(iova))
    }

    /// Counts memory that its owner leaked, because a device may reach it for ever.
    pub fn count_quarantined(&self, bytes: u64) {
        self.counts.quarantined.fetch_add(1, Ordering::Relaxed);
        self.counts.quarantined_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What the domain has done so far, and what it holds.
    pub fn stats(&self) -> DomainStats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // `revokes` before `maps`: a mapping that comes and goes meanwhile must not make `live` negative.
        let revokes = get(&self.counts.revokes);
        let maps = get(&self.counts.maps);
        let (deferred, deferred_bytes) = self.pending.counts();
        DomainStats {
            deferred,
            deferred_bytes,
            maps,
            maps_fixed: get(&self.counts.maps_fixed),
            revokes,
            unmaps: get(&self.counts.unmaps),
            live: maps.saturating_sub(revokes),
            quarantined: get(&self.counts.quarantined),
            quarantined_bytes: get(&self.counts.quarantined_bytes),
            static_mappings: self.statics.lock().len() as u64,
            iova_extents: self.iovas.stats().free as u64,
            backend: self.backend.stats(),
        }
    }

    fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Where `memory` is mapped for as long as it lives, if this domain knows that it is, at `start`. O(log statics).
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

    /// Maps memory at addresses of the domain's choice. On an error, the addresses through which a device may still
    /// reach the memory, if it may; otherwise they are free again.
    fn map_fresh(
        &self,
        memory: DmaMemory,
        access: Access,
    ) -> Result<IovaRange, (Option<IovaRange>, BackendError)> {
        let iova = self.place(memory).map_err(|error| (None, error))?;
        let Err(error) = self.backend.map(iova, memory, access) else { return Ok(iova) };
        if error.stays_reachable() {
            return Err((Some(iova), error));
        }
        self.release_iova(iova).map_err(|error| (None, error))?;
        Err((None, error))
    }

    /// Maps the pieces of `payload` at one contiguous range. Errors are those of [`map_fresh`](Self::map_fresh).
    fn map_pieces<P: Pinned>(
        &self,
        payload: &P,
        access: Access,
    ) -> Result<IovaRange, (Option<IovaRange>, BackendError)> {
        let iova = self.place_pieces(payload).map_err(|error| (None, error))?;
        let mut mapped = 0;
        for piece in pieces(payload) {
            let len = piece.len() as u64;
            let differs = || BackendError::LengthsDiffer { iova, memory_bytes: piece.len() };
            let result = iova.part(mapped, len).ok_or_else(differs);
            if let Err(error) = result.and_then(|at| self.backend.map(at, piece, access)) {
                let error = self.unmap_part(iova, mapped, error);
                if error.stays_reachable() {
                    return Err((Some(iova), error));
                }
                self.release_iova(iova).map_err(|error| (None, error))?;
                return Err((None, error));
            }
            mapped += len;
        }
        Ok(iova)
    }

    /// Revokes the first `len` bytes of `iova` after `error`, and returns the error that says whether they may be reached.
    fn unmap_part(&self, iova: IovaRange, len: u64, error: BackendError) -> BackendError {
        let Some(part) = iova.part(0, len) else { return error };
        let Ok(ticket) = self.backend.revoke(&mut core::iter::once(part)) else {
            return BackendError::NotRevoked;
        };
        match self.backend.wait(ticket) {
            // What cannot be revoked stays so, whatever becomes of the rest.
            _ if error.stays_reachable() && error.late_ticket().is_none() => error,
            // Tickets complete in order, so this one covers what `error` left reachable too.
            Err(BackendError::Flush(flush)) => BackendError::RollbackIncomplete { iova, flush },
            Err(_) => BackendError::NotRevoked,
            Ok(()) => error,
        }
    }

    /// Allocates addresses for all pieces of `payload`.
    fn place_pieces<P: Pinned>(&self, payload: &P) -> Result<IovaRange, BackendError> {
        let (mut len, mut align) = (0u64, PAGE_BYTES as u64);
        for piece in pieces(payload) {
            check_pages(piece)?;
            len = len.saturating_add(piece.len() as u64);
            align = align.max(alignment(piece));
        }
        let first = payload.memory();
        if self.backend.required_iova(first)?.is_some() {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            return Err(BackendError::NotContiguous { addr: first.addr(), len, run: first.len() });
        }
        self.alloc_iova(len, align)
    }

    /// Takes addresses for memory that is to be mapped.
    fn place(&self, memory: DmaMemory) -> Result<IovaRange, BackendError> {
        check_pages(memory)?;
        if let Some(place) = self.backend.required_iova(memory)? {
            self.iovas.alloc_at(place)?;
            return Ok(place);
        }
        self.alloc_iova(memory.len() as u64, alignment(memory))
    }

    fn count_revoked(&self) {
        self.counts.revokes.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases the addresses of a mapping that no device can reach.
    fn finish_unmap(&self, iova: IovaRange, fixed: bool) {
        let released = known_bad::makes(Mistake::IovaEarly);
        if !fixed && !released && self.release_iova(iova).is_err() {
            // Not given out by this allocator: it can not happen, and if it did, not reusing them is the safe side.
            self.count_quarantined(0);
        }
        self.counts.unmaps.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("backend", &self.backend.name()).finish_non_exhaustive()
    }
}

const PAGE_BYTES: usize = 4096;

fn check_pages(memory: DmaMemory) -> Result<(), BackendError> {
    let (addr, len) = (memory.addr(), memory.len());
    let pages = len > 0 && (addr | len).is_multiple_of(PAGE_BYTES);
    if pages { Ok(()) } else { Err(BackendError::NotPages { addr, len }) }
}

/// The alignment that lets the table use its largest leaves.
fn alignment(memory: DmaMemory) -> u64 {
    let usable = |size: &PageSize| {
        memory.len() as u64 >= size.bytes() && (memory.addr() as u64).is_multiple_of(size.bytes())
    };
    PageSize::ALL.iter().rev().find(|size| usable(size)).map_or(PageSize::Size4K.bytes(), |size| size.bytes())
}
