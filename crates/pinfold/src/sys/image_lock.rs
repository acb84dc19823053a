//! Locks of disk images that other programs respect: those of QEMU (`block/file-posix.c`).
//!
//! Each way to use an image is a byte of the file, far inside of it. A program that uses it so has
//! a shared lock on byte 100 plus that number, and a program that excludes this use for others has
//! one on byte 200 plus that number. No program takes an exclusive lock: a test for one shows the
//! locks of others.

use super::errno::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// The first of the bytes for the ways in which a program uses an image.
const USED: i64 = 100;
/// The first of the bytes for the ways that it does not share.
const UNSHARED: i64 = 200;
/// The ways to use an image: to read what is consistent, to write, and to change its length.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// The time to wait for the lock of a program that has just ended: requests in flight of its ring
/// keep the file open for a moment.
const PATIENCE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);

/// The outcome of a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageLock {
    /// It is held until all descriptors of the open file are closed.
    Held,
    /// Another program uses the image in a way that excludes this one.
    InUse,
    /// The file system has no such locks.
    Unavailable(Errno),
}

/// Locks an image as QEMU does: for reading, and for writing if `write` is set. No other may write
/// it or change its length meanwhile; others may read it. The lock belongs to the open file, so
/// that duplicates of the descriptor share it. `F_OFD_SETLK`: Linux 3.15.
pub fn lock_image(file: &File, write: bool) -> ImageLock {
    let used: &[i64] = if write { &[READ, WRITE] } else { &[READ] };
    let unshared = [WRITE, RESIZE];
    patiently(|| {
        let bytes = used.iter().map(|way| USED + way);
        let mut bytes = bytes.chain(unshared.map(|way| UNSHARED + way));
        let locked = bytes.try_for_each(|byte| set(file, libc::F_RDLCK, byte, 1));
        let in_use = locked.and_then(|()| excluded(file, used, &unshared));
        if in_use == Ok(false) {
            return ImageLock::Held;
        }
        // Unlocks the bytes that this call has locked; on failure they stay locked until the file
        // is closed.
        let _ = set(file, libc::F_UNLCK, USED, 2 * (UNSHARED - USED));
        match in_use {
            Err(errno) if ![libc::EAGAIN, libc::EACCES].contains(&errno.raw()) => {
                ImageLock::Unavailable(errno)
            }
            _ => ImageLock::InUse,
        }
    })
}

/// Returns whether a program has locked an image so that it must be neither written nor replaced:
/// one that writes it, or that lets no other write it. Locks nothing.
pub fn is_image_in_use(file: &File) -> bool {
    let ways = [WRITE, RESIZE];
    let outcome = patiently(|| match excluded(file, &ways, &ways) {
        Ok(true) => ImageLock::InUse,
        Ok(false) => ImageLock::Held,
        Err(errno) => ImageLock::Unavailable(errno),
    });
    outcome == ImageLock::InUse
}

/// Tries it again while the image is in use, for a moment.
fn patiently(mut attempt: impl FnMut() -> ImageLock) -> ImageLock {
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            ImageLock::InUse if Instant::now() < until => std::thread::sleep(RETRY),
            outcome => return outcome,
        }
    }
}

/// Returns whether another open file excludes one of the ways, or uses one that is not shared.
fn excluded(file: &File, used: &[i64], unshared: &[i64]) -> Result<bool, Errno> {
    let used = used.iter().map(|way| UNSHARED + way);
    for byte in used.chain(unshared.iter().map(|way| USED + way)) {
        if is_locked(file, byte)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn lock(kind: i32, start: i64, len: i64) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: start,
        l_len: len,
        // It must be 0 for locks of open files.
        l_pid: 0,
    }
}

fn set(file: &File, kind: i32, start: i64, len: i64) -> Result<(), Errno> {
    let lock = lock(kind, start, len);
    // SAFETY: the descriptor is open, and the call reads a `flock` that lives until it returns.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(Errno::from(&std::io::Error::last_os_error())),
    }
}

fn is_locked(file: &File, byte: i64) -> Result<bool, Errno> {
    let mut lock = lock(libc::F_WRLCK, byte, 1);
    // SAFETY: as above, and the call writes to the `flock`, which is borrowed by nothing else.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(Errno::from(&std::io::Error::last_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn one_writes_or_several_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let one = open(&path);
        assert!(!is_image_in_use(&open(&path)));
        for write in [true, false] {
            assert_eq!(lock_image(&one, write), ImageLock::Held);
            let same = one.try_clone().unwrap();
            assert!(!is_image_in_use(&one), "its own lock excludes no one else");
            assert!(is_image_in_use(&open(&path)), "{write}");
            assert_eq!(lock_image(&open(&path), true), ImageLock::InUse, "{write}");
            let read = lock_image(&open(&path), false);
            assert_eq!(read == ImageLock::Held, !write);
            drop(same);
            set(&one, libc::F_UNLCK, 0, 0).unwrap();
            assert!(!is_image_in_use(&open(&path)), "a refused lock leaves nothing");
        }
    }

    /// As qemu-io does, which writes an image and shares it with all.
    #[test]
    fn one_that_shares_what_it_writes_uses_it_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        for (way, is_used) in [(READ, false), (WRITE, true), (RESIZE, true)] {
            let other = open(&path);
            set(&other, libc::F_RDLCK, USED + way, 1).unwrap();
            assert_eq!(is_image_in_use(&open(&path)), is_used, "{way}");
        }
    }

    /// A program that ends meanwhile, and one that goes on.
    #[test]
    fn a_lock_is_waited_for_a_moment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let first = open(&path);
        assert_eq!(lock_image(&first, true), ImageLock::Held);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                drop(first);
            });
            assert!(!is_image_in_use(&open(&path)));
            assert_eq!(lock_image(&open(&path), true), ImageLock::Held);
        });
    }

    #[test]
    fn a_file_without_locks_is_no_obstacle() {
        let write_only = File::options().write(true).open("/dev/null").unwrap();
        assert_eq!(lock_image(&write_only, true), ImageLock::Unavailable(Errno::new(libc::EBADF)));
        assert!(!is_image_in_use(&write_only));
    }
}
