//! A workload that knows what every block must hold. It writes the whole region, then reads and writes anywhere in it
//! in requests of many lengths, and reads all of it again at the end; every byte read is compared. What a block holds
//! follows from where it is and how often it was written, so that a block that was lost, written twice, put in another's
//! place or mixed from two writes shows.
//!
//! Its memory does not grow with the region ([`COUNTED`]), and each of the three parts, and the hash at the end, lasts as
//! long as the runtime at most.

mod ledger;

pub(crate) use ledger::COUNTED;

use super::engine::{Outcome, Workload};
use crate::args::Rw;
use crate::copy::digest::Hash;
use crate::copy::error::PumpError;
use crate::lane::{Landed, Worker};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::{Bytes, IoDirection, Request, Target};
use ledger::{Ledger, Run};
use std::time::{Duration, Instant};

/// What was found to be right.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Verified {
    /// Requests of the middle part, anywhere in the region.
    pub(crate) requests: u64,
    /// Bytes that were written first: all of the region, or as far as the first part came in its time.
    pub(crate) laid_out_bytes: u64,
    /// Bytes from the start that were read again at the end.
    pub(crate) read_back_bytes: u64,
    /// Bytes that were read and compared, in all parts.
    pub(crate) compared_bytes: u64,
    /// The SHA-256 of what the region must hold now, where one job checked it, and was in time for all of it.
    pub(crate) sha256: Option<Hash>,
    /// The same of the part of each job, where there were several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) parts: Vec<Hash>,
}

impl Verified {
    /// What another job found to be right in the part behind is added.
    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.laid_out_bytes += other.laid_out_bytes;
        self.read_back_bytes += other.read_back_bytes;
        self.compared_bytes += other.compared_bytes;
        self.parts.extend(self.sha256.take());
        self.parts.extend(other.sha256);
    }
}

/// Which requests come next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Every block is written, from first to last.
    LayOut,
    /// Reads and writes anywhere.
    Anywhere,
    /// Every block is read, from first to last.
    ReadBack,
}

/// One run of the workload: `workload.block` bytes are the most of one request, and `least` (a multiple of the
/// target's block, as it is) the fewest.
struct Check<'a, 't, B> {
    lane: Worker<'t, B>,
    workload: &'a Workload,
    /// In blocks of the target.
    lengths: (usize, usize),
    ledger: &'a mut Ledger,
    flying: Vec<Option<(IoDirection, Run)>>,
    idle: Vec<(usize, B)>,
    landed: Vec<Landed<B>>,
    compared: u64,
}

/// Runs `workload` and checks it; `least` bytes are the fewest of one request, and `counted` blocks may be written more
/// than once. The region is `workload.blocks` blocks of the target. The buffers are in `buffers` again when this returns, except those that had to be quarantined.
pub(crate) fn run<B: Bytes>(
    target: &mut dyn Target<B>,
    (workload, least, counted): (&Workload, usize, u64),
    buffers: &mut Vec<B>,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<(Outcome, Verified), PumpError> {
    // What is checked as one.
    let block = target.info().unit;
    let lengths = ((least / block).max(1), (workload.block / block).max(1));
    let mut ledger = Ledger::new(workload.blocks, block, counted);
    let (mut compared_bytes, mut read_back) = (0, 0);
    let mut middle = None;
    for part in [Part::LayOut, Part::Anywhere, Part::ReadBack] {
        let slots = buffers.len();
        let mut check = Check {
            lane: Worker::new(&mut *target, slots),
            workload,
            lengths,
            ledger: &mut ledger,
            flying: vec![None; slots],
            idle: buffers.drain(..).enumerate().collect(),
            landed: Vec::with_capacity(slots),
            compared: 0,
        };
        let began = Instant::now();
        let result = check.part(part, began, progress, interrupt);
        let elapsed = began.elapsed();
        check.lane.drain(buffers);
        buffers.extend(check.idle.drain(..).map(|(_, buffer)| buffer));
        buffers.extend(check.landed.drain(..).filter_map(|over| over.buffer));
        let reached = result?;
        compared_bytes += check.compared;
        match part {
            Part::LayOut => ledger.cut(),
            Part::Anywhere => middle = Some(check.outcome(elapsed)),
            Part::ReadBack => read_back = reached,
        }
    }
    let outcome = middle.ok_or(PumpError::NoBuffers)?;
    let requests = outcome.reads.requests + outcome.writes.requests;
    let laid_out_bytes = ledger.laid_bytes();
    let read_back_bytes = read_back * block as u64;
    let is_whole = laid_out_bytes == workload.blocks * block as u64 && read_back_bytes == laid_out_bytes;
    let began = Instant::now();
    let ended = || interrupt.asked() || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime);
    let sha256 = if is_whole { ledger.hash(ended) } else { None };
    if interrupt.asked() {
        return Err(PumpError::Interrupted);
    }
    let parts = Vec::new();
    Ok((outcome, Verified { requests, laid_out_bytes, read_back_bytes, compared_bytes, sha256, parts }))
}

