//! Features that the running kernel lacks: modules, and why it creates no io_uring for this
//! process.

use super::errno::Errno;
use super::limits::{MapLimit, MemlockLimit, MemlockRefusal};
use super::process::has_seccomp_filter;
use super::release::{parse_release, release};
use super::ring_memory::{Shortage, ring_bytes};
use super::{files, process};
use rustix::thread::CapabilitySet;
use std::fmt;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Whether a module can be loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Module {
    /// It is loaded or built in.
    Loaded,
    /// It is installed.
    Installed,
    /// It is not installed for this kernel.
    NotInstalled,
    /// The list of installed modules cannot be read.
    Unknown,
}

/// Looks a module up: `sys` is where sysfs is mounted, `folder` is `/lib/modules`.
pub(crate) fn module(sys: &Path, folder: &Path, name: &str) -> Module {
    if sys.join("module").join(name.replace('-', "_")).is_dir() {
        return Module::Loaded;
    }
    // `kernel/drivers/vfio/pci/vfio-pci.ko.zst: ...`
    match files::all(&folder.join(release()).join("modules.dep")) {
        Ok(list) if list.lines().any(|line| line.contains(&format!("/{name}.ko"))) => {
            Module::Installed
        }
        Ok(_) => Module::NotInstalled,
        Err(_) => Module::Unknown,
    }
}

impl Module {
    /// Returns the command that loads it if that can work, else why not, in words.
    pub(crate) fn advice(self, name: &str) -> Result<String, String> {
        match self {
            Self::Installed => Ok(format!("sudo modprobe {name}")),
            Self::Loaded => {
                Err(format!("the module {name} is loaded: a container needs its nodes (--device)"))
            }
            Self::NotInstalled => {
                Err(format!("the module {name} is not installed for this kernel"))
            }
            Self::Unknown => Err(format!(
                "/lib/modules has nothing for this kernel: in a container, load {name} on the host"
            )),
        }
    }
}

/// Returns what makes a missing module available on this machine, for an error.
pub(crate) fn load(name: &str) -> String {
    match module(Path::new("/sys"), Path::new("/lib/modules"), name).advice(name) {
        Ok(command) => format!("`{command}`"),
        Err(why) => why,
    }
}

/// Why the kernel refuses io_uring to this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RingRefusal {
    /// Its error.
    pub errno: Errno,
    /// The cause, as far as it could be established.
    pub cause: RingRefusalCause,
}

/// The setting or filter that refuses io_uring to this process.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RingRefusalCause {
    /// `kernel.io_uring_disabled` has this value, 1 or 2.
    Sysctl(u64),
    /// The kernel allows it, so a filter refuses it: `seccomp` if the process has such a filter,
    /// else a security module.
    Filter {
        /// Whether the process has a seccomp filter.
        seccomp: bool,
    },
    /// `kernel.io_uring_disabled` cannot be read, so the value or a filter may be the cause.
    Unreadable {
        /// Whether the process has a seccomp filter.
        seccomp: bool,
    },
    /// The running kernel is older than the first one that has it.
    Old {
        /// Its release.
        release: String,
        /// The first one.
        needed: (u32, u32),
    },
    /// The kernel was built without it.
    NotBuilt,
    /// `RLIMIT_MEMLOCK`, to which this kernel charges rings.
    LockedMemory(MemlockRefusal),
    /// The kernel creates the ring, and does not map it into this process.
    NotMapped {
        /// Bytes to be mapped.
        requested: u64,
        /// The limit that refuses them, if it is one of what the process may map.
        limit: Option<MapLimit>,
    },
    /// The kernel has no memory for it.
    NoMemory {
        /// Its number of entries.
        depth: u32,
        /// Its size in bytes.
        requested: u64,
        /// Whether the kernel has the memory for a ring of one entry.
        smaller: bool,
    },
    /// Another error.
    Other,
}

impl RingRefusal {
    /// Establishes why the kernel answered `errno` to a call that it has since Linux `needed`, for
    /// a ring of this depth that `more` bytes of locked memory are to follow.
    pub(crate) fn of(errno: Errno, needed: (u32, u32), depth: u32, more: u64) -> Self {
        let shortage = (errno.raw() == libc::ENOMEM).then(|| Shortage::of(depth, more)).flatten();
        if let Some(shortage) = shortage {
            let requested = ring_bytes(depth);
            let cause = match shortage {
                Shortage::Locked(refused) => RingRefusalCause::LockedMemory(refused),
                Shortage::NotMapped(limit) => RingRefusalCause::NotMapped { requested, limit },
                Shortage::Kernel { smaller } => {
                    RingRefusalCause::NoMemory { depth, requested, smaller }
                }
            };
            return Self { errno, cause };
        }
        let capable = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
            && process::in_initial_user();
        let seccomp = has_seccomp_filter();
        let cause = cause(Path::new("/proc"), errno, needed, &release(), capable, seccomp);
        Self { errno, cause }
    }

    /// Returns the command that changes what refused, if a command can.
    pub fn fix(&self) -> Option<String> {
        self.advice()?.ok()
    }

