//! A file, read and written through io_uring with O_DIRECT and fixed buffers.
//!
//! A [`FileQueue`] owns the buffers of the transfers that are under way and gives each back with its outcome. A
//! transfer that the kernel makes in parts is completed inside. What can not be had (O_DIRECT, fixed buffers,
//! io_uring itself) the queue does without, and says so in [`FileQueue::notes`].
//!
//! | what | first in Linux | without it |
//! | --- | --- | --- |
//! | io_uring with `READ` and `WRITE` | 5.6 | `pread` and `pwrite`, one after the other |
//! | fixed buffers (`READ_FIXED`, `WRITE_FIXED`), registered files | 5.1 | the kernel pins and looks up each time |
//! | memory of any ring ([`RingBuffers`]) | 5.1 | see there |
//! | polling ([`Options::poll`]) | 5.1, and a device with poll queues | the device's interrupt |
//! | completions when the thread asks ([`Options::one_thread`]) | 6.1 | they interrupt it |
//! | waiting with a time limit | 5.11 | a drop waits as long as the device takes |
//! | what O_DIRECT asks for (`STATX_DIOALIGN`) | 6.1 | blocks of 4 KiB are assumed |
//!
//! O_DIRECT takes whole blocks ([`FileQueue::logical_block`]) only. A read that ends within the last block of a file
//! is asked for in whole blocks, and ends where the file does. A write that ends within a block is padded with zeroes
//! where nothing lies behind it; the file is then too long until [`FileQueue::set_len`] cuts it.

mod error;
mod file;
mod note;
mod registered;
mod ring;
mod slot;
#[cfg(test)]
mod tests;

pub use crate::memory::Fixed;
pub use error::{FileError, Op};
pub use note::{BufferedWhy, Note};
pub use registered::{RegisterError, RingBuffers, Sharing};
pub use slot::{Done, Options, Rejected, Submitted};

use file::{Target, errno_of};
use pinfold_core::domain::Pinned;
use pinfold_core::mem::DmaMemory;
use ring::{Outcome, Ring, Transfer};
use slot::Slot;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::marker::PhantomData;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// How long a drop waits for transfers that are under way.
const LAST_WAIT: Duration = Duration::from_secs(30);

static ABANDONED: AtomicU64 = AtomicU64::new(0);

/// How many buffers of dropped queues this process has given up, since the kernel never said that it is done with
/// them. They stay allocated for ever.
pub fn quarantined_buffers() -> u64 {
    ABANDONED.load(Ordering::Relaxed)
}

/// A file with a queue of transfers. See the [module](self).
///
/// Dropping it waits until the kernel is done with all buffers, at most 30 s (kernels before 5.11: without limit);
/// those that it still holds then are leaked and [counted](quarantined_buffers), never freed. What was queued and not
/// yet submitted is not begun. File and registered memory are the kernel's no more when a drop on the queue's own thread
/// returns.
pub struct FileQueue<'m, B: Pinned> {
    target: Target,
    ring: Ring,
    /// The only thread that may use it, where it is one's.
    home: Option<ThreadId>,
    slots: Vec<Option<Slot<B>>>,
    vacant: Vec<u32>,
    /// Slots to be handed to the kernel, in order.
    queued: Vec<u32>,
    notes: Vec<Note>,
    made: Instant,
    /// How long a drop waits.
    last_wait: Duration,
    /// What is registered is known by its addresses: it must not become other memory meanwhile.
    fixed: PhantomData<DmaMemory<'m>>,
}

impl<B: Pinned> fmt::Debug for FileQueue<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileQueue")
            .field("target", &self.target)
            .field("in_flight", &self.in_flight())
            .field("notes", &self.notes)
            .finish_non_exhaustive()
    }
}

impl<'m, B: Pinned> FileQueue<'m, B> {
    /// The deepest queue, that of io_uring.
    pub const MAX_DEPTH: u32 = 32_768;

