//! What a pool tells about itself.

use core::fmt;

/// The first line of the kernel's report.
pub const REPORT_HEADER: &str = "poolinfo - 0.1";

/// The first line of the wider table ([`PoolStats::wide`]): name, bytes of a block, blocks in use, the most there were,
/// blocks in all, free ones in magazines, rows and the depot, chunks, free chunks, bytes of all chunks, second frees
/// found late, damaged blocks.
pub const WIDE_HEADER: &str = concat!(
    "pool             block_size     in_use high_water     blocks ",
    "magazines      rows     depot  chunks   free ",
    "       bytes late damaged",
);

/// The account of a pool at one time. While others allocate and free, the numbers may be of slightly different times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolStats {
    /// What the pool is called.
    pub name: alloc::string::String,
    /// How many bytes a block has.
    pub block_bytes: u64,
    /// Blocks that are handed out.
    pub in_use: u64,
    /// The most blocks that were handed out at a time. Owners tell of their part when they meet the depot (at the
    /// latest when they are dropped), so a peak of this moment may be told later.
    pub high_water: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks in owners' magazines.
    pub in_magazines: u64,
    /// Free blocks in rows that owners keep.
    pub in_rows: u64,
    /// Free blocks in the depot, where every owner finds them.
    pub in_depot: u64,
    /// Chunks of frames.
    pub chunks: u64,
    /// Chunks of which no block is in use, in a magazine or kept by an owner: what [`shrink`](super::DmaPool::shrink)
    /// gives back.
    pub free_chunks: u64,
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Second frees that coincided with the first one, so that both returned `Ok`; they were found later and freed
    /// nothing. More than 0 is a fault in the program.
    pub late_double_frees: u64,
    /// Free blocks that debug mode found written to (see [`Damage`](super::Damage)); 0 without debug mode.
    pub damaged: u64,
}

impl PoolStats {
    /// The pool's line of the kernel's report (without a line end): `%-16s %4zu %4zu %4u %2zu` of name, blocks in
    /// use, blocks in all, block size, chunks.
    pub fn kernel_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, in_use, blocks, block_bytes, chunks, .. } = self;
            write!(f, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}")
        })
    }

    /// The pool's line of the wider table (without a line end), under [`WIDE_HEADER`].
    pub fn wide_line(&self) -> impl fmt::Display {
        fmt::from_fn(|f| {
            let Self { name, block_bytes, in_use, high_water, blocks, in_magazines, in_rows, .. } = self;
            let Self { in_depot, chunks, free_chunks, bytes, late_double_frees, damaged, .. } = self;
            write!(f, "{name:<16} {block_bytes:>10} {in_use:>10} {high_water:>10} {blocks:>10} ")?;
            write!(f, "{in_magazines:>9} {in_rows:>9} {in_depot:>9} {chunks:>7} {free_chunks:>6} ")?;
            write!(f, "{bytes:>12} {late_double_frees:>4} {damaged:>7}")
        })
    }

    /// The wider table of one pool: [`WIDE_HEADER`], then the pool's line.
    pub fn wide(&self) -> impl fmt::Display {
        fmt::from_fn(|f| writeln!(f, "{WIDE_HEADER}\n{}", self.wide_line()))
    }
}

/// A pool's report in the kernel's format to the letter: [`REPORT_HEADER`], then the pool's line.
impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{REPORT_HEADER}\n{}", self.kernel_line())
    }
}
