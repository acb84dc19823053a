//! Pages larger than 4 KiB: the hugetlb pools by size and node, and transparent hugepages.

use super::files;
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
    /// Free pages that are reserved for mappings that have not touched them yet. The kernel counts
    /// this for the machine only: 0 for a node.
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

/// Returns every hugetlb pool, by page size: the machine's, then each node's. `sys` is where sysfs
/// is mounted.
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

/// Returns the mode of transparent hugepages of 2 MiB; `None` if the kernel has none.
pub fn thp(sys: &Path) -> Option<Thp> {
    let line = files::word(&thp_switch(sys))?;
    match files::bracketed(&line)? {
        "always" => Some(Thp::Always),
        "madvise" => Some(Thp::Madvise),
        "never" => Some(Thp::Never),
        _ => None,
    }
}

/// Returns the file with the mode of transparent hugepages of 2 MiB: that of this size (Linux 6.8),
/// or the common one where that says `inherit`.
pub fn thp_switch(sys: &Path) -> PathBuf {
    let folder = sys.join("kernel/mm/transparent_hugepage");
    let own = folder.join("hugepages-2048kB/enabled");
    let line = files::word(&own).unwrap_or_default();
    if files::bracketed(&line).is_some_and(|word| word != "inherit") {
        own
    } else {
        folder.join("enabled")
    }
}

/// Returns the command that lets programs request transparent hugepages of 2 MiB.
pub fn thp_command(sys: &Path) -> String {
    thp_switch_command(&thp_switch(sys))
}

pub(crate) fn thp_switch_command(switch: &Path) -> String {
    format!("sudo sh -c 'echo madvise > {}'", switch.display())
}

/// Returns whether transparent hugepages are switched off for this process, for advised memory too
/// (`PR_GET_THP_DISABLE`, Linux 3.15; `PR_THP_DISABLE_EXCEPT_ADVISED`, 6.18, leaves them to advised
/// memory).
pub(crate) fn thp_disabled_for_process() -> bool {
    // SAFETY: the call takes numbers only and changes nothing.
    let answer = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    answer == 1
}

/// Returns whether no block of 2 MiB or more is free in any zone; `None` if `/proc/buddyinfo` does
/// not tell.
pub(crate) fn is_fragmented(proc: &Path) -> Option<bool> {
    const ORDER: usize = 9;
    let file = files::all(&proc.join("buddyinfo")).ok()?;
    let mut zones = 0;
    for line in file.lines() {
        // `Node 0, zone   Normal   1 0 ...`: free blocks of each order.
        let Some((_, counts)) = line.split_once("zone") else { continue };
        let large = counts.split_whitespace().skip(1 + ORDER);
        let large: Vec<u64> = large.map_while(|count| count.parse().ok()).collect();
        if large.iter().any(|count| *count > 0) {
            return Some(false);
        }
        zones += usize::from(!large.is_empty());
    }
    (zones > 0).then_some(true)
}

/// Returns the kernel's list of online nodes; `0` without NUMA.
pub fn online_nodes(sys: &Path) -> String {
    files::word(&sys.join("devices/system/node/online")).unwrap_or_else(|| "0".to_owned())
}

/// Memory that stays available beside a pool that grows: enough for this program, and a 16th for
/// others.
const KEPT: u64 = 256 << 20;

/// Returns how many of `available` bytes a pool may take.
pub(crate) fn room(available: u64) -> u64 {
    available.saturating_sub(KEPT.max(available / 16))
}

/// Returns the command that adds `missing` pages to the `total` of a pool (of a node, if one is
/// named), or in words why they are not available: for a pool the kernel takes all available
/// memory, regardless of other programs.
///
/// # Errors
/// The words.
pub fn grow_command(
    page: PageSize,
    (total, missing): (u64, u64),
    node: Option<u32>,
    available: u64,
) -> Result<String, String> {
    if missing.saturating_mul(page.bytes()) > room(available) {
        let mib = available >> 20;
        return Err(format!(
            "{missing} more would leave other programs too little of the {mib} MiB that are available"
        ));
    }
    Ok(reserve_command(page, total.saturating_add(missing), node))
}

/// Returns the command that resizes the pool (of a node, if one is named) to `pages` pages.
pub(crate) fn reserve_command(page: PageSize, pages: u64, node: Option<u32>) -> String {
    let folder = folder_name(page.bytes());
    // The kernel accepts a number that it cannot reach, and says nothing.
    let checked = |file: String| {
        let instead = match page {
            PageSize::Size1G => format!("boot with hugepagesz=1G hugepages={pages}"),
            _ => "free memory, or reserve them after a boot".to_owned(),
        };
        format!(
            "sudo sh -c 'echo {pages} > {file}; grep -qx {pages} {file} || {{ echo \"memory is fragmented: {instead}\" >&2; exit 1; }}'"
        )
    };
    match (page, node) {
        (_, Some(node)) => {
            checked(format!("/sys/devices/system/node/node{node}/hugepages/{folder}/nr_hugepages"))
        }
        // `vm.nr_hugepages` counts pages of the default size, which `default_hugepagesz=1G`
        // changes.
        (PageSize::Size2M, None) if default_is(PageSize::Size2M) => {
            format!("sudo sysctl vm.nr_hugepages={pages}")
        }
        (_, None) => checked(format!("/sys/kernel/mm/hugepages/{folder}/nr_hugepages")),
    }
}

