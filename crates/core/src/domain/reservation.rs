//! Owned I/O virtual addresses: ranges are released and unmapped by the handle that owns them, never by number.

use super::Domain;
use crate::addr::IovaRange;
use crate::iova::IovaSpace;
use alloc::sync::Arc;
use core::mem::ManuallyDrop;

/// A range of a domain's address space that its owner has for itself, for [`Domain::map_at`]. Released when it and all
/// mappings in it are gone.
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
        // It was allocated once and is released once, so this does not fail; else the addresses would be lost.
        let _ = self.iovas.free(self.range);
    }
}

impl Reservation {
    pub(super) fn new(iovas: &Arc<IovaSpace>, range: IovaRange) -> Self {
        Self(Arc::new(Reserved { iovas: Arc::clone(iovas), range }))
    }

    /// The range.
    pub fn range(&self) -> IovaRange {
        self.0.range
    }

    /// Whether `iova` lies in it, and it is a range of `domain`.
    pub(super) fn has(&self, domain: &Domain, iova: IovaRange) -> bool {
        self.is_of(domain) && self.0.range.covers(&iova)
    }

    fn is_of(&self, domain: &Domain) -> bool {
        Arc::ptr_eq(&self.0.iovas, &domain.iovas)
    }

    /// Keeps the addresses from ever being used again, because a device may reach something there.
    pub(super) fn keep(&self) {
        core::mem::forget(Arc::clone(&self.0));
    }

    /// What is mapped at `iova`, which lies in it.
    pub(super) fn mapping(&self, iova: IovaRange) -> StaticMapping {
        StaticMapping { place: ManuallyDrop::new(Self(Arc::clone(&self.0))), iova }
    }
}

/// Memory that stays mapped until [`Domain::unmap_static`] takes this. Dropping it leaves the memory mapped for good, and
/// its addresses in use.
#[derive(Debug)]
#[must_use = "what is dropped stays mapped"]
pub struct StaticMapping {
    place: ManuallyDrop<Reservation>,
    iova: IovaRange,
}

impl StaticMapping {
    /// Where the device finds it.
    pub fn iova(&self) -> IovaRange {
        self.iova
    }

    pub(super) fn is_of(&self, domain: &Domain) -> bool {
        self.place.is_of(domain)
    }

    /// Releases the addresses. Only when no device reaches them.
    pub(super) fn release(self) {
        drop(ManuallyDrop::into_inner(self.place));
    }
}
