//! The pseudo-random generator of the program.

/// Marsaglia's xorshift64*: fast, and the same sequence on every machine, so that two runs can be
/// compared.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Creates a generator whose sequence depends on `seed` alone.
    pub(crate) fn new(seed: u64) -> Self {
        // A state of zero would stay zero.
        Self(seed ^ 0x2545_f491_4f6c_dd1d | 1)
    }

    /// Returns the next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number less than `limit`; 0 if `limit` is 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        let product = u128::from(self.next()) * u128::from(limit);
        // The upper half of a product of two 64-bit numbers is less than each of them.
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// Fills `bytes` with data that does not compress.
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.iter_mut().zip(word).for_each(|(byte, random)| *byte = random);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_below_the_limit_and_spread_evenly() {
        let mut random = Random::new(0);
        let mut seen = [0u32; 10];
        for _ in 0..100_000 {
            seen[usize::try_from(random.below(10)).unwrap()] += 1;
        }
        assert!(seen.iter().all(|&count| (9_500..10_500).contains(&count)), "{seen:?}");
        assert_eq!(random.below(0), 0);
    }
}
