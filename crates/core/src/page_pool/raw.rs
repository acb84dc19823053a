//! [`RawPage`]: the two addresses of a page that is freed explicitly.

use crate::addr::Iova;
use core::ptr::NonNull;

/// The addresses of a page, for the processor and for the device. `Copy`, so the pool checks what
/// is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawPage {
    pub(super) ptr: NonNull<u8>,
    pub(super) iova: Iova,
}

// SAFETY: two addresses; accessing the memory through them is `unsafe` or goes through `DmaMemory`.
unsafe impl Send for RawPage {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawPage {}

impl RawPage {
    /// Returns the page with these addresses, for callers that store them elsewhere. Checked when
    /// it is used.
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Returns the page's address in this process.
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the page's address for the device.
    pub const fn iova(&self) -> Iova {
        self.iova
    }
}
