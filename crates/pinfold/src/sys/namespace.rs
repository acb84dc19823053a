//! Whether this process is in the namespaces that the kernel started with: elsewhere, root has no power over the machine, and
//! the root of a tree is not the whole tree.

use std::path::Path;

/// The inode numbers of the initial namespaces (`PROC_USER_INIT_INO`, `PROC_CGROUP_INIT_INO` of `linux/nsfs.h`).
const USER: u64 = 0xeffffffd;
const CGROUP: u64 = 0xeffffffb;

/// Returns whether the process is in the initial namespace of this kind, `user` or `cgroup`; `None` if `/proc` does not tell.
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

/// Returns whether the process is in the initial user namespace, where the kernel checks capabilities over the whole machine;
/// true if `/proc` does not tell. It cannot change while the process has several threads, so it is read once.
pub(crate) fn in_initial_user() -> bool {
    static INITIAL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *INITIAL.get_or_init(|| is_initial(Path::new("/proc"), "user").unwrap_or(true))
}
