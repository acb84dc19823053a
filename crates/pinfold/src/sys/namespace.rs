//! Whether this process is in the namespaces that the kernel started with: elsewhere, root has no
//! power over the machine, and the root of a tree is not the whole tree. And where a command works
//! instead.

use std::path::Path;

/// The inode numbers of the initial namespaces (`PROC_USER_INIT_INO`, `PROC_CGROUP_INIT_INO` of
/// `linux/nsfs.h`).
const USER: u64 = 0xeffffffd;
const CGROUP: u64 = 0xeffffffb;

/// Returns whether the process is in the initial namespace of this kind, `user` or `cgroup`; `None`
/// if `/proc` does not tell.
pub(crate) fn is_initial(proc: &Path, kind: &str) -> Option<bool> {
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
    *INITIAL.get_or_init(|| is_initial(Path::new("/proc"), "user").unwrap_or(true))
}

/// Returns those of `/proc/sys`, `/sys` and `/sys/fs/cgroup` that are mounted read-only, as in a
/// container.
pub(crate) fn read_only() -> Vec<&'static str> {
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
        None if command.contains("> /sys/fs/cgroup/") => Some("/sys/fs/cgroup"),
        None if command.contains("> /sys/") => Some("/sys"),
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
    match place_of(command, in_initial_user(), &read_only()) {
        Some(place) => format!("{place}: {command}"),
        None => command.to_owned(),
    }
}
