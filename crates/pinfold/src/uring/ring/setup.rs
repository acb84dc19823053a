//! Creates a ring with the requested features that the kernel has, and notes the others.

use super::super::file::errno_of;
use super::super::note::Note;
use super::super::registered::places::Places;
use super::super::slot::Options;
use crate::memory::Fixed;
use crate::sys::kernel::ring_bytes;
use crate::sys::limits::MemlockRefusal;
use crate::sys::uring;
use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

/// A ring, and its features.
pub(super) struct Made {
    pub(super) ring: IoUring,
    /// Completions are deferred until the thread that created it waits.
    pub(super) one_thread: bool,
    /// Completions are polled.
    pub(super) polled: bool,
    pub(super) file_registered: bool,
    pub(super) fixed: Option<Places>,
}

/// Creates a ring with the file and the memory registered.
pub(super) fn make(
    file: &File,
    options: &Options<'_, '_>,
    notes: &mut Vec<Note>,
) -> Result<Made, Errno> {
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

/// Returns the bytes of locked memory that all of it is charged at most: a ring that polls is made
/// beside the first one.
pub(super) fn charge(options: &Options<'_, '_>) -> u64 {
    let buffers: u64 = options.fixed.iter().map(|memory| memory.len as u64).sum();
    ring_bytes(options.depth) * (1 + u64::from(options.poll)) + buffers
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
    builder.build(depth).map_err(|error| errno_of(&error))
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

/// Registers the memory in pieces of at most 1 GiB, all or nothing.
fn register(ring: &IoUring, fixed: &[Fixed<'_>]) -> Result<Option<Places>, Note> {
    if fixed.is_empty() {
        return Ok(None);
    }
    let requested = fixed.iter().map(|memory| memory.len as u64).sum();
    let places = Places::of(fixed.iter().map(|memory| (memory.addr, memory.len)));
    let places = places.map_err(|_| Note::not_fixed(requested, Errno::TOOBIG))?;
    let registered = uring::register(ring.as_fd(), &places.vectors());
    let refused =
        |errno: crate::Errno| Note::not_fixed(requested, Errno::from_raw_os_error(errno.raw()));
    registered.map(|()| Some(places)).map_err(refused)
}
