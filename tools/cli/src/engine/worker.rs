//! One target with the requests in flight at it, and the statistics of those that have completed.

use crate::histogram::Histogram;
use crate::signal::Interrupt;
use crate::targets::target::{
    Completion, Io, IoDirection, RejectedBatch, Request, SubmitError, Target, TargetError,
    TargetInfo,
};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The completed requests of one direction: bytes and latencies.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestStats {
    /// Requests that completed without an error.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// The time from the call until the target has submitted the request.
    pub(crate) queueing: Histogram,
    /// The time from there until the program owns the buffer again.
    pub(crate) completion: Histogram,
    /// The sum of both.
    pub(crate) total: Histogram,
}

impl RequestStats {
    /// Adds the statistics of another queue.
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.queueing.add(&other.queueing);
        self.completion.add(&other.completion);
        self.total.add(&other.total);
    }

    fn record(&mut self, io: &Io, bytes: u64, now: Instant) {
        self.requests += 1;
        self.bytes += bytes;
        self.queueing.record(io.queued - io.issued);
        self.completion.record(now - io.queued);
        self.total.record(now - io.issued);
    }
}

/// The statistics of a worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerStats {
    /// The reads.
    pub(crate) reads: RequestStats,
    /// The writes.
    pub(crate) writes: RequestStats,
    /// The trims.
    pub(crate) trims: RequestStats,
    /// The flushes.
    pub(crate) flushes: RequestStats,
}

impl WorkerStats {
    fn of_mut(&mut self, direction: IoDirection) -> &mut RequestStats {
        match direction {
            IoDirection::Read => &mut self.reads,
            IoDirection::Write => &mut self.writes,
            IoDirection::Trim => &mut self.trims,
            IoDirection::Flush => &mut self.flushes,
        }
    }

    /// Returns how many requests completed without an error.
    pub(crate) fn requests(&self) -> u64 {
        self.reads.requests + self.writes.requests + self.trims.requests
    }

    /// Adds the statistics of another worker.
    pub(crate) fn add(&mut self, other: &Self) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.trims.add(&other.trims);
        self.flushes.add(&other.flushes);
    }
}

/// A target, the number of its requests in flight, and their statistics.
pub(crate) struct Worker<'t, B> {
    target: &'t mut dyn Target<B>,
    in_flight: usize,
    completed: Vec<Completion<B>>,
    stats: WorkerStats,
}

impl<'t, B> Worker<'t, B> {
    /// Creates a worker for up to `depth` requests in flight at `target`.
    pub(crate) fn new(target: &'t mut dyn Target<B>, depth: usize) -> Self {
        let completed = Vec::with_capacity(depth);
        Self { target, in_flight: 0, completed, stats: WorkerStats::default() }
    }

    /// Returns how many requests are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns how many of them the target has not carried out yet. The others hold their buffers
    /// until no device can reach them.
    pub(crate) fn at_target(&self) -> usize {
        self.in_flight.saturating_sub(self.target.held())
    }

    /// Returns the target's properties.
    pub(crate) fn info(&self) -> &TargetInfo {
        self.target.info()
    }

    /// Returns the statistics.
    pub(crate) fn stats(&self) -> &WorkerStats {
        &self.stats
    }

    /// Discards the statistics gathered so far.
    pub(crate) fn reset_stats(&mut self) {
        self.stats = WorkerStats::default();
    }

    /// Issues a request for `len` bytes at `offset`.
    pub(crate) fn submit(
        &mut self,
        direction: IoDirection,
        offset: u64,
        len: usize,
        buffer: B,
    ) -> Result<(), SubmitError<B>> {
        self.submit_io(Io::new(direction, offset, len), buffer)
    }

    /// Issues a request.
    pub(crate) fn submit_io(&mut self, io: Io, buffer: B) -> Result<(), SubmitError<B>> {
        self.target.submit(Request { io, buffer })?;
        self.in_flight += 1;
        Ok(())
    }

    /// Issues requests, each a record and its buffer.
    pub(crate) fn submit_many(
        &mut self,
        requests: Vec<Request<B>>,
    ) -> Result<(), RejectedBatch<B>> {
        let all = requests.len();
        let submitted = self.target.submit_many(requests);
        self.in_flight += submitted.as_ref().map_or_else(|rejected| rejected.queued, |()| all);
        submitted
    }

    /// Passes each completed request to `each`, after waiting for the first if `wait` is set and
    /// some are in flight. Returns how many there were.
    pub(crate) fn collect(
        &mut self,
        wait: bool,
        each: impl FnMut(Completion<B>),
    ) -> Result<usize, TargetError> {
        if self.in_flight == 0 {
            return Ok(0);
        }
        let polled = match wait {
            true => self.target.wait(&mut self.completed),
            false => self.target.poll(&mut self.completed),
        };
        let count = self.pass_on(each);
        polled.map(|()| count)
    }

    /// Prepares for waiting at the target's descriptors, as [`Target::arm`] does, and returns how
    /// long to wait at most; not at all with nothing in flight.
    pub(crate) fn arm(&mut self) -> Option<Duration> {
        // With nothing in flight too, or the signal of what has completed would end every wait.
        let wait = self.target.arm();
        (self.in_flight > 0).then_some(wait)
    }

