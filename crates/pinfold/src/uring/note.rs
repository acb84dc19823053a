//! Features that a queue does without, as notices for the user.

use crate::sys::kernel::{self, RingRefusal};
use crate::sys::limits;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::fmt;

/// A feature that a queue does without, and why. Transfers are slower, but do not fail.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Note {
    /// No O_DIRECT: data goes through the page cache.
    Buffered(BufferedReason),
    /// Buffers are not registered with the ring: the kernel pins them for each transfer.
    NotFixed {
        /// The number of bytes to be registered.
        requested: u64,
        /// The number of bytes that this process has pinned or locked already.
        used: u64,
        /// The number that it may; `None` without a limit, or if CAP_IPC_LOCK lifts it.
        limit: Option<u64>,
        /// The error.
        errno: Errno,
    },
    /// The file is not registered with the ring: the kernel looks it up for each transfer.
    FileNotRegistered {
        /// The error.
        errno: Errno,
    },
    /// Completions interrupt their thread instead of being deferred until it waits.
    NotDeferred {
        /// The error.
        errno: Errno,
    },
    /// Completions are signalled by interrupts, not polled.
    NotPolled {
        /// The error.
        errno: Errno,
    },
    /// No io_uring: transfers are synchronous, by `pread` and `pwrite`.
    NoRing(RingRefusal),
}

/// Why data goes through the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BufferedReason {
    /// The file system does not support O_DIRECT.
    Refused(Errno),
    /// O_DIRECT needs larger blocks on this file.
    Block {
        /// The caller's block in bytes.
        requested: u32,
        /// The file's block in bytes.
        needed: u32,
    },
}

/// What a ring or a first transfer answers where the file, its file system or its device does not poll: `NODATA` stands for an
/// empty file.
const UNPOLLED: [Errno; 3] = [Errno::OPNOTSUPP, Errno::INVAL, Errno::NODATA];

impl Note {
    /// Returns the limit of locked memory with which the buffers would be registered, if that limit refused them.
    pub fn memlock_needed(&self) -> Option<u64> {
        match *self {
            Self::NotFixed { requested, used, limit: Some(limit), errno: Errno::NOMEM } => {
                Some(limits::raised(limit, used, requested))
            }
            _ => None,
        }
    }

    pub(super) fn not_fixed(requested: u64, errno: Errno) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let used = (kib("VmPin:") + kib("VmLck:")) * 1024;
        let limit = getrlimit(Resource::Memlock).current.filter(|_| !limits::has_ipc_lock());
        Self::NotFixed { requested, used, limit, errno }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffered(BufferedReason::Refused(errno)) if *errno != Errno::INVAL => {
                write!(f, "no O_DIRECT: fcntl: {errno}; data goes through the page cache")
            }
            Self::Buffered(BufferedReason::Refused(errno)) => {
                write!(
                    f,
                    "no O_DIRECT: the file system does not support it ({errno}); data goes through the page cache"
                )
            }
            Self::Buffered(BufferedReason::Block { requested, needed }) => write!(
                f,
                "no O_DIRECT: blocks of {requested} bytes, but the file needs multiples of {needed}; data goes through \
                 the page cache; use blocks of {needed} bytes or more"
            ),
            Self::NotFixed { requested, used, limit: Some(limit), errno } if *errno == Errno::NOMEM => {
                write!(
                    f,
                    "no fixed buffers: {requested} bytes requested, {used} pinned already, {limit} allowed; \
                 fix: {}",
                    limits::raise_memlock(limits::raised(*limit, *used, *requested))
                )
            }
            Self::NotFixed { requested, errno, .. } => {
                write!(f, "no fixed buffers: the kernel refuses to register {requested} bytes ({errno})")
            }
            Self::FileNotRegistered { errno } => {
                write!(f, "the file is not registered with the ring ({errno})")
            }
            Self::NotDeferred { errno } if kernel::at_least((6, 1)) => {
                write!(f, "completions interrupt their thread: the kernel refuses to defer them ({errno})")
            }
            Self::NotDeferred { errno } => {
                write!(f, "completions interrupt their thread ({errno}); Linux 6.1 or later defers them")
            }
            Self::NotPolled { errno } if !UNPOLLED.contains(errno) => {
                write!(f, "no polling: the kernel refuses it ({errno})")
            }
            Self::NotPolled { errno } => write!(
                f,
                "no polling: the file does not support it ({errno}); it needs O_DIRECT and a device with poll queues \
                 (for NVMe: the module's parameter poll_queues)"
            ),
            Self::NoRing(refusal) => {
                write!(f, "no io_uring: {}", refusal.with_fix())
            }
        }
    }
}
