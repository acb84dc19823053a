//! Transfers and modes that are refused: errors that return the buffer, notices of missing features,
//! short transfers; queues that stay with their thread, and queues that poll.

use super::super::slot::RETRIES;
use super::transfers::{Counted, Pages, arena, create, pattern, round_trip, waiting};
use super::*;
use crate::sys::kernel::{RingRefusal, RingRefusalCause};
use crate::sys::limits::MemlockRefusal;
use crate::sys::ring_memory::tests::{refusing, without_ipc_lock};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

#[test]
fn a_file_that_shrinks_is_a_typed_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinks");
    for direct in [true, false] {
        for (now, done) in [(0u64, 0), (4096, 4096), (5000, 5000)] {
            std::fs::write(&path, pattern(16384, 0)).unwrap();
            let options = Options { direct, ..Options::default() };
            let mut queue = FileQueue::open(&path, &create(), &options).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(now).unwrap();
            queue.read(Pages::new(16384), 0, 16384, 9).unwrap();
            let mut over = Vec::new();
            queue.wait(1, &mut over).unwrap();
            let short = FileError::Short {
                op: Op::Read,
                path: path.as_path().into(),
                offset: 0,
                len: 16384,
                done,
            };
            assert_eq!(over[0].result, Err(short), "direct: {direct}");
            assert_eq!(over[0].buffer.bytes(done), pattern(16384, 0)[..done]);
        }
    }
}

#[test]
fn rejected_transfers_return_their_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad");
    std::fs::write(&path, pattern(16384, 0)).unwrap();
    let options = Options { depth: 2, ..Options::default() };
    let mut queue = FileQueue::open(&path, &create(), &options).unwrap();
    let pages = || Pages::new(8192);
    let room = |len, padded| FileError::Room { len, padded, size: 8192 };
    assert_eq!(queue.read(pages(), 0, 0, 0).unwrap_err().error, room(0, 0));
    let large = queue.read(pages(), 0, 8193, 0).unwrap_err().error;
    assert!(matches!(large, FileError::Room { len: 8193, size: 8192, .. }));
    let beyond = queue.write(pages(), u64::MAX - 4095, 4096, 0).unwrap_err().error;
    assert_eq!(beyond, FileError::Beyond { offset: u64::MAX - 4095, len: 4096 });
    if queue.is_direct() {
        let crooked = queue.read(pages(), 100, 4096, 0).unwrap_err();
        assert!(matches!(crooked.error, FileError::Misaligned { offset: 100, .. }));
        // Padding would overwrite what lies behind.
        let inside = queue.write(crooked.buffer, 4096, 100, 0).unwrap_err().error;
        assert!(matches!(
            inside,
            FileError::Misaligned { op: Op::Write, offset: 4096, len: 100, .. }
        ));
    }
    queue.read(pages(), 0, 4096, 0).unwrap();
    queue.read(pages(), 4096, 4096, 1).unwrap();
    assert_eq!(queue.read(pages(), 0, 1, 2).unwrap_err().error, FileError::Full { depth: 2 });
    assert_eq!(queue.set_len(0), Err(FileError::Busy { in_flight: 2 }));
    let mut done = Vec::new();
    assert_eq!(queue.wait(usize::MAX, &mut done).unwrap(), 2);
    assert_eq!(queue.wait(1, &mut done).unwrap(), 0);
    assert_eq!(std::fs::read(&path).unwrap(), pattern(16384, 0));
}

