//! The storage of the model controller's blocks: memory, or a file.

use crate::bus::BusFault;
use pinfold::probe::{FileLimit, MapLimit};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

// The interface of a medium.

/// Accepts the next piece of the data that is read, in order.
pub type ReadSink<'a> = dyn FnMut(&[u8]) -> Result<(), BusFault> + 'a;
/// Fills the next piece of the data that is written, in order.
pub type WriteSource<'a> = dyn FnMut(&mut [u8]) -> Result<(), BusFault> + 'a;

/// Why an access to the medium failed.
#[derive(Debug, thiserror::Error)]
pub enum MediaError {
    /// The access to memory faulted.
    #[error(transparent)]
    Bus(#[from] BusFault),
    /// The medium is full, or a limit allows it no more memory.
    #[error("the medium is full")]
    Full,
    /// A system call failed.
    #[error("the medium failed: {0}")]
    Io(io::Error),
}

impl From<io::Error> for MediaError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            _ => Self::Io(error),
        }
    }
}

/// A medium: bytes from 0 to [`bytes`](Self::bytes).
///
/// Data is passed in place, in pieces of the medium's choice, so that media in memory need no
/// bounce buffer. Accesses beyond [`bytes`](Self::bytes) are errors.
pub trait Media: Send + Sync + 'static {
    /// Returns the size, which does not change.
    fn bytes(&self) -> u64;
    /// Passes `len` bytes from `at` to `sink`.
    ///
    /// # Errors
    /// [`MediaError`]; `sink` may have received a part.
    fn read(&self, at: u64, len: usize, sink: &mut ReadSink<'_>) -> Result<(), MediaError>;
    /// Stores `len` bytes from `source` at `at`.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been stored.
    fn write(&self, at: u64, len: usize, source: &mut WriteSource<'_>) -> Result<(), MediaError>;
    /// Discards `len` bytes from `at`, which then read as zeroes.
    ///
    /// # Errors
    /// [`MediaError`]; a part may have been discarded.
    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError>;
    /// Makes completed writes durable. Once it has failed, it always fails: data written before may
    /// be lost.
    ///
    /// # Errors
    /// [`MediaError`] of the first failure.
    fn flush(&self) -> Result<(), MediaError>;
}

/// Returns the error of an access outside the medium.
fn outside(at: u64, len: u64, bytes: u64) -> MediaError {
    MediaError::Io(io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("{len} bytes at {at} of a medium of {bytes} bytes"),
    ))
}

/// Checks that `at..at + len` is inside.
pub(crate) fn check(at: u64, len: u64, bytes: u64) -> Result<(), MediaError> {
    match at.checked_add(len) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(outside(at, len, bytes)),
    }
}

// Memory of the media.

const PAGE: usize = 4096;
/// The bytes that a medium in memory leaves to the rest of the program, if a limit ends its growth.
const SPARED: usize = 8 << 20;
/// The bytes that a program is taken to need beside the table of a medium, where a limit is to be
/// raised for that.
const BESIDE: u64 = 128 << 20;

/// Bytes that begin at a page, as the buffers of drivers do. Some processors (AMD's Zen 3) take 2 to
/// 20 times as long for a copy whose destination has an offset in its page that is a few bytes above
/// the source's, and the allocator's memory begins 16 bytes into a page.
struct Pages {
    /// A page more than the bytes.
    bytes: Box<[u8]>,
    begin: usize,
}

