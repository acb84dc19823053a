//! Why an engine ended early.

use crate::targets::error::TargetError;

/// Why an engine ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    /// A target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A source returned fewer bytes than it had at the start.
    #[error(
        "{name} ended at byte {at} although it had {expected} bytes at the start; it was cut short while it was read: \
         copy it again when no program writes it"
    )]
    SourceEnded {
        /// The source's name.
        name: String,
        /// The first byte that was missing.
        at: u64,
        /// How many bytes were expected.
        expected: u64,
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
