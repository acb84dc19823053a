//! The memory stack of one run: a domain, an arena for what the drivers need, and an arena for the
//! data.

use crate::args::{Memory, Protect, StackArgs};
use crate::units::ByteSize;
use pinfold::arena::{AllocError, BuildError};
use pinfold::probe::{MapLimit, MapSetting, SystemMemory, control_group, hugepages};
use pinfold::soft::Port;
use pinfold::uring::Fixed;
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::addr::PageSize;
use rustix::process::{Resource, getrlimit};
use std::path::Path;
use std::time::Duration;

impl StackError {
    /// Returns the error for a run whose sizes no option changes.
    pub(crate) fn of_fixed_sizes(self) -> Self {
        match self {
            Self::Arena { purpose, error, .. } => Self::Arena { purpose, error, lower: "" },
            error => error,
        }
    }
}

/// Why the memory stack could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StackError {
    /// An arena could not be allocated.
    #[error(
        "no DMA memory for {purpose}: {error}; {}choose other memory with --memory",
        if lower.is_empty() { String::new() } else { format!("lower {lower}, or ") }
    )]
    Arena {
        /// `the data`, `the controllers' queues`.
        purpose: &'static str,
        /// The error.
        error: BuildError,
        /// The options that lower it.
        lower: &'static str,
    },
    /// A buffer could not be allocated.
    #[error("cannot allocate the data buffers: {0}")]
    Buffer(#[from] AllocError),
    /// More than 64 bits count.
    #[error("{count} buffers of {bytes} bytes exceed the largest arena (1 TiB): lower {lower}")]
    TooMuch {
        /// The number of buffers.
        count: usize,
        /// Bytes of each.
        bytes: usize,
        /// The options that lower it.
        lower: &'static str,
    },
}

/// The memory stack of one run.
#[derive(Debug)]
pub(crate) struct Stack {
    /// The I/O address space that all controllers of the run are in.
    pub(crate) domain: Domain,
    /// Always mapped: queues and PRP lists.
    pub(crate) control: Option<Arena>,
    /// The data buffers, mapped as `--protect` says.
    pub(crate) data: Arena,
    /// The value of `--protect`.
    pub(crate) protect: Protect,
    /// For how long commands are retried.
    pub(crate) retry_limit: Duration,
    buffers: BufferNeed,
}

const HUGE: usize = 2 << 20;

/// Returns the size of a buffer of `bytes` bytes in an arena, so that all fit: a power of two of
/// frames up to 2 MiB, whole hugepages above.
fn allocated_bytes(bytes: usize) -> Option<usize> {
    if bytes > HUGE {
        bytes.checked_next_multiple_of(HUGE)
    } else {
        Some(bytes.max(4096).next_power_of_two())
    }
}

/// Returns an upper bound for a controller's queues, identify buffers and PRP lists.
fn control_bytes(BufferNeed { count, bytes, .. }: BufferNeed) -> u64 {
    let list_pages = (bytes as u64 / 4096).div_ceil(511) + 1;
    (count as u64).saturating_mul(list_pages * 4096).saturating_add(4 << 20)
}

impl Stack {
    /// Allocates a stack in `domain` for `buffers` and `controllers` controllers.
    pub(crate) fn build(
        args: StackArgs,
        domain: Domain,
        buffers: BufferNeed,
        controllers: u64,
    ) -> Result<Self, StackError> {
        let BufferNeed { count, bytes, lower, .. } = buffers;
        let too_much = || StackError::TooMuch { count, bytes, lower };
        let allocated = allocated_bytes(bytes).ok_or_else(too_much)?;
        let data_bytes = allocated.checked_mul(count.max(1)).ok_or_else(too_much)?;
        let buffers = BufferNeed { bytes: allocated, ..buffers };
        Self::with_memory(args, domain, data_bytes as u64, buffers, controllers)
    }

