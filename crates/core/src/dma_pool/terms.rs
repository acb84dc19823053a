//! What owners and the depot exchange: the [`Terms`] for keeping rows, and an owner's counts.

/// The fewest and the most sparse and whole rows that an owner may have.
pub(super) const KEEP: (u32, u32) = (8, 32);
/// A row is sparse from this many eighths of free blocks on: in a pool with one `Local`, in one with more, and in one with
/// more that is at its maximum, where it is any row with a free block.
pub(super) const SPARSE: (u32, u32, u32) = (7, 4, 0);
/// The most spent rows of an owner: other owners free blocks in them, which it does not notice at once.
const SPENT: usize = 128;

/// In the word that holds the terms: set once there have been two `Local`s at a time.
pub(super) const SHARED: u32 = 1 << 31;
/// Likewise: set once the pool has been at its maximum.
pub(super) const FULL: u32 = 1 << 30;

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

/// The terms as one word, and how many remote frees were announced, modulo 2^32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct News {
    pub(super) terms: u32,
    pub(super) notices: u32,
}

impl News {
    /// Differs from all of a depot.
    pub(super) const NONE: Self = Self { terms: 0, notices: 0 };

    /// Returns the terms.
    pub(super) fn terms(self) -> Terms {
        let word = self.terms;
        let sparse_eighths = match (word & SHARED != 0, word & FULL != 0) {
            (false, _) => SPARSE.0,
            (true, false) => SPARSE.1,
            (true, true) => SPARSE.2,
        };
        Terms { keep: (word & !(SHARED | FULL)) as usize, sparse_eighths }
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
