//! The interface of all targets: requests, completions, and the trait.

use pinfold::requests::Refusal;
use pinfold::uring::FileError;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::AccessError;
use pinfold_nvme::EventFd;
use pinfold_nvme::driver::{CommandError, PollError, Reject};
use rustix::io::{Errno, retry_on_intr};
use std::fmt;
use std::fs::File;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::signal::Interrupt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A data buffer that the program owns at the moment.
pub(crate) trait DataBuffer {
    /// Copies the bytes from `at` into `to`.
    fn read_at(&self, at: usize, to: &mut [u8]) -> Result<(), TargetError>;
    /// Copies `from` to the bytes from `at`.
    fn write_at(&mut self, at: usize, from: &[u8]) -> Result<(), TargetError>;
    /// Zeroes `len` bytes from `at`.
    fn zero(&mut self, at: usize, len: usize) -> Result<(), TargetError>;
}

/// An I/O with its data buffer.
#[derive(Debug)]
pub(crate) struct Request<B> {
    /// The record.
    pub(crate) io: Io,
    /// The data, from its first byte.
    pub(crate) buffer: B,
}

/// A completed request.
#[derive(Debug)]
pub(crate) struct Completion<B> {
    /// The request's record.
    pub(crate) io: Io,
    /// The buffer, unless it had to be quarantined.
    pub(crate) buffer: Option<B>,
    /// The number of bytes moved (fewer than requested only where a source ends), or the error.
    pub(crate) result: Result<usize, TargetError>,
}

/// A request that was not queued.
#[derive(Debug)]
pub(crate) struct SubmitError<B> {
    /// The buffer, unless it had to be quarantined.
    pub(crate) buffer: Option<B>,
    /// The error.
    pub(crate) error: TargetError,
}

/// A batch of which not all requests were queued.
#[derive(Debug)]
pub(crate) struct RejectedBatch<B> {
    /// The number of queued requests: the first ones.
    pub(crate) queued: usize,
    /// The buffers of the others, except those that had to be quarantined.
    pub(crate) buffers: Vec<B>,
    /// The error.
    pub(crate) error: Box<TargetError>,
}

/// Queues the requests of a batch one by one.
pub(crate) fn submit_each<B>(
    requests: impl IntoIterator<Item = Request<B>>,
    mut submit: impl FnMut(Request<B>) -> Result<(), SubmitError<B>>,
) -> Result<(), RejectedBatch<B>> {
    let (mut requests, mut queued) = (requests.into_iter(), 0);
    while let Some(request) = requests.next() {
        if let Err(SubmitError { buffer, error }) = submit(request) {
            let rest = requests.map(|request| request.buffer);
            let buffers = buffer.into_iter().chain(rest).collect();
            return Err(RejectedBatch { queued, buffers, error: Box::new(error) });
        }
        queued += 1;
    }
    Ok(())
}

/// The properties of a target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct TargetInfo {
    /// The name that the user gave.
    pub(crate) name: String,
    /// The capacity in bytes; `None` if it grows with the data written.
    pub(crate) capacity: Option<u64>,
    /// The unit of offsets, bytes: a power of two.
    pub(crate) block: usize,
    /// The preferred alignment of offsets and lengths, bytes: the block, or the alignment a file
    /// was opened for.
    pub(crate) alignment: usize,
    /// The most requests in flight.
    pub(crate) max_depth: usize,
    /// The largest request, bytes.
    pub(crate) max_transfer: usize,
    /// Why it cannot deallocate ranges, if it cannot.
    pub(crate) no_trim: Option<&'static str>,
    /// Whether every range whose trim has succeeded reads as zeroes.
    pub(crate) trim_zeroes: bool,
}

