//! Errors of files, and how to fix them.

use rustix::io::Errno;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// An operation on a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// A transfer from the file.
    Read,
    /// A transfer to the file.
    Write,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// Why an operation on a file failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A system call other than a transfer failed.
    #[error("{}: {call}: {errno}{}", path.display(), advice(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// The file.
        path: Arc<Path>,
        /// The error.
        errno: Errno,
    },
    /// A transfer failed.
    #[error("{}: {op} of {len} bytes at {offset}: {errno}{}", path.display(), transfer_advice(*op, *errno))]
    Transfer {
        /// The operation.
        op: Op,
        /// The file.
        path: Arc<Path>,
        /// The offset in the file.
        offset: u64,
        /// The number of bytes to transfer.
        len: usize,
        /// The number of bytes that were transferred.
        done: usize,
        /// The error.
        errno: Errno,
    },
    /// A read reached the end of the file early, or a write made no progress.
    #[error(
        "{}: {op} of {len} bytes at {offset} ended after {done}{}", path.display(),
        match op { Op::Read => ": the file ends there (was it truncated during the transfer?)", Op::Write => "" }
    )]
    Short {
        /// The operation.
        op: Op,
        /// The file.
        path: Arc<Path>,
        /// The offset in the file.
        offset: u64,
        /// The number of bytes to transfer.
        len: usize,
        /// The number of bytes that were transferred.
        done: usize,
    },
    /// The queue depth is out of range.
    #[error("a queue depth of {requested}: 1 to {limit} are possible")]
    Depth {
        /// The requested value.
        requested: u32,
        /// The largest depth.
        limit: u32,
    },
    /// The block is not a power of two.
    #[error("blocks of {requested} bytes: must be a power of two")]
    Block {
        /// The requested value.
        requested: u32,
    },
    /// The queue is full.
    #[error("the queue is full ({depth} transfers): wait for a completion")]
    Full {
        /// The queue depth.
        depth: u32,
    },
    /// The file was opened for the other direction.
    #[error(
        "{}: {op} is impossible: the file was not opened for it; open it with `OpenOptions::{op}(true)`", path.display()
    )]
    NotOpenFor {
        /// The operation.
        op: Op,
        /// The file.
        path: Arc<Path>,
    },
    /// The buffer is too small, or the transfer is empty.
    #[error(
        "a transfer of {len} bytes ({padded} in whole blocks) with a buffer of {size}: 1 to {size} are possible"
    )]
    Room {
        /// The number of bytes to transfer.
        len: usize,
        /// The same in whole blocks of the file, with O_DIRECT.
        padded: usize,
        /// The length of the buffer in bytes.
        size: usize,
    },
    /// O_DIRECT does not support this offset or length.
    #[error(
        "{}: {op} of {len} bytes at {offset}: O_DIRECT needs multiples of {block}; use such a block size, or no O_DIRECT",
        path.display()
    )]
    Misaligned {
        /// The operation.
        op: Op,
        /// The file.
        path: Arc<Path>,
        /// The offset in the file.
        offset: u64,
        /// The length in bytes.
        len: usize,
        /// The block size of which both must be multiples.
        block: u32,
    },
    /// The transfer would end beyond the largest file offset.
    #[error("a transfer of {len} bytes at {offset} ends beyond the largest file offset")]
    Beyond {
        /// The offset in the file.
        offset: u64,
        /// The length in bytes.
        len: usize,
    },
    /// The queue must be idle for this.
    #[error("{in_flight} transfers are in flight: wait for them first")]
    Busy {
        /// Their number.
        in_flight: usize,
    },
    /// A queue that is bound to one thread is used by another.
    #[error("the queue is bound to the thread that created it (`one_thread`): use it there")]
    OtherThread,
    /// The ring itself failed.
    #[error("io_uring_enter: {errno}{}", match self.is_shortage() {
        true => ": the kernel has no memory for more requests (a limit of the control group, or of the machine); free \
                 some, or submit fewer at a time",
        false => "",
    })]
    Ring {
        /// The error.
        errno: Errno,
    },
}

impl FileError {
    /// Returns whether the kernel had no room for requests at the moment: transfers that it did not
    /// accept stay queued, and can be submitted again.
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Ring { errno: Errno::AGAIN | Errno::BUSY })
    }
}

/// Advice that is appended to the error of a transfer.
fn transfer_advice(op: Op, errno: Errno) -> &'static str {
    match (op, errno) {
        (_, Errno::INVAL) => {
            ": not possible at this place with this length; a device that ends within one of its sectors is used up to the \
             last whole one (`--size`), and a file that is not on a disk (/proc, /sys) is copied to one first"
        }
        (Op::Read, Errno::IO) => {
            ": the device failed; `dmesg` says more; what precedes this place can be copied with `--size`, what can be read \
             behind it with ddrescue"
        }
        (_, other) => advice(other),
    }
}

/// Advice that is appended to the error.
fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::NOSPC => ": the disk is full; free some space or choose another place",
        Errno::DQUOT => ": the disk quota is used up; free some space or choose another place",
        Errno::IO => ": the device failed; `dmesg` says more",
        Errno::INVAL => {
            ": the file cannot be used like this; if it is not on a disk (/proc, /sys), copy it to one first"
        }
        Errno::FBIG => ": larger than a file may be here (`ulimit -f`, or the file system's limit)",
        Errno::ROFS => ": the file system is read-only; choose another place",
        Errno::ACCESS | Errno::PERM => ": not permitted; check the owner and mode of the file",
        Errno::NOENT => ": no such file or folder; check the path",
        Errno::EXIST => ": it exists already",
        Errno::ISDIR => ": it is a folder; name a file in it",
        Errno::MFILE | Errno::NFILE => ": too many open files (`ulimit -n`)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_what_to_do() {
        let transfer = |op, errno| {
            let path = Path::new("/dev/x").into();
            FileError::Transfer { op, path, offset: 4096, len: 512, done: 0, errno }.to_string()
        };
        for op in [Op::Read, Op::Write] {
            let text = transfer(op, Errno::INVAL);
            assert!(text.contains("last whole one (`--size`)"), "{text}");
            assert!(!text.contains("opened") && text.contains("/proc"), "{text}");
            assert!(transfer(op, Errno::IO).contains("dmesg"));
            assert_eq!(transfer(op, Errno::IO).contains("ddrescue"), op == Op::Read);
        }
        assert!(transfer(Op::Write, Errno::NOSPC).contains("free some space"));
    }
}
