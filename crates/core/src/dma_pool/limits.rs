//! [`Limits`]: the fewest and the most blocks of a pool.

/// How many blocks a pool has, allocated and free ones together. The default is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The pool always has at least this many blocks: they are acquired when the limits are set, and shrinking keeps them.
    pub minimum: u64,
    /// The pool acquires no chunk once it has this many blocks. Its last chunk may take it past that, by less than the blocks of
    /// the smallest chunk: one of 4 KiB, or of the least power of two of pages that a longer block fits in
    /// (1 GiB for one of more than 2 MiB).
    pub maximum: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { minimum: 0, maximum: u64::MAX }
    }
}
