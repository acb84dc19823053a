//! Judges the facts: good, limited or missing, and the command that fixes it.

mod devices;
mod memory;

use super::facts::Facts;
use crate::probe::facts::Answer;
use crate::sys::kernel::RingRefusalCause;
use crate::sys::release::parse_release;
use crate::sys::{Errno, process};
use memory::SUGGESTED;
use std::fmt;

impl Facts {
    /// Returns one finding per facility, in the order in which memory reaches a device.
    pub fn findings(&self) -> Vec<Finding> {
        let mut all = vec![kernel(self.kernel.as_deref())];
        all.extend(memory::findings(self));
        all.extend(devices::findings(self));
        all.extend(findings(self));
        all.into_iter().map(|finding| self.where_it_works(finding)).collect()
    }

    /// Leaves a command as the remedy only where it can work: not in a user namespace, whose root
    /// may not change the machine, and not on a file system that is read-only here. Then the detail
    /// says where.
    pub fn where_it_works(&self, finding: Finding) -> Finding {
        let Some(remedy) = &finding.remedy else { return finding };
        let initial = self.live.privileges.initial_user_namespace;
        let Some(place) = process::place_of(remedy, initial, &self.live.read_only) else {
            return finding;
        };
        let detail = format!("{}; {place}: {remedy}", finding.detail);
        Finding { detail, remedy: None, ..finding }
    }

    /// Returns whether the kernel is at least this one; `None` if its release is unknown.
    pub(super) fn kernel_at_least(&self, major: u32, minor: u32) -> Option<bool> {
        Some(parse_release(self.kernel.as_deref()?)? >= (major, minor))
    }
}

fn kernel(text: Option<&str>) -> Finding {
    let what = "kernel";
    let Some(text) = text else {
        return finding(what, State::Limited, "unknown release: /proc is not readable");
    };
    match parse_release(text) {
        Some(found) if found >= (5, 14) => finding(what, State::Good, text),
        Some(_) => finding(
            what,
            State::Limited,
            format!(
                "{text}: arenas bound to a NUMA node on hugepages need 5.14, sparse io_uring buffers 5.19"
            ),
        ),
        None => finding(what, State::Limited, format!("cannot parse the release {text:?}")),
    }
}

// A finding: one facility, its state and its fix.

/// Whether a facility can be used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// Yes.
    Good,
    /// Usable in part, or not by this user.
    Limited,
    /// No.
    Missing,
}

impl State {
    /// Returns `good`, `limited` or `missing`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The state of one facility.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Its name: `kernel`, `hugepages 2 MiB`, `io_uring` ...
    pub what: String,
    /// Whether it can be used.
    pub state: State,
    /// The finding, in one line.
    pub detail: String,
    /// The command that fixes it, if there is one; with `sudo` if it needs root.
    pub remedy: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8} {}: {}", self.state, self.what, self.detail)?;
        match &self.remedy {
            Some(remedy) => write!(f, "; fix: {remedy}"),
            None => Ok(()),
        }
    }
}

pub(super) fn finding(what: impl Into<String>, state: State, detail: impl Into<String>) -> Finding {
    Finding::new(what, state, detail)
}

impl Finding {
    /// Creates one without a command.
    pub fn new(what: impl Into<String>, state: State, detail: impl Into<String>) -> Self {
        Self { what: what.into(), state, detail: detail.into(), remedy: None }
    }

    /// Adds the command, or else the words that say what to do instead.
    pub fn fixed_if(self, command: Result<String, String>) -> Self {
        match command {
            Ok(command) => self.fixed_by(command),
            Err(words) => Self { detail: format!("{}: {words}", self.detail), ..self },
        }
    }

    pub(super) fn fixed_by(mut self, command: impl Into<String>) -> Self {
        self.remedy = Some(command.into());
        self
    }
}

/// Returns whether the error is one of permission.
pub(super) fn denied(errno: Errno) -> bool {
    matches!(errno.raw(), libc::EPERM | libc::EACCES)
}

/// Formats a number of bytes: `512 B`, `8 MiB`, `23.5 GiB`.
pub fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut best = format!("{bytes} B");
    for (power, unit) in (1u32..).zip(units) {
        let size = 1u64 << (10 * power);
        if bytes < size {
            break;
        }
        let tenths = u128::from(bytes) * 10 / u128::from(size);
        best = match tenths % 10 {
            0 => format!("{} {unit}", tenths / 10),
            rest => format!("{}.{rest} {unit}", tenths / 10),
        };
    }
    best
}

// Facilities found by trying them: io_uring, pagemap.

fn findings(facts: &Facts) -> Vec<Finding> {
    vec![privileges(facts), io_uring(facts), pagemap(facts.live.pagemap)]
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
                RingRefusalCause::NotMapped { .. } | RingRefusalCause::NoMemory { .. } => {
                    Finding { remedy: refusal.fix(), ..finding(what, State::Limited, detail) }
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_in_their_largest_unit() {
        for (number, words) in
            [(0, "0 B"), (1023, "1023 B"), (8 << 20, "8 MiB"), (25_276_510_208, "23.5 GiB")]
        {
            assert_eq!(bytes(number), words);
        }
        assert_eq!(bytes(u64::MAX), "16777215.9 TiB");
    }

    #[test]
    fn a_finding_prints_as_one_line_with_its_fix() {
        let found = finding("io_uring", State::Missing, "disabled").fixed_by("sudo sysctl x=0");
        assert_eq!(found.to_string(), "missing  io_uring: disabled; fix: sudo sysctl x=0");
    }
}
