//! Data that was written is read back, in every mode; the memory and the files for that.

use super::*;
use crate::memory::OwnedMemory;
use io_uring::opcode;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{DomainId, Pinned};
use pinfold_core::mem::DmaMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::fs::{File, OpenOptions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Writes `content` in pieces of `block` bytes, cuts the file, and reads it back, all at
/// `options.depth`.
pub(super) fn round_trip(
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
fn data_round_trips_at_odd_sizes_and_all_depths() {
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
fn blocks_of_512_bytes_use_o_direct_only_if_the_device_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { block: 512, ..Options::default() };
    let notes =
        round_trip(&folder.path().join("512"), &pattern(70_001, 1), 512, arena(64 << 20), &options);
    let queue: FileQueue<Pages> =
        FileQueue::open(&folder.path().join("512"), &create(), &options).unwrap();
    assert_eq!(queue.is_direct(), !notes.iter().any(|note| matches!(note, Note::Buffered(_))));
    assert!(!queue.is_direct() || queue.logical_block() <= 512);
    // A block that no O_DIRECT takes is taken, with a note.
    let options = Options { block: 1, ..Options::default() };
    let notes =
        round_trip(&folder.path().join("1"), &pattern(1000, 2), 100, arena(8 << 20), &options);
    assert!(
        matches!(notes[..], [Note::Buffered(BufferedReason::Block { requested: 1, .. }), ..]),
        "{notes:?}"
    );
}

#[test]
fn tmpfs_works_with_and_without_o_direct() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let notes = round_trip(
        &folder.path().join("shm"),
        &pattern(99_999, 3),
        8192,
        arena(8 << 20),
        &Options::default(),
    );
    assert!(
        notes.iter().all(|note| matches!(note, Note::Buffered(BufferedReason::Refused(_)))),
        "{notes:?}"
    );
}

#[test]
fn polling_finds_completed_tickets_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let mut queue =
        FileQueue::open(&folder.path().join("poll"), &create(), &Options::default()).unwrap();
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
    let queue: FileQueue<Pages> =
        FileQueue::open(&folder.path().join("fixed"), &create(), &options).unwrap();
    let refused = queue.notes().iter().any(|note| matches!(note, Note::NotFixed { .. }));
    assert_eq!(queue.fixed_bytes(), if refused { 0 } else { (1 << 20) + (64 << 10) });
}

#[test]
fn files_are_read_into_the_programs_own_memory_as_fixed_buffers() {
    let folder = tempfile::tempdir().unwrap();
    let (path, bytes) = (folder.path().join("owned"), pattern(64 << 10, 9));
    std::fs::write(&path, &bytes).unwrap();
    let memory = OwnedMemory::from_vec(vec![0; (1 << 20) + 4096]).unwrap();
    let options = Options { fixed: &[memory.fixed()], ..Options::default() };
    let mut queue = FileQueue::open(&path, &create(), &options).unwrap();
    let mut piece = memory.take().unwrap();
    drop(piece.split_off(64 << 10).unwrap());
    let notes = queue.notes();
    if !notes.iter().any(|note| matches!(note, Note::NoRing(_) | Note::NotFixed { .. })) {
        assert_eq!(queue.fixed_bytes(), memory.len() as u64);
        assert_eq!(queue.read_code(piece.memory()), Some(u32::from(opcode::ReadFixed::CODE)));
        assert_eq!(queue.read_code(Pages::new(4096).0), Some(u32::from(opcode::Read::CODE)));
    }
    queue.read(piece, 0, 64 << 10, 0).unwrap();
    let mut done = Vec::new();
    queue.wait(1, &mut done).unwrap();
    let read = done.pop().unwrap();
    assert_eq!(read.result, Ok(()));
    let mut back = vec![0; 64 << 10];
    read.buffer.memory().copy_to_slice(0, &mut back).unwrap();
    assert!(back == bytes);
}

/// Pages of memory with one owner.
#[derive(Debug)]
pub(super) struct Pages(pub(super) DmaMemory<'static>);

impl Pages {
    pub(super) fn new(len: usize) -> Self {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, prot, flags) }.unwrap();
        let base = NonNull::new(at.cast::<u8>()).unwrap();
        // SAFETY: mapped just now, until the value is dropped; no reference into it is ever made.
        Self(unsafe { DmaMemory::from_raw(base, len) })
    }

    pub(super) fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.copy_to_slice(0, &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the whole of what `new` mapped, which nothing reaches any more: the value had it
        // alone.
        unsafe { munmap(self.0.as_ptr().as_ptr().cast(), self.0.len()) }.unwrap();
    }
}

// SAFETY: an anonymous mapping stays where it is until `drop`; `Pages` gives out no reference into
// it.
unsafe impl Pinned for Pages {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// A piece of pages that stay mapped until exit: what is registered once and used many times.
#[derive(Debug)]
pub(super) struct Piece(pub(super) DmaMemory<'static>);

// SAFETY: the pages are leaked, and the tests give each piece to one transfer at a time.
unsafe impl Pinned for Piece {
    fn memory(&self) -> DmaMemory<'_> {
        self.0
    }
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

pub(super) fn arena(len: usize) -> DmaMemory<'static> {
    let pages = Pages::new(len);
    let memory = pages.0;
    std::mem::forget(pages);
    memory
}

/// Bytes that tell where they belong.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

pub(super) fn create() -> OpenOptions {
    let mut how = OpenOptions::new();
    how.read(true).write(true).create(true);
    how
}

/// Pages that count how many of them have been freed.
#[derive(Debug)]
pub(super) struct Counted(pub(super) Pages, pub(super) Arc<AtomicUsize>);

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
    fn fixed_iova(&self, _: DomainId) -> Option<Iova> {
        None
    }
}

/// Returns a file whose reads wait until something is written to it.
pub(super) fn waiting() -> File {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    // SAFETY: a new descriptor, which has no other owner.
    File::from(unsafe { OwnedFd::from_raw_fd(fd) })
}