/// Returns whether hugepages of the default size have this size.
fn default_is(page: PageSize) -> bool {
    let meminfo = std::fs::read("/proc/meminfo").unwrap_or_default();
    files::field_kib(&meminfo, "Hugepagesize").is_some_and(|bytes| bytes == page.bytes())
}

pub(crate) fn nodes(sys: &Path) -> Vec<u32> {
    files::list(&online_nodes(sys))
}

fn node_folder(sys: &Path, node: u32) -> PathBuf {
    sys.join(format!("devices/system/node/node{node}/hugepages"))
}

fn folder_name(page_bytes: u64) -> String {
    format!("hugepages-{}kB", page_bytes / 1024)
}

fn pools_in(folder: &Path, node: Option<u32>) -> Vec<HugetlbPool> {
    let size = |name: &str| files::kib(name.strip_prefix("hugepages-")?);
    files::names(folder)
        .iter()
        .filter_map(|name| read(&folder.join(name), size(name).filter(|bytes| *bytes > 0)?, node))
        .collect()
}

fn read(folder: &Path, page_bytes: u64, node: Option<u32>) -> Option<HugetlbPool> {
    let number = |file: &str| files::number(&folder.join(file));
    Some(HugetlbPool {
        page_bytes,
        node,
        total: number("nr_hugepages")?,
        free: number("free_hugepages")?,
        reserved: number("resv_hugepages").unwrap_or(0),
        overcommit: number("nr_overcommit_hugepages").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mode_of_2_mib_pages_is_their_own_or_inherited() {
        let sys = tempfile::tempdir().unwrap();
        let folder = sys.path().join("kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(folder.join("hugepages-2048kB")).unwrap();
        assert_eq!(thp(sys.path()), None);
        for (common, own, mode, switch) in [
            (
                "always madvise [never]",
                "always inherit madvise [never]",
                Thp::Never,
                "hugepages-2048kB/enabled",
            ),
            (
                "always madvise [never]",
                "always inherit [madvise] never",
                Thp::Madvise,
                "hugepages-2048kB/enabled",
            ),
            (
                "[always] madvise never",
                "always inherit madvise [never]",
                Thp::Never,
                "hugepages-2048kB/enabled",
            ),
            ("[always] madvise never", "always [inherit] madvise never", Thp::Always, "enabled"),
            ("always madvise [never]", "", Thp::Never, "enabled"),
        ] {
            std::fs::write(folder.join("enabled"), common).unwrap();
            std::fs::write(folder.join("hugepages-2048kB/enabled"), own).unwrap();
            assert_eq!(
                (thp(sys.path()), thp_switch(sys.path())),
                (Some(mode), folder.join(switch)),
                "{own}"
            );
        }
    }

    #[test]
    fn a_pool_leaves_memory_to_others() {
        const MIB: u64 = 1 << 20;
        assert_eq!((room(100 * MIB), room(600 * MIB)), (0, 344 * MIB));
        assert_eq!(room(16384 * MIB), 15360 * MIB);
        let page = PageSize::Size2M;
        let grow = |missing, available| grow_command(page, (10, missing), Some(0), available);
        assert!(
            grow(172, 600 * MIB).unwrap().contains("echo 182 > /sys/devices/system/node/node0/")
        );
        assert!(grow(173, 600 * MIB).unwrap_err().contains("of the 600 MiB"));
        assert!(grow(u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn a_command_fails_where_the_kernel_has_fewer_pages() {
        let command = reserve_command(PageSize::Size1G, 3, None);
        let file = "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
        assert!(
            command.contains(file) && command.contains("hugepagesz=1G hugepages=3"),
            "{command}"
        );
        let folder = tempfile::tempdir().unwrap();
        let pool = folder.path().join("pool");
        let run = |script: &str| {
            let script =
                script.strip_prefix("sudo ").unwrap().replace(file, pool.to_str().unwrap());
            std::process::Command::new("sh").args(["-c", &script]).output().unwrap()
        };
        assert!(run(&command).status.success(), "the pool has them");
        // A pool that keeps the number that it has.
        std::fs::write(&pool, "1\n").unwrap();
        let kept = command.replace("echo 3 > ", "echo 3 < ");
        let refused = run(&kept);
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8(refused.stderr).unwrap().contains("boot with hugepagesz=1G"));
    }

    #[test]
    fn fragmentation_is_read_and_not_assumed() {
        let proc = tempfile::tempdir().unwrap();
        let file = proc.path().join("buddyinfo");
        assert_eq!(is_fragmented(proc.path()), None);
        for (text, fragmented) in [
            (
                "Node 0, zone      DMA      9 9 9 9 9 9 9 9 9 0 0\nNode 0, zone   Normal 1 1 1 1 1 1 1 1 1 0 0\n",
                Some(true),
            ),
            (
                "Node 0, zone      DMA      0 0 0 0 0 0 0 0 0 0 0\nNode 0, zone   Normal 1 1 1 1 1 1 1 1 1 1 0\n",
                Some(false),
            ),
            ("garbage\n", None),
        ] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(is_fragmented(proc.path()), fragmented, "{text}");
        }
    }
}
