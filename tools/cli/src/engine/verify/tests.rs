//! Targets that are correct, faulty, failing, larger than memory or slow, under a verified
//! workload.

use super::*;
use crate::args::Rw;
use crate::engine::worker::Sampler;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::fake::{Fake, Fault};
use crate::targets::file;
use crate::targets::target::{Request, SubmitError, TargetError, TargetInfo};
use sha2::{Digest, Sha256};
use std::time::Duration;

fn workload(rw: Rw, blocks: u64, requests: u64) -> Workload {
    Workload { block: 8192, ..Workload::sample(rw, blocks, requests) }
}

fn execute(
    target: &mut dyn Target<Vec<u8>>,
    workload: Workload,
    depth: usize,
) -> (Result<(WorkloadStats, Verified), EngineError>, usize) {
    let mut buffers = vec![vec![0xcc; workload.block]; depth];
    let result = verify(target, &workload, (512, u64::MAX), &mut buffers);
    (result, buffers.len())
}

fn verify(
    target: &mut dyn Target<Vec<u8>>,
    workload: &Workload,
    (min_block, counted_blocks): (usize, u64),
    buffers: &mut Vec<Vec<u8>>,
) -> Result<(WorkloadStats, Verified), EngineError> {
    let options = VerifyOptions { min_block, counted_blocks };
    let (progress, sampler, interrupt) = (Progress::hidden(), Sampler::new(), Interrupt::default());
    let observers = Observers { progress: &progress, sampler: &sampler, interrupt: &interrupt };
    let (stats, verified, ended) = run(target, workload, options, buffers, observers);
    ended.map(|()| (stats, verified))
}

#[test]
fn a_correct_target_passes_at_every_block_and_depth() {
    for block in [512, 4096] {
        for depth in [1, 7, 64] {
            for rw in [Rw::Randrw, Rw::Randread, Rw::Randwrite] {
                let mut target = Fake::new(vec![0xee; 100 * block], block);
                let (result, left) = execute(&mut target, workload(rw, 97, 500), depth);
                let (stats, verified) = result.unwrap();
                assert_eq!((verified.requests, left), (500, depth));
                assert_eq!(stats.requests.reads.requests == 0, rw == Rw::Randwrite);
                let read_back = 97 * block as u64;
                assert_eq!(verified.compared_bytes, stats.requests.reads.bytes + read_back);
                let held = Hash::from(Sha256::new().chain_update(&target.data[..97 * block]));
                assert_eq!(verified.sha256, Some(held));
                assert!(
                    target.data[97 * block..].iter().all(|&byte| byte == 0xee),
                    "past the region"
                );
                assert_eq!(depth > 1, target.peak > 1);
            }
        }
    }
}

#[test]
fn requests_have_all_lengths() {
    let mut ledger = Ledger::new(0, 4096, 512, u64::MAX);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..20_000 {
        seen.insert(
            ledger.random_extent(IoDirection::Read, Lengths { min: 1, max: 2048 }).unwrap().blocks,
        );
    }
    assert!((1..=64).all(|blocks| seen.contains(&blocks)));
    assert!(seen.last().is_some_and(|&most| most > 2000 && most <= 2048));
}

/// The mistake of a faulty target with one request.
#[derive(Clone, Copy, Debug)]
enum Corruption {
    /// Completes a write without writing.
    LostWrite,
    /// Completes a read without changing the buffer.
    LostRead,
    /// Writes one block further on.
    MisplacedWrite,
    /// Flips a bit of what is read.
    FlippedBit,
}

struct Faulty {
    inner: Fake,
    corruption: Corruption,
    at: usize,
}

impl Target<Vec<u8>> for Faulty {
    fn info(&self) -> &TargetInfo {
        self.inner.info()
    }

