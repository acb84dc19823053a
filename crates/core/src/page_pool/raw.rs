//! A page's two addresses.

use crate::addr::Iova;
use core::ptr::NonNull;

/// A page, raw: where it is for the processor and for the device. `Copy`, so the pool checks what is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawPage {
    pub(super) ptr: NonNull<u8>,
    pub(super) iova: Iova,
}

// SAFETY: it is two addresses. Reaching the memory through them is `unsafe`, or goes through `DmaMemory`.
unsafe impl Send for RawPage {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawPage {}

impl RawPage {
    /// The page with these two addresses, for callers that keep them elsewhere. Checked where it is used.
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Where the page is in this process.
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// What the device is told.
    pub const fn iova(&self) -> Iova {
        self.iova
    }
}
