//! [`pf_block_t`]: memory with its two addresses, as C programs store it.

use crate::failure::{Failure, check_out};
use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

/// A block of memory that a device can reach, or a part of one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_block_t {
    /// Its address in this process.
    pub va: *mut c_void,
    /// Its address for the devices of its arena's first domain; or as pf_pool_add() was told.
    pub iova: u64,
    /// Bytes.
    pub len: u32,
    /// The caller's own: the library neither reads nor writes it.
    pub tag: u32,
}

/// The addresses of a block that the caller passed. They are checked where the block is used.
#[derive(Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) va: *mut u8,
    pub(crate) iova: u64,
}

/// Returns a pointer to a field. C need not align it.
#[inline(always)]
fn field<T>(block: *mut pf_block_t, offset: usize) -> *mut T {
    block.wrapping_byte_add(offset).cast()
}

/// Reads the addresses of the caller's block.
///
/// # Safety
/// `block` can be read.
#[inline(always)]
pub(crate) unsafe fn read_block(block: *const pf_block_t) -> Addresses {
    let va = field::<*mut u8>(block.cast_mut(), offset_of!(pf_block_t, va));
    // SAFETY: as the caller promises.
    let va = unsafe { va.read_unaligned() };
    let iova = field::<u64>(block.cast_mut(), offset_of!(pf_block_t, iova));
    // SAFETY: as the caller promises.
    Addresses { va, iova: unsafe { iova.read_unaligned() } }
}

/// Stores a block in the caller's, whose tag stays.
///
/// # Safety
/// `out` can be written.
#[inline(always)]
pub(crate) unsafe fn write_block(out: *mut pf_block_t, at: Addresses, len: u32) {
    // SAFETY: as the caller promises.
    unsafe { write_va(out, at.va) };
    let iova = field::<u64>(out, offset_of!(pf_block_t, iova));
    // SAFETY: as the caller promises.
    unsafe { iova.write_unaligned(at.iova) };
    let bytes = field::<u32>(out, offset_of!(pf_block_t, len));
    // SAFETY: as the caller promises.
    unsafe { bytes.write_unaligned(len) };
}

/// Stores an address in the caller's block: null in one that holds nothing.
///
/// # Safety
/// `out` can be written.
#[inline(always)]
pub(crate) unsafe fn write_va(out: *mut pf_block_t, va: *mut u8) {
    // SAFETY: as the caller promises.
    unsafe { field::<*mut u8>(out, offset_of!(pf_block_t, va)).write_unaligned(va) };
}

/// The arguments of a C program that returns blocks: the blocks, their number, and where the index
/// of a refused one is stored.
pub(crate) type Returned = (*const pf_block_t, c_uint, *mut c_uint);

/// Frees each block by `free`, until one is refused: those before it are freed then.
///
/// # Errors
/// Those of `free`, with the index, which is stored as well; `EFAULT`: there are no blocks.
///
/// # Safety
/// The first is null or so many blocks that can be read; the last is null or can be written.
#[inline(always)]
pub(crate) unsafe fn free_each(
    (blocks, n, bad): Returned,
    name: &str,
    mut free: impl FnMut(Addresses) -> Result<(), Failure>,
) -> Result<c_int, Failure> {
    if n > 0 {
        check_out(blocks, "blocks")?;
    }
    for index in 0..n {
        // SAFETY: one of the `n` blocks of the caller.
        let block = unsafe { read_block(blocks.wrapping_add(index as usize)) };
        if let Err(failure) = free(block) {
            if !bad.is_null() {
                // SAFETY: as the caller promises.
                unsafe { bad.write_unaligned(index) };
            }
            return Err(failure.of(format!("{name} {index} of {n} was refused")));
        }
    }
    Ok(0)
}
