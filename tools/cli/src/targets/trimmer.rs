//! A thread that deallocates ranges of a file beside the requests of an event loop: to punch a hole
//! takes as long as the file system, or the device below it, has to free what is there.

use pinfold_nvme::EventFd;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

/// Deallocates `len` bytes of a file at `offset`, which then read as zeroes.
///
/// # Errors
/// The system's; a call that a signal has interrupted is repeated.
pub(crate) fn punch(file: &File, offset: u64, len: u64) -> rustix::io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    retry_on_intr(|| fallocate(file, flags, offset, len))
}

/// The thread, and its requests in order.
#[derive(Debug)]
pub(crate) struct Trimmer<R> {
    ranges: Sender<(u64, u64)>,
    results: Receiver<rustix::io::Result<()>>,
    waiting: VecDeque<R>,
}

impl<R> Trimmer<R> {
    /// Starts the thread, which calls `trim` with the offset and the length of each range and
    /// signals `wake` afterwards. It ends when this is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn new(
        mut trim: impl FnMut((u64, u64)) -> rustix::io::Result<()> + Send + 'static,
        wake: Arc<EventFd>,
    ) -> std::io::Result<Self> {
        let ((ranges, received), (sender, results)) = (channel(), channel());
        std::thread::Builder::new().name("trim".into()).spawn(move || {
            for range in received {
                if sender.send(trim(range)).is_err() {
                    return;
                }
                wake.signal();
            }
        })?;
        Ok(Self { ranges, results, waiting: VecDeque::new() })
    }

    /// Adds `request`, to be completed when the range is deallocated.
    pub(crate) fn push(&mut self, range: (u64, u64), request: R) {
        self.waiting.push_back(request);
        // It fails if the thread has panicked; then no result arrives either.
        let _ = self.ranges.send(range);
    }

    /// Passes each request whose range is done to `each`, with the outcome; waits for the first if
    /// `wait` is set.
    pub(crate) fn take(&mut self, mut wait: bool, mut each: impl FnMut(R, rustix::io::Result<()>)) {
        while !self.waiting.is_empty() {
            let result = match std::mem::take(&mut wait) {
                true => self.results.recv().unwrap_or(Err(Errno::IO)),
                false => match self.results.try_recv() {
                    Ok(result) => result,
                    Err(TryRecvError::Empty) => return,
                    Err(TryRecvError::Disconnected) => Err(Errno::IO),
                },
            };
            if let Some(request) = self.waiting.pop_front() {
                each(request, result);
            }
        }
    }
}
