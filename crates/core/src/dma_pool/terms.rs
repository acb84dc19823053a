//! What owners and the depot tell each other.

/// The fewest and the most sparse and whole rows that an owner may keep.
pub(super) const KEEP: (u32, u32) = (8, 32);
/// From how many eighths of free blocks on a row is sparse: in a pool with one `Local`, and in one with more.
pub(super) const SPARSE: (u32, u32) = (7, 4);

/// What an owner may keep. See the depot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// How many sparse and whole rows.
    pub(super) keep: usize,
    /// From how many eighths of free blocks on a row is sparse. It changes once, for all rows of a pool.
    pub(super) sparse_eighths: u32,
}

impl Default for Terms {
    /// Those of a pool without rows.
    fn default() -> Self {
        Self { keep: KEEP.0 as usize, sparse_eighths: SPARSE.0 }
    }
}

/// What an owner tells the pool when it meets the depot.
#[derive(Default, Debug)]
pub(super) struct Tally {
    /// How many more blocks the owner has brought into use than out of it since it told last.
    pub(super) in_use: i64,
    /// The most that this was meanwhile.
    pub(super) peak: i64,
    /// How many second frees were found late.
    pub(super) late: u64,
}
