//! This process: its processor time, the signals it waits for, its privileges and namespaces.

use super::errno::{Errno, last_errno};
use rustix::fs::{self, AtFlags};
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{fmt, io};

/// Processor time of the process: of its threads, and of the kernel's threads for its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTime {
    /// The time in user mode.
    pub user: Duration,
    /// The time in the kernel.
    pub system: Duration,
}

impl CpuTime {
    /// Returns the time used so far (`getrusage`).
    pub fn here() -> Self {
        Self::of(libc::RUSAGE_SELF)
    }

    /// Returns the time used so far by the processes that this one has started and waited for, and
    /// by those that they have waited for.
    pub fn of_children() -> Self {
        Self::of(libc::RUSAGE_CHILDREN)
    }

    fn of(whom: libc::c_int) -> Self {
        // SAFETY: a struct of integers, for which zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `rusage` there. The call cannot fail for either of the two.
        unsafe { libc::getrusage(whom, &raw mut usage) };
        let time = |time: libc::timeval| {
            let micros = u64::try_from(time.tv_usec).unwrap_or(0);
            Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
                + Duration::from_micros(micros)
        };
        Self { user: time(usage.ru_utime), system: time(usage.ru_stime) }
    }

    /// Returns the time used since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        let (user, system) =
            (self.user.saturating_sub(before.user), self.system.saturating_sub(before.system));
        Self { user, system }
    }
}

impl fmt::Display for CpuTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} s user, {:.2} s system",
            self.user.as_secs_f64(),
            self.system.as_secs_f64()
        )
    }
}

// Signals that one thread waits for, so that a thread blocked in the kernel cannot delay them.

/// Signals that are blocked in the thread that made this and in all threads it starts afterwards.
/// They stay pending until [`wait`](Self::wait) takes them.
///
/// A handler runs only when its thread returns from the kernel. A thread that waits for a file
/// system that does not respond sleeps killably: it returns for SIGKILL and runs no handler. A
/// thread that waits for the signals receives them whatever the others do.
#[derive(Clone, Copy)]
pub struct Signals {
    set: libc::sigset_t,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signals").finish_non_exhaustive()
    }
}

impl Signals {
    /// Blocks those of `signals` that the process does not ignore: one that was ignored when the
    /// program started (`nohup`, a job of a non-interactive shell) stays ignored. `sigaction`,
    /// `pthread_sigmask`: since the first Linux.
    ///
    /// # Errors
    /// EINVAL for a number that is not a signal.
    pub fn block(signals: &[i32]) -> Result<Self, Errno> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initializes the whole set.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: it was just initialized.
        let mut set = unsafe { set.assume_init() };
        for &signal in signals {
            if is_ignored(signal)? {
                continue;
            }
            // SAFETY: an initialized set; the number was found valid by `is_ignored`.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: an initialized set; the old mask is not asked for.
        match unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
        } {
            0 => Ok(Self { set }),
            errno => Err(Errno::new(errno)),
        }
    }

    /// Runs `start`, which starts a thread of a library, with all signals blocked, and then unblocks
    /// those that were not blocked before. The thread inherits the mask: a signal that the program
    /// takes by a signalfd, or in a thread of its own, never arrives in a thread that the program
    /// does not know.
    pub fn blocked_while<R>(start: impl FnOnce() -> R) -> R {
        struct Restore(libc::sigset_t);

        impl Drop for Restore {
            fn drop(&mut self) {
                let none = std::ptr::null_mut();
                // SAFETY: the mask that this thread had.
                unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, none) };
            }
        }

        // SAFETY: a struct of integers, for which zero is valid.
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        // SAFETY: it stores a set there.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: an initialized set, and a place for the mask of this thread. It cannot fail.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before) };
        let _restore = Restore(before);
        start()
    }

    /// Waits until one of the signals arrives, at most `limit` (a day if there is none); `None` if
    /// none did.
    pub fn wait(&self, limit: Option<Duration>) -> Option<i32> {
        let limit = limit.unwrap_or(Duration::from_secs(86_400));
        let timeout = libc::timespec {
            tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(limit.subsec_nanos().cast_signed()),
        };
        // SAFETY: an initialized set and a valid timeout; further information about the signal is
        // not requested.
        let signal = unsafe {
            libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const timeout)
        };
        (signal > 0).then_some(signal)
    }

    /// Makes a command that is started from a thread with blocked signals start with none blocked:
    /// it would inherit the mask, and only SIGKILL could end it.
    pub fn unblock_in(command: &mut Command) -> &mut Command {
        let unblock = || {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: `sigemptyset` initializes the whole set.
            unsafe { libc::sigemptyset(set.as_mut_ptr()) };
            // SAFETY: the set is initialized, and the old mask is not asked for.
            match unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
            } {
                0 => Ok(()),
                errno => Err(io::Error::from_raw_os_error(errno)),
            }
        };
        // SAFETY: between fork and exec it calls two functions that are async-signal-safe, and
        // allocates nothing.
        unsafe { command.pre_exec(unblock) }
    }
}

