//! What bytes are read from and written to: a file, or a controller. Buffers move in with a request and come back
//! with its result; meanwhile nobody else has them.

pub(crate) mod file;
pub(crate) mod nvme;
pub(crate) mod part;
pub(crate) mod spec;

#[cfg(test)]
pub(crate) mod fake;

use pinfold::uring::FileError;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::AccessError;
use pinfold_nvme::driver::{CommandError, PollError, Reject};

/// Bytes of a buffer that the program owns at the moment.
pub(crate) trait Bytes {
    /// Copies the bytes from `at` out.
    fn read_at(&self, at: usize, to: &mut [u8]) -> Result<(), TargetError>;
    /// Copies `from` to the bytes from `at`.
    fn write_at(&mut self, at: usize, from: &[u8]) -> Result<(), TargetError>;
    /// Sets `len` bytes from `at` to 0.
    fn zero(&mut self, at: usize, len: usize) -> Result<(), TargetError>;
}

/// Which way a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoDirection {
    /// From the target into the buffer.
    Read,
    /// From the buffer to the target.
    Write,
}

/// One request: `len` bytes at `offset`, from or to the start of `buffer`.
#[derive(Debug)]
pub(crate) struct Request<B> {
    /// Which way.
    pub(crate) way: IoDirection,
    /// Where in the target, bytes; a multiple of its block.
    pub(crate) offset: u64,
    /// How many bytes. Where it is no multiple of the target's block, a write fills the last block from the
    /// buffer (which the caller has zeroed there), and a read may leave more in the buffer.
    pub(crate) len: usize,
    /// Comes back with the result.
    pub(crate) slot: usize,
    /// The memory.
    pub(crate) buffer: B,
}

/// A request that is over.
#[derive(Debug)]
pub(crate) struct Done<B> {
    /// That of the request.
    pub(crate) slot: usize,
    /// The memory again, unless it had to be quarantined.
    pub(crate) buffer: Option<B>,
    /// How many bytes were moved (fewer than asked only where a source ends), or why not.
    pub(crate) result: Result<usize, TargetError>,
}

/// A request that was not begun.
#[derive(Debug)]
pub(crate) struct SubmitError<B> {
    /// The memory again, unless it had to be quarantined.
    pub(crate) buffer: Option<B>,
    /// Why.
    pub(crate) error: TargetError,
}

/// What a target is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Info {
    /// As the user named it.
    pub(crate) name: String,
    /// How many bytes it holds; `None` where it grows with what is written.
    pub(crate) capacity: Option<u64>,
    /// The unit of offsets, bytes: a power of two.
    pub(crate) block: usize,
    /// What requests are best multiples of, in place and length, bytes: the block, or what a file without one was opened for.
    pub(crate) unit: usize,
    /// How many requests may be in flight.
    pub(crate) max_depth: usize,
    /// The largest request, bytes.
    pub(crate) max_transfer: usize,
}

/// What bytes are read from and written to.
pub(crate) trait Target<B> {
    /// What it is.
    fn info(&self) -> &Info;
    /// Begins a request.
    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>>;
    /// Adds to `done` what is over, without waiting.
    fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError>;
    /// Waits until something may be over (or a signal came), then as `poll`.
    fn wait(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError>;
    /// What was written is durable when this returns, as far as the target has anything durable.
    fn sync(&mut self) -> Result<(), TargetError>;
}

/// What went wrong at a target.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TargetError {
    /// A file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A controller said no.
    #[error("{target}: {action} {len} bytes at {offset}: {error}")]
    Command {
        /// The target's name.
        target: String,
        /// `reading`, `writing`, `flushing`.
        action: &'static str,
        /// Where.
        offset: u64,
        /// How many bytes.
        len: usize,
        /// What the controller said.
        error: CommandError,
    },
    /// A controller said nothing.
    #[error(
        "{target}: {action} {len} bytes at {offset}: no answer in time; the buffer is quarantined, since the \
         controller may still reach it: check the device"
    )]
    Silent {
        /// The target's name.
        target: String,
        /// `reading`, `writing`, `flushing`.
        action: &'static str,
        /// Where.
        offset: u64,
        /// How many bytes.
        len: usize,
    },
    /// The driver did not take a request.
    #[error("{target}: {reason}")]
    Rejected {
        /// The target's name.
        target: String,
        /// Why not.
        reason: Reject,
    },
    /// The controller can not be asked for completions.
    #[error("{target}: {error}")]
    Poll {
        /// The target's name.
        target: String,
        /// Why not.
        error: PollError,
    },
    /// The domain refused to map a buffer, or could not take it back.
    #[error("{target}: {error}")]
    Domain {
        /// The target's name.
        target: String,
        /// Why.
        error: BackendError,
    },
    /// An access to a buffer outside of it.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// What the fake says in tests.
    #[cfg(test)]
    #[error("the fake failed")]
    Fake,
}
