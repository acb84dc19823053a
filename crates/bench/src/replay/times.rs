//! The times of operations.

use serde::Serialize;

/// The times of operations in nanoseconds, each with one reading of the clock in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Times {
    /// How many.
    pub count: u64,
    /// The least.
    pub min_ns: u32,
    /// The median.
    pub median_ns: u32,
    /// What 99 of 100 do not exceed.
    pub p99_ns: u32,
    /// The most; at 2^32 - 1, that or more.
    pub max_ns: u32,
    /// The sum.
    pub total_ns: u64,
}

impl Times {
    /// Summarises times. O(n log n).
    pub(super) fn of(mut times: Vec<u32>) -> Self {
        times.sort_unstable();
        let at = |index: usize| times.get(index).copied().unwrap_or(0);
        Self {
            count: times.len() as u64,
            min_ns: at(0),
            median_ns: at(times.len().div_ceil(2).saturating_sub(1)),
            p99_ns: at((times.len() * 99).div_ceil(100).saturating_sub(1)),
            max_ns: at(times.len().saturating_sub(1)),
            total_ns: times.iter().map(|time| u64::from(*time)).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_sorted_times() {
        assert_eq!(Times::of(Vec::new()), Times::default());
        let of = |times: &[u32]| {
            let times = Times::of(times.to_vec());
            (times.min_ns, times.median_ns, times.p99_ns, times.max_ns)
        };
        assert_eq!(of(&[7]), (7, 7, 7, 7));
        assert_eq!(of(&[9, 3]), (3, 3, 9, 9));
        let hundred: Vec<u32> = (1..=100).rev().collect();
        assert_eq!(of(&hundred), (1, 50, 99, 100));
        assert_eq!(Times::of(hundred).total_ns, 5050);
    }
}