impl Pages {
    /// Returns `len` zeroes, allocated when they are first used.
    fn zeroed(len: usize) -> Self {
        let bytes = vec![0; len + PAGE].into_boxed_slice();
        let begin = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, begin }
    }

    /// Like [`zeroed`](Self::zeroed), unless a limit would leave less than [`SPARED`]: a refused
    /// allocation ends the program.
    fn within_limits(len: usize) -> Result<Self, MediaError> {
        match MapLimit::allow((len + PAGE + SPARED) as u64) {
            true => Ok(Self::zeroed(len)),
            false => Err(MediaError::Full),
        }
    }

    fn range(&self) -> Range<usize> {
        self.begin..self.begin + self.bytes.len() - PAGE
    }

    fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        self.bytes.get(self.range())?.get(range)
    }

    fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let all = self.range();
        self.bytes.get_mut(all)?.get_mut(range)
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("bytes", &self.range().len()).finish_non_exhaustive()
    }
}

// Blocks in memory, which is allocated when it is first written.

const CHUNK: u64 = 2 << 20;
const CHUNK_BYTES: usize = 2 << 20;

#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);
static ZEROES: Zeroes = Zeroes([0; 64 << 10]);

type Chunk = Mutex<Option<Pages>>;

/// Memory in chunks of 2 MiB, each allocated when it is first written. Unwritten blocks read as
/// zeroes.
pub struct MemoryMedia {
    chunks: Box<[Chunk]>,
    bytes: u64,
}

impl fmt::Debug for MemoryMedia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMedia").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl MemoryMedia {
    /// Creates a medium of `bytes` bytes without allocating them; the cost is 32 bytes per 2 MiB.
    /// Where a limit of the process or the machine leaves too little memory for a chunk, the medium
    /// is full.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`] where it leaves too little for these: it names the limit.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let count = bytes.div_ceil(CHUNK);
        let table = count.saturating_mul(size_of::<Chunk>() as u64);
        let refused = || io::Error::new(io::ErrorKind::OutOfMemory, no_memory(bytes, table));
        if !MapLimit::allow(table.saturating_add(SPARED as u64)) {
            return Err(refused());
        }
        let mut chunks = Vec::new();
        let room = usize::try_from(count).map(|count| chunks.try_reserve_exact(count));
        if !matches!(room, Ok(Ok(()))) {
            return Err(refused());
        }
        chunks.extend((0..count).map(|_| Mutex::new(None)));
        Ok(Self { chunks: chunks.into(), bytes })
    }

    /// Returns the number of bytes allocated.
    #[cfg(test)]
    fn allocated_bytes(&self) -> u64 {
        self.chunks.iter().filter(|chunk| lock(chunk).is_some()).count() as u64 * CHUNK
    }

    /// Calls `f` with each chunk of `at..at + len`, the offset in it, and the length.
    fn each<E>(
        &self,
        at: u64,
        len: u64,
        mut f: impl FnMut(&Chunk, usize, usize) -> Result<(), E>,
    ) -> Result<(), E>
    where
        E: From<MediaError>,
    {
        check(at, len, self.bytes)?;
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let from = at % CHUNK;
            let piece = left.min(CHUNK - from);
            // Inside by `check`; both numbers are at most 2 MiB.
            if let (Some(chunk), Ok(from), Ok(piece)) = (
                usize::try_from(at / CHUNK).ok().and_then(|i| self.chunks.get(i)),
                usize::try_from(from),
                usize::try_from(piece),
            ) {
                f(chunk, from, piece)?;
            }
            at += piece;
            left -= piece;
        }
        Ok(())
    }
}

/// Says that a medium has no memory for its table, and what to do about it.
fn no_memory(bytes: u64, table: u64) -> String {
    let what = format!("no memory for {table} bytes, the table of a medium of {bytes}");
    let needed = table.saturating_add(SPARED as u64);
    match MapLimit::here().into_iter().find(|limit| limit.left < needed) {
        Some(refuses) => {
            let fix = refuses.raise(table.saturating_add(BESIDE)).unwrap_or_else(|words| words);
            let MapLimit { setting, left, limit } = refuses;
            format!("{what}: {setting} of {limit} bytes leaves {left}: {fix}")
        }
        None => format!("{what}: use a smaller one, or a file"),
    }
}

