//! Facilities found by trying them.

use crate::memory::{Source, SourceUnavailable, try_one_page};
use crate::sys::kernel::{RingRefusal, ring_bytes};
use crate::sys::limits::{self, OpenFiles};
use crate::sys::process::Privileges;
use crate::sys::{Errno, files, process, query};
use io_uring::{IoUring as Ring, Probe, opcode};
use std::path::Path;

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

/// A call that the kernel refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused {
    /// The call.
    pub call: &'static str,
    /// Its error.
    pub errno: Errno,
}

/// What io_uring supports here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoUring {
    /// Reads and writes with registered buffers (`READ_FIXED`, `WRITE_FIXED`; Linux 5.1, reported
    /// since 5.6).
    pub fixed: bool,
    /// `fsync` (Linux 5.1).
    pub fsync: bool,
    /// A sparse table of registered buffers (Linux 5.19).
    pub sparse_buffers: Answer,
    /// Registered buffers shared between rings (`CLONE_BUFFERS`; Linux 6.12).
    pub clone_buffers: Answer,
}

/// What was found by trying it, as this process. Whatever is opened is closed again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Live {
    /// Whether a page of 2 MiB of the hugetlb pool can be allocated.
    pub hugetlb_2m: Result<(), SourceUnavailable>,
    /// Whether a page of 1 GiB of the hugetlb pool can be reserved.
    pub hugetlb_1g: Result<(), SourceUnavailable>,
    /// Whether a transparent hugepage can be allocated.
    pub transparent: Result<(), SourceUnavailable>,
    /// io_uring, or why a ring cannot be created.
    pub io_uring: Result<IoUring, RingRefusal>,
    /// Whether the calls that reception through AF_XDP makes (Linux 4.18) succeed, up to those that
    /// need an interface.
    pub af_xdp: Result<(), Refused>,
    /// Whether a userfaultfd can be created (Linux 4.3).
    pub userfaultfd: Answer,
    /// Whether `/proc/self/pagemap` shows a page's frame number (needs `CAP_SYS_ADMIN` since Linux
    /// 4.2).
    pub pagemap: Answer,
    /// What the process may do.
    pub privileges: Privileges,
    /// The limit of open files.
    pub open_files: OpenFiles,
    /// Those of `/proc/sys`, `/sys` and `/sys/fs/cgroup` that are mounted read-only, as in a
    /// container: nothing there can be changed from here.
    pub read_only: Vec<&'static str>,
    /// Whether the kernel's command line is set in `/etc/default/grub`, and applied by
    /// `update-grub`.
    pub grub: bool,
    /// How many more bytes `RLIMIT_AS` allows to be mapped, and the limit; `None` without one.
    pub address_space: Option<(u64, u64)>,
}

impl Live {
    /// Tries each of them.
    pub fn query() -> Self {
        Self {
            hugetlb_2m: try_one_page(Source::Hugetlb2M),
            hugetlb_1g: try_one_page(Source::Hugetlb1G),
            transparent: try_one_page(Source::Transparent),
            io_uring: io_uring().map_err(|error| {
                // Linux 5.1 has rings; the transfers of files need 5.6.
                RingRefusal::of(Errno::from(&error), (5, 6), ring_bytes(2))
            }),
            af_xdp: query::af_xdp().map_err(|(call, errno)| Refused { call, errno }),
            userfaultfd: query::userfaultfd().into(),
            pagemap: query::pagemap().into(),
            privileges: Privileges::here(),
            open_files: OpenFiles::here(),
            read_only: process::read_only_mounts(),
            grub: grub(),
            address_space: limits::address_space(),
        }
    }
}

fn grub() -> bool {
    let set = files::all(Path::new("/etc/default/grub")).unwrap_or_default();
    set.lines().any(|line| line.starts_with("GRUB_CMDLINE_LINUX=\""))
        && ["/usr/sbin/update-grub", "/sbin/update-grub"]
            .iter()
            .any(|path| Path::new(path).exists())
}

fn io_uring() -> std::io::Result<IoUring> {
    let ring = Ring::new(2)?;
    let mut probe = Probe::new();
    // A queue of files asks, too, and makes system calls if the kernel before 5.6, or a filter, has
    // no answer.
    ring.submitter().register_probe(&mut probe)?;
    let has = |code: u8| probe.is_supported(code);
    let answer = |result: std::io::Result<()>| match result {
        Ok(()) => Answer::Yes,
        Err(error) => Answer::No(Errno::from(&error)),
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
