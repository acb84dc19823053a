//! Memory that a device may read and write at any time.
//!
//! No reference to such memory may exist, or the compiler would believe that nobody else changes it. A
//! [`DmaMemory`] is a base and a length; each access is checked against the length and made with relaxed atomics,
//! so that a device (or a model of one in another thread) writing at the same moment yields an old or a new value
//! and never undefined behaviour. What orders a descriptor before its doorbell is [`DmaMemory::store_release_u32`]
//! and [`DmaMemory::load_acquire_u32`].

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// An access that is not inside the memory, or not aligned to its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "an access of {len} bytes at offset {offset} of {size} bytes of DMA memory (aligned to its size: {aligned})"
)]
pub struct AccessError {
    /// Where, in bytes from the start of the memory.
    pub offset: usize,
    /// How many bytes.
    pub len: usize,
    /// How many bytes the memory has.
    pub size: usize,
    /// Whether the address was a multiple of the size of the access.
    pub aligned: bool,
}

/// A piece of pinned memory that is shared with a device.
///
/// It owns nothing: it is a checked way to reach memory that somebody else keeps alive for `'m`, as `&[AtomicU8]`
/// would be. Whoever owns the memory lends it out by a borrow of itself, and takes a reference into the
/// memory only by a *mutable* borrow: then no `DmaMemory` is there at the same time.
#[derive(Clone, Copy, Debug)]
pub struct DmaMemory<'m> {
    base: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'m AtomicU8>,
}

// SAFETY: every access is an atomic operation on memory that outlives the value (contract of `from_raw`), so it may
// be made from any thread.
unsafe impl Send for DmaMemory<'_> {}
// SAFETY: as for `Send`; a shared `DmaMemory` has no other state than its two immutable fields.
unsafe impl Sync for DmaMemory<'_> {}

macro_rules! scalar {
    ($read:ident, $write:ident, $ty:ty, $atomic:ty) => {
        #[doc = concat!("Reads a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] where it is not inside or not aligned.
        #[inline]
        pub fn $read(&self, offset: usize) -> Result<$ty, AccessError> {
            let at = self.check(offset, size_of::<$ty>(), align_of::<$atomic>())?.cast::<$atomic>();
            // SAFETY: `check` proved `at` inside the memory and aligned; `from_raw`'s contract keeps it valid and
            // free of references, so an atomic may be formed on it.
            Ok(unsafe { at.as_ref() }.load(Ordering::Relaxed))
        }

        #[doc = concat!("Writes a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] where it is not inside or not aligned.
        #[inline]
        pub fn $write(&self, offset: usize, value: $ty) -> Result<(), AccessError> {
            let at = self.check(offset, size_of::<$ty>(), align_of::<$atomic>())?.cast::<$atomic>();
            // SAFETY: as for the read.
            unsafe { at.as_ref() }.store(value, Ordering::Relaxed);
            Ok(())
        }
    };
}