    /// Returns the command, or what to do in words.
    pub(crate) fn advice(&self) -> Option<Result<String, String>> {
        match self.cause {
            RingRefusalCause::Sysctl(_) => {
                Some(Ok("sudo sysctl kernel.io_uring_disabled=0".to_owned()))
            }
            RingRefusalCause::LockedMemory(refused) => {
                Some(MemlockLimit::here().raise_for_user(refused.requested))
            }
            RingRefusalCause::NotMapped { requested, limit: Some(limit) } => {
                Some(limit.raise(requested))
            }
            _ => None,
        }
    }
}

impl RingRefusal {
    /// Formats the cause, with the command that fixes it, or what to do in words.
    pub(crate) fn with_fix(&self) -> String {
        self.placed_fix().map_or_else(|| self.to_string(), |fix| format!("{self}; fix: {fix}"))
    }

    /// Returns the command, with the place where it works if that is not here, or what to do in
    /// words.
    pub(crate) fn placed_fix(&self) -> Option<String> {
        Some(self.advice()?.map_or_else(|words| words, |command| process::placed(&command)))
    }
}

fn cause(
    proc: &Path,
    errno: Errno,
    needed: (u32, u32),
    release: &str,
    capable: bool,
    seccomp: bool,
) -> RingRefusalCause {
    let version = parse_release(release);
    if version.is_some_and(|version| version < needed) {
        return RingRefusalCause::Old { release: release.to_owned(), needed };
    }
    let folder = proc.join("sys/kernel");
    let disabled = files::number(&folder.join("io_uring_disabled"));
    match (errno.raw(), disabled) {
        (libc::EPERM | libc::EACCES, Some(value @ 2..)) => RingRefusalCause::Sysctl(value),
        // 1: allowed with CAP_SYS_ADMIN, and to the members of a group.
        (libc::EPERM | libc::EACCES, Some(1)) if !capable && !in_group(&folder) => {
            RingRefusalCause::Sysctl(1)
        }
        // The switch is as old as Linux 6.6; a kernel that has it has io_uring.
        (libc::EPERM | libc::EACCES | libc::ENOSYS, Some(_)) => {
            RingRefusalCause::Filter { seccomp }
        }
        (libc::ENOSYS, None) if folder.is_dir() && version >= Some((6, 6)) => {
            RingRefusalCause::NotBuilt
        }
        (libc::ENOSYS, None) if folder.is_dir() && !seccomp => RingRefusalCause::NotBuilt,
        (libc::EPERM | libc::EACCES, None) if folder.is_dir() && version < Some((6, 6)) => {
            RingRefusalCause::Filter { seccomp }
        }
        (libc::EPERM | libc::EACCES | libc::ENOSYS, None) => {
            RingRefusalCause::Unreadable { seccomp }
        }
        _ => RingRefusalCause::Other,
    }
}

/// Returns whether the process is in the group of `kernel.io_uring_group`.
fn in_group(folder: &Path) -> bool {
    let Some(group) = files::number(&folder.join("io_uring_group")) else { return false };
    let groups = rustix::process::getgroups().unwrap_or_default();
    let own = groups.into_iter().chain([rustix::process::getegid()]);
    own.into_iter().any(|own| u64::from(own.as_raw()) == group)
}

impl fmt::Display for RingRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { errno, cause } = self;
        let profile = |seccomp: &bool| match seccomp {
            true => "a seccomp filter of this process (in a container, of its seccomp profile)",
            false => "a filter or a security module",
        };
        match cause {
            RingRefusalCause::Sysctl(value) => {
                write!(f, "kernel.io_uring_disabled is {value} ({errno})")
            }
            RingRefusalCause::Filter { seccomp } => {
                write!(f, "the kernel allows it, and {} refuses it ({errno})", profile(seccomp))
            }
            RingRefusalCause::Unreadable { seccomp } => write!(
                f,
                "{} refuses it, or kernel.io_uring_disabled, which cannot be read here ({errno})",
                profile(seccomp)
            ),
            RingRefusalCause::Old { release, needed: (major, minor) } => {
                write!(f, "it needs Linux {major}.{minor}, and this is {release} ({errno})")
            }
            RingRefusalCause::NotBuilt => write!(f, "this kernel was built without it ({errno})"),
            RingRefusalCause::LockedMemory(refused) => write!(f, "{refused} ({errno})"),
            RingRefusalCause::NotMapped { requested, limit: Some(limit) } => write!(
                f,
                "{requested} bytes more exceed {}, of which {} are left ({errno})",
                limit.setting, limit.left
            ),
            RingRefusalCause::NotMapped { requested, limit: None } => write!(
                f,
                "the kernel creates it and does not map its {requested} bytes ({errno}): this process has as many mappings \
                 as vm.max_map_count allows, or memory was short for a moment; try again"
            ),
            RingRefusalCause::NoMemory { depth, requested, smaller: true } => write!(
                f,
                "the kernel has no memory for a ring of {depth} entries ({requested} bytes, large parts of them in one \
                 piece), and has it for a smaller one ({errno}): use a lower queue depth, or free memory, and compact it \
                 (`sudo sysctl vm.compact_memory=1`)"
            ),
            RingRefusalCause::NoMemory { smaller: false, .. } => write!(
                f,
                "the kernel has no memory even for the smallest ring ({errno}): free memory of the machine, or of the \
                 control group if that has a limit"
            ),
            RingRefusalCause::Other => match errno.raw() {
                libc::EMFILE | libc::ENFILE => write!(f, "{errno}: raise `ulimit -n`"),
                _ => write!(f, "{errno}"),
            },
        }
    }
}