/// Locks a chunk. After a panic it is partly written at worst, as by a torn write.
fn lock(chunk: &Chunk) -> MutexGuard<'_, Option<Pages>> {
    chunk.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Media for MemoryMedia {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, at: u64, len: usize, sink: &mut ReadSink<'_>) -> Result<(), MediaError> {
        self.each(at, len as u64, |chunk, from, piece| {
            match lock(chunk).as_ref().and_then(|bytes| bytes.get(from..from + piece)) {
                Some(bytes) => Ok(sink(bytes)?),
                None => {
                    let mut left = piece;
                    while left > 0 {
                        let zeroes = ZEROES.0.get(..left).unwrap_or(&ZEROES.0);
                        sink(zeroes)?;
                        left -= zeroes.len();
                    }
                    Ok(())
                }
            }
        })
    }

    fn write(&self, at: u64, len: usize, source: &mut WriteSource<'_>) -> Result<(), MediaError> {
        self.each(at, len as u64, |chunk, from, piece| {
            let mut chunk = lock(chunk);
            let bytes = match chunk.as_mut() {
                Some(bytes) => bytes,
                None => chunk.insert(Pages::within_limits(CHUNK_BYTES)?),
            };
            match bytes.get_mut(from..from + piece) {
                Some(bytes) => Ok(source(bytes)?),
                None => Ok(()),
            }
        })
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError> {
        self.each(at, len, |chunk, from, piece| {
            let mut chunk = lock(chunk);
            if piece == CHUNK_BYTES {
                *chunk = None;
            } else if let Some(bytes) =
                chunk.as_mut().and_then(|bytes| bytes.get_mut(from..from + piece))
            {
                bytes.fill(0);
            }
            Ok(())
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }
}

// Blocks in a file.

const BOUNCE: usize = 256 << 10;

/// A file image. Holes read as zeroes; discarding makes holes where the file system can.
#[derive(Debug)]
pub struct FileMedia {
    file: File,
    bytes: u64,
    bounce: Mutex<Pages>,
    /// The system's error of the first flush that failed.
    lost: Mutex<Option<i32>>,
}

impl FileMedia {
    /// Opens the image at `path`. With a size, creates it if necessary and grows it (with a hole)
    /// to `bytes`; never shortens it.
    ///
    /// # Errors
    /// The system error; [`FileLimit`] before anything is done.
    pub fn open(path: &Path, bytes: Option<u64>) -> io::Result<Self> {
        let create = bytes.is_some();
        let grown = |want: &u64| std::fs::metadata(path).map_or(true, |found| found.len() < *want);
        if let Some(refused) = bytes.filter(grown).and_then(FileLimit::refusing) {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, refused));
        }
        let file =
            OpenOptions::new().read(true).write(true).create(create).truncate(false).open(path)?;
        let has = file.metadata()?.len();
        let bytes = match bytes {
            Some(want) if want > has => {
                file.set_len(want)?;
                // Files of proc and the like take any length, and have none.
                let has = file.metadata()?.len();
                if has < want {
                    let why = format!(
                        "it cannot be grown to {want} bytes, and has {has}: name a regular file"
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
                }
                want
            }
            _ => has,
        };
        Ok(Self::from_file(file, bytes))
    }

    /// Uses the first `bytes` bytes of an open file. Commands fail where it is shorter, or not open
    /// for what they do.
    pub fn from_file(file: File, bytes: u64) -> Self {
        let bounce = Mutex::new(Pages::zeroed(BOUNCE));
        Self { file, bytes, bounce, lost: Mutex::new(None) }
    }

    /// Flushes by `sync`, unless an earlier flush has failed: the kernel reports once that it could
    /// not write back, and drops what that was. The lock is held meanwhile, so that no other flush
    /// succeeds beside the failing one.
    fn flush_by(&self, sync: impl FnOnce() -> io::Result<()>) -> Result<(), MediaError> {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = *lost {
            return Err(io::Error::from_raw_os_error(errno).into());
        }
        let flushed = sync();
        if let Err(error) = &flushed {
            *lost = Some(error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()));
        }
        Ok(flushed?)
    }

    fn each(
        &self,
        at: u64,
        len: usize,
        mut f: impl FnMut(u64, &mut [u8]) -> Result<(), MediaError>,
    ) -> Result<(), MediaError> {
        check(at, len as u64, self.bytes)?;
        // The buffer has no meaning between calls, so a poisoned lock is fine.
        let mut bounce = self.bounce.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let piece = left.min(BOUNCE);
            if let Some(bytes) = bounce.get_mut(0..piece) {
                f(at, bytes)?;
            }
            at += piece as u64;
            left -= piece;
        }
        Ok(())
    }
}

