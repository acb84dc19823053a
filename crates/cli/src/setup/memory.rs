//! How much memory a run needs, checked before any is allocated: otherwise the kernel would have to kill a process.

use crate::args::Memory;
use crate::units::ByteSize;
use pinfold::probe::hugepages;
use pinfold_core::addr::PageSize;
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};

/// The share of the available memory that is left to other programs: a 16th.
const LEFT_TO_OTHERS: u64 = 16;
const RESERVE: &str = "the reserve for other programs";

/// The data buffers of all jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BufferNeed {
    /// Their number.
    pub(crate) count: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
    /// The options that lower both, for errors.
    pub(crate) lower: &'static str,
}

/// The memory that a run needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryNeed {
    /// The data buffers.
    pub(crate) buffers: BufferNeed,
    /// Bytes of the arenas, which contain the buffers and the controllers' queues.
    pub(crate) arenas: u64,
    /// Bytes that targets will hold in memory.
    pub(crate) targets: u64,
}

/// More memory than is available.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "this run needs {} of memory ({}), and {} are available, {} allowed by {by}: {}",
    ByteSize(*.needed), parts(.buffers, *.targets), ByteSize(*.available), ByteSize(*.allowed), advice(.needed, .targets, .buffers.lower)
)]
pub(crate) struct MemoryError {
    needed: u64,
    buffers: BufferNeed,
    targets: u64,
    available: u64,
    allowed: u64,
    by: String,
}

fn parts(&BufferNeed { count, bytes, .. }: &BufferNeed, targets: u64) -> String {
    let buffers = format!("{count} buffers of {}", ByteSize(bytes as u64));
    match (count, targets) {
        (0, targets) => format!("{} of targets", ByteSize(targets)),
        (_, 0) => buffers,
        (_, targets) => format!("{buffers}, {} of targets", ByteSize(targets)),
    }
}

fn advice(needed: &u64, targets: &u64, lower: &str) -> String {
    if *targets > needed / 2 {
        let disk = targets.next_multiple_of(512);
        return format!(
            "use an image (truncate -s {disk} disk.img, then soft:disk.img), or a part with --size"
        );
    }
    format!("lower {lower}")
}

/// Checks that there is memory for `need`, of the kind that `--memory` selects.
pub(crate) fn check(need: MemoryNeed, memory: Memory) -> Result<(), MemoryError> {
    let arenas = match memory {
        // The arena reports missing hugepages, and the hugetlb pool is not part of the available memory.
        Memory::Hugetlb1g | Memory::Hugetlb2m => 0,
        Memory::Auto if fits_hugepages(need.arenas) => 0,
        _ => need.arenas,
    };
    compare(need, arenas.saturating_add(need.targets), &Machine::here())
}

fn fits_hugepages(bytes: u64) -> bool {
    [PageSize::Size1G, PageSize::Size2M].into_iter().any(|page| {
        let pool = hugepages::pool(Path::new("/sys"), page);
        pool.is_some_and(|pool| pool.available().saturating_mul(page.bytes()) >= bytes)
    })
}

fn compare(need: MemoryNeed, needed: u64, machine: &Machine) -> Result<(), MemoryError> {
    let available = machine.available.unwrap_or(u64::MAX);
    let usable = available - available / LEFT_TO_OTHERS;
    let (allowed, by) = machine.allowed.clone().unwrap_or((usable, RESERVE.to_owned()));
    if needed <= usable.min(allowed) {
        return Ok(());
    }
    let (allowed, by) = if usable < allowed { (usable, RESERVE.to_owned()) } else { (allowed, by) };
    let MemoryNeed { buffers, targets, .. } = need;
    Err(MemoryError { needed, buffers, targets, available, allowed, by })
}

/// The machine's available memory, and how much of it this process may allocate.
#[derive(Clone, Debug)]
struct Machine {
    /// `MemAvailable` (Linux 3.14).
    available: Option<u64>,
    /// The least that a limit permits, and the limit.
    allowed: Option<(u64, String)>,
}

