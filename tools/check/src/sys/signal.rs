//! The signal of an eventfd that never waits, as the kernel's own.
//!
//! A write waits while the counter is full, and neither a flag of the call nor one of the descriptor
//! helps: the description, with its flags, is the program's. The kernel signals by itself when an
//! asynchronous read completes (`io_submit(2)`, `IOCB_FLAG_RESFD`), so one of no bytes is submitted.

use rustix::fs::MemfdFlags;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;
/// How many signals are under way at a time: as many as threads signal.
const EVENTS: usize = 64;

/// `struct iocb` of linux/aio_abi.h.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key_and_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

/// A queue of asynchronous reads. It is never destroyed: a process has one.
#[derive(Debug)]
pub(crate) struct Signals {
    context: libc::c_ulong,
    empty: OwnedFd,
}

impl Signals {
    /// Errors: where the system has no such calls, or has no more queues (fs.aio-max-nr).
    pub(crate) fn new() -> io::Result<Self> {
        let empty = rustix::fs::memfd_create("empty", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: `context` is valid for a write.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS, &raw mut context) };
        if result == 0 { Ok(Self { context, empty }) } else { Err(io::Error::last_os_error()) }
    }

    /// Adds one to the counter of an eventfd, which stays where it is at its end. Never waits.
    pub(crate) fn signal(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        let number = |fd: i32| u32::try_from(fd).unwrap_or(u32::MAX);
        let mut read = Iocb {
            opcode: IOCB_CMD_PREAD,
            file: number(self.empty.as_raw_fd()),
            flags: IOCB_FLAG_RESFD,
            event: number(event.as_raw_fd()),
            ..Iocb::default()
        };
        let mut list = [&raw mut read];
        // SAFETY: one valid control block, which the kernel copies; it reads no byte into no buffer.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
        let result = if result == 1 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // `struct io_event` has four words.
        let mut done = [[0u64; 4]; EVENTS];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `done` has room for as many events.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0,
                EVENTS,
                done.as_mut_ptr(),
                &raw const now,
            )
        };
        result
    }
}
