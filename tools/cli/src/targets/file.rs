//! A file or block device, through io_uring.

use super::target::{
    Completion, DataBuffer, Durability, Flusher, Io, IoDirection, Request, SubmitError, Target,
    TargetError, TargetInfo,
};
use super::trimmer::{Trimmer, punch};
use crate::signal::Interrupt;
use pinfold::Buffer;
use pinfold::uring::{self, FileError, FileQueue, Fixed, Note, Op, Options};
use pinfold_core::domain::Pinned;
use pinfold_nvme::EventFd;
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest request.
pub(crate) const MAX_TRANSFER: usize = 64 << 20;
/// The most requests in flight.
pub(crate) const MAX_DEPTH: usize = 4096;
/// Requests are multiples of this.
pub(crate) const BLOCK: usize = 512;
/// A system call submits at most this many requests, so that the device has work while more are
/// prepared.
const BATCH: usize = 32;
/// After how long requests that the kernel did not accept are submitted again.
const RESUBMIT: Duration = Duration::from_millis(10);

impl DataBuffer for Buffer {
    fn read_at(&self, at: usize, to: &mut [u8]) -> Result<(), TargetError> {
        Ok(self.memory().copy_to_slice(at, to)?)
    }
    fn write_at(&mut self, at: usize, from: &[u8]) -> Result<(), TargetError> {
        Ok(self.memory().copy_from_slice(at, from)?)
    }
    fn zero(&mut self, at: usize, len: usize) -> Result<(), TargetError> {
        Ok(self.memory().fill(at, len, 0)?)
    }
}

/// Returns the largest power of two, at most a page, that divides all of `sizes`: the alignment to
/// ask O_DIRECT for.
pub(crate) fn alignment(sizes: impl IntoIterator<Item = u64>) -> usize {
    1 << sizes.into_iter().fold(0, |all, size| all | size).trailing_zeros().min(12)
}

/// The options of a file target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileOptions {
    /// All offsets and lengths are multiples of this power of two, at most 4096.
    pub(crate) alignment: usize,
    /// The most requests in flight.
    pub(crate) depth: usize,
    /// Bypasses the page cache where the file system allows it.
    pub(crate) direct: bool,
    /// Polls the device for completions instead of waiting for its interrupt.
    pub(crate) poll: bool,
    /// Stays with the thread that creates it.
    pub(crate) one_thread: bool,
}

/// A file as a target. It grows with the data written.
#[derive(Debug)]
pub(crate) struct FileTarget<'m, B: Pinned> {
    info: TargetInfo,
    /// The same file, for trims and flushes.
    for_ranges: File,
    queue: FileQueue<'m, B>,
    /// The requests in the queue; the index is the queue's tag.
    in_flight: Vec<Option<Io>>,
    free: Vec<usize>,
    finished: Vec<uring::Completion<B>>,
    /// Requests that were executed at once.
    executed: Vec<Completion<B>>,
    /// The tags of requests that are queued and not submitted to the kernel.
    unsubmitted: Vec<usize>,
    /// The kernel did not accept all of the last submission: the next poll submits the rest.
    stalled: bool,
    /// Submits before it waits, and so by a call of its own, so that the end of submission is
    /// known.
    measures: bool,
    durability: Durability,
    /// Flush and trim beside other requests, if the caller is an event loop.
    flusher: Option<Flusher<(Io, B)>>,
    trimmer: Option<Trimmer<(Io, B)>>,
    /// Deallocates a range of the file.
    punch: fn(&File, u64, u64) -> rustix::io::Result<()>,
}

impl<'m, B: Pinned> FileTarget<'m, B> {
    /// Creates a queue for `file`, called `path` in messages, with buffers in `memory`.
    pub(crate) fn new(
        file: File,
        path: &Path,
        options: FileOptions,
        memory: Fixed<'m>,
    ) -> Result<Self, FileError> {
        let FileOptions { alignment, depth, direct, poll, one_thread } = options;
        let system = |error: std::io::Error| FileError::System {
            call: "dup",
            path: path.into(),
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        };
        let for_ranges = file.try_clone().map_err(system)?;
        let queue = FileQueue::new(
            file,
            path,
            &Options {
                depth: u32::try_from(depth).unwrap_or(u32::MAX),
                direct,
                block: u32::try_from(alignment).unwrap_or(4096),
                fixed: &[memory],
                ring: true,
                one_thread,
                poll,
            },
        )?;
        let info = TargetInfo {
            name: path.display().to_string(),
            capacity: None,
            block: 1,
            alignment,
            max_depth: MAX_DEPTH,
            max_transfer: MAX_TRANSFER,
            no_trim: None,
            trim_zeroes: true,
        };
        Ok(Self {
            info,
            for_ranges,
            queue,
            in_flight: vec![None; depth],
            free: (0..depth).rev().collect(),
            finished: Vec::with_capacity(depth),
            executed: Vec::new(),
            unsubmitted: Vec::with_capacity(BATCH),
            stalled: false,
            measures: false,
            durability: Durability::default(),
            flusher: None,
            trimmer: None,
            punch,
        })
    }

