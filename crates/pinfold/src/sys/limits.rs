//! The limit of locked memory.

use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use std::fmt;

/// `RLIMIT_MEMLOCK` and what counts against it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemlockLimit {
    /// The soft limit in bytes; `None`: unlimited.
    pub soft: Option<u64>,
    /// The hard limit in bytes, up to which the process may raise the soft one; `None`: unlimited.
    pub hard: Option<u64>,
    /// Bytes that the process has locked (`VmLck`), if `/proc` is readable.
    pub used: Option<u64>,
    /// Whether the limit does not bind because the process has `CAP_IPC_LOCK`.
    pub lifted: bool,
}

impl MemlockLimit {
    /// Reads the limit of this process (`getrlimit`, `capget`).
    pub(crate) fn here() -> Self {
        let limit = rustix::process::getrlimit(Resource::Memlock);
        Self { soft: limit.current, hard: limit.maximum, used: locked_bytes(), lifted: has_ipc_lock() }
    }

    /// Returns how many more bytes may be locked; `None`: no limit.
    pub fn left(&self) -> Option<u64> {
        if self.lifted {
            return None;
        }
        self.soft.map(|soft| soft.saturating_sub(self.used.unwrap_or(0)))
    }

    /// Returns the shell command that raises the limit by `more` bytes, to be run before the program: up to the hard limit as
    /// this user, beyond it as root.
    pub fn raise_command(&self, more: u64) -> String {
        let needed = more.saturating_add(self.used.unwrap_or(0));
        if self.hard.is_none_or(|hard| needed <= hard) {
            format!("ulimit -l {}", needed.div_ceil(1024))
        } else {
            format!("sudo prlimit --pid $$ --memlock={needed}:{needed}")
        }
    }
}

impl fmt::Display for MemlockLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes =
            |bytes: Option<u64>| bytes.map_or("unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
        write!(f, "RLIMIT_MEMLOCK: soft {}, hard {}", bytes(self.soft), bytes(self.hard))?;
        if let Some(used) = self.used {
            write!(f, ", {used} used")?;
        }
        if self.lifted { f.write_str("; lifted by CAP_IPC_LOCK") } else { Ok(()) }
    }
}

/// Returns whether the thread has `CAP_IPC_LOCK`.
pub(crate) fn has_ipc_lock() -> bool {
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
}

/// Reads `VmLck` of `/proc/self/status`, in bytes.
fn locked_bytes() -> Option<u64> {
    let status = std::fs::read("/proc/self/status").ok()?;
    super::text::field_kib(&status, "VmLck")
}
