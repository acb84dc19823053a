//! A file, by io_uring.

use super::{Bytes, Done, Info, IoDirection, Request, SubmitError, Target, TargetError};
use pinfold::Buffer;
use pinfold::uring::{self, FileError, FileQueue, Fixed, Note, Op, Options};
use pinfold_core::domain::Pinned;
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

/// The largest request.
pub(crate) const MAX_TRANSFER: usize = 64 << 20;
/// The most requests in flight.
pub(crate) const MAX_DEPTH: usize = 4096;
/// Requests are multiples of this.
pub(crate) const BLOCK: usize = 512;
/// So many requests are handed over at the latest, so that the device has something to do meanwhile.
const BATCH: usize = 32;

impl Bytes for Buffer {
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

/// The largest power of two, up to a page, that both are multiples of: O_DIRECT is asked whether it takes that.
pub(crate) fn granule((fewest, most): (usize, usize)) -> usize {
    1 << (fewest | most).trailing_zeros().min(12)
}

/// A file as a target. It grows with what is written.
#[derive(Debug)]
pub(crate) struct FileTarget<'m, B: Pinned> {
    info: Info,
    queue: FileQueue<'m, B>,
    over: Vec<uring::Done<B>>,
    /// How many requests are queued that the kernel has not been told of.
    untold: usize,
}

impl<'m, B: Pinned> FileTarget<'m, B> {
    /// The file as a target for requests of multiples of `block` bytes from buffers in `memory`, up to `depth` at a time;
    /// with `one_thread` it stays with the thread that calls this.
    pub(crate) fn new(
        file: File,
        path: &Path,
        (block, depth): (usize, usize),
        memory: Fixed<'m>,
        (one_thread, poll): (bool, bool),
    ) -> Result<Self, FileError> {
        let unit = granule((block, block));
        let block = u32::try_from(unit).unwrap_or(4096);
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        let fixed = [memory];
        let options = Options { depth, direct: true, block, fixed: &fixed, ring: true, one_thread, poll };
        let queue = FileQueue::new(file, path, &options)?;
        let info = Info {
            name: path.display().to_string(),
            capacity: None,
            block: 1,
            unit,
            max_depth: MAX_DEPTH,
            max_transfer: MAX_TRANSFER,
        };
        Ok(Self { info, queue, over: Vec::new(), untold: 0 })
    }

    /// What fell back to something slower, and why. The command that mends a limit is told once for the whole run.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        let words = |note: &Note| match note {
            Note::NotFixed { asked, used, limit: Some(limit), errno: Errno::NOMEM } => {
                format!("no fixed buffers: {asked} bytes asked for, {used} pinned already, {limit} allowed")
            }
            note => note.to_string(),
        };
        self.queue.notes().iter().map(move |note| format!("{}: {}", self.info.name, words(note)))
    }

    /// How much it must be allowed to lock, where the limit kept its buffers from being registered.
    pub(crate) fn memlock_needed(&self) -> Option<u64> {
        self.queue.notes().iter().find_map(|note| match note {
            Note::NotFixed { asked, used, limit: Some(_), errno: Errno::NOMEM } => {
                Some(used.saturating_add(*asked))
            }
            _ => None,
        })
    }

    /// How long the file is now.
    pub(crate) fn bytes(&self) -> Result<u64, FileError> {
        self.queue.len()
    }

    /// What the kernel does not take now stays queued, and the next call tries again or says why not.
    fn tell(&mut self) {
        self.untold = 0;
        if let Err(error) = self.queue.submit() {
            tracing::debug!(%error, "not submitted yet");
        }
    }

    fn hand_over(&mut self, done: &mut Vec<Done<B>>) {
        done.extend(self.over.drain(..).map(|over| {
            let result = match over.result {
                Ok(()) => Ok(over.len),
                // How a file that has been cut short looks: whoever reads knows what that means.
                Err(FileError::Short { op: Op::Read, done, .. }) => Ok(done),
                Err(error) => Err(error.into()),
            };
            let slot = usize::try_from(over.tag).unwrap_or(usize::MAX);
            Done { slot, buffer: Some(over.buffer), result }
        }));
    }
}

impl<B: Pinned> Target<B> for FileTarget<'_, B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>> {
        let Request { way, offset, len, slot, buffer } = request;
        let queued = match way {
            IoDirection::Read => self.queue.read(buffer, offset, len, slot as u64),
            IoDirection::Write => self.queue.write(buffer, offset, len, slot as u64),
        };
        queued.map_err(|rejected| SubmitError {
            buffer: Some(rejected.buffer),
            error: rejected.error.into(),
        })?;
        // The next poll or wait hands it over, with all else that was begun together, by one system call.
        self.untold += 1;
        if self.untold >= BATCH {
            self.tell();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        if self.untold > 0 {
            self.tell();
        }
        let polled = self.queue.poll(&mut self.over);
        self.hand_over(done);
        Ok(polled.map(|_| ())?)
    }

    fn wait(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        self.untold = 0;
        // An eighth of those under way at a time: seven more keep the device busy meanwhile, and a wake-up is for several.
        let waited = self.queue.wait((self.queue.in_flight() / 8).max(1), &mut self.over);
        self.hand_over(done);
        Ok(waited.map(|_| ())?)
    }

    fn sync(&mut self) -> Result<(), TargetError> {
        Ok(self.queue.sync(true)?)
    }
}