    /// Allocates a stack in `domain` with `data_bytes` bytes for the data, of which up to `buffers`
    /// are in flight.
    pub(crate) fn with_memory(
        args: StackArgs,
        domain: Domain,
        data_bytes: u64,
        buffers: BufferNeed,
        controllers: u64,
    ) -> Result<Self, StackError> {
        let mapping_policy = if args.protect == Protect::Static {
            MappingPolicy::Whole
        } else {
            MappingPolicy::PerUse
        };
        if let Some(limit) = args.held_limit {
            domain.set_held_limit(limit.0);
        }
        let mut builder = Arena::builder().size(data_bytes).mapping_policy(mapping_policy);
        if let Some(source) = source(args.memory) {
            builder = builder.source(source);
        }
        let (purpose, lower) = ("the data", buffers.lower);
        let data =
            builder.build(&domain).map_err(|error| StackError::Arena { purpose, error, lower })?;
        let control = if controllers > 0 {
            let size = controllers.saturating_mul(control_bytes(buffers));
            let builder = Arena::builder().size(size).mapping_policy(MappingPolicy::Whole);
            let purpose = "the controllers' queues";
            Some(builder.build(&domain).map_err(|error| StackError::Arena {
                purpose,
                error,
                lower,
            })?)
        } else {
            None
        };
        let StackArgs { protect, retry_limit, .. } = args;
        Ok(Self { domain, control, data, protect, retry_limit: retry_limit.0, buffers })
    }

    /// Returns the memory of all data buffers, to be registered with a ring.
    pub(crate) fn fixed(&self) -> Fixed<'_> {
        self.data.fixed()
    }

    /// Allocates the data buffers.
    pub(crate) fn buffers(&self) -> Result<Vec<Buffer>, StackError> {
        (0..self.buffers.count).map(|_| Ok(self.data.alloc(self.buffers.bytes)?)).collect()
    }

    /// Returns the port through which a model controller reaches memory.
    pub(crate) fn port(&self) -> Option<Port> {
        self.domain.port()
    }

    /// Returns the arenas with their names.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (&'static str, &Arena)> {
        std::iter::once(("data", &self.data))
            .chain(self.control.iter().map(|control| ("control", control)))
    }

    /// Returns the memory that such a stack needs, with targets that hold `targets` bytes.
    pub(crate) fn need(buffers: BufferNeed, controllers: u64, targets: u64) -> MemoryNeed {
        let each = allocated_bytes(buffers.bytes).map_or(u64::MAX, |bytes| bytes as u64);
        let data = each.saturating_mul(buffers.count.max(1) as u64);
        let control =
            if controllers > 0 { controllers.saturating_mul(control_bytes(buffers)) } else { 0 };
        MemoryNeed { buffers, arenas: data.saturating_add(control), targets }
    }
}

fn source(memory: Memory) -> Option<Source> {
    match memory {
        Memory::Auto => None,
        Memory::Hugetlb1g => Some(Source::Hugetlb1G),
        Memory::Hugetlb2m => Some(Source::Hugetlb2M),
        Memory::Thp => Some(Source::Thp),
        Memory::Plain => Some(Source::Plain),
        Memory::Memfd => Some(Source::Memfd),
        Memory::Memfd2m => Some(Source::Memfd2M),
        Memory::Memfd1g => Some(Source::Memfd1G),
    }
}

// How much memory a run needs, checked before any is allocated: otherwise the kernel would have to
// kill a process.

/// For a run whose sizes are fixed.
pub(crate) const NOTHING: &str = "nothing";

/// The share of the available memory that is left to other programs: a 16th.
const LEFT_TO_OTHERS: u64 = 16;
const RESERVE: &str = "the reserve for other programs";
/// The most that a run may use where a control group's limit cannot be read: many times what each
/// command needs by default.
const ASSUMED: u64 = 512 << 20;

/// The program's needs besides buffers and targets, where a limit counts all that it maps: rings,
/// tables, and allocations of its libraries.
const OWN: u64 = 16 << 20;
/// The same for each of its threads, with the stack.
const THREAD: u64 = 4 << 20;

/// The data buffers of all jobs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct BufferNeed {
    /// Their number.
    pub(crate) count: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
    /// The threads that use them, beside the first.
    pub(crate) threads: usize,
    /// The options that lower both, for errors; empty if none does.
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
    "this run needs {} of memory ({}{}), and {} are available, {} allowed by {by}: {}",
    ByteSize(*.needed), parts(.buffers, *.targets),
    if *.own > 0 { format!(", {} of its own", ByteSize(*.own)) } else { String::new() },
    ByteSize(*.available), ByteSize(*.allowed), advice(.needed, .targets, .buffers.lower)
)]
pub(crate) struct MemoryError {
    needed: u64,
    /// The needs of the program itself, if they count.
    own: u64,
    buffers: BufferNeed,
    targets: u64,
    available: u64,
    allowed: u64,
    by: String,
}

