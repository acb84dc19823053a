//! `io_uring_setup`, and `io_uring_register` for buffers on the descriptor of any ring: another
//! library may own the ring.

use super::errno::{Errno, last_errno};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `struct io_uring_rsrc_update2`.
#[repr(C)]
#[derive(Default)]
struct Update {
    first: u32,
    reserved: u32,
    vectors: u64,
    tags: u64,
    count: u32,
    reserved2: u32,
}

const _: () = assert!(size_of::<Update>() == 32);

/// The 120 bytes of `struct io_uring_params`, of which all may be 0.
type Params = [u32; 30];

/// Creates a ring that is not mapped: `io_uring_setup`, Linux 5.1.
pub(crate) fn setup(depth: u32) -> Result<OwnedFd, Errno> {
    let mut params: Params = [0; 30];
    // SAFETY: the kernel reads and writes these 120 bytes during the call.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, depth, params.as_mut_ptr()) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(last_errno)?;
    // SAFETY: the kernel has just created the descriptor for this call.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

const REGISTER_BUFFERS: u32 = 0;
const UNREGISTER_BUFFERS: u32 = 1;
const REGISTER_BUFFERS_UPDATE: u32 = 16;

/// Returns the memory of a place, by address and length, in the kernel's form; `None` is a vacant one.
pub(crate) fn vector(place: Option<(usize, usize)>) -> libc::iovec {
    let (addr, len) = place.unwrap_or((0, 0));
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(addr), iov_len: len }
}

/// Registers a whole table at once: `IORING_REGISTER_BUFFERS`, Linux 5.1. The kernel only pins the
/// memory; the submitter of a transfer is responsible for its use.
pub(crate) fn register(ring: BorrowedFd<'_>, vectors: &[libc::iovec]) -> Result<(), Errno> {
    let count = u32::try_from(vectors.len()).unwrap_or(u32::MAX);
    // SAFETY: the kernel reads `count` vectors from there during the call.
    unsafe { call(ring, REGISTER_BUFFERS, vectors.as_ptr().cast(), count) }
}

/// Replaces the memory of one slot, or empties it: `IORING_REGISTER_BUFFERS_UPDATE`, Linux 5.13.
/// The old memory stays pinned until the last transfer with it has completed.
pub(crate) fn update(ring: BorrowedFd<'_>, place: u32, vector: libc::iovec) -> Result<(), Errno> {
    let vectors = std::ptr::from_ref(&vector).expose_provenance() as u64;
    let update = Update { first: place, vectors, count: 1, ..Update::default() };
    // SAFETY: the kernel reads the update, which is 32 bytes, and a vector from where it says; 0 in
    // place of the tags is none.
    unsafe { call(ring, REGISTER_BUFFERS_UPDATE, std::ptr::from_ref(&update).cast(), 32) }
}

/// Unregisters the table: `IORING_UNREGISTER_BUFFERS`, Linux 5.1. Memory in use stays pinned until
/// its transfers have completed.
pub(crate) fn unregister(ring: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the call takes no pointer.
    unsafe { call(ring, UNREGISTER_BUFFERS, std::ptr::null(), 0) }
}

/// # Safety
/// `argument` must be what the operation reads.
unsafe fn call(
    ring: BorrowedFd<'_>,
    operation: u32,
    argument: *const libc::c_void,
    count: u32,
) -> Result<(), Errno> {
    let ring = ring.as_fd().as_raw_fd();
    // SAFETY: passed on from this function's contract.
    let answer =
        unsafe { libc::syscall(libc::SYS_io_uring_register, ring, operation, argument, count) };
    if answer < 0 { Err(last_errno()) } else { Ok(()) }
}