    /// Returns the target's descriptor for buffers that it holds.
    pub(crate) fn flush_fd(&mut self) -> Option<BorrowedFd<'_>> {
        self.target.flush_fd()
    }

    /// Returns the target's descriptor for completions.
    pub(crate) fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.target.completion_fd()
    }

    /// Passes completed requests to `each`, and returns how many there were.
    fn pass_on(&mut self, each: impl FnMut(Completion<B>)) -> usize {
        let count = self.completed.len();
        if count > 0 {
            self.in_flight -= count;
            let now = Instant::now();
            for completion in &self.completed {
                if let Ok(bytes) = completion.result {
                    self.stats.of_mut(completion.io.direction).record(
                        &completion.io,
                        bytes as u64,
                        now,
                    );
                }
            }
            self.completed.drain(..).for_each(each);
        }
        count
    }

    /// Waits for all requests in flight, ignores their outcome, and returns their buffers in
    /// `buffers`.
    pub(crate) fn drain(&mut self, buffers: &mut Vec<B>) {
        if self.in_flight > 0 {
            self.target.abandon_retries();
        }
        while self.in_flight > 0 {
            if self.collect(true, |completion| buffers.extend(completion.buffer)).is_err() {
                return;
            }
        }
    }

    /// Abandons requests, as [`Target::abandon_retries_of`] does.
    pub(crate) fn abandon_retries_of(&mut self, given_up: &mut dyn FnMut(&Io) -> bool) {
        self.target.abandon_retries_of(given_up);
    }

    /// Makes written data durable, as [`Target::sync`] does. Returns how long it took.
    pub(crate) fn sync(&mut self, interrupt: &Interrupt) -> Result<Duration, TargetError> {
        let began = Instant::now();
        self.target.sync(interrupt)?;
        Ok(began.elapsed())
    }
}

// Samples of the rates: every 500 ms what was completed since the last one, for
// each direction that completed anything. The jobs are sampled together.

/// The time between two samples, as in fio.
const INTERVAL: Duration = Duration::from_millis(500);

/// The figures of a series of samples.
#[derive(Clone, Copy, PartialEq, Debug, Default, serde::Serialize)]
pub(crate) struct Series {
    /// The number of samples.
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

/// The completed requests so far, and the samples.
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

    /// Starts it, if no other job has. Requests that complete from here on are sampled.
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
            // An interval in which nothing of the direction completed is no sample, as in fio.
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

// Why an engine ended early.

/// Why an engine ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    /// A target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A source returned fewer bytes than it had at the start.
    #[error(
        "{name} ended at byte {at} although it had {expected} bytes at the start; either it was cut short while it was read: \
         copy it again when no program writes it; or its length is not that of its contents, as in /sys: read it into another \
         file first (`cat`)"
    )]
    SourceEnded {
        /// The source's name.
        name: String,
        /// The first byte that was missing.
        at: u64,
        /// The number of bytes expected.
        expected: u64,
    },
    /// A target ended within a request that was inside of it at the start.
    #[error(
        "{target} ended at byte {at}, within the request of {len} bytes at {offset}: it was cut short during the run, or its \
         length is not that of its contents, as in /sys"
    )]
    Short {
        /// The target's name.
        target: String,
        /// The first byte that was missing.
        at: u64,
        /// The request's first byte.
        offset: u64,
        /// The request's length.
        len: usize,
    },
    /// `io --verify` read data that differs from the written data.
    #[error(
        "{target}: byte {at} differs from what was written there (block {}, written {writes} times): the device, or \
         the memory it was read into, is faulty", at / *block as u64
    )]
    Mismatch {
        /// The target's name.
        target: String,
        /// The first byte that differs.
        at: u64,
        /// The size of a block that is checked as one, bytes.
        block: usize,
        /// The number of writes of the block by this run.
        writes: u32,
    },
    /// A thread could not be started.
    #[error("no thread for job {job} of {jobs}: {error}, or use fewer with --numjobs")]
    NoThread {
        /// The job, from 1.
        job: usize,
        /// The number of jobs requested.
        jobs: usize,
        /// The system's error, and the limit that refused it.
        error: String,
    },
    /// All buffers are quarantined.
    #[error(
        "no buffer is left: all are quarantined, since the device may still reach them; check the device"
    )]
    NoBuffers,
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

impl EngineError {
    /// Returns why the flush at the end failed: after an interrupt it is not tried again.
    pub(crate) fn of_flush(error: TargetError, interrupt: &Interrupt) -> Self {
        if interrupt.is_raised() { Self::Interrupted } else { error.into() }
    }

    /// Returns the error for `io` on `target`, which transferred only `got` bytes.
    pub(crate) fn short(target: &str, io: &Io, got: usize) -> Self {
        let (offset, len) = (io.offset, io.len);
        Self::Short {
            target: target.to_owned(),
            at: offset.saturating_add(got as u64),
            offset,
            len,
        }
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
