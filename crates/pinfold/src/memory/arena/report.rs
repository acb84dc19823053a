//! Reports of an arena: its source, its pages, how much of it is in use.

use crate::memory::source::{Residency, Source, SourceUnavailable};
use pinfold_core::addr::PageSize;
use std::fmt;

/// What was requested of an arena, what it got, and which sources were unavailable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaReport {
    /// The requested size in bytes.
    pub requested_bytes: u64,
    /// The size in bytes: rounded up as [`ArenaBuilder::size`](super::ArenaBuilder::size) says.
    pub bytes: u64,
    /// The source of its memory.
    pub source: Source,
    /// The page size of the source. With transparent hugepages: of the first page;
    /// [`ArenaMemory::backing`](super::ArenaMemory::backing) reports all.
    pub page_size: PageSize,
    /// The NUMA node that its pages are bound to.
    pub numa_node: Option<u32>,
    /// What keeps its pages in memory.
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

/// How much of an arena is in use. It prints as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaStats {
    /// The size in bytes.
    pub bytes: u64,
    /// The size in frames of 4096 bytes.
    pub frames: u64,
    /// Allocated frames, quarantined ones included.
    pub frames_in_use: u64,
    /// The most frames that were allocated at once.
    pub frames_peak: u64,
    /// Frames that a device may still reach: they are never allocated again.
    pub frames_quarantined: u64,
    /// Bytes that the kernel keeps in memory once touched: all of them, or 0.
    pub pinned_bytes: u64,
}

impl fmt::Display for ArenaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, frames, frames_in_use, frames_peak, frames_quarantined, pinned_bytes } =
            self;
        writeln!(f, "bytes              {bytes:>14}")?;
        writeln!(f, "bytes pinned       {pinned_bytes:>14}")?;
        writeln!(f, "frames             {frames:>14}")?;
        writeln!(f, "frames in use      {frames_in_use:>14}")?;
        writeln!(f, "frames at the peak {frames_peak:>14}")?;
        write!(f, "frames quarantined {frames_quarantined:>14}")
    }
}