    /// Makes ranges be deallocated by `punch`.
    #[cfg(test)]
    pub(crate) fn punching(self, punch: fn(&File, u64, u64) -> rustix::io::Result<()>) -> Self {
        Self { punch, ..self }
    }

    /// Returns what fell back to something slower, and why. The command that raises a limit is
    /// reported once for the run.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        self.queue.notes().iter().map(|note| match note.memlock() {
            Some(_) => note.without_fix().to_string(),
            None => note.to_string(),
        })
    }

    /// Returns the bytes that the limit of locked memory refused.
    pub(crate) fn memlock_refused(&self) -> u64 {
        self.queue.notes().iter().filter_map(Note::memlock).map(|refused| refused.requested).sum()
    }

    /// Returns the file's present length.
    pub(crate) fn bytes(&self) -> Result<u64, FileError> {
        self.queue.len()
    }

    /// Submits the queued requests. Requests that the kernel does not accept stay queued; the next
    /// poll retries or reports why.
    fn submit_batch(&mut self) {
        let submitted = self.queue.submit();
        if let Err(error) = &submitted {
            self.note_stalled(error);
        }
        self.note_submitted();
    }

    /// Records that the kernel did not accept all requests, and warns once until it does.
    fn note_stalled(&mut self, error: &FileError) {
        if !std::mem::replace(&mut self.stalled, true) {
            tracing::warn!("{}: {error}; requests wait, and are submitted again", self.info.name);
        }
    }

    /// Records that the queued requests are submitted now.
    fn note_submitted(&mut self) {
        let now = Instant::now();
        for tag in self.unsubmitted.drain(..) {
            if let Some(Some(io)) = self.in_flight.get_mut(tag) {
                io.queued = now;
            }
        }
    }

    fn complete(&mut self, completed: &mut Vec<Completion<B>>) {
        self.take_background(false);
        completed.append(&mut self.executed);
        for done in self.finished.drain(..) {
            let Some(tag) = usize::try_from(done.tag).ok() else { continue };
            let Some(io) = self.in_flight.get_mut(tag).and_then(Option::take) else { continue };
            self.free.push(tag);
            let result = match done.result {
                Ok(()) => Ok(io.len),
                // The file has been truncated meanwhile; the engine decides whether that is an
                // error.
                Err(FileError::Short { op: Op::Read, done, .. }) => Ok(done),
                Err(error) => Err(error.into()),
            };
            completed.push(Completion { io, buffer: Some(done.buffer), result });
        }
    }

    /// Punches a hole, since a queue has no such operation: at once, or on the thread for that.
    fn trim(&mut self, io: Io, buffer: B) {
        let (offset, len) = (io.offset, io.len as u64);
        if let Some(trimmer) = &mut self.trimmer {
            return trimmer.push((offset, len), (io, buffer));
        }
        let trimmed = (self.punch)(&self.for_ranges, offset, len);
        self.executed.push(trim_completion(&self.info.name, io, buffer, trimmed));
    }

    /// Shares the state of flushes with the other queues of the same file.
    pub(crate) fn sharing(self, durability: &Durability) -> Self {
        Self { durability: durability.clone(), ..self }
    }

    /// Flushes what has been written through any descriptor of the file: at once, or on the thread
    /// for that.
    fn flush(&mut self, io: Io, buffer: B) {
        if let Some(flusher) = &mut self.flusher {
            return flusher.push((io, buffer));
        }
        let flushed = self.durability.flush(|| rustix::fs::fdatasync(&self.for_ranges));
        self.executed.push(flush_completion(&self.info.name, io, buffer, flushed));
    }

    /// Processes flushes and trims that completed on their threads, after waiting for some if
    /// `wait` is set.
    fn take_background(&mut self, wait: bool) {
        let Self { flusher, trimmer, executed, info, .. } = self;
        if let Some(flusher) = flusher {
            flusher.take(wait, |(io, buffer), flushed| {
                executed.push(flush_completion(&info.name, io, buffer, flushed));
            });
        }
        if let Some(trimmer) = trimmer {
            trimmer.take(wait && executed.is_empty(), |(io, buffer), trimmed| {
                executed.push(trim_completion(&info.name, io, buffer, trimmed));
            });
        }
    }
}

