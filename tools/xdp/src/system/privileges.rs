//! The capabilities that `AF_XDP` requires: which of them this thread has, and whether it can get the
//! others.

use pinfold::probe::{Privileges as Common, shell_word};
use rustix::thread::CapabilitySet;
use std::path::Path;

/// The capabilities of `AF_XDP`, by the names that `setcap` takes.
const AF_XDP: [(&str, CapabilitySet); 3] = [
    ("cap_net_raw", CapabilitySet::NET_RAW),
    ("cap_net_admin", CapabilitySet::NET_ADMIN),
    ("cap_bpf", CapabilitySet::BPF),
];

/// The privileges of the calling thread for `AF_XDP`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Privileges {
    /// Whether it is in the initial user namespace. Elsewhere capabilities apply to what the
    /// namespace owns, never to the machine's memory, programs of `bpf` or limits.
    pub initial_user_namespace: bool,
    /// The capabilities that `AF_XDP` requires and the thread lacks, by the names that `setcap`
    /// takes.
    pub missing: Vec<&'static str>,
    /// The capabilities among them that no program started from here can get: they are not in the
    /// bounding set.
    pub out_of_reach: Vec<&'static str>,
    /// Whether a program's own capabilities (`setcap`) are ignored (`no_new_privs`).
    pub no_new_privileges: bool,
    /// Whether a seccomp filter decides about its system calls.
    pub seccomp: bool,
}

impl Privileges {
    /// Reads those of the calling thread.
    pub fn here() -> Self {
        let Common { initial_user_namespace, seccomp, .. } = Common::here();
        let effective = rustix::thread::capabilities(None)
            .map_or(CapabilitySet::empty(), |sets| sets.effective);
        let missing = AF_XDP.iter().filter(|(_, flag)| !effective.contains(*flag));
        let bounded =
            |capability| rustix::thread::capability_is_in_bounding_set(capability) != Ok(false);
        Self {
            initial_user_namespace,
            missing: missing.clone().map(|(name, _)| *name).collect(),
            out_of_reach: missing
                .filter(|(_, flag)| !bounded(*flag))
                .map(|(name, _)| *name)
                .collect(),
            no_new_privileges: rustix::thread::no_new_privs().unwrap_or(false),
            seccomp,
        }
    }

    /// Returns whether they suffice for all calls of `AF_XDP`.
    pub fn suffice(&self) -> bool {
        self.initial_user_namespace && self.missing.is_empty()
    }

    /// Returns why a call of `AF_XDP` is not permitted, and the command that permits it to
    /// `program`, if one can.
    pub fn advice(&self, program: &Path) -> (String, Option<String>) {
        let (missing, lost) = (self.missing.join(", "), self.out_of_reach.join(", "));
        if !self.initial_user_namespace {
            let why = "this is a user namespace, and the kernel requires cap_net_admin and cap_bpf outside of it: run it as \
                       root of the machine";
            return (why.to_owned(), None);
        }
        if self.missing.is_empty() {
            let by = if self.seccomp {
                "a seccomp filter of this process"
            } else {
                "a security module, or kernel lockdown,"
            };
            return (format!("no capability is missing, so {by} refuses it"), None);
        }
        if !lost.is_empty() {
            let why = format!(
                "AF_XDP needs {missing}, and no program started from here can get {lost} (the bounding set): in a \
                 container, start it with these capabilities (--cap-add)"
            );
            return (why, None);
        }
        if self.no_new_privileges {
            let why = format!(
                "AF_XDP needs {missing}, and this process may gain none (no_new_privs): run it as root"
            );
            return (why, None);
        }
        if is_nosuid(program) {
            let why = format!(
                "AF_XDP needs {missing}, and capabilities of {} have no effect, since its file system is mounted nosuid: run it \
                 as root, or copy it to another file system",
                program.display()
            );
            return (why, None);
        }
        let program = shell_word(&program.display().to_string());
        let setcap = "sudo setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep";
        (format!("AF_XDP needs {missing}"), Some(format!("{setcap} {program}")))
    }
}

/// Returns why the kernel knows no `AF_XDP` (EAFNOSUPPORT): a filter that answers so, as
/// `RestrictAddressFamilies=` of a service does, or a kernel without it.
pub(crate) fn no_af_xdp(proc: &Path) -> &'static str {
    let lists = |list: String| list.lines().any(|line| line.starts_with("XDP "));
    match std::fs::read_to_string(proc.join("self/net/protocols")).map(lists) {
        Ok(true) => {
            "this kernel has AF_XDP, so a filter refuses it (of a service: add AF_XDP and AF_NETLINK to its \
             RestrictAddressFamilies=; of a container: its seccomp profile)"
        }
        Ok(false) => "this kernel was built without AF_XDP (CONFIG_XDP_SOCKETS)",
        Err(_) => {
            "this kernel was built without AF_XDP, or a filter refuses it (RestrictAddressFamilies= of a service, the \
             seccomp profile of a container)"
        }
    }
}

/// Returns whether the file system of a program ignores its capabilities (`nosuid`).
fn is_nosuid(program: &Path) -> bool {
    let mount = rustix::fs::statvfs(program);
    mount.is_ok_and(|mount| mount.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_af_xdp_is_told_from_a_filter() {
        let proc = tempfile::tempdir().unwrap();
        assert!(no_af_xdp(proc.path()).contains("built without AF_XDP, or a filter"));
        let list = proc.path().join("self/net/protocols");
        std::fs::create_dir_all(list.parent().unwrap()).unwrap();
        for (text, part) in [
            ("protocol  size\nXDP       1152\nUNIX  1\n", "so a filter refuses"),
            ("protocol  size\nUNIX      1152\n", "built without AF_XDP (CONFIG_XDP_SOCKETS)"),
        ] {
            std::fs::write(&list, text).unwrap();
            assert!(no_af_xdp(proc.path()).contains(part), "{text}");
        }
    }

    #[test]
    fn setcap_is_advised_only_where_it_works() {
        let lacks = Privileges {
            initial_user_namespace: true,
            missing: vec!["cap_bpf"],
            out_of_reach: Vec::new(),
            no_new_privileges: false,
            seccomp: false,
        };
        let advice = |privileges: &Privileges| privileges.advice(Path::new("/bin/p"));
        // A path of several words, and one on a file system whose capabilities are ignored.
        let fix = lacks.advice(Path::new("/my bin/p")).1.unwrap();
        assert!(fix.ends_with("+ep '/my bin/p'"), "{fix}");
        let (why, fix) = lacks.advice(Path::new("/proc/version"));
        if is_nosuid(Path::new("/proc/version")) {
            assert!(why.contains("nosuid") && fix.is_none(), "{why} {fix:?}");
        }
        let (why, fix) = advice(&lacks);
        assert_eq!(why, "AF_XDP needs cap_bpf");
        assert_eq!(
            fix.unwrap(),
            "sudo setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep /bin/p"
        );
        for (privileges, part) in [
            (Privileges { initial_user_namespace: false, ..lacks.clone() }, "user namespace"),
            (Privileges { out_of_reach: vec!["cap_bpf"], ..lacks.clone() }, "bounding set"),
            (Privileges { no_new_privileges: true, ..lacks.clone() }, "no_new_privs"),
            (Privileges { missing: Vec::new(), seccomp: true, ..lacks.clone() }, "seccomp filter"),
            (Privileges { missing: Vec::new(), ..lacks.clone() }, "security module"),
        ] {
            let (why, fix) = advice(&privileges);
            assert!(why.contains(part) && fix.is_none(), "{why} {fix:?}");
        }
    }
}
