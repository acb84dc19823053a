//! Memory that is not whole pages, whose owner declares the rest of its pages shareable.

use super::{OwnedMemory, PAGE};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

/// Why pages with a payload in them were not accepted, with their owner.
#[derive(thiserror::Error)]
#[error("bytes {}..{} of {len} bytes at {addr:#x} are none, or are not in whole pages of 4096 bytes there", bytes.start, bytes.end)]
pub struct SharingError<K> {
    /// The address of the pages.
    pub addr: usize,
    /// Their length in bytes.
    pub len: usize,
    /// The bytes to be transferred.
    pub bytes: Range<usize>,
    /// The owner that was passed.
    pub owner: K,
}

impl<K> fmt::Debug for SharingError<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharingError")
            .field("addr", &self.addr)
            .field("len", &self.len)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl OwnedMemory {
    /// Takes `bytes` of `pages`, and declares the rest of the pages that they are in shareable: a
    /// device that the bytes are mapped for can read and write all of these pages, but is told to
    /// transfer the bytes only (the extents of the pieces).
    /// [Registered buffers](crate::registered::Buffers::register_owned), and copies through the
    /// memory of a piece, reach whole pages.
    ///
    /// For a payload whose neighbours nobody needs. A page is registered with a domain once: of two
    /// payloads on one page, only one can be mapped into a domain at a time. Without the
    /// declaration a payload is [bounced](crate::memory::bounce).
    ///
    /// ```
    /// use pinfold::OwnedMemory;
    /// use pinfold::core::domain::Pinned;
    /// use std::ptr::NonNull;
    ///
    /// #[repr(align(4096))]
    /// struct Slots([u8; 8192]);
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let slots = Box::leak(Box::new(Slots([7; 8192])));
    /// let pages = NonNull::from(&mut slots.0 as &mut [u8]);
    /// // SAFETY: both pages are leaked, and not used otherwise.
    /// let memory = unsafe { OwnedMemory::sharing_pages(pages, 4608..5120, ()) }?;
    /// let piece = memory.take().ok_or("taken")?;
    /// assert_eq!((piece.len(), piece.extent(0)), (4096, Some((512, 512))));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`SharingError`] if `bytes` is empty, not inside `pages`, or those are not whole pages.
    ///
    /// # Safety
    /// As for [`new`](Self::new), of all pages that contain one of `bytes`, except that others may
    /// access the rest of these pages meanwhile, where they do so as with
    /// [`DmaMemory`](pinfold_core::mem::DmaMemory) (by atomics of one byte, without references),
    /// and rely on none of its contents: a device may change it at any time, and learn it.
    pub unsafe fn sharing_pages<K: Send + 'static>(
        pages: NonNull<[u8]>,
        bytes: Range<usize>,
        owner: K,
    ) -> Result<Self, SharingError<K>> {
        let (base, len) = (pages.cast::<u8>(), pages.len());
        let addr = base.addr().get();
        let whole = (addr | len).is_multiple_of(PAGE);
        if !whole || bytes.is_empty() || bytes.end > len {
            return Err(SharingError { addr, len, bytes, owner });
        }
        // `len` is a multiple of a page and `bytes.end` at most that, so this does not overflow.
        let (start, end) = (bytes.start & !(PAGE - 1), bytes.end.next_multiple_of(PAGE));
        // SAFETY: `start` is less than `len`.
        let first = unsafe { base.add(start) };
        // SAFETY: the caller keeps these pages valid until `owner` is dropped, and has no reference
        // into them.
        Ok(unsafe {
            Self::of_pages(first, end - start, start, bytes.start - start..bytes.end - start, owner)
        })
    }
}
