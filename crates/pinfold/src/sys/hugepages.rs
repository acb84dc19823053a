//! Pages larger than 4 KiB: the hugetlb pools by size and node, and transparent hugepages.

use super::text;
use pinfold_core::addr::PageSize;
use std::fmt;
use std::path::{Path, PathBuf};

/// The hugetlb pool of one page size, of the machine or of one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HugetlbPool {
    /// Bytes per page. Some machines have more sizes than [`PageSize`].
    pub page_bytes: u64,
    /// The node, if it is one node's share.
    pub node: Option<u32>,
    /// Pages in the pool.
    pub total: u64,
    /// Free pages.
    pub free: u64,
    /// Free pages that are reserved for mappings that have not touched them yet. The kernel counts this for the machine only:
    /// 0 for a node.
    pub reserved: u64,
    /// Pages that the kernel may add when the pool is empty (`nr_overcommit_hugepages`).
    pub overcommit: u64,
}

impl HugetlbPool {
    /// Returns how many pages a new mapping can use.
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }
}

impl fmt::Display for HugetlbPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { page_bytes, node, total, .. } = self;
        write!(f, "{} free of {total} hugepages of {} KiB", self.available(), page_bytes / 1024)?;
        node.map_or(Ok(()), |node| write!(f, " on node {node}"))
    }
}

/// The mode of transparent hugepages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Thp {
    /// For all memory.
    Always,
    /// For memory with `madvise(MADV_HUGEPAGE)`.
    Madvise,
    /// Disabled.
    Never,
}

/// Returns every hugetlb pool, by page size: the machine's, then each node's. `sys` is where sysfs is mounted.
pub fn pools(sys: &Path) -> Vec<HugetlbPool> {
    let mut all = pools_in(&sys.join("kernel/mm/hugepages"), None);
    for node in nodes(sys) {
        all.extend(pools_in(&node_folder(sys, node), Some(node)));
    }
    all
}

/// Returns the machine's pool of this page size; `None` if the kernel has no such pages.
pub fn pool(sys: &Path, page: PageSize) -> Option<HugetlbPool> {
    let folder = sys.join("kernel/mm/hugepages").join(folder_name(page.bytes()));
    read(&folder, page.bytes(), None)
}

/// Returns one node's share of it.
pub fn node_pool(sys: &Path, node: u32, page: PageSize) -> Option<HugetlbPool> {
    read(&node_folder(sys, node).join(folder_name(page.bytes())), page.bytes(), Some(node))
}

/// Returns the mode of transparent hugepages; `None` if the kernel has none.
pub fn thp(sys: &Path) -> Option<Thp> {
    let line = text::word(&sys.join("kernel/mm/transparent_hugepage/enabled"))?;
    match text::bracketed(&line)? {
        "always" => Some(Thp::Always),
        "madvise" => Some(Thp::Madvise),
        "never" => Some(Thp::Never),
        _ => None,
    }
}

/// Returns the kernel's list of online nodes; `0` without NUMA.
pub fn online_nodes(sys: &Path) -> String {
    text::word(&sys.join("devices/system/node/online")).unwrap_or_else(|| "0".to_owned())
}

/// Returns the command that resizes the pool (of a node, if one is named) to `pages` pages.
pub fn reserve_command(page: PageSize, pages: u64, node: Option<u32>) -> String {
    let folder = folder_name(page.bytes());
    match (page, node) {
        (_, Some(node)) => {
            let pool = format!("/sys/devices/system/node/node{node}/hugepages/{folder}/nr_hugepages");
            format!("sudo sh -c 'echo {pages} > {pool}'")
        }
        // `vm.nr_hugepages` counts pages of the default size, which is 2 MiB wherever base pages are 4 KiB.
        (PageSize::Size2M, None) => format!("sudo sysctl vm.nr_hugepages={pages}"),
        (_, None) => format!("sudo sh -c 'echo {pages} > /sys/kernel/mm/hugepages/{folder}/nr_hugepages'"),
    }
}

pub(crate) fn nodes(sys: &Path) -> Vec<u32> {
    text::list(&online_nodes(sys))
}

fn node_folder(sys: &Path, node: u32) -> PathBuf {
    sys.join(format!("devices/system/node/node{node}/hugepages"))
}

fn folder_name(page_bytes: u64) -> String {
    format!("hugepages-{}kB", page_bytes / 1024)
}

fn pools_in(folder: &Path, node: Option<u32>) -> Vec<HugetlbPool> {
    let size = |name: &str| text::kib(name.strip_prefix("hugepages-")?);
    text::names(folder)
        .iter()
        .filter_map(|name| read(&folder.join(name), size(name).filter(|bytes| *bytes > 0)?, node))
        .collect()
}

fn read(folder: &Path, page_bytes: u64, node: Option<u32>) -> Option<HugetlbPool> {
    let number = |file: &str| text::number(&folder.join(file));
    Some(HugetlbPool {
        page_bytes,
        node,
        total: number("nr_hugepages")?,
        free: number("free_hugepages")?,
        reserved: number("resv_hugepages").unwrap_or(0),
        overcommit: number("nr_overcommit_hugepages").unwrap_or(0),
    })
}
