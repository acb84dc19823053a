//! The memory of a policy as the payload of a mapping.
#![expect(
    unsafe_code,
    reason = "the policy's memory is a payload by its address, and is kept valid by hand"
)]

use pinfold_core::addr::{Iova, PhysAddr, PhysRange, RangeError};
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;

/// A range of a policy's memory.
#[derive(Debug)]
pub(super) struct Payload(DmaMemory<'static>);

// SAFETY: the memory is mapped as long as the value is used for more than its address, as `new`
// demands. No reference into it is ever made, so that one range in two values is harmless: the
// trait's rule that it belongs to one value serves those who make references.
unsafe impl Pinned for Payload {
    #[inline]
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }

    #[inline]
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

impl Payload {
    /// Creates the payload of `memory`.
    ///
    /// # Safety
    /// The caller keeps the memory mapped until nothing accesses it through this value or its
    /// mapping any more. No reference into it is ever made.
    #[inline]
    pub(super) unsafe fn new(memory: DmaMemory<'_>) -> Self {
        // SAFETY: valid for as long as it is used, as the caller promises.
        Self(unsafe { memory.extend() })
    }

    /// Returns the range.
    #[inline]
    pub(super) fn range(&self) -> Result<PhysRange, RangeError> {
        PhysRange::new(PhysAddr::new(self.0.addr() as u64), self.0.len() as u64)
    }
}
