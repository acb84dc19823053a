//! Submission to the kernel: an io_uring, or plain system calls where there is none.

use super::error::Op;
use super::file::errno_of;
use super::index::BufferIndex;
use super::note::Note;
use super::places::Places;
use super::slot::Options;
use crate::memory::Fixed;
use crate::sys::kernel::RingRefusal;
use crate::sys::limits::MemlockRefusal;
use crate::sys::ring_memory::{locking, ring_bytes};
use crate::sys::uring;
use io_uring::{EnterFlags, IoUring, Probe, cqueue, opcode, squeue, types};
use pinfold_core::mem::DmaMemory;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

/// The most that goes in one transfer: below the kernel's own 2 GiB less a page, and whole blocks.
const MAX_TRANSFER: usize = 1 << 30;
/// The number of retries of `io_uring_enter` after `EAGAIN` or `EBUSY`.
const RETRIES: u32 = 1000;

/// A transfer for the kernel.
pub(super) struct Transfer<'t> {
    pub(super) index: u32,
    pub(super) op: Op,
    pub(super) memory: DmaMemory<'t>,
    pub(super) offset: u64,
}

/// The kernel's completion: the number of bytes transferred.
pub(super) struct Outcome {
    pub(super) index: u32,
    pub(super) result: Result<usize, Errno>,
}

pub(super) enum Ring {
    Uring(Box<Uring>),
    Plain(VecDeque<Outcome>),
}

pub(super) struct Uring {
    made: Made,
    in_kernel: usize,
}

impl Ring {
    /// Creates a ring, or its synchronous substitute, and notes missing features.
    pub(super) fn new(file: &File, options: &Options<'_, '_>, notes: &mut Vec<Note>) -> Self {
        if options.ring {
            match make(file, options, notes) {
                Ok(made) => return Self::Uring(Box::new(Uring { made, in_kernel: 0 })),
                Err(errno) => {
                    let more = charge_beside_ring(options);
                    let refusal = RingRefusal::of(errno.into(), (5, 6), options.depth, more);
                    notes.push(Note::NoRing(refusal));
                }
            }
        }
        Self::Plain(VecDeque::with_capacity(options.depth as usize))
    }

    /// Returns whether it is bound to the thread that created it.
    pub(super) fn one_thread(&self) -> bool {
        matches!(self, Self::Uring(ring) if ring.made.one_thread)
    }

