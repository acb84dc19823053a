//! Eight neighbouring [`AtomicU8`]s, loaded or stored together.
//!
//! The meaning is eight relaxed accesses of one byte each, in any order: a value that others change meanwhile may be old in one
//! byte and new in the next. On three architectures one instruction of eight bytes performs them, in inline assembly as in
//! [`mem`](crate::mem), because Rust's memory model leaves atomics of different sizes on the same bytes undefined. Elsewhere,
//! under loom and Miri, and with `--cfg pinfold_byte_atomics`, a loop does.

use super::AtomicU8;

/// How many bytes a lot has.
pub(crate) const LOT: usize = 8;

/// Loads a lot, as a word of the processor's byte order.
#[inline(always)]
pub(crate) fn load(lot: &[AtomicU8; LOT]) -> u64 {
    machine::load(lot)
}

/// Stores a lot.
#[inline(always)]
pub(crate) fn store(lot: &[AtomicU8; LOT], value: u64) {
    machine::store(lot, value);
}

#[cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"),
    not(any(loom, miri, pinfold_byte_atomics))
))]
mod machine {
    use super::{AtomicU8, LOT};
    use core::arch::asm;

    const _: () = assert!(size_of::<[AtomicU8; LOT]>() == LOT);

    #[inline(always)]
    pub(super) fn load(lot: &[AtomicU8; LOT]) -> u64 {
        let value: u64;
        let at = lot.as_ptr();
        // SAFETY: eight relaxed loads of the bytes that `lot` borrows; the block changes nothing but its output.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            asm!("mov {}, qword ptr [{}]", out(reg) value, in(reg) at, options(nostack, preserves_flags, readonly));
            #[cfg(target_arch = "aarch64")]
            asm!("ldr {}, [{}]", out(reg) value, in(reg) at, options(nostack, preserves_flags, readonly));
            #[cfg(target_arch = "riscv64")]
            asm!("ld {}, 0({})", out(reg) value, in(reg) at, options(nostack, preserves_flags, readonly));
        }
        value
    }

    #[inline(always)]
    pub(super) fn store(lot: &[AtomicU8; LOT], value: u64) {
        let at = lot.as_ptr();
        // SAFETY: eight relaxed stores of the bytes that `lot` borrows, whose content may change behind a shared reference;
        // the block changes nothing else.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            asm!("mov qword ptr [{}], {}", in(reg) at, in(reg) value, options(nostack, preserves_flags));
            #[cfg(target_arch = "aarch64")]
            asm!("str {1}, [{0}]", in(reg) at, in(reg) value, options(nostack, preserves_flags));
            #[cfg(target_arch = "riscv64")]
            asm!("sd {1}, 0({0})", in(reg) at, in(reg) value, options(nostack, preserves_flags));
        }
    }
}

#[cfg(not(all(
    any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"),
    not(any(loom, miri, pinfold_byte_atomics))
)))]
mod machine {
    use super::{AtomicU8, LOT};
    use crate::sync::Ordering;

    #[inline(always)]
    pub(super) fn load(lot: &[AtomicU8; LOT]) -> u64 {
        u64::from_ne_bytes(lot.each_ref().map(|byte| byte.load(Ordering::Relaxed)))
    }

    #[inline(always)]
    pub(super) fn store(lot: &[AtomicU8; LOT], value: u64) {
        for (byte, value) in lot.iter().zip(value.to_ne_bytes()) {
            if cfg!(loom) {
                // Loom orders a store behind another thread's compare-and-swap only if it is one itself (see `State::set_free`).
                byte.swap(value, Ordering::Relaxed);
            } else {
                byte.store(value, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::Ordering;
    use super::*;

    #[test]
    fn a_lot_is_its_eight_bytes_and_no_others() {
        let bytes = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(AtomicU8::new);
        let lot = bytes[1..9].as_array().unwrap();
        assert_eq!(load(lot).to_ne_bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
        store(lot, u64::from_ne_bytes([11, 12, 13, 14, 15, 16, 17, 18]));
        let after = bytes.map(|byte| byte.load(Ordering::Relaxed));
        assert_eq!(after, [0, 11, 12, 13, 14, 15, 16, 17, 18, 9]);
    }
}