impl Machine {
    fn here() -> Self {
        let limit = |resource| getrlimit(resource).current;
        Self::read(Path::new("/proc"), limit(Resource::As), limit(Resource::Data))
    }

    fn read(proc: &Path, address_space: Option<u64>, data: Option<u64>) -> Self {
        let status = text(&proc.join("self/status"));
        let left =
            |limit: Option<u64>, key: &str| Some(limit?.saturating_sub(kib(&status, key).unwrap_or(0)));
        let limits = [
            left(address_space, "VmSize").map(|left| (left, "RLIMIT_AS (`ulimit -v`)".to_owned())),
            left(data, "VmData").map(|left| (left, "RLIMIT_DATA (`ulimit -d`)".to_owned())),
        ];
        let allowed = limits.into_iter().flatten().chain(cgroups(proc)).min();
        Self { available: kib(&text(&proc.join("meminfo")), "MemAvailable"), allowed }
    }
}

/// Returns what each cgroup of this process, up to the root, permits. Its page cache counts as free, since it is reclaimed.
fn cgroups(proc: &Path) -> Vec<(u64, String)> {
    let own = text(&proc.join("self/cgroup"));
    let mut all = Vec::new();
    for line in text(&proc.join("self/mountinfo")).lines() {
        let Some((fields, kind)) = line.split_once(" - ") else { continue };
        let mut fields = fields.split(' ').skip(3);
        let (Some(root), Some(mount)) = (fields.next(), fields.next()) else { continue };
        let mut kind = kind.split(' ');
        let v2 = match (kind.next(), kind.nth(1)) {
            (Some("cgroup2"), _) => true,
            (Some("cgroup"), Some(options)) if options.split(',').any(|option| option == "memory") => false,
            _ => continue,
        };
        let path = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let here =
                if v2 { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
            here.then_some(path)
        });
        // In a container the path may lie outside: then the mount is the group itself.
        let inside = path.and_then(|path| Path::new(path).strip_prefix(root).ok()).unwrap_or(Path::new(""));
        let mount = PathBuf::from(mount);
        let lowest = mount.join(inside);
        all.extend(
            lowest
                .ancestors()
                .take_while(|group| group.starts_with(&mount))
                .filter_map(|group| left(group, v2)),
        );
    }
    all
}

