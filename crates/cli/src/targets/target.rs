//! The interface of all targets: requests, completions, and the trait.

use super::error::TargetError;
pub(crate) use super::record::{Io, IoDirection};
use crate::signal::Interrupt;
use pinfold_nvme::EventFd;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
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
    /// How many bytes were moved (fewer than requested only where a source ends), or the error.
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
    /// How many were queued: the first ones.
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
    /// As the user named it.
    pub(crate) name: String,
    /// How many bytes it holds; `None` if it grows with what is written.
    pub(crate) capacity: Option<u64>,
    /// The unit of offsets, bytes: a power of two.
    pub(crate) block: usize,
    /// The preferred alignment of offsets and lengths, bytes: the block, or the alignment a file
    /// was opened for.
    pub(crate) alignment: usize,
    /// How many requests may be in flight.
    pub(crate) max_depth: usize,
    /// The largest request, bytes.
    pub(crate) max_transfer: usize,
    /// Why it cannot deallocate ranges, if it cannot.
    pub(crate) no_trim: Option<&'static str>,
    /// Whether every range whose trim has succeeded reads as zeroes.
    pub(crate) trim_zeroes: bool,
}

/// What bytes are read from and written to.
pub(crate) trait Target<B> {
    /// Returns the properties.
    fn info(&self) -> &TargetInfo;
    /// Queues a request. The time of its submission is recorded in its [`Io`].
    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>>;
    /// Queues requests in their order, as [`submit`](Self::submit) does. A target that maps buffers
    /// maps them by one call.
    fn submit_many(&mut self, requests: Vec<Request<B>>) -> Result<(), RejectedBatch<B>> {
        submit_each(requests, |request| self.submit(request))
    }
    /// Submits what is queued and adds what has completed to `completed`, without waiting.
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
    /// Has flushes executed beside other requests, if they would keep the caller waiting; `wake` is
    /// signalled when one has completed.
    fn flush_in_background(&mut self, wake: &Arc<EventFd>) {
        let _ = wake;
    }
    /// Submits what is queued, and prepares for waiting at [`completion_fd`](Self::completion_fd)
    /// until the next completion. Adds to `completed` what it had to give up. Returns how long to
    /// wait at most before the next poll: zero if that may return something now.
    fn arm(&mut self, completed: &mut Vec<Completion<B>>) -> Duration {
        let _ = completed;
        Duration::ZERO
    }
    /// Fails what waits for another attempt, and makes none from now on: the caller gives up.
    fn abandon_retries(&mut self) {}
    /// Makes what was written durable, as far as the target has durable storage. Once `interrupt`
    /// is raised, it is not tried again.
    fn sync(&mut self, interrupt: &Interrupt) -> Result<(), TargetError>;
}