    fn submit(&mut self, mut request: Request<Vec<u8>>) -> Result<(), SubmitError<Vec<u8>>> {
        let at = usize::try_from(request.io.offset).unwrap();
        let held = self.inner.data[at..at + request.io.len].to_vec();
        let last = at + request.io.len == self.inner.data.len();
        if self.inner.requests >= self.at {
            let corrupted = match (self.corruption, request.io.direction) {
                // The present content is written again.
                (Corruption::LostWrite, IoDirection::Write) => {
                    request.buffer.write_at(0, &held).unwrap();
                    true
                }
                (Corruption::MisplacedWrite, IoDirection::Write) if !last => {
                    request.io.offset += 512;
                    true
                }
                (Corruption::FlippedBit, IoDirection::Read) => {
                    self.inner.data[at] ^= 1;
                    true
                }
                (Corruption::LostRead, IoDirection::Read) => {
                    // The buffer's contents are returned.
                    let before = request.buffer[..request.io.len].to_vec();
                    self.inner.data[at..at + request.io.len].copy_from_slice(&before);
                    true
                }
                _ => false,
            };
            self.at = if corrupted { usize::MAX } else { self.at };
        }
        self.inner.submit(request)
    }

    fn poll(&mut self, completed: &mut Vec<Completion<Vec<u8>>>) -> Result<(), TargetError> {
        self.inner.poll(completed)
    }
    fn wait(&mut self, completed: &mut Vec<Completion<Vec<u8>>>) -> Result<(), TargetError> {
        self.inner.wait(completed)
    }
    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        self.inner.sync(&Interrupt::default())
    }
}

#[test]
fn every_fault_is_detected() {
    for corruption in [
        Corruption::LostWrite,
        Corruption::LostRead,
        Corruption::MisplacedWrite,
        Corruption::FlippedBit,
    ] {
        for at in [0, 3, 40, 200] {
            for depth in [1, 8] {
                let inner = Fake::new(vec![0; 200 * 512], 512);
                let mut target = Faulty { inner, corruption, at };
                // Few writes, since one that covers the fault before it is read repairs it.
                let few = Workload { rwmixread: 95, ..workload(Rw::Randrw, 200, 300) };
                let (result, left) = execute(&mut target, few, depth);
                assert!(
                    matches!(result, Err(EngineError::Mismatch { .. })),
                    "{corruption:?} {at} {depth}"
                );
                assert_eq!((target.at, left), (usize::MAX, depth));
            }
        }
    }
}

#[test]
fn a_failure_ends_the_run_and_returns_the_buffers() {
    for fault in [Fault::Fail, Fault::Reject, Fault::Quarantine] {
        for at in [2, 50, 260] {
            let mut target = Fake::new(vec![0; 200 * 512], 512);
            target.fault = Some((at, fault));
            let (result, left) = execute(&mut target, workload(Rw::Randrw, 200, 250), 8);
            assert!(matches!(result, Err(EngineError::Target(_))), "{fault:?} {at}");
            assert_eq!(left, 8 - usize::from(fault == Fault::Quarantine));
            assert!(target.in_flight.is_empty());
        }
    }
}

#[test]
fn requests_of_a_file_are_aligned_as_it_was_opened() {
    for (min, max, alignment) in
        [(4096, 4096, 4096), (4096, 65_536, 4096), (4096, 6144, 2048), (512, 4096, 512)]
    {
        assert_eq!(file::alignment([min as u64, max as u64]), alignment);
        let mut target = Fake::new(vec![0; 64 * alignment], 1).direct(alignment);
        let workload = Workload { block: max, ..workload(Rw::Randrw, 64, 300) };
        let mut buffers = vec![vec![0; max]; 8];
        let result = verify(&mut target, &workload, (min, u64::MAX), &mut buffers);
        assert_eq!(result.unwrap().1.requests, 300);
    }
}

/// A target of any size that stores what was written, in blocks of 4 KiB, and delays each poll.
struct Sparse {
    info: TargetInfo,
    held: std::collections::HashMap<u64, Vec<u8>>,
    in_flight: Vec<Request<Vec<u8>>>,
}

impl Sparse {
    fn new(bytes: u64) -> Self {
        let info = TargetInfo { capacity: Some(bytes), ..Fake::<Vec<u8>>::new(vec![], 4096).info };
        Self { info, held: std::collections::HashMap::new(), in_flight: Vec::new() }
    }
}

