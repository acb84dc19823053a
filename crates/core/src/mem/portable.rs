//! The accesses as specified: relaxed atomics of one byte each.
//!
//! Used on architectures without an assembly version, and under Miri and the sanitizers, which do
//! not see assembly.

use core::hint::spin_loop;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// # Safety
/// `base + i` is inside memory that is valid for `'a` and free of references and of wider atomics,
/// as `DmaMemory::from_raw` demands.
unsafe fn byte<'a>(base: NonNull<u8>, i: usize) -> &'a AtomicU8 {
    // SAFETY: inside one allocation, by the contract.
    let at = unsafe { base.add(i) };
    // SAFETY: valid and accessed by atomics of one byte only, by the contract; a byte is always
    // aligned.
    unsafe { AtomicU8::from_ptr(at.as_ptr()) }
}

/// Loads each byte of `from..` once.
///
/// # Safety
/// As for [`byte`], for `to.len()` bytes from `from`.
pub(super) unsafe fn copy_out(from: NonNull<u8>, to: &mut [u8]) {
    for (i, to) in to.iter_mut().enumerate() {
        // SAFETY: `i` is below the length that the contract covers.
        *to = unsafe { byte(from, i) }.load(Ordering::Relaxed);
    }
}

/// Stores each byte of `to..` once.
///
/// # Safety
/// As for [`byte`], for `from.len()` bytes from `to`.
pub(super) unsafe fn copy_in(to: NonNull<u8>, from: &[u8]) {
    for (i, from) in from.iter().enumerate() {
        // SAFETY: `i` is below the length that the contract covers.
        unsafe { byte(to, i) }.store(*from, Ordering::Relaxed);
    }
}

/// Stores `value` to each byte of `to..to + len` once.
///
/// # Safety
/// As for [`byte`], for `len` bytes from `to`.
pub(super) unsafe fn fill(to: NonNull<u8>, len: usize, value: u8) {
    for i in 0..len {
        // SAFETY: `i` is below the length that the contract covers.
        unsafe { byte(to, i) }.store(value, Ordering::Relaxed);
    }
}

/// Makes scalar accesses to one aligned word atomic with respect to each other, as a processor
/// does.
struct WordLock(&'static AtomicBool);

static WORD_LOCKS: [AtomicBool; 64] = [const { AtomicBool::new(false) }; 64];

impl WordLock {
    fn lock(at: NonNull<u8>) -> Self {
        let lock = &WORD_LOCKS[(at.as_ptr().addr() >> 3) & (WORD_LOCKS.len() - 1)];
        while lock.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            spin_loop();
        }
        Self(lock)
    }
}

impl Drop for WordLock {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

macro_rules! scalar {
    ($read:ident, $write:ident, $ty:ty) => {
        /// # Safety
        /// As for [`byte`], for the bytes of the scalar, at a multiple of its size.
        pub(super) unsafe fn $read(at: NonNull<u8>) -> $ty {
            let mut bytes = [0; size_of::<$ty>()];
            let _lock = WordLock::lock(at);
            // SAFETY: the caller's contract.
            unsafe { copy_out(at, &mut bytes) };
            <$ty>::from_ne_bytes(bytes)
        }

        /// # Safety
        /// As for [`byte`], for the bytes of the scalar, at a multiple of its size.
        pub(super) unsafe fn $write(at: NonNull<u8>, value: $ty) {
            let _lock = WordLock::lock(at);
            // SAFETY: the caller's contract.
            unsafe { copy_in(at, &value.to_ne_bytes()) };
        }
    };
}

scalar!(read_u8, write_u8, u8);
scalar!(read_u16, write_u16, u16);
scalar!(read_u32, write_u32, u32);
scalar!(read_u64, write_u64, u64);
