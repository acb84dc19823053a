//! A workload that checks every byte it reads. It writes the whole region, then reads and writes at
//! random in requests of many lengths, and finally reads all of it again. What a block holds
//! follows from its position and from how often it was written, so that a write that was lost,
//! repeated, misplaced or mixed with another is detected.
//!
//! Its memory does not grow with the region ([`COUNTED_BLOCKS`]), and each of the three passes, and
//! the hash at the end, lasts at most as long as the runtime.

use super::digest::Hash;
use super::error::EngineError;
pub(crate) use super::ledger::COUNTED_BLOCKS;
use super::ledger::{Extent, Ledger, Lengths};
use super::worker::Worker;
use super::workload::{Watch, Workload, WorkloadStats, direction};
use crate::targets::target::{Completion, DataBuffer, IoDirection, Target};
use std::time::Instant;

/// How a workload is verified.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VerifyOptions {
    /// The fewest bytes of one request, a multiple of the target's block; `Workload::block` is the
    /// most.
    pub(crate) min_block: usize,
    /// How many blocks of a job may be written more than once.
    pub(crate) counted_blocks: u64,
}

/// The result of a verified workload.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(crate) struct Verified {
    /// Requests of the second pass, at random in the region.
    pub(crate) requests: u64,
    /// Bytes written by the first pass: the region, or as much as the runtime allowed.
    pub(crate) laid_out_bytes: u64,
    /// Bytes read again by the last pass, from the region's start.
    pub(crate) read_back_bytes: u64,
    /// Bytes that were read and compared, by all passes.
    pub(crate) compared_bytes: u64,
    /// The SHA-256 of the region's contents, if one job verified it and had time for all of it.
    pub(crate) sha256: Option<Hash>,
    /// The same for the part of each job, if there were several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) parts: Vec<Hash>,
}

impl Verified {
    /// Adds what another job verified in the part that follows.
    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.laid_out_bytes += other.laid_out_bytes;
        self.read_back_bytes += other.read_back_bytes;
        self.compared_bytes += other.compared_bytes;
        self.parts.extend(self.sha256.take());
        self.parts.extend(other.sha256);
    }
}

/// The three passes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Every block is written, in order.
    LayOut,
    /// Reads and writes at random.
    Random,
    /// Every block is read, in order.
    ReadBack,
}

/// One pass.
struct Check<'a, 't, B> {
    worker: Worker<'t, B>,
    workload: &'a Workload,
    lengths: Lengths,
    ledger: &'a mut Ledger,
    idle: Vec<B>,
    completed: Vec<Completion<B>>,
    compared: u64,
    /// The block it has reached, in order.
    reached: u64,
}

/// Runs `workload` and checks it, and returns what was done with how it ended. The region has
/// `workload.blocks` blocks of the target's alignment. The buffers are in `buffers` again when this
/// returns, except those that had to be quarantined.
pub(crate) fn run<B: DataBuffer>(
    target: &mut dyn Target<B>,
    workload: &Workload,
    options: VerifyOptions,
    buffers: &mut Vec<B>,
    watch: Watch<'_>,
) -> (WorkloadStats, Verified, Result<(), EngineError>) {
    let block = target.info().alignment;
    let lengths =
        Lengths { min: (options.min_block / block).max(1), max: (workload.block / block).max(1) };
    let mut ledger = Ledger::new(workload.start, workload.blocks, block, options.counted_blocks);
    let (mut stats, mut verified) = (WorkloadStats::default(), Verified::default());
    target.measure_submission();
    for pass in [Pass::LayOut, Pass::Random, Pass::ReadBack] {
        let depth = buffers.len();
        let mut check = Check {
            worker: Worker::new(&mut *target, depth),
            workload,
            lengths,
            ledger: &mut ledger,
            idle: std::mem::take(buffers),
            completed: Vec::with_capacity(depth),
            compared: 0,
            reached: 0,
        };
        if pass == Pass::Random {
            watch.sampler.start();
        }
        let began = Instant::now();
        let result = check.run(pass, began, watch);
        let elapsed = began.elapsed();
        let requests = check.worker.stats().clone();
        check.worker.drain(buffers);
        buffers.append(&mut check.idle);
        buffers.extend(check.completed.drain(..).filter_map(|completion| completion.buffer));
        verified.compared_bytes += check.compared;
        let reached = check.reached;
        match pass {
            Pass::Random => {
                verified.requests = requests.requests();
                stats = WorkloadStats { elapsed, requests };
            }
            Pass::LayOut => {
                ledger.limit_to_written();
                verified.laid_out_bytes = ledger.written_bytes();
            }
            // What was in flight when it ended early has not been compared.
            Pass::ReadBack if result.is_ok() => verified.read_back_bytes = reached * block as u64,
            Pass::ReadBack => {}
        }
        if result.is_err() {
            return (stats, verified, result);
        }
    }
    let is_whole = verified.laid_out_bytes == workload.blocks * block as u64
        && verified.read_back_bytes == verified.laid_out_bytes;
    let began = Instant::now();
    let expired = || {
        watch.interrupt.is_raised()
            || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime)
    };
    verified.sha256 = if is_whole { ledger.hash(expired) } else { None };
    let result = if watch.interrupt.is_raised() { Err(EngineError::Interrupted) } else { Ok(()) };
    (stats, verified, result)
}

