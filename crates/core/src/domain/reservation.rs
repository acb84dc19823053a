//! Owned I/O virtual addresses: ranges are released and unmapped by the handle that owns them,
//! never by number.

use crate::addr::IovaRange;
use crate::iova::IovaSpace;
use alloc::sync::Arc;
use core::mem::ManuallyDrop;

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
