//! The capabilities that `AF_XDP` requires: which of them this process has, and whether it can get
//! the others.

use super::namespace;
use rustix::fs::{self, AtFlags};
use rustix::thread::CapabilitySet;
use std::path::Path;

/// The capabilities of `AF_XDP`, by the names that `setcap` takes.
const AF_XDP: [(&str, CapabilitySet); 3] = [
    ("cap_net_raw", CapabilitySet::NET_RAW),
    ("cap_net_admin", CapabilitySet::NET_ADMIN),
    ("cap_bpf", CapabilitySet::BPF),
];

/// What the calling thread may do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Privileges {
    /// The effective user.
    pub user: u32,
    /// Whether it is in the initial user namespace. Elsewhere capabilities apply to what the
    /// namespace owns, never to the machine's memory, programs of `bpf` or limits.
    pub initial_user_namespace: bool,
    /// The capabilities that `AF_XDP` requires and the thread lacks, by the names that `setcap`
    /// takes.
    pub missing: Vec<&'static str>,
    /// Those of them that no program started from here can get: they are not in the bounding set.
    pub out_of_reach: Vec<&'static str>,
    /// Whether a program's own capabilities (`setcap`) are ignored (`no_new_privs`).
    pub no_new_privileges: bool,
    /// Whether a seccomp filter decides about its system calls.
    pub seccomp: bool,
}

impl Privileges {
    /// Reads those of the calling thread.
    pub(crate) fn here() -> Self {
        let effective = rustix::thread::capabilities(None)
            .map_or(CapabilitySet::empty(), |sets| sets.effective);
        let missing = AF_XDP.iter().filter(|(_, flag)| !effective.contains(*flag));
        let bounded =
            |capability| rustix::thread::capability_is_in_bounding_set(capability) != Ok(false);
        Self {
            user: rustix::process::geteuid().as_raw(),
            initial_user_namespace: namespace::in_initial_user(),
            missing: missing.clone().map(|(name, _)| *name).collect(),
            out_of_reach: missing
                .filter(|(_, flag)| !bounded(*flag))
                .map(|(name, _)| *name)
                .collect(),
            no_new_privileges: rustix::thread::no_new_privs().unwrap_or(false),
            seccomp: has_seccomp_filter(),
        }
    }

    /// Returns why a call of `AF_XDP` is not permitted, and the command that permits it to
    /// `program`, if one can.
    pub fn af_xdp_advice(&self, program: &Path) -> (String, Option<String>) {
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
        let setcap = "sudo setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep";
        (format!("AF_XDP needs {missing}"), Some(format!("{setcap} {}", program.display())))
    }
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
        return Some(format!("sudo chmod o+rx {}", folder.display()));
    }
    let wanted = fs::Access::READ_OK | fs::Access::WRITE_OK;
    (!may(node, wanted)).then(|| format!("sudo chown $USER {}", node.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setcap_is_advised_only_where_it_works() {
        let lacks = Privileges {
            user: 1000,
            initial_user_namespace: true,
            missing: vec!["cap_bpf"],
            out_of_reach: Vec::new(),
            no_new_privileges: false,
            seccomp: false,
        };
        let advice = |privileges: &Privileges| privileges.af_xdp_advice(Path::new("/bin/p"));
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
