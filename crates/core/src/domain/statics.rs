//! Memory that stays mapped for its lifetime, at addresses of its own or in a reserved range.

use super::error::BackendError;
use super::owner::Anyone;
use super::space::{Domain, check_pages};
use super::window::Addresses;
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::mem::DmaMemory;
use crate::sync::{AtomicU64, Mutex, Ordering};
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::mem::ManuallyDrop;

impl Domain {
    /// Maps memory for its lifetime, at addresses of the domain's choice.
    ///
    /// # Errors
    /// [`BackendError`].
    ///
    /// # Safety
    /// Until [`unmap_static`](Self::unmap_static) has returned `Ok`, or the memory has been
    /// [unregistered](Self::unregister_memory), the caller keeps it valid and creates no reference
    /// into it.
    pub unsafe fn map_static(
        &self,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        let Addresses { iova, .. } =
            self.space.map_fresh(&mut Anyone, memory, access, None).map_err(|(_, error)| error)?;
        self.space.statics.insert(iova, memory, access);
        Ok(Reservation::new(&self.space.iovas, iova).mapping(iova))
    }

    /// Unmaps what [`map_static`](Self::map_static) or [`map_at`](Self::map_at) mapped, and waits.
    ///
    /// # Errors
    /// A device may reach the memory for good: the caller must never reuse it (and counts it with
    /// [`count_quarantined`](Self::count_quarantined)). Its addresses are not reused.
    /// [`BackendError::OtherDomain`] if the mapping belongs to another domain, where the memory
    /// stays mapped for good.
    pub fn unmap_static(&self, mapping: StaticMapping) -> Result<(), BackendError> {
        let iova = mapping.iova();
        if !mapping.is_in(&self.space.iovas) {
            return Err(BackendError::OtherDomain { iova });
        }
        self.space.statics.remove(iova);
        let ticket =
            self.space.call(|backend| backend.revoke(&mut core::iter::once((iova, None))))?;
        self.space.call(|backend| backend.wait(ticket, None))?;
        mapping.release();
        Ok(())
    }

    /// Reserves `len` bytes of the address space, aligned to `align` bytes, for
    /// [`map_at`](Self::map_at).
    ///
    /// # Errors
    /// [`BackendError::Iova`] if there is no such range, [`BackendError::NoTranslation`] if the
    /// backend does not [translate](super::Properties::translates).
    pub fn reserve_iova(&self, len: u64, align: u64) -> Result<Reservation, BackendError> {
        Ok(Reservation::new(&self.space.iovas, self.space.alloc_iova(len, align, None)?))
    }

    /// Excludes `range` from allocation for good: addresses that no device reaches.
    ///
    /// # Errors
    /// [`BackendError::Iova`] if part of it is in use.
    pub fn reserve_range(&self, range: IovaRange) -> Result<(), BackendError> {
        Ok(self.space.iovas.reserve(range)?)
    }

    /// Maps memory at a part of a reserved range.
    ///
    /// # Errors
    /// [`BackendError`], also if something is mapped there. [`BackendError::NotReserved`] if `iova`
    /// is not part of `reservation`, or that belongs to another domain. If a device
    /// [may reach](BackendError::stays_reachable) the memory in spite of the error, `reservation`
    /// is never released.
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
        if !reservation.is_in(&self.space.iovas) || !reservation.range().covers(&iova) {
            return Err(BackendError::NotReserved { iova });
        }
        self.space.call(|backend| backend.map(iova, memory, access)).inspect_err(|error| {
            if error.stays_reachable() {
                reservation.quarantine();
            }
        })?;
        Ok(reservation.mapping(iova))
    }
}

/// A reserved range of a domain's address space, for [`Domain::map_at`](super::Domain::map_at).
/// Released when it and all mappings in it are dropped.
#[derive(Debug)]
#[must_use = "dropping it releases the addresses"]
pub struct Reservation(Arc<Reserved>);

#[derive(Debug)]
struct Reserved {
    iovas: Arc<IovaSpace>,
    range: IovaRange,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // Allocated once and freed once, so this does not fail; if it did, the addresses would stay
        // allocated.
        let _ = self.iovas.free(self.range);
    }
}

