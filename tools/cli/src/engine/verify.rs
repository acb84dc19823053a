//! A workload that checks every byte it reads. It writes the whole region, then reads and writes at
//! random in requests of many lengths, and finally reads all of it again. The content of a block
//! follows from its position and from how often it was written, so that a write that was lost,
//! repeated, misplaced or mixed with another is detected.
//!
//! Its memory does not grow with the region ([`COUNTED_BLOCKS`]), and each of the three passes, and
//! the hash at the end, lasts at most as long as the runtime.

use super::digest::Hash;
use super::worker::EngineError;
use crate::random::Random;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

use super::worker::Worker;
use super::workload::{Observers, Workload, WorkloadStats, direction};
use crate::targets::target::{Completion, DataBuffer, IoDirection, Target, TargetError};
use std::time::Instant;

/// The options of a verified workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VerifyOptions {
    /// The fewest bytes of one request, a multiple of the target's block; `Workload::block` is the
    /// most.
    pub(crate) min_block: usize,
    /// The number of blocks of a job that may be written more than once.
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
    observers: Observers<'_>,
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
            observers.sampler.start();
        }
        let began = Instant::now();
        let result = check.run(pass, began, observers);
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
            // Requests in flight when it ended early have not been compared.
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
        observers.interrupt.is_raised()
            || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime)
    };
    verified.sha256 = if is_whole { ledger.hash(expired) } else { None };
    let result =
        if observers.interrupt.is_raised() { Err(EngineError::Interrupted) } else { Ok(()) };
    (stats, verified, result)
}

