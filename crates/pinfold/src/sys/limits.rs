//! The limit of locked memory.

use super::region::Region;
use super::{files, process};
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use std::fmt;
use std::path::Path;

/// `RLIMIT_MEMLOCK` and what counts against it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemlockLimit {
    /// The soft limit in bytes; `None`: unlimited.
    pub soft: Option<u64>,
    /// The hard limit in bytes, up to which the process may raise the soft one; `None`: unlimited.
    pub hard: Option<u64>,
    /// Bytes that the process has locked (`VmLck`), if `/proc` is readable.
    pub used: Option<u64>,
    /// Whether the limit does not bind because the process has `CAP_IPC_LOCK` in the initial user
    /// namespace; that of a user namespace's own root lifts nothing.
    pub lifted: bool,
}

impl MemlockLimit {
    /// Reads the limit of this process (`getrlimit`, `capget`).
    pub fn here() -> Self {
        let limit = rustix::process::getrlimit(Resource::Memlock);
        Self {
            soft: limit.current,
            hard: limit.maximum,
            used: locked_bytes(),
            lifted: has_ipc_lock(),
        }
    }

    /// Returns how many more bytes may be locked; `None`: no limit.
    pub fn left(&self) -> Option<u64> {
        if self.lifted {
            return None;
        }
        self.soft.map(|soft| soft.saturating_sub(self.used.unwrap_or(0)))
    }

    /// Returns the soft limit, if it binds this process.
    pub fn binding(&self) -> Option<u64> {
        self.soft.filter(|_| !self.lifted)
    }

    /// Returns the shell command that raises the limit by `more` bytes of this process, to be run
    /// before the program: up to the hard limit as this user, beyond it as root. Where no program
    /// may raise the hard limit, it is what to do instead, in words.
    ///
    /// For memory that the kernel counts by process, as `mlock` and VFIO's type 1 do.
    pub fn raise_command(&self, more: u64) -> String {
        self.raise(more).unwrap_or_else(|words| words)
    }

    /// Like [`raise_command`](Self::raise_command), where the limit refused `more` bytes of memory
    /// that the kernel counts by user, as io_uring and AF_XDP do: the use of the user's other
    /// processes is unknown, and at most the limit.
    pub fn raise_command_for_user(&self, more: u64) -> String {
        self.raise_for_user(more).unwrap_or_else(|words| words)
    }

    /// Like [`raise_command_for_user`](Self::raise_command_for_user).
    ///
    /// # Errors
    /// Instructions, in words, if no command raises it.
    pub fn raise_for_user(&self, more: u64) -> Result<String, String> {
        raise(("l", 1024, "memlock"), self.soft.unwrap_or(0).saturating_add(more), self.hard)
    }

    /// Like [`raise_command`](Self::raise_command): a command, or words.
    pub(crate) fn raise(&self, more: u64) -> Result<String, String> {
        let used = self.used.unwrap_or(0);
        let needed = self.soft.map_or(used.saturating_add(more), |soft| raised(soft, used, more));
        raise(("l", 1024, "memlock"), needed, self.hard)
    }
}

/// Returns the command that raises a limit, by its option of `ulimit`, the unit of that, and its
/// name: up to the hard limit as this user, beyond it as root, or else what to do in words.
pub(super) fn raise(
    (option, unit, name): (&str, u64, &str),
    needed: u64,
    hard: Option<u64>,
) -> Result<String, String> {
    match hard.is_none_or(|hard| needed <= hard) {
        true => Ok(format!("ulimit -{option} {}", needed.div_ceil(unit))),
        false => raise_hard(name, needed, may_raise_hard()),
    }
}

fn raise_hard(name: &str, needed: u64, may: bool) -> Result<String, String> {
    match may {
        true => Ok(format!("sudo prlimit --pid $$ --{name}={needed}:{needed}")),
        false => Err(format!(
            "raise the hard limit of {name} to {needed} where this container or service is started: no program in it may"
        )),
    }
}

/// Returns whether root can raise a hard limit from here: `CAP_SYS_RESOURCE` is in the bounding
/// set, and not that of a user namespace of its own.
fn may_raise_hard() -> bool {
    rustix::thread::capability_is_in_bounding_set(CapabilitySet::SYS_RESOURCE) != Ok(false)
        && process::in_initial_user()
}