fn trim_completion<B>(
    name: &str,
    io: Io,
    buffer: B,
    trimmed: rustix::io::Result<()>,
) -> Completion<B> {
    let error = |errno| TargetError::Trim { target: name.to_owned(), io: Box::new(io), errno };
    let result = trimmed.map(|()| io.len).map_err(error);
    Completion { io, buffer: Some(buffer), result }
}

fn flush_completion<B>(
    name: &str,
    io: Io,
    buffer: B,
    flushed: rustix::io::Result<()>,
) -> Completion<B> {
    let error =
        |errno| FileError::System { call: "fdatasync", path: Path::new(name).into(), errno };
    let result = flushed.map(|()| 0).map_err(|errno| TargetError::from(error(errno)));
    Completion { io, buffer: Some(buffer), result }
}

impl<B: Pinned> Target<B> for FileTarget<'_, B> {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn submit(&mut self, Request { mut io, buffer }: Request<B>) -> Result<(), SubmitError<B>> {
        let tag = self.free.last().copied().unwrap_or(usize::MAX);
        let queued = match io.direction {
            IoDirection::Read => self.queue.read(buffer, io.offset, io.len, tag as u64),
            IoDirection::Write => self.queue.write(buffer, io.offset, io.len, tag as u64),
            IoDirection::Trim => {
                io.set_queued();
                self.trim(io, buffer);
                return Ok(());
            }
            IoDirection::Flush => {
                io.set_queued();
                self.flush(io, buffer);
                return Ok(());
            }
        };
        queued.map_err(|rejected| SubmitError {
            buffer: Some(rejected.buffer),
            error: rejected.error.into(),
        })?;
        self.free.pop();
        if let Some(slot) = self.in_flight.get_mut(tag) {
            *slot = Some(io);
        }
        // One system call for many: the next poll or wait submits the rest.
        self.unsubmitted.push(tag);
        if self.unsubmitted.len() >= BATCH {
            self.submit_batch();
        }
        Ok(())
    }

    fn poll(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        if !self.unsubmitted.is_empty() {
            self.submit_batch();
        }
        let polled = self.queue.poll(&mut self.finished);
        self.complete(completed);
        match polled {
            Err(error) if error.is_shortage() => self.note_stalled(&error),
            polled => {
                polled?;
                self.stalled = false;
            }
        }
        Ok(())
    }

    fn wait(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        if !self.executed.is_empty() {
            return self.poll(completed);
        }
        if self.measures && !self.unsubmitted.is_empty() {
            self.submit_batch();
        }
        if self.queue.in_flight() == 0 {
            self.take_background(true);
        }
        // The call below submits and waits.
        self.note_submitted();
        // One wake-up for an eighth of the requests, while the other seven keep the device busy.
        let waited = self.queue.wait((self.queue.in_flight() / 8).max(1), &mut self.finished);
        self.complete(completed);
        Ok(waited.map(|_| ())?)
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.completion_fd()
    }

    fn arm(&mut self) -> Duration {
        if !self.unsubmitted.is_empty() {
            self.submit_batch();
        }
        // No completion announces that the kernel has memory again.
        if self.stalled {
            return RESUBMIT;
        }
        // A descriptor or the flusher wakes the caller, or there is something that only a poll
        // finds.
        let wakes = self.queue.in_flight() == 0 || self.queue.completion_fd().is_some();
        if self.executed.is_empty() && wakes { Duration::MAX } else { Duration::ZERO }
    }

    fn measure_submission(&mut self) {
        self.measures = true;
    }

    fn work_in_background(&mut self, wake: &Arc<EventFd>) {
        let flusher = self
            .for_ranges
            .try_clone()
            .and_then(|file| Flusher::new(file, self.durability.clone(), wake.clone()));
        self.flusher = flusher
            .inspect_err(|error| tracing::debug!("flushes are not in the background: {error}"))
            .ok();
        let punch = self.punch;
        let trimmer = self.for_ranges.try_clone().and_then(|file| {
            Trimmer::new(move |(offset, len)| punch(&file, offset, len), wake.clone())
        });
        self.trimmer = trimmer
            .inspect_err(|error| tracing::debug!("trims are not in the background: {error}"))
            .ok();
    }

    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        self.queue.sync(true)?;
        // An error that an earlier flush has taken.
        let error = |errno| FileError::System {
            call: "fdatasync",
            path: Path::new(&self.info.name).into(),
            errno,
        };
        Ok(self.durability.flush(|| Ok(())).map_err(error)?)
    }
}