impl<'m> DmaMemory<'m> {
    /// The memory of `len` bytes from `base`.
    ///
    /// # Safety
    /// For `'m`, `base..base + len` must be mapped, readable and writable, must lie in one allocation of less than
    /// `isize::MAX` bytes, and must be reached only by atomics or by devices: no Rust reference into it may be alive
    /// during an access.
    pub const unsafe fn from_raw(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, lent: PhantomData }
    }

    /// The same memory, lent for as long as the caller vouches for.
    ///
    /// # Safety
    /// As for [`from_raw`](Self::from_raw), as long as the value that is returned, or a copy of it, is *used*.
    pub const unsafe fn extend<'long>(self) -> DmaMemory<'long> {
        DmaMemory { base: self.base, len: self.len, lent: PhantomData }
    }

    /// No memory at all: every access but an empty one is refused.
    pub const EMPTY: Self = Self { base: NonNull::dangling(), len: 0, lent: PhantomData };

    /// Where it starts in this process.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// The address of its first byte in this process.
    pub fn addr(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `offset`.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside.
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Result<Self, AccessError> {
        Ok(Self { base: self.check(offset, len, 1)?, len, lent: PhantomData })
    }

    #[inline(always)]
    fn check(&self, offset: usize, len: usize, align: usize) -> Result<NonNull<u8>, AccessError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        let aligned = self.addr().wrapping_add(offset) & (align - 1) == 0;
        if !inside || !aligned {
            return Err(AccessError { offset, len, size: self.len, aligned });
        }
        // SAFETY: `offset <= self.len`, which lies in one allocation by the contract of `from_raw`.
        Ok(unsafe { self.base.add(offset) })
    }

    scalar!(read_u8, write_u8, u8, AtomicU8);
    scalar!(read_u16, write_u16, u16, AtomicU16);
    scalar!(read_u32, write_u32, u32, AtomicU32);
    scalar!(read_u64, write_u64, u64, AtomicU64);

    /// Reads a `u32` so that everything which its writer wrote before it is seen after it.
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside or not aligned.
    #[inline]
    pub fn load_acquire_u32(&self, offset: usize) -> Result<u32, AccessError> {
        let value = self.read_u32(offset)?;
        core::sync::atomic::fence(Ordering::Acquire);
        Ok(value)
    }

    /// Writes a `u32` after everything that this thread wrote before.
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside or not aligned.
    #[inline]
    pub fn store_release_u32(&self, offset: usize, value: u32) -> Result<(), AccessError> {
        core::sync::atomic::fence(Ordering::Release);
        self.write_u32(offset, value)
    }

    /// The memory as table entries or a status word: one atomic `u64` at `offset`.
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside or not aligned to 8.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Result<&'m AtomicU64, AccessError> {
        let at = self.check(offset, 8, 8)?.cast::<AtomicU64>();
        // SAFETY: inside and aligned by `check`; reached only by atomics, and alive as long as `self` is used, by
        // the contract of `from_raw` for `'m`.
        Ok(unsafe { at.as_ref() })
    }

    /// Copies the bytes from `offset` into `to`.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then `to` is as it was.
    pub fn copy_to_slice(&self, offset: usize, to: &mut [u8]) -> Result<(), AccessError> {
        let from = self.part(offset, to.len())?;
        let (head, words) = from.split(to.len());
        for (i, byte) in to[..head].iter_mut().enumerate() {
            *byte = from.read_u8(i)?;
        }
        let mut at = head;
        for word in to[head..head + words * 8].chunks_exact_mut(8) {
            word.copy_from_slice(&from.read_u64(at)?.to_ne_bytes());
            at += 8;
        }
        for byte in &mut to[at..] {
            *byte = from.read_u8(at)?;
            at += 1;
        }
        Ok(())
    }

    /// Copies `from` to the bytes from `offset`.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then nothing is written.
    pub fn copy_from_slice(&self, offset: usize, from: &[u8]) -> Result<(), AccessError> {
        let to = self.part(offset, from.len())?;
        let (head, words) = to.split(from.len());
        for (i, byte) in from[..head].iter().enumerate() {
            to.write_u8(i, *byte)?;
        }
        let mut at = head;
        for word in from[head..head + words * 8].chunks_exact(8) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            to.write_u64(at, u64::from_ne_bytes(bytes))?;
            at += 8;
        }
        for byte in &from[at..] {
            to.write_u8(at, *byte)?;
            at += 1;
        }
        Ok(())
    }

    /// Sets `len` bytes from `offset` to `value`.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then nothing is written.
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<(), AccessError> {
        let to = self.part(offset, len)?;
        let (head, words) = to.split(len);
        for i in 0..head {
            to.write_u8(i, value)?;
        }
        for i in 0..words {
            to.write_u64(head + i * 8, u64::from_ne_bytes([value; 8]))?;
        }
        for i in head + words * 8..len {
            to.write_u8(i, value)?;
        }
        Ok(())
    }

    /// How many bytes come before the first aligned word, and how many whole words follow, of `len` bytes.
    fn split(&self, len: usize) -> (usize, usize) {
        let head = self.addr().wrapping_neg() & 7;
        if head >= len { (len, 0) } else { (head, (len - head) / 8) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn over(bytes: &mut [u64]) -> DmaMemory<'_> {
        let base = NonNull::new(bytes.as_mut_ptr().cast::<u8>()).unwrap();
        // SAFETY: the tests reach `bytes` through the value only while it is alive, and by no reference meanwhile.
        unsafe { DmaMemory::from_raw(base, bytes.len() * 8) }
    }

    #[test]
    fn what_is_outside_or_crooked_is_refused() {
        let mut bytes = [0u64; 4];
        let mem = over(&mut bytes);
        assert!(mem.read_u64(24).is_ok());
        assert_eq!(mem.read_u64(25), Err(AccessError { offset: 25, len: 8, size: 32, aligned: false }));
        assert!(mem.read_u8(32).is_err());
        assert!(mem.write_u32(usize::MAX - 3, 0).is_err());
        assert!(mem.part(32, 0).is_ok());
        assert!(mem.part(33, 0).is_err());
    }

    proptest! {
        #[test]
        fn copies_agree_with_slices(offset in 0usize..40, data in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut bytes = [0x5555_5555_5555_5555u64; 8];
            let mem = over(&mut bytes);
            let mut model = [0x55u8; 64];
            let fits = offset + data.len() <= 64;
            prop_assert_eq!(mem.copy_from_slice(offset, &data).is_ok(), fits);
            if fits {
                model[offset..offset + data.len()].copy_from_slice(&data);
            }
            let mut back = [0u8; 64];
            mem.copy_to_slice(0, &mut back).unwrap();
            prop_assert_eq!(back, model);
            if fits {
                mem.fill(offset, data.len(), 7).unwrap();
                model[offset..offset + data.len()].fill(7);
                let mut part = vec![0; 64 - offset];
                mem.copy_to_slice(offset, &mut part).unwrap();
                prop_assert_eq!(&part[..], &model[offset..]);
            }
        }
    }
}