impl fmt::Display for MemlockLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: Option<u64>| {
            bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
        };
        write!(f, "RLIMIT_MEMLOCK: soft {}, hard {}", bytes(self.soft), bytes(self.hard))?;
        if let Some(used) = self.used {
            write!(f, ", {used} used by this process")?;
        }
        if self.lifted { f.write_str("; lifted by CAP_IPC_LOCK") } else { Ok(()) }
    }
}

/// `RLIMIT_MEMLOCK` refused memory that the kernel counts by user: all processes of the user share
/// the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemlockRefusal {
    /// Bytes that were refused.
    pub requested: u64,
    /// The limit in bytes.
    pub limit: u64,
}

impl fmt::Display for MemlockRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requested, limit } = self;
        write!(
            f,
            "{requested} bytes more exceed RLIMIT_MEMLOCK, which is {limit} bytes for all processes of this user together"
        )
    }
}

/// Returns the limit that allows `more` bytes beside `used`. Where `limit` seems to suffice and
/// refused them, memory of the user's other processes counts, which is not known and at most
/// `limit`.
fn raised(limit: u64, used: u64, more: u64) -> u64 {
    let needed = used.saturating_add(more);
    if needed > limit { needed } else { limit.saturating_add(more) }
}

/// Returns whether the thread has `CAP_IPC_LOCK` where the kernel looks for it: in the initial user
/// namespace.
pub(crate) fn has_ipc_lock() -> bool {
    let has =
        |sets: rustix::thread::CapabilitySets| sets.effective.contains(CapabilitySet::IPC_LOCK);
    rustix::thread::capabilities(None).is_ok_and(has) && process::in_initial_user()
}

/// `RLIMIT_NOFILE`, and how many descriptors are open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenFiles {
    /// The soft limit; `None`: unlimited.
    pub soft: Option<u64>,
    /// The hard limit, up to which the process may raise the soft one; `None`: unlimited.
    pub hard: Option<u64>,
    /// The number that is open, if `/proc` shows it.
    pub open: Option<u64>,
}

impl OpenFiles {
    /// Reads those of this process.
    pub fn here() -> Self {
        let limit = rustix::process::getrlimit(Resource::Nofile);
        // The listing itself has one open.
        let open = std::fs::read_dir("/proc/self/fd")
            .ok()
            .map(|all| (all.count() as u64).saturating_sub(1));
        Self { soft: limit.current, hard: limit.maximum, open }
    }

    /// Returns how many more may be opened; `None`: no limit.
    pub fn left(&self) -> Option<u64> {
        self.soft.map(|soft| soft.saturating_sub(self.open.unwrap_or(0)))
    }

    /// Returns the shell command that raises the limit to `files`, to be run before the program.
    ///
    /// # Errors
    /// Instructions, in words, if no command raises it.
    pub fn raise(&self, files: u64) -> Result<String, String> {
        raise(("n", 1, "nofile"), files, self.hard)
    }
}

/// A file that `RLIMIT_FSIZE` refuses. The kernel reports it by `SIGXFSZ`, which ends a process
/// that does not expect it: so a caller that extends a file checks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a file of {requested} bytes exceeds RLIMIT_FSIZE, which is {limit} bytes: {}", self.raise())]
pub struct FileLimit {
    /// The length that was requested, in bytes.
    pub requested: u64,
    /// The limit in bytes.
    pub limit: u64,
}

impl FileLimit {
    /// Returns the refusal, if the limit of this process refuses a file of `bytes` bytes.
    pub fn refusing(bytes: u64) -> Option<Self> {
        let limit = rustix::process::getrlimit(Resource::Fsize).current?;
        (bytes > limit).then_some(Self { requested: bytes, limit })
    }

    /// Returns the shell command that raises the limit, or what to do in words.
    fn raise(&self) -> String {
        let hard = rustix::process::getrlimit(Resource::Fsize).maximum;
        raise(("f", 1024, "fsize"), self.requested, hard).unwrap_or_else(|words| words)
    }
}

/// The machine's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemMemory {
    /// Bytes of memory.
    pub total: u64,
    /// Bytes that can be allocated without swapping.
    pub available: u64,
    /// Why `available` does not count page cache, which the kernel would reclaim: `/proc/meminfo`
    /// cannot be read.
    pub without_cache: Option<String>,
}