#[test]
fn impossible_queues_are_rejected_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let open = |path: &Path, how: &OpenOptions, depth, block| {
        FileQueue::<Pages>::open(path, how, &Options { depth, block, ..Options::default() })
            .unwrap_err()
    };
    let limit = 32_768;
    assert_eq!(open(&path, &create(), 0, 512), FileError::Depth { requested: 0, limit });
    assert_eq!(
        open(&path, &create(), 1_000_000_000, 512),
        FileError::Depth { requested: 1_000_000_000, limit }
    );
    assert_eq!(open(&path, &create(), 1, 3), FileError::Block { requested: 3 });
    assert_eq!(open(&path, &create(), 1, 0), FileError::Block { requested: 0 });
    let mut read = OpenOptions::new();
    read.read(true);
    let missing = open(&folder.path().join("none"), &read, 1, 512);
    assert!(missing.to_string().ends_with("no such file or folder; check the path"), "{missing}");
    assert!(matches!(
        open(folder.path(), &read, 1, 512),
        FileError::System { errno: Errno::ISDIR, .. }
    ));
}

/// The error is not "Bad file descriptor", or "Invalid argument" of a size, after the request.
#[test]
fn a_direction_that_the_file_was_not_opened_for_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, pattern(4096, 0)).unwrap();
    for (read, write) in [(true, false), (false, true), (true, true)] {
        let mut how = OpenOptions::new();
        how.read(read).write(write);
        let mut queue = FileQueue::open(&path, &how, &Options::default()).unwrap();
        let refused = |op| FileError::NotOpenFor { op, path: path.as_path().into() };
        let written = queue.write(Pages::new(4096), 0, 4096, 0).map_err(|refusal| refusal.error);
        assert_eq!(written, if write { Ok(()) } else { Err(refused(Op::Write)) });
        let got = queue.read(Pages::new(4096), 0, 4096, 0).map_err(|refusal| refusal.error);
        assert_eq!(got, if read { Ok(()) } else { Err(refused(Op::Read)) });
        let mut done = Vec::new();
        queue.wait(usize::MAX, &mut done).unwrap();
        assert!(done.iter().all(|transfer| transfer.result.is_ok()), "{done:?}");
        assert_eq!(queue.set_len(4096), if write { Ok(()) } else { Err(refused(Op::Write)) });
    }
    let text = FileError::NotOpenFor { op: Op::Write, path: path.as_path().into() }.to_string();
    assert!(text.ends_with("open it with `OpenOptions::write(true)`"), "{text}");
}

#[test]
fn a_full_disk_is_named() {
    // A device that is always full, and refuses O_DIRECT.
    let mut how = OpenOptions::new();
    how.write(true);
    let Ok(mut queue) = FileQueue::open(Path::new("/dev/full"), &how, &Options::default()) else {
        return;
    };
    queue.write(Pages::new(4096), 0, 4096, 0).unwrap();
    let mut done = Vec::new();
    queue.wait(1, &mut done).unwrap();
    let error = done[0].result.clone().unwrap_err();
    assert!(matches!(error, FileError::Transfer { errno: Errno::NOSPC, done: 0, .. }), "{error}");
    assert!(error.to_string().contains("the disk is full"), "{error}");
}

#[test]
fn an_insufficient_memlock_is_a_note_with_the_command() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    // Pinning has to touch the pages, so a large limit is not worth its test.
    let Some(limit) = limit.filter(|limit| *limit <= 256 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memlock");
    let asked = limit.next_multiple_of(4096) + (1 << 20);
    let memory = arena(usize::try_from(asked).unwrap());
    let fixed = [memory.into()];
    let notes = without_ipc_lock(|| {
        round_trip(
            &path,
            &pattern(50_000, 4),
            4096,
            memory,
            &Options { fixed: &fixed, ..Options::default() },
        )
    });
    let [.., Note::NotFixed { memlock: Some(refused), errno: Errno::NOMEM, .. }] = notes[..] else {
        // No ring could be created, or none that counts.
        assert!(notes.iter().any(|note| matches!(note, Note::NoRing(_))), "{notes:?}");
        return;
    };
    assert_eq!((refused.requested, refused.limit), (asked, limit));
    let text = notes.last().unwrap().to_string();
    assert!(text.contains(&format!("{asked} bytes more")) && text.contains("; fix: "), "{text}");
}

