//! What is pinned, and how much of it counts against which limit.

use super::error::RegistrationError;
use crate::sys::files;
use crate::sys::limits::MemlockLimit;
use std::fmt;

/// What a table of buffers keeps pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinnedStats {
    /// The number of buffers.
    pub buffers: usize,
    /// Unregistered buffers whose I/O is in flight.
    pub leaving: usize,
    /// Bytes of the buffers in the table.
    pub bytes: u64,
    /// Bytes of their folio tables.
    pub table_bytes: u64,
    /// Bytes of the pages that are pinned or locked for them: each page whole, and once. If the
    /// frames are not visible to the process, shared memory that is mapped twice counts twice.
    pub pinned_bytes: u64,
    /// Bytes that the kernel charges: plain pages to each registration, larger ones once per table.
    pub charged_bytes: u64,
    /// Bytes that the whole process has pinned according to the kernel (`VmPin`), if it reports
    /// them.
    pub kernel_bytes: Option<u64>,
    /// `RLIMIT_MEMLOCK`; `used` is what is locked (`mlock`), which is charged separately from what
    /// is pinned.
    pub limit: MemlockLimit,
    /// Whether nothing is charged, because `CAP_IPC_LOCK` was effective when the table was created.
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
            _ if self.lifted => f.write_str(" to no limit (CAP_IPC_LOCK)"),
            Some(limit) => write!(f, " of {limit} allowed"),
            None => f.write_str(", unlimited"),
        }
    }
}

/// Returns the limit, and what this process has pinned according to the kernel.
pub(super) fn limit_and_pinned() -> (MemlockLimit, Option<u64>) {
    let status = std::fs::read("/proc/self/status").unwrap_or_default();
    (MemlockLimit::here(), files::field_kib(&status, "VmPin"))
}

/// Returns the limit for what rings pin: `used` is what they have pinned.
pub(super) fn limit_for_rings() -> (MemlockLimit, u64) {
    let (limit, pinned) = limit_and_pinned();
    (MemlockLimit { used: pinned, ..limit }, pinned.unwrap_or(0))
}

pub(super) fn memlock_error(limit: MemlockLimit, requested: u64, used: u64) -> RegistrationError {
    RegistrationError::Memlock {
        requested,
        used,
        allowed: limit.soft.unwrap_or(u64::MAX),
        command: limit.raise_command_for_user(requested),
    }
}
