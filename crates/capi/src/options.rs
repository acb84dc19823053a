//! Structs that C programs pass as options, and that grow: their first field is their size, as the
//! caller's compiler knows it. Fields that a shorter struct lacks have their defaults; fields of a
//! longer one that are unknown here must be 0.

use crate::failure::{Failure, check_out, fail};
use std::mem::size_of;

/// A struct of options.
///
/// # Safety
/// `repr(C)`, of integers and raw pointers only, without padding, so that all bytes are
/// initialized and any bytes are a value. The first field is a `usize`, the size.
pub(crate) unsafe trait Options: Copy {
    /// The values used if the caller passes null, or a shorter struct.
    const DEFAULT: Self;
}

/// Reads options.
///
/// # Errors
/// `EINVAL` for a size that is too small or not plausible, `E2BIG` where the caller sets what this
/// library does not know.
///
/// # Safety
/// `options` is null, or points to a `size_t` and, if that is at most 4096, to as many bytes.
pub(crate) unsafe fn read<T: Options>(options: *const T) -> Result<T, Failure> {
    let mut value = T::DEFAULT;
    if options.is_null() {
        return Ok(value);
    }
    // SAFETY: not null, so it points to the size.
    let size = unsafe { options.cast::<usize>().read_unaligned() };
    let (known, least) = (size_of::<T>(), 2 * size_of::<usize>());
    if !(least..=4096).contains(&size) {
        return Err(fail!(
            EINVAL,
            "the options say that they have {size} bytes, not {least} to 4096: set their first field to sizeof"
        ));
    }
    // SAFETY: the caller's struct has `size` bytes, which are initialized, ours has `known`, and
    // any bytes are a value.
    unsafe {
        std::ptr::copy_nonoverlapping(
            options.cast::<u8>(),
            (&raw mut value).cast::<u8>(),
            size.min(known),
        )
    };
    for at in known..size {
        // SAFETY: within the caller's struct.
        if unsafe { options.cast::<u8>().wrapping_add(at).read() } != 0 {
            return Err(fail!(
                E2BIG,
                "byte {at} of the options is set, but this library knows the first {known} only: install a newer one"
            ));
        }
    }
    Ok(value)
}

/// Like [`read`], where there is no default of all options.
///
/// # Errors
/// As for [`read`]; `EFAULT` for null.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn read_needed<T: Options>(options: *const T) -> Result<T, Failure> {
    check_out(options, "opts")?;
    // SAFETY: as the caller promises.
    unsafe { read(options) }
}

/// Stores a result in a struct of the caller, which says first how long that is. What is unknown
/// here becomes 0.
///
/// # Errors
/// `EFAULT` for null, `EINVAL` for a size that is too small or not plausible.
///
/// # Safety
/// `out` is null, or points to a `size_t` and, if that is at most 4096, as many bytes can be
/// written.
pub(crate) unsafe fn fill<T: Options>(out: *mut T, value: &T, name: &str) -> Result<(), Failure> {
    check_out(out, name)?;
    let word = size_of::<usize>();
    // SAFETY: not null, so it points to the size.
    let size = unsafe { out.cast::<usize>().read_unaligned() };
    if !(2 * word..=4096).contains(&size) {
        return Err(fail!(
            EINVAL,
            "`{name}` says that it has {size} bytes, not {} to 4096: set its first field to sizeof",
            2 * word
        ));
    }
    let known = size.min(size_of::<T>());
    let (from, to) = ((&raw const *value).cast::<u8>(), out.cast::<u8>());
    // SAFETY: both have `known` bytes, the first `word` of which stay the caller's; the value is
    // initialized and not part of what the caller passed.
    unsafe {
        std::ptr::copy_nonoverlapping(from.wrapping_add(word), to.wrapping_add(word), known - word)
    };
    // SAFETY: within the caller's struct.
    unsafe { to.wrapping_add(known).write_bytes(0, size - known) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Old {
        size: usize,
        bytes: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct New {
        size: usize,
        bytes: u64,
        node: i64,
    }

    // SAFETY: three words without padding.
    unsafe impl Options for New {
        const DEFAULT: Self = Self { size: 0, bytes: 5, node: -1 };
    }

    // SAFETY: two words.
    unsafe impl Options for Old {
        const DEFAULT: Self = Self { size: 0, bytes: 5 };
    }

    #[test]
    fn a_shorter_struct_has_the_defaults_of_the_rest() {
        let old = Old { size: size_of::<Old>(), bytes: 7 };
        // SAFETY: it has as many bytes as it says.
        let read = unsafe { read::<New>((&raw const old).cast()) }.unwrap();
        assert_eq!(read, New { size: 16, bytes: 7, node: -1 });
        // SAFETY: null is allowed.
        assert_eq!(unsafe { super::read::<New>(std::ptr::null()) }.unwrap(), New::DEFAULT);
    }

    #[test]
    fn a_longer_struct_may_not_ask_for_what_is_unknown() {
        let mut new = New { size: size_of::<New>(), bytes: 7, node: 0 };
        // SAFETY: it has as many bytes as it says.
        let known = unsafe { read::<Old>((&raw const new).cast()) };
        assert_eq!(known.unwrap(), Old { size: 24, bytes: 7 });
        new.node = 1 << 40;
        // SAFETY: as before.
        let refused = unsafe { read::<Old>((&raw const new).cast()) };
        assert_eq!(refused.unwrap_err().errno(), libc::E2BIG);
    }

    #[test]
    fn a_size_that_was_not_set_is_refused() {
        for size in [0, 8, 15, 4097, usize::MAX] {
            let old = Old { size, bytes: 7 };
            // SAFETY: the size is read first, and refused.
            let refused = unsafe { read::<Old>(&raw const old) };
            assert_eq!(refused.unwrap_err().errno(), libc::EINVAL, "{size}");
        }
    }
}
