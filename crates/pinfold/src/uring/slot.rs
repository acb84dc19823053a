//! The options of a queue, its completions, and the state of each transfer in flight.

use super::error::{FileError, Op};
use super::file::Target;
use crate::memory::Fixed;
use rustix::io::Errno;
use std::fmt;
use std::time::{Duration, Instant};

/// The options of a [`FileQueue`](super::FileQueue).
#[derive(Clone, Copy, Debug)]
pub struct Options<'o, 'm> {
    /// The queue depth: 1 to [`FileQueue::MAX_DEPTH`](super::FileQueue::MAX_DEPTH).
    pub depth: u32,
    /// Bypasses the page cache (O_DIRECT), where the file system supports it.
    pub direct: bool,
    /// A power of two of which all offsets will be multiples. O_DIRECT is used only if this is a
    /// multiple of the file's block.
    pub block: u32,
    /// Memory to register with the ring: whole arenas, or the program's own
    /// ([`OwnedMemory::fixed`](crate::OwnedMemory::fixed)). Transfers with buffers in it use fixed
    /// buffers, except those that cross the border of two places of the ring's table, which hold at
    /// most 1 GiB each and end where a page does. The queue knows the memory by its addresses, so it
    /// borrows it.
    pub fixed: &'o [Fixed<'m>],
    /// Uses io_uring; `false` makes synchronous transfers, as without io_uring.
    pub ring: bool,
    /// Binds the queue to the thread that creates it, which then receives completions in batches
    /// when it waits instead of being interrupted (`IORING_SETUP_DEFER_TASKRUN`, Linux 6.1). For a
    /// thread that waits in the queue alone: there is no
    /// [descriptor](super::FileQueue::completion_fd) to wait at. Calls from another thread fail with [`FileError::OtherThread`], and a drop there quarantines the
    /// buffers in flight.
    pub one_thread: bool,
    /// Polls the device for completions instead of waiting for its interrupt
    /// (`IORING_SETUP_IOPOLL`, Linux 5.1), if the file supports it: with O_DIRECT, on a device with
    /// poll queues. Waiting keeps a core busy, and there is no
    /// [descriptor](super::FileQueue::completion_fd) to wait at.
    pub poll: bool,
}

impl Default for Options<'_, '_> {
    fn default() -> Self {
        Self {
            depth: 32,
            direct: true,
            block: 4096,
            fixed: &[],
            ring: true,
            one_thread: false,
            poll: false,
        }
    }
}

/// A completed transfer, and its buffer.
#[derive(Debug)]
pub struct Completion<B> {
    /// The caller's tag.
    pub tag: u64,
    /// The operation.
    pub op: Op,
    /// Its offset in the file.
    pub offset: u64,
    /// Its length in bytes.
    pub len: usize,
    /// Its buffer.
    pub buffer: B,
    /// The time from its submission until its completion was seen.
    pub latency: Duration,
    /// Whether all `len` bytes were transferred.
    pub result: Result<(), FileError>,
}

/// A transfer that was not queued, and its buffer. `?` converts it to a [`FileError`] where the
/// buffer is not needed.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Rejected<B> {
    /// The buffer, unchanged.
    pub buffer: B,
    /// The reason.
    #[source]
    pub error: FileError,
}

impl<B> fmt::Debug for Rejected<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejected").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> From<Rejected<B>> for FileError {
    /// Drops the buffer.
    fn from(rejected: Rejected<B>) -> Self {
        rejected.error
    }
}

/// The result of one call that submits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Submitted {
    /// The number of transfers.
    pub transfers: u32,
    /// The duration of the call; without a ring, it includes the transfers.
    pub elapsed: Duration,
}

/// A transfer that is queued or in flight.
pub(super) struct Slot<B> {
    pub(super) buffer: B,
    pub(super) tag: u64,
    pub(super) op: Op,
    pub(super) offset: u64,
    pub(super) len: usize,
    /// The length in whole blocks.
    pub(super) padded: usize,
    pub(super) done: usize,
    pub(super) retries: u32,
    /// When it was submitted.
    pub(super) since: Instant,
}

/// The number of retries of a transfer after `EINTR` or `EAGAIN`.
pub(super) const RETRIES: u32 = 1000;

impl<B> Slot<B> {
    /// Returns the result of the transfer after a completion of the kernel; `None` if it has to be
    /// continued.
    pub(super) fn result_of(
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
        // With O_DIRECT a partial block ends at the end of the file.
        if moved == 0 || !self.done.is_multiple_of(target.block as usize) {
            return Some(Err(FileError::Short { op, path: path(), offset, len, done: self.done }));
        }
        None
    }
}