impl<B: DataBuffer> Check<'_, '_, B> {
    /// Runs one pass, at least one request of it.
    fn run(&mut self, pass: Pass, began: Instant, watch: Watch<'_>) -> Result<(), EngineError> {
        let mut issued = 0;
        let workload = self.workload;
        let is_over = |issued| {
            let expired = || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime);
            (pass == Pass::Random && issued >= workload.requests) || (issued > 0 && expired())
        };
        loop {
            if watch.interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            let mut over = is_over(issued);
            while !over && !self.idle.is_empty() {
                let Some((direction, extent)) = self.next(pass) else {
                    over = pass != Pass::Random;
                    break;
                };
                self.start(direction, extent)?;
                issued += 1;
                over = is_over(issued);
            }
            if self.worker.in_flight() == 0 {
                return if over { Ok(()) } else { Err(EngineError::NoBuffers) };
            }
            let completed = &mut self.completed;
            let collected = self.worker.collect(true, |completion| completed.push(completion));
            let mut first = collected.map(|_| ()).map_err(EngineError::from);
            while let Some(completion) = self.completed.pop() {
                let checked = self.check(completion, pass, watch);
                first = first.and(checked);
            }
            watch.sampler.tick(Instant::now());
            first?;
        }
    }

    /// Returns the next request; `None` if the pass has ended or, at random, every extent that was
    /// tried is in use.
    fn next(&mut self, pass: Pass) -> Option<(IoDirection, Extent)> {
        let direction = match pass {
            Pass::Random => {
                let Workload { rw, rwmixread, .. } = *self.workload;
                let direction = direction(rw, || self.ledger.random(100) < u64::from(rwmixread));
                return self
                    .ledger
                    .random_extent(direction, self.lengths)
                    .map(|extent| (direction, extent));
            }
            Pass::LayOut => IoDirection::Write,
            Pass::ReadBack => IoDirection::Read,
        };
        let extent = self.ledger.extent_at(self.reached, self.lengths.max)?;
        self.reached += extent.blocks as u64;
        Some((direction, extent))
    }

    fn start(&mut self, direction: IoDirection, extent: Extent) -> Result<(), EngineError> {
        let Some(mut buffer) = self.idle.pop() else { return Err(EngineError::NoBuffers) };
        let prepared = match direction {
            IoDirection::Write => self.ledger.write(extent, &mut buffer),
            IoDirection::Read | IoDirection::Trim | IoDirection::Flush => {
                self.ledger.spoil(extent, &mut buffer)
            }
        };
        if let Err(error) = prepared {
            self.idle.push(buffer);
            return Err(error.into());
        }
        let (offset, len) = self.ledger.bytes(extent);
        self.worker.submit(direction, offset, len, buffer).map_err(|rejected| {
            self.idle.extend(rejected.buffer);
            EngineError::from(rejected.error)
        })?;
        self.ledger.acquire(direction, extent);
        Ok(())
    }

    fn check(
        &mut self,
        completion: Completion<B>,
        pass: Pass,
        watch: Watch<'_>,
    ) -> Result<(), EngineError> {
        let Completion { io, buffer, result } = completion;
        let extent = self.ledger.extent(io.offset, io.len);
        self.ledger.release(extent);
        let compared = match (&result, io.direction, &buffer) {
            (Ok(got), IoDirection::Read, Some(buffer)) if *got >= io.len => {
                let compared = self.ledger.compare(extent, buffer, &self.worker.info().name);
                self.compared += if compared.is_ok() { io.len as u64 } else { 0 };
                compared
            }
            _ => Ok(()),
        };
        self.idle.extend(buffer);
        compared?;
        let got = result?;
        if got < io.len {
            return Err(EngineError::short(&self.worker.info().name, &io, got));
        }
        watch.progress.add(got as u64);
        if pass == Pass::Random {
            watch.sampler.record(io.direction, got as u64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
