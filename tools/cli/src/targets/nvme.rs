//! A namespace of an NVMe controller. A buffer moves into a mapping, with it into a command, and
//! out of both again: when the command has completed, the mapping is revoked, and the buffer
//! returns once no device can reach it.

mod release;

use super::target::{
    Completion, Io, IoDirection, RejectedBatch, Request, SubmitError, Target, TargetError,
    TargetInfo, submit_each,
};
use crate::args::Protect;
use crate::signal::Interrupt;
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::dma_pool::{ChunkSource, DmaPoolStats};
use pinfold_core::domain::{Domain, DomainLocal, MapError, Pinned, Revoked};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    self, CommandError, Controller, ControllerStats, Namespace, PollError, Queue, QueueStats,
    Rejected, Vector,
};
use release::{Attempt, Command, Finished, Held, Mapped, Outcome, Quarantine};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The largest request.
pub(crate) const MAX_TRANSFER: usize = 64 << 20;
/// How long a wait lasts before the caller checks for a signal.
const WAIT_LIMIT: Duration = Duration::from_millis(50);
/// How long a buffer is held for its flush before its request ends with an error.
pub(crate) const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// The number of consecutive polls of a wait without an interrupt before it yields to other
/// threads.
const SPINS: u32 = 64;
/// How often a wait with an interrupt yields to other threads before it sleeps. A sleep and its
/// wake-up delay a request by more than these yields together; and what is completed while others
/// run returns as one batch.
const YIELDS: u32 = 4;
/// How long an event loop polls for a flush before it sleeps for as long between two polls.
const FLUSH_POLLS: Duration = Duration::from_millis(1);
/// The pause between two polls for the flush of [`Target::sync`], without an interrupt.
const FLUSH_PAUSE: Duration = Duration::from_micros(50);
/// A doorbell submits at most this many requests, so that the controller has work while more are
/// prepared.
const BATCH: usize = 32;

/// The error of the first flush that may have lost data, for all queues of a namespace. From then
/// on no flush of this run succeeds: another queue's data may be what was lost.
pub(crate) type LostData = Arc<OnceLock<CommandError>>;

/// The parts that a namespace's queue is created from.
pub(crate) struct NvmeOptions<'d, R: Registers, S: ChunkSource + Clone> {
    /// The address space of the buffers.
    pub(crate) domain: &'d Domain,
    /// When the controller can reach them.
    pub(crate) protect: Protect,
    /// The controller.
    pub(crate) controller: Controller<R, S>,
    /// Its namespace.
    pub(crate) namespace: Namespace,
    /// How many requests may be in flight.
    pub(crate) depth: usize,
    /// The interrupt that a wait sleeps for; without one it polls.
    pub(crate) vector: Option<Vector>,
    /// How long a buffer is held for its flush: normally [`FLUSH_LIMIT`].
    pub(crate) flush_limit: Duration,
}

/// The statistics of a namespace's queue.
#[derive(Clone, Debug)]
pub(crate) struct NvmeStats {
    /// The target's name.
    pub(crate) name: String,
    /// How many queues are counted.
    pub(crate) queues: u64,
    /// Whether a wait sleeps until an interrupt.
    pub(crate) by_interrupt: bool,
    /// The driver's figures for the queue.
    pub(crate) queue: QueueStats,
    /// The driver's figures for the controller.
    pub(crate) controller: ControllerStats,
}

impl NvmeStats {
    /// Adds another queue of the same controller.
    pub(crate) fn add(&mut self, other: &Self) {
        self.queues += other.queues;
        self.queue = self.queue.merged(other.queue);
    }
}

