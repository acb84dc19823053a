//! What a caller says about transfers, what it is told, and the account of each that is under way.

use super::error::{FileError, Op};
use super::file::Target;
use crate::memory::Fixed;
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// How a queue is made.
#[derive(Clone, Copy, Debug)]
pub struct Options<'o, 'm> {
    /// How many transfers at once: 1 to [`FileQueue::MAX_DEPTH`](super::FileQueue::MAX_DEPTH).
    pub depth: u32,
    /// Past the page cache, where the file system allows it.
    pub direct: bool,
    /// Of which number of bytes, a power of two, all offsets will be multiples. O_DIRECT is used only if this is a
    /// multiple of what the file asks for.
    pub block: u32,
    /// Memory to register with the ring: arenas, whole. Transfers with buffers in it are the fast ones, save those
    /// that lie across a multiple of 1 GiB from an arena's start. The queue knows the memory by its addresses, so it
    /// borrows it for as long as it lives.
    pub fixed: &'o [Fixed<'m>],
    /// With io_uring; `false` makes the transfers one after the other, as where there is none.
    pub ring: bool,
    /// The queue stays with the thread that makes it, which then takes completions in batches when it waits instead of
    /// being interrupted for them (`IORING_SETUP_DEFER_TASKRUN`, Linux 6.1). Used from another thread it says
    /// [`FileError::OtherThread`], and dropped there with transfers under way it leaks their buffers.
    pub one_thread: bool,
    /// Looks for completions at the device instead of waiting for its interrupt (`IORING_SETUP_IOPOLL`, Linux 5.1),
    /// where the file can: by O_DIRECT, on a device with queues for it. Whoever waits keeps a core busy.
    pub poll: bool,
}

impl Default for Options<'_, '_> {
    fn default() -> Self {
        Self { depth: 32, direct: true, block: 4096, fixed: &[], ring: true, one_thread: false, poll: false }
    }
}

/// A transfer that is over, and its buffer.
#[derive(Debug)]
pub struct Done<B> {
    /// What the caller called it.
    pub tag: u64,
    /// Which way.
    pub op: Op,
    /// Where in the file.
    pub offset: u64,
    /// How many bytes.
    pub len: usize,
    /// The buffer, its own again.
    pub buffer: B,
    /// From its submission until it was seen to be over.
    pub latency: Duration,
    /// All `len` bytes went, or why not.
    pub result: Result<(), FileError>,
}

/// A transfer that was not begun, and its buffer.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<B> {
    /// The buffer, untouched.
    pub buffer: B,
    /// Why.
    pub error: FileError,
}

/// What one submission was.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Submitted {
    /// How many transfers.
    pub transfers: u32,
    /// How long it took, in all. Without a ring that is as long as the transfers took.
    pub elapsed: Duration,
}

/// A transfer that is queued or under way.
pub(super) struct Slot<B> {
    pub(super) buffer: B,
    pub(super) tag: u64,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: usize,
    /// In whole blocks.
    pub(super) padded: usize,
    pub(super) done: usize,
    pub(super) retries: u32,
    /// When it was submitted; before that, nothing in particular.
    pub(super) since: Instant,
}

/// How often a transfer that the kernel has no room for is tried again.
pub(super) const RETRIES: u32 = 1000;

impl<B> Slot<B> {
    /// What a completion means for its transfer; `None` where it has to go on.
    pub(super) fn verdict(
        &mut self,
        target: &Target,
        result: Result<usize, Errno>,
    ) -> Option<Result<(), FileError>> {
        let (op, offset, len, path) = (self.op, self.offset, self.len, || target.path.clone());
        let moved = match result {
            Ok(moved) => moved,
            Err(Errno::INTR | Errno::AGAIN) if self.retries < RETRIES => {
                self.retries += 1;
                return None;
            }
            Err(errno) => {
                return Some(Err(FileError::Transfer {
                    op,
                    path: path(),
                    offset,
                    len,
                    done: self.done,
                    errno,
                }));
            }
        };
        self.done = (self.done + moved).min(self.padded);
        let enough = match op {
            Op::Read => self.len,
            Op::Write => self.padded,
        };
        if self.done >= enough {
            return Some(Ok(()));
        }
        // With O_DIRECT a part that is no whole block ends where the file ends.
        if moved == 0 || !self.done.is_multiple_of(target.block as usize) {
            return Some(Err(FileError::Short { op, path: path(), offset, len, done: self.done }));
        }
        None
    }
}
