//! `mimalloc`: a general allocator with a heap of each thread, as a program without a pool would
//! use it. It knows no device address, and its memory is where it puts it.
#![expect(unsafe_code, reason = "the allocator is a C library")]

use super::BaselineError;
use std::ffi::c_void;
use std::ptr::NonNull;

/// A block of `N` bytes, aligned to 16; freed when it is dropped, by any thread.
#[derive(Debug)]
pub(crate) struct MiBlock<const N: usize>(NonNull<c_void>);

// SAFETY: the block is exclusive access to its memory, and mimalloc frees from any thread.
unsafe impl<const N: usize> Send for MiBlock<N> {}

impl<const N: usize> MiBlock<N> {
    /// Allocates a block without touching its bytes.
    ///
    /// # Errors
    /// [`BaselineError::NoPages`].
    #[inline(always)]
    pub(crate) fn alloc() -> Result<Self, BaselineError> {
        // SAFETY: any size may be requested.
        let start = unsafe { libmimalloc_sys::mi_malloc(N) };
        NonNull::new(start).map(Self).ok_or(BaselineError::NoPages(0))
    }

    /// Returns its address.
    #[inline(always)]
    pub(crate) fn address(&self) -> u64 {
        self.0.addr().get() as u64
    }

    /// Writes the first word.
    #[inline(always)]
    pub(crate) fn write(&mut self, word: u64) {
        const { assert!(N >= 8) };
        // SAFETY: the block has at least eight bytes, aligned to 16, and is this value's.
        unsafe { self.0.cast::<u64>().write(word) };
    }
}

impl<const N: usize> Drop for MiBlock<N> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: allocated by `mi_malloc`, and owned by this value alone.
        unsafe { libmimalloc_sys::mi_free(self.0.as_ptr()) };
    }
}