    /// Returns the ring's descriptor, if it becomes readable by itself with each completion. Where
    /// completions are deferred or polled they are found by a system call, and until then the
    /// kernel wakes no one that waits at the descriptor.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Uring(ring) if !ring.made.one_thread && !ring.made.polled => {
                Some(ring.made.ring.as_fd())
            }
            Self::Uring(_) | Self::Plain(_) => None,
        }
    }

    pub(super) fn fixed_bytes(&self) -> u64 {
        match self {
            Self::Uring(ring) => ring.made.fixed.as_ref().map_or(0, Places::bytes),
            Self::Plain(_) => 0,
        }
    }

    /// Returns the operation code of a read into the memory, if there is a ring.
    #[cfg(test)]
    pub(super) fn read_code(&self, file: &File, memory: DmaMemory<'_>) -> Option<u32> {
        let Self::Uring(ring) = self else { return None };
        let read = Transfer { op: Op::Read, index: 0, memory, offset: 0 };
        Some(entry(file, false, ring.made.fixed.as_ref(), &read).get_opcode())
    }

    /// Returns the number of transfers in flight in the kernel.
    pub(super) fn in_kernel(&self) -> usize {
        match self {
            Self::Uring(ring) => ring.in_kernel,
            Self::Plain(_) => 0,
        }
    }

    /// Pushes transfers; [`enter`](Self::enter) submits them.
    ///
    /// # Safety
    /// The memory must stay where it is, and not be accessed otherwise, until [`take`](Self::take)
    /// returns the outcome.
    pub(super) unsafe fn push<'t>(
        &mut self,
        file: &File,
        transfers: impl Iterator<Item = Transfer<'t>>,
    ) {
        match self {
            Self::Uring(ring) => {
                let Made { ring: io_uring, file_registered, fixed, .. } = &mut ring.made;
                let mut queue = io_uring.submission();
                for transfer in transfers {
                    let entry = entry(file, *file_registered, fixed.as_ref(), &transfer);
                    // SAFETY: passed on from this function's contract; the file is open as long as
                    // the queue lives. The submission queue has an entry for each slot of the queue
                    // above and each slot is pushed once until it is answered, so it is never full.
                    let pushed = unsafe { queue.push(&entry) };
                    debug_assert!(pushed.is_ok(), "an entry for each slot");
                    ring.in_kernel += 1;
                }
            }
            Self::Plain(outcomes) => {
                for transfer in transfers {
                    // SAFETY: passed on from this function's contract.
                    let result = unsafe { transfer_now(file, &transfer) };
                    outcomes.push_back(Outcome { index: transfer.index, result });
                }
            }
        }
    }

    /// Submits pushed entries, and waits for `want` outcomes, at most for `limit`. Returns with
    /// some of them [unsubmitted](Self::has_unsubmitted) if there are outcomes to take.
    pub(super) fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<(), Errno> {
        match self {
            Self::Uring(ring) => ring.enter(want, limit),
            Self::Plain(_) => Ok(()),
        }
    }

    /// Returns whether the kernel has not accepted all that was pushed: [`enter`](Self::enter)
    /// returns for outcomes that have to be taken first, and must be called again after that.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        match self {
            Self::Uring(ring) => !ring.made.ring.submission().is_empty(),
            Self::Plain(_) => false,
        }
    }

    /// Passes all available outcomes to `each`.
    pub(super) fn take(&mut self, each: impl FnMut(Outcome)) {
        match self {
            Self::Plain(outcomes) => outcomes.drain(..).for_each(each),
            Self::Uring(ring) => {
                let in_kernel = &mut ring.in_kernel;
                let outcome = |entry: cqueue::Entry| {
                    *in_kernel = in_kernel.saturating_sub(1);
                    let result = match usize::try_from(entry.result()) {
                        Ok(moved) => Ok(moved),
                        Err(_) => Err(Errno::from_raw_os_error(-entry.result())),
                    };
                    Outcome { index: u32::try_from(entry.user_data()).unwrap_or(u32::MAX), result }
                };
                ring.made.ring.completion().map(outcome).for_each(each);
            }
        }
    }

    /// Unregisters file and memory now: a ring that is only closed keeps both for some 30 ms, in
    /// which the next run could find the file busy or the memory still charged. If the kernel
    /// refuses (another thread's ring), closing must do.
    pub(super) fn unregister(&mut self) {
        let Self::Uring(ring) = self else { return };
        let submitter = ring.made.ring.submitter();
        if std::mem::take(&mut ring.made.file_registered) {
            let _ = submitter.unregister_files();
        }
        if ring.made.fixed.take().is_some() {
            let _ = submitter.unregister_buffers();
        }
    }

    /// Returns whether outcomes become visible only by a system call.
    pub(super) fn must_ask(&self) -> bool {
        matches!(self, Self::Uring(ring) if ring.in_kernel > 0 && (ring.made.one_thread || ring.made.polled))
    }
}

impl Uring {
    fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<(), Errno> {
        let ring = &mut self.made.ring;
        let asks = self.in_kernel > 0 && (self.made.one_thread || self.made.polled);
        if want == 0 && !asks && ring.submission().is_empty() {
            return Ok(());
        }
        let timed = limit.filter(|_| ring.params().is_feature_ext_arg());
        let mut retries = 0;
        loop {
            let entered = match timed {
                None if want == 0 && ring.submission().is_empty() => {
                    let ask = EnterFlags::GETEVENTS.bits();
                    // SAFETY: no argument, and nothing to submit.
                    unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, ask, None) }
                }
                None => ring.submit_and_wait(want),
                Some(limit) => {
                    let limit = types::Timespec::from(limit);
                    let args = types::SubmitArgs::new().timespec(&limit);
                    ring.submitter().submit_with_args(want, &args)
                }
            };
            match entered.map_err(|error| errno_of(&error)) {
                // The kernel accepts fewer if one of them fails at once.
                Ok(_) if !ring.submission().is_empty() && retries < RETRIES => {}
                Ok(_) => return Ok(()),
                Err(Errno::TIME) => return Ok(()),
                Err(Errno::INTR) => continue,
                // No memory for requests at the moment, or completions must be taken first.
                Err(Errno::AGAIN | Errno::BUSY) if !ring.completion().is_empty() => return Ok(()),
                Err(Errno::AGAIN | Errno::BUSY) if retries < RETRIES => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
            retries += 1;
        }
    }
}

