//! A workload on one target: requests made as fast as they complete, counted and timed.

use crate::args::Rw;
use crate::copy::error::PumpError;
use crate::lane::{Figures, Landed, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::{IoDirection, Request, Target};
use std::time::{Duration, Instant};

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// Reads, writes, in which order.
    pub(crate) rw: Rw,
    /// Bytes of one request.
    pub(crate) block: usize,
    /// How many blocks of the target are used, from its start; at least one.
    pub(crate) blocks: u64,
    /// After so many requests it ends.
    pub(crate) requests: u64,
    /// After so long it ends.
    pub(crate) runtime: Option<Duration>,
    /// How many of 100 requests are reads, where `rw` is both.
    pub(crate) reads_in_100: u8,
}

/// What it did.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// From the first request to the last completion.
    pub(crate) elapsed: Duration,
    /// The reads.
    pub(crate) reads: Figures,
    /// The writes.
    pub(crate) writes: Figures,
}

/// Which block comes next, and which way.
#[derive(Debug)]
struct Order {
    workload: Workload,
    made: u64,
    random: u64,
}

impl Order {
    fn new(workload: Workload) -> Self {
        // The same order every time, so that two runs can be compared.
        Self { workload, made: 0, random: 0x2545_f491_4f6c_dd1d }
    }

