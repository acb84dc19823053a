//! What can go wrong while bytes are moved.

use crate::targets::TargetError;

/// Why the bytes were not all moved.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PumpError {
    /// A target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The source gave fewer bytes than it had at the start.
    #[error(
        "{name} ended at byte {at} although it had {expected} bytes at the start; it was cut short while it was read: \
         copy it again when nobody writes it"
    )]
    SourceEnded {
        /// The source's name.
        name: String,
        /// The first byte that was missing.
        at: u64,
        /// How many bytes there were.
        expected: u64,
    },
    /// `io --verify` read what is not there.
    #[error(
        "{target}: byte {at} is not what was written there (block {}, written {writes} times): the device, or the \
         memory it was read into, is wrong", at / *block as u64
    )]
    Wrong {
        /// The target's name.
        target: String,
        /// The first byte that differs.
        at: u64,
        /// The target's block, bytes.
        block: usize,
        /// How often the block was written by this run.
        writes: u32,
    },
    /// The system starts no more threads.
    #[error(
        "no thread for job {job} of {jobs}: {error}; ask for fewer with --numjobs, or raise the limit (`ulimit -u`, the \
         cgroup's pids.max)"
    )]
    NoThread {
        /// The job, from 1 on.
        job: usize,
        /// How many there were to be.
        jobs: usize,
        /// What the system said.
        error: std::io::Error,
    },
    /// All buffers are quarantined.
    #[error("no buffer is left to go on with: the device kept them all")]
    NoBuffers,
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}