fn entry(
    file: &File,
    file_registered: bool,
    fixed: Option<&Places>,
    transfer: &Transfer<'_>,
) -> squeue::Entry {
    let memory = transfer.memory;
    let at = memory.as_ptr().as_ptr();
    let len = u32::try_from(memory.len().min(MAX_TRANSFER)).unwrap_or(0);
    let (fd, flags) = match file_registered {
        true => (0, squeue::Flags::FIXED_FILE),
        false => (file.as_raw_fd(), squeue::Flags::empty()),
    };
    let (fd, offset) = (types::Fd(fd), transfer.offset);
    let index = fixed.and_then(|places| places.of_memory(memory.addr(), memory.len()));
    let entry = match (transfer.op, index.map(BufferIndex::get)) {
        (Op::Read, Some(index)) => {
            opcode::ReadFixed::new(fd, at, len, index).offset(offset).build()
        }
        (Op::Read, None) => opcode::Read::new(fd, at, len).offset(offset).build(),
        (Op::Write, Some(index)) => {
            opcode::WriteFixed::new(fd, at, len, index).offset(offset).build()
        }
        (Op::Write, None) => opcode::Write::new(fd, at, len).offset(offset).build(),
    };
    entry.flags(flags).user_data(u64::from(transfer.index))
}

/// # Safety
/// The memory is not accessed otherwise during the call.
unsafe fn transfer_now(file: &File, transfer: &Transfer<'_>) -> Result<usize, Errno> {
    let len = transfer.memory.len().min(MAX_TRANSFER);
    let (fd, at) = (file.as_raw_fd(), transfer.memory.as_ptr().as_ptr());
    let offset = libc::off_t::try_from(transfer.offset).map_err(|_| Errno::OVERFLOW)?;
    let moved = match transfer.op {
        // SAFETY: `len` bytes from `at` are writable memory by the contract of `DmaMemory`, and
        // exclusive during the call by this function's.
        Op::Read => unsafe { libc::pread(fd, at.cast(), len, offset) },
        // SAFETY: likewise, readable.
        Op::Write => unsafe { libc::pwrite(fd, at.cast_const().cast(), len, offset) },
    };
    usize::try_from(moved).map_err(|_| errno_of(&std::io::Error::last_os_error()))
}

// Creates a ring with the requested features that the kernel has, and notes the others.

/// A ring, and its features.
struct Made {
    ring: IoUring,
    /// Completions are deferred until the thread that created it waits.
    one_thread: bool,
    /// Completions are polled.
    polled: bool,
    file_registered: bool,
    fixed: Option<Places>,
}

/// Creates a ring with the file and the memory registered.
fn make(file: &File, options: &Options<'_, '_>, notes: &mut Vec<Note>) -> Result<Made, Errno> {
    let (mut ring, one_thread) = build(options, false, notes)?;
    let mut polled = false;
    if options.poll {
        match polling(file, options) {
            Ok(polling) => (ring, polled) = (polling, true),
            Err(errno) => {
                let memlock = MemlockRefusal::of(errno.into(), ring_bytes(options.depth));
                notes.push(Note::NotPolled { errno, memlock });
            }
        }
    }
    let registered = ring.submitter().register_files(&[file.as_raw_fd()]);
    if let Err(error) = &registered {
        notes.push(Note::FileNotRegistered { errno: errno_of(error) });
    }
    let fixed = register(&ring, options.fixed).unwrap_or_else(|note| {
        notes.push(note);
        None
    });
    Ok(Made { ring, one_thread, polled, file_registered: registered.is_ok(), fixed })
}

