//! A file with its ring, and the transfers that are queued or in flight.

use super::error::{FileError, Op};
use super::file::{Target, errno_of};
use super::note::Note;
use super::ring::{Outcome, Ring, Transfer};
use super::slot::{Completion, Options, Rejected, Slot, Submitted};
use pinfold_core::domain::Pinned;
use pinfold_core::mem::DmaMemory;
use rustix::io::retry_on_intr;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The longest wait of a drop for transfers in flight.
pub(super) const LAST_WAIT: Duration = Duration::from_secs(30);

static QUARANTINED: AtomicU64 = AtomicU64::new(0);

/// Returns how many buffers of dropped queues this process has quarantined, because their transfers
/// never completed.
pub fn quarantined_buffers() -> u64 {
    QUARANTINED.load(Ordering::Relaxed)
}

/// A file with a queue of transfers. See the [module](super).
///
/// Dropping it waits for the transfers in flight, at most 30 s (before Linux 5.11: without limit);
/// the buffers of those that have not completed then are quarantined and
/// [counted](quarantined_buffers). Queued transfers that were not submitted are discarded. A drop
/// on the queue's own thread releases file and registered memory before it returns.
pub struct FileQueue<'m, B: Pinned> {
    target: Target,
    ring: Ring,
    /// The only thread that may use it, if there is one.
    home: Option<ThreadId>,
    slots: Vec<Option<Slot<B>>>,
    vacant: Vec<u32>,
    /// Slots to be submitted, in order.
    queued: Vec<u32>,
    notes: Vec<Note>,
    created: Instant,
    /// The longest wait of a drop.
    pub(super) last_wait: Duration,
    /// Registered memory is known by its addresses, so these must stay its own.
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
    /// The largest queue depth, that of io_uring.
    pub const MAX_DEPTH: u32 = 32_768;

    /// Opens a file and creates a queue for it: see [`new`](Self::new).
    ///
    /// # Errors
    /// [`FileError`].
    pub fn open(
        path: &Path,
        how: &OpenOptions,
        options: &Options<'_, 'm>,
    ) -> Result<Self, FileError> {
        let file = how.open(path).map_err(|error| FileError::System {
            call: "open",
            path: path.into(),
            errno: errno_of(&error),
        })?;
        Self::new(file, path, options)
    }

    /// Creates a queue for an open file, called `path` in messages. Sets or clears O_DIRECT on it,
    /// and so on all duplicates of the descriptor.
    ///
    /// # Errors
    /// [`FileError::Depth`], [`FileError::Block`]; [`FileError::System`] if it is a directory or
    /// cannot be examined. `file` is closed then: pass a duplicate if it is still needed.
    pub fn new(file: File, path: &Path, options: &Options<'_, 'm>) -> Result<Self, FileError> {
        let depth = options.depth;
        if depth == 0 || depth > Self::MAX_DEPTH {
            return Err(FileError::Depth { requested: depth, limit: Self::MAX_DEPTH });
        }
        if !options.block.is_power_of_two() {
            return Err(FileError::Block { requested: options.block });
        }
        let mut notes = Vec::new();
        let target = Target::new(file, path, options.direct, options.block, &mut notes)?;
        let ring = Ring::new(&target.file, options, &mut notes);
        let home = ring.one_thread().then(|| std::thread::current().id());
        let slots = std::iter::repeat_with(|| None).take(depth as usize).collect();
        let queued = Vec::with_capacity(depth as usize);
        let vacant = (0..depth).rev().collect();
        let (created, last_wait) = (Instant::now(), LAST_WAIT);
        Ok(Self {
            target,
            ring,
            home,
            slots,
            vacant,
            queued,
            notes,
            created,
            last_wait,
            fixed: PhantomData,
        })
    }

    /// Returns the features that the queue does without, and why.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Returns whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.target.direct
    }

    /// Returns the number of bytes that are registered with the ring.
    pub fn fixed_bytes(&self) -> u64 {
        self.ring.fixed_bytes()
    }

    #[cfg(test)]
    pub(super) fn read_code(&self, memory: DmaMemory<'_>) -> Option<u32> {
        self.ring.read_code(&self.target.file, memory)
    }

    /// Returns the block size of O_DIRECT, of which offsets must be multiples; 1 without O_DIRECT.
    #[cfg(test)]
    pub(super) fn logical_block(&self) -> u32 {
        self.target.block
    }

    /// Returns the queue depth.
    fn depth(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(Self::MAX_DEPTH)
    }

    /// Returns the number of transfers that are queued or in flight; the queue owns their buffers.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Returns the ring's descriptor, which is readable while completions can be
    /// [polled](Self::poll), for `poll` and `epoll` on any thread. Waiting for it needs no time
    /// limit. On the thread that has submitted, a completion may also end the wait with `EINTR`,
    /// since the kernel finishes transfers there.
    ///
    /// `None` if no descriptor announces completions, so that [`poll`](Self::poll) or
    /// [`wait`](Self::wait) must be called to find them: without a ring, where
    /// [`submit`](Self::submit) executes the transfers; and with [`Options::one_thread`] or
    /// [`Options::poll`], which leave the completions in the kernel until the queue asks.
    pub fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.fd()
    }

    /// Returns the length of the file, or the size of the block device, in bytes.
    ///
    /// # Errors
    /// [`FileError::System`].
    #[expect(clippy::len_without_is_empty, reason = "a system call, not a container")]
    pub fn len(&self) -> Result<u64, FileError> {
        self.target.len()
    }

    /// Sets the length of the file. Needed after a write that ended within a block.
    ///
    /// # Errors
    /// [`FileError::Busy`] while transfers are in flight, [`FileError::NotOpenFor`],
    /// [`FileError::System`].
    pub fn set_len(&mut self, len: u64) -> Result<(), FileError> {
        self.idle()?;
        self.target.set_len(len)
    }

    /// Flushes written data to the device: `fdatasync` if only `data` matters, else `fsync`.
    ///
    /// # Errors
    /// [`FileError::Busy`] while transfers are in flight, [`FileError::System`].
    pub fn sync(&mut self, data: bool) -> Result<(), FileError> {
        self.idle()?;
        let (call, synced) = match data {
            true => ("fdatasync", retry_on_intr(|| rustix::fs::fdatasync(&self.target.file))),
            false => ("fsync", retry_on_intr(|| rustix::fs::fsync(&self.target.file))),
        };
        synced.map_err(|errno| self.target.failed(call, errno))
    }

    /// Queues a read of `len` bytes from `offset` of the file to the start of the buffer, for the
    /// next [`submit`](Self::submit).
    ///
    /// With O_DIRECT, the buffer is also overwritten behind `len`, up to the end of the block.
    ///
    /// # Errors
    /// [`Rejected`], with the buffer and [`FileError::NotOpenFor`], [`FileError::Full`],
    /// [`FileError::Room`], [`FileError::Misaligned`] or [`FileError::Beyond`].
    pub fn read(
        &mut self,
        buffer: B,
        offset: u64,
        len: usize,
        tag: u64,
    ) -> Result<(), Rejected<B>> {
        self.enqueue(Op::Read, buffer, offset, len, tag)
    }

    /// Queues a write of `len` bytes from the start of the buffer to `offset` of the file, for the
    /// next [`submit`](Self::submit).
    ///
    /// With O_DIRECT and a `len` that ends within a block, the rest of the block is zeroed in the
    /// buffer and written, too: this is possible only at the end of the file, and
    /// [`set_len`](Self::set_len) must follow.
    ///
    /// # Errors
    /// [`Rejected`], with the buffer and [`FileError::NotOpenFor`], [`FileError::Full`],
    /// [`FileError::Room`], [`FileError::Misaligned`] or [`FileError::Beyond`].
    pub fn write(
        &mut self,
        buffer: B,
        offset: u64,
        len: usize,
        tag: u64,
    ) -> Result<(), Rejected<B>> {
        self.enqueue(Op::Write, buffer, offset, len, tag)
    }

    fn enqueue(
        &mut self,
        op: Op,
        buffer: B,
        offset: u64,
        len: usize,
        tag: u64,
    ) -> Result<(), Rejected<B>> {
        let padded = match self.check_transfer(op, buffer.memory(), offset, len) {
            Ok(padded) => padded,
            Err(error) => return Err(Rejected { buffer, error }),
        };
        let (done, retries, since) = (0, 0, self.created);
        let slot = Slot { buffer, tag, op, offset, len, padded, done, retries, since };
        let place =
            self.vacant.pop().and_then(|index| Some((index, self.slots.get_mut(index as usize)?)));
        let Some((index, place)) = place else {
            return Err(Rejected {
                buffer: slot.buffer,
                error: FileError::Full { depth: self.depth() },
            });
        };
        *place = Some(slot);
        self.queued.push(index);
        if op == Op::Write {
            self.target.extend_to(offset + len as u64);
        }
        Ok(())
    }

    fn check_transfer(
        &self,
        op: Op,
        memory: DmaMemory,
        offset: u64,
        len: usize,
    ) -> Result<usize, FileError> {
        self.target.check_access(op)?;
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

    /// Submits queued transfers. If the kernel accepts no more before completions are taken,
    /// [`poll`](Self::poll) or [`wait`](Self::wait) submits the rest.
    ///
    /// # Errors
    /// [`FileError::Ring`] if the kernel accepts no more; the rest stays queued.
    pub fn submit(&mut self) -> Result<Submitted, FileError> {
        self.enter(0)
    }

    /// Appends completed transfers to `done` without waiting, and returns their number. Makes no
    /// system call, except where completions need one ([`Options::one_thread`], [`Options::poll`]),
    /// or to submit the rest of a short transfer, or transfers that the kernel did not accept (with
    /// all queued ones).
    ///
    /// # Errors
    /// [`FileError::Ring`], from submitting the rest; completed transfers are in `done`
    /// nevertheless.
    pub fn poll(&mut self, done: &mut Vec<Completion<B>>) -> Result<usize, FileError> {
        let before = done.len();
        let mut unfinished = self.reap(done);
        if done.len() == before && !unfinished && self.ring.must_ask() {
            self.check_thread()?;
            self.ask(0, None)?;
            unfinished = self.reap(done);
        }
        // A submission that had to wait for these completions continues now: nothing else would
        // wake the caller for it.
        if unfinished || self.ring.has_unsubmitted() {
            self.submit()?;
        }
        Ok(done.len() - before)
    }

    /// Submits queued transfers, waits for `min` completions (or all, if there are fewer
    /// transfers), appends them to `done` and returns their number. One system call, unless a
    /// transfer is short.
    ///
    /// # Errors
    /// [`FileError::Ring`]; completed transfers are in `done` nevertheless.
    pub fn wait(&mut self, min: usize, done: &mut Vec<Completion<B>>) -> Result<usize, FileError> {
        let before = done.len();
        let min = min.min(self.in_flight());
        loop {
            self.reap(done);
            let missing = min.saturating_sub(done.len() - before);
            if missing == 0 && self.queued.is_empty() && !self.ring.has_unsubmitted() {
                return Ok(done.len() - before);
            }
            self.enter(missing)?;
        }
    }

    /// # Errors
    /// [`FileError::OtherThread`].
    fn check_thread(&self) -> Result<(), FileError> {
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

    /// Submits queued transfers, and waits for `want` completions.
    fn enter(&mut self, want: usize) -> Result<Submitted, FileError> {
        self.check_thread()?;
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
            Some(Transfer {
                index,
                op: slot.op,
                memory: part,
                offset: slot.offset + slot.done as u64,
            })
        };
        // SAFETY: a buffer stays in its slot until its transfer has completed, or is leaked with
        // it; `Pinned` promises that the memory stays where it is meanwhile, and is accessed by no
        // other owner.
        unsafe { self.ring.push(&self.target.file, self.queued.drain(..).filter_map(transfer)) };
        self.ask(want, None)?;
        Ok(Submitted { transfers, elapsed: start.elapsed() })
    }

    fn ask(&mut self, want: usize, limit: Option<Duration>) -> Result<(), FileError> {
        let want = want.min(self.ring.in_kernel());
        self.ring.enter(want, limit).map_err(|errno| FileError::Ring { errno })
    }

    /// Processes all completions; returns whether a transfer has to be continued.
    fn reap(&mut self, done: &mut Vec<Completion<B>>) -> bool {
        let Self { ring, slots, queued, vacant, target, .. } = self;
        let (mut unfinished, mut now) = (false, None);
        ring.take(|Outcome { index, result }| {
            let Some(place) = slots.get_mut(index as usize) else { return };
            let Some(slot) = place.as_mut() else { return };
            let Some(result) = slot.result_of(target, result) else {
                queued.push(index);
                unfinished = true;
                return;
            };
            let Some(Slot { buffer, tag, op, offset, len, since, .. }) = place.take() else {
                return;
            };
            vacant.push(index);
            let latency = now.get_or_insert_with(Instant::now).saturating_duration_since(since);
            done.push(Completion { tag, op, offset, len, buffer, latency, result });
        });
        unfinished
    }
}

impl<B: Pinned> Drop for FileQueue<'_, B> {
    fn drop(&mut self) {
        // These were not submitted, so the kernel does not know them.
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
                self.ring.unregister();
                return;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.check_thread().is_err() || self.ask(1, Some(left)).is_err() {
                break;
            }
        }
        for slot in self.slots.drain(..).flatten() {
            QUARANTINED.fetch_add(1, Ordering::Relaxed);
            tracing::error!(path = %self.target.path.display(), offset = slot.offset, "a transfer did not complete: its buffer is quarantined");
            std::mem::forget(slot);
        }
    }
}
