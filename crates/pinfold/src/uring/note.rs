//! What a queue wanted and did not get.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::fmt;

/// Something that the queue does without, and why. Nothing fails by it; it is slower.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Note {
    /// No O_DIRECT: data goes by way of the page cache.
    Buffered(BufferedWhy),
    /// Buffers are not registered with the ring: the kernel pins them for each transfer.
    NotFixed {
        /// How many bytes were to be registered.
        asked: u64,
        /// How many this process has pinned or locked already.
        used: u64,
        /// How many it may; `None` for any number.
        limit: Option<u64>,
        /// What the system said.
        errno: Errno,
    },
    /// The file is not registered with the ring: the kernel looks it up for each transfer.
    FileNotRegistered {
        /// What the system said.
        errno: Errno,
    },
    /// Completions interrupt their thread, one by one, instead of waiting until it asks.
    NotDeferred {
        /// What the system said.
        errno: Errno,
    },
    /// Completions are waited for, not looked for at the device.
    NotPolled {
        /// What the system said.
        errno: Errno,
    },
    /// No io_uring: transfers are made one after the other, by `pread` and `pwrite`.
    NoRing {
        /// What the system said.
        errno: Errno,
    },
}

/// Why data goes by way of the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BufferedWhy {
    /// The file system refuses O_DIRECT.
    Refused(Errno),
    /// The file system takes O_DIRECT in larger blocks only.
    Block {
        /// The caller's blocks, in bytes.
        asked: u32,
        /// The file's, in bytes.
        needed: u32,
    },
}

impl Note {
    pub(super) fn not_fixed(asked: u64, errno: Errno) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let used = (kib("VmPin:") + kib("VmLck:")) * 1024;
        Self::NotFixed { asked, used, limit: getrlimit(Resource::Memlock).current, errno }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffered(BufferedWhy::Refused(errno)) => {
                write!(
                    f,
                    "no O_DIRECT: the file system refuses it ({errno}); data goes through the page cache"
                )
            }
            Self::Buffered(BufferedWhy::Block { asked, needed }) => write!(
                f,
                "no O_DIRECT: blocks of {asked} bytes, but the file takes multiples of {needed}; data goes through \
                 the page cache; use blocks of {needed} bytes or more"
            ),
            Self::NotFixed { asked, used, limit: Some(limit), errno } if *errno == Errno::NOMEM => write!(
                f,
                "no fixed buffers: {asked} bytes asked for, {used} pinned already, {limit} allowed; \
                 fix: sudo prlimit --pid $$ --memlock={0}:{0}",
                used.saturating_add(*asked)
            ),
            Self::NotFixed { asked, errno, .. } => {
                write!(f, "no fixed buffers: the kernel refuses to register {asked} bytes ({errno})")
            }
            Self::FileNotRegistered { errno } => {
                write!(f, "the file is not registered with the ring ({errno})")
            }
            Self::NotDeferred { errno } => {
                write!(f, "completions interrupt their thread ({errno}); Linux 6.1 or later defers them")
            }
            Self::NotPolled { errno } => write!(
                f,
                "no polling: the file does not take it ({errno}); it needs O_DIRECT and a device with poll queues \
                 (for NVMe: the module's parameter poll_queues)"
            ),
            Self::NoRing { errno: errno @ (Errno::PERM | Errno::ACCESS) } => write!(
                f,
                "no io_uring: it is forbidden ({errno}); fix: sudo sysctl kernel.io_uring_disabled=0 \
                 (in a container also its seccomp profile)"
            ),
            Self::NoRing { errno } => {
                write!(f, "no io_uring: the kernel has none that suffices ({errno}); Linux 5.6 or later does")
            }
        }
    }
}