/// Returns the bytes of locked memory that are charged beside the ring: one that polls, and the
/// buffers.
fn charge_beside_ring(options: &Options<'_, '_>) -> u64 {
    let buffers = Places::of(options.fixed.iter().map(|memory| (memory.addr, memory.len)));
    ring_bytes(options.depth) * u64::from(options.poll)
        + buffers.map_or(0, |places| places.charge())
}

/// Creates a ring, bound to this thread if that is requested and supported.
fn build(
    options: &Options<'_, '_>,
    poll: bool,
    notes: &mut Vec<Note>,
) -> Result<(IoUring, bool), Errno> {
    let mut one_thread = options.one_thread;
    let ring = if one_thread {
        match built(options.depth, poll, true) {
            Ok(ring) => ring,
            Err(errno) => {
                one_thread = false;
                let ring = built(options.depth, poll, false)?;
                notes.push(Note::NotDeferred { errno });
                ring
            }
        }
    } else {
        built(options.depth, poll, false)?
    };
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| errno_of(&error))?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
    ];
    if !needed.iter().all(|&code| probe.is_supported(code)) {
        return Err(Errno::NOSYS);
    }
    Ok((ring, one_thread))
}

fn built(depth: u32, poll: bool, one_thread: bool) -> Result<IoUring, Errno> {
    let mut builder = IoUring::builder();
    builder.dontfork();
    if one_thread {
        builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
    }
    if poll {
        builder.setup_iopoll();
    }
    locking(|| ring_bytes(depth), || builder.build(depth).map_err(|error| errno_of(&error)))
}

/// The target of the transfer that tests whether the file can be polled.
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// Creates a ring that polls, after a test on the file.
fn polling(file: &File, options: &Options<'_, '_>) -> Result<IoUring, Errno> {
    let (mut ring, _) = build(options, true, &mut Vec::new())?;
    let mut page = Box::new(Page([0; 4096]));
    let read = opcode::Read::new(types::Fd(file.as_raw_fd()), page.0.as_mut_ptr(), 4096).build();
    let mut queue = ring.submission();
    // SAFETY: file and page live until the completion; a page whose completion is not seen is
    // leaked. It is not accessed otherwise.
    let pushed = unsafe { queue.push(&read) };
    drop(queue);
    let submitted = pushed.is_ok().then(|| ring.submit_and_wait(1));
    let answer = ring.completion().next();
    match (submitted, answer) {
        (_, Some(entry)) if entry.result() > 0 => Ok(ring),
        // Reads of an empty file do not reach the device, which may refuse the first transfer that
        // does.
        (_, Some(entry)) if entry.result() == 0 => Err(Errno::NODATA),
        (_, Some(entry)) => Err(Errno::from_raw_os_error(-entry.result())),
        (submitted, None) => {
            std::mem::forget(page);
            Err(submitted.and_then(Result::err).map_or(Errno::NOTSUP, |error| errno_of(&error)))
        }
    }
}

/// Registers the memory in places of at most 1 GiB, all or nothing.
fn register(ring: &IoUring, fixed: &[Fixed<'_>]) -> Result<Option<Places>, Note> {
    if fixed.is_empty() {
        return Ok(None);
    }
    let places = Places::of(fixed.iter().map(|memory| (memory.addr, memory.len)));
    let places = places.map_err(|_| {
        let requested = fixed.iter().map(|memory| memory.len as u64).sum();
        Note::not_fixed(requested, Errno::TOOBIG)
    })?;
    let vectors = places.vectors();
    match locking(|| places.charge(), || uring::register(ring.as_fd(), &vectors)) {
        Ok(()) => Ok(Some(places)),
        Err(errno) => Err(Note::not_fixed(places.charge(), Errno::from_raw_os_error(errno.raw()))),
    }
}