impl Media for FileMedia {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, at: u64, len: usize, sink: &mut ReadSink<'_>) -> Result<(), MediaError> {
        self.each(at, len, |at, bytes| {
            self.file.read_exact_at(bytes, at)?;
            Ok(sink(bytes)?)
        })
    }

    fn write(&self, at: u64, len: usize, source: &mut WriteSource<'_>) -> Result<(), MediaError> {
        self.each(at, len, |at, bytes| {
            source(bytes)?;
            Ok(self.file.write_all_at(bytes, at)?)
        })
    }

    fn discard(&self, at: u64, len: u64) -> Result<(), MediaError> {
        check(at, len, self.bytes)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if len == 0 || rustix::fs::fallocate(&self.file, flags, at, len).is_ok() {
            return Ok(());
        }
        // Some file systems cannot make holes (call since Linux 2.6.38): write zeroes.
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(BOUNCE).min(BOUNCE);
            self.write(at, piece, &mut |bytes| {
                bytes.fill(0);
                Ok(())
            })?;
            at += piece as u64;
            left -= piece as u64;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.flush_by(|| self.file.sync_data())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of proc takes any length, and has none: each command would fail.
    #[test]
    fn a_file_that_does_not_grow_is_refused() {
        let refused = FileMedia::open(Path::new("/proc/self/comm"), Some(1 << 20)).err().unwrap();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert!(refused.to_string().contains("cannot be grown to 1048576 bytes"), "{refused}");
    }

    /// As in a buffer that begins at a page: stored bytes have their offset in the page, zeroes and
    /// a file's begin at one.
    #[test]
    fn data_have_their_place_in_the_page() {
        let file = FileMedia::from_file(tempfile::tempfile().unwrap(), 2 * CHUNK);
        file.file.set_len(2 * CHUNK).unwrap();
        let place = |bytes: &[u8]| bytes.as_ptr().addr() % PAGE;
        for at in [0, 512, CHUNK + 8192] {
            let memory = MemoryMedia::new(2 * CHUNK).unwrap();
            let expected = usize::try_from(at).unwrap() % PAGE;
            let mut seen = Vec::new();
            let mut saw = |expected, bytes: &[u8]| {
                seen.push((expected, place(bytes)));
                Ok(())
            };
            // For zeroes that are not stored, and for a file, each piece begins at a page.
            memory.read(at, 1024, &mut |from| saw(0, from)).unwrap();
            file.read(at, 1024, &mut |from| saw(0, from)).unwrap();
            file.write(at, 1024, &mut |to| saw(0, to)).unwrap();
            memory.write(at, 1024, &mut |to| saw(expected, to)).unwrap();
            memory.read(at, 1024, &mut |from| saw(expected, from)).unwrap();
            assert_eq!(seen.len(), 5);
            assert!(seen.iter().all(|(expected, is)| is == expected), "{at}: {seen:?}");
        }
        let mut pages = Pages::zeroed(PAGE);
        assert!(pages.get(0..PAGE).is_some() && pages.get_mut(0..PAGE).is_some());
        assert!(pages.get(0..PAGE + 1).is_none() && pages.get_mut(PAGE..PAGE + 1).is_none());
    }

    #[test]
    fn a_limit_ends_the_growth_before_it_ends_the_program() {
        assert!(Pages::within_limits(CHUNK_BYTES).is_ok());
        // More than a process can map.
        assert!(matches!(Pages::within_limits(1 << 60), Err(MediaError::Full)));
    }

    #[test]
    fn a_medium_without_memory_for_its_table_is_refused() {
        // More than the address space of a process.
        for bytes in [1 << 63, u64::MAX] {
            let refused = MemoryMedia::new(bytes).err().unwrap();
            assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory);
            let text = refused.to_string();
            assert!(text.contains(&format!("the table of a medium of {bytes}: ")), "{text}");
        }
    }

    #[test]
    fn written_chunks_are_allocated_and_others_read_as_zeroes() {
        let media = MemoryMedia::new(5 << 20).unwrap();
        assert_eq!(media.allocated_bytes(), 0);
        let at = CHUNK - 3;
        media
            .write(at, 6, &mut |to| {
                let _: () = to.fill(7);
                Ok(())
            })
            .unwrap();
        assert_eq!(media.allocated_bytes(), 2 * CHUNK);
        let mut seen = Vec::new();
        media
            .read(at - 1, 8, &mut |from| {
                let _: () = seen.extend_from_slice(from);
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, [0, 7, 7, 7, 7, 7, 7, 0]);
        media.discard(0, CHUNK).unwrap();
        assert_eq!(media.allocated_bytes(), CHUNK);
        media.discard(CHUNK, 1).unwrap();
        seen.clear();
        media
            .read(at, 6, &mut |from| {
                let _: () = seen.extend_from_slice(from);
                Ok(())
            })
            .unwrap();
        assert_eq!(seen, [0, 0, 0, 0, 7, 7]);
        assert!(media.read(5 << 20, 1, &mut |_| Ok(())).is_err());
        assert!(media.discard(u64::MAX, 2).is_err());
    }
}

