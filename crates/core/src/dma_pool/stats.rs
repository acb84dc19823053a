//! [`PoolStats`]: a pool's counters, and their text in the kernel's format and in a wider one.

use core::fmt;

/// The first line of the kernel's report.
pub const REPORT_HEADER: &str = "poolinfo - 0.1";

/// The first line of the wider table ([`PoolStats::wide`]): name, bytes of a block, blocks in use, the most in use,
/// all blocks, free ones in magazines, rows and the depot, chunks, free chunks, bytes of all chunks, second frees found
/// late, damaged blocks.
pub const WIDE_HEADER: &str = concat!(
    "pool             block_size     in_use high_water     blocks ",
    "magazines      rows     depot  chunks   free ",
    "       bytes late damaged",
);

/// A pool's statistics. While other threads allocate and free, the numbers may be of slightly different times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolStats {
    /// The pool's name.
    pub name: alloc::string::String,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Allocated blocks.
    pub in_use: u64,
    /// The most blocks that were allocated at a time: exact for one owner, an estimate for several. Owners report their part when
    /// they use the depot, at the latest when they are dropped, so a recent peak may be missing, and one of an earlier time may
    /// be added to what others use now. Never more than the pool had. A [late second free](Self::late_double_frees) counts as a
    /// free until it is found: a peak of that time is too low by one for each.
    pub high_water: u64,
    /// All blocks.
    pub blocks: u64,
    /// Free blocks in owners' magazines and stashes, those of the pool's own owner included.
    pub in_magazines: u64,
    /// Free blocks in other rows of owners, those of the pool's own owner included.
    pub in_rows: u64,
    /// Free blocks in the depot, available to every owner.
    pub in_depot: u64,
    /// Chunks of frames.
    pub chunks: u64,
    /// Chunks of which no block is in use, in a magazine or in a row of an owner. [`shrink`](super::DmaPool::shrink) releases
    /// them as far as the [minimum](super::Limits::minimum) allows, and besides those whose blocks are all free in the rows of
    /// the pool's own owner.
    pub free_chunks: u64,
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Second frees that coincided with the first, so that both returned `Ok`; they were found later and freed nothing. More
    /// than 0 is a bug in the program.
    pub late_double_frees: u64,
    /// Free blocks that debug mode found overwritten (see [`Damage`](super::Damage)); 0 without debug mode.
    pub damaged: u64,
}

impl PoolStats {
    /// Returns the pool's line of the kernel's report, without a line end: `%-16s %4zu %4zu %4u %2zu` of name, blocks in use,
    /// all blocks, block size, chunks.
    pub fn kernel_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, in_use, blocks, block_bytes, chunks, .. } = self;
            write!(f, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}")
        })
    }

    /// Returns the pool's line of the wider table, without a line end, under [`WIDE_HEADER`].
    pub fn wide_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, block_bytes, in_use, high_water, blocks, in_magazines, in_rows, .. } = self;
            let Self { in_depot, chunks, free_chunks, bytes, late_double_frees, damaged, .. } = self;
            write!(f, "{name:<16} {block_bytes:>10} {in_use:>10} {high_water:>10} {blocks:>10} ")?;
            write!(f, "{in_magazines:>9} {in_rows:>9} {in_depot:>9} {chunks:>7} {free_chunks:>6} ")?;
            write!(f, "{bytes:>12} {late_double_frees:>4} {damaged:>7}")
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
