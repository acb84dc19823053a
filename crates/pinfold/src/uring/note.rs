//! Features that a queue does without, as notices for the user.

use crate::sys::kernel::{RingRefusal, RingRefusalCause};
use crate::sys::limits::{MemlockLimit, MemlockRefusal};
use crate::sys::release;
use rustix::io::Errno;
use std::fmt;

/// A feature that a queue does without, and why. Transfers are slower, but do not fail.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Note {
    /// No O_DIRECT: data goes through the page cache.
    Buffered(BufferedReason),
    /// Buffers are not registered with the ring: the kernel pins them for each transfer.
    NotFixed {
        /// The bytes that the kernel would charge for them.
        requested: u64,
        /// The error.
        errno: Errno,
        /// The limit of locked memory, if that refused them.
        memlock: Option<MemlockRefusal>,
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
        /// The limit of locked memory, if that refused a ring that polls.
        memlock: Option<MemlockRefusal>,
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
    /// O_DIRECT needs offsets and lengths in larger blocks on this file.
    Block {
        /// Bytes of which the caller's offsets and lengths are multiples.
        requested: u32,
        /// Bytes of which they must be multiples.
        needed: u32,
    },
}

/// The errors of a ring or a first transfer where the file, its file system or its device does not
/// poll: `NODATA` means an empty file.
const UNPOLLED: [Errno; 3] = [Errno::OPNOTSUPP, Errno::INVAL, Errno::NODATA];

impl Note {
    /// Returns the refusal by the limit of locked memory. The limit must rise by the sum of the
    /// refusals of all queues, since all processes of the user share it.
    pub fn memlock(&self) -> Option<MemlockRefusal> {
        match *self {
            Self::NotFixed { memlock, .. } | Self::NotPolled { memlock, .. } => memlock,
            Self::NoRing(RingRefusal {
                cause: RingRefusalCause::LockedMemory(refused), ..
            }) => Some(refused),
            _ => None,
        }
    }

    /// Returns the text without the command that fixes it.
    pub fn without_fix(&self) -> impl fmt::Display {
        WithoutFix(self)
    }

    fn fix(&self) -> Option<String> {
        match self {
            Self::NoRing(refusal) => refusal.placed_fix(),
            note => Some(MemlockLimit::here().raise_command_for_user(note.memlock()?.requested)),
        }
    }

    pub(super) fn not_fixed(requested: u64, errno: Errno) -> Self {
        Self::NotFixed { requested, errno, memlock: MemlockRefusal::of(errno.into(), requested) }
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.without_fix().fmt(f)?;
        self.fix().map_or(Ok(()), |fix| write!(f, "; fix: {fix}"))
    }
}

/// Returns the next step where it is the kernel's memory that was short.
fn no_memory(errno: Errno) -> &'static str {
    match errno {
        Errno::NOMEM => {
            ": it has no memory for it; free memory of the machine, or of the control group if that has a limit"
        }
        _ => "",
    }
}

/// A note without its fix.
struct WithoutFix<'n>(&'n Note);

impl fmt::Display for WithoutFix<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Note::Buffered(BufferedReason::Refused(errno)) if *errno != Errno::INVAL => {
                write!(f, "no O_DIRECT: fcntl: {errno}; data goes through the page cache")
            }
            Note::Buffered(BufferedReason::Refused(errno)) => {
                write!(
                    f,
                    "no O_DIRECT: the file system does not support it ({errno}); data goes through the page cache"
                )
            }
            Note::Buffered(BufferedReason::Block { requested, needed }) => write!(
                f,
                "no O_DIRECT: the file needs offsets and lengths that are multiples of {needed} bytes, and they are \
                 multiples of {requested}; data goes through the page cache; use multiples of {needed}"
            ),
            Note::NotFixed { memlock: Some(refused), .. } => {
                write!(f, "no fixed buffers: {refused}")
            }
            Note::NotFixed { requested, errno, .. } => write!(
                f,
                "no fixed buffers: the kernel refuses to register {requested} bytes ({errno}){}",
                no_memory(*errno)
            ),
            Note::FileNotRegistered { errno } => {
                write!(f, "the file is not registered with the ring ({errno})")
            }
            Note::NotDeferred { errno } if *errno != Errno::INVAL || release::at_least((6, 1)) => {
                write!(
                    f,
                    "completions interrupt their thread: the kernel refuses to defer them ({errno})"
                )
            }
            Note::NotDeferred { errno } => {
                write!(
                    f,
                    "completions interrupt their thread ({errno}); Linux 6.1 or later defers them"
                )
            }
            Note::NotPolled { memlock: Some(refused), .. } => write!(f, "no polling: {refused}"),
            Note::NotPolled { errno, .. } if !UNPOLLED.contains(errno) => {
                write!(f, "no polling: the kernel refuses it ({errno}){}", no_memory(*errno))
            }
            Note::NotPolled { errno, .. } => write!(
                f,
                "no polling: the file does not support it ({errno}); it needs O_DIRECT and a device with poll queues \
                 (for NVMe: the module's parameter poll_queues)"
            ),
            Note::NoRing(refusal) => {
                write!(f, "no io_uring: {}", refusal)
            }
        }
    }
}