#[cfg(test)]
mod file_tests {
    use super::*;

    #[test]
    fn an_image_is_created_grown_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        assert!(FileMedia::open(&path, None).is_err());
        let media = FileMedia::open(&path, Some(1 << 20)).unwrap();
        media
            .write(4096, 600_000, &mut |to| {
                let _: () = to.fill(9);
                Ok(())
            })
            .unwrap();
        media.discard(8192, 4096).unwrap();
        media.flush().unwrap();
        drop(media);
        let media = FileMedia::open(&path, Some(4096)).unwrap();
        assert_eq!(media.bytes(), 1 << 20);
        let mut seen = Vec::new();
        media
            .read(0, 1 << 20, &mut |from| {
                let _: () = seen.extend_from_slice(from);
                Ok(())
            })
            .unwrap();
        let nines = |range: std::ops::Range<usize>| seen[range].iter().all(|b| *b == 9);
        assert!(nines(4096..8192) && nines(12288..604_096));
        assert!(seen[..4096].iter().chain(&seen[8192..12288]).all(|b| *b == 0));
        assert!(media.read(1 << 20, 1, &mut |_| Ok(())).is_err());
    }

    #[test]
    fn after_a_failed_flush_none_succeeds() {
        let media = FileMedia::from_file(tempfile::tempfile().unwrap(), 4096);
        media.flush().unwrap();
        let full = || Err(io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error()));
        assert!(matches!(media.flush_by(full), Err(MediaError::Full)));
        assert!(matches!(media.flush(), Err(MediaError::Full)), "the data may be lost");
        let media = FileMedia::from_file(tempfile::tempfile().unwrap(), 4096);
        assert!(matches!(
            media.flush_by(|| Err(io::Error::other("no code"))),
            Err(MediaError::Io(_))
        ));
        assert!(matches!(media.flush(), Err(MediaError::Io(_))));
    }
}