/// A file or a namespace that bytes are read from and written to.
pub(crate) trait Target<B> {
    /// Returns the properties.
    fn info(&self) -> &TargetInfo;
    /// Queues a request. The time of its submission is recorded in its [`Io`].
    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>>;
    /// Queues requests in their order, as [`submit`](Self::submit) does.
    fn submit_many(&mut self, requests: Vec<Request<B>>) -> Result<(), RejectedBatch<B>> {
        submit_each(requests, |request| self.submit(request))
    }
    /// Submits queued requests and adds completed ones to `completed`, without waiting.
    fn poll(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError>;
    /// Waits until something may have completed (or a signal arrives), then as `poll`.
    fn wait(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError>;
    /// Records the end of submission exactly from here on, also where that takes a system call
    /// more.
    fn measure_submission(&mut self) {}
    /// Returns how many requests have been carried out and hold their buffers until no device can
    /// reach them.
    fn held(&self) -> usize {
        0
    }
    /// Returns a descriptor that becomes readable when something may have completed, for an event
    /// loop; `None` if the target has to be polled. See [`arm`](Self::arm).
    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Executes flushes and trims beside other requests, if they would keep the caller waiting;
    /// `wake` is signalled when one has completed.
    fn work_in_background(&mut self, wake: &Arc<EventFd>) {
        let _ = wake;
    }
    /// Returns a descriptor that becomes readable when a buffer can return that is held, always the
    /// same; `None` if there is none. See [`arm`](Self::arm).
    fn flush_fd(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Submits what is queued, and prepares for waiting at [`completion_fd`](Self::completion_fd)
    /// and [`flush_fd`](Self::flush_fd) until the next completion. Returns how long to wait at most
    /// before the next poll: zero if that may return something now, and without a limit if the
    /// descriptors announce every completion.
    fn arm(&mut self) -> Duration {
        Duration::ZERO
    }
    /// Fails requests that wait for another attempt, and makes none from now on.
    fn abandon_retries(&mut self) {}
    /// Fails the requests that `given_up` selects if they wait for another attempt or for others,
    /// and makes no more attempts for those: no one is interested in them any more.
    fn abandon_retries_of(&mut self, given_up: &mut dyn FnMut(&Io) -> bool) {
        let _ = given_up;
    }
    /// Makes written data durable, as far as the target has durable storage. Once `interrupt` is
    /// raised, it is not tried again.
    fn sync(&mut self, interrupt: &Interrupt) -> Result<(), TargetError>;
}

// The record of one I/O.

/// The operation of a request.
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

    /// Records that it has been submitted.
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

// [`Durability`]: whether data written to a file can still become durable; [`Flusher`]: a thread
// that makes it so.

/// The state of a file's flushes that all its queues share.
///
/// The kernel reports that data could not be written back once for each open file (`errseq_t`), to
/// whichever thread flushes next, and all queues share one. From then on no flush of this run may
/// succeed: another queue's data may be what was lost.
///
/// The lock is held during a flush. Otherwise one that runs beside the failing one could succeed
/// before the failure is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Durability(Arc<Mutex<Option<Errno>>>);

impl Durability {
    /// Flushes, unless an earlier flush has failed. One that a signal has interrupted is begun
    /// again.
    ///
    /// # Errors
    /// The error of the first flush that failed.
    pub(crate) fn flush(
        &self,
        flush: impl FnMut() -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let mut failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = *failed {
            return Err(errno);
        }
        retry_on_intr(flush).inspect_err(|errno| *failed = Some(*errno))
    }
}

/// A thread that flushes a file beside the requests of an event loop. Requests for a flush that
/// arrive during one share the next.
#[derive(Debug)]
pub(crate) struct Flusher<R> {
    start: Sender<()>,
    results: Receiver<rustix::io::Result<()>>,
    /// The requests that the present flush completes.
    running: Vec<R>,
    /// Later requests: the flush may have begun before the data that they make durable was written.
    waiting: Vec<R>,
}

impl<R> Flusher<R> {
    /// Starts the thread; it signals `wake` after each flush, and ends when this is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn new(
        file: File,
        durability: Durability,
        wake: Arc<EventFd>,
    ) -> std::io::Result<Self> {
        let ((start, starts), (sender, results)) = (channel(), channel());
        std::thread::Builder::new().name("flush".into()).spawn(move || {
            for () in starts {
                if sender.send(durability.flush(|| rustix::fs::fdatasync(&file))).is_err() {
                    return;
                }
                wake.signal();
            }
        })?;
        Ok(Self { start, results, running: Vec::new(), waiting: Vec::new() })
    }

    /// Adds `request`, to be completed by a flush that begins after this.
    pub(crate) fn push(&mut self, request: R) {
        self.waiting.push(request);
        self.begin();
    }

    fn begin(&mut self) {
        if self.running.is_empty() && !self.waiting.is_empty() {
            std::mem::swap(&mut self.running, &mut self.waiting);
            // It fails if the thread has panicked; then no result arrives either.
            let _ = self.start.send(());
        }
    }

    /// Passes each request whose flush has ended to `each`, with the outcome; waits for one if
    /// `wait` is set.
    pub(crate) fn take(&mut self, wait: bool, mut each: impl FnMut(R, rustix::io::Result<()>)) {
        if self.running.is_empty() {
            return;
        }
        let result = match wait {
            true => self.results.recv().unwrap_or(Err(Errno::IO)),
            false => match self.results.try_recv() {
                Ok(result) => result,
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => Err(Errno::IO),
            },
        };
        self.running.drain(..).for_each(|request| each(request, result));
        self.begin();
    }
}

// Why a target failed.

/// Returns what to do about a controller that did not become ready, to be appended to the error.
fn retried(error: &CommandError) -> &'static str {
    match error {
        CommandError::Status(status) if status.is_not_ready() => {
            "; raise --retry-limit if the device becomes ready later"
        }
        _ => "",
    }
}

/// Returns whether a file system that has no such operation answers a trim with `errno`.
pub(crate) const fn is_no_operation(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)
}