    /// Marsaglia's xorshift64*: good enough to spread requests, and the same on every machine.
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let wide = u128::from(self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(below);
        // The upper half of a product of two 64-bit numbers is less than each of them.
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    fn next(&mut self) -> Option<(IoDirection, u64)> {
        let Workload { rw, block, blocks, requests, reads_in_100, .. } = self.workload;
        if self.made >= requests {
            return None;
        }
        let (way, random) = match rw {
            Rw::Read => (IoDirection::Read, false),
            Rw::Write => (IoDirection::Write, false),
            Rw::Randread => (IoDirection::Read, true),
            Rw::Randwrite => (IoDirection::Write, true),
            Rw::Randrw if self.random(100) < u64::from(reads_in_100) => (IoDirection::Read, true),
            Rw::Randrw => (IoDirection::Write, true),
        };
        let at = if random { self.random(blocks) } else { self.made % blocks.max(1) };
        self.made += 1;
        Some((way, at * block as u64))
    }
}

/// Runs `workload` with as many requests in flight as there are buffers, which are in `buffers` again when this
/// returns, except those that had to be quarantined.
pub(crate) fn run<B>(
    target: &mut dyn Target<B>,
    workload: Workload,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Outcome, PumpError> {
    let mut lane = Worker::new(target, buffers.len());
    let mut idle: Vec<_> = buffers.drain(..).enumerate().collect();
    let began = Instant::now();
    let result = go(&mut lane, workload, &mut idle, (began, progress, interrupt));
    let elapsed = began.elapsed();
    lane.drain(buffers);
    buffers.extend(idle.into_iter().map(|(_, buffer)| buffer));
    result?;
    let outcome = |way| lane.figures(way).clone();
    Ok(Outcome { elapsed, reads: outcome(IoDirection::Read), writes: outcome(IoDirection::Write) })
}

fn go<B>(
    lane: &mut Worker<'_, B>,
    workload: Workload,
    idle: &mut Vec<(usize, B)>,
    (began, progress, interrupt): (Instant, &Progress, &Interrupt),
) -> Result<(), PumpError> {
    let mut order = Order::new(workload);
    let mut pending = order.next();
    let mut landed = Vec::with_capacity(idle.len());
    loop {
        if interrupt.asked() {
            return Err(PumpError::Interrupted);
        }
        if workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime) {
            pending = None;
        }
        while let Some((way, offset)) = pending {
            let Some((slot, buffer)) = idle.pop() else { break };
            let request = Request { way, offset, len: workload.block, slot, buffer };
            lane.submit(request).map_err(|refused| {
                idle.extend(refused.buffer.map(|buffer| (slot, buffer)));
                PumpError::from(refused.error)
            })?;
            pending = order.next();
        }
        if lane.in_flight() == 0 {
            return if pending.is_none() { Ok(()) } else { Err(PumpError::NoBuffers) };
        }
        let asked = lane.collect(true, |over| landed.push(over));
        let mut first = asked.map(|_| ()).map_err(PumpError::from);
        for over in landed.drain(..) {
            let taken = take_back(lane, over, idle, progress);
            first = first.and(taken);
        }
        first?;
    }
}

fn take_back<B>(
    lane: &Worker<'_, B>,
    over: Landed<B>,
    idle: &mut Vec<(usize, B)>,
    progress: &Progress,
) -> Result<(), PumpError> {
    idle.extend(over.buffer.map(|buffer| (over.slot, buffer)));
    let got = over.result?;
    if got < over.len {
        let expected = over.offset + over.len as u64;
        return Err(PumpError::SourceEnded {
            name: lane.name().to_owned(),
            at: over.offset + got as u64,
            expected,
        });
    }
    progress.add(got as u64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::fake::{Fake, Fault};

    fn workload(rw: Rw, requests: u64) -> Workload {
        Workload { rw, block: 512, blocks: 100, requests, runtime: None, reads_in_100: 70 }
    }

    fn go(target: &mut Fake, workload: Workload, depth: usize) -> (Result<Outcome, PumpError>, usize) {
        let mut buffers = vec![vec![7; 512]; depth];
        let outcome = run(target, workload, &mut buffers, &Progress::hidden(), &Interrupt::default());
        (outcome, buffers.len())
    }

    #[test]
    fn as_many_requests_as_asked_with_the_depth_asked() {
        for (rw, reads, writes) in [(Rw::Read, 250, 0), (Rw::Randwrite, 0, 250), (Rw::Write, 0, 250)] {
            let mut target = Fake::new(vec![0; 51_200], 512);
            let (outcome, left) = go(&mut target, workload(rw, 250), 8);
            let outcome = outcome.unwrap();
            assert_eq!((outcome.reads.requests, outcome.writes.requests), (reads, writes));
            assert_eq!(outcome.reads.bytes + outcome.writes.bytes, 250 * 512);
            assert_eq!((target.at_most, left), (8, 8));
        }
    }

    #[test]
    fn sequential_goes_round_and_random_goes_everywhere() {
        let mut order = Order::new(workload(Rw::Read, 250));
        let offsets: Vec<_> = std::iter::from_fn(|| order.next()).map(|(_, at)| at / 512).collect();
        assert!(offsets.iter().enumerate().all(|(i, &at)| at == i as u64 % 100));
        let mut order = Order::new(workload(Rw::Randrw, 100_000));
        let mut seen = [0u32; 100];
        let mut reads = 0;
        while let Some((way, at)) = order.next() {
            seen[usize::try_from(at / 512).unwrap()] += 1;
            reads += u32::from(way == IoDirection::Read);
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
        assert!((69_000..71_000).contains(&reads), "{reads}");
    }

    #[test]
    fn time_ends_it() {
        let mut target = Fake::new(vec![0; 51_200], 512);
        let limited = Workload { runtime: Some(Duration::from_millis(20)), ..workload(Rw::Read, u64::MAX) };
        let outcome = go(&mut target, limited, 4).0.unwrap();
        assert!(outcome.elapsed >= Duration::from_millis(20) && outcome.reads.requests > 0);
    }

    #[test]
    fn a_failure_ends_it_and_gives_the_buffers_back() {
        for fault in [Fault::Fail, Fault::Refuse, Fault::Quarantine] {
            let mut target = Fake::new(vec![0; 51_200], 512);
            target.fault = Some((30, fault));
            let (outcome, left) = go(&mut target, workload(Rw::Randrw, 250), 8);
            assert!(matches!(outcome, Err(PumpError::Target(_))));
            assert_eq!(left, 8 - usize::from(fault == Fault::Quarantine));
            assert!(target.in_flight.is_empty());
        }
    }
}
