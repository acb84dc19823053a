//! [`PoolStats`]: a pool's counters, and their text in the kernel's format and in a wider one.

use core::fmt;

/// The first line of the kernel's report.
pub const REPORT_HEADER: &str = "poolinfo - 0.1";

/// The first line of the wider table ([`PoolStats::wide`]): name, bytes of a block, blocks in use,
/// the most outside the depot, all blocks, free ones of owners and of the depot, chunks, chunks
/// without a block in use, bytes of all chunks, damaged blocks.
pub const WIDE_HEADER: &str = concat!(
    "pool             block_size     in_use       peak     blocks ",
    "   cached     depot  chunks   free ",
    "       bytes damaged",
);

/// A pool's statistics. While other threads allocate and free, the numbers may be of slightly
/// different times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolStats {
    /// The pool's name.
    pub name: alloc::string::String,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Allocated blocks.
    pub in_use: u64,
    /// The most blocks that were in use or cached by owners at a time. Taken when an owner fetches
    /// blocks, so it is at least the most that were in use, and more by at most what owners cache.
    pub peak: u64,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks that owners cache, the pool's front among them.
    pub cached: u64,
    /// Free blocks in the depot, available to every owner.
    pub in_depot: u64,
    /// Chunks of frames.
    pub chunks: u64,
    /// Chunks of which no block is in use. [`shrink`](super::DmaPool::shrink) releases those of
    /// which no block is cached either, as far as the [minimum](super::Builder::minimum) allows.
    pub free_chunks: u64,
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Free blocks that debug mode found overwritten (see [`Damage`](super::Damage)); 0 without
    /// debug mode.
    pub damaged: u64,
}

impl PoolStats {
    /// Returns the pool's line of the kernel's report, without a line end:
    /// `%-16s %4zu %4zu %4u %2zu` of name, blocks in use, all blocks, block size, chunks.
    pub fn kernel_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, in_use, blocks, block_bytes, chunks, .. } = self;
            write!(f, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}")
        })
    }

    /// Returns the pool's line of the wider table, without a line end, under [`WIDE_HEADER`].
    pub fn wide_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, block_bytes, in_use, peak, blocks, cached, .. } = self;
            let Self { in_depot, chunks, free_chunks, bytes, damaged, .. } = self;
            write!(f, "{name:<16} {block_bytes:>10} {in_use:>10} {peak:>10} {blocks:>10} ")?;
            write!(
                f,
                "{cached:>9} {in_depot:>9} {chunks:>7} {free_chunks:>6} {bytes:>12} {damaged:>7}"
            )
        })
    }

    /// Returns the wider table of one pool: [`WIDE_HEADER`], then the pool's line.
    pub fn wide(&self) -> impl fmt::Display {
        fmt::from_fn(|f| writeln!(f, "{WIDE_HEADER}\n{}", self.wide_line()))
    }
}

/// The kernel's report, byte for byte: [`REPORT_HEADER`], then the pool's line.
impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{REPORT_HEADER}\n{}", self.kernel_line())
    }
}