/// Returns what to do about a trim that has failed, to be appended to the error.
const fn trim_advice(errno: Errno) -> &'static str {
    match errno {
        errno if is_no_operation(errno) => {
            "; --rw trim needs a file system with holes, or a device that discards"
        }
        Errno::NOSPC | Errno::DQUOT => "; free some space there: a hole can need some",
        _ => "",
    }
}

/// Why a target failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum TargetError {
    /// A file failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A controller completed a request with an error.
    #[error("{target}: {io}: {error}{}", retried(error))]
    Command {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
        /// The controller's error.
        error: CommandError,
    },
    /// A controller did not complete a request in time.
    #[error(
        "{target}: {io}: no answer in time; the buffer is quarantined, since the controller may still reach it: \
         check the device"
    )]
    Timeout {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
    },
    /// A controller did not make written data durable.
    #[error("{target}: flushing: {}", error.as_ref().map_or("no answer in time".to_owned(), ToString::to_string))]
    Flush {
        /// The target's name.
        target: String,
        /// The controller's error; `None` if it did not respond.
        error: Option<CommandError>,
    },
    /// The driver rejected a request.
    #[error("{target}: {reason}")]
    Rejected {
        /// The target's name.
        target: String,
        /// The driver's reason.
        reason: Reject,
    },
    /// The request loop did not begin a request.
    #[error("{target}: cannot begin a request: {refusal}")]
    Begin {
        /// The target's name.
        target: String,
        /// The loop's reason.
        refusal: Refusal,
    },
    /// A controller cannot be polled for completions.
    #[error("{target}: {error}")]
    Poll {
        /// The target's name.
        target: String,
        /// The driver's error.
        error: PollError,
    },
    /// The domain could not map a buffer, or could not revoke its mapping.
    #[error("{target}: {error}")]
    Domain {
        /// The target's name.
        target: String,
        /// The domain's error.
        error: BackendError,
    },
    /// A file system or block device cannot deallocate a range.
    #[error("{target}: {io}: {errno}{}", trim_advice(*.errno))]
    Trim {
        /// The target's name.
        target: String,
        /// The request.
        io: Box<Io>,
        /// The system's error.
        errno: Errno,
    },
    /// An access outside of a buffer.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// An injected failure.
    #[cfg(test)]
    #[error("the fake failed")]
    Fake,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_flush_none_of_any_queue_succeeds() {
        let (one, other) = (Durability::default(), Durability::default());
        let same = one.clone();
        assert_eq!((one.flush(|| Ok(())), same.flush(|| Ok(()))), (Ok(()), Ok(())));
        let mut interrupted = [Err(Errno::INTR), Err(Errno::INTR), Ok(())].into_iter();
        assert_eq!(
            one.flush(|| interrupted.next().unwrap()),
            Ok(()),
            "it is repeated, and poisons no other"
        );
        assert_eq!(one.flush(|| Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(
            (same.flush(|| Ok(())), one.flush(|| Err(Errno::NOSPC))),
            (Err(Errno::IO), Err(Errno::IO))
        );
        assert_eq!(other.flush(|| Ok(())), Ok(()), "another file");
    }
}
