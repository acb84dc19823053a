//! Why no arena was built, and why it gave no memory.

use super::source::{NotLocked, SourceRefused};
use crate::sys::Errno;
use pinfold_core::domain::BackendError;
use pinfold_core::frame::FrameError;

/// Why no arena was built. Nothing is left behind: no memory, no range of IOVAs.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No size, or 0.
    #[error("an arena of 0 bytes: say how large it is to be with size(bytes)")]
    NoSize,
    /// More than an arena can have.
    #[error("an arena of {asked} bytes: the largest has {limit} bytes")]
    TooLarge {
        /// How many bytes were asked for.
        asked: u64,
        /// How many an arena can have.
        limit: u64,
    },
    /// A preference list with nothing in it, or with [`Source::Caller`](super::Source::Caller), which is not had by name.
    #[error(
        "no memory source to try: name at least one, and give the caller's own memory by caller(base, len)"
    )]
    NoSourceNamed,
    /// None of the sources gave memory.
    #[error("no memory for {asked} bytes: {}", list(.refused))]
    NoMemory {
        /// How many bytes were asked for.
        asked: u64,
        /// Each source that was tried.
        refused: Vec<SourceRefused>,
    },
    /// The NUMA node does not exist, has no memory, or is closed to this process.
    #[error("memory of NUMA node {node} can not be had ({errno}); online: {online}")]
    Node {
        /// The node that was asked for.
        node: u32,
        /// The nodes that there are, as the kernel lists them.
        online: String,
        /// What `mbind` said.
        errno: Errno,
    },
    /// The memory can not be locked, and the caller required it.
    #[error("the memory can not be locked: {0}")]
    NotLocked(NotLocked),
    /// The pages could not be kept from child processes, so a `fork` would move them from under the device.
    #[error("madvise(MADV_DONTFORK): {0}")]
    Fork(Errno),
    /// The caller's memory does not begin and end at multiples of 4096.
    #[error("the caller's memory of {len} bytes at {base:#x}: both must be multiples of 4096")]
    CallerAlignment {
        /// Where it begins.
        base: usize,
        /// How many bytes it has.
        len: usize,
    },
    /// The account of the frames could not be set up.
    #[error(transparent)]
    Frames(#[from] FrameError),
    /// The domain refused.
    #[error("the domain refused the arena's memory: {0}")]
    Domain(#[from] BackendError),
}

fn list(refused: &[SourceRefused]) -> String {
    refused.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Why an arena gave no memory. Nothing has changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// A buffer of nothing.
    #[error("a buffer of 0 bytes: a buffer has at least 1")]
    Empty,
    /// More than the arena has in all.
    #[error("a buffer of {asked} bytes from an arena of {arena} bytes")]
    TooLarge {
        /// How many bytes were asked for.
        asked: u64,
        /// How many the arena has.
        arena: u64,
    },
    /// The arena has no free run that long.
    #[error(
        "no {asked} bytes in one run: {in_use} of the arena's {arena} bytes are in use; free some, or build it larger"
    )]
    Exhausted {
        /// How many bytes were asked for.
        asked: u64,
        /// How many are in use.
        in_use: u64,
        /// How many the arena has.
        arena: u64,
    },
    /// The account of the frames refused for another reason.
    #[error(transparent)]
    Frames(#[from] FrameError),
}

/// Why no slice was lent: the arena is exposed whole, or others have it by its memfd, and the bytes may be written at
/// any time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "this buffer may be written at any time (its arena is exposed whole, or shared by a memfd): copy through memory(), or build the arena with MappingPolicy::PerUse and no memfd"
)]
pub struct Shared;