/// Returns whether the process ignores the signal.
fn is_ignored(signal: i32) -> Result<bool, Errno> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: no new action is set; the kernel writes the current one.
    if unsafe { libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: the call succeeded, so it was written.
    let now: libc::sigaction = unsafe { now.assume_init() };
    Ok(now.sa_sigaction == libc::SIG_IGN)
}

/// The privileges of the calling thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Privileges {
    /// The effective user.
    pub user: u32,
    /// Whether it is in the initial user namespace. Elsewhere capabilities apply to what the
    /// namespace owns, never to the machine's memory or limits.
    pub initial_user_namespace: bool,
    /// Whether a seccomp filter decides about its system calls.
    pub seccomp: bool,
}

impl Privileges {
    /// Reads those of the calling thread.
    pub fn here() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            initial_user_namespace: in_initial_user(),
            seccomp: has_seccomp_filter(),
        }
    }
}

/// Returns a word for a shell: itself, or in quotes where a shell would change it.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@%,".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

/// Returns how many page faults of the calling thread needed no transfer (`ru_minflt`; Linux
/// 2.6.26).
pub(crate) fn page_faults() -> i64 {
    // SAFETY: a struct of integers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage` there. The call cannot fail for `RUSAGE_THREAD`.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_minflt
}

/// Makes all threads started from now on allocate from one heap: glibc reserves 64 MiB of addresses
/// for each further one, which counts against `RLIMIT_AS`.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes numbers only; with a value that it does not accept it does nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
}

/// Returns whether a seccomp filter decides about the calling thread's system calls.
/// `PR_GET_SECCOMP`: since Linux 2.6.23.
pub(crate) fn has_seccomp_filter() -> bool {
    // SAFETY: the call takes numbers only and changes nothing.
    unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) == 2 }
}

/// Returns the command that changes the mode that keeps this user from the node; `None` if no mode
/// does: a control group of devices or a security module denies it then.
pub(crate) fn permit(node: &Path) -> Option<String> {
    let may = |path: &Path, wanted| {
        fs::accessat(fs::CWD, path, wanted, AtFlags::EACCESS) != Err(rustix::io::Errno::ACCESS)
    };
    let folders: Vec<&Path> = node.ancestors().skip(1).collect();
    if let Some(folder) = folders
        .into_iter()
        .rev()
        .find(|folder| folder.is_dir() && !may(folder, fs::Access::EXEC_OK))
    {
        return Some(format!("sudo chmod o+rx {}", shell_word(&folder.display().to_string())));
    }
    let wanted = fs::Access::READ_OK | fs::Access::WRITE_OK;
    let word = shell_word(&node.display().to_string());
    (!may(node, wanted)).then(|| format!("sudo chown $USER {word}"))
}

// Whether this process is in the namespaces that the kernel started with: elsewhere, root has no
// power over the machine, and the root of a tree is not the whole tree. And where a command works
// instead.

/// The inode numbers of the initial namespaces (`PROC_USER_INIT_INO`, `PROC_CGROUP_INIT_INO` of
/// `linux/nsfs.h`).
const USER: u64 = 0xeffffffd;
const CGROUP: u64 = 0xeffffffb;

