//! What can go wrong with a file, and what to do about it.

use rustix::io::Errno;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Which way the data goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// From the file.
    Read,
    /// To the file.
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

/// Why something could not be done with a file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A system call failed that is no transfer.
    #[error("{}: {call}: {errno}{}", path.display(), advice(*errno))]
    System {
        /// Which one.
        call: &'static str,
        /// Which file.
        path: Arc<Path>,
        /// What the system said.
        errno: Errno,
    },
    /// A transfer failed.
    #[error("{}: {op} of {len} bytes at {offset}: {errno}{}", path.display(), advice(*errno))]
    Transfer {
        /// Which way.
        op: Op,
        /// Which file.
        path: Arc<Path>,
        /// Where in the file.
        offset: u64,
        /// How many bytes were to go.
        len: usize,
        /// How many did.
        done: usize,
        /// What the system said.
        errno: Errno,
    },
    /// A read met the end of the file too early, or a write made no progress.
    #[error(
        "{}: {op} of {len} bytes at {offset} ended after {done}{}", path.display(),
        match op { Op::Read => ": the file ends there (has it been cut meanwhile?)", Op::Write => "" }
    )]
    Short {
        /// Which way.
        op: Op,
        /// Which file.
        path: Arc<Path>,
        /// Where in the file.
        offset: u64,
        /// How many bytes were to go.
        len: usize,
        /// How many did.
        done: usize,
    },
    /// The queue's depth is impossible.
    #[error("a depth of {asked}: 1 to {limit} are possible")]
    Depth {
        /// What was asked for.
        asked: u32,
        /// The deepest.
        limit: u32,
    },
    /// The queue's block is impossible.
    #[error("blocks of {asked} bytes: a power of two is needed")]
    Block {
        /// What was asked for.
        asked: u32,
    },
    /// Every place of the queue is taken.
    #[error("all {depth} places of the queue are taken: wait for a completion")]
    Full {
        /// How many there are.
        depth: u32,
    },
    /// The buffer is too small, or nothing is to go.
    #[error(
        "a transfer of {len} bytes ({padded} in whole blocks) with a buffer of {size}: 1 to {size} are possible"
    )]
    Room {
        /// How many bytes were to go.
        len: usize,
        /// The same in whole blocks of the file, where O_DIRECT asks for them.
        padded: usize,
        /// How many bytes the buffer has.
        size: usize,
    },
    /// The place in the file, or in memory, is none that O_DIRECT takes.
    #[error(
        "{}: {op} of {len} bytes at {offset}: O_DIRECT takes multiples of {block}; use such a block size, or no O_DIRECT",
        path.display()
    )]
    Misaligned {
        /// Which way.
        op: Op,
        /// Which file.
        path: Arc<Path>,
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        len: usize,
        /// Of what they must be multiples.
        block: u32,
    },
    /// The transfer would end beyond what a file can have.
    #[error("a transfer of {len} bytes at {offset} ends beyond the largest file offset")]
    Beyond {
        /// Where in the file.
        offset: u64,
        /// How many bytes.
        len: usize,
    },
    /// The queue must be idle for this.
    #[error("{in_flight} transfers are under way: wait for them first")]
    Busy {
        /// How many.
        in_flight: usize,
    },
    /// A queue that was made to stay with one thread is used by another.
    #[error("the queue stays with the thread that made it (`one_thread`): use it there")]
    OtherThread,
    /// The ring itself failed.
    #[error("io_uring_enter: {errno}")]
    Ring {
        /// What the system said.
        errno: Errno,
    },
}

/// What to do about it, to be put behind the error.
fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::NOSPC => ": the disk is full; free some space or choose another place",
        Errno::DQUOT => ": the disk quota is used up; free some space or choose another place",
        Errno::IO => ": the device failed; `dmesg` says more",
        Errno::INVAL => {
            ": the file can not be used so; if it is none on a disk (/proc, /sys), copy it to one first"
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
