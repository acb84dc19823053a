//! Blocks in a file.

use crate::media::medium::{Media, MediaError, ReadSink, WriteSource, check};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

const BOUNCE: usize = 256 << 10;

/// A file image. Holes read as zeroes; discarding makes holes where the file system can.
#[derive(Debug)]
pub struct FileMedia {
    file: File,
    bytes: u64,
    bounce: Mutex<Box<[u8]>>,
    /// The system's error of the first flush that failed.
    lost: Mutex<Option<i32>>,
}

impl FileMedia {
    /// Opens the image at `path`. With a size, creates it if necessary and grows it (with a hole)
    /// to `bytes`; never shortens it.
    ///
    /// # Errors
    /// The system error.
    pub fn open(path: &Path, bytes: Option<u64>) -> io::Result<Self> {
        let create = bytes.is_some();
        let file =
            OpenOptions::new().read(true).write(true).create(create).truncate(false).open(path)?;
        let has = file.metadata()?.len();
        let bytes = match bytes {
            Some(want) if want > has => {
                file.set_len(want)?;
                want
            }
            _ => has,
        };
        Ok(Self::from_file(file, bytes))
    }

    /// Uses the first `bytes` bytes of an open file. Commands fail where it is shorter, or not open
    /// for what they do.
    pub fn from_file(file: File, bytes: u64) -> Self {
        let bounce = Mutex::new(vec![0; BOUNCE].into_boxed_slice());
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
            if let Some(bytes) = bounce.get_mut(..piece) {
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
