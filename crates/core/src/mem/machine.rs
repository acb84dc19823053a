//! The accesses in assembly: one load or store per scalar, the C library's `memcpy` and `memset`
//! for copies and fills.
//!
//! Each block has the meaning of the function of the same name in `portable`. The compiler assumes
//! that a block may read and write any memory it could reach, so it moves nothing across it that
//! may not be moved across relaxed atomics. A scalar at a multiple of its size is one access of the
//! bus on all three architectures (Intel SDM volume 3, "Guaranteed Atomic Operations"; Arm ARM,
//! "Single-copy atomicity"; RISC-V, "Memory Model Primitives").
//!
//! `memcpy` and `memset` must load and store each byte of their range at least once, store no other
//! byte, and not branch on the bytes' values. The libraries of these architectures do; for one that
//! does not, build with `--cfg pinfold_byte_atomics`.

use core::arch::asm;
use core::ptr::NonNull;

unsafe extern "C" {
    // Provided by the C library, or by `compiler_builtins` in programs without one.
    fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8;
    fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8;
}

macro_rules! scalar {
    ($read:ident, $load:literal, $write:ident, $store:literal, $ty:ty, $class:ident) => {
        /// # Safety
        /// The bytes of the scalar at `at`, a multiple of its size, are valid memory as
        /// `DmaMemory::from_raw` demands.
        #[inline(always)]
        pub(in crate::mem) unsafe fn $read(at: NonNull<u8>) -> $ty {
            let value: $ty;
            // SAFETY: relaxed loads of single bytes in memory that the contract makes valid; the
            // block changes nothing but its output.
            unsafe {
                asm!($load, value = out($class) value, at = in(reg) at.as_ptr(), options(nostack, preserves_flags));
            }
            value
        }

        /// # Safety
        /// The bytes of the scalar at `at`, a multiple of its size, are valid memory as
        /// `DmaMemory::from_raw` demands.
        #[inline(always)]
        pub(in crate::mem) unsafe fn $write(at: NonNull<u8>, value: $ty) {
            // SAFETY: relaxed stores of single bytes in memory that the contract makes valid; the
            // block changes nothing else.
            unsafe {
                asm!($store, value = in($class) value, at = in(reg) at.as_ptr(), options(nostack, preserves_flags));
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod scalars {
    use super::*;
    scalar!(
        read_u8,
        "mov {value}, byte ptr [{at}]",
        write_u8,
        "mov byte ptr [{at}], {value}",
        u8,
        reg_byte
    );
    scalar!(
        read_u16,
        "mov {value:x}, word ptr [{at}]",
        write_u16,
        "mov word ptr [{at}], {value:x}",
        u16,
        reg
    );
    scalar!(
        read_u32,
        "mov {value:e}, dword ptr [{at}]",
        write_u32,
        "mov dword ptr [{at}], {value:e}",
        u32,
        reg
    );
    scalar!(
        read_u64,
        "mov {value}, qword ptr [{at}]",
        write_u64,
        "mov qword ptr [{at}], {value}",
        u64,
        reg
    );
}

#[cfg(target_arch = "aarch64")]
mod scalars {
    use super::*;
    scalar!(read_u8, "ldrb {value:w}, [{at}]", write_u8, "strb {value:w}, [{at}]", u8, reg);
    scalar!(read_u16, "ldrh {value:w}, [{at}]", write_u16, "strh {value:w}, [{at}]", u16, reg);
    scalar!(read_u32, "ldr {value:w}, [{at}]", write_u32, "str {value:w}, [{at}]", u32, reg);
    scalar!(read_u64, "ldr {value}, [{at}]", write_u64, "str {value}, [{at}]", u64, reg);
}

#[cfg(target_arch = "riscv64")]
mod scalars {
    use super::*;
    scalar!(read_u8, "lbu {value}, 0({at})", write_u8, "sb {value}, 0({at})", u8, reg);
    scalar!(read_u16, "lhu {value}, 0({at})", write_u16, "sh {value}, 0({at})", u16, reg);
    scalar!(read_u32, "lwu {value}, 0({at})", write_u32, "sw {value}, 0({at})", u32, reg);
    scalar!(read_u64, "ld {value}, 0({at})", write_u64, "sd {value}, 0({at})", u64, reg);
}

pub(super) use scalars::*;

/// Calls `$f` with three arguments. Its result is its first argument, and is dropped with the
/// clobbered registers.
macro_rules! call {
    ($f:path, $first:expr, $second:expr, $third:expr) => {{
        // Through the global offset table, as the compiler calls them, so without a stub.
        #[cfg(target_arch = "x86_64")]
        asm!("call qword ptr [rip + {f}@GOTPCREL]", f = sym $f, in("rdi") $first, in("rsi") $second, in("rdx") $third, clobber_abi("C"));
        #[cfg(target_arch = "aarch64")]
        asm!("bl {f}", f = sym $f, in("x0") $first, in("x1") $second, in("x2") $third, clobber_abi("C"));
        #[cfg(target_arch = "riscv64")]
        asm!("call {f}", f = sym $f, in("a0") $first, in("a1") $second, in("a2") $third, clobber_abi("C"));
    }};
}

/// # Safety
/// `to.len()` bytes from `from` are valid memory as `DmaMemory::from_raw` demands.
#[inline]
pub(super) unsafe fn copy_out(from: NonNull<u8>, to: &mut [u8]) {
    // SAFETY: relaxed loads of single bytes in memory that the contract makes valid, and plain
    // stores to `to`, which the caller borrows mutably; the function follows the platform's calling
    // convention, which names all it changes.
    unsafe { call!(memcpy, to.as_mut_ptr(), from.as_ptr(), to.len()) }
}

/// # Safety
/// `from.len()` bytes from `to` are valid memory as `DmaMemory::from_raw` demands.
#[inline]
pub(super) unsafe fn copy_in(to: NonNull<u8>, from: &[u8]) {
    // SAFETY: as for `copy_out` with the roles exchanged; `from` is borrowed, so nothing changes
    // it.
    unsafe { call!(memcpy, to.as_ptr(), from.as_ptr(), from.len()) }
}

/// # Safety
/// `len` bytes from `to` are valid memory as `DmaMemory::from_raw` demands.
#[inline]
pub(super) unsafe fn fill(to: NonNull<u8>, len: usize, value: u8) {
    // SAFETY: relaxed stores of single bytes in memory that the contract makes valid; see
    // `copy_out` for the call.
    unsafe { call!(memset, to.as_ptr(), i32::from(value), len) }
}
