//! The record of one I/O.

use std::fmt;
use std::time::Instant;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoDirection {
    /// Reads from the target into the buffer.
    Read,
    /// Writes the buffer to the target.
    Write,
    /// Deallocates the range; the buffer is not used.
    Trim,
    /// Makes completed writes durable, as [`sync`](super::target::Target::sync) does, beside other
    /// requests; neither the range nor the buffer is used.
    Flush,
}

/// The record of one I/O. It passes from the engine through the target to the completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Io {
    /// The operation.
    pub(crate) direction: IoDirection,
    /// The first byte of the target, a multiple of its block.
    pub(crate) offset: u64,
    /// The number of bytes. If it is not a multiple of the target's block, a write fills the last
    /// block from the buffer (which the caller has zeroed there), and a read may overwrite more of
    /// the buffer.
    pub(crate) len: usize,
    /// Whether a write writes zeroes, which the buffer holds: the target may write them without it.
    pub(crate) zeroes: bool,
    /// The number by which the engine knows it, if it needs one.
    pub(crate) tag: u64,
    /// When the engine issued it.
    pub(crate) issued: Instant,
    /// When it had been submitted: after the system call or doorbell that submits a whole batch. A
    /// file that waits with the same call (see
    /// [`measure_submission`](super::target::Target::measure_submission)) records when it was
    /// queued.
    pub(crate) queued: Instant,
}

impl Io {
    /// Creates the record of an I/O that is issued now.
    pub(crate) fn new(direction: IoDirection, offset: u64, len: usize) -> Self {
        let now = Instant::now();
        Self { direction, offset, len, zeroes: false, tag: 0, issued: now, queued: now }
    }

    /// Creates the record of a write of zeroes that is issued now.
    pub(crate) fn zeroes(offset: u64, len: usize) -> Self {
        Self { zeroes: true, ..Self::new(IoDirection::Write, offset, len) }
    }

    /// Sets the number by which the engine knows it.
    pub(crate) fn tagged(self, tag: u64) -> Self {
        Self { tag, ..self }
    }

    /// Notes that it has been submitted.
    pub(crate) fn set_queued(&mut self) {
        self.queued = Instant::now();
    }
}

impl fmt::Display for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.direction {
            IoDirection::Read => "reading",
            IoDirection::Write => "writing",
            IoDirection::Trim => "deallocating",
            IoDirection::Flush => "flushing after",
        };
        write!(f, "{verb} {} bytes at {}", self.len, self.offset)
    }
}