impl SystemMemory {
    /// Reads `meminfo` below `proc`, or else `sysinfo(2)`, which knows free memory only.
    pub fn read(proc: &Path) -> Self {
        let path = proc.join("meminfo");
        let file = files::all(&path);
        let field =
            |key: &str| files::field_kib(file.as_deref().unwrap_or_default().as_bytes(), key);
        if let (Some(total), Some(available)) = (field("MemTotal"), field("MemAvailable")) {
            return Self { total, available, without_cache: None };
        }
        let why = file.as_ref().map_or_else(ToString::to_string, |_| "no MemAvailable".to_owned());
        let known = rustix::system::sysinfo();
        let unit = u64::from(known.mem_unit.max(1));
        Self {
            total: known.totalram.saturating_mul(unit),
            available: known.freeram.saturating_add(known.bufferram).saturating_mul(unit),
            without_cache: Some(format!("{}: {why}", path.display())),
        }
    }
}

/// The setting that limits the memory that a process maps, whether it is used or not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MapSetting {
    /// `RLIMIT_AS`, of all that it maps.
    AddressSpace,
    /// `RLIMIT_DATA`, of all that it maps privately and may write (Linux 4.7).
    Data,
    /// `vm.overcommit_memory` is 2: the kernel promises no process more memory than there is.
    /// Hugetlb pages do not count.
    Commit,
}

impl fmt::Display for MapSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AddressSpace => "RLIMIT_AS (`ulimit -v`)",
            Self::Data => "RLIMIT_DATA (`ulimit -d`)",
            Self::Commit => "the commit limit (vm.overcommit_memory is 2)",
        })
    }
}

/// A limit on what a process maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapLimit {
    /// The setting.
    pub setting: MapSetting,
    /// The number of further bytes that it allows.
    pub left: u64,
    /// The limit.
    pub limit: u64,
}

/// Allowance for allocations of other threads while a limit is probed: a few times the allocator's
/// request size.
const MEANWHILE: u64 = 4 << 20;

impl MapLimit {
    /// Reads those that are set for this process.
    pub fn here() -> Vec<Self> {
        let limit = |resource| rustix::process::getrlimit(resource).current;
        Self::read(Path::new("/proc"), limit(Resource::As), limit(Resource::Data))
    }

    /// Reads the use of the given limits, and the commit limit, below `proc`.
    pub fn read(proc: &Path, address_space: Option<u64>, data: Option<u64>) -> Vec<Self> {
        let status = std::fs::read(proc.join("self/status")).unwrap_or_default();
        let of_process = |setting, limit: Option<u64>, key| {
            let used = files::field_kib(&status, key).unwrap_or(0);
            Some(Self { setting, left: limit?.saturating_sub(used), limit: limit? })
        };
        let all = [
            of_process(MapSetting::AddressSpace, address_space, "VmSize"),
            of_process(MapSetting::Data, data, "VmData"),
            commit(proc),
        ];
        all.into_iter().flatten().collect()
    }

    /// Returns whether the limits allow this process `bytes` more of private memory at the moment.
    ///
    /// They are tried, by mapping as much, unless that would leave too little to an allocation of
    /// another thread meanwhile: then what `/proc` says decides. Without `/proc` it is unknown what
    /// counts, and they are tried.
    pub fn allow(bytes: u64) -> bool {
        let limited =
            [Resource::As, Resource::Data].map(|of| rustix::process::getrlimit(of).current);
        if limited != [None; 2] {
            let left = Self::here().iter().map(|limit| limit.left).min().unwrap_or(u64::MAX);
            if left < bytes.saturating_add(MEANWHILE) {
                return left >= bytes;
            }
        }
        let page = rustix::param::page_size();
        Region::anonymous(super::errno::bytes(bytes), page).is_ok()
    }

    /// Returns the one of this process that refuses `bytes` more, if one does; `hugetlb`: of pages
    /// of the hugetlb pool.
    pub(crate) fn refusing(bytes: u64, hugetlb: bool) -> Option<Self> {
        let counts = |limit: &Self| !hugetlb || limit.setting != MapSetting::Commit;
        Self::here().into_iter().find(|limit| limit.left < bytes && counts(limit))
    }

