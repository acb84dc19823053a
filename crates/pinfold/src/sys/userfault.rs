//! A userfaultfd that reports when memory is unmapped. No page fault is ever delivered to it.

use super::errno::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, opcode};
use rustix::mm::UserfaultfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// `linux/userfaultfd.h`.
const API: u64 = 0xaa;
const GROUP: u8 = 0xaa;
const USER_MODE_ONLY: u32 = 1;
/// Write-protection, events for memory that is moved, discarded and unmapped, write-protection of
/// shared memory.
const FEATURES: u64 = 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 12;
const MODE_WRITE_PROTECT: u64 = 1 << 1;

#[repr(C)]
#[derive(Default)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Default)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// Bytes of `struct uffd_msg`.
const MESSAGE: usize = 32;

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32);

const CALL_API: Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const CALL_REGISTER: Opcode = opcode::read_write::<Register>(GROUP, 0);
// The kernel's header declares a write, but the kernel only reads the range.
const CALL_UNREGISTER: Opcode = opcode::read::<Range>(GROUP, 1);

/// An event on a range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Event {
    pub(crate) what: What,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Moved,
    Removed,
    Unmapped,
}

#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// Creates one that does not block. Events since Linux 4.11, without privileges since 5.11, for
    /// shared memory since 5.19.
    pub(crate) fn new() -> Result<Self, Errno> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        let flags = flags | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: memory is only ever registered for write-protection, and none is ever protected,
        // so that no fault is delivered to it and no thread waits for its resolution.
        let fd = unsafe { rustix::mm::userfaultfd(flags) }?;
        let mut api = Api { api: API, features: FEATURES, ioctls: 0 };
        // SAFETY: the opcode is `UFFDIO_API`, whose argument is this structure.
        let ioctl = unsafe { Updater::<CALL_API, Api>::new(&mut api) };
        // SAFETY: the kernel reads and writes `api`, which outlives the call.
        unsafe { rustix::ioctl::ioctl(&fd, ioctl) }?;
        Ok(Self(fd))
    }

    /// Monitors the range: a thread that unmaps, moves or discards a part of it blocks until
    /// [`next`](Self::next) has returned the event.
    pub(crate) fn monitor(&self, start: usize, end: usize) -> Result<(), Errno> {
        let range = Range { start: start as u64, len: (end - start) as u64 };
        let mut register = Register { range, mode: MODE_WRITE_PROTECT, ioctls: 0 };
        // SAFETY: the opcode is `UFFDIO_REGISTER`, whose argument is this structure.
        let ioctl = unsafe { Updater::<CALL_REGISTER, Register>::new(&mut register) };
        // SAFETY: the kernel reads and writes `register`, which outlives the call; it changes no
        // memory.
        Ok(unsafe { rustix::ioctl::ioctl(&self.0, ioctl) }?)
    }

    /// Undoes [`monitor`](Self::monitor).
    pub(crate) fn forget(&self, start: usize, end: usize) -> Result<(), Errno> {
        let range = Range { start: start as u64, len: (end - start) as u64 };
        // SAFETY: the opcode is `UFFDIO_UNREGISTER`, whose argument is this structure, which the
        // kernel reads.
        let ioctl = unsafe { Setter::<CALL_UNREGISTER, Range>::new(range) };
        // SAFETY: as above; it changes no memory.
        Ok(unsafe { rustix::ioctl::ioctl(&self.0, ioctl) }?)
    }

    /// Returns the next event, if there is one, and unblocks the thread that caused it. Does not
    /// allocate.
    pub(crate) fn next(&self) -> Option<Event> {
        loop {
            let mut bytes = [0u8; MESSAGE];
            let read = rustix::io::read(&self.0, &mut bytes);
            if read == Err(rustix::io::Errno::INTR) {
                continue;
            }
            if read != Ok(bytes.len()) {
                return None;
            }
            let word = |at: usize| {
                let bytes = bytes.get(at..at + 8).and_then(|part| <[u8; 8]>::try_from(part).ok());
                super::errno::bytes(bytes.map_or(0, u64::from_ne_bytes))
            };
            let [first, second, third] = [8, 16, 24].map(word);
            let (what, end) = match bytes.first() {
                Some(0x14) => (What::Moved, first.saturating_add(third)),
                Some(0x15) => (What::Removed, second),
                Some(0x16) => (What::Unmapped, second),
                _ => continue,
            };
            return Some(Event { what, start: first, end });
        }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
