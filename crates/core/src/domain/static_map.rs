//! Mapping memory for its lifetime, at addresses of its own or in a reserved range.

use super::backend::Revocation;
use super::error::BackendError;
use super::owner::Anyone;
use super::space::{Domain, check_pages};
use super::window::Addresses;
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::iova::IovaSpace;
use crate::mem::DmaMemory;
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

    /// Like [`map_static`](Self::map_static), at a part of a reserved range: where the memory needs
    /// addresses that the domain would not choose, as for larger leaves.
    ///
    /// # Errors
    /// As for [`map_at`](Self::map_at).
    ///
    /// # Safety
    /// As for [`map_static`](Self::map_static).
    pub unsafe fn map_static_at(
        &self,
        reservation: &Reservation,
        iova: IovaRange,
        memory: DmaMemory,
        access: Access,
    ) -> Result<StaticMapping, BackendError> {
        // SAFETY: the caller's promise is the one that `map_at` asks for.
        let mapping = unsafe { self.map_at(reservation, iova, memory, access) }?;
        self.space.statics.insert(iova, memory, access);
        Ok(mapping)
    }

    /// Unmaps what [`map_static`](Self::map_static), [`map_static_at`](Self::map_static_at) or
    /// [`map_at`](Self::map_at) mapped, and waits.
    ///
    /// # Errors
    /// [`BackendError::OtherDomain`] with the mapping, if that belongs to another domain. Otherwise
    /// a device may reach the memory for good: the caller must never reuse it (and counts it with
    /// [`count_quarantined`](Self::count_quarantined)). Its addresses are not reused.
    pub fn unmap_static(&self, mapping: StaticMapping) -> Result<(), UnmapStaticError> {
        let iova = mapping.iova();
        if !mapping.is_in(&self.space.iovas) {
            let error = BackendError::OtherDomain { iova };
            return Err(UnmapStaticError { mapping: Some(mapping), error });
        }
        self.space.statics.remove(iova);
        let revoked = self.space.revoke_one(Revocation { range: iova, window: None });
        let waited = revoked.and_then(|ticket| self.space.wait(ticket, None));
        waited.map_err(|error| UnmapStaticError { mapping: None, error })?;
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

    /// Reserves as [`reserve_iova`](Self::reserve_iova) does, at addresses up to `limit`, inclusive.
    ///
    /// # Errors
    /// As there.
    pub fn reserve_iova_up_to(
        &self,
        len: u64,
        align: u64,
        limit: Iova,
    ) -> Result<Reservation, BackendError> {
        let range = self.space.alloc_iova(len, align, Some(limit))?;
        Ok(Reservation::new(&self.space.iovas, range))
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
        self.space.call(|backend| backend.map(iova, memory, access, None)).inspect_err(
            |error| {
                if error.stays_reachable() {
                    reservation.quarantine();
                }
            },
        )?;
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

/// A failed [`Domain::unmap_static`](super::Domain::unmap_static).
///
/// `?` converts it to a [`BackendError`]; a mapping in it then stays mapped for good.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct UnmapStaticError {
    /// The mapping, if it is as before: it belongs to another domain.
    pub mapping: Option<StaticMapping>,
    /// The reason.
    #[source]
    pub error: BackendError,
}

impl From<UnmapStaticError> for BackendError {
    fn from(failed: UnmapStaticError) -> Self {
        failed.error
    }
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