impl<B: Bytes> Check<'_, '_, B> {
    fn outcome(&self, elapsed: Duration) -> Outcome {
        let figures = |way| self.lane.figures(way).clone();
        Outcome { elapsed, reads: figures(IoDirection::Read), writes: figures(IoDirection::Write) }
    }

    /// Does one part, at least one request of it, and returns up to which block it came.
    fn part(
        &mut self,
        part: Part,
        began: Instant,
        progress: &Progress,
        interrupt: &Interrupt,
    ) -> Result<u64, PumpError> {
        let (mut made, mut at) = (0, 0);
        loop {
            if interrupt.asked() {
                return Err(PumpError::Interrupted);
            }
            let workload = self.workload;
            let over = |made| {
                let late = || workload.runtime.is_some_and(|runtime| began.elapsed() >= runtime);
                (part == Part::Anywhere && made >= workload.requests) || (made > 0 && late())
            };
            let mut ended = over(made);
            while !ended && !self.idle.is_empty() {
                let Some((way, run)) = self.next(part, &mut at) else {
                    ended = part != Part::Anywhere;
                    break;
                };
                self.begin(way, run)?;
                made += 1;
                ended = over(made);
            }
            if self.lane.in_flight() == 0 {
                return if ended { Ok(at) } else { Err(PumpError::NoBuffers) };
            }
            let (lane, landed) = (&mut self.lane, &mut self.landed);
            let mut first = lane.collect(true, |over| landed.push(over)).map(|_| ()).map_err(PumpError::from);
            while let Some(over) = self.landed.pop() {
                let taken = self.take_back(over, progress);
                first = first.and(taken);
            }
            first?;
        }
    }

    /// The next request; `None` when the part is over or, anywhere, everything that was tried is being used.
    fn next(&mut self, part: Part, at: &mut u64) -> Option<(IoDirection, Run)> {
        let way = match part {
            Part::Anywhere => {
                let way = self.way();
                return self.ledger.anywhere(way, self.lengths).map(|run| (way, run));
            }
            Part::LayOut => IoDirection::Write,
            Part::ReadBack => IoDirection::Read,
        };
        let run = self.ledger.from(*at, self.lengths.1)?;
        *at += run.blocks as u64;
        Some((way, run))
    }

    fn way(&mut self) -> IoDirection {
        match self.workload.rw {
            Rw::Read | Rw::Randread => IoDirection::Read,
            Rw::Write | Rw::Randwrite => IoDirection::Write,
            Rw::Randrw if self.ledger.random(100) < u64::from(self.workload.reads_in_100) => {
                IoDirection::Read
            }
            Rw::Randrw => IoDirection::Write,
        }
    }

    fn begin(&mut self, way: IoDirection, run: Run) -> Result<(), PumpError> {
        let Some((slot, mut buffer)) = self.idle.pop() else { return Err(PumpError::NoBuffers) };
        let prepared = match way {
            IoDirection::Read => self.ledger.spoil(run, &mut buffer),
            IoDirection::Write => self.ledger.write(run, &mut buffer),
        };
        if let Err(error) = prepared {
            self.idle.push((slot, buffer));
            return Err(error.into());
        }
        let (offset, len) = self.ledger.bytes(run);
        let idle = &mut self.idle;
        self.lane.submit(Request { way, offset, len, slot, buffer }).map_err(|refused| {
            idle.extend(refused.buffer.map(|buffer| (slot, buffer)));
            PumpError::from(refused.error)
        })?;
        self.ledger.take(way, run);
        if let Some(flying) = self.flying.get_mut(slot) {
            *flying = Some((way, run));
        }
        Ok(())
    }

    fn take_back(&mut self, over: Landed<B>, progress: &Progress) -> Result<(), PumpError> {
        let Landed { slot, offset, len, buffer, result, .. } = over;
        let flown = self.flying.get_mut(slot).and_then(Option::take);
        if let Some((_, run)) = flown {
            self.ledger.give_back(run);
        }
        let looked = match (&result, flown, &buffer) {
            (Ok(got), Some((IoDirection::Read, run)), Some(buffer)) if *got >= len => {
                self.compared += len as u64;
                self.ledger.compare(run, buffer, self.lane.name())
            }
            _ => Ok(()),
        };
        self.idle.extend(buffer.map(|buffer| (slot, buffer)));
        looked?;
        let got = result?;
        if got < len {
            let (name, expected) = (self.lane.name().to_owned(), offset + len as u64);
            return Err(PumpError::SourceEnded { name, at: offset + got as u64, expected });
        }
        progress.add(got as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
