//! What this process may lock in memory.

use rustix::process::Resource;
use rustix::thread::CapabilitySet;

/// `RLIMIT_MEMLOCK` and what counts against it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemlockLimit {
    /// The soft limit in bytes; `None`: unlimited.
    pub soft: Option<u64>,
    /// The hard limit in bytes, up to which the process may raise the soft one; `None`: unlimited.
    pub hard: Option<u64>,
    /// Bytes that the process has locked already (`VmLck`), where `/proc` says so.
    pub used: Option<u64>,
    /// Whether the limit does not bind because the process has `CAP_IPC_LOCK`.
    pub lifted: bool,
}

impl MemlockLimit {
    /// What holds for this process now. `getrlimit`, `capget`: since the first Linux.
    pub(crate) fn here() -> Self {
        let limit = rustix::process::getrlimit(Resource::Memlock);
        Self { soft: limit.current, hard: limit.maximum, used: locked_bytes(), lifted: has_ipc_lock() }
    }

    /// How many more bytes may be locked; `None`: no limit.
    pub fn left(&self) -> Option<u64> {
        if self.lifted {
            return None;
        }
        self.soft.map(|soft| soft.saturating_sub(self.used.unwrap_or(0)))
    }

    /// The command that makes room for `more` bytes, in the shell that the program is started from: by itself as far
    /// as the hard limit goes, else as root.
    pub fn raise_command(&self, more: u64) -> String {
        let needed = more.saturating_add(self.used.unwrap_or(0));
        if self.hard.is_none_or(|hard| needed <= hard) {
            format!("ulimit -l {}", needed.div_ceil(1024))
        } else {
            format!("sudo prlimit --pid $$ --memlock={needed}:{needed}")
        }
    }
}

/// Whether the thread has `CAP_IPC_LOCK` in effect.
pub(crate) fn has_ipc_lock() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}

/// What `VmLck` of `/proc/self/status` says, in bytes.
fn locked_bytes() -> Option<u64> {
    let status = std::fs::read("/proc/self/status").ok()?;
    super::text::field_kib(&status, "VmLck")
}
