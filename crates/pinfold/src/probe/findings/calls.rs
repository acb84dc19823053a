//! Facilities found by trying them: io_uring, AF_XDP, pagemap, userfaultfd.

use crate::probe::facts::Facts;
use crate::probe::finding::{Finding, State, denied, finding};
use crate::probe::live::Answer;

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    vec![io_uring(facts), af_xdp(facts.live.af_xdp), pagemap(facts.live.pagemap), userfaultfd(facts)]
}

fn io_uring(facts: &Facts) -> Finding {
    let what = "io_uring";
    let ring = match facts.live.io_uring {
        Ok(ring) => ring,
        Err(errno) => {
            let refused = finding(what, State::Missing, format!("cannot create a ring: {errno}"));
            return match facts.io_uring_disabled {
                Some(1..) => refused.fixed_by("sudo sysctl kernel.io_uring_disabled=0"),
                _ => refused,
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
        let names: Vec<&str> = has.iter().filter(|(_, has)| *has == wanted).map(|(name, _)| *name).collect();
        names.join(", ")
    };
    let lacks = words(false);
    // Sharing tables between rings is an optimisation only.
    let good = ring.fixed && ring.fsync && ring.sparse_buffers == Answer::Yes;
    let detail = if lacks.is_empty() { words(true) } else { format!("{}; without {lacks}", words(true)) };
    finding(what, if good { State::Good } else { State::Limited }, detail)
}

fn af_xdp(answer: Answer) -> Finding {
    let what = "AF_XDP";
    match answer {
        Answer::Yes => finding(what, State::Good, "a socket can be created"),
        // No suggestion to grant it: nothing here uses such a socket.
        Answer::No(errno) if denied(errno) => {
            let detail = format!("a socket needs CAP_NET_RAW ({errno}), which nothing in Pinfold uses");
            finding(what, State::Limited, detail)
        }
        Answer::No(errno) => finding(what, State::Missing, format!("cannot create a socket: {errno}")),
    }
}

fn pagemap(tells: bool) -> Finding {
    let what = "pagemap";
    if tells {
        return finding(what, State::Good, "shows the physical frames of this process's pages");
    }
    let detail = "hides physical frames without CAP_SYS_ADMIN; only a device without an IOMMU needs them";
    finding(what, State::Limited, detail)
}

fn userfaultfd(facts: &Facts) -> Finding {
    let what = "userfaultfd";
    match facts.live.userfaultfd {
        Answer::Yes => finding(what, State::Good, "can be created"),
        Answer::No(errno) if denied(errno) => {
            finding(what, State::Limited, format!("not for this user: {errno}"))
                .fixed_by("sudo sysctl vm.unprivileged_userfaultfd=1")
        }
        Answer::No(errno) => finding(what, State::Missing, format!("cannot be created: {errno}")),
    }
}
