//! Random blocks, distributed as the user asked.

use crate::args::Distribution;
use crate::random::Random;

/// Draws blocks of a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    distribution: Distribution,
    blocks: u64,
}

/// The most attempts to draw a block that is in the region.
const TRIES: usize = 100;

impl Blocks {
    /// Creates the distribution over `blocks` blocks.
    pub(super) fn new(distribution: Distribution, blocks: u64) -> Self {
        Self { distribution, blocks }
    }

    /// Returns a block.
    pub(super) fn next(&self, random: &mut Random) -> u64 {
        let drawn = match self.distribution {
            Distribution::Random => return random.below(self.blocks),
            Distribution::Zipf(theta) => scattered(self.zipf(theta, random), self.blocks),
            // As fio has it: for h = 0.2 a share of 0.2 of the requests goes to 0.8 of the blocks.
            Distribution::Pareto(h) => {
                let exponent = h.ln() / (1.0 - h).ln();
                scattered(
                    whole((self.blocks.saturating_sub(1)) as f64 * unit(random).powf(exponent)),
                    self.blocks,
                )
            }
            Distribution::Normal(percent) => self.normal(percent, random),
        };
        drawn.min(self.blocks.saturating_sub(1))
    }

    /// Draws a rank, from 0, by rejection-inversion (W. Hörmann, G. Derflinger, 1996): in constant
    /// time and memory.
    fn zipf(&self, theta: f64, random: &mut Random) -> u64 {
        let power = 1.0 - theta;
        // The integral of x^-theta, and its inverse.
        let integral = |x: f64| x.powf(power) / power;
        let inverse = |y: f64| (y * power).powf(1.0 / power);
        let (low, high) = (integral(1.5) - 1.0, integral(self.blocks as f64 + 0.5));
        for _ in 0..TRIES {
            let y = low + unit(random) * (high - low);
            let x = inverse(y);
            let rank = x.round().clamp(1.0, self.blocks as f64);
            if y >= integral(rank + 0.5) - rank.powf(-theta) {
                return whole(rank) - 1;
            }
        }
        0
    }

    /// Draws around the middle (G. Box, M. Muller, 1958).
    fn normal(&self, percent: f64, random: &mut Random) -> u64 {
        let (middle, deviation) = (self.blocks as f64 / 2.0, self.blocks as f64 * percent / 100.0);
        for _ in 0..TRIES {
            let radius = (-2.0 * (1.0 - unit(random)).ln()).sqrt();
            let at = middle + deviation * radius * (std::f64::consts::TAU * unit(random)).cos();
            if at >= 0.0 && at < self.blocks as f64 {
                return whole(at);
            }
        }
        self.blocks / 2
    }
}

/// Returns a number from 0 to below 1.
fn unit(random: &mut Random) -> f64 {
    random.below(1 << 53) as f64 / (1u64 << 53) as f64
}

/// Spreads ranks over the region, so that the most frequent blocks are not neighbours.
fn scattered(rank: u64, blocks: u64) -> u64 {
    let hash = rank.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // The upper half of the product is less than `blocks`.
    u64::try_from((u128::from(hash) * u128::from(blocks)) >> 64).unwrap_or(0)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative; `as` saturates"
)]
fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 1000;
    const DRAWS: u32 = 100_000;

    /// Returns how often each block was drawn, the most frequent first.
    fn counts(distribution: Distribution) -> Vec<u32> {
        let (blocks, mut random) = (Blocks::new(distribution, BLOCKS), Random::new(1));
        let mut counts = vec![0; usize::try_from(BLOCKS).unwrap()];
        for _ in 0..DRAWS {
            counts[usize::try_from(blocks.next(&mut random)).unwrap()] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts
    }

    fn share(counts: &[u32], of: usize) -> f64 {
        f64::from(counts[..of].iter().sum::<u32>()) / f64::from(DRAWS)
    }

    #[test]
    fn hot_blocks_get_the_share_that_the_distribution_says() {
        // The first of 1000 ranks has 1 / H(1000; 1.2), about a quarter.
        let zipf = counts(Distribution::Zipf(1.2));
        assert!((0.20..0.30).contains(&share(&zipf, 1)), "{}", share(&zipf, 1));
        let flat = counts(Distribution::Zipf(0.01));
        assert!(share(&flat, 1) < 0.02, "{}", share(&flat, 1));
        // h = 0.2: 0.8 of the requests go to 0.2 of the blocks.
        let pareto = counts(Distribution::Pareto(0.2));
        assert!((0.75..0.9).contains(&share(&pareto, 200)), "{}", share(&pareto, 200));
        // Two thirds are within one standard deviation.
        let normal = counts(Distribution::Normal(10.0));
        assert!((0.64..0.72).contains(&share(&normal, 200)), "{}", share(&normal, 200));
        assert!(counts(Distribution::Random)[0] < 200);
    }

    #[test]
    fn a_region_of_one_block_has_that_block() {
        for distribution in [
            Distribution::Random,
            Distribution::Zipf(1.2),
            Distribution::Pareto(0.5),
            Distribution::Normal(100.0),
        ] {
            assert_eq!(Blocks::new(distribution, 1).next(&mut Random::new(3)), 0);
        }
    }
}