/// A table that the kernel has no memory for is not the limit's.
#[test]
fn a_shortage_of_the_kernel_is_not_named_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let memory = arena(2 << 20);
    let fixed = [memory.into()];
    let options = Options { fixed: &fixed, depth: 4, ..Options::default() };
    let open = || FileQueue::<Pages>::open(&path, &create(), &options).unwrap().notes().to_vec();
    let register = libc::SYS_io_uring_register;
    let ring = without_ipc_lock(|| refusing(libc::SYS_io_uring_setup, (0, 2), libc::ENOMEM, open));
    let Some(Note::NoRing(refusal)) = ring.iter().find(|note| matches!(note, Note::NoRing(_)))
    else {
        panic!("{ring:?}")
    };
    assert!(matches!(refusal.cause, RingRefusalCause::NoMemory { smaller: true, .. }), "{ring:?}");
    if without_ring(&open()) {
        return;
    }
    // 400 places are refused, and the 25 that charge as much are not.
    let parts: Vec<Fixed<'_>> =
        (0..400).map(|at| memory.part(at * 4096, 4096).unwrap().into()).collect();
    let many = || {
        refusing(register, (3, 300), libc::ENOMEM, || {
            let ring = io_uring::IoUring::new(4).unwrap();
            let options = Options { fixed: &parts, ..Options::default() };
            let queue = FileQueue::<Pages>::open(&path, &create(), &options).unwrap();
            (RingBuffers::register(&ring, &parts).unwrap_err(), queue.notes().to_vec())
        })
    };
    let (error, notes) = without_ipc_lock(many);
    assert_eq!(error, RegisterError::NoMemory { requested: 400 << 12 });
    let [.., note @ Note::NotFixed { requested: 1_638_400, memlock: None, .. }] = &notes[..] else {
        panic!("{notes:?}")
    };
    assert!(note.to_string().ends_with("control group if that has a limit"), "{note}");
    // With a limit that cannot be tried, it is assumed.
    let refuse = || {
        refusing(register, (0, 0), libc::ENOMEM, || {
            let ring = io_uring::IoUring::new(4).unwrap();
            RingBuffers::register(&ring, &[memory.into()]).unwrap_err()
        })
    };
    let error = without_ipc_lock(refuse);
    assert!(matches!(error, RegisterError::Memlock { .. }), "{error}");
}

#[test]
fn a_short_transfer_continues_and_one_without_progress_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("parts");
    let file = create().open(&path).unwrap();
    let mut target = Target::new(file, &path, false, 512, &mut Vec::new()).unwrap();
    target.block = 512;
    let slot = |op, len, padded| Slot {
        buffer: (),
        tag: 0,
        op,
        offset: 0,
        len,
        padded,
        done: 0,
        retries: 0,
        since: Instant::now(),
    };
    let mut read = slot(Op::Read, 1000, 1024);
    assert_eq!(read.result_of(&target, Ok(512)), None);
    assert_eq!(read.result_of(&target, Err(Errno::INTR)), None);
    assert_eq!(read.result_of(&target, Ok(488)), Some(Ok(())));
    let mut short = slot(Op::Read, 1000, 1024);
    assert!(matches!(
        short.result_of(&target, Ok(999)),
        Some(Err(FileError::Short { done: 999, .. }))
    ));
    // A padded write has completed when the padding is written.
    let mut write = slot(Op::Write, 600, 1024);
    assert_eq!(write.result_of(&target, Ok(512)), None);
    assert!(matches!(
        write.result_of(&target, Ok(0)),
        Some(Err(FileError::Short { op: Op::Write, .. }))
    ));
    let mut busy = slot(Op::Write, 512, 512);
    for _ in 0..RETRIES {
        assert_eq!(busy.result_of(&target, Err(Errno::AGAIN)), None);
    }
    let gone = busy.result_of(&target, Err(Errno::AGAIN));
    assert!(matches!(gone, Some(Err(FileError::Transfer { errno: Errno::AGAIN, .. }))));
}

