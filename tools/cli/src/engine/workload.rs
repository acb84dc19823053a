//! A workload on one target: requests issued as fast as they complete, or at a given rate.

use super::worker::{EngineError, Sampler, Worker, WorkerStats};
use crate::args::Rw;
use crate::progress::Progress;
use crate::random::Random;
use crate::signal::Interrupt;
use crate::targets::target::{Completion, DataBuffer, IoDirection, Target};
use std::time::{Duration, Instant};

/// A workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// The direction and order of the requests.
    pub(crate) rw: Rw,
    /// Bytes of one request.
    pub(crate) block: usize,
    /// The start of the region of the target, bytes.
    pub(crate) start: u64,
    /// The length of the region in blocks; at least one.
    pub(crate) blocks: u64,
    /// Each job ends after this many requests,
    pub(crate) requests: u64,
    /// or after this time.
    pub(crate) runtime: Option<Duration>,
    /// The time before the statistics and the runtime begin.
    pub(crate) ramp: Duration,
    /// The percentage of reads, if `rw` mixes reads and writes.
    pub(crate) rwmixread: u8,
    /// The most bytes per second of each direction.
    pub(crate) rate: Option<u64>,
    /// The most requests of a job at the target, as far as there are buffers.
    pub(crate) depth: usize,
    /// The distance between the regions of consecutive jobs, bytes.
    pub(crate) increment: u64,
    /// The seed of the random numbers, different for each job.
    pub(crate) seed: u64,
    /// A flush follows each that many writes.
    pub(crate) flush_every: Option<u64>,
}

/// The statistics of a workload.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkloadStats {
    /// The time from the first request, or the end of the ramp time, to the last completion.
    pub(crate) elapsed: Duration,
    /// Its requests.
    pub(crate) requests: WorkerStats,
}

/// Returns what the next request of `rw` does; `reads` decides where reads and writes are mixed.
pub(super) fn direction(rw: Rw, reads: impl FnOnce() -> bool) -> IoDirection {
    match rw {
        Rw::Read | Rw::Randread => IoDirection::Read,
        Rw::Write | Rw::Randwrite => IoDirection::Write,
        Rw::Trim | Rw::Randtrim => IoDirection::Trim,
        Rw::Rw | Rw::Randrw => match reads() {
            true => IoDirection::Read,
            false => IoDirection::Write,
        },
    }
}

/// A request that has not been submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Next {
    direction: IoDirection,
    offset: u64,
}

/// The sequence of requests. The same in every run, so that two runs can be compared.
#[derive(Debug)]
struct Sequence {
    workload: Workload,
    issued: u64,
    /// Writes since the last flush.
    unflushed: u64,
    random: Random,
}

impl Sequence {
    fn new(workload: Workload) -> Self {
        let random =
            Random::new(workload.start ^ workload.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { workload, issued: 0, unflushed: 0, random }
    }

    fn next(&mut self) -> Option<Next> {
        let Workload { rw, block, start, blocks, requests, rwmixread, flush_every, .. } =
            self.workload;
        if flush_every.is_some_and(|every| self.unflushed >= every) {
            self.unflushed = 0;
            return Some(Next { direction: IoDirection::Flush, offset: start });
        }
        if self.issued >= requests {
            return None;
        }
        let direction = direction(rw, || self.random.below(100) < u64::from(rwmixread));
        let at =
            if rw.is_random() { self.random.below(blocks) } else { self.issued % blocks.max(1) };
        self.issued += 1;
        self.unflushed += u64::from(direction == IoDirection::Write);
        Some(Next { direction, offset: start + at * block as u64 })
    }
}

/// Delays requests so that no direction exceeds a rate.
#[derive(Debug)]
struct Throttle {
    bytes_per_second: u64,
    began: Instant,
    bytes: [u64; 3],
}

impl Throttle {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, began: Instant::now(), bytes: [0; 3] }
    }

    fn bytes_mut(&mut self, direction: IoDirection) -> &mut u64 {
        let [reads, writes, trims] = &mut self.bytes;
        match direction {
            IoDirection::Read => reads,
            IoDirection::Write => writes,
            IoDirection::Trim | IoDirection::Flush => trims,
        }
    }

    /// Returns how long the next request of `direction` has to wait.
    fn delay(&mut self, direction: IoDirection) -> Duration {
        let due = *self.bytes_mut(direction) as f64 / self.bytes_per_second as f64;
        Duration::try_from_secs_f64(due)
            .unwrap_or(Duration::MAX)
            .saturating_sub(self.began.elapsed())
    }
}

