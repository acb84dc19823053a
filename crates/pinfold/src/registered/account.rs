//! What is pinned, and what counts against which limit.

use super::error::RegistrationError;
use crate::sys::limits::MemlockLimit;
use crate::sys::text;
use std::fmt;

/// What a table of buffers keeps pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedStats {
    /// How many buffers there are.
    pub buffers: usize,
    /// How many have left the table and wait for I/O that is under way.
    pub leaving: usize,
    /// How many bytes the buffers in the table have.
    pub bytes: u64,
    /// How many bytes the tables of where they are have.
    pub table_bytes: u64,
    /// How many bytes the pages have that are pinned (or locked) for them: each page whole, and each once. Where frames
    /// may not be known, shared memory that is mapped twice counts twice.
    pub pinned_bytes: u64,
    /// What the kernel charges for what is pinned: plain pages to each registration, larger ones once a table.
    pub charged_bytes: u64,
    /// What the kernel itself says that the whole process has pinned (`VmPin`), where it says so.
    pub kernel_bytes: Option<u64>,
    /// `RLIMIT_MEMLOCK`; `used` is what is locked (`mlock`), which counts apart from what is pinned.
    pub limit: MemlockLimit,
    /// Whether nothing is charged, because `CAP_IPC_LOCK` was there when the table was made.
    pub lifted: bool,
}

impl fmt::Display for PinnedStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { buffers, bytes, pinned_bytes, charged_bytes, .. } = self;
        write!(
            f,
            "{buffers} buffers of {bytes} bytes, {pinned_bytes} bytes pinned, {charged_bytes} charged"
        )?;
        match self.limit.soft {
            _ if self.lifted => f.write_str(" to nobody (CAP_IPC_LOCK)"),
            Some(limit) => write!(f, " of {limit} allowed"),
            None => f.write_str(", without limit"),
        }
    }
}

/// The limit, and what this process has pinned as far as the kernel says.
pub(super) fn limit_and_pinned() -> (MemlockLimit, Option<u64>) {
    let status = std::fs::read("/proc/self/status").unwrap_or_default();
    (MemlockLimit::here(), text::field_kib(&status, "VmPin"))
}

/// The limit as it holds for what rings pin: `used` is what they have.
pub(super) fn limit_for_rings() -> (MemlockLimit, u64) {
    let (limit, pinned) = limit_and_pinned();
    (MemlockLimit { used: pinned, ..limit }, pinned.unwrap_or(0))
}

pub(super) fn refusal(limit: MemlockLimit, asked: u64, used: u64) -> RegistrationError {
    RegistrationError::Memlock {
        asked,
        used,
        allowed: limit.soft.unwrap_or(u64::MAX),
        command: limit.raise_command(asked),
    }
}