impl MemoryError {
    /// Returns the error for a run whose sizes no option changes.
    pub(crate) fn of_fixed_sizes(mut self) -> Self {
        self.buffers.lower = NOTHING;
        self
    }
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
    if lower == NOTHING {
        return "free memory, or raise what allows no more".to_owned();
    }
    if *targets > needed / 2 {
        let disk = targets.next_multiple_of(512);
        return format!(
            "use an image (truncate -s {disk} disk.img, then soft:disk.img), or a part with --size"
        );
    }
    match lower.is_empty() {
        true => "free memory, or raise what allows no more".to_owned(),
        false => format!("lower {lower}"),
    }
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
    let machine = Machine::here();
    compare_mapped(need, memory, &machine)?;
    compare(need, arenas.saturating_add(need.targets), &machine)
}

/// Compares the mappings of the run, for any page size, with each limit that counts them.
fn compare_mapped(need: MemoryNeed, memory: Memory, machine: &Machine) -> Result<(), MemoryError> {
    let own = OWN.saturating_add(THREAD.saturating_mul(need.buffers.threads as u64 + 1));
    let is_hugetlb =
        matches!(memory, Memory::Hugetlb1g | Memory::Hugetlb2m | Memory::Memfd2m | Memory::Memfd1g);
    let maybe_hugetlb = is_hugetlb || memory == Memory::Auto && fits_hugepages(need.arenas);
    for &MapLimit { setting, left, .. } in &machine.mapped {
        // The kernel's promise is for other pages.
        let arenas = if maybe_hugetlb && setting == MapSetting::Commit { 0 } else { need.arenas };
        let needed = arenas.saturating_add(need.targets).saturating_add(own);
        if needed > left {
            let MemoryNeed { mut buffers, targets, .. } = need;
            // Not even a run of the smallest sizes would fit.
            if OWN + THREAD > left {
                buffers.lower = NOTHING;
            }
            let available = machine.available.unwrap_or(u64::MAX);
            let by = setting.to_string();
            return Err(MemoryError {
                needed,
                own,
                buffers,
                targets,
                available,
                allowed: left,
                by,
            });
        }
    }
    Ok(())
}

/// Returns how many bytes this process may allocate now, with the reserve for other programs left.
pub(crate) fn allowed() -> u64 {
    let machine = Machine::here();
    let available = machine.available.unwrap_or(u64::MAX);
    let mapped = machine.mapped.iter().map(|limit| limit.left.saturating_sub(OWN)).min();
    machine
        .allowed
        .map_or(u64::MAX, |(allowed, _)| allowed)
        .min(mapped.unwrap_or(u64::MAX))
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
    Err(MemoryError { needed, own: 0, buffers, targets, available, allowed, by })
}

/// The machine's available memory, and how much of it this process may allocate.
#[derive(Clone, Debug)]
struct Machine {
    /// `MemAvailable` (Linux 3.14).
    available: Option<u64>,
    /// The least that a limit of used memory permits, and the limit.
    allowed: Option<(u64, String)>,
    /// The limits of mapped memory.
    mapped: Vec<MapLimit>,
}

impl Machine {
    fn here() -> Self {
        let limit = |resource| getrlimit(resource).current;
        Self::read(Path::new("/proc"), limit(Resource::As), limit(Resource::Data))
    }

