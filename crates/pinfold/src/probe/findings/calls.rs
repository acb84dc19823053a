//! What the kernel answered when asked: io_uring, AF_XDP, pagemap, userfaultfd.

use super::super::{Answer, Facts, Finding, State};
use super::{denied, finding};

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    vec![io_uring(facts), af_xdp(facts.live.af_xdp), pagemap(facts.live.pagemap), userfaultfd(facts)]
}

fn io_uring(facts: &Facts) -> Finding {
    let what = "io_uring";
    let ring = match facts.live.io_uring {
        Ok(ring) => ring,
        Err(errno) => {
            let refused = finding(what, State::Missing, format!("no ring could be made: {errno}"));
            return match facts.io_uring_disabled {
                Some(1..) => refused.mended_by("sudo sysctl kernel.io_uring_disabled=0"),
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
    // Sharing tables between rings is a gain, and not needed for anything.
    let good = ring.fixed && ring.fsync && ring.sparse_buffers == Answer::Yes;
    let detail = if lacks.is_empty() { words(true) } else { format!("{}; without {lacks}", words(true)) };
    finding(what, if good { State::Good } else { State::Limited }, detail)
}

fn af_xdp(answer: Answer) -> Finding {
    let what = "AF_XDP";
    match answer {
        Answer::Yes => finding(what, State::Good, "a socket could be made"),
        // No command that grants it: nothing here uses such a socket.
        Answer::No(errno) if denied(errno) => {
            let detail = format!("a socket needs CAP_NET_RAW ({errno}), which nothing in Pinfold uses");
            finding(what, State::Limited, detail)
        }
        Answer::No(errno) => finding(what, State::Missing, format!("no socket could be made: {errno}")),
    }
}

fn pagemap(tells: bool) -> Finding {
    let what = "pagemap";
    if tells {
        return finding(what, State::Good, "tells the physical frames of this process's pages");
    }
    let detail = "hides physical frames without CAP_SYS_ADMIN; only a device without an IOMMU needs them";
    finding(what, State::Limited, detail)
}

fn userfaultfd(facts: &Facts) -> Finding {
    let what = "userfaultfd";
    match facts.live.userfaultfd {
        Answer::Yes => finding(what, State::Good, "could be made"),
        Answer::No(errno) if denied(errno) => {
            finding(what, State::Limited, format!("not for this user: {errno}"))
                .mended_by("sudo sysctl vm.unprivileged_userfaultfd=1")
        }
        Answer::No(errno) => finding(what, State::Missing, format!("could not be made: {errno}")),
    }
}
