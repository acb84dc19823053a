//! The way to the kernel: an io_uring, or plain system calls where there is none.

use super::error::Op;
use super::file::errno_of;
use super::note::Note;
use super::slot::Fixed;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use pinfold_core::mem::DmaMemory;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The most that one registered buffer may have.
const PIECE: usize = 1 << 30;
/// The most registered buffers (Linux 5.13; 1,024 before).
const MAX_PIECES: usize = 16_384;
/// The most that goes in one transfer: below the kernel's own 2 GiB less a page, and whole blocks.
const MAX_TRANSFER: usize = 1 << 30;
/// How often an `io_uring_enter` that the kernel has no room for is tried again.
const RETRIES: u32 = 1000;

/// What is handed to the kernel.
pub(super) struct Transfer<'t> {
    pub(super) index: u32,
    pub(super) op: Op,
    pub(super) memory: DmaMemory<'t>,
    pub(super) offset: u64,
}

/// What the kernel says about it: how many bytes went.
pub(super) struct Outcome {
    pub(super) index: u32,
    pub(super) result: Result<usize, Errno>,
}

pub(super) enum Ring {
    Uring(Box<Uring>),
    Plain(VecDeque<Outcome>),
}

pub(super) struct Uring {
    ring: IoUring,
    /// What is registered: start and length, by address; the place is the index.
    fixed: Vec<(usize, usize)>,
    file_registered: bool,
    in_kernel: usize,
}

