//! [`DmaMemory`]: memory that a device or another thread may read and write at any time.
//!
//! No reference to such memory may exist, because the compiler would assume that nothing else
//! changes it. A [`DmaMemory`] is a base and a length; each access is checked against the length.
//!
//! # The definition of an access
//!
//! Each access is a sequence of **relaxed atomic accesses of one byte each**, whatever the
//! operation: a `u64`, a copy, and a fill differ in how many bytes they load or store, never in the
//! width of an atomic. The rules of [`core::sync::atomic`] declare two things undefined:
//! conflicting accesses of which one is not atomic, and conflicting atomics that overlap without
//! being the same bytes. Neither can happen here: every access is atomic, and two accesses of one
//! byte each are disjoint or identical. (`read_volatile` is not sufficient: on memory inside an
//! allocation it is an ordinary, racing read.)
//!
//! On x86_64, aarch64 and riscv64 inline assembly performs the sequence: one load or store
//! instruction for an aligned scalar, the platform's `memcpy` and `memset` otherwise. Its meaning
//! in Rust is the loop over `AtomicU8` in `mem/portable.rs`: the instructions have an effect that
//! the loop could have. On other architectures, under Miri, and with `--cfg pinfold_byte_atomics`
//! (for sanitizers, which do not see assembly) that loop itself runs.
//!
//! # What is guaranteed
//!
//! | concurrent writer | a scalar at a multiple of its size | a copy or a fill |
//! | --- | --- | --- |
//! | another thread, through `DmaMemory` | old or new, never torn | may tear at any byte |
//! | a device | on the three architectures one access of at most 8 bytes, so torn only if the device tears it; elsewhere may tear at any byte | may tear at any byte, and load or store a byte more than once |
//!
//! Fences order accesses: what was written before
//! [`store_release_u32`](DmaMemory::store_release_u32) is visible to a thread whose
//! [`load_acquire_u32`](DmaMemory::load_acquire_u32) has returned a byte of that store, and to a
//! device that a later doorbell notifies. A completion entry is read after its phase bit, which
//! such a load reads. A reader that makes a decision must read the value once, into a copy: the
//! next load may return another value.
//!
//! # Words
//!
//! Memory accessed as atomics of 8 bytes, such as table entries, is never a `DmaMemory`: it is an
//! `&[AtomicU64]` from the start ([`TablePages`](crate::table::TablePages)), and a `DmaMemory`
//! yields no reference:
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
#[cfg(not(loom))]
mod portable;
mod prefetch;
#[cfg(test)]
#[cfg(not(loom))]
mod stress;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub(crate) use prefetch::prefetch;

/// An access that is outside the memory, or not aligned to its size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "cannot access {len} bytes at offset {offset} of {size} bytes of DMA memory (address aligned to the access: {aligned})"
)]
pub struct AccessError {
    /// The offset in bytes from the start of the memory.
    pub offset: usize,
    /// The length of the access in bytes.
    pub len: usize,
    /// The size of the memory in bytes.
    pub size: usize,
    /// Whether the address was a multiple of the size of the access.
    pub aligned: bool,
}

/// A range of pinned memory that is shared with a device.
///
/// It owns nothing: like `&[AtomicU8]`, it gives checked access to memory that its owner keeps
/// alive for `'m`. The owner lends it by a shared borrow of itself, and creates references into the
/// memory only by a *mutable* borrow, which excludes every `DmaMemory`.
#[derive(Clone, Copy, Debug)]
pub struct DmaMemory<'m> {
    base: NonNull<u8>,
    len: usize,
    lent: PhantomData<&'m AtomicU8>,
}

// SAFETY: every access is an atomic operation on memory that outlives the value (contract of
// `from_raw`).
unsafe impl Send for DmaMemory<'_> {}
// SAFETY: as for `Send`; a shared `DmaMemory` has no other state than its two immutable fields.
unsafe impl Sync for DmaMemory<'_> {}

