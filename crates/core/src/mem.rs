//! Memory that a device, or another thread, may read and write at any time.
//!
//! No reference to such memory may exist, or the compiler would assume that nothing else changes it. A [`DmaMemory`] is a
//! base and a length; each access is checked against the length.
//!
//! # What an access is
//!
//! Each access is a sequence of **relaxed atomic accesses of one byte each**, whatever the operation: a `u64`, a copy, and
//! a fill differ in how many bytes they load or store, never in the width of an atomic. The rules of
//! [`core::sync::atomic`] declare two things undefined: conflicting accesses of which one is not atomic, and conflicting
//! atomics that overlap without being the same bytes. Neither can happen here: every access is atomic, and two
//! accesses of one byte are disjoint or the same. (`read_volatile` would not do: on memory inside an allocation it is an
//! ordinary, racing read.)
//!
//! On x86_64, aarch64 and riscv64 the sequence is carried out by inline assembly: one load or store instruction for an
//! aligned scalar, the platform's `memcpy` and `memset` for the rest. The compiler may assume nothing about assembly but
//! what it could be in Rust, and here it is the loop over `AtomicU8` in `mem/portable.rs`; the instructions do
//! what that loop may do, in fewer steps. Elsewhere, in Miri, and with `--cfg pinfold_byte_atomics` (which the
//! sanitizers need, because they see no assembly) that loop itself runs.
//!
//! # What is guaranteed
//!
//! | while this writes | a scalar at a multiple of its size | a copy or a fill |
//! | --- | --- | --- |
//! | another thread, through `DmaMemory` | old or new, never torn | may tear at any byte |
//! | a device | on the three architectures one access of at most 8 bytes, so torn only if the device tears it; elsewhere may tear at any byte | may tear at any byte, and load or store a byte more than once |
//!
//! Order comes from fences: what was written before [`store_release_u32`](DmaMemory::store_release_u32) is seen by a thread
//! after [`load_acquire_u32`](DmaMemory::load_acquire_u32) has returned a byte of that store, and by a device that
//! a later doorbell notifies; a completion entry is read after its phase bit by the same load. A reader that
//! decides by a value must decide by its own copy: the next load may return another value.
//!
//! # Words
//!
//! What is reached as atomics of 8 bytes, such as table entries, is never a `DmaMemory`: it is an `&[AtomicU64]` from the
//! start ([`TablePages`](crate::table::TablePages)), and a `DmaMemory` yields no reference:
//!
//! ```compile_fail,E0599
//! # fn mix(memory: pinfold_core::mem::DmaMemory<'_>) {
//! let word: &core::sync::atomic::AtomicU64 = memory.atomic_u64(0).unwrap();
//! # }
//! ```

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, Ordering, fence};

#[cfg_attr(
    all(
        any(unix, target_os = "none"),
        any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"),
        not(any(miri, pinfold_byte_atomics))
    ),
    path = "mem/machine.rs"
)]
#[cfg_attr(
    not(all(
        any(unix, target_os = "none"),
        any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"),
        not(any(miri, pinfold_byte_atomics))
    )),
    path = "mem/portable.rs"
)]
mod bytes;
#[cfg(test)]
mod portable;
#[cfg(test)]
#[cfg(not(loom))]
mod stress;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

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
/// It owns nothing: it is a checked way to reach memory that its owner keeps alive for `'m`, as `&[AtomicU8]`
/// would be. The owner of the memory lends it by a borrow of itself, and takes a reference into the
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
    ($read:ident, $write:ident, $ty:ty) => {
        #[doc = concat!("Reads a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] where it is not inside or not aligned.
        #[inline]
        pub fn $read(&self, offset: usize) -> Result<$ty, AccessError> {
            let at = self.check(offset, size_of::<$ty>(), size_of::<$ty>())?;
            // SAFETY: `check` proved the scalar inside the memory and at a multiple of its size; the contract of
            // `from_raw` makes that memory valid and keeps references and wider atomics away.
            Ok(unsafe { bytes::$read(at) })
        }

        #[doc = concat!("Writes a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] where it is not inside or not aligned.
        #[inline]
        pub fn $write(&self, offset: usize, value: $ty) -> Result<(), AccessError> {
            let at = self.check(offset, size_of::<$ty>(), size_of::<$ty>())?;
            // SAFETY: as for the read.
            unsafe { bytes::$write(at, value) };
            Ok(())
        }
    };
}

impl<'m> DmaMemory<'m> {
    /// The memory of `len` bytes from `base`.
    ///
    /// # Safety
    /// For `'m`, `base..base + len` must be mapped, readable and writable, and must lie in one allocation of less than
    /// `isize::MAX` bytes. During each access, nothing reaches the bytes but `DmaMemory`s, atomics of one byte, devices,
    /// and the kernel: no Rust reference into them is alive (but to `AtomicU8`), and no wider atomic is used
    /// on them in a thread that is not synchronised with the access.
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

    scalar!(read_u8, write_u8, u8);
    scalar!(read_u16, write_u16, u16);
    scalar!(read_u32, write_u32, u32);
    scalar!(read_u64, write_u64, u64);

    /// Reads a `u32` so that everything which its writer wrote before it is seen after it.
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside or not aligned.
    #[inline]
    pub fn load_acquire_u32(&self, offset: usize) -> Result<u32, AccessError> {
        let value = self.read_u32(offset)?;
        fence(Ordering::Acquire);
        Ok(value)
    }

    /// Writes a `u32` after everything that this thread wrote before.
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside or not aligned.
    #[inline]
    pub fn store_release_u32(&self, offset: usize, value: u32) -> Result<(), AccessError> {
        fence(Ordering::Release);
        self.write_u32(offset, value)
    }

    /// Writes to the byte at `offset` without changing it, so that its page is there (one compare-and-swap).
    ///
    /// # Errors
    /// [`AccessError`] where it is not inside.
    pub fn touch(&self, offset: usize) -> Result<(), AccessError> {
        let at = self.check(offset, 1, 1)?;
        // SAFETY: inside the memory by `check`, and reached by atomics of one byte only, by the contract of `from_raw`.
        let byte = unsafe { AtomicU8::from_ptr(at.as_ptr()) };
        let now = byte.load(Ordering::Relaxed);
        // If it fails, another party has just written the byte. (Of an `or` with 0 compilers make a load.)
        let _ = byte.compare_exchange(now, now, Ordering::Relaxed, Ordering::Relaxed);
        Ok(())
    }

    /// Copies the bytes from `offset` into `to`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then `to` is as it was.
    #[inline]
    pub fn copy_to_slice(&self, offset: usize, to: &mut [u8]) -> Result<(), AccessError> {
        let from = self.check(offset, to.len(), 1)?;
        // SAFETY: `check` proved `to.len()` bytes from `from` inside the memory, which the contract of `from_raw` makes
        // valid and keeps free of references and wider atomics.
        unsafe { bytes::copy_out(from, to) };
        Ok(())
    }

    /// Copies `from` to the bytes from `offset`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then nothing is written.
    #[inline]
    pub fn copy_from_slice(&self, offset: usize, from: &[u8]) -> Result<(), AccessError> {
        let to = self.check(offset, from.len(), 1)?;
        // SAFETY: as for `copy_to_slice`.
        unsafe { bytes::copy_in(to, from) };
        Ok(())
    }

    /// Sets `len` bytes from `offset` to `value`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] where they are not all inside; then nothing is written.
    #[inline]
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<(), AccessError> {
        let to = self.check(offset, len, 1)?;
        // SAFETY: as for `copy_to_slice`.
        unsafe { bytes::fill(to, len, value) };
        Ok(())
    }
}