    /// Opens the file, as `how` says, and makes a queue for it: [`new`](Self::new).
    ///
    /// # Errors
    /// [`FileError`], among them all that `open` says.
    pub fn open(path: &Path, how: &OpenOptions, options: &Options<'_, 'm>) -> Result<Self, FileError> {
        let file = how.open(path).map_err(|error| FileError::System {
            call: "open",
            path: path.into(),
            errno: errno_of(&error),
        })?;
        Self::new(file, path, options)
    }

    /// A queue for an open file, which is called `path` in messages. O_DIRECT is turned on or off on it, and hence on
    /// all duplicates of the descriptor.
    ///
    /// # Errors
    /// [`FileError::Depth`], [`FileError::Block`]; [`FileError::System`] where it is a folder or can not be examined.
    pub fn new(file: File, path: &Path, options: &Options<'_, 'm>) -> Result<Self, FileError> {
        let depth = options.depth;
        if depth == 0 || depth > Self::MAX_DEPTH {
            return Err(FileError::Depth { asked: depth, limit: Self::MAX_DEPTH });
        }
        if !options.block.is_power_of_two() {
            return Err(FileError::Block { asked: options.block });
        }
        let mut notes = Vec::new();
        let target = Target::new(file, path, options.direct, options.block, &mut notes)?;
        let ring = Ring::new(&target.file, options, &mut notes);
        let home = ring.one_thread().then(|| std::thread::current().id());
        let slots = std::iter::repeat_with(|| None).take(depth as usize).collect();
        let queued = Vec::with_capacity(depth as usize);
        let vacant = (0..depth).rev().collect();
        let (made, last_wait) = (Instant::now(), LAST_WAIT);
        Ok(Self { target, ring, home, slots, vacant, queued, notes, made, last_wait, fixed: PhantomData })
    }

    /// What it does without, and why.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Whether data goes past the page cache.
    pub fn is_direct(&self) -> bool {
        self.target.direct
    }

    /// How many bytes are registered with the ring.
    pub fn fixed_bytes(&self) -> u64 {
        self.ring.fixed_bytes()
    }

    /// Of what offsets are multiples: the block that O_DIRECT asks for, 1 without it.
    pub fn logical_block(&self) -> u32 {
        self.target.block
    }

    /// How many transfers there can be at once.
    pub fn depth(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(Self::MAX_DEPTH)
    }

    /// How many are queued or under way: as many buffers are in the queue's hands.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// How long the file is now, in bytes; of a block device its size.
    ///
    /// # Errors
    /// [`FileError::System`].
    #[expect(clippy::len_without_is_empty, reason = "a system call, not a container")]
    pub fn len(&self) -> Result<u64, FileError> {
        self.target.len()
    }

    /// Makes the file `len` bytes long. After a write that ended within a block it is needed.
    ///
    /// # Errors
    /// [`FileError::Busy`] while transfers are under way, [`FileError::System`].
    pub fn set_len(&mut self, len: u64) -> Result<(), FileError> {
        self.idle()?;
        self.target.set_len(len)
    }

    /// Waits until what was written is on the device: `fsync`, or `fdatasync` where only `data` matters.
    ///
    /// # Errors
    /// [`FileError::Busy`] while transfers are under way, [`FileError::System`].
    pub fn sync(&mut self, data: bool) -> Result<(), FileError> {
        self.idle()?;
        let (call, synced) = match data {
            true => ("fdatasync", rustix::fs::fdatasync(&self.target.file)),
            false => ("fsync", rustix::fs::fsync(&self.target.file)),
        };
        synced.map_err(|errno| self.target.failed(call, errno))
    }

    /// Queues a read of `len` bytes from `offset` of the file to the start of the buffer. Nothing goes until
    /// [`submit`](Self::submit).
    ///
    /// With O_DIRECT, bytes of the buffer behind `len`, up to the block's end, are overwritten too.
    ///
    /// # Errors
    /// The buffer, and [`FileError::Full`], [`FileError::Room`], [`FileError::Misaligned`] or [`FileError::Beyond`].
    pub fn read(&mut self, buffer: B, offset: u64, len: usize, tag: u64) -> Result<(), Rejected<B>> {
        self.enqueue(Op::Read, buffer, offset, len, tag)
    }

