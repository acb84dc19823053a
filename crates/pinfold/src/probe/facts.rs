//! Everything that the probe reads.

use super::devices::{self, IommuGroup, Node, Unreadable, Vfio};
use super::live::Live;
use crate::sys::control_group::{self, GroupLimits};
use crate::sys::files::Roots;
use crate::sys::hugepages::{self, HugetlbPool, Thp};
use crate::sys::limits::{MemlockLimit, SystemMemory};
use crate::sys::{files, kernel};
use pinfold_core::addr::PageSize;
use std::path::{Path, PathBuf};

/// The memory of one NUMA node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NumaNode {
    /// Its number.
    pub node: u32,
    /// Bytes of memory; `None` if the kernel does not say.
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
    /// `vm.unprivileged_userfaultfd`: 1 if any user may create one.
    pub unprivileged_userfaultfd: Option<u64>,
    /// The kernel's command line.
    pub command_line: Option<String>,
    /// Folders that cannot be listed.
    pub unreadable: Vec<Unreadable>,
    /// What was found by trying it.
    pub live: Live,
}

impl Facts {
    /// Probes this machine and process. Takes a few milliseconds; closes whatever it opens.
    pub fn here() -> Self {
        let facts = Self::gather(&Roots::default(), MemlockLimit::here(), Live::query());
        // `uname` tells it without `/proc`.
        Self { kernel: Some(kernel::release()), ..facts }
    }

    /// Reads the files below `roots`, and adds what was found otherwise.
    pub fn gather(roots: &Roots, memlock: MemlockLimit, live: Live) -> Self {
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
            unprivileged_userfaultfd: files::number(
                &roots.proc.join("sys/vm/unprivileged_userfaultfd"),
            ),
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
