//! On the real kernel, with real files.

use super::slot::RETRIES;
use super::*;
use pinfold_core::addr::Iova;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Pages of memory that nobody else has.
#[derive(Debug)]
struct Pages(DmaMemory<'static>);

impl Pages {
    fn new(len: usize) -> Self {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }.unwrap();
        let base = NonNull::new(at.cast::<u8>()).unwrap();
        // SAFETY: mapped just now, until the value is dropped; no reference into it is ever made.
        Self(unsafe { DmaMemory::from_raw(base, len) })
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.copy_to_slice(0, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of what `new` mapped, which nothing reaches any more: the value had it alone.
        unsafe { munmap(self.0.as_ptr().as_ptr().cast(), self.0.len()) }.unwrap();
    }
}

// SAFETY: an anonymous mapping stays where it is until `drop`; `Pages` gives out no reference into it.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self) -> Option<Iova> {
        None
    }
}

/// A piece of pages that stay mapped for ever: what is registered once and used many times.
#[derive(Debug)]
struct Piece(DmaMemory<'static>);

// SAFETY: the pages are leaked, and the tests hand out each piece to one transfer at a time.
unsafe impl Pinned for Piece {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self) -> Option<Iova> {
        None
    }
}

fn arena(len: usize) -> DmaMemory<'static> {
    let pages = Pages::new(len);
    let memory = pages.0;
    std::mem::forget(pages);
    memory
}

/// Bytes that tell where they belong.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn create() -> OpenOptions {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true);
    how
}

/// Writes `content` in pieces of `block` bytes, cuts the file, and reads it back, all at `options.depth`.
fn round_trip(
    path: &Path,
    content: &[u8],
    block: usize,
    memory: DmaMemory<'static>,
    options: &Options<'_, 'static>,
) -> Vec<Note> {
    let mut queue: FileQueue<Piece> = FileQueue::open(path, &create(), options).unwrap();
    let room = block.next_multiple_of(4096);
    let mut free: Vec<Piece> =
        (0..options.depth as usize).map(|i| Piece(memory.part(i * room, room).unwrap())).collect();
    for op in [Op::Write, Op::Read] {
        let mut left: Vec<(u64, &[u8])> =
            content.chunks(block).enumerate().map(|(i, part)| ((i * block) as u64, part)).collect();
        let mut done = Vec::new();
        let mut seen = 0;
        while seen < content.len() {
            while !free.is_empty() && !left.is_empty() {
                let (piece, (offset, part)) = (free.pop().unwrap(), left.pop().unwrap());
                match op {
                    Op::Write => {
                        piece.0.copy_from_slice(0, part).unwrap();
                        queue.write(piece, offset, part.len(), offset).unwrap();
                    }
                    Op::Read => {
                        piece.0.fill(0, room, 0xee).unwrap();
                        queue.read(piece, offset, part.len(), offset).unwrap();
                    }
                }
            }
            assert!(queue.wait(1, &mut done).unwrap() >= 1);
            for over in done.drain(..) {
                over.result.unwrap();
                let start = usize::try_from(over.offset).unwrap();
                assert_eq!((over.tag, over.op), (over.offset, op));
                if op == Op::Read {
                    let mut bytes = vec![0; over.len];
                    over.buffer.0.copy_to_slice(0, &mut bytes).unwrap();
                    assert!(bytes == content[start..start + over.len], "at {start}");
                }
                seen += over.len;
                free.push(over.buffer);
            }
        }
        if op == Op::Write {
            queue.set_len(content.len() as u64).unwrap();
            queue.sync(true).unwrap();
            assert_eq!(queue.len().unwrap(), content.len() as u64);
        }
    }
    assert_eq!(queue.in_flight(), 0);
    assert!(std::fs::read(path).unwrap() == content);
    queue.notes().to_vec()
}

#[test]
fn what_is_written_is_read_at_odd_sizes_and_all_depths() {
    let folder = tempfile::tempdir().unwrap();
    // One arena for all, larger than any of them needs.
    let memory = arena(16 << 20);
    let sizes = [0, 1, 511, 512, 513, 4095, 4096, 4097, 100_000, 1_234_567];
    for (i, len) in sizes.into_iter().enumerate() {
        for (block, depth) in [(4096, 1), (16 << 10, 7), (64 << 10, 256)] {
            for (direct, ring, fix) in
                [(true, true, true), (true, true, false), (false, true, true), (true, false, false)]
            {
                let path = folder.path().join(format!("{i}-{block}-{direct}-{ring}-{fix}"));
                let all = [memory.into()];
                let fixed: &[Fixed<'static>] = if fix { &all } else { &[] };
                let options = Options { depth, direct, ring, fixed, ..Options::default() };
                let notes = round_trip(&path, &pattern(len, i as u64), block, memory, &options);
                assert!(direct || !notes.iter().any(|note| matches!(note, Note::Buffered(_))));
            }
        }
    }
}

#[test]
fn blocks_of_512_bytes_go_direct_where_the_device_has_them_and_buffered_where_not() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { block: 512, ..Options::default() };
    let notes = round_trip(&folder.path().join("512"), &pattern(70_001, 1), 512, arena(64 << 20), &options);
    let queue: FileQueue<Pages> = FileQueue::open(&folder.path().join("512"), &create(), &options).unwrap();
    assert_eq!(queue.is_direct(), !notes.iter().any(|note| matches!(note, Note::Buffered(_))));
    assert!(!queue.is_direct() || queue.logical_block() <= 512);
    // A block that no O_DIRECT takes is taken, with a note.
    let options = Options { block: 1, ..Options::default() };
    let notes = round_trip(&folder.path().join("1"), &pattern(1000, 2), 100, arena(8 << 20), &options);
    assert!(matches!(notes[..], [Note::Buffered(BufferedWhy::Block { asked: 1, .. }), ..]), "{notes:?}");
}

