//! What owners and the depot exchange: the [`Terms`] for keeping rows, and an owner's counts.

/// The fewest and the most sparse and whole rows that an owner may have.
pub(super) const KEEP: (u32, u32) = (8, 32);
/// A row is sparse from this many eighths of free blocks on: in a pool with one `Local`, in one with more, and in one with
/// more that is at its maximum, where it is any row with a free block.
pub(super) const SPARSE: (u32, u32, u32) = (7, 4, 0);
/// The most spent rows of an owner: other owners free blocks in them, which it does not notice at once.
const SPENT: usize = 128;

/// How many rows an owner may keep; see the `depot` module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// How many sparse and whole rows.
    pub(super) keep: usize,
    /// A row is sparse from this many eighths of free blocks on. Changes for all rows of a pool, and only to less.
    pub(super) sparse_eighths: u32,
}

impl Terms {
    /// How many spent rows an owner may keep.
    pub(super) fn spent(&self) -> usize {
        if self.sparse_eighths == SPARSE.2 { self.keep } else { SPENT }
    }
}

impl Default for Terms {
    /// For a pool without rows.
    fn default() -> Self {
        Self { keep: KEEP.0 as usize, sparse_eighths: SPARSE.0 }
    }
}

/// An owner's counts since it last used the depot.
#[derive(Default, Debug)]
pub(super) struct Tally {
    /// Blocks allocated less blocks freed.
    pub(super) in_use: i64,
    /// The maximum of `in_use`.
    pub(super) peak: i64,
    /// Second frees that were found late.
    pub(super) late: u64,
}