    fn read(proc: &Path, address_space: Option<u64>, data: Option<u64>) -> Self {
        let mapped = MapLimit::read(proc, address_space, data);
        let groups = control_group::memory(proc);
        let group = groups.tightest().map(|group| (group.left(), group.file.display().to_string()));
        let assumed = groups.unknown.map(|why| {
            (ASSUMED, format!("caution, since a control group's limit is not known ({why})"))
        });
        let SystemMemory { available, without_cache, .. } = SystemMemory::read(proc);
        let free = without_cache
            .map(|why| (reserved(available), format!("{RESERVE}, without page cache ({why})")));
        let allowed = group.into_iter().chain(assumed).chain(free).min();
        Self { available: Some(available), allowed, mapped }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn the_words_of_memory_are_those_of_the_sources() {
        let words: Vec<_> = Memory::value_variants()
            .iter()
            .filter_map(|kind| {
                Some((kind.to_possible_value()?.get_name().to_owned(), source(*kind)?))
            })
            .collect();
        assert!(words.iter().all(|(word, source)| word == source.name()), "{words:?}");
        // All but the caller's memory, which a command line cannot name.
        assert_eq!(words.len(), Source::ALL.len() - 1);
    }

    #[test]
    fn buffers_fill_an_arena_without_gaps() {
        for (bytes, allocated) in
            [(1, 4096), (512, 4096), (4097, 8192), (1 << 20, 1 << 20), (3 << 19, 2 << 20)]
        {
            assert_eq!(allocated_bytes(bytes), Some(allocated));
        }
        assert_eq!(allocated_bytes((2 << 20) + 1), Some(4 << 20));
        assert_eq!(allocated_bytes(usize::MAX), None);
    }

    const GIB: u64 = 1 << 30;

    fn need(arenas: u64, targets: u64) -> MemoryNeed {
        MemoryNeed {
            buffers: BufferNeed {
                count: 1023,
                bytes: 64 << 20,
                threads: 0,
                lower: "--iodepth, --bs or --numjobs",
            },
            arenas,
            targets,
        }
    }

    #[test]
    fn more_than_is_available_is_reported_with_the_remedy() {
        let machine = Machine { available: Some(16 * GIB), allowed: None, mapped: vec![] };
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
        let machine = Machine { allowed: Some((GIB, "a limit".into())), ..machine };
        let words = compare(need(2 * GIB, 0), 2 * GIB, &machine).unwrap_err().to_string();
        assert!(words.contains("1 GiB allowed by a limit"), "{words}");
        assert_eq!(
            compare(
                need(u64::MAX, 0),
                u64::MAX,
                &Machine { available: None, allowed: None, mapped: vec![] }
            ),
            Err(MemoryError {
                needed: u64::MAX,
                own: 0,
                buffers: BufferNeed {
                    count: 1023,
                    bytes: 64 << 20,
                    threads: 0,
                    lower: "--iodepth, --bs or --numjobs"
                },
                targets: 0,
                available: u64::MAX,
                allowed: u64::MAX - u64::MAX / LEFT_TO_OTHERS,
                by: RESERVE.into(),
            })
        );
    }

    /// Returns a `/proc` and cgroups in a folder.
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
        let status = ("proc/self/status", "VmSize:\t1024 kB\nVmData:\t 512 kB\n");
        let (root, _) = machine(&[GROUPED[0], status]);
        let read = |space, data| Machine::read(&root.path().join("proc"), space, data);
        const MIB: u64 = 1 << 20;
        let small = |threads| MemoryNeed {
            buffers: BufferNeed { count: 1, bytes: 4096, threads, lower: "" },
            arenas: 4 * MIB,
            targets: 8 * MIB,
        };
        // The program's own memory, and that of its threads, is needed whatever the pages are.
        let needs = |threads: u64| 12 * MIB + OWN + (threads + 1) * THREAD;
        for (threads, by, machine) in [
            (0, "RLIMIT_AS", read(Some(needs(0) + MIB), None)),
            (3, "RLIMIT_DATA", read(None, Some(needs(3) + MIB / 2))),
        ] {
            for memory in [Memory::Plain, Memory::Hugetlb2m] {
                assert_eq!(compare_mapped(small(threads), memory, &machine), Ok(()));
                let refused = compare_mapped(small(threads + 1), memory, &machine);
                let words = refused.unwrap_err().to_string();
                let parts = [by, "of its own", "free memory, or raise what allows no more"];
                assert!(parts.iter().all(|part| words.contains(part)), "{words}");
            }
        }
        // The commit limit is not for hugepages.
        let commit = |left| Machine {
            available: Some(GIB),
            allowed: None,
            mapped: vec![MapLimit { setting: MapSetting::Commit, left, limit: GIB }],
        };
        let short = commit(needs(0) - 1);
        assert_eq!(compare_mapped(small(0), Memory::Hugetlb2m, &short), Ok(()));
        let words = compare_mapped(small(0), Memory::Plain, &short).unwrap_err().to_string();
        assert!(words.contains("vm.overcommit_memory is 2"), "{words}");
        assert_eq!(compare_mapped(small(0), Memory::Plain, &commit(needs(0))), Ok(()));
        let none = commit(0);
        assert!(compare_mapped(small(0), Memory::Hugetlb2m, &none).is_err());
    }
}
