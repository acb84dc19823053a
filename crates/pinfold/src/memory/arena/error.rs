//! Errors and reports of an arena.

use crate::memory::claim::InUse;
use crate::memory::source::{NotLocked, Residency, Source, SourceUnavailable};
use crate::sys::Errno;
use crate::sys::trial::Inaccessible;
use pinfold_core::addr::PageSize;
use pinfold_core::counters;
use pinfold_core::counters::Counters;
use pinfold_core::domain::BackendError;
use pinfold_core::frame::FrameError;
use std::fmt;

/// Why no arena was built. No memory and no address range is left behind.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The size is missing, or 0.
    #[error("an arena of 0 bytes: set its size with size(bytes)")]
    NoSize,
    /// The size is larger than an arena can be.
    #[error("an arena of {requested} bytes: at most {limit} are possible")]
    TooLarge {
        /// The requested size.
        requested: u64,
        /// The largest size.
        limit: u64,
    },
    /// The list of sources is empty, or names [`Source::Caller`], which
    /// needs an address.
    #[error(
        "no memory source to try: name at least one, or give the caller's own memory with caller(base, len)"
    )]
    NoSourceNamed,
    /// All sources were unavailable.
    #[error("no memory for {requested} bytes: {}", list(.unavailable))]
    NoMemory {
        /// The requested size.
        requested: u64,
        /// Each source that was tried.
        unavailable: Vec<SourceUnavailable>,
    },
    /// The NUMA node does not exist, has no memory, or is not allowed for this process.
    #[error("no memory from NUMA node {node} ({errno}); online: {online}")]
    Node {
        /// The requested node.
        node: u32,
        /// The existing nodes, as the kernel lists them.
        online: String,
        /// The error of `mbind`.
        errno: Errno,
    },
    /// The memory cannot be locked, and [`Pinning::Required`](super::Pinning::Required) was set.
    #[error("cannot lock the memory: {0}")]
    NotLocked(NotLocked),
    /// The pages cannot be kept from child processes, so a `fork` could move the parent to other
    /// pages than the device's.
    #[error("madvise(MADV_DONTFORK): {0}")]
    Fork(Errno),
    /// The caller's memory does not begin and end at multiples of 4096.
    #[error("the caller's memory of {len} bytes at {base:#x}: both must be multiples of 4096")]
    CallerAlignment {
        /// Its address.
        base: usize,
        /// Its length in bytes.
        len: usize,
    },
    /// The caller's memory cannot be read and written: it is not mapped, has no such rights, lies
    /// beyond the end of its file, or has no page left to use.
    #[error(transparent)]
    Inaccessible(#[from] Inaccessible),
    /// The memory is another arena's, or in use otherwise, in this domain or in another. Of the
    /// arena's own sources: the memory was unmapped while it was in use.
    #[error(transparent)]
    InUse(#[from] InUse),
    /// The zone of its frames could not be set up.
    #[error(transparent)]
    Frames(#[from] FrameError),
    /// The memory could not be mapped into the domain.
    #[error("cannot map the arena into its domain: {0}")]
    Domain(#[from] BackendError),
}

fn list(unavailable: &[SourceUnavailable]) -> String {
    unavailable.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Why a buffer lends no slice: its arena is mapped whole, or shared with other processes by its
/// memfd, so the bytes may change at any time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the bytes of this buffer may change at any time (its arena is mapped whole, or shared by a memfd): copy through memory(), or build the arena with MappingPolicy::PerUse and no memfd"
)]
pub struct NotExclusive;

// Reports of an arena: its source, its pages, how much of it is in use.

/// The size requested of an arena, the memory it got, and the sources that were unavailable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaReport {
    /// The requested size in bytes.
    pub requested_bytes: u64,
    /// The size in bytes: rounded up as [`ArenaBuilder::size`](super::ArenaBuilder::size) says.
    pub bytes: u64,
    /// The source of its memory.
    pub source: Source,
    /// The page size of the source. With transparent hugepages: of the first page; a
    /// [`Survey`](crate::folios::Survey) reports all.
    pub page_size: PageSize,
    /// The NUMA node that its pages are bound to.
    pub numa_node: Option<u32>,
    /// The means that keeps its pages in memory.
    pub residency: Residency,
    /// The sources that were tried before.
    pub unavailable: Vec<SourceUnavailable>,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, source, page_size, residency, .. } = self;
        write!(f, "{bytes} bytes from {source} (pages of {page_size}), {residency}")?;
        if let Some(node) = self.numa_node {
            write!(f, ", on NUMA node {node}")?;
        }
        self.unavailable
            .iter()
            .try_for_each(|unavailable| write!(f, "; unavailable: {unavailable}"))
    }
}

counters! {
    /// The use of an arena. It prints as a table.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct ArenaStats {
        /// The size.
        bytes: Level Bytes "bytes",
        /// Bytes that the kernel keeps in memory once touched: all of them, or 0.
        pinned_bytes: Level Bytes "  pinned",
        /// The size in frames of 4096 bytes.
        frames: Level Count "frames",
        /// Allocated frames, quarantined ones included. Exact while no call is being made.
        frames_in_use: Level Count "  in use",
        /// The most frames that were allocated at once, as far as owners' handles had reported it by
        /// then.
        frames_peak: Peak Count "  peak",
        /// Frames that a device may still reach: they are never allocated again.
        frames_quarantined: Total Count "  quarantined",
    }
}

impl fmt::Display for ArenaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_rows(f)
    }
}