fn left(group: &Path, v2: bool) -> Option<(u64, String)> {
    let (limit, usage, prefix) = match v2 {
        true => ("memory.max", "memory.current", ""),
        false => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    };
    let number = |file: &str| text(&group.join(file)).trim().parse::<u64>().ok();
    let (most, used) = (number(limit)?, number(usage)?);
    let stat = text(&group.join("memory.stat"));
    let cached = |list: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(&format!("{prefix}{list} ")));
        value.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
    };
    let used = used.saturating_sub(cached("inactive_file").saturating_add(cached("active_file")));
    // Without a limit, v1 reports the largest number of whole pages.
    (most < 1 << 62).then(|| (most.saturating_sub(used), group.join(limit).display().to_string()))
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Returns the value of `key:   64 kB` in bytes.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(arenas: u64, targets: u64) -> MemoryNeed {
        MemoryNeed {
            buffers: BufferNeed { count: 1023, bytes: 64 << 20, lower: "--iodepth, --bs or --numjobs" },
            arenas,
            targets,
        }
    }

    #[test]
    fn more_than_is_available_is_reported_with_the_remedy() {
        let machine = Machine { available: Some(16 * GIB), allowed: None };
        assert_eq!(compare(need(15 * GIB, 0), 15 * GIB, &machine), Ok(()));
        let words = compare(need(64 * GIB, 0), 64 * GIB, &machine).unwrap_err().to_string();
        for part in
            ["needs 64 GiB", "1023 buffers of 64 MiB", "16 GiB are available", "15 GiB allowed", "--iodepth"]
        {
            assert!(words.contains(part), "{part}: {words}");
        }
        let words = compare(need(GIB, 20 * GIB), 21 * GIB, &machine).unwrap_err().to_string();
        assert!(words.contains("20 GiB of targets") && words.contains("soft:disk.img"), "{words}");
        let machine = Machine { available: Some(16 * GIB), allowed: Some((GIB, "a limit".into())) };
        let words = compare(need(2 * GIB, 0), 2 * GIB, &machine).unwrap_err().to_string();
        assert!(words.contains("1 GiB allowed by a limit"), "{words}");
        assert_eq!(
            compare(need(u64::MAX, 0), u64::MAX, &Machine { available: None, allowed: None }),
            Err(MemoryError {
                needed: u64::MAX,
                buffers: BufferNeed { count: 1023, bytes: 64 << 20, lower: "--iodepth, --bs or --numjobs" },
                targets: 0,
                available: u64::MAX,
                allowed: u64::MAX - u64::MAX / LEFT_TO_OTHERS,
                by: RESERVE.into(),
            })
        );
    }

    /// A `/proc` and cgroups in a folder.
    fn machine(version: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().display();
        let (mount, own) = match version {
            "v2" => (format!("30 1 0:9 / {at}/cg rw - cgroup2 none rw\n"), "0::/a/b\n"),
            "v1" => {
                (format!("30 1 0:9 /a {at}/cg rw - cgroup none rw,memory\n"), "3:cpu:/x\n4:memory:/a/b\n")
            }
            other => (format!("30 1 0:9 /{other} {at}/cg rw - cgroup2 none rw\n"), "0::/elsewhere\n"),
        };
        let all = [
            ("proc/self/mountinfo", &*mount),
            ("proc/self/cgroup", own),
            ("proc/meminfo", "MemAvailable: 1024 kB\n"),
        ];
        for (name, text) in all.iter().chain(files) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine::read(&root.path().join("proc"), None, None);
        (root, machine)
    }

    #[test]
    fn the_limits_of_all_parent_groups_apply_and_their_page_cache_is_free() {
        let (_root, found) = machine(
            "v2",
            &[
                ("cg/a/b/memory.max", "max\n"),
                ("cg/a/b/memory.current", "4096\n"),
                ("cg/a/memory.max", "1000000\n"),
                ("cg/a/memory.current", "900000\n"),
                ("cg/a/memory.stat", "anon 1\ninactive_file 300000\nactive_file 100000\n"),
            ],
        );
        let (allowed, by) = found.allowed.unwrap();
        assert_eq!((found.available, allowed), (Some(1 << 20), 500_000));
        assert!(by.ends_with("cg/a/memory.max"), "{by}");
        let (_root, found) = machine(
            "v1",
            &[
                ("cg/b/memory.limit_in_bytes", "9223372036854771712\n"),
                ("cg/b/memory.usage_in_bytes", "1\n"),
                ("cg/memory.limit_in_bytes", "5000\n"),
                ("cg/memory.usage_in_bytes", "4000\n"),
                ("cg/memory.stat", "inactive_file 9\ntotal_inactive_file 500\n"),
            ],
        );
        assert_eq!(found.allowed.unwrap().0, 1500);
        // In a container: the mount itself.
        let here = [("cg/memory.max", "7000\n"), ("cg/memory.current", "7001\n")];
        assert_eq!(machine("container", &here).1.allowed.unwrap().0, 0);
        assert_eq!(machine("v2", &[]).1.allowed, None);
    }

    #[test]
    fn memory_of_the_process_counts_against_its_own_limits() {
        let (root, _) = machine("v2", &[("proc/self/status", "VmSize:\t1000 kB\nVmData:\t 200 kB\n")]);
        let read = |space, data| Machine::read(&root.path().join("proc"), space, data).allowed.unwrap();
        assert_eq!(read(Some(2_048_000), None), (1_024_000, "RLIMIT_AS (`ulimit -v`)".into()));
        assert_eq!(read(Some(2_048_000), Some(204_800)), (0, "RLIMIT_DATA (`ulimit -d`)".into()));
    }
}