    /// Returns the shell command after which `more` bytes fit.
    ///
    /// # Errors
    /// Instructions, in words, if no program may raise it.
    pub fn raise(&self, more: u64) -> Result<String, String> {
        let needed = self.limit.saturating_add(more.saturating_sub(self.left));
        let hard = |resource| rustix::process::getrlimit(resource).maximum;
        match self.setting {
            MapSetting::AddressSpace => raise(("v", 1024, "as"), needed, hard(Resource::As)),
            MapSetting::Data => raise(("d", 1024, "data"), needed, hard(Resource::Data)),
            // Swap is added to what is set.
            MapSetting::Commit => {
                let meminfo = std::fs::read("/proc/meminfo").unwrap_or_default();
                let swap = files::field_kib(&meminfo, "SwapTotal").unwrap_or(0);
                let kib = needed.saturating_sub(swap).div_ceil(1024);
                Ok(format!("sudo sysctl vm.overcommit_kbytes={kib}"))
            }
        }
    }
}

fn commit(proc: &Path) -> Option<MapLimit> {
    (files::number(&proc.join("sys/vm/overcommit_memory"))? == 2).then_some(())?;
    let meminfo = std::fs::read(proc.join("meminfo")).ok()?;
    let limit = files::field_kib(&meminfo, "CommitLimit")?;
    let used = files::field_kib(&meminfo, "Committed_AS")?;
    // Kept for root, who may take it.
    let kept = files::number(&proc.join("sys/vm/admin_reserve_kbytes")).unwrap_or(8192);
    let left = limit.saturating_sub(used).saturating_sub(kept.saturating_mul(1024));
    Some(MapLimit { setting: MapSetting::Commit, left, limit })
}

/// Reads `VmLck` of `/proc/self/status`, in bytes.
fn locked_bytes() -> Option<u64> {
    let status = std::fs::read("/proc/self/status").ok()?;
    files::field_kib(&status, "VmLck")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_what_is_mapped_are_read_with_what_is_left() {
        let proc = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = proc.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("self/status", "VmSize:\t1000 kB\nVmData:\t 200 kB\n");
        write("meminfo", "CommitLimit: 90000 kB\nCommitted_AS: 50000 kB\n");
        let read = |space, data| MapLimit::read(proc.path(), space, data);
        assert_eq!(read(None, None), []);
        write("sys/vm/overcommit_memory", "1\n");
        assert_eq!(read(None, None), [], "it promises everything");
        write("sys/vm/overcommit_memory", "2\n");
        let found = read(Some(2_048_000), Some(204_800));
        let left: Vec<_> = found.iter().map(|limit| (limit.setting, limit.left)).collect();
        assert_eq!(
            left,
            [
                (MapSetting::AddressSpace, 1_024_000),
                (MapSetting::Data, 0),
                (MapSetting::Commit, (40_000 - 8192) * 1024)
            ]
        );
        write("sys/vm/admin_reserve_kbytes", "0\n");
        assert_eq!(read(None, None)[0].left, 40_000 * 1024);
        let command = found[2].raise(found[2].left + 4096).unwrap();
        assert!(command.starts_with("sudo sysctl vm.overcommit_kbytes="), "{command}");
    }

    #[test]
    fn what_is_allowed_is_tried() {
        assert!(MapLimit::allow(1 << 20));
        assert!(!MapLimit::allow(1 << 60) && !MapLimit::allow(u64::MAX));
    }

    #[test]
    fn a_limit_is_raised_by_who_may() {
        let limit =
            |hard| MemlockLimit { soft: Some(8 << 20), hard, used: Some(4096), lifted: false };
        assert_eq!(limit(Some(64 << 20)).raise(16 << 20).unwrap(), "ulimit -l 16388");
        assert_eq!(limit(None).raise(64 << 20).unwrap(), "ulimit -l 65540");
        assert_eq!(limit(Some(64 << 20)).raise(64 << 20).is_ok(), may_raise_hard());
        assert_eq!(raise_hard("memlock", 5, true).unwrap(), "sudo prlimit --pid $$ --memlock=5:5");
        assert!(raise_hard("memlock", 5, false).unwrap_err().contains("memlock to 5"));
        // It would suffice for this process: the rest is in use by others.
        assert_eq!(limit(None).raise(1 << 20).unwrap(), "ulimit -l 9216");
        // The user's other processes may have all of it.
        assert_eq!(limit(None).raise_for_user(64 << 20).unwrap(), "ulimit -l 73728");
    }
}