/// A namespace as a target.
pub(crate) struct NvmeTarget<B: Pinned, R: Registers, S: ChunkSource + Clone> {
    info: TargetInfo,
    /// Maps for the thread that drives this target.
    domain: DomainLocal,
    protect: Protect,
    flush_limit: Duration,
    namespace: Namespace,
    /// The requests at the controller; the index is the driver's tag.
    in_flight: Vec<Option<Command<B>>>,
    /// Requests whose command has completed, until their mappings are revoked.
    completed: Vec<Finished<B>>,
    held: VecDeque<Held<B>>,
    /// Both empty between two calls: the mappings and the requests that one flush ends.
    revoked: Vec<Revoked<B>>,
    requests_of_flush: Vec<(Io, Result<usize, TargetError>)>,
    /// Buffers of commands that did not complete: the controller may still reach them.
    quarantined: Vec<Quarantine<B>>,
    /// Whether the controller writes zeroes without a payload.
    writes_zeroes: bool,
    lost: LostData,
    /// The tags of the requests since the last doorbell.
    unsubmitted: Vec<usize>,
    queue: Queue<R, S>,
    controller: Controller<R, S>,
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<B, R, S> {
    /// Creates a queue for a namespace.
    pub(crate) fn new(name: String, options: NvmeOptions<'_, R, S>) -> Result<Self, driver::Error> {
        let NvmeOptions { domain, protect, controller, namespace, depth, vector, flush_limit } =
            options;
        let queue = match vector {
            None => controller.create_queue(depth)?,
            Some(vector) => controller.create_queue_with(depth, vector)?,
        };
        let block = namespace.block_bytes as usize;
        let identity = controller.identify();
        let info = TargetInfo {
            name,
            capacity: Some(namespace.bytes()),
            block,
            alignment: block,
            max_depth: controller.max_depth(),
            max_transfer: MAX_TRANSFER,
            no_trim: (!identity.can_discard)
                .then_some("the controller has no Dataset Management command (ONCS bit 2)"),
            // The controller may ignore a deallocation; DLFEAT only says what it returns for blocks
            // that it has deallocated.
            trim_zeroes: false,
        };
        Ok(Self {
            info,
            domain: domain.local(),
            protect,
            flush_limit,
            namespace,
            in_flight: std::iter::repeat_with(|| None).take(depth).collect(),
            completed: Vec::with_capacity(depth),
            held: VecDeque::with_capacity(depth),
            revoked: Vec::with_capacity(depth),
            requests_of_flush: Vec::with_capacity(depth),
            quarantined: Vec::new(),
            writes_zeroes: identity.can_write_zeroes,
            lost: LostData::default(),
            unsubmitted: Vec::with_capacity(depth),
            queue,
            controller,
        })
    }

    /// Shares what is known of flushes with the other queues of the namespace.
    pub(crate) fn sharing(self, lost: &LostData) -> Self {
        Self { lost: lost.clone(), ..self }
    }

    /// Returns the outcome of a flush that the controller completed with `result`.
    fn flushed(&self, result: Result<(), CommandError>) -> Result<(), CommandError> {
        if let Err(CommandError::Status(status)) = result
            && !status.is_not_executed()
        {
            let _ = self.lost.set(CommandError::Status(status));
        }
        result.and_then(|()| self.lost.get().cloned().map_or(Ok(()), Err))
    }

    /// Returns what the controller and its driver did.
    pub(crate) fn stats(&self) -> NvmeStats {
        NvmeStats {
            name: self.info.name.clone(),
            queues: 1,
            by_interrupt: self.queue.has_interrupt(),
            queue: self.queue.stats(),
            controller: self.controller.stats(),
        }
    }

    /// Returns the figures of the driver's DMA pool.
    pub(crate) fn pool_stats(&self) -> DmaPoolStats {
        self.controller.list_pool()
    }

    fn poll_error(&self, error: PollError) -> TargetError {
        TargetError::Poll { target: self.info.name.clone(), error }
    }

    /// Submits `buffer` to the driver as `io` says.
    fn start(&mut self, io: Io, buffer: Mapped<B>) -> Result<(), Rejected<Mapped<B>>> {
        let (queue, nsid) = (&mut self.queue, self.namespace.nsid);
        let slba = io.offset >> self.namespace.block_bytes.trailing_zeros();
        let blocks = u32::try_from(io.len.div_ceil(self.info.block)).unwrap_or(u32::MAX);
        let attempt = match buffer {
            Mapped::Read(buffer) => queue
                .read(nsid, slba, blocks, buffer)
                .map(Attempt::Read)
                .map_err(|Rejected { payload, reason }| Rejected {
                    payload: Mapped::Read(payload),
                    reason,
                }),
            Mapped::Write(buffer) => queue
                .write(nsid, slba, blocks, buffer)
                .map(Attempt::Write)
                .map_err(|Rejected { payload, reason }| Rejected {
                    payload: Mapped::Write(payload),
                    reason,
                }),
            Mapped::Not(buffer) => {
                let submitted = match io.direction {
                    IoDirection::Flush => queue.flush(nsid),
                    IoDirection::Write => queue.write_zeroes(nsid, slba, blocks),
                    _ => queue.discard(nsid, slba, blocks),
                };
                match submitted {
                    Ok(in_flight) => Ok(Attempt::WithoutData(in_flight, buffer)),
                    Err(Rejected { reason, .. }) => {
                        Err(Rejected { payload: Mapped::Not(buffer), reason })
                    }
                }
            }
        }?;
        let tag = attempt.tag();
        if let Some(place) = self.in_flight.get_mut(tag) {
            *place = Some(Command { io, attempt });
        }
        self.unsubmitted.push(tag);
        Ok(())
    }

    /// Rings the doorbell for what was queued since the last one.
    fn ring_doorbell(&mut self) {
        if self.unsubmitted.is_empty() {
            return;
        }
        self.queue.ring_doorbell();
        let now = Instant::now();
        for tag in self.unsubmitted.drain(..) {
            if let Some(Some(command)) = self.in_flight.get_mut(tag) {
                command.io.queued = now;
            }
        }
    }

    /// Takes the completions of the controller.
    fn reap(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), PollError> {
        let mut failed = Ok(());
        loop {
            let completion = match self.queue.poll() {
                Ok(Some(completion)) => completion,
                Ok(None) => return failed,
                // A controller that failed completes nothing. Once it has been seen disabled, all
                // that was in flight completes with an error, and the buffers are safe.
                Err(error) => {
                    // Logged now, because disabling a device that has gone away can take long.
                    tracing::warn!("{}: {error}", self.info.name);
                    self.controller.disable().map_err(|_| error)?;
                    failed = Err(error);
                    continue;
                }
            };
            let tag = completion.tag();
            let Some(Command { io, attempt }) = self.in_flight.get_mut(tag).and_then(Option::take)
            else {
                continue;
            };
            match attempt.finish(completion) {
                Outcome::Completed(buffer, result) => self.finish(io, buffer, result),
                Outcome::TimedOut(buffer) => {
                    let buffer =
                        buffer.map_err(|quarantine| self.quarantined.push(quarantine)).ok();
                    let error =
                        TargetError::Timeout { target: self.info.name.clone(), io: Box::new(io) };
                    completed.push(Completion { io, buffer, result: Err(error) });
                }
                Outcome::Foreign(attempt) => {
                    if let Some(place) = self.in_flight.get_mut(tag) {
                        *place = Some(Command { io, attempt });
                    }
                }
            }
        }
    }

    /// Has a request whose command has completed wait for its revocation.
    fn finish(&mut self, io: Io, buffer: Mapped<B>, result: Result<(), CommandError>) {
        let result = if io.direction == IoDirection::Flush { self.flushed(result) } else { result };
        let error = |error| TargetError::Command {
            target: self.info.name.clone(),
            io: Box::new(io),
            error,
        };
        let result = result.map(|()| io.len).map_err(error);
        self.completed.push(Finished { io, buffer, result });
    }

    /// Pauses between two polls of a wait; `polls` counts from 1. No interrupt reports the end of a
    /// flush, which takes about as long as a yield.
    fn pause(&mut self, polls: u32) {
        match self.queue.has_interrupt() {
            true if polls > YIELDS && self.held.is_empty() => self.queue.sleep(WAIT_LIMIT),
            false if polls < SPINS => std::hint::spin_loop(),
            _ => std::thread::yield_now(),
        }
    }

    fn step(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        self.ring_doorbell();
        let reaped = self.reap(completed).map_err(|error| self.poll_error(error));
        self.revoke(completed);
        self.release(completed);
        reaped
    }
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<B, R, S> {
    /// Queues reads in their order. All of their buffers are mapped, at contiguous addresses up to
    /// 1 MiB, or none.
    fn read_many(&mut self, requests: Vec<Request<B>>) -> Result<(), RejectedBatch<B>> {
        let (ios, buffers): (Vec<Io>, Vec<B>) =
            requests.into_iter().map(|Request { io, buffer }| (io, buffer)).unzip();
        let mapped = self.domain.map_many(buffers, FromDevice).map_err(|failed| RejectedBatch {
            queued: 0,
            buffers: failed.payloads,
            error: Box::new(TargetError::Domain {
                target: self.info.name.clone(),
                error: failed.error,
            }),
        })?;
        let mut reads = ios.into_iter().zip(mapped);
        let mut queued = 0;
        while let Some((io, buffer)) = reads.next() {
            if let Err(SubmitError { buffer, error }) = self.queue_up(io, Mapped::Read(buffer)) {
                let unmapped = reads.filter_map(|(_, buffer)| self.domain.unmap(buffer).ok());
                let buffers = buffer.into_iter().chain(unmapped).collect();
                return Err(RejectedBatch { queued, buffers, error: Box::new(error) });
            }
            queued += 1;
        }
        Ok(())
    }

    /// Queues a request whose buffer is mapped.
    fn queue_up(&mut self, io: Io, buffer: Mapped<B>) -> Result<(), SubmitError<B>> {
        self.start(io, buffer).map_err(|Rejected { payload, reason }| SubmitError {
            buffer: payload.unmap(&mut self.domain).ok(),
            error: TargetError::Rejected { target: self.info.name.clone(), reason },
        })?;
        // One doorbell for many: the next poll or wait rings for the rest.
        if self.unsubmitted.len() >= BATCH {
            self.ring_doorbell();
        }
        Ok(())
    }
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> Target<B> for NvmeTarget<B, R, S> {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn submit(&mut self, Request { io, buffer }: Request<B>) -> Result<(), SubmitError<B>> {
        let target = || self.info.name.clone();
        let domain = &mut self.domain;
        let refused = |MapError { payload, error, .. }| SubmitError {
            buffer: payload,
            error: TargetError::Domain { target: target(), error },
        };
        let buffer = match io.direction {
            IoDirection::Read => Mapped::Read(domain.map(buffer, FromDevice).map_err(refused)?),
            IoDirection::Write if io.zeroes && self.writes_zeroes => Mapped::Not(buffer),
            IoDirection::Write => Mapped::Write(domain.map(buffer, ToDevice).map_err(refused)?),
            IoDirection::Trim | IoDirection::Flush => Mapped::Not(buffer),
        };
        self.queue_up(io, buffer)
    }

    fn submit_many(&mut self, requests: Vec<Request<B>>) -> Result<(), RejectedBatch<B>> {
        if requests.len() < 2
            || requests.iter().any(|request| request.io.direction != IoDirection::Read)
        {
            return submit_each(requests, |request| self.submit(request));
        }
        self.read_many(requests)
    }

    fn poll(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        self.step(completed)
    }

    fn wait(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        let until = Instant::now() + WAIT_LIMIT;
        let mut polls = 0;
        loop {
            let held = self.held.len();
            self.step(completed)?;
            // Also when the controller has room again: the caller may have more requests and other
            // buffers.
            if !completed.is_empty() || self.held.len() > held || Instant::now() >= until {
                return Ok(());
            }
            polls += 1;
            if polls == SPINS && self.in_flight.iter().all(Option::is_none) {
                // Nothing but flushes can complete.
                self.quiesce(WAIT_LIMIT, completed);
            } else {
                self.pause(polls);
            }
        }
    }

    fn held(&self) -> usize {
        self.held.len()
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.interrupt_fd()
    }

    fn arm(&mut self, completed: &mut Vec<Completion<B>>) -> Duration {
        self.ring_doorbell();
        let wait = self.queue.arm_interrupt();
        let wait = if self.queue.has_interrupt() { wait } else { Duration::ZERO };
        // No descriptor reports the end of a flush, which normally takes microseconds.
        let Some(held) = self.held.front() else { return wait };
        let held = held.since.elapsed();
        if held >= self.flush_limit {
            self.quiesce(WAIT_LIMIT, completed);
        }
        if held < FLUSH_POLLS || held >= self.flush_limit {
            Duration::ZERO
        } else {
            FLUSH_POLLS.min(wait)
        }
    }

    fn abandon_retries(&mut self) {
        self.queue.abandon_retries();
    }

    fn abandon_retries_of(&mut self, given_up: &mut dyn FnMut(&Io) -> bool) {
        for Command { io, attempt } in self.in_flight.iter().flatten() {
            if given_up(io) {
                attempt.abandon_retries(&mut self.queue);
            }
        }
    }

    fn sync(&mut self, interrupt: &Interrupt) -> Result<(), TargetError> {
        let target = || self.info.name.clone();
        let rejected = |Rejected { reason, .. }: Rejected<()>| TargetError::Rejected {
            target: target(),
            reason,
        };
        let in_flight = self.queue.flush(self.namespace.nsid).map_err(rejected)?;
        let completion = loop {
            if interrupt.is_raised() {
                self.queue.abandon_retries();
            }
            match self.queue.poll().map_err(|error| self.poll_error(error))? {
                Some(completion) => break Some(completion),
                None if self.queue.in_flight() == 0 => break None,
                None if self.queue.has_interrupt() => self.queue.sleep(WAIT_LIMIT),
                None => std::thread::sleep(FLUSH_PAUSE),
            }
        };
        match completion {
            None => Err(TargetError::Flush { target: target(), error: None }),
            Some(completion) => match in_flight.finish(completion) {
                driver::Outcome::Completed { result, .. } => {
                    let error = |error| TargetError::Flush { target: target(), error: Some(error) };
                    self.flushed(result).map_err(error)
                }
                driver::Outcome::TimedOut(_) | driver::Outcome::Foreign(..) => {
                    Err(TargetError::Flush { target: target(), error: None })
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
