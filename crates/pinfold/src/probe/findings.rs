//! Judges the facts: good, limited or missing, and the command that fixes it.

mod calls;
mod devices;
mod memory;

use super::facts::Facts;
use super::finding::{Finding, State, finding};
use crate::sys::kernel::parse_release;
use crate::sys::process;

impl Facts {
    /// Returns one finding per facility, in the order in which memory reaches a device.
    pub fn findings(&self) -> Vec<Finding> {
        let mut all = vec![kernel(self.kernel.as_deref())];
        all.extend(memory::findings(self));
        all.extend(devices::findings(self));
        all.extend(calls::findings(self));
        all.into_iter().map(|finding| self.where_it_works(finding)).collect()
    }

    /// Leaves a command as the remedy only where it can work: not in a user namespace, whose root
    /// may not change the machine, and not on a file system that is read-only here. Then the detail
    /// says where.
    fn where_it_works(&self, finding: Finding) -> Finding {
        let Some(remedy) = &finding.remedy else { return finding };
        let initial = self.live.privileges.initial_user_namespace;
        let Some(place) = process::place_of(remedy, initial, &self.live.read_only) else {
            return finding;
        };
        let detail = format!("{}; {place}: {remedy}", finding.detail);
        Finding { detail, remedy: None, ..finding }
    }

    /// Returns whether the kernel is at least this one; `None` if its release is unknown.
    pub fn kernel_at_least(&self, major: u32, minor: u32) -> Option<bool> {
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
