//! What was found about one facility.

use crate::sys::Errno;
use std::fmt;

/// Whether a facility can be used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// Yes.
    Good,
    /// In part, or not by this user.
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

/// What was found about one facility.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Its name: `kernel`, `hugepages 2 MiB`, `io_uring` ...
    pub what: String,
    /// Whether it can be used.
    pub state: State,
    /// What was found, in one line.
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
    Finding { what: what.into(), state, detail: detail.into(), remedy: None }
}

impl Finding {
    /// Adds the command, or else the words that say what to do instead.
    pub(super) fn fixed_if(self, command: Result<String, String>) -> Self {
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
pub(super) fn bytes(bytes: u64) -> String {
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