/// The longest sleep of a throttled workload before it checks for completions and signals.
const NAP: Duration = Duration::from_micros(200);

/// Runs `workload`, and returns what was done with how it ended. Buffers beyond its depth take the
/// place of those that wait for a flush. The buffers are in `buffers` again when this returns,
/// except those that had to be quarantined.
pub(crate) fn run<B: DataBuffer>(
    target: &mut dyn Target<B>,
    workload: Workload,
    buffers: &mut Vec<B>,
    observers: Observers<'_>,
) -> (WorkloadStats, Result<(), EngineError>) {
    target.measure_submission();
    let mut run = Run {
        worker: Worker::new(target, buffers.len()),
        idle: std::mem::take(buffers),
        completed: Vec::new(),
        workload,
        throttle: workload.rate.map(Throttle::new),
        began: Instant::now(),
        is_ramping: !workload.ramp.is_zero(),
        observers,
    };
    let result = run.run();
    let elapsed = if run.is_ramping { Duration::ZERO } else { run.began.elapsed() };
    let mut stats = WorkloadStats { elapsed, requests: run.worker.stats().clone() };
    if run.is_ramping {
        stats = WorkloadStats::default();
    }
    run.worker.drain(buffers);
    buffers.append(&mut run.idle);
    (stats, result)
}

/// The observers of a workload: progress and samples, which all jobs share, and the interrupt that
/// ends it.
#[derive(Clone, Copy)]
pub(crate) struct Observers<'w> {
    /// The live line.
    pub(crate) progress: &'w Progress,
    /// The samples.
    pub(crate) sampler: &'w Sampler,
    /// Ends it when it is raised.
    pub(crate) interrupt: &'w Interrupt,
}

struct Run<'t, 'w, B> {
    worker: Worker<'t, B>,
    idle: Vec<B>,
    completed: Vec<Completion<B>>,
    workload: Workload,
    throttle: Option<Throttle>,
    began: Instant,
    is_ramping: bool,
    observers: Observers<'w>,
}

impl<B: DataBuffer> Run<'_, '_, B> {
    fn run(&mut self) -> Result<(), EngineError> {
        let mut sequence = Sequence::new(self.workload);
        let mut next = sequence.next();
        if !self.is_ramping {
            self.observers.sampler.start();
        }
        loop {
            if self.observers.interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            if self.is_ramping && self.began.elapsed() >= self.workload.ramp {
                // Requests in flight count from here on.
                self.worker.reset_stats();
                (self.began, self.is_ramping) = (Instant::now(), false);
                self.observers.sampler.start();
                sequence.issued = 0;
                next = sequence.next();
            }
            if self.is_ramping && next.is_none() {
                sequence.issued = 0;
                next = sequence.next();
            }
            let expired = |runtime| !self.is_ramping && self.began.elapsed() >= runtime;
            if self.workload.runtime.is_some_and(expired) {
                next = None;
            }
            let mut delay = Duration::ZERO;
            while let Some(Next { direction, offset }) = next {
                delay = self
                    .throttle
                    .as_mut()
                    .map_or(Duration::ZERO, |throttle| throttle.delay(direction));
                if !delay.is_zero() {
                    break;
                }
                if self.worker.at_target() >= self.workload.depth {
                    break;
                }
                let Some(buffer) = self.idle.pop() else { break };
                let len = self.workload.block;
                self.worker.submit(direction, offset, len, buffer).map_err(|rejected| {
                    self.idle.extend(rejected.buffer);
                    EngineError::from(rejected.error)
                })?;
                if let Some(throttle) = &mut self.throttle {
                    *throttle.bytes_mut(direction) += len as u64;
                }
                next = sequence.next();
            }
            if self.worker.in_flight() == 0 && delay.is_zero() {
                return if next.is_none() { Ok(()) } else { Err(EngineError::NoBuffers) };
            }
            let completed = &mut self.completed;
            let collected =
                self.worker.collect(delay.is_zero(), |completion| completed.push(completion));
            if !delay.is_zero() && !matches!(collected, Ok(1..)) {
                std::thread::sleep(delay.min(NAP));
            }
            let mut first = collected.map(|_| ()).map_err(EngineError::from);
            while let Some(completion) = self.completed.pop() {
                let reclaimed = self.reclaim(completion);
                first = first.and(reclaimed);
            }
            self.observers.sampler.tick(Instant::now());
            first?;
        }
    }

