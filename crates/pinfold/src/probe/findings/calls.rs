//! Facilities found by trying them: io_uring, AF_XDP, pagemap, userfaultfd.

use super::memory::SUGGESTED;
use crate::probe::facts::Facts;
use crate::probe::finding::{Finding, State, bytes, denied, finding};
use crate::probe::live::{Answer, Refused};
use crate::sys::kernel::RingRefusalCause;

/// The memory for packets of `pinfold receive`, for each queue, by default.
const PACKETS: u64 = 32 << 20;

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    vec![
        privileges(facts),
        io_uring(facts),
        af_xdp(facts),
        pagemap(facts.live.pagemap),
        userfaultfd(facts),
    ]
}

fn privileges(facts: &Facts) -> Finding {
    let what = "privileges";
    let privileges = &facts.live.privileges;
    let filter = if privileges.seccomp { ", with a seccomp filter" } else { "" };
    let user = format!("user {}{filter}", privileges.user);
    if privileges.initial_user_namespace {
        return finding(what, State::Good, user);
    }
    let detail = format!(
        "{user} of a user namespace, with no rights to the machine: commands with sudo work outside of it only"
    );
    finding(what, State::Limited, detail)
}

fn io_uring(facts: &Facts) -> Finding {
    let what = "io_uring";
    let ring = match &facts.live.io_uring {
        Ok(ring) => ring,
        Err(refusal) => {
            let detail = format!("cannot create a ring: {refusal}");
            return match refusal.cause {
                // The same command as for the limit itself, since a ring is not all that a run
                // locks.
                RingRefusalCause::LockedMemory(_) => finding(what, State::Limited, detail)
                    .fixed_if(facts.memlock.raise_for_user(SUGGESTED)),
                _ => Finding { remedy: refusal.fix(), ..finding(what, State::Missing, detail) },
            };
        }
    };
    let has = [
        ("fixed buffers", ring.fixed),
        ("fsync", ring.fsync),
        ("sparse tables of buffers", ring.sparse_buffers == Answer::Yes),
        ("tables shared between rings", ring.clone_buffers == Answer::Yes),
    ];
    let words = |wanted: bool| {
        let names: Vec<&str> =
            has.iter().filter(|(_, has)| *has == wanted).map(|(name, _)| *name).collect();
        names.join(", ")
    };
    let lacks = words(false);
    // Sharing tables between rings is an optimisation only.
    let good = ring.fixed && ring.fsync && ring.sparse_buffers == Answer::Yes;
    let detail =
        if lacks.is_empty() { words(true) } else { format!("{}; without {lacks}", words(true)) };
    finding(what, if good { State::Good } else { State::Limited }, detail)
}

fn af_xdp(facts: &Facts) -> Finding {
    let what = "AF_XDP";
    let privileges = &facts.live.privileges;
    match facts.live.af_xdp {
        Ok(()) => match facts.memlock.left().filter(|left| *left < PACKETS) {
            Some(left) => {
                let (left, needed) = (bytes(left), bytes(PACKETS));
                let detail = format!(
                    "works with {left} of locked memory, less what the user's other processes have; `pinfold receive` needs \
                     {needed} a queue by default"
                );
                finding(what, State::Limited, detail)
                    .fixed_if(facts.memlock.raise_for_user(SUGGESTED))
            }
            None => {
                finding(what, State::Good, "a socket, its memory and its program can be created")
            }
        },
        Err(Refused { call, errno }) if denied(errno) => {
            let program = std::env::current_exe().unwrap_or_else(|_| "PROGRAM".into());
            let (why, fix) = privileges.af_xdp_advice(&program);
            Finding {
                remedy: fix,
                ..finding(what, State::Limited, format!("{call}: {errno}: {why}"))
            }
        }
        Err(Refused { call, errno }) if [libc::ENOBUFS, libc::ENOMEM].contains(&errno.raw()) => {
            match facts.memlock.binding() {
                Some(limit) => {
                    let limit = bytes(limit);
                    let detail = format!(
                        "{call}: {errno}: 1 MiB more exceeds RLIMIT_MEMLOCK, which is {limit} for all processes of this user together"
                    );
                    finding(what, State::Limited, detail)
                        .fixed_if(facts.memlock.raise_for_user(SUGGESTED))
                }
                None => finding(
                    what,
                    State::Limited,
                    format!("{call}: {errno}: 1 MiB cannot be locked"),
                ),
            }
        }
        Err(Refused { call, errno }) => finding(what, State::Missing, format!("{call}: {errno}")),
    }
}

fn pagemap(answer: Answer) -> Finding {
    let what = "pagemap";
    match answer {
        Answer::Yes => {
            finding(what, State::Good, "shows the physical frames of this process's pages")
        }
        Answer::No(errno) if denied(errno) => {
            let detail = "hides physical frames without CAP_SYS_ADMIN; only a device without an IOMMU needs them";
            finding(what, State::Limited, detail)
        }
        Answer::No(errno) => {
            finding(what, State::Limited, format!("unknown: /proc/self/pagemap: {errno}"))
        }
    }
}

fn userfaultfd(facts: &Facts) -> Finding {
    let what = "userfaultfd";
    match facts.live.userfaultfd {
        Answer::Yes => finding(what, State::Good, "can be created"),
        Answer::No(errno) if denied(errno) => {
            let found = finding(what, State::Limited, format!("not for this user: {errno}"));
            match facts.unprivileged_userfaultfd {
                Some(0) => found.fixed_by("sudo sysctl vm.unprivileged_userfaultfd=1"),
                // The switch allows it, or does not exist: something else refuses.
                _ => found,
            }
        }
        Answer::No(errno) => finding(what, State::Missing, format!("cannot be created: {errno}")),
    }
}
