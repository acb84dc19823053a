//! Facilities that can only be found by trying them.

use crate::sys::Errno;
use crate::sys::query;
use io_uring::{IoUring as Ring, Probe, opcode};

/// Whether an attempt succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// It did.
    Yes,
    /// It failed.
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

/// What io_uring supports here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoUring {
    /// Reads and writes with registered buffers (`READ_FIXED`, `WRITE_FIXED`; Linux 5.1, reported since 5.6).
    pub fixed: bool,
    /// `fsync` (Linux 5.1).
    pub fsync: bool,
    /// A sparse table of registered buffers (Linux 5.19).
    pub sparse_buffers: Answer,
    /// Registered buffers shared between rings (`CLONE_BUFFERS`; Linux 6.12).
    pub clone_buffers: Answer,
}

/// Facilities that can only be found by trying them. Whatever is opened is closed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Live {
    /// io_uring, or why a ring cannot be created.
    pub io_uring: Result<IoUring, Errno>,
    /// Whether an AF_XDP socket can be created (Linux 4.18; needs `CAP_NET_RAW`).
    pub af_xdp: Answer,
    /// Whether a userfaultfd can be created (Linux 4.3).
    pub userfaultfd: Answer,
    /// Whether `/proc/self/pagemap` shows a page's frame number (needs `CAP_SYS_ADMIN` since Linux 4.2).
    pub pagemap: bool,
}

impl Live {
    /// Tries each of them.
    pub fn query() -> Self {
        Self {
            io_uring: io_uring().map_err(|error| Errno::new(error.raw_os_error().unwrap_or(0))),
            af_xdp: query::xdp_socket().into(),
            userfaultfd: query::userfaultfd().into(),
            pagemap: query::pagemap_shows_frames(),
        }
    }
}

fn io_uring() -> std::io::Result<IoUring> {
    let ring = Ring::new(2)?;
    let mut probe = Probe::new();
    // A kernel before 5.6 has no such query; it has both of these since 5.1.
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

/// Clones `from`'s (empty) table to another ring.
fn clone_buffers(from: &Ring) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    Ring::new(2)?.submitter().register_buffers_clone(from.as_raw_fd())
}