#[test]
fn memory_file_systems_work_direct_or_not() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let notes = round_trip(
        &folder.path().join("shm"),
        &pattern(99_999, 3),
        8192,
        arena(8 << 20),
        &Options::default(),
    );
    assert!(notes.iter().all(|note| matches!(note, Note::Buffered(BufferedWhy::Refused(_)))), "{notes:?}");
}

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
            let short =
                FileError::Short { op: Op::Read, path: path.as_path().into(), offset: 0, len: 16384, done };
            assert_eq!(over[0].result, Err(short), "direct: {direct}");
            assert_eq!(over[0].buffer.bytes(done), pattern(16384, 0)[..done]);
        }
    }
}

#[test]
fn bad_transfers_give_their_buffer_back() {
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
        assert!(matches!(inside, FileError::Misaligned { op: Op::Write, offset: 4096, len: 100, .. }));
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
fn impossible_queues_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let open = |path: &Path, how: &OpenOptions, depth, block| {
        FileQueue::<Pages>::open(path, how, &Options { depth, block, ..Options::default() }).unwrap_err()
    };
    let limit = 32_768;
    assert_eq!(open(&path, &create(), 0, 512), FileError::Depth { asked: 0, limit });
    assert_eq!(open(&path, &create(), 1_000_000_000, 512), FileError::Depth { asked: 1_000_000_000, limit });
    assert_eq!(open(&path, &create(), 1, 3), FileError::Block { asked: 3 });
    assert_eq!(open(&path, &create(), 1, 0), FileError::Block { asked: 0 });
    let mut read = OpenOptions::new();
    read.read(true);
    let missing = open(&folder.path().join("none"), &read, 1, 512);
    assert!(missing.to_string().ends_with("no such file or folder; check the path"), "{missing}");
    assert!(matches!(open(folder.path(), &read, 1, 512), FileError::System { errno: Errno::ISDIR, .. }));
}

#[test]
fn a_full_disk_is_named() {
    // A device that is always full, and refuses O_DIRECT.
    let mut how = OpenOptions::new();
    how.write(true);
    let Ok(mut queue) = FileQueue::open(Path::new("/dev/full"), &how, &Options::default()) else { return };
    queue.write(Pages::new(4096), 0, 4096, 0).unwrap();
    let mut done = Vec::new();
    queue.wait(1, &mut done).unwrap();
    let error = done[0].result.clone().unwrap_err();
    assert!(matches!(error, FileError::Transfer { errno: Errno::NOSPC, done: 0, .. }), "{error}");
    assert!(error.to_string().contains("the disk is full"), "{error}");
}

/// Pages that count how many of them have been freed.
#[derive(Debug)]
struct Counted(Pages, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: as for the pages inside.
unsafe impl Pinned for Counted {
    fn memory(&self) -> DmaMemory<'_> {
        self.0.memory()
    }
    fn fixed_iova(&self) -> Option<Iova> {
        None
    }
}

#[test]
fn dropping_a_queue_frees_every_buffer_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dropped");
    std::fs::write(&path, pattern(8 << 20, 0)).unwrap();
    for submit in [true, false] {
        let freed = Arc::new(AtomicUsize::new(0));
        let mut queue =
            FileQueue::open(&path, &create(), &Options { depth: 64, ..Options::default() }).unwrap();
        for i in 0..64u64 {
            let buffer = Counted(Pages::new(128 << 10), freed.clone());
            queue.read(buffer, i * (128 << 10), 128 << 10, i).unwrap();
        }
        if submit {
            assert_eq!(queue.submit().unwrap().transfers, 64);
        }
        drop(queue);
        assert_eq!(freed.load(Ordering::SeqCst), 64);
    }
}

