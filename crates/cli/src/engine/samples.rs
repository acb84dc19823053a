//! Samples of the rates, as fio takes them: every 500 ms what was completed since the last one, for
//! each direction that completed anything. The jobs are sampled together.

use crate::targets::target::IoDirection;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time between two samples: fio's default of `bwavgtime` and `iopsavgtime`.
const INTERVAL: Duration = Duration::from_millis(500);

/// The figures of a series of samples.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub(crate) struct Series {
    /// How many samples there were.
    pub(crate) samples: u64,
    /// The minimum.
    pub(crate) min: f64,
    /// The maximum.
    pub(crate) max: f64,
    /// The mean.
    pub(crate) mean: f64,
    /// The standard deviation of the samples; 0 of fewer than two.
    pub(crate) deviation: f64,
    /// The sum of the squares of the differences from the mean.
    #[serde(skip)]
    squares: f64,
}

impl Series {
    fn add(&mut self, value: f64) {
        (self.min, self.max) = match self.samples {
            0 => (value, value),
            _ => (self.min.min(value), self.max.max(value)),
        };
        self.samples += 1;
        let before = value - self.mean;
        self.mean += before / self.samples as f64;
        self.squares += before * (value - self.mean);
        self.deviation = (self.squares / self.samples.saturating_sub(1).max(1) as f64).sqrt();
    }
}

/// The samples of one direction.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub(crate) struct Rates {
    /// Requests per second.
    pub(crate) iops: Series,
    /// Bytes per second.
    pub(crate) bytes_per_second: Series,
}

impl Rates {
    /// Returns whether there is no sample.
    pub(crate) fn is_empty(&self) -> bool {
        self.iops.samples == 0
    }
}

/// The samples of the reads, the writes and the trims.
pub(crate) type AllRates = [Rates; 3];

/// What was completed so far, and the samples.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// Requests and bytes of each direction.
    completed: [[AtomicU64; 2]; 3],
    created: Instant,
    /// When the next sample is due, ns since `created`; never before the start.
    due: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    before: [[u64; 2]; 3],
    rates: AllRates,
}

impl Sampler {
    /// Creates a sampler that waits for its start.
    pub(crate) fn new() -> Self {
        Self {
            completed: Default::default(),
            created: Instant::now(),
            due: AtomicU64::new(u64::MAX),
            state: Mutex::default(),
        }
    }

    /// Starts it, if no other job has. What completes from here on is sampled.
    pub(crate) fn start(&self) {
        let Ok(mut state) = self.state.lock() else { return };
        if state.last.is_none() {
            self.begin_interval(&mut state, Instant::now());
        }
    }

    fn begin_interval(&self, state: &mut State, now: Instant) {
        state.last = Some(now);
        state.before = self
            .completed
            .each_ref()
            .map(|counts| counts.each_ref().map(|n| n.load(Ordering::Relaxed)));
        let due = now.saturating_duration_since(self.created) + INTERVAL;
        self.due.store(u64::try_from(due.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Counts a completed request.
    pub(crate) fn record(&self, direction: IoDirection, bytes: u64) {
        let [reads, writes, trims] = &self.completed;
        let [requests, all_bytes] = match direction {
            IoDirection::Read => reads,
            IoDirection::Write => writes,
            IoDirection::Trim => trims,
            IoDirection::Flush => return,
        };
        requests.fetch_add(1, Ordering::Relaxed);
        all_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes a sample if one is due at `now`.
    pub(crate) fn tick(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.created).as_nanos();
        if elapsed < u128::from(self.due.load(Ordering::Relaxed)) {
            return;
        }
        // If another job takes it, this one need not.
        let Ok(mut state) = self.state.try_lock() else { return };
        let Some(last) = state.last else { return };
        let passed = now.saturating_duration_since(last);
        if passed < INTERVAL {
            return;
        }
        let before = state.before;
        self.begin_interval(&mut state, now);
        let State { before: after, rates, .. } = &mut *state;
        for ((rates, after), before) in rates.iter_mut().zip(after).zip(before) {
            let [requests, bytes] = [0, 1].map(|at: usize| {
                let count = |counts: &[u64; 2]| counts.get(at).copied().unwrap_or(0);
                count(after).saturating_sub(count(&before)) as f64 / passed.as_secs_f64()
            });
            // fio takes no sample of an interval in which nothing of the direction completed.
            if requests > 0.0 {
                rates.iops.add(requests);
                rates.bytes_per_second.add(bytes);
            }
        }
    }

    /// Returns the samples.
    pub(crate) fn into_rates(self) -> AllRates {
        self.state.into_inner().map(|state| state.rates).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_what_completed_since_the_last_one() {
        let sampler = Sampler::new();
        let at = |ms: u64| sampler.created + Duration::from_secs(3600) + Duration::from_millis(ms);
        sampler.tick(at(0));
        sampler.start();
        sampler.begin_interval(&mut sampler.state.lock().unwrap(), at(0));
        sampler.start();
        for (until, requests) in [(500, 100), (1000, 300), (1250, 0), (1500, 0), (2500, 400)] {
            for _ in 0..requests {
                sampler.record(IoDirection::Read, 4096);
            }
            sampler.tick(at(until));
        }
        let [reads, writes, trims] = sampler.into_rates();
        // 200, 600 and 400 per second; nothing is due at 1250, and nothing was read until 1500.
        assert_eq!((reads.iops.samples, reads.iops.min, reads.iops.max), (3, 200.0, 600.0));
        assert!(
            (reads.iops.mean - 400.0).abs() < 1e-9 && (reads.iops.deviation - 200.0).abs() < 1e-9
        );
        assert_eq!(reads.bytes_per_second.max, 600.0 * 4096.0);
        assert_eq!((writes, trims), (Rates::default(), Rates::default()));
    }
}