impl Ring {
    /// A ring, or what does without it, with notes of what could not be had.
    pub(super) fn new(file: &File, depth: u32, fixed: &[Fixed<'_>], notes: &mut Vec<Note>) -> Self {
        match Uring::new(file, depth, fixed, notes) {
            Ok(ring) => Self::Uring(Box::new(ring)),
            Err(errno) => {
                notes.push(Note::NoRing { errno });
                Self::plain(depth)
            }
        }
    }

    pub(super) fn plain(depth: u32) -> Self {
        Self::Plain(VecDeque::with_capacity(depth as usize))
    }

    pub(super) fn fixed_bytes(&self) -> u64 {
        match self {
            Self::Uring(ring) => ring.fixed.iter().map(|&(_, len)| len as u64).sum(),
            Self::Plain(_) => 0,
        }
    }

    /// How many transfers the kernel has and has not answered.
    pub(super) fn in_kernel(&self) -> usize {
        match self {
            Self::Uring(ring) => ring.in_kernel,
            Self::Plain(_) => 0,
        }
    }

    /// Puts a transfer before the kernel; [`enter`](Self::enter) makes it look.
    ///
    /// # Safety
    /// The memory must stay where it is, and be reached by nobody else, until [`next`](Self::next) gives the outcome
    /// or for ever.
    pub(super) unsafe fn push(&mut self, file: &File, transfer: &Transfer<'_>) {
        match self {
            Self::Uring(ring) => {
                let entry = ring.entry(file, transfer);
                let mut queue = ring.ring.submission();
                // SAFETY: passed on from this function's contract; the file is open as long as the queue lives. The
                // submission queue has an entry for each slot of the queue above and each slot is pushed once until
                // it is answered, so it is never full.
                let pushed = unsafe { queue.push(&entry) };
                drop(queue);
                debug_assert!(pushed.is_ok(), "an entry for each slot");
                ring.in_kernel += 1;
            }
            Self::Plain(outcomes) => {
                // SAFETY: passed on from this function's contract.
                let result = unsafe { transfer_now(file, transfer) };
                outcomes.push_back(Outcome { index: transfer.index, result });
            }
        }
    }

    /// Makes the kernel take what was pushed, and waits for `want` outcomes, at most as long as `limit`.
    pub(super) fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<(), Errno> {
        match self {
            Self::Uring(ring) => ring.enter(want, limit),
            Self::Plain(_) => Ok(()),
        }
    }

    /// The next outcome, if there is one.
    pub(super) fn next(&mut self) -> Option<Outcome> {
        match self {
            Self::Plain(outcomes) => outcomes.pop_front(),
            Self::Uring(ring) => {
                let entry = ring.ring.completion().next()?;
                ring.in_kernel = ring.in_kernel.saturating_sub(1);
                let result = match usize::try_from(entry.result()) {
                    Ok(moved) => Ok(moved),
                    Err(_) => Err(Errno::from_raw_os_error(-entry.result())),
                };
                Some(Outcome { index: u32::try_from(entry.user_data()).unwrap_or(u32::MAX), result })
            }
        }
    }
}

impl Uring {
    fn new(file: &File, depth: u32, fixed: &[Fixed<'_>], notes: &mut Vec<Note>) -> Result<Self, Errno> {
        let ring = IoUring::builder().dontfork().build(depth).map_err(|error| errno_of(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| errno_of(&error))?;
        let needed =
            [opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(Errno::NOSYS);
        }
        let registered = ring.submitter().register_files(&[file.as_raw_fd()]);
        if let Err(error) = &registered {
            notes.push(Note::FileNotRegistered { errno: errno_of(error) });
        }
        let fixed = register(&ring, fixed).unwrap_or_else(|note| {
            notes.push(note);
            Vec::new()
        });
        Ok(Self { ring, fixed, file_registered: registered.is_ok(), in_kernel: 0 })
    }

    /// The registered piece that all of the memory lies in.
    fn fixed(&self, addr: usize, len: usize) -> Option<u16> {
        let before = self.fixed.partition_point(|&(start, _)| start <= addr).checked_sub(1)?;
        let &(start, size) = self.fixed.get(before)?;
        let inside = (addr - start).checked_add(len)? <= size;
        inside.then(|| u16::try_from(before).ok()).flatten()
    }

    fn entry(&self, file: &File, transfer: &Transfer<'_>) -> squeue::Entry {
        let memory = transfer.memory;
        let at = memory.as_ptr().as_ptr();
        let len = u32::try_from(memory.len().min(MAX_TRANSFER)).unwrap_or(0);
        let (fd, flags) = match self.file_registered {
            true => (0, squeue::Flags::FIXED_FILE),
            false => (file.as_raw_fd(), squeue::Flags::empty()),
        };
        let (fd, offset) = (types::Fd(fd), transfer.offset);
        let entry = match (transfer.op, self.fixed(memory.addr(), memory.len())) {
            (Op::Read, Some(index)) => opcode::ReadFixed::new(fd, at, len, index).offset(offset).build(),
            (Op::Read, None) => opcode::Read::new(fd, at, len).offset(offset).build(),
            (Op::Write, Some(index)) => opcode::WriteFixed::new(fd, at, len, index).offset(offset).build(),
            (Op::Write, None) => opcode::Write::new(fd, at, len).offset(offset).build(),
        };
        entry.flags(flags).user_data(u64::from(transfer.index))
    }

    fn enter(&mut self, want: usize, limit: Option<Duration>) -> Result<(), Errno> {
        if want == 0 && self.ring.submission().is_empty() {
            return Ok(());
        }
        let timed = limit.filter(|_| self.ring.params().is_feature_ext_arg());
        let mut retries = 0;
        loop {
            let entered = match timed {
                None => self.ring.submit_and_wait(want),
                Some(limit) => {
                    let limit = types::Timespec::from(limit);
                    let args = types::SubmitArgs::new().timespec(&limit);
                    self.ring.submitter().submit_with_args(want, &args)
                }
            };
            match entered.map_err(|error| errno_of(&error)) {
                // A kernel takes fewer where it stops at one that fails at once.
                Ok(_) if !self.ring.submission().is_empty() && retries < RETRIES => {}
                Ok(_) => return Ok(()),
                Err(Errno::TIME) => return Ok(()),
                Err(Errno::INTR) => continue,
                // No memory for requests just now, or completions to be taken first.
                Err(Errno::AGAIN | Errno::BUSY) if !self.ring.completion().is_empty() => return Ok(()),
                Err(Errno::AGAIN | Errno::BUSY) if retries < RETRIES => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
            retries += 1;
        }
    }
}

/// Registers the memory in pieces that the kernel takes, all or nothing.
fn register(ring: &IoUring, fixed: &[Fixed<'_>]) -> Result<Vec<(usize, usize)>, Note> {
    let mut pieces: Vec<(usize, usize)> = Vec::new();
    for memory in fixed {
        let starts = (0..memory.len).step_by(PIECE);
        pieces.extend(starts.map(|at| (memory.addr + at, PIECE.min(memory.len - at))));
    }
    if pieces.is_empty() {
        return Ok(pieces);
    }
    pieces.sort_unstable();
    let asked = pieces.iter().map(|&(_, len)| len as u64).sum();
    if pieces.len() > MAX_PIECES {
        return Err(Note::not_fixed(asked, Errno::TOOBIG));
    }
    let vector = |&(start, len): &(usize, usize)| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(start),
        iov_len: len,
    };
    let vectors: Vec<libc::iovec> = pieces.iter().map(vector).collect();
    // SAFETY: the kernel only pins the memory here; it reaches it in transfers, whose buffers `push`'s caller keeps.
    // The ranges are mapped, as long as the queue lives: it borrows them.
    let registered = unsafe { ring.submitter().register_buffers(&vectors) };
    registered.map(|()| pieces).map_err(|error| Note::not_fixed(asked, errno_of(&error)))
}

/// # Safety
/// The memory is reached by nobody else during the call.
unsafe fn transfer_now(file: &File, transfer: &Transfer<'_>) -> Result<usize, Errno> {
    let len = transfer.memory.len().min(MAX_TRANSFER);
    let (fd, at) = (file.as_raw_fd(), transfer.memory.as_ptr().as_ptr());
    let offset = libc::off_t::try_from(transfer.offset).map_err(|_| Errno::OVERFLOW)?;
    let moved = match transfer.op {
        // SAFETY: `len` bytes from `at` are writable memory by the contract of `DmaMemory`, and nobody else's during
        // the call by this function's.
        Op::Read => unsafe { libc::pread(fd, at.cast(), len, offset) },
        // SAFETY: likewise, readable.
        Op::Write => unsafe { libc::pwrite(fd, at.cast_const().cast(), len, offset) },
    };
    usize::try_from(moved).map_err(|_| errno_of(&std::io::Error::last_os_error()))
}
