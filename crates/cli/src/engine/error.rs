//! Why an engine ended early.

use crate::signal::Interrupt;
use crate::targets::error::TargetError;
use crate::targets::target::Io;

/// Why an engine ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    /// A target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A source returned fewer bytes than it had at the start.
    #[error(
        "{name} ended at byte {at} although it had {expected} bytes at the start; either it was cut short while it was read: \
         copy it again when no program writes it; or its length is not that of its contents, as in /sys: read it into another \
         file first (`cat`)"
    )]
    SourceEnded {
        /// The source's name.
        name: String,
        /// The first byte that was missing.
        at: u64,
        /// How many bytes were expected.
        expected: u64,
    },
    /// A target ended within a request that was inside of it at the start.
    #[error(
        "{target} ended at byte {at}, within the request of {len} bytes at {offset}: it was cut short during the run, or its \
         length is not that of its contents, as in /sys"
    )]
    Short {
        /// The target's name.
        target: String,
        /// The first byte that was missing.
        at: u64,
        /// The request's first byte.
        offset: u64,
        /// The request's length.
        len: usize,
    },
    /// `io --verify` read data that differs from what was written.
    #[error(
        "{target}: byte {at} differs from what was written there (block {}, written {writes} times): the device, or \
         the memory it was read into, is faulty", at / *block as u64
    )]
    Mismatch {
        /// The target's name.
        target: String,
        /// The first byte that differs.
        at: u64,
        /// The size of a block that is checked as one, bytes.
        block: usize,
        /// How often the block was written by this run.
        writes: u32,
    },
    /// A thread could not be started.
    #[error("no thread for job {job} of {jobs}: {error}, or use fewer with --numjobs")]
    NoThread {
        /// The job, from 1.
        job: usize,
        /// How many jobs were requested.
        jobs: usize,
        /// The system's error, and the limit that refused it.
        error: String,
    },
    /// All buffers are quarantined.
    #[error(
        "no buffer is left: all are quarantined, since the device may still reach them; check the device"
    )]
    NoBuffers,
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl EngineError {
    /// Why the flush at the end failed: after an interrupt it is not tried again.
    pub(crate) fn of_flush(error: TargetError, interrupt: &Interrupt) -> Self {
        if interrupt.is_raised() { Self::Interrupted } else { error.into() }
    }

    /// Of `target`, `io` transferred only `got` bytes.
    pub(crate) fn short(target: &str, io: &Io, got: usize) -> Self {
        let (offset, len) = (io.offset, io.len);
        Self::Short {
            target: target.to_owned(),
            at: offset.saturating_add(got as u64),
            offset,
            len,
        }
    }
}