    fn reclaim(&mut self, completion: Completion<B>) -> Result<(), EngineError> {
        let Completion { io, buffer, result } = completion;
        self.idle.extend(buffer);
        let got = result?;
        if io.direction == IoDirection::Flush {
            return Ok(());
        }
        if got < io.len {
            return Err(EngineError::short(&self.worker.info().name, &io, got));
        }
        self.observers.progress.add(got as u64);
        self.observers.sampler.record(io.direction, got as u64);
        Ok(())
    }
}

/// Fills `len` bytes of a buffer with data that does not compress.
pub(crate) fn refill<B: DataBuffer>(
    buffer: &mut B,
    len: usize,
    random: &mut Random,
) -> Result<(), EngineError> {
    let mut chunk = [0u8; 4096];
    for at in (0..len).step_by(chunk.len()) {
        random.fill(&mut chunk);
        let part = chunk.len().min(len - at);
        buffer.write_at(at, chunk.get(..part).unwrap_or_default())?;
    }
    Ok(())
}

#[cfg(test)]
impl Workload {
    /// Returns a workload for tests: `requests` requests of 512 bytes in a region of `blocks`
    /// blocks at the start of the target.
    pub(super) fn sample(rw: Rw, blocks: u64, requests: u64) -> Self {
        let (block, start, runtime, ramp) = (512, 0, None, Duration::ZERO);
        Self {
            rw,
            block,
            start,
            blocks,
            requests,
            runtime,
            ramp,
            rwmixread: 50,
            rate: None,
            depth: usize::MAX,
            increment: 0,
            seed: 0,
            flush_every: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::fake::{Fake, Fault};

    fn workload(rw: Rw, requests: u64) -> Workload {
        Workload { rwmixread: 70, ..Workload::sample(rw, 100, requests) }
    }

    fn execute(
        target: &mut Fake,
        workload: Workload,
        depth: usize,
    ) -> (Result<WorkloadStats, EngineError>, usize) {
        let mut buffers = vec![vec![7; 512]; depth];
        let (progress, sampler, interrupt) =
            (Progress::hidden(), Sampler::new(), Interrupt::default());
        let observers = Observers { progress: &progress, sampler: &sampler, interrupt: &interrupt };
        let (stats, ended) = run(target, workload, &mut buffers, observers);
        (ended.map(|()| stats), buffers.len())
    }

    #[test]
    fn the_requested_number_of_requests_runs_at_the_requested_depth() {
        for (rw, reads, writes, trims) in [
            (Rw::Read, 250, 0, 0),
            (Rw::Randwrite, 0, 250, 0),
            (Rw::Write, 0, 250, 0),
            (Rw::Trim, 0, 0, 250),
            (Rw::Randtrim, 0, 0, 250),
        ] {
            let mut target = Fake::new(vec![0; 51_200], 512);
            let (stats, left) = execute(&mut target, workload(rw, 250), 8);
            let requests = stats.unwrap().requests;
            assert_eq!(
                (requests.reads.requests, requests.writes.requests, requests.trims.requests),
                (reads, writes, trims)
            );
            assert_eq!(
                requests.reads.bytes + requests.writes.bytes + requests.trims.bytes,
                250 * 512
            );
            assert_eq!((target.peak, left), (8, 8));
        }
    }

    #[test]
    fn spare_buffers_take_the_place_of_those_that_are_held() {
        for (holds, count, held) in [(true, 16, 9..17), (true, 8, 8..9), (false, 16, 8..9)] {
            let mut target = Fake::new(vec![0; 51_200], 512);
            target.holds = holds;
            let workload = Workload { depth: 8, ..workload(Rw::Randrw, 2_500) };
            let (stats, left) = execute(&mut target, workload, count);
            assert_eq!((stats.unwrap().requests.requests(), left), (2_500, count));
            assert_eq!(target.peak, 8, "never more than the depth at the target");
            assert!(held.contains(&target.peak_held), "{holds} {count}: {}", target.peak_held);
        }
    }

    #[test]
    fn sequential_wraps_around_and_random_reaches_every_block() {
        let mut sequence = Sequence::new(workload(Rw::Read, 250));
        let offsets: Vec<_> =
            std::iter::from_fn(|| sequence.next()).map(|next| next.offset / 512).collect();
        assert!(offsets.iter().enumerate().all(|(i, &at)| at == i as u64 % 100));
        for rw in [Rw::Randrw, Rw::Rw] {
            let mut sequence = Sequence::new(workload(rw, 100_000));
            let mut seen = [0u32; 100];
            let mut reads = 0;
            while let Some(next) = sequence.next() {
                seen[usize::try_from(next.offset / 512).unwrap()] += 1;
                reads += u32::from(next.direction == IoDirection::Read);
            }
            assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
            assert!((69_000..71_000).contains(&reads), "{reads}");
        }
    }

    #[test]
    fn requests_stay_in_the_region() {
        for rw in [Rw::Write, Rw::Randwrite] {
            let region = Workload { start: 10 * 512, blocks: 5, ..workload(rw, 200) };
            let mut target = Fake::new(vec![0; 51_200], 512);
            execute(&mut target, region, 4).0.unwrap();
            let written =
                |range: std::ops::Range<usize>| target.data[range].iter().any(|&byte| byte != 0);
            assert!(written(5120..7680) && !written(0..5120) && !written(7680..51_200));
        }
    }

    #[test]
    fn the_runtime_ends_the_run_and_begins_after_the_ramp_time() {
        let mut target = Fake::new(vec![0; 51_200], 512);
        let limited =
            Workload { runtime: Some(Duration::from_millis(200)), ..workload(Rw::Read, u64::MAX) };
        let stats = execute(&mut target, limited, 4).0.unwrap();
        assert!(stats.elapsed >= Duration::from_millis(200) && stats.requests.reads.requests > 0);
        let began = Instant::now();
        let ramped = Workload { ramp: Duration::from_millis(30), ..limited };
        let stats = execute(&mut target, ramped, 4).0.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(230) && stats.elapsed < began.elapsed());
    }

    #[test]
    fn a_rate_is_not_exceeded() {
        let mut target = Fake::new(vec![0; 51_200], 512);
        // 40 blocks at 512,000 bytes per second take 40 ms, less the first, which is due at once.
        let limited = Workload { rate: Some(512_000), ..workload(Rw::Read, 40) };
        let stats = execute(&mut target, limited, 4).0.unwrap();
        assert_eq!(stats.requests.reads.requests, 40);
        assert!(stats.elapsed >= Duration::from_millis(38), "{:?}", stats.elapsed);
    }

    #[test]
    fn a_failure_ends_the_run_and_returns_the_buffers() {
        for fault in [Fault::Fail, Fault::Reject, Fault::Quarantine] {
            let mut target = Fake::new(vec![0; 51_200], 512);
            target.fault = Some((30, fault));
            let mut buffers = vec![vec![7; 512]; 8];
            let (progress, sampler, interrupt) =
                (Progress::hidden(), Sampler::new(), Interrupt::default());
            let observers =
                Observers { progress: &progress, sampler: &sampler, interrupt: &interrupt };
            let (stats, ended) =
                run(&mut target, workload(Rw::Randrw, 250), &mut buffers, observers);
            let left = buffers.len();
            assert!(matches!(ended, Err(EngineError::Target(_))));
            // Requests done before the end count.
            assert!((1..250).contains(&stats.requests.requests()), "{}", stats.requests.requests());
            assert_eq!(left, 8 - usize::from(fault == Fault::Quarantine));
            assert!(target.in_flight.is_empty());
        }
    }

    #[test]
    fn a_flush_follows_each_number_of_writes() {
        for (rw, every, flushes) in
            [(Rw::Write, 1, 100), (Rw::Randwrite, 32, 3), (Rw::Write, 101, 0), (Rw::Read, 1, 0)]
        {
            let mut target = Fake::new(vec![0; 51_200], 512);
            let flushed = Workload { flush_every: Some(every), ..workload(rw, 100) };
            let stats = execute(&mut target, flushed, 4).0.unwrap().requests;
            assert_eq!(
                (stats.flushes.requests, stats.requests()),
                (flushes, 100),
                "{rw:?} {every}"
            );
        }
    }
}
