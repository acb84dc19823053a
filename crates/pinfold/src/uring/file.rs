//! The file behind a queue, and the alignment that O_DIRECT requires.

use super::error::{FileError, Op};
use super::note::{BufferedReason, Note};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::io::{Errno, retry_on_intr};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// `STATX_DIOALIGN`: Linux 6.1. rustix has the fields but no name for the flag.
const DIOALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// The block that is assumed for O_DIRECT if the kernel does not report it (before Linux 6.1): a
/// page, which suffices for every file system.
const UNKNOWN_BLOCK: u32 = 4096;

#[derive(Debug)]
pub(super) struct Target {
    pub(super) file: File,
    pub(super) path: Arc<Path>,
    pub(super) direct: bool,
    /// Offset and length must be multiples of it: 1 if not `direct`.
    pub(super) block: u32,
    is_device: bool,
    /// The mode in which it was opened, which never changes.
    access: OFlags,
    /// The length of the file when all that is queued is written.
    end: u64,
}

impl Target {
    /// Sets O_DIRECT if it is requested and supported, or clears it.
    pub(super) fn new(
        file: File,
        path: &Path,
        direct: bool,
        block: u32,
        notes: &mut Vec<Note>,
    ) -> Result<Self, FileError> {
        let path: Arc<Path> = path.into();
        let failed = |call| {
            let path = path.clone();
            move |errno| FileError::System { call, path, errno }
        };
        let stat = rustix::fs::fstat(&file).map_err(failed("fstat"))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return Err(failed("open")(Errno::ISDIR));
        }
        let is_device = kind == FileType::BlockDevice;
        let flags = rustix::fs::fcntl_getfl(&file).map_err(failed("fcntl"))?;
        let access = flags & OFlags::ACCMODE;
        let needed = if direct { direct_block(&file, block) } else { Err(None) };
        let (flags, direct, unit) = match needed {
            Ok(needed) => (flags | OFlags::DIRECT, true, needed),
            Err(why) => {
                notes.extend(why.map(Note::Buffered));
                (flags - OFlags::DIRECT, false, 1)
            }
        };
        // F_SETFL changes O_DIRECT on an open file; EINVAL means that it is not supported.
        let (direct, block) = match rustix::fs::fcntl_setfl(&file, flags) {
            Ok(()) => (direct, unit),
            Err(errno) if direct => {
                notes.push(Note::Buffered(BufferedReason::Refused(errno)));
                (false, 1)
            }
            Err(errno) => return Err(failed("fcntl")(errno)),
        };
        let mut target = Self { file, path, direct, block, is_device, access, end: 0 };
        target.end = target.len()?;
        Ok(target)
    }

    pub(super) fn failed(&self, call: &'static str, errno: Errno) -> FileError {
        FileError::System { call, path: self.path.clone(), errno }
    }

    /// # Errors
    /// [`FileError::NotOpenFor`].
    pub(super) fn check_access(&self, op: Op) -> Result<(), FileError> {
        let lacks = match op {
            Op::Read => OFlags::WRONLY,
            Op::Write => OFlags::RDONLY,
        };
        if self.access == lacks {
            return Err(FileError::NotOpenFor { op, path: self.path.clone() });
        }
        Ok(())
    }

    pub(super) fn len(&self) -> Result<u64, FileError> {
        let end = retry_on_intr(|| rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0)));
        end.map_err(|errno| self.failed("lseek", errno))
    }

    pub(super) fn set_len(&mut self, len: u64) -> Result<(), FileError> {
        self.check_access(Op::Write)?;
        retry_on_intr(|| rustix::fs::ftruncate(&self.file, len))
            .map_err(|errno| self.failed("ftruncate", errno))?;
        self.end = len;
        Ok(())
    }

    /// Returns the number of bytes to transfer for `len`: whole blocks with O_DIRECT.
    pub(super) fn padded(&self, op: Op, offset: u64, len: usize) -> Result<usize, FileError> {
        let end = offset.checked_add(len as u64).filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or(FileError::Beyond { offset, len })?;
        let misaligned = || {
            let (path, block) = (self.path.clone(), self.block);
            FileError::Misaligned { op, path, offset, len, block }
        };
        if !offset.is_multiple_of(u64::from(self.block)) {
            return Err(misaligned());
        }
        let padded = len.checked_next_multiple_of(self.block as usize).ok_or_else(misaligned)?;
        // Padding may only be written behind the end of a file that can be truncated.
        if op == Op::Write && padded != len && (self.is_device || end < self.end) {
            return Err(misaligned());
        }
        Ok(padded)
    }

    pub(super) fn extend_to(&mut self, end: u64) {
        self.end = self.end.max(end);
    }
}

/// Returns the block of O_DIRECT on a file or block device, of which offsets and lengths must be
/// multiples: what the kernel reports (`STATX_DIOALIGN`, Linux 6.1), before that the logical block
/// of a device (`BLKSSZGET`), and a page for a file, which suffices for every file system. `None`
/// if it does not support O_DIRECT.
pub fn direct_alignment(file: &File) -> Option<u32> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, DIOALIGN).ok();
    let said = stat.filter(|stat| stat.stx_mask & DIOALIGN.bits() != 0);
    match said {
        Some(stat) if stat.stx_dio_offset_align == 0 => None,
        Some(stat) => Some(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)),
        // For anything but a block device, the call fails.
        None => Some(rustix::fs::ioctl_blksszget(file).unwrap_or(UNKNOWN_BLOCK)),
    }
}

/// Returns the block of O_DIRECT, if it divides the caller's.
fn direct_block(file: &File, asked: u32) -> Result<u32, Option<BufferedReason>> {
    let needed = direct_alignment(file).ok_or(Some(BufferedReason::Refused(Errno::INVAL)))?;
    if asked.is_multiple_of(needed) {
        Ok(needed)
    } else {
        Err(Some(BufferedReason::Block { requested: asked, needed }))
    }
}

pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