// System calls that are made only to find out whether they work.

/// Reads the frame of a page that is certainly present from `/proc/self/pagemap`; `EPERM` if it is
/// hidden. Since Linux 2.6.25; the frame number reads as 0 without `CAP_SYS_ADMIN` since 4.2.
pub(crate) fn pagemap() -> Result<(), Errno> {
    let here = 1u8;
    let page = std::ptr::from_ref(&here).addr() as u64 / rustix::param::page_size() as u64;
    let entry = || -> std::io::Result<u64> {
        let mut pagemap = std::fs::File::open("/proc/self/pagemap")?;
        pagemap.seek(SeekFrom::Start(page.saturating_mul(8)))?;
        let mut bytes = [0; 8];
        pagemap.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    const FRAME: u64 = (1 << 55) - 1;
    match entry() {
        Ok(entry) if entry & FRAME != 0 => Ok(()),
        Ok(_) => Err(Errno::new(libc::EPERM)),
        Err(error) => Err(Errno::from(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installed_module_is_to_be_loaded() {
        let top = tempfile::tempdir().unwrap();
        let (sys, folder) = (top.path().join("sys"), top.path().join("modules"));
        let advice = || module(&sys, &folder, "vfio-pci").advice("vfio-pci");
        assert!(advice().unwrap_err().contains("nothing for this kernel"));
        let list = folder.join(release()).join("modules.dep");
        std::fs::create_dir_all(list.parent().unwrap()).unwrap();
        std::fs::write(&list, "kernel/drivers/vfio/vfio.ko:\n").unwrap();
        assert!(advice().unwrap_err().contains("not installed"));
        std::fs::write(
            &list,
            "kernel/drivers/vfio/pci/vfio-pci.ko.zst: kernel/drivers/vfio/vfio.ko\n",
        )
        .unwrap();
        assert_eq!(advice().unwrap(), "sudo modprobe vfio-pci");
        std::fs::create_dir_all(sys.join("module/vfio_pci")).unwrap();
        assert!(advice().unwrap_err().contains("--device"));
    }

    /// Returns the reason of a refusal, with `kernel.io_uring_disabled` of this value; `None`: the
    /// file does not exist.
    fn with(
        value: Option<&str>,
        errno: i32,
        release: &str,
        capable: bool,
        seccomp: bool,
    ) -> RingRefusal {
        let proc = tempfile::tempdir().unwrap();
        let folder = proc.path().join("sys/kernel");
        std::fs::create_dir_all(&folder).unwrap();
        if let Some(value) = value {
            std::fs::write(folder.join("io_uring_disabled"), value).unwrap();
        }
        let errno = Errno::new(errno);
        RingRefusal { errno, cause: cause(proc.path(), errno, (5, 6), release, capable, seccomp) }
    }

    #[test]
    fn the_switch_is_named_only_if_it_refuses() {
        use RingRefusalCause::{Filter, NotBuilt, Old, Other, Sysctl};
        let (perm, nosys) = (libc::EPERM, libc::ENOSYS);
        let new = "6.18.44";
        for (value, errno, release, capable, seccomp, cause) in [
            (Some("2"), perm, new, true, false, Sysctl(2)),
            (Some("1"), perm, new, false, true, Sysctl(1)),
            (Some("1"), perm, new, true, true, Filter { seccomp: true }),
            (Some("0"), perm, new, false, true, Filter { seccomp: true }),
            (Some("0"), perm, new, false, false, Filter { seccomp: false }),
            (Some("0"), nosys, new, false, true, Filter { seccomp: true }),
            (None, nosys, new, false, true, NotBuilt),
            (None, nosys, "5.15.0", false, true, RingRefusalCause::Unreadable { seccomp: true }),
            (None, nosys, "5.15.0", false, false, NotBuilt),
            (None, perm, "5.15.0", false, true, Filter { seccomp: true }),
            (None, nosys, "4.19.0", false, true, Old { release: "4.19.0".into(), needed: (5, 6) }),
            (Some("0"), libc::EMFILE, new, false, false, Other),
        ] {
            let refusal = with(value, errno, release, capable, seccomp);
            assert_eq!(refusal.cause, cause, "{value:?} {errno} {release}");
            assert_eq!(refusal.fix().is_some(), matches!(cause, Sysctl(_)));
            let says = refusal.to_string();
            assert_eq!(says.contains("needs Linux"), release == "4.19.0", "{says}");
        }
        // Without /proc the switch is not known to be absent.
        let hidden = cause(Path::new("/none"), Errno::new(perm), (5, 6), new, false, false);
        assert_eq!(hidden, RingRefusalCause::Unreadable { seccomp: false });
    }
}
