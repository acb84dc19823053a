//! [`RawBlock`]: the two addresses of a block that is freed explicitly.

use crate::addr::Iova;
use core::ptr::NonNull;

/// The addresses of a block, for the processor and for the device. `Copy`, so the pool checks what
/// is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawBlock {
    ptr: NonNull<u8>,
    iova: Iova,
}

// SAFETY: two addresses; accessing the memory through them is `unsafe` or goes through `DmaMemory`.
unsafe impl Send for RawBlock {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawBlock {}

impl RawBlock {
    /// Returns the block with these two addresses, for callers that store them elsewhere. Checked
    /// when it is used.
    #[inline(always)]
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Returns the block's address in this process.
    #[inline(always)]
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the block's address for the device.
    #[inline(always)]
    pub const fn iova(&self) -> Iova {
        self.iova
    }

    #[inline(always)]
    pub(super) fn addr(&self) -> usize {
        self.ptr.as_ptr().addr()
    }
}