/// A file whose reads wait until something is written to it.
fn waiting() -> File {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    // SAFETY: a new descriptor, which nobody else has.
    File::from(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[test]
fn a_drop_waits_for_the_kernel_and_leaks_what_it_never_gives_back() {
    let options = Options { direct: false, ..Options::default() };
    for answered in [true, false] {
        let file = waiting();
        let mut other = file.try_clone().unwrap();
        let freed = Arc::new(AtomicUsize::new(0));
        let mut queue = FileQueue::new(file, Path::new("eventfd"), &options).unwrap();
        if queue.notes().iter().any(|note| matches!(note, Note::NoRing { .. })) {
            return;
        }
        queue.last_wait = if answered { LAST_WAIT } else { Duration::from_millis(50) };
        queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
        queue.submit().unwrap();
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(queue));
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!(freed.load(Ordering::SeqCst), 0, "the kernel may still write to it");
            if answered {
                other.write_all(&1u64.to_ne_bytes()).unwrap();
            }
        });
        assert!(start.elapsed() < Duration::from_secs(10));
        assert_eq!(freed.load(Ordering::SeqCst), usize::from(answered));
        assert_eq!(abandoned_buffers(), u64::from(!answered));
    }
}

#[test]
fn polling_finds_what_is_over_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let mut queue = FileQueue::open(&folder.path().join("poll"), &create(), &Options::default()).unwrap();
    let mut done = Vec::new();
    queue.write(Pages::new(4096), 0, 4096, 5).unwrap();
    assert_eq!(queue.poll(&mut done).unwrap(), 0, "nothing goes before it is submitted");
    let submitted = queue.submit().unwrap();
    assert!(submitted.transfers == 1 && !submitted.elapsed.is_zero());
    while queue.poll(&mut done).unwrap() == 0 {
        std::thread::yield_now();
    }
    assert!(done[0].tag == 5 && done[0].result.is_ok() && !done[0].latency.is_zero());
}

#[test]
fn buffers_in_registered_memory_are_fixed_across_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let memory = [arena(1 << 20).into(), arena(64 << 10).into()];
    let options = Options { fixed: &memory, ..Options::default() };
    let queue: FileQueue<Pages> = FileQueue::open(&folder.path().join("fixed"), &create(), &options).unwrap();
    let refused = queue.notes().iter().any(|note| matches!(note, Note::NotFixed { .. }));
    assert_eq!(queue.fixed_bytes(), if refused { 0 } else { (1 << 20) + (64 << 10) });
}

/// `CAP_IPC_LOCK` is the calling thread's, and without it the kernel counts what is pinned.
fn without_ipc_lock<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let run = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= CapabilitySet::IPC_LOCK;
        set_capabilities(None, sets).unwrap();
        body()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn a_memlock_that_does_not_suffice_is_a_note_with_figures_and_a_command() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    // Pinning has to touch the pages, so a large limit is not worth its test.
    let Some(limit) = limit.filter(|limit| *limit <= 256 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memlock");
    let asked = limit.next_multiple_of(4096) + (1 << 20);
    let memory = arena(usize::try_from(asked).unwrap());
    let fixed = [memory.into()];
    let notes = without_ipc_lock(|| {
        round_trip(&path, &pattern(50_000, 4), 4096, memory, &Options { fixed: &fixed, ..Options::default() })
    });
    let [.., Note::NotFixed { asked: said, limit: Some(of), errno: Errno::NOMEM, .. }] = notes[..] else {
        // No ring at all, or none that counts.
        assert!(notes.iter().any(|note| matches!(note, Note::NoRing { .. })), "{notes:?}");
        return;
    };
    assert_eq!((said, of), (asked, limit));
    let text = notes.last().unwrap().to_string();
    assert!(
        text.contains(&format!("{asked} bytes asked for"))
            && text.contains("sudo prlimit --pid $$ --memlock="),
        "{text}"
    );
}

#[test]
fn a_transfer_in_parts_goes_on_and_one_without_progress_ends() {
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
    assert_eq!(read.verdict(&target, Ok(512)), None);
    assert_eq!(read.verdict(&target, Err(Errno::INTR)), None);
    assert_eq!(read.verdict(&target, Ok(488)), Some(Ok(())));
    let mut short = slot(Op::Read, 1000, 1024);
    assert!(matches!(short.verdict(&target, Ok(999)), Some(Err(FileError::Short { done: 999, .. }))));
    // A padded write is over when the padding is written.
    let mut write = slot(Op::Write, 600, 1024);
    assert_eq!(write.verdict(&target, Ok(512)), None);
    assert!(matches!(write.verdict(&target, Ok(0)), Some(Err(FileError::Short { op: Op::Write, .. }))));
    let mut busy = slot(Op::Write, 512, 512);
    for _ in 0..RETRIES {
        assert_eq!(busy.verdict(&target, Err(Errno::AGAIN)), None);
    }
    let gone = busy.verdict(&target, Err(Errno::AGAIN));
    assert!(matches!(gone, Some(Err(FileError::Transfer { errno: Errno::AGAIN, .. }))));
}

#[test]
fn notes_name_the_command_that_mends_them() {
    let text = |note: Note| note.to_string();
    assert!(text(Note::NoRing { errno: Errno::PERM }).contains("sysctl kernel.io_uring_disabled=0"));
    assert!(text(Note::NoRing { errno: Errno::NOSYS }).contains("Linux 5.6"));
    let why = BufferedWhy::Block { asked: 512, needed: 4096 };
    assert!(text(Note::Buffered(why)).contains("use blocks of 4096 bytes or more"));
}
