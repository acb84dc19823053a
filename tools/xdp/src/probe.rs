//! Whether this machine and process can receive through `AF_XDP`, for `pinfold doctor`.

use crate::system::{self, Privileges};
use pinfold::Errno;
use pinfold::probe::{Facts, Finding, State, bytes};
use std::path::Path;

/// The memory for packets of `pinfold receive`, for each queue, by default.
const PACKETS: u64 = 32 << 20;
/// The locked memory that the suggested command allows.
const SUGGESTED: u64 = 1 << 30;
/// A server of many clients, or as many queues.
const ENOUGH_FILES: u64 = 256;

/// Reports whether this process can receive through `AF_XDP`, and the command that lets it: the calls
/// that reception makes (Linux 4.18) are tried, up to those that need an interface, and undone.
pub fn finding(facts: &Facts) -> Finding {
    facts.where_it_works(judge(facts, system::try_all(), &Privileges::here()))
}

fn judge(facts: &Facts, tried: Result<(), (&str, Errno)>, privileges: &Privileges) -> Finding {
    let finding = |state, detail: String| Finding::new("AF_XDP", state, detail);
    match tried {
        Ok(()) => match facts.memlock.left().filter(|left| *left < PACKETS) {
            Some(left) => {
                let (left, needed) = (bytes(left), bytes(PACKETS));
                let detail = format!(
                    "works with {left} of locked memory, less what the user's other processes have; `pinfold receive` needs \
                     {needed} a queue by default"
                );
                finding(State::Limited, detail).fixed_if(facts.memlock.raise_for_user(SUGGESTED))
            }
            None => finding(
                State::Good,
                "a socket, its memory and its program can be created".to_owned(),
            ),
        },
        // More locked memory would not help if the next call is refused.
        Err((call, errno)) if denied(errno) || is_full(errno) && !privileges.suffice() => {
            let program = std::env::current_exe().unwrap_or_else(|_| "PROGRAM".into());
            let (why, fix) = privileges.advice(&program);
            Finding { remedy: fix, ..finding(State::Limited, format!("{call}: {errno}: {why}")) }
        }
        Err((call, errno)) if errno.raw() == libc::ENOMEM => {
            let why = "the kernel has no memory for it; free memory of the machine, or of the control group";
            finding(State::Limited, format!("{call}: {errno}: {why}"))
        }
        Err((call, errno)) if is_full(errno) => match facts.memlock.binding() {
            Some(limit) => {
                let limit = bytes(limit);
                let detail = format!(
                    "{call}: {errno}: 1 MiB more exceeds RLIMIT_MEMLOCK, which is {limit} for all processes of this user together"
                );
                finding(State::Limited, detail).fixed_if(facts.memlock.raise_for_user(SUGGESTED))
            }
            None => finding(State::Limited, format!("{call}: {errno}: 1 MiB cannot be locked")),
        },
        Err((call, errno)) if errno.raw() == libc::EAFNOSUPPORT => {
            let why = system::no_af_xdp(Path::new("/proc"));
            finding(State::Missing, format!("{call}: {errno}: {why}"))
        }
        Err((call, errno)) if system::is_out_of_files(errno) => {
            let needed = facts.live.open_files.open.unwrap_or(0).saturating_add(ENOUGH_FILES);
            let detail = format!("{call}: {errno}: too few files may be open");
            finding(State::Limited, detail).fixed_if(facts.live.open_files.raise(needed))
        }
        Err((call, errno)) => finding(State::Missing, format!("{call}: {errno}")),
    }
}

/// Returns whether the limit of locked memory refused it: what AF_XDP answers to that alone.
fn is_full(errno: Errno) -> bool {
    errno.raw() == libc::ENOBUFS
}

/// Returns whether the error is one of permission.
fn denied(errno: Errno) -> bool {
    matches!(errno.raw(), libc::EPERM | libc::EACCES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::MemlockLimit;

    fn all() -> Privileges {
        Privileges {
            initial_user_namespace: true,
            missing: Vec::new(),
            out_of_reach: Vec::new(),
            no_new_privileges: false,
            seccomp: false,
        }
    }

    /// Returns this machine's facts, with a limit of locked memory that binds.
    fn limited() -> Facts {
        let memlock =
            MemlockLimit { soft: Some(8 << 20), hard: Some(8 << 20), used: Some(0), lifted: false };
        Facts { memlock, ..Facts::here() }
    }

    #[test]
    fn a_call_that_is_not_permitted_names_the_capability() {
        let lacks = Privileges { missing: vec!["cap_bpf"], ..all() };
        let found =
            judge(&limited(), Err(("bpf (the socket map)", Errno::new(libc::EPERM))), &lacks);
        let remedy = found.remedy.unwrap_or_default();
        assert!(
            remedy.starts_with("sudo setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep /"),
            "{remedy}"
        );
        assert!(found.detail.ends_with("AF_XDP needs cap_bpf"), "{}", found.detail);
    }

    #[test]
    fn a_kernel_without_it_lacks_it_and_little_memory_limits_it() {
        let none = Err(("socket (AF_XDP)", Errno::new(libc::EAFNOSUPPORT)));
        assert_eq!(judge(&limited(), none, &all()).state, State::Missing);
        let found = judge(&limited(), Ok(()), &all());
        assert!(found.state == State::Limited && found.detail.contains("8 MiB"), "{found}");
        let lifted = MemlockLimit { lifted: true, ..limited().memlock };
        let found = judge(&Facts { memlock: lifted, ..limited() }, Ok(()), &all());
        assert_eq!((found.state, found.remedy), (State::Good, None));
    }

    #[test]
    fn af_xdp_refused_by_a_limit_is_raised_only_where_that_suffices() {
        let facts = limited();
        let lacks = || Privileges { missing: vec!["cap_bpf"], ..all() };
        let rootless = || Privileges { initial_user_namespace: false, ..all() };
        let find = |errno, privileges: Privileges| {
            judge(&facts, Err(("bpf (the socket map)", Errno::new(errno))), &privileges)
        };
        let found = find(libc::ENOBUFS, all());
        assert!(found.detail.contains("RLIMIT_MEMLOCK"), "{found}");
        let found = find(libc::ENOBUFS, lacks());
        assert!(
            found.detail.contains("needs cap_bpf") && !found.detail.contains("MEMLOCK"),
            "{found}"
        );
        let found = find(libc::ENOBUFS, rootless());
        assert!(found.detail.contains("user namespace") && found.remedy.is_none(), "{found}");
        let found = find(libc::ENOMEM, all());
        assert!(found.detail.contains("no memory") && !found.detail.contains("MEMLOCK"), "{found}");
        let found = find(libc::EMFILE, all());
        assert!(found.remedy.unwrap_or(found.detail).contains("ulimit -n"));
    }

    #[test]
    fn this_machine_has_a_finding() {
        let found = finding(&Facts::here());
        assert!(found.what == "AF_XDP" && !found.detail.is_empty(), "{found}");
    }
}