/// Returns whether the process is in the initial namespace of this kind, `user` or `cgroup`; `None`
/// if `/proc` does not tell.
pub(crate) fn in_initial_namespace(proc: &Path, kind: &str) -> Option<bool> {
    let folder = proc.join("self/ns");
    let number = if kind == "user" { USER } else { CGROUP };
    match std::fs::read_link(folder.join(kind)) {
        Ok(link) => Some(link.as_os_str() == format!("{kind}:[{number}]").as_str()),
        // A kernel without such namespaces has the initial one only.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && folder.is_dir() => Some(true),
        Err(_) => None,
    }
}

/// Returns whether the process is in the initial user namespace, where the kernel checks
/// capabilities over the whole machine; true if `/proc` does not tell. It cannot change while the
/// process has several threads, so it is read once.
pub(crate) fn in_initial_user() -> bool {
    static INITIAL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *INITIAL.get_or_init(|| in_initial_namespace(Path::new("/proc"), "user").unwrap_or(true))
}

/// Returns those of `/proc/sys`, `/sys` and `/sys/fs/cgroup` that are mounted read-only, as in a
/// container.
pub(crate) fn read_only_mounts() -> Vec<&'static str> {
    let is_read_only = |path: &&str| {
        let mount = rustix::fs::statvfs(*path);
        mount.is_ok_and(|mount| mount.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
    };
    ["/proc/sys", "/sys", "/sys/fs/cgroup"].into_iter().filter(is_read_only).collect()
}

/// Returns where a command works if it is not here: root of a user namespace may not change the
/// machine, nor is a read-only file system changed from here.
pub(crate) fn place_of(command: &str, initial_user: bool, read_only: &[&str]) -> Option<String> {
    let file = match command.strip_prefix("sudo sysctl ") {
        Some(_) => Some("/proc/sys"),
        None if command.contains("/sys/fs/cgroup/") => Some("/sys/fs/cgroup"),
        None if command.contains("/sys/") => Some("/sys"),
        None => None,
    };
    match file.filter(|file| read_only.contains(file)) {
        _ if !initial_user && command.starts_with("sudo ") => {
            Some("outside of this user namespace".to_owned())
        }
        Some(file) => Some(format!("on the host ({file} is read-only here)")),
        None => None,
    }
}

/// Returns a command for a message: with the place where it works, if that is not here.
pub fn placed(command: &str) -> String {
    match place_of(command, in_initial_user(), &read_only_mounts()) {
        Some(place) => format!("{place}: {command}"),
        None => command.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_advances_with_work() {
        let before = CpuTime::here();
        let mut sum = 0u64;
        while CpuTime::here().since(before) == CpuTime::default() {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(before.since(CpuTime::here()) == CpuTime::default());
    }
}

#[cfg(test)]
mod signals_tests {
    use super::*;

    #[test]
    fn a_signal_that_was_blocked_is_taken_by_the_thread_that_waits() {
        // On a thread of its own: the mask is the thread's, and ends with it.
        std::thread::spawn(|| {
            let signals = Signals::block(&[libc::SIGUSR2]).unwrap();
            assert_eq!(signals.wait(Some(Duration::from_millis(1))), None);
            // SAFETY: a signal to this thread, which has it blocked.
            unsafe { libc::raise(libc::SIGUSR2) };
            assert_eq!(signals.wait(None), Some(libc::SIGUSR2));
            assert_eq!(Signals::block(&[12_345]).unwrap_err().raw(), libc::EINVAL);
        })
        .join()
        .unwrap();
    }
}

#[cfg(test)]
mod shell_tests {
    use super::*;

    #[test]
    fn words_reach_a_shell_as_they_are() {
        for text in ["/bin/pinfold", "/a b/it's", "$(x) `y` \"z\" \\x2d", ""] {
            let echo = format!("printf %s {}", shell_word(text));
            let output = Command::new("sh").args(["-c", &echo]).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), text);
        }
        assert_eq!(shell_word("/bin/pinfold"), "/bin/pinfold", "no quotes where none are needed");
    }
}
