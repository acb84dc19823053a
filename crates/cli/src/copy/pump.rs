//! Bytes from one target to another: each buffer goes round `idle → reading → writing → idle`, as many at a time as
//! there are buffers, in whatever order the targets complete.

use super::error::PumpError;
use crate::lane::{Figures, Landed, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::{Bytes, IoDirection, Request, SubmitError, Target};
use std::time::{Duration, Instant};

/// What is to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// How many bytes, from offset 0 of both targets.
    pub(crate) total: u64,
    /// How many of them at a time.
    pub(crate) block: usize,
}

/// What moving them took.
#[derive(Debug)]
pub(crate) struct Phase {
    /// How many bytes arrived.
    pub(crate) bytes: u64,
    /// From the first request to the end of the flush.
    pub(crate) elapsed: Duration,
    /// Of that, the flush.
    pub(crate) flush: Duration,
    /// The reads from the one target.
    pub(crate) reads: Figures,
    /// The writes to the other.
    pub(crate) writes: Figures,
}

struct Pump<'t, B> {
    source: Worker<'t, B>,
    sink: Worker<'t, B>,
    /// Buffers with the slots that they use.
    idle: Vec<(usize, B)>,
    /// Reads and writes that are over and not yet looked at.
    read: Vec<Landed<B>>,
    wrote: Vec<Landed<B>>,
    plan: Plan,
    next: u64,
    written: u64,
}

