//! Pseudo-random numbers.

/// A reproducible source of pseudo-random numbers for models and tests (xorshift64*, Marsaglia
/// 2003). Not for secrets.
///
/// ```
/// let mut random = pinfold_soft::Random::new(7);
/// assert!(random.below(10) < 10);
/// ```
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a source whose sequence is determined by `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a number below `end`, or 0 if `end` is 0. The distribution is uniform enough for an
    /// `end` below 2^40.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The low bits of the bare state are correlated.
        let bits = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16;
        if end == 0 { 0 } else { bits % end }
    }

    /// Returns an index below `end`.
    pub fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).unwrap_or(0)
    }

    /// Returns true once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns one of `from`, which must not be empty.
    ///
    /// # Panics
    /// If `from` is empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}