#[test]
fn notes_name_the_command_that_fixes_them() {
    let text = |note: Note| note.to_string();
    let refused =
        |errno: Errno, cause| text(Note::NoRing(RingRefusal { errno: errno.into(), cause }));
    assert!(
        refused(Errno::PERM, RingRefusalCause::Sysctl(2))
            .contains("; fix: sudo sysctl kernel.io_uring_disabled=0")
    );
    assert!(!refused(Errno::PERM, RingRefusalCause::Filter { seccomp: true }).contains("fix:"));
    let memlock = Some(MemlockRefusal { requested: 4096, limit: 8192 });
    let refused = RingRefusalCause::LockedMemory(MemlockRefusal { requested: 4096, limit: 8192 });
    for note in [
        Note::NotFixed { requested: 4096, errno: Errno::NOMEM, memlock },
        Note::NotPolled { errno: Errno::NOMEM, memlock },
        Note::NoRing(RingRefusal { errno: Errno::NOMEM.into(), cause: refused }),
    ] {
        assert_eq!(note.memlock(), memlock);
        assert!(note.to_string().contains("8192 bytes for all processes of this user"), "{note}");
        assert!(
            note.to_string().contains("; fix: ")
                && !note.without_fix().to_string().contains("fix:")
        );
    }
    assert!(
        text(Note::NotPolled { errno: Errno::OPNOTSUPP, memlock: None })
            .contains("the file does not support it")
    );
    assert!(!text(Note::NotPolled { errno: Errno::PERM, memlock: None }).contains("the file"));
    assert!(
        !text(Note::Buffered(BufferedReason::Refused(Errno::PERM))).contains("does not support")
    );
    // 4,097 bytes are more than 4,096, and no multiple.
    let why = BufferedReason::Block { requested: 1, needed: 4096 };
    let text = text(Note::Buffered(why));
    assert!(text.ends_with("use multiples of 4096") && !text.contains("blocks of 1"), "{text}");
}

fn without_ring(notes: &[Note]) -> bool {
    notes.iter().any(|note| matches!(note, Note::NoRing(_)))
}

#[test]
fn one_thread_and_polling_move_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let memory = arena(1 << 20);
    let fixed = [memory.into()];
    for (one_thread, poll, fixed) in [
        (true, false, &fixed[..]),
        (true, true, &fixed[..]),
        (false, true, &[]),
        (true, false, &[]),
    ] {
        let options = Options { one_thread, poll, fixed, depth: 16, ..Options::default() };
        let path = folder.path().join("modes");
        let notes = round_trip(&path, &pattern(777_777, 1), 16_384, memory, &options);
        if !poll {
            assert!(!notes.iter().any(|note| matches!(note, Note::NotPolled { .. })), "{notes:?}");
        }
    }
}

#[test]
fn polling_without_a_device_that_polls_is_a_note() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let options = Options { poll: true, ..Options::default() };
    let queue: FileQueue<Pages> =
        FileQueue::open(&folder.path().join("shm"), &create(), &options).unwrap();
    let said = queue.notes().iter().any(|note| matches!(note, Note::NotPolled { .. }));
    assert!(said || without_ring(queue.notes()), "{:?}", queue.notes());
}

