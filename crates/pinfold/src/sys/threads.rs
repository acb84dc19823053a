//! The limits on the number of threads, and the one that refuses another thread.

use super::control_group::{self, GroupLimit};
use super::limits::{self, MapLimit};
use super::{files, process};
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use std::path::Path;

/// The stack that the standard library maps for a thread.
const STACK: u64 = 2 << 20;

/// The limits on the number of threads: each with the present number, as far as that can be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadLimit {
    name: String,
    limit: u64,
    used: Option<u64>,
    setting: Setting,
}

/// The setting that raises a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Setting {
    Group(GroupLimit),
    /// The hard limit.
    User(Option<u64>),
    Sysctl(&'static str),
}

type Limit = ThreadLimit;

impl ThreadLimit {
    /// Reads those of this process.
    pub(crate) fn here() -> Vec<Self> {
        all(Path::new("/proc"))
    }

    /// Returns how many more threads it allows, as far as is known.
    pub(crate) fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used.unwrap_or(0))
    }

    /// Returns the shell command after which `more` threads fit, or what to do in words.
    pub(crate) fn raise(&self, more: u64) -> Result<String, String> {
        let needed = self.used.unwrap_or(self.limit).saturating_add(more);
        match &self.setting {
            Setting::Group(group) => {
                Ok(control_group::raise_command(std::slice::from_ref(group), more))
            }
            Setting::User(hard) => limits::raise(("u", 1, "nproc"), needed, *hard),
            Setting::Sysctl(name) => Ok(format!("sudo sysctl {name}={needed}")),
        }
    }

    fn refuses(&self) -> bool {
        self.used.is_some_and(|used| used >= self.limit)
    }

    pub(crate) fn text(&self) -> String {
        let Self { name, limit, used, .. } = self;
        used.map_or_else(
            || format!("{name} is {limit}"),
            |used| format!("{name} is {limit}, {used} in use"),
        )
    }
}

/// Describes why a thread could not be started, to be called before others end: the error, and for
/// that of a limit the one that refuses, or the values of all that may have if none does now.
pub fn refusal(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOMEM) => format!("{error}: {}", cause(Path::new("/proc"))),
        _ => error.to_string(),
    }
}

fn cause(proc: &Path) -> String {
    // A stack that cannot be mapped is reported in the same way.
    if let Some(MapLimit { setting, left, limit }) = MapLimit::refusing(STACK, false) {
        return format!(
            "{setting} of {limit} bytes leaves {left} for its stack of {STACK}; raise it"
        );
    }
    let limits = all(proc);
    let refusing: Vec<_> = limits.iter().filter(|limit| limit.refuses()).map(Limit::text).collect();
    match (refusing.is_empty(), limits.is_empty()) {
        (false, _) => format!("{}; raise it", refusing.join("; ")),
        (true, false) => {
            let values: Vec<_> = limits.iter().map(Limit::text).collect();
            format!("no limit is known to refuse it now: {}", values.join("; "))
        }
        (true, true) => "no limit of threads can be read here".to_owned(),
    }
}

fn all(proc: &Path) -> Vec<Limit> {
    let groups = control_group::threads(proc).limits.into_iter().map(|group| Limit {
        name: group.file.display().to_string(),
        limit: group.limit,
        used: Some(group.used),
        setting: Setting::Group(group),
    });
    let user = of_user().map(|(limit, hard)| Limit {
        name: "RLIMIT_NPROC (`ulimit -u`) for all processes of this user".to_owned(),
        limit,
        used: threads_of_user(proc),
        setting: Setting::User(hard),
    });
    // `0.52 0.58 0.59 2/345 6789`: runnable threads, and all of them.
    let loads = files::word(&proc.join("loadavg")).unwrap_or_default();
    let total =
        loads.split_whitespace().nth(3).and_then(|both| both.split_once('/')?.1.parse().ok());
    let of_machine = |(file, name): (&str, &'static str)| {
        let limit = files::number(&proc.join("sys/kernel").join(file))?;
        Some(Limit { name: name.to_owned(), limit, used: total, setting: Setting::Sysctl(name) })
    };
    let machine =
        [("threads-max", "kernel.threads-max"), ("pid_max", "kernel.pid_max")].map(of_machine);
    groups.chain(user).chain(machine.into_iter().flatten()).collect()
}

/// Returns `RLIMIT_NPROC`, if it binds: not root, and not with CAP_SYS_RESOURCE or CAP_SYS_ADMIN,
/// all of the initial user namespace.
fn of_user() -> Option<(u64, Option<u64>)> {
    let both = rustix::process::getrlimit(Resource::Nproc);
    let limit = both.current?;
    let lifting = CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN;
    let lifted =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.intersects(lifting));
    let exempt = process::in_initial_user() && (rustix::process::getuid().is_root() || lifted);
    (!exempt).then_some((limit, both.maximum))
}

/// Returns how many threads of this process's user are visible in `proc`; there may be others, in
/// other namespaces.
fn threads_of_user(proc: &Path) -> Option<u64> {
    let user = rustix::process::getuid().as_raw().to_string();
    let of_process = |name: String| {
        let status = files::all(&proc.join(name).join("status")).ok()?;
        let field = |key: &str| {
            status.lines().find_map(|line| line.strip_prefix(key)?.split_whitespace().next())
        };
        field("Uid:").filter(|real| *real == user)?;
        field("Threads:")?.parse::<u64>().ok()
    };
    let processes =
        files::names(proc).into_iter().filter(|name| name.bytes().all(|c| c.is_ascii_digit()));
    let threads: u64 = processes.filter_map(of_process).sum();
    (threads > 0).then_some(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_that_refuses_is_named_or_all_values() {
        let limit = |name: &str, limit, used| {
            let setting = Setting::Sysctl("kernel.threads-max");
            Limit { name: name.into(), limit, used, setting }
        };
        assert!(limit("a", 5, Some(5)).refuses() && !limit("a", 5, Some(4)).refuses());
        assert!(!limit("a", 5, None).refuses(), "not known");
        let machine = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = machine.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("sys/kernel/threads-max", "346\n");
        write("loadavg", "0.52 0.58 0.59 2/345 6789\n");
        let text = cause(machine.path());
        assert!(
            text.starts_with("no limit is known")
                && text.contains("threads-max is 346, 345 in use"),
            "{text}"
        );
        write("sys/kernel/threads-max", "345\n");
        assert_eq!(cause(machine.path()), "kernel.threads-max is 345, 345 in use; raise it");
        write("sys/kernel/threads-max", "1000\n");
        write("sys/kernel/pid_max", "345\n");
        assert_eq!(cause(machine.path()), "kernel.pid_max is 345, 345 in use; raise it");
        let found = all(machine.path());
        let raised = found.iter().find(|limit| limit.left() == 0).unwrap().raise(64);
        assert_eq!(raised.unwrap(), "sudo sysctl kernel.pid_max=409");
        let other = std::io::Error::from_raw_os_error(libc::EINVAL);
        assert_eq!(refusal(&other), other.to_string());
    }
}