impl<B: DataBuffer> Check<'_, '_, B> {
    /// Runs one pass, at least one request of it.
    fn run(
        &mut self,
        pass: Pass,
        began: Instant,
        observers: Observers<'_>,
    ) -> Result<(), EngineError> {
        let mut issued = 0;
        let workload = self.workload;
        let is_over = |issued| {
            let expired = || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime);
            (pass == Pass::Random && issued >= workload.requests) || (issued > 0 && expired())
        };
        loop {
            if observers.interrupt.is_raised() {
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
                let checked = self.check(completion, pass, observers);
                first = first.and(checked);
            }
            observers.sampler.tick(Instant::now());
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
        observers: Observers<'_>,
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
        observers.progress.add(got as u64);
        if pass == Pass::Random {
            observers.sampler.record(io.direction, got as u64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

// The expected content of every block of a region, and the blocks that are being read or written.

/// The number of bytes generated or compared at a time: they stay in the processor's cache.
const CHUNK: usize = 32 << 10;
/// The number of extents tried before a request waits for a completion.
const TRIES: usize = 16;
/// The number of blocks of all jobs that have a count of their writes: 256 MiB of counts. The
/// blocks that follow are written once.
pub(crate) const COUNTED_BLOCKS: u64 = 64 << 20;

/// Consecutive blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    /// The first.
    pub(super) first: u64,
    /// The number of blocks, at least one.
    pub(super) blocks: usize,
}

/// The lengths of requests, in blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    pub(super) min: usize,
    pub(super) max: usize,
}

/// The expected content of the blocks of a region, derived from their positions and numbers of
/// writes. Its memory is bounded: a count of writes for each of the first blocks, and the requests
/// in flight.
pub(super) struct Ledger {
    start: u64,
    block: usize,
    blocks: u64,
    /// The number of blocks from the start that have been written at least once.
    written: u64,
    /// The number of writes of each of the first blocks.
    writes: Vec<u32>,
    /// The number of requests in flight by first block and length, and their direction: at most one
    /// write.
    in_flight: BTreeMap<(u64, usize), (IoDirection, u32)>,
    /// The most blocks of a request so far.
    longest: usize,
    random: Random,
    chunk: Vec<u8>,
}

impl Ledger {
    /// Creates the ledger of `blocks` unwritten blocks from byte `start` of a target, `counted` of
    /// which may be rewritten.
    pub(super) fn new(start: u64, blocks: u64, block: usize, counted: u64) -> Self {
        let writes = vec![0; usize::try_from(blocks.min(counted)).unwrap_or(0)];
        let chunk = vec![0; block.max(CHUNK / block.max(1) * block)];
        let (in_flight, random) = (BTreeMap::new(), Random::new(0x9e6c_63d0));
        Self { start, block, blocks, written: 0, writes, in_flight, longest: 0, random, chunk }
    }

    /// Returns how many bytes have been written at least once, from the start.
    pub(super) fn written_bytes(&self) -> u64 {
        self.written * self.block as u64
    }

    /// Shortens the region to its written part.
    pub(super) fn limit_to_written(&mut self) {
        self.blocks = self.written;
    }

    /// Returns a random number less than `limit`.
    pub(super) fn random(&mut self, limit: u64) -> u64 {
        self.random.below(limit)
    }

    /// Returns up to `max` blocks from block `at`; `None` at the end of the region.
    pub(super) fn extent_at(&self, at: u64, max: usize) -> Option<Extent> {
        let left = usize::try_from(self.blocks.checked_sub(at)?).unwrap_or(usize::MAX);
        (left > 0).then(|| Extent { first: at, blocks: left.min(max) })
    }

    /// Returns an extent that a request may use now; `None` if all that were tried are in use.
    /// Short lengths are as likely as long ones: the power of two is drawn first, then the length
    /// below the next one. Writes use only blocks that have a count.
    pub(super) fn random_extent(
        &mut self,
        direction: IoDirection,
        lengths: Lengths,
    ) -> Option<Extent> {
        let region = match direction {
            IoDirection::Write => self.blocks.min(self.writes.len() as u64),
            IoDirection::Read | IoDirection::Trim | IoDirection::Flush => self.blocks,
        };
        let max = (lengths.max as u64).min(region).max(1);
        let min = (lengths.min as u64).clamp(1, max);
        for _ in 0..TRIES {
            let powers = u64::from(max.ilog2() - min.ilog2()) + 1;
            let power = 1u64 << (u64::from(min.ilog2()) + self.random(powers));
            let blocks = (power + self.random(power)).clamp(min, max);
            let first = self.random(region.saturating_sub(blocks) + 1);
            let extent = Extent { first, blocks: usize::try_from(blocks).unwrap_or(usize::MAX) };
            if !self.conflicts(direction, extent) {
                return Some(extent);
            }
        }
        None
    }

    /// Returns whether a request in flight conflicts: O(log n) for n in flight, and those nearby.
    fn conflicts(&self, direction: IoDirection, extent: Extent) -> bool {
        let end = extent.first + extent.blocks as u64;
        let nearby = (extent.first.saturating_sub(self.longest as u64), 0)..(end, 0);
        let overlaps = |(first, blocks): (u64, usize)| first + blocks as u64 > extent.first;
        let excludes =
            |other: IoDirection| direction == IoDirection::Write || other == IoDirection::Write;
        self.in_flight
            .range(nearby)
            .any(|(&other, &(others, _))| overlaps(other) && excludes(others))
    }

    /// Returns how often the block was written.
    fn count(&self, number: u64) -> u32 {
        let counted = usize::try_from(number).ok().and_then(|number| self.writes.get(number));
        counted.copied().unwrap_or(u32::from(number < self.written))
    }

    /// Returns the first byte of the extent in the target, and how many bytes it has.
    pub(super) fn bytes(&self, extent: Extent) -> (u64, usize) {
        (self.start + extent.first * self.block as u64, extent.blocks * self.block)
    }

    /// Returns the extent of `len` bytes at `offset` of the target.
    pub(super) fn extent(&self, offset: u64, len: usize) -> Extent {
        Extent { first: (offset - self.start) / self.block as u64, blocks: len / self.block }
    }

    /// Reserves the extent for a request in flight.
    pub(super) fn acquire(&mut self, direction: IoDirection, extent: Extent) {
        self.longest = self.longest.max(extent.blocks);
        self.in_flight.entry((extent.first, extent.blocks)).or_insert((direction, 0)).1 += 1;
    }

    /// Releases the extent of a completed request.
    pub(super) fn release(&mut self, extent: Extent) {
        let key = (extent.first, extent.blocks);
        if let Some((_, requests)) = self.in_flight.get_mut(&key) {
            *requests -= 1;
            if *requests == 0 {
                self.in_flight.remove(&key);
            }
        }
    }

    /// Counts one more write of each block, and fills `buffer` with their new content.
    pub(super) fn write<B: DataBuffer>(
        &mut self,
        extent: Extent,
        buffer: &mut B,
    ) -> Result<(), TargetError> {
        let first = usize::try_from(extent.first).unwrap_or(usize::MAX);
        for writes in self.writes.iter_mut().skip(first).take(extent.blocks) {
            *writes = writes.wrapping_add(1);
        }
        self.written = self.written.max(extent.first + extent.blocks as u64);
        self.for_each_chunk(extent, |at, chunk| buffer.write_at(at, chunk))
    }

    /// Overwrites the start of each block of `buffer`, so that a read that transfers nothing is
    /// detected.
    pub(super) fn spoil<B: DataBuffer>(
        &mut self,
        extent: Extent,
        buffer: &mut B,
    ) -> Result<(), TargetError> {
        (0..extent.blocks).try_for_each(|at| buffer.write_at(at * self.block, &[0; 8]))
    }

    /// Compares `buffer` with the expected content of `extent`.
    pub(super) fn compare<B: DataBuffer>(
        &mut self,
        extent: Extent,
        buffer: &B,
        target: &str,
    ) -> Result<(), EngineError> {
        let start = self.bytes(extent).0;
        let mut found = vec![0; self.chunk.len()];
        let mut wrong = None;
        self.for_each_chunk(extent, |at, expected| {
            let found = found.get_mut(..expected.len()).unwrap_or_default();
            buffer.read_at(at, found)?;
            if wrong.is_none() && found != expected {
                let differs =
                    found.iter().zip(expected).position(|(found, expected)| found != expected);
                wrong = differs.map(|first| at + first);
            }
            Ok::<_, TargetError>(())
        })?;
        let Some(at) = wrong else { return Ok(()) };
        let writes = self.count(extent.first + (at / self.block) as u64);
        let at = start + at as u64;
        Err(EngineError::Mismatch { target: target.to_owned(), at, block: self.block, writes })
    }

    /// Returns the SHA-256 of the region's expected content; `None` if `expired` returns true
    /// before.
    pub(super) fn hash(&mut self, expired: impl Fn() -> bool) -> Option<Hash> {
        let mut hasher = Sha256::new();
        let whole = Extent { first: 0, blocks: usize::try_from(self.blocks).ok()? };
        let hashed = self.for_each_chunk(whole, |_, chunk| {
            hasher.update(chunk);
            if expired() { Err(()) } else { Ok(()) }
        });
        hashed.ok().map(|()| Hash::from(hasher))
    }

    /// Passes what the extent must hold to `each`, chunk by chunk, with the chunk's offset in the
    /// extent.
    fn for_each_chunk<E>(
        &mut self,
        extent: Extent,
        mut each: impl FnMut(usize, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let per_chunk = chunk.len() / self.block;
        let mut done = 0;
        let mut result = Ok(());
        while done < extent.blocks && result.is_ok() {
            let blocks = per_chunk.min(extent.blocks - done);
            for (block, number) in
                chunk.chunks_exact_mut(self.block).take(blocks).zip(extent.first + done as u64..)
            {
                generate(block, number, self.count(number));
            }
            result = each(done * self.block, chunk.get(..blocks * self.block).unwrap_or_default());
            done += blocks;
        }
        self.chunk = chunk;
        result
    }
}

/// Generates the contents of block `number` after `writes` writes, different from any other block
/// and count.
fn generate(block: &mut [u8], number: u64, writes: u32) {
    // Steele's splitmix64: each input bit changes half of the output's.
    let mut mixed =
        (number << 24).wrapping_add(u64::from(writes)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Odd, so that the first word of a block is never the zero that spoils a buffer.
    let mut word = (mixed ^ (mixed >> 31)) | 1;
    for bytes in block.chunks_exact_mut(8) {
        bytes.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(0xd6e8_feb8_6659_fd93);
    }
}