macro_rules! scalar {
    ($read:ident, $write:ident, $ty:ty) => {
        #[doc = concat!("Reads a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] if it is outside the memory or not aligned.
        #[inline]
        pub fn $read(&self, offset: usize) -> Result<$ty, AccessError> {
            let at = self.check(offset, size_of::<$ty>(), size_of::<$ty>())?;
            // SAFETY: `check` proved the scalar inside the memory and at a multiple of its size;
            // the contract of `from_raw` makes that memory valid and keeps references and wider
            // atomics away.
            Ok(unsafe { bytes::$read(at) })
        }

        #[doc = concat!("Writes a `", stringify!($ty), "` (native order, relaxed) at `offset` bytes.")]
        ///
        /// # Errors
        /// [`AccessError`] if it is outside the memory or not aligned.
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
    /// Creates the memory of `len` bytes at `base`.
    ///
    /// # Safety
    /// For `'m`, `base..base + len` must be mapped, readable and writable, and must lie in one
    /// allocation of less than `isize::MAX` bytes. During each access, only `DmaMemory`s, atomics
    /// of one byte, devices and the kernel access the bytes: no Rust reference into them is alive
    /// (except to `AtomicU8`), and no thread that is not synchronised with the access uses a wider
    /// atomic on them.
    pub const unsafe fn from_raw(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, lent: PhantomData }
    }

    /// Returns the same memory with a lifetime that the caller guarantees.
    ///
    /// # Safety
    /// As for [`from_raw`](Self::from_raw), as long as the returned value, or a copy of it, is
    /// *used*.
    pub const unsafe fn extend<'long>(self) -> DmaMemory<'long> {
        DmaMemory { base: self.base, len: self.len, lent: PhantomData }
    }

    /// No memory: every access except an empty one is refused.
    pub const EMPTY: Self = Self { base: NonNull::dangling(), len: 0, lent: PhantomData };

    /// Returns a pointer to its first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the address of its first byte in this process.
    pub fn addr(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`AccessError`] if they are not all inside.
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

    /// Reads a `u32` with acquire ordering: later reads see everything that its writer wrote before
    /// a release store of it.
    ///
    /// # Errors
    /// [`AccessError`] if it is outside the memory or not aligned.
    #[inline]
    pub fn load_acquire_u32(&self, offset: usize) -> Result<u32, AccessError> {
        let value = self.read_u32(offset)?;
        fence(Ordering::Acquire);
        Ok(value)
    }

    /// Writes a `u32` with release ordering: after everything that this thread wrote before.
    ///
    /// # Errors
    /// [`AccessError`] if it is outside the memory or not aligned.
    #[inline]
    pub fn store_release_u32(&self, offset: usize, value: u32) -> Result<(), AccessError> {
        fence(Ordering::Release);
        self.write_u32(offset, value)
    }

    /// Writes the byte at `offset` back unchanged, by one compare-and-swap, so that its page is
    /// present.
    ///
    /// # Errors
    /// [`AccessError`] if it is outside the memory.
    pub fn touch(&self, offset: usize) -> Result<(), AccessError> {
        let at = self.check(offset, 1, 1)?;
        // SAFETY: inside the memory by `check`, and accessed by atomics of one byte only, by the
        // contract of `from_raw`.
        let byte = unsafe { AtomicU8::from_ptr(at.as_ptr()) };
        let now = byte.load(Ordering::Relaxed);
        // A failure means that the byte was written meanwhile. (Compilers turn a `fetch_or(0)` into
        // a load.)
        let _ = byte.compare_exchange(now, now, Ordering::Relaxed, Ordering::Relaxed);
        Ok(())
    }

    /// Copies the bytes at `offset` into `to`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] if they are not all inside; `to` is unchanged then.
    #[inline]
    pub fn copy_to_slice(&self, offset: usize, to: &mut [u8]) -> Result<(), AccessError> {
        let from = self.check(offset, to.len(), 1)?;
        // SAFETY: `check` proved `to.len()` bytes from `from` inside the memory, which the contract
        // of `from_raw` makes valid and keeps free of references and wider atomics.
        unsafe { bytes::copy_out(from, to) };
        Ok(())
    }

    /// Copies `from` to the bytes at `offset`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] if they are not all inside; nothing is written then.
    #[inline]
    pub fn copy_from_slice(&self, offset: usize, from: &[u8]) -> Result<(), AccessError> {
        let to = self.check(offset, from.len(), 1)?;
        // SAFETY: as for `copy_to_slice`.
        unsafe { bytes::copy_in(to, from) };
        Ok(())
    }

    /// Sets `len` bytes at `offset` to `value`, in no particular order.
    ///
    /// # Errors
    /// [`AccessError`] if they are not all inside; nothing is written then.
    #[inline]
    pub fn fill(&self, offset: usize, len: usize, value: u8) -> Result<(), AccessError> {
        let to = self.check(offset, len, 1)?;
        // SAFETY: as for `copy_to_slice`.
        unsafe { bytes::fill(to, len, value) };
        Ok(())
    }
}