#[test]
fn a_queue_of_one_thread_is_refused_to_others() {
    let options = Options { direct: false, one_thread: true, ..Options::default() };
    let freed = Arc::new(AtomicUsize::new(0));
    let file = waiting();
    let mut queue =
        FileQueue::new(file.try_clone().unwrap(), Path::new("eventfd"), &options).unwrap();
    if without_ring(queue.notes())
        || queue.notes().iter().any(|note| matches!(note, Note::NotDeferred { .. }))
    {
        return;
    }
    queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
    queue.submit().unwrap();
    let mut queue = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut done = Vec::new();
            assert_eq!(queue.submit(), Err(FileError::OtherThread));
            assert_eq!(queue.wait(1, &mut done), Err(FileError::OtherThread));
            assert_eq!(queue.poll(&mut done), Err(FileError::OtherThread));
            queue
        });
        other.join().unwrap()
    });
    // Nothing is lost by it.
    std::io::Write::write_all(&mut &file, &7u64.to_ne_bytes()).unwrap();
    let mut done = Vec::new();
    assert_eq!(queue.wait(1, &mut done).unwrap(), 1);
    assert!(done[0].result.is_ok() && done[0].buffer.0.bytes(8) == 7u64.to_ne_bytes());

    // Dropped on another thread it cannot wait for the kernel: the buffer is quarantined at once,
    // and counted.
    queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
    queue.submit().unwrap();
    let (before, start) = (quarantined_buffers(), Instant::now());
    std::thread::scope(|scope| scope.spawn(|| drop(queue)).join().unwrap());
    assert!(start.elapsed() < Duration::from_secs(10) && quarantined_buffers() > before);
    assert_eq!(freed.load(Ordering::SeqCst), 0);
}

#[test]
fn polling_finds_completions_that_need_a_system_call() {
    let folder = tempfile::tempdir().unwrap();
    for poll in [false, true] {
        let options = Options { one_thread: true, poll, ..Options::default() };
        let mut queue = FileQueue::open(&folder.path().join("poll"), &create(), &options).unwrap();
        let mut done = Vec::new();
        queue.write(Pages::new(4096), 0, 4096, 5).unwrap();
        assert_eq!(queue.poll(&mut done).unwrap(), 0, "nothing goes before it is submitted");
        queue.submit().unwrap();
        while queue.poll(&mut done).unwrap() == 0 {
            std::thread::yield_now();
        }
        assert!(done[0].tag == 5 && done[0].result.is_ok() && !done[0].latency.is_zero());
    }
}

/// Runs `body` on a thread whose io_uring_enter fails with `errno`.
fn without_enter<R: Send>(errno: Errno, body: impl FnOnce() -> R + Send) -> R {
    refusing(libc::SYS_io_uring_enter, (0, 0), errno.raw_os_error(), body)
}

/// Returns whether the descriptor becomes readable within a minute.
fn readable(fd: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&minute)) == Ok(1)
}

#[test]
fn what_the_kernel_did_not_accept_is_submitted_by_the_next_poll() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, pattern(8192, 0)).unwrap();
    for by_wait in [false, true] {
        for errno in [Errno::BUSY, Errno::AGAIN] {
            let mut queue = FileQueue::open(&path, &create(), &Options::default()).unwrap();
            if without_ring(queue.notes()) {
                return;
            }
            queue.read(Pages::new(4096), 0, 4096, 1).unwrap();
            queue.submit().unwrap();
            assert!(readable(queue.completion_fd().unwrap()));
            queue.read(Pages::new(4096), 4096, 4096, 2).unwrap();
            // There is a completion to take first, so this is no error.
            without_enter(errno, || queue.submit()).unwrap();
            let mut done = Vec::new();
            if by_wait {
                // The second one may have completed as well.
                assert!(queue.wait(1, &mut done).unwrap() >= 1);
            }
            while done.len() < 2 {
                assert!(readable(queue.completion_fd().unwrap()), "{errno}, wait: {by_wait}");
                queue.poll(&mut done).unwrap();
            }
            // Without one it is, and the transfer stays queued.
            queue.read(Pages::new(4096), 0, 4096, 3).unwrap();
            let refused = without_enter(errno, || queue.submit()).unwrap_err();
            assert!(
                refused.is_shortage() && refused.to_string().contains("no memory"),
                "{refused}"
            );
            queue.poll(&mut done).unwrap();
            while done.len() < 3 {
                assert!(readable(queue.completion_fd().unwrap()), "{errno}, wait: {by_wait}");
                queue.poll(&mut done).unwrap();
            }
            assert!(done.iter().all(|done| done.result.is_ok()));
        }
    }
    assert!(!FileError::Ring { errno: Errno::PERM }.is_shortage());
}
