//! One target with the requests in flight at it, and the statistics of those that have completed.

use crate::histogram::Histogram;
use crate::signal::Interrupt;
use crate::targets::error::TargetError;
use crate::targets::target::{
    Completion, Io, IoDirection, RejectedBatch, Request, SubmitError, Target, TargetInfo,
};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The completed requests of one direction: bytes and latencies.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestStats {
    /// Requests that completed without an error.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// From the call until the target has submitted the request.
    pub(crate) queueing: Histogram,
    /// From there until the program owns the buffer again.
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

/// How many values fall into each of fio's classes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Classes(pub(crate) [u64; 7]);

impl Classes {
    /// Counts a number of requests in flight: 1, 2, 4, 8, 16, 32, 64 and more.
    fn record_depth(&mut self, depth: usize) {
        self.record(depth.max(1).ilog2());
    }

    /// Counts a number of requests in a batch: 0, up to 4, 8, 16, 32, 64, and more.
    fn record_batch(&mut self, requests: usize) {
        self.record(match requests {
            0 => 0,
            requests => requests.max(4).next_power_of_two().ilog2() - 1,
        });
    }

    fn record(&mut self, class: u32) {
        if let Some(count) = self.0.get_mut(class.min(6) as usize) {
            *count += 1;
        }
    }

    fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
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
    /// How many requests were in flight with each request that was submitted.
    pub(crate) depths: Classes,
    /// How many requests a collection returned.
    pub(crate) collected: Classes,
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

    /// How many requests completed without an error.
    pub(crate) fn requests(&self) -> u64 {
        self.reads.requests + self.writes.requests + self.trims.requests
    }

    /// Adds the statistics of another worker.
    pub(crate) fn add(&mut self, other: &Self) {
        self.reads.add(&other.reads);
        self.writes.add(&other.writes);
        self.trims.add(&other.trims);
        self.flushes.add(&other.flushes);
        self.depths.add(&other.depths);
        self.collected.add(&other.collected);
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
        self.note_submitted();
        Ok(())
    }

    /// Issues requests, each a record and its buffer.
    pub(crate) fn submit_many(
        &mut self,
        requests: Vec<Request<B>>,
    ) -> Result<(), RejectedBatch<B>> {
        let all = requests.len();
        let submitted = self.target.submit_many(requests);
        for _ in 0..submitted.as_ref().map_or_else(|rejected| rejected.queued, |()| all) {
            self.note_submitted();
        }
        submitted
    }

    fn note_submitted(&mut self) {
        self.in_flight += 1;
        self.stats.depths.record_depth(self.in_flight);
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

    /// Prepares for waiting at the target's descriptor, as [`Target::arm`] does, and returns how
    /// long to wait at most; not at all with nothing in flight. What the target gave up is passed
    /// to `each`.
    pub(crate) fn arm(&mut self, each: impl FnMut(Completion<B>)) -> Option<Duration> {
        // With nothing in flight too, or the signal of what has completed would end every wait.
        let wait = self.target.arm(&mut self.completed);
        if self.in_flight == 0 {
            return None;
        }
        if self.pass_on(each) > 0 { Some(Duration::ZERO) } else { Some(wait) }
    }

    /// Returns the target's descriptor for completions.
    pub(crate) fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.target.completion_fd()
    }

    /// Passes what has completed to `each`, and returns how many requests that were.
    fn pass_on(&mut self, each: impl FnMut(Completion<B>)) -> usize {
        let count = self.completed.len();
        self.stats.collected.record_batch(count);
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

    /// Makes what was written durable, as [`Target::sync`] does. Returns how long it took.
    pub(crate) fn sync(&mut self, interrupt: &Interrupt) -> Result<Duration, TargetError> {
        let began = Instant::now();
        self.target.sync(interrupt)?;
        Ok(began.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_and_batches_are_counted_in_fios_classes() {
        let (mut depths, mut batches) = (Classes::default(), Classes::default());
        for value in [0, 1, 2, 3, 4, 5, 8, 9, 16, 32, 33, 64, 65, 1023] {
            depths.record_depth(value);
            batches.record_batch(value);
        }
        assert_eq!(depths.0, [2, 2, 2, 2, 1, 2, 3]);
        assert_eq!(batches.0, [1, 4, 2, 2, 1, 2, 2]);
    }
}
