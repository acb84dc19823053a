//! What can only be found out by asking the kernel for it.

use crate::sys::Errno;
use crate::sys::query;
use io_uring::{IoUring as Ring, Probe, opcode};

/// What the kernel said when it was asked for something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It gave it.
    Yes,
    /// It did not, and why.
    No(Errno),
}

impl From<Result<(), Errno>> for Answer {
    fn from(result: Result<(), Errno>) -> Self {
        match result {
            Ok(()) => Self::Yes,
            Err(errno) => Self::No(errno),
        }
    }
}

/// What io_uring can do here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoUring {
    /// Reads and writes with registered buffers (`READ_FIXED`, `WRITE_FIXED`; Linux 5.1, found out since 5.6).
    pub fixed: bool,
    /// `fsync` (Linux 5.1).
    pub fsync: bool,
    /// A sparse table of registered buffers (Linux 5.19).
    pub sparse_buffers: Answer,
    /// Registered buffers shared between rings (`CLONE_BUFFERS`; Linux 6.12).
    pub clone_buffers: Answer,
}

/// What can only be found out by asking the kernel for it. Whatever was opened is closed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Live {
    /// io_uring, or why a ring could not be made.
    pub io_uring: Result<IoUring, Errno>,
    /// An AF_XDP socket could be made (Linux 4.18; needs `CAP_NET_RAW`).
    pub af_xdp: Answer,
    /// A userfaultfd could be made (Linux 4.3).
    pub userfaultfd: Answer,
    /// `/proc/self/pagemap` told a page's frame number (needs `CAP_SYS_ADMIN` since Linux 4.2).
    pub pagemap: bool,
}

impl Live {
    /// Asks.
    pub fn ask() -> Self {
        Self {
            io_uring: io_uring().map_err(|error| Errno::new(error.raw_os_error().unwrap_or(0))),
            af_xdp: query::xdp_socket().into(),
            userfaultfd: query::userfaultfd().into(),
            pagemap: query::pagemap_tells_frames(),
        }
    }
}

fn io_uring() -> std::io::Result<IoUring> {
    let ring = Ring::new(2)?;
    let mut probe = Probe::new();
    // A kernel before 5.6 can not be asked; it has both of these since 5.1.
    let known = ring.submitter().register_probe(&mut probe).is_ok();
    let has = |code: u8| !known || probe.is_supported(code);
    let answer = |result: std::io::Result<()>| match result {
        Ok(()) => Answer::Yes,
        Err(error) => Answer::No(Errno::new(error.raw_os_error().unwrap_or(0))),
    };
    let sparse_buffers = answer(ring.submitter().register_buffers_sparse(1));
    let clone_buffers = answer(clone_buffers(&ring));
    Ok(IoUring {
        fixed: has(opcode::ReadFixed::CODE) && has(opcode::WriteFixed::CODE),
        fsync: has(opcode::Fsync::CODE),
        sparse_buffers,
        clone_buffers,
    })
}

/// Lets another ring have `from`'s (empty) table.
fn clone_buffers(from: &Ring) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    Ring::new(2)?.submitter().register_buffers_clone(from.as_raw_fd())
}
