//! Copies all bytes of one target to another. Each buffer cycles through `idle → reading → writing → idle`; all buffers are
//! used concurrently, and the targets complete in any order.

use super::error::EngineError;
use super::worker::{RequestStats, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::target::{Completion, DataBuffer, Io, IoDirection, Request, SubmitError, Target};
use std::time::{Duration, Instant};

/// The bytes to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// The number of bytes, from offset 0 of both targets.
    pub(crate) total: u64,
    /// Bytes of one request.
    pub(crate) block: usize,
}

/// The statistics of a pump.
#[derive(Debug)]
pub(crate) struct PumpStats {
    /// How many bytes were written.
    pub(crate) bytes: u64,
    /// From the first request to the end of the flush.
    pub(crate) elapsed: Duration,
    /// The part of it that the flush took.
    pub(crate) flush: Duration,
    /// The reads from the source.
    pub(crate) reads: RequestStats,
    /// The writes to the destination.
    pub(crate) writes: RequestStats,
}

struct Pump<'t, B> {
    source: Worker<'t, B>,
    destination: Worker<'t, B>,
    idle: Vec<B>,
    /// Completed requests that have not been processed.
    read: Vec<Completion<B>>,
    wrote: Vec<Completion<B>>,
    plan: Plan,
    next: u64,
    written: u64,
}

