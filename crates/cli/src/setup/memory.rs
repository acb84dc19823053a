//! How much memory a run needs, checked before any is allocated: otherwise the kernel would have to
//! kill a process.

use crate::args::Memory;
use crate::units::ByteSize;
use pinfold::probe::{SystemMemory, control_group, hugepages};
use pinfold_core::addr::PageSize;
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// The share of the available memory that is left to other programs: a 16th.
const LEFT_TO_OTHERS: u64 = 16;
const RESERVE: &str = "the reserve for other programs";
/// The most that a run may use where a control group's limit cannot be read: many times what each
/// command needs by default.
const ASSUMED: u64 = 512 << 20;

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
        // The arena reports missing hugepages, and the hugetlb pool is not part of the available
        // memory.
        Memory::Hugetlb1g | Memory::Hugetlb2m | Memory::Memfd2m | Memory::Memfd1g => 0,
        Memory::Auto if fits_hugepages(need.arenas) => 0,
        _ => need.arenas,
    };
    compare(need, arenas.saturating_add(need.targets), &Machine::here())
}

/// Returns how many bytes this process may allocate now, with the reserve for other programs left.
pub(crate) fn allowed() -> u64 {
    let machine = Machine::here();
    let available = machine.available.unwrap_or(u64::MAX);
    machine
        .allowed
        .map_or(u64::MAX, |(allowed, _)| allowed)
        .min(available - available / LEFT_TO_OTHERS)
}

/// Returns whether free hugepages of one size hold `bytes` bytes.
pub(crate) fn fits_hugepages(bytes: u64) -> bool {
    [PageSize::Size1G, PageSize::Size2M].into_iter().any(|page| {
        let pool = hugepages::pool(Path::new("/sys"), page);
        let groups = control_group::hugetlb(Path::new("/proc"), page);
        pool.is_some_and(|pool| pool.available().saturating_mul(page.bytes()) >= bytes)
            && groups.unknown.is_none()
            && groups.refusing(bytes.next_multiple_of(page.bytes())).is_empty()
    })
}

/// Returns how much of the available memory a run may use.
fn reserved(available: u64) -> u64 {
    available - available / LEFT_TO_OTHERS
}

fn compare(need: MemoryNeed, needed: u64, machine: &Machine) -> Result<(), MemoryError> {
    let available = machine.available.unwrap_or(u64::MAX);
    let usable = reserved(available);
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
        let left = |limit: Option<u64>, key: &str| {
            Some(limit?.saturating_sub(kib(&status, key).unwrap_or(0)))
        };
        let limits = [
            left(address_space, "VmSize").map(|left| (left, "RLIMIT_AS (`ulimit -v`)".to_owned())),
            left(data, "VmData").map(|left| (left, "RLIMIT_DATA (`ulimit -d`)".to_owned())),
        ];
        let groups = control_group::memory(proc);
        let group = groups.tightest().map(|group| (group.left(), group.file.display().to_string()));
        let assumed = groups.unknown.map(|why| {
            (ASSUMED, format!("caution, since a control group's limit is not known ({why})"))
        });
        let SystemMemory { available, without_cache, .. } = SystemMemory::read(proc);
        let free = without_cache
            .map(|why| (reserved(available), format!("{RESERVE}, without page cache ({why})")));
        let allowed = limits.into_iter().flatten().chain(group).chain(assumed).chain(free).min();
        Self { available: Some(available), allowed }
    }
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
            buffers: BufferNeed {
                count: 1023,
                bytes: 64 << 20,
                lower: "--iodepth, --bs or --numjobs",
            },
            arenas,
            targets,
        }
    }

    #[test]
    fn more_than_is_available_is_reported_with_the_remedy() {
        let machine = Machine { available: Some(16 * GIB), allowed: None };
        assert_eq!(compare(need(15 * GIB, 0), 15 * GIB, &machine), Ok(()));
        let words = compare(need(64 * GIB, 0), 64 * GIB, &machine).unwrap_err().to_string();
        for part in [
            "needs 64 GiB",
            "1023 buffers of 64 MiB",
            "16 GiB are available",
            "15 GiB allowed",
            "--iodepth",
        ] {
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
                buffers: BufferNeed {
                    count: 1023,
                    bytes: 64 << 20,
                    lower: "--iodepth, --bs or --numjobs"
                },
                targets: 0,
                available: u64::MAX,
                allowed: u64::MAX - u64::MAX / LEFT_TO_OTHERS,
                by: RESERVE.into(),
            })
        );
    }

    /// A `/proc` and cgroups in a folder.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().display().to_string();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text.replace("AT", &at)).unwrap();
        }
        let machine = Machine::read(&root.path().join("proc"), None, None);
        (root, machine)
    }

    const GROUPED: [(&str, &str); 5] = [
        ("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n"),
        ("proc/self/cgroup", "0::/a\n"),
        ("proc/self/mountinfo", "30 1 0:9 / AT/cg rw - cgroup2 none rw\n"),
        ("cg/a/memory.max", "7000\n"),
        ("cg/a/memory.current", "2000\n"),
    ];

    #[test]
    fn the_limit_of_a_control_group_applies_or_is_assumed() {
        let (_root, found) = machine(&GROUPED);
        let (allowed, by) = found.allowed.unwrap();
        assert_eq!((found.available, allowed), (Some(2 * GIB), 5000));
        assert!(by.ends_with("cg/a/memory.max"), "{by}");
        // No file system of control groups is mounted.
        let (_root, found) = machine(&[GROUPED[0], GROUPED[1], ("proc/self/mountinfo", "")]);
        let words = compare(need(GIB, 0), GIB, &found).unwrap_err().to_string();
        assert!(
            words
                .contains("512 MiB allowed by caution, since a control group's limit is not known"),
            "{words}"
        );
        assert_eq!(
            compare(need(ASSUMED, 0), ASSUMED, &found),
            Ok(()),
            "the default of every command fits"
        );
    }

    #[test]
    fn memory_is_counted_without_procfs() {
        let (_root, found) = machine(&GROUPED[1..]);
        assert!(found.available > Some(0));
        let (_root, found) = machine(&[("proc/self/status", "")]);
        let (allowed, by) = found.allowed.clone().unwrap();
        assert_eq!(Some(allowed), found.available.map(reserved));
        assert!(
            by.contains("without page cache") && by.contains("proc/meminfo: No such file"),
            "{by}"
        );
        assert!(compare(need(u64::MAX, 0), u64::MAX, &found).is_err());
    }

    #[test]
    fn memory_of_the_process_counts_against_its_own_limits() {
        let status = ("proc/self/status", "VmSize:\t1000 kB\nVmData:\t 200 kB\n");
        let (root, _) = machine(&[GROUPED[0], status]);
        let read =
            |space, data| Machine::read(&root.path().join("proc"), space, data).allowed.unwrap();
        assert_eq!(read(Some(2_048_000), None), (1_024_000, "RLIMIT_AS (`ulimit -v`)".into()));
        assert_eq!(read(Some(2_048_000), Some(204_800)), (0, "RLIMIT_DATA (`ulimit -d`)".into()));
    }
}