impl Target<Vec<u8>> for Sparse {
    fn info(&self) -> &TargetInfo {
        &self.info
    }
    fn submit(&mut self, request: Request<Vec<u8>>) -> Result<(), SubmitError<Vec<u8>>> {
        self.in_flight.push(request);
        Ok(())
    }
    fn poll(&mut self, completed: &mut Vec<Completion<Vec<u8>>>) -> Result<(), TargetError> {
        std::thread::sleep(Duration::from_millis(1));
        for mut request in self.in_flight.drain(..) {
            for (at, block) in
                (request.io.offset / 4096..).zip(request.buffer[..request.io.len].chunks_mut(4096))
            {
                match request.io.direction {
                    IoDirection::Write => drop(self.held.insert(at, block.to_vec())),
                    IoDirection::Read => block.copy_from_slice(&self.held[&at]),
                    IoDirection::Trim | IoDirection::Flush => {
                        unreachable!("a verified workload does not trim")
                    }
                }
            }
            let Request { io, buffer } = request;
            completed.push(Completion { io, buffer: Some(buffer), result: Ok(io.len) });
        }
        Ok(())
    }
    fn wait(&mut self, completed: &mut Vec<Completion<Vec<u8>>>) -> Result<(), TargetError> {
        self.poll(completed)
    }
    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        Ok(())
    }
}

#[test]
fn the_runtime_ends_every_pass_of_a_region_of_any_size() {
    let mut target = Sparse::new(8 << 40);
    let runtime = Some(Duration::from_secs(1));
    let workload = Workload { runtime, ..workload(Rw::Randrw, (8 << 40) / 4096, u64::MAX) };
    let mut buffers = vec![vec![0; 8192]; 4];
    let result = verify(&mut target, &workload, (4096, COUNTED_BLOCKS), &mut buffers);
    let (stats, verified) = result.unwrap();
    assert!(stats.requests.reads.requests > 0 && stats.requests.writes.requests > 0);
    assert!(verified.laid_out_bytes > 0 && verified.laid_out_bytes < 1 << 30, "{verified:?}");
    assert!(verified.read_back_bytes > 0 && verified.read_back_bytes <= verified.laid_out_bytes);
    assert_eq!((verified.sha256, buffers.len()), (None, 4));
}

#[test]
fn blocks_without_a_count_are_written_once_and_checked() {
    for counted in [0, 1, 10, 96] {
        let mut target = Fake::new(vec![0; 97 * 512], 512);
        let mut buffers = vec![vec![0; 8192]; 7];
        let workload = workload(Rw::Randrw, 97, 400);
        let result = verify(&mut target, &workload, (512, counted), &mut buffers);
        let (_, verified) = result.unwrap();
        let held = Hash::from(Sha256::new().chain_update(&target.data));
        assert_eq!((verified.requests, verified.sha256), (400, Some(held)));
        let mut once = Ledger::new(0, 97, 512, 0);
        let mut buffer = vec![0; 512];
        for first in counted..97 {
            once.write(Extent { first, blocks: 1 }, &mut buffer).unwrap();
            let at = usize::try_from(first).unwrap() * 512;
            assert!(buffer == target.data[at..at + 512], "block {first} of {counted}");
        }
    }
}

#[test]
fn requests_in_flight_do_not_conflict() {
    let mut ledger = Ledger::new(0, 64, 512, u64::MAX);
    let mut users = [(0u32, 0u32); 64];
    let mut in_flight = Vec::new();
    for step in 0..20_000 {
        let direction = if ledger.random(3) == 0 { IoDirection::Write } else { IoDirection::Read };
        if ledger.random(2) == 0
            && let Some(extent) = ledger.random_extent(direction, Lengths { min: 1, max: 9 })
        {
            ledger.acquire(direction, extent);
            in_flight.push((direction, extent));
            for user in
                users.iter_mut().skip(usize::try_from(extent.first).unwrap()).take(extent.blocks)
            {
                if direction == IoDirection::Write {
                    user.1 += 1
                } else {
                    user.0 += 1
                }
                assert!(*user == (user.0, 0) || *user == (0, 1), "step {step}: {user:?}");
            }
        } else if !in_flight.is_empty() {
            let at = usize::try_from(ledger.random(in_flight.len() as u64)).unwrap();
            let (direction, extent) = in_flight.swap_remove(at);
            ledger.release(extent);
            for user in
                users.iter_mut().skip(usize::try_from(extent.first).unwrap()).take(extent.blocks)
            {
                if direction == IoDirection::Write { user.1 -= 1 } else { user.0 -= 1 }
            }
        }
    }
}