/// Moves `plan.total` bytes and flushes `to`. The buffers, each of `plan.block` bytes at least, are in `buffers` again
/// when this returns, whether it succeeds or not, except those that had to be quarantined.
pub(crate) fn pump<B: Bytes>(
    from: &mut dyn Target<B>,
    to: &mut dyn Target<B>,
    plan: Plan,
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Phase, PumpError> {
    let began = Instant::now();
    let slots = buffers.len();
    let mut pump = Pump {
        source: Worker::new(from, slots),
        sink: Worker::new(to, slots),
        idle: buffers.drain(..).enumerate().collect(),
        read: Vec::with_capacity(slots),
        wrote: Vec::with_capacity(slots),
        plan,
        next: 0,
        written: 0,
    };
    let result = pump.run(progress, interrupt);
    buffers.extend(pump.idle.drain(..).map(|(_, buffer)| buffer));
    buffers.extend(pump.read.drain(..).chain(pump.wrote.drain(..)).filter_map(|landed| landed.buffer));
    pump.source.drain(buffers);
    pump.sink.drain(buffers);
    result?;
    let flush = pump.sink.sync()?;
    Ok(Phase {
        bytes: pump.written,
        elapsed: began.elapsed(),
        flush,
        reads: pump.source.figures(IoDirection::Read).clone(),
        writes: pump.sink.figures(IoDirection::Write).clone(),
    })
}

impl<B: Bytes> Pump<'_, B> {
    fn run(&mut self, progress: &Progress, interrupt: &Interrupt) -> Result<(), PumpError> {
        while self.written < self.plan.total {
            if interrupt.asked() {
                return Err(PumpError::Interrupted);
            }
            self.begin_reads()?;
            let mut landed = self.sink.collect(false, |over| self.wrote.push(over))?;
            landed += self.source.collect(false, |over| self.read.push(over))?;
            if landed == 0 {
                // Both go on by themselves; to wait for one of them delays the other by one request at most.
                if self.sink.in_flight() > 0 {
                    self.sink.collect(true, |over| self.wrote.push(over))?;
                } else if self.source.in_flight() > 0 {
                    self.source.collect(true, |over| self.read.push(over))?;
                } else {
                    return Err(PumpError::NoBuffers);
                }
            }
            self.take_in(progress)?;
        }
        Ok(())
    }

    fn begin_reads(&mut self) -> Result<(), PumpError> {
        while self.next < self.plan.total {
            let Some((slot, buffer)) = self.idle.pop() else { break };
            let offset = self.next;
            let len = usize::try_from(self.plan.total - offset).unwrap_or(usize::MAX).min(self.plan.block);
            let request = Request { way: IoDirection::Read, offset, len, slot, buffer };
            match self.source.submit(request) {
                Ok(()) => self.next += len as u64,
                Err(refused) => return Err(self.refused(slot, refused)),
            }
        }
        Ok(())
    }

    /// Every buffer that has landed is put somewhere before the first error is returned.
    fn take_in(&mut self, progress: &Progress) -> Result<(), PumpError> {
        let mut first = Ok(());
        while let Some(over) = self.wrote.pop() {
            self.idle.extend(over.buffer.map(|buffer| (over.slot, buffer)));
            match over.result {
                Ok(len) => {
                    self.written += len as u64;
                    progress.add(len as u64);
                }
                Err(error) => first = first.and(Err(error.into())),
            }
        }
        while let Some(over) = self.read.pop() {
            let taken = self.write(over, first.is_ok());
            first = first.and(taken);
        }
        first
    }

    fn write(&mut self, over: Landed<B>, go_on: bool) -> Result<(), PumpError> {
        let Landed { slot, offset, len, buffer, result, .. } = over;
        let Some(mut buffer) = buffer else { return result.map(|_| ()).map_err(Into::into) };
        let ended = match result {
            Ok(got) if got < len => Err(PumpError::SourceEnded {
                name: self.source.name().to_owned(),
                at: offset + got as u64,
                expected: self.plan.total,
            }),
            other => other.map_err(Into::into),
        };
        let padding = len.next_multiple_of(self.sink.block()) - len;
        let ready = ended.and_then(|_| Ok(buffer.zero(len, padding)?));
        if !go_on || ready.is_err() {
            self.idle.push((slot, buffer));
            return ready;
        }
        let request = Request { way: IoDirection::Write, offset, len, slot, buffer };
        self.sink.submit(request).map_err(|refused| self.refused(slot, refused))
    }

    fn refused(&mut self, slot: usize, refused: SubmitError<B>) -> PumpError {
        self.idle.extend(refused.buffer.map(|buffer| (slot, buffer)));
        refused.error.into()
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

    fn go(
        from: &mut Fake,
        to: &mut Fake,
        plan: Plan,
        buffers: &mut Vec<Vec<u8>>,
    ) -> Result<Phase, PumpError> {
        pump(from, to, plan, buffers, &Progress::hidden(), &Interrupt::default())
    }

    #[test]
    fn every_size_arrives_in_whatever_order_it_completes() {
        for len in [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_536, 100_003] {
            for (block, depth) in [(512, 1), (512, 7), (4096, 3), (65_536, 64)] {
                let mut from = Fake::new(data(len), 1);
                let mut to = Fake::new(Vec::new(), 512).grows();
                let mut buffers = buffers(depth, block);
                let plan = Plan { total: len as u64, block };
                let phase = go(&mut from, &mut to, plan, &mut buffers).unwrap();
                assert_eq!(phase.bytes, len as u64);
                assert_eq!(phase.writes.requests, len.div_ceil(block) as u64);
                assert_eq!(phase.reads.queueing.summary().count, phase.reads.requests);
                assert_eq!(to.data.len(), len.next_multiple_of(512));
                assert_eq!(to.data[..len], from.data[..]);
                assert!(to.data[len..].iter().all(|&byte| byte == 0));
                assert!(to.synced && buffers.len() == depth);
                assert!(from.at_most <= depth && to.at_most <= depth);
            }
        }
    }

    #[test]
    fn a_source_that_shrinks_is_named_with_where_it_ended() {
        let mut from = Fake::new(data(100_000), 1);
        from.shrink = Some((5, 6000));
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let error = go(&mut from, &mut to, Plan { total: 100_000, block: 4096 }, &mut buffers).unwrap_err();
        assert!(
            matches!(error, PumpError::SourceEnded { expected: 100_000, at, .. } if at >= 6000),
            "{error:?}"
        );
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn a_failure_anywhere_gives_all_buffers_back() {
        for fault in [Fault::Fail, Fault::Refuse, Fault::Quarantine] {
            for at in [1, 2, 9, 20] {
                for side in 0..2 {
                    let mut from = Fake::new(data(100_000), 1);
                    let mut to = Fake::new(Vec::new(), 512).grows();
                    [&mut from, &mut to][side].fault = Some((at, fault));
                    let mut buffers = buffers(4, 4096);
                    let plan = Plan { total: 100_000, block: 4096 };
                    let error = go(&mut from, &mut to, plan, &mut buffers).unwrap_err();
                    assert!(matches!(error, PumpError::Target(_)), "{fault:?} {at} {side}: {error:?}");
                    let lost = usize::from(fault == Fault::Quarantine);
                    assert_eq!(buffers.len(), 4 - lost, "{fault:?} {at} {side}");
                    assert!(from.in_flight.is_empty() && to.in_flight.is_empty() && !to.synced);
                }
            }
        }
    }

    #[test]
    fn an_interrupt_stops_it_and_gives_all_buffers_back() {
        let mut from = Fake::new(data(100_000), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let mut buffers = buffers(4, 4096);
        let interrupt = Interrupt::default();
        interrupt.raise();
        let plan = Plan { total: 100_000, block: 4096 };
        let error =
            pump(&mut from, &mut to, plan, &mut buffers, &Progress::hidden(), &interrupt).unwrap_err();
        assert!(matches!(error, PumpError::Interrupted));
        assert_eq!((buffers.len(), to.synced), (4, false));
    }

    #[test]
    fn without_a_buffer_it_ends_instead_of_waiting_for_ever() {
        let mut from = Fake::new(data(10), 1);
        let mut to = Fake::new(Vec::new(), 512).grows();
        let error = go(&mut from, &mut to, Plan { total: 10, block: 512 }, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, PumpError::NoBuffers));
    }
}