/// Moves `plan.total` bytes and flushes `to`. The buffers, each of `plan.block` bytes or more, are in `buffers` again
/// when this returns, whether it succeeds or not, except those that had to be quarantined.
pub(crate) fn pump<B: DataBuffer>(
    from: &mut dyn Target<B>,
    to: &mut dyn Target<B>,
    plan: Plan,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<PumpStats, EngineError> {
    let began = Instant::now();
    let depth = buffers.len();
    let mut pump = Pump {
        source: Worker::new(from, depth),
        destination: Worker::new(to, depth),
        idle: std::mem::take(buffers),
        read: Vec::with_capacity(depth),
        wrote: Vec::with_capacity(depth),
        plan,
        next: 0,
        written: 0,
    };
    let result = pump.run(progress, interrupt);
    buffers.append(&mut pump.idle);
    buffers
        .extend(pump.read.drain(..).chain(pump.wrote.drain(..)).filter_map(|completion| completion.buffer));
    pump.source.drain(buffers);
    pump.destination.drain(buffers);
    result?;
    let flush = pump.destination.sync()?;
    Ok(PumpStats {
        bytes: pump.written,
        elapsed: began.elapsed(),
        flush,
        reads: pump.source.stats().reads.clone(),
        writes: pump.destination.stats().writes.clone(),
    })
}

impl<B: DataBuffer> Pump<'_, B> {
    fn run(&mut self, progress: &Progress, interrupt: &Interrupt) -> Result<(), EngineError> {
        while self.written < self.plan.total {
            if interrupt.is_raised() {
                return Err(EngineError::Interrupted);
            }
            self.start_reads()?;
            let mut completed = self.destination.collect(false, |write| self.wrote.push(write))?;
            completed += self.source.collect(false, |read| self.read.push(read))?;
            if completed == 0 {
                // Both targets make progress by themselves; waiting for one delays the other by one request at most.
                if self.destination.in_flight() > 0 {
                    self.destination.collect(true, |write| self.wrote.push(write))?;
                } else if self.source.in_flight() > 0 {
                    self.source.collect(true, |read| self.read.push(read))?;
                } else {
                    return Err(EngineError::NoBuffers);
                }
            }
            self.process(progress)?;
        }
        Ok(())
    }

    /// Reads into all idle buffers, as one batch.
    fn start_reads(&mut self) -> Result<(), EngineError> {
        let mut reads = Vec::new();
        while self.next < self.plan.total {
            let Some(buffer) = self.idle.pop() else { break };
            let offset = self.next;
            let len = usize::try_from(self.plan.total - offset).unwrap_or(usize::MAX).min(self.plan.block);
            reads.push(Request { io: Io::new(IoDirection::Read, offset, len), buffer });
            self.next += len as u64;
        }
        self.source.submit_many(reads).map_err(|rejected| {
            self.idle.extend(rejected.buffers);
            (*rejected.error).into()
        })
    }

    /// Handles all completions, so that no buffer is lost, and returns the first error.
    fn process(&mut self, progress: &Progress) -> Result<(), EngineError> {
        let mut first = Ok(());
        while let Some(write) = self.wrote.pop() {
            self.idle.extend(write.buffer);
            match write.result {
                Ok(len) => {
                    self.written += len as u64;
                    progress.add(len as u64);
                }
                Err(error) => first = first.and(Err(error.into())),
            }
        }
        while let Some(read) = self.read.pop() {
            let written = self.write(read, first.is_ok());
            first = first.and(written);
        }
        first
    }

    /// Writes what was read, unless the pump has failed.
    fn write(&mut self, read: Completion<B>, continues: bool) -> Result<(), EngineError> {
        let Completion { io, buffer, result } = read;
        let Some(mut buffer) = buffer else { return result.map(|_| ()).map_err(Into::into) };
        let complete = match result {
            Ok(got) if got < io.len => Err(EngineError::SourceEnded {
                name: self.source.info().name.clone(),
                at: io.offset + got as u64,
                expected: self.plan.total,
            }),
            other => other.map_err(Into::into),
        };
        let padding = io.len.next_multiple_of(self.destination.info().block) - io.len;
        let ready = complete.and_then(|_| Ok(buffer.zero(io.len, padding)?));
        if !continues || ready.is_err() {
            self.idle.push(buffer);
            return ready;
        }
        let submitted = self.destination.submit(IoDirection::Write, io.offset, io.len, buffer);
        submitted.map_err(|rejected| self.rejected(rejected))
    }

    fn rejected(&mut self, rejected: SubmitError<B>) -> EngineError {
        self.idle.extend(rejected.buffer);
        rejected.error.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::fake::{Fake, Fault};

    fn data(len: usize) -> Vec<u8> {
        (0u8..=250).cycle().take(len).collect()
    }

    fn buffers(depth: usize, block: usize) -> Vec<Vec<u8>> {
        vec![vec![0xcc; block.next_multiple_of(4096)]; depth]
    }

    fn execute(
        from: &mut Fake,
        to: &mut Fake,
        plan: Plan,
        buffers: &mut Vec<Vec<u8>>,
    ) -> Result<PumpStats, EngineError> {
        pump(from, to, plan, buffers, &Progress::hidden(), &Interrupt::default())
    }

    #[test]
    fn every_size_is_copied_in_any_order_of_completion() {
        for len in [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536, 100_003] {
            for (block, depth) in [(512, 1), (512, 7), (4096, 3), (65_536, 64)] {
                let mut from = Fake::new(data(len), 1);
                let mut to = Fake::new(Vec::new(), 512).grows();
                let mut buffers = buffers(depth, block);
                let plan = Plan { total: len as u64, block };
                let stats = execute(&mut from, &mut to, plan, &mut buffers).unwrap();
                assert_eq!(stats.bytes, len as u64);
                assert_eq!(stats.writes.requests, len.div_ceil(block) as u64);
                assert_eq!(stats.reads.queueing.summary(&[]).count, stats.reads.requests);
                assert_eq!(to.data.len(), len.next_multiple_of(512));
                assert_eq!(to.data[..len], from.data[..]);
                assert!(to.data[len..].iter().all(|&byte| byte == 0));
                assert!(to.synced && buffers.len() == depth);
                assert!(from.peak <= depth && to.peak <= depth);
            }
        }
    }

    #[test]
    fn a_truncated_source_is_reported_with_its_end() {
        let mut from = Fake::new(data(100_000), 1);
        from.shrink = Some((5, 6000));
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let error =
            execute(&mut from, &mut to, Plan { total: 100_000, block: 4096 }, &mut buffers).unwrap_err();
        assert!(
            matches!(error, EngineError::SourceEnded { expected: 100_000, at, .. } if at >= 6000),
            "{error:?}"
        );
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn a_failure_anywhere_returns_all_buffers() {
        for fault in [Fault::Fail, Fault::Reject, Fault::Quarantine] {
            for at in [1, 2, 9, 20] {
                for side in 0..2 {
                    let mut from = Fake::new(data(100_000), 1);
                    let mut to = Fake::new(Vec::new(), 512).grows();
                    [&mut from, &mut to][side].fault = Some((at, fault));
                    let mut buffers = buffers(4, 4096);
                    let plan = Plan { total: 100_000, block: 4096 };
                    let error = execute(&mut from, &mut to, plan, &mut buffers).unwrap_err();
                    assert!(matches!(error, EngineError::Target(_)), "{fault:?} {at} {side}: {error:?}");
                    let lost = usize::from(fault == Fault::Quarantine);
                    assert_eq!(buffers.len(), 4 - lost, "{fault:?} {at} {side}");
                    assert!(from.in_flight.is_empty() && to.in_flight.is_empty() && !to.synced);
                }
            }
        }
    }

    #[test]
    fn an_interrupt_returns_all_buffers() {
        let mut from = Fake::new(data(100_000), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let interrupt = Interrupt::default();
        interrupt.raise();
        let plan = Plan { total: 100_000, block: 4096 };
        let error =
            pump(&mut from, &mut to, plan, &mut buffers, &Progress::hidden(), &interrupt).unwrap_err();
        assert!(matches!(error, EngineError::Interrupted));
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn a_pump_without_buffers_fails_instead_of_hanging() {
        let mut from = Fake::new(data(10), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let error = execute(&mut from, &mut to, Plan { total: 10, block: 512 }, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, EngineError::NoBuffers));
    }
}
