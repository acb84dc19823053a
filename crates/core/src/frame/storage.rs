//! The memory of a zone's state. Its size depends on the number of frames, so without memory the
//! zone is refused, instead of ending the process.

use super::number::FrameError;
use crate::sync::{AtomicU8, AtomicU64};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// Allocates `len` items, which `item` makes from their numbers.
pub(super) fn collect<T>(len: u32, item: impl FnMut(u32) -> T) -> Result<Box<[T]>, FrameError> {
    let mut items = Vec::new();
    items.try_reserve_exact(len as usize).map_err(|_| no_memory::<T>(len as usize))?;
    items.extend((0..len).map(item));
    Ok(items.into_boxed_slice())
}

fn no_memory<T>(len: usize) -> FrameError {
    FrameError::NoMemory { bytes: len.saturating_mul(size_of::<T>()) }
}

/// Types whose default value has only zero bytes.
///
/// # Safety
/// A value of the type may have only zero bytes.
pub(super) unsafe trait Zero: Default {}

// SAFETY: an atomic integer, which has the bytes of the integer.
unsafe impl Zero for AtomicU64 {}
// SAFETY: as above.
unsafe impl Zero for AtomicU8 {}

/// Allocates `len` items that are all 0, which is at least 1, without touching them where the
/// system provides zeroed memory.
#[cfg(not(loom))]
pub(super) fn zeroed<T: Zero>(len: usize) -> Result<Box<[T]>, FrameError> {
    let layout = core::alloc::Layout::array::<T>(len).ok().filter(|layout| layout.size() > 0);
    let layout = layout.ok_or_else(|| no_memory::<T>(len))?;
    // SAFETY: the size of the layout is not 0.
    let start = unsafe { alloc::alloc::alloc_zeroed(layout) }.cast::<T>();
    if start.is_null() {
        return Err(no_memory::<T>(len));
    }
    let items = core::ptr::slice_from_raw_parts_mut(start, len);
    // SAFETY: allocated just now by the global allocator with the layout of `len` items, all bytes
    // of which are 0, which is a value (`Zero`).
    Ok(unsafe { Box::from_raw(items) })
}

/// As in the product, where memory of zeros holds atomics. Those of loom are objects of its own.
#[cfg(loom)]
pub(super) fn zeroed<T: Zero>(len: usize) -> Result<Box<[T]>, FrameError> {
    collect(u32::try_from(len).unwrap_or(u32::MAX), |_| T::default())
}
