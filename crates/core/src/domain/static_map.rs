//! Memory that stays mapped for its lifetime.

use super::addresses::Addresses;
use super::error::BackendError;
use super::owner::Anyone;
use super::reservation::{Reservation, StaticMapping};
use super::space::{Domain, check_pages};
use crate::access::Access;
use crate::addr::{Iova, IovaRange};
use crate::mem::DmaMemory;

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
    /// backend does not [translate](super::Backend::translates).
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

    /// Returns where `memory` is mapped for its lifetime, if this domain has it mapped at `start`.
    /// O(log statics).
    pub fn static_at(&self, start: Iova, memory: DmaMemory, access: Access) -> Option<IovaRange> {
        self.space.statics.find(start, memory, access)
    }
}
