//! Latencies: a histogram with logarithmic groups of 64 linear buckets, so that a percentile, the
//! middle of its bucket as in fio, is at most 1/128 (0.8 %) off, in 30 KiB, independent of what was
//! recorded.

use std::time::Duration;

/// The binary logarithm of the buckets in a group.
const BITS: u32 = 6;
const PER_GROUP: usize = 1 << BITS;
/// Values below 2^BITS share a group; each further bit has one.
const GROUPS: usize = 64 - BITS as usize + 1;

/// The percentiles that fio prints by default.
pub(crate) const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// A histogram of durations in nanoseconds.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    buckets: Box<[u64]>,
    count: u64,
    min: u64,
    max: u64,
    sum: u128,
    sum_of_squares: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; GROUPS * PER_GROUP].into_boxed_slice(),
            count: 0,
            min: u64::MAX,
            max: 0,
            sum: 0,
            sum_of_squares: 0.0,
        }
    }
}

/// Returns the bucket of `ns`.
fn bucket_of(ns: u64) -> usize {
    let top = (u64::BITS - ns.leading_zeros()).saturating_sub(1);
    let shift = top.saturating_sub(BITS);
    // Below 2 * PER_GROUP.
    let within = usize::try_from(ns >> shift).unwrap_or(usize::MAX);
    // From 2^(BITS+1) on, `within` is PER_GROUP..2*PER_GROUP: the group's own offset is one group
    // less.
    (shift as usize * PER_GROUP).saturating_add(within)
}

/// Returns the middle of `bucket`.
fn middle_of(bucket: usize) -> u64 {
    let highest = highest_in(bucket);
    let width = 1u64 << (bucket / PER_GROUP).saturating_sub(1);
    highest - (width - 1) / 2
}

/// Returns the greatest value of `bucket`.
fn highest_in(bucket: usize) -> u64 {
    let group = bucket / PER_GROUP;
    if group < 2 {
        return bucket as u64;
    }
    let shift = group - 1;
    let within = (bucket - shift * PER_GROUP) as u64;
    (within << shift) | ((1 << shift) - 1)
}

impl Histogram {
    /// Counts one duration. It saturates at 584 years.
    pub(crate) fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get_mut(bucket_of(ns)) {
            *bucket += 1;
        }
        self.count += 1;
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        self.sum += u128::from(ns);
        self.sum_of_squares += (ns as f64).powi(2);
    }

    /// Adds the counts of another histogram.
    pub(crate) fn add(&mut self, other: &Self) {
        for (bucket, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket += more;
        }
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.sum_of_squares += other.sum_of_squares;
    }

    /// Returns the minimum in ns; 0 if nothing was counted.
    pub(crate) fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// Returns the mean in ns; 0 if nothing was counted.
    pub(crate) fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// Returns the standard deviation in ns; 0 if fewer than two were counted.
    pub(crate) fn deviation(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let variance = self.sum_of_squares / self.count as f64 - self.mean().powi(2);
        variance.max(0.0).sqrt()
    }

    /// Returns the smallest figure that `percent` per cent do not exceed, ns, to within 1/128; 0 if
    /// nothing was counted.
    pub(crate) fn percentile(&self, percent: f64) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a rank; `as` saturates, and the clamp bounds it"
        )]
        #[expect(clippy::cast_sign_loss, reason = "percent and count are not negative")]
        let rank =
            ((percent / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_of(bucket).clamp(self.min, self.max);
            }
        }
        0
    }

    /// Returns the figures, with the given percentiles.
    pub(crate) fn summary(&self, percentiles: &[f64]) -> Latency {
        Latency {
            count: self.count,
            min_ns: self.min(),
            max_ns: self.max,
            mean_ns: self.mean(),
            deviation_ns: self.deviation(),
            median_ns: self.percentile(50.0),
            p99_ns: self.percentile(99.0),
            percentiles_ns: percentiles
                .iter()
                .map(|&percent| (percent, self.percentile(percent)))
                .collect(),
        }
    }
}

/// The figures of a histogram, in nanoseconds.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize)]
pub(crate) struct Latency {
    /// The number of values.
    pub(crate) count: u64,
    /// The minimum.
    pub(crate) min_ns: u64,
    /// The maximum.
    pub(crate) max_ns: u64,
    /// The mean.
    pub(crate) mean_ns: f64,
    /// The standard deviation.
    pub(crate) deviation_ns: f64,
    /// The 50th percentile.
    pub(crate) median_ns: u64,
    /// The 99th percentile.
    pub(crate) p99_ns: u64,
    /// The requested percentiles with their values.
    pub(crate) percentiles_ns: Vec<(f64, u64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous() {
        for bucket in 0..GROUPS * PER_GROUP {
            let highest = highest_in(bucket);
            assert_eq!(bucket_of(highest), bucket);
            assert_eq!(bucket_of(middle_of(bucket)), bucket);
            if highest < u64::MAX {
                assert_eq!(bucket_of(highest + 1), bucket + 1);
            }
        }
        assert_eq!(highest_in(GROUPS * PER_GROUP - 1), u64::MAX);
    }

    #[test]
    fn percentiles_are_ranks_within_a_128th() {
        let mut histogram = Histogram::default();
        for ns in 1..=100_000u64 {
            histogram.record(Duration::from_nanos(ns));
        }
        for percent in PERCENTILES {
            let exact = percent * 1000.0;
            let got = histogram.percentile(percent) as f64;
            assert!((got - exact).abs() <= exact / 128.0 + 1.0, "{percent}: {got} for {exact}");
        }
        let summary = histogram.summary(&PERCENTILES);
        assert_eq!((summary.min_ns, summary.max_ns, summary.count), (1, 100_000, 100_000));
        assert!((histogram.mean() - 50_000.5).abs() < 1e-6);
        assert!((histogram.deviation() - 28_867.5).abs() < 1.0);
    }

    #[test]
    fn a_sum_equals_one_histogram_of_both() {
        let (mut both, mut a, mut b) =
            (Histogram::default(), Histogram::default(), Histogram::default());
        for ns in 1..=1000u64 {
            let took = Duration::from_nanos(ns * ns);
            both.record(took);
            if ns % 3 == 0 { a.record(took) } else { b.record(took) }
        }
        a.add(&b);
        assert_eq!(a.summary(&PERCENTILES), both.summary(&PERCENTILES));
    }

    #[test]
    fn an_empty_histogram_and_one_value() {
        let mut histogram = Histogram::default();
        assert_eq!((histogram.min(), histogram.max, histogram.percentile(99.0)), (0, 0, 0));
        assert_eq!(histogram.deviation(), 0.0);
        // No figure is outside the range of the recorded values.
        histogram.record(Duration::MAX);
        assert_eq!((histogram.min(), histogram.percentile(1.0)), (u64::MAX, u64::MAX));
    }
}
