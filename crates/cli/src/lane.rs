//! One target and the requests that are in flight at it, with the time that each took.

use crate::latency::Histogram;
use crate::targets::{Done, IoDirection, Request, SubmitError, Target, TargetError};
use std::time::{Duration, Instant};

/// What requests of one way took and moved.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// Requests that are over and did not fail.
    pub(crate) requests: u64,
    /// Bytes that they moved.
    pub(crate) bytes: u64,
    /// From the call until the request is in the queue.
    pub(crate) queueing: Histogram,
    /// From there to the moment at which the program had the buffer again.
    pub(crate) completion: Histogram,
    /// From the call to that moment.
    pub(crate) total: Histogram,
}

impl Figures {
    /// Another queue's figures are added.
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.queueing.add(&other.queueing);
        self.completion.add(&other.completion);
        self.total.add(&other.total);
    }
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    way: IoDirection,
    offset: u64,
    len: usize,
    called: Instant,
    returned: Instant,
}

/// A request that is over, with what was asked for.
#[derive(Debug)]
pub(crate) struct Landed<B> {
    /// Its slot, which is free again.
    pub(crate) slot: usize,
    /// Where.
    pub(crate) offset: u64,
    /// How many bytes were asked for.
    pub(crate) len: usize,
    /// The memory again, unless it had to be quarantined.
    pub(crate) buffer: Option<B>,
    /// How many bytes were moved, or why not.
    pub(crate) result: Result<usize, TargetError>,
}

/// A target, its requests in flight, and their times.
pub(crate) struct Worker<'t, B> {
    target: &'t mut dyn Target<B>,
    flights: Vec<Option<Flight>>,
    in_flight: usize,
    done: Vec<Done<B>>,
    reads: Figures,
    writes: Figures,
}

impl<'t, B> Worker<'t, B> {
    /// A lane to `target` with slots 0 to `slots` - 1.
    pub(crate) fn new(target: &'t mut dyn Target<B>, slots: usize) -> Self {
        Self {
            target,
            flights: vec![None; slots],
            in_flight: 0,
            done: Vec::with_capacity(slots),
            reads: Figures::default(),
            writes: Figures::default(),
        }
    }

    /// How many requests are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The unit of the target's offsets, bytes.
    pub(crate) fn block(&self) -> usize {
        self.target.info().block
    }

    /// The target's name.
    pub(crate) fn name(&self) -> &str {
        &self.target.info().name
    }

    /// What requests of one way took.
    pub(crate) fn figures(&self, way: IoDirection) -> &Figures {
        match way {
            IoDirection::Read => &self.reads,
            IoDirection::Write => &self.writes,
        }
    }

    fn figures_mut(&mut self, way: IoDirection) -> &mut Figures {
        match way {
            IoDirection::Read => &mut self.reads,
            IoDirection::Write => &mut self.writes,
        }
    }

    /// Begins a request.
    pub(crate) fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>> {
        let Request { way, offset, len, slot, .. } = request;
        let called = Instant::now();
        self.target.submit(request)?;
        let returned = Instant::now();
        self.figures_mut(way).queueing.record(returned - called);
        if let Some(flight) = self.flights.get_mut(slot) {
            *flight = Some(Flight { way, offset, len, called, returned });
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Hands what is over to `each`; waits for the first if `wait` is set and something is in flight.
    /// Returns how many it handed over.
    pub(crate) fn collect(
        &mut self,
        wait: bool,
        mut each: impl FnMut(Landed<B>),
    ) -> Result<usize, TargetError> {
        if self.in_flight == 0 {
            return Ok(0);
        }
        let mut done = std::mem::take(&mut self.done);
        let asked = if wait { self.target.wait(&mut done) } else { self.target.poll(&mut done) };
        let mut landed = 0;
        if !done.is_empty() {
            let now = Instant::now();
            for over in done.drain(..) {
                let Some(flight) = self.flights.get_mut(over.slot).and_then(Option::take) else { continue };
                self.in_flight -= 1;
                landed += 1;
                self.account(&flight, &over.result, now);
                each(Landed {
                    slot: over.slot,
                    offset: flight.offset,
                    len: flight.len,
                    buffer: over.buffer,
                    result: over.result,
                });
            }
        }
        self.done = done;
        asked.map(|()| landed)
    }

    fn account(&mut self, flight: &Flight, result: &Result<usize, TargetError>, now: Instant) {
        let Ok(bytes) = result else { return };
        let figures = self.figures_mut(flight.way);
        figures.requests += 1;
        figures.bytes += *bytes as u64;
        figures.completion.record(now - flight.returned);
        figures.total.record(now - flight.called);
    }

    /// Waits for all that is in flight and gives its buffers back; what came of it is of no interest any more.
    pub(crate) fn drain(&mut self, buffers: &mut Vec<B>) {
        while self.in_flight > 0 {
            if self.collect(true, |landed| buffers.extend(landed.buffer)).is_err() {
                return;
            }
        }
    }

    /// What was written is durable when this returns. Returns how long it took.
    pub(crate) fn sync(&mut self) -> Result<Duration, TargetError> {
        let began = Instant::now();
        self.target.sync()?;
        Ok(began.elapsed())
    }
}