    /// Queues a write of `len` bytes from the start of the buffer to `offset` of the file. Nothing goes until
    /// [`submit`](Self::submit).
    ///
    /// With O_DIRECT and a `len` that ends within a block, the rest of the block is zeroed in the buffer and written
    /// too: possible at the file's end only, and [`set_len`](Self::set_len) must follow.
    ///
    /// # Errors
    /// The buffer, and [`FileError::Full`], [`FileError::Room`], [`FileError::Misaligned`] or [`FileError::Beyond`].
    pub fn write(&mut self, buffer: B, offset: u64, len: usize, tag: u64) -> Result<(), Rejected<B>> {
        self.enqueue(Op::Write, buffer, offset, len, tag)
    }

    fn enqueue(&mut self, op: Op, buffer: B, offset: u64, len: usize, tag: u64) -> Result<(), Rejected<B>> {
        let padded = match self.admissible(op, buffer.memory(), offset, len) {
            Ok(padded) => padded,
            Err(error) => return Err(Rejected { buffer, error }),
        };
        let (done, retries, since) = (0, 0, self.made);
        let slot = Slot { buffer, tag, op, offset, len, padded, done, retries, since };
        let place = self.vacant.pop().and_then(|index| Some((index, self.slots.get_mut(index as usize)?)));
        let Some((index, place)) = place else {
            return Err(Rejected { buffer: slot.buffer, error: FileError::Full { depth: self.depth() } });
        };
        *place = Some(slot);
        self.queued.push(index);
        if op == Op::Write {
            self.target.written_to(offset + len as u64);
        }
        Ok(())
    }

    fn admissible(&self, op: Op, memory: DmaMemory, offset: u64, len: usize) -> Result<usize, FileError> {
        if self.vacant.is_empty() {
            return Err(FileError::Full { depth: self.depth() });
        }
        let padded = self.target.padded(op, offset, len)?;
        let room = FileError::Room { len, padded, size: memory.len() };
        if len == 0 || padded > memory.len() {
            return Err(room);
        }
        if op == Op::Write {
            memory.fill(len, padded - len, 0).map_err(|_| room)?;
        }
        Ok(padded)
    }

    /// Hands what is queued to the kernel.
    ///
    /// # Errors
    /// [`FileError::Ring`] where the kernel takes nothing more; what it did not take stays queued.
    pub fn submit(&mut self) -> Result<Submitted, FileError> {
        self.enter(0)
    }

    /// Adds those that are over to `done`, without waiting, and says how many. No system call, save where completions
    /// come to light by one only ([`Options::one_thread`], [`Options::poll`]), or the kernel made a transfer in parts and
    /// the rest must be submitted (with all else that is queued).
    ///
    /// # Errors
    /// [`FileError::Ring`], from submitting the rest of a transfer; those that are over are in `done` nevertheless.
    pub fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<usize, FileError> {
        let before = done.len();
        let mut unfinished = self.reap(done);
        if done.len() == before && !unfinished && self.ring.must_ask() {
            self.at_home()?;
            self.ask(0, None)?;
            unfinished = self.reap(done);
        }
        if unfinished {
            self.submit()?;
        }
        Ok(done.len() - before)
    }

    /// Submits what is queued, waits until `min` transfers are over, or all of them where they are fewer, and adds
    /// them to `done`. Says how many. One system call, where the kernel makes no transfer in parts.
    ///
    /// # Errors
    /// [`FileError::Ring`]; those that are over are in `done` nevertheless.
    pub fn wait(&mut self, min: usize, done: &mut Vec<Done<B>>) -> Result<usize, FileError> {
        let before = done.len();
        let min = min.min(self.in_flight());
        loop {
            self.reap(done);
            let missing = min.saturating_sub(done.len() - before);
            if missing == 0 && self.queued.is_empty() {
                return Ok(done.len() - before);
            }
            self.enter(missing)?;
        }
    }

