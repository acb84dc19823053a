//! The facts that the probe reads, and the facilities that it finds by trying them.

use super::devices::{self, IommuGroup, Node, Unreadable, Vfio};
use crate::memory::{Source, SourceUnavailable, try_one_page};
use crate::sys::control_group::{self, GroupLimits};
use crate::sys::files::Roots;
use crate::sys::hugepages::{self, HugetlbPool, Thp};
use crate::sys::kernel::RingRefusal;
use crate::sys::limits::{MapLimit, MemlockLimit, OpenFiles, SystemMemory};
use crate::sys::process::Privileges;
use crate::sys::ring_memory::{locking, ring_bytes};
use crate::sys::threads::ThreadLimit;
use crate::sys::{Errno, files, kernel, process, release};
use io_uring::{IoUring as Ring, Probe, opcode};
use pinfold_core::addr::PageSize;
use std::path::{Path, PathBuf};

/// The memory of one NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumaNode {
    /// Its number.
    pub node: u32,
    /// Bytes of memory; `None` if the kernel does not report it.
    pub total_bytes: Option<u64>,
    /// Unused bytes.
    pub free_bytes: Option<u64>,
}

/// Everything that the probe reads about a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The kernel's release: `6.12.0-1-amd64`.
    pub kernel: Option<String>,
    /// The machine's memory.
    pub memory: SystemMemory,
    /// The limits of this process's control groups on memory.
    pub memory_groups: GroupLimits,
    /// The hugetlb pools: the machine's, then each node's.
    pub hugetlb: Vec<HugetlbPool>,
    /// The limits of this process's control groups on pages of 2 MiB, then of 1 GiB.
    pub hugetlb_groups: [GroupLimits; 2],
    /// Transparent hugepages of 2 MiB.
    pub thp: Option<Thp>,
    /// The file with that mode.
    pub thp_switch: PathBuf,
    /// The limit of locked memory.
    pub memlock: MemlockLimit,
    /// The NUMA nodes.
    pub nodes: Vec<NumaNode>,
    /// The IOMMUs that the kernel drives: `dmar0` (Intel), `ivhd0` (AMD), `smmu3` ... by name.
    pub iommus: Vec<String>,
    /// The firmware's table that describes an IOMMU: `DMAR` (Intel), `IVRS` (AMD) or `IORT` (Arm).
    pub firmware_iommu: Option<String>,
    /// The IOMMU groups with their devices.
    pub groups: Vec<IommuGroup>,
    /// VFIO.
    pub vfio: Vfio,
    /// `/dev/iommu`.
    pub iommufd: Node,
    /// `kernel.io_uring_disabled`: 0 enabled, 1 for privileged users or a group only, 2 disabled.
    pub io_uring_disabled: Option<u64>,
    /// The kernel's command line.
    pub command_line: Option<String>,
    /// Folders that cannot be listed.
    pub unreadable: Vec<Unreadable>,
    /// The results of attempts.
    pub live: Live,
}

impl Facts {
    /// Probes this machine and process. Takes a few milliseconds; closes whatever it opens.
    pub fn here() -> Self {
        let facts = Self::gather(&Roots::default(), MemlockLimit::here(), Live::query());
        // `uname` tells it without `/proc`.
        Self { kernel: Some(release::release()), ..facts }
    }

    /// Reads the files below `roots`, and adds facts found otherwise.
    pub(super) fn gather(roots: &Roots, memlock: MemlockLimit, live: Live) -> Self {
        Self {
            kernel: files::word(&roots.proc.join("sys/kernel/osrelease")),
            memory: SystemMemory::read(&roots.proc),
            memory_groups: control_group::memory(&roots.proc),
            hugetlb_groups: [PageSize::Size2M, PageSize::Size1G]
                .map(|page| control_group::hugetlb(&roots.proc, page)),
            hugetlb: hugepages::pools(&roots.sys),
            thp: hugepages::thp(&roots.sys),
            thp_switch: hugepages::thp_switch(&roots.sys),
            memlock,
            nodes: hugepages::nodes(&roots.sys)
                .into_iter()
                .map(|node| numa_node(&roots.sys, node))
                .collect(),
            iommus: files::names(&roots.sys.join("class/iommu")),
            firmware_iommu: firmware_iommu(&roots.sys),
            groups: devices::groups(&roots.sys),
            vfio: devices::vfio(roots),
            iommufd: devices::iommufd(roots),
            io_uring_disabled: files::number(&roots.proc.join("sys/kernel/io_uring_disabled")),
            command_line: files::word(&roots.proc.join("cmdline")),
            unreadable: devices::unreadable(roots),
            live,
        }
    }

    /// Returns why a folder cannot be listed, if it cannot.
    pub(super) fn why_unreadable(&self, folder: &str) -> Option<String> {
        let found = self.unreadable.iter().find(|unreadable| unreadable.path.ends_with(folder))?;
        Some(format!("{}: {}", found.path.display(), found.errno))
    }
}

/// Parses lines such as `Node 0 MemTotal:  24684092 kB`.
fn numa_node(sys: &Path, node: u32) -> NumaNode {
    let file = std::fs::read(sys.join(format!("devices/system/node/node{node}/meminfo")))
        .unwrap_or_default();
    let field = |key: &str| files::field_kib(&file, &format!("Node {node} {key}"));
    NumaNode { node, total_bytes: field("MemTotal"), free_bytes: field("MemFree") }
}

fn firmware_iommu(sys: &Path) -> Option<String> {
    let tables = files::names(&sys.join("firmware/acpi/tables"));
    tables.into_iter().find(|name| ["DMAR", "IVRS", "IORT"].contains(&name.as_str()))
}

// Facilities found by trying them.

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

/// The support of this kernel for io_uring.
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

/// The results of attempts by this process. Everything that was opened for them is closed.
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
    /// Whether `/proc/self/pagemap` shows a page's frame number (needs `CAP_SYS_ADMIN` since Linux
    /// 4.2).
    pub pagemap: Answer,
    /// The privileges of the process.
    pub privileges: Privileges,
    /// The limit of open files.
    pub open_files: OpenFiles,
    /// The file systems among `/proc/sys`, `/sys` and `/sys/fs/cgroup` that are mounted read-only,
    /// as in a container: their settings cannot be changed from here.
    pub read_only: Vec<&'static str>,
    /// Whether the kernel's command line is set in `/etc/default/grub`, and applied by
    /// `update-grub`.
    pub grub: bool,
    /// The limits on its mappings, those that are set.
    pub map_limits: Vec<MapLimit>,
    /// The limits on threads, as far as they can be read.
    pub thread_limits: Vec<ThreadLimit>,
}

impl Live {
    /// Tries each of them.
    fn query() -> Self {
        Self {
            hugetlb_2m: try_one_page(Source::Hugetlb2M),
            hugetlb_1g: try_one_page(Source::Hugetlb1G),
            transparent: try_one_page(Source::Thp),
            io_uring: io_uring().map_err(|error| {
                // Linux 5.1 has rings; the transfers of files need 5.6.
                RingRefusal::of(Errno::from(&error), (5, 6), 2, 0)
            }),
            pagemap: kernel::pagemap().into(),
            privileges: Privileges::here(),
            open_files: OpenFiles::here(),
            read_only: process::read_only_mounts(),
            grub: grub(),
            map_limits: MapLimit::here(),
            thread_limits: ThreadLimit::here(),
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
    let made = locking(|| ring_bytes(2), || Ring::new(2).map_err(|error| Errno::from(&error)));
    let ring = made.map_err(|errno| std::io::Error::from_raw_os_error(errno.raw()))?;
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