impl Reservation {
    pub(super) fn new(iovas: &Arc<IovaSpace>, range: IovaRange) -> Self {
        Self(Arc::new(Reserved { iovas: Arc::clone(iovas), range }))
    }

    /// Returns the range.
    pub fn range(&self) -> IovaRange {
        self.0.range
    }

    pub(super) fn is_in(&self, iovas: &Arc<IovaSpace>) -> bool {
        Arc::ptr_eq(&self.0.iovas, iovas)
    }

    /// Prevents the addresses from ever being reused, because a device may reach memory there.
    pub(super) fn quarantine(&self) {
        core::mem::forget(Arc::clone(&self.0));
    }

    /// Returns the handle of memory mapped at `iova`, part of the range.
    pub(super) fn mapping(&self, iova: IovaRange) -> StaticMapping {
        StaticMapping { reservation: ManuallyDrop::new(Self(Arc::clone(&self.0))), iova }
    }
}

/// Memory that stays mapped until [`Domain::unmap_static`](super::Domain::unmap_static). Dropping
/// it leaves the memory mapped for good, and its addresses in use.
#[derive(Debug)]
#[must_use = "what is dropped stays mapped"]
pub struct StaticMapping {
    reservation: ManuallyDrop<Reservation>,
    iova: IovaRange,
}

impl StaticMapping {
    /// Returns where the device finds it.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }

    pub(super) fn is_in(&self, iovas: &Arc<IovaSpace>) -> bool {
        self.reservation.is_in(iovas)
    }

    /// Releases the addresses. Only when no device can reach memory there.
    pub(super) fn release(self) {
        drop(ManuallyDrop::into_inner(self.reservation));
    }
}

/// Memory that stays mapped for its lifetime.
#[derive(Clone, Copy)]
struct Static {
    iova: IovaRange,
    addr: usize,
    access: Access,
}

impl Static {
    /// Returns where it has `memory` mapped for `access`, if that is at `start`.
    fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let iova = IovaRange::new(start, memory.len() as u64).ok()?;
        let offset = memory.addr().checked_sub(self.addr)?;
        let here = self.access.contains(access)
            && self.iova.covers(&iova)
            && iova.start().checked_offset_from(self.iova.start()) == Some(offset as u64);
        here.then_some(iova)
    }
}

/// A static mapping that an owner found, valid while the generation is the same.
pub(super) struct Hit {
    found: Static,
    generation: u64,
}

/// The static mappings of a domain.
pub(super) struct Statics {
    /// By their first address.
    all: Mutex<BTreeMap<Iova, Static>>,
    /// How many have been removed.
    generation: AtomicU64,
}

impl Statics {
    pub(super) fn new() -> Self {
        Self { all: Mutex::new(BTreeMap::new()), generation: AtomicU64::new(0) }
    }

    pub(super) fn insert(&self, iova: IovaRange, memory: DmaMemory, access: Access) {
        self.all.lock().insert(iova.start(), Static { iova, addr: memory.addr(), access });
    }

    /// Removes the mapping of exactly `iova`, if there is one: afterwards no lookup finds it.
    pub(super) fn remove(&self, iova: IovaRange) {
        let mut all = self.all.lock();
        if all.get(&iova.start()).is_some_and(|found| found.iova == iova) {
            all.remove(&iova.start());
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.lock().len()
    }

    /// Returns where `memory` is mapped for `access`, if that is at `start`. O(log mappings), with
    /// a lock.
    pub(super) fn find(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        nearest.find(start, memory, access)
    }

    /// Returns the same, from `hit` if that contains it. Then one load.
    pub(super) fn find_cached(
        &self,
        start: Iova,
        memory: DmaMemory,
        access: Access,
        hit: &mut Option<Hit>,
    ) -> Option<IovaRange> {
        // Before the lookup: what is removed after it makes the hit stale.
        let generation = self.generation.load(Ordering::Acquire);
        if let Some(hit) = hit
            && hit.generation == generation
            && let Some(iova) = hit.found.find(start, memory, access)
        {
            return Some(iova);
        }
        let (_, nearest) =
            self.all.lock().range(..=start).next_back().map(|(at, found)| (*at, *found))?;
        let iova = nearest.find(start, memory, access)?;
        *hit = Some(Hit { found: nearest, generation });
        Some(iova)
    }
}