    /// # Errors
    /// [`FileError::OtherThread`].
    fn at_home(&self) -> Result<(), FileError> {
        match self.home {
            Some(home) if home != std::thread::current().id() => Err(FileError::OtherThread),
            _ => Ok(()),
        }
    }

    fn idle(&self) -> Result<(), FileError> {
        match self.in_flight() {
            0 => Ok(()),
            in_flight => Err(FileError::Busy { in_flight }),
        }
    }

    /// Hands over what is queued, and waits for `want` of those that are under way then.
    fn enter(&mut self, want: usize) -> Result<Submitted, FileError> {
        self.at_home()?;
        let start = Instant::now();
        let transfers = u32::try_from(self.queued.len()).unwrap_or(u32::MAX);
        let slots = &mut self.slots;
        for &index in &self.queued {
            if let Some(slot) =
                slots.get_mut(index as usize).and_then(Option::as_mut).filter(|slot| slot.done == 0)
            {
                slot.since = start;
            }
        }
        let transfer = |index: u32| {
            let slot = slots.get(index as usize)?.as_ref()?;
            let memory = slot.buffer.memory();
            let part = memory.part(slot.done, slot.padded - slot.done).unwrap_or(memory);
            Some(Transfer { index, op: slot.op, memory: part, offset: slot.offset + slot.done as u64 })
        };
        // SAFETY: a buffer stays in its slot until the ring says that its transfer is over, or is leaked with it;
        // `Pinned` promises that the memory stays where it is as long, and is reached by nobody else.
        unsafe { self.ring.push(&self.target.file, self.queued.drain(..).filter_map(transfer)) };
        self.ask(want, None)?;
        Ok(Submitted { transfers, elapsed: start.elapsed() })
    }

    fn ask(&mut self, want: usize, limit: Option<Duration>) -> Result<(), FileError> {
        let want = want.min(self.ring.in_kernel());
        self.ring.enter(want, limit).map_err(|errno| FileError::Ring { errno })
    }

    /// Takes all completions; whether some transfer has to go on.
    fn reap(&mut self, done: &mut Vec<Done<B>>) -> bool {
        let Self { ring, slots, queued, vacant, target, .. } = self;
        let (mut unfinished, mut now) = (false, None);
        ring.take(|Outcome { index, result }| {
            let Some(place) = slots.get_mut(index as usize) else { return };
            let Some(slot) = place.as_mut() else { return };
            let Some(result) = slot.verdict(target, result) else {
                queued.push(index);
                unfinished = true;
                return;
            };
            let Some(Slot { buffer, tag, op, offset, len, since, .. }) = place.take() else { return };
            vacant.push(index);
            let latency = now.get_or_insert_with(Instant::now).saturating_duration_since(since);
            done.push(Done { tag, op, offset, len, buffer, latency, result });
        });
        unfinished
    }
}

impl<B: Pinned> Drop for FileQueue<'_, B> {
    fn drop(&mut self) {
        // What the kernel never saw is nobody's but ours.
        for index in self.queued.drain(..) {
            if let Some(slot) = self.slots.get_mut(index as usize) {
                *slot = None;
            }
        }
        let end = Instant::now() + self.last_wait;
        loop {
            let slots = &mut self.slots;
            self.ring.take(|Outcome { index, .. }| {
                if let Some(slot) = slots.get_mut(index as usize) {
                    *slot = None;
                }
            });
            if self.ring.in_kernel() == 0 {
                self.ring.give_back();
                return;
            }
            let patience = end.saturating_duration_since(Instant::now());
            if patience.is_zero() || self.at_home().is_err() || self.ask(1, Some(patience)).is_err() {
                break;
            }
        }
        for slot in self.slots.drain(..).flatten() {
            ABANDONED.fetch_add(1, Ordering::Relaxed);
            tracing::error!(path = %self.target.path.display(), offset = slot.offset, "a transfer never completed: its buffer is leaked");
            std::mem::forget(slot);
        }
    }
}
