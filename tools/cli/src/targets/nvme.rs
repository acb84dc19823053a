//! A namespace of an NVMe controller. The protected request loop maps a buffer for its command, and
//! returns it once no device can reach it; in between the driver has the mapping.

use super::target::{
    Completion, Io, IoDirection, Request, SubmitError, Target, TargetError, TargetInfo,
};
use crate::args::Protect;
use crate::signal::Interrupt;
use pinfold::requests::{
    BeginError, End, Ended, Lent, Limits, NewError, Policy, Refusal, Requests, Token,
};
use pinfold_core::access::{Access, FromDevice, ToDevice};
use pinfold_core::dma_pool::{ChunkSource, DmaPoolStats};
use pinfold_core::domain::{Domain, Pinned};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    self, CommandError, Controller, ControllerStats, InFlight, Namespace, Outcome, PollError,
    Quarantined, Queue, QueueStats, Reject, Rejected, Vector,
};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The largest request.
pub(crate) const MAX_TRANSFER: usize = 64 << 20;
/// The length of a wait before the caller checks for a signal.
const WAIT_LIMIT: Duration = Duration::from_millis(50);
/// The time limit of a flush before its request ends with an error.
pub(crate) const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// How long an event loop polls for a flush before it sleeps until that has ended.
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
    /// The most requests in flight.
    pub(crate) depth: usize,
    /// The interrupt that a wait sleeps for; without one it polls.
    pub(crate) vector: Option<Vector>,
    /// The time limit of a flush: normally [`FLUSH_LIMIT`].
    pub(crate) flush_limit: Duration,
}

/// The statistics of a namespace's queue.
#[derive(Clone, Debug)]
pub(crate) struct NvmeStats {
    /// The target's name.
    pub(crate) name: String,
    /// The number of queues counted.
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

/// A request at the controller: the driver's handle of it.
enum Attempt<B: Pinned> {
    Data(Token, InFlight<Lent<B, 1>>),
    /// It moves no data.
    Bare(Token, InFlight<()>),
}

impl<B: Pinned> Attempt<B> {
    fn token(&self) -> Token {
        match self {
            Self::Data(token, _) | Self::Bare(token, _) => *token,
        }
    }

    /// Returns the driver's number of it.
    fn tag(&self) -> usize {
        match self {
            Self::Data(_, in_flight) => in_flight.tag(),
            Self::Bare(_, in_flight) => in_flight.tag(),
        }
    }
}

/// The program's record of a request until it is reported.
struct Record<B> {
    io: Io,
    /// The buffer of a command that moves no data: it is not mapped.
    buffer: Option<B>,
    /// Why its command failed, once it has.
    error: Option<Box<TargetError>>,
}

/// A namespace as a target.
pub(crate) struct NvmeTarget<B: Pinned, R: Registers, S: ChunkSource + Clone> {
    info: TargetInfo,
    namespace: Namespace,
    /// The requests at the controller; the index is the driver's tag.
    in_flight: Vec<Option<Attempt<B>>>,
    /// Owns the buffers of all requests, or has lent them to the driver.
    requests: Requests<B, 1>,
    /// The index is the slot of a request's token.
    records: Vec<Option<Record<B>>>,
    /// Empty between two calls.
    ended: Vec<Ended<B, 1>>,
    /// Since when an event loop has polled for a flush.
    polls_since: Option<Instant>,
    /// Whether the descriptor of the loop may be readable, or become so.
    awaits_flush: bool,
    /// Buffers of commands that did not complete: the controller may still reach them.
    quarantined: Vec<Quarantined<Lent<B, 1>>>,
    /// Whether the controller writes zeroes without a payload.
    writes_zeroes: bool,
    lost: LostData,
    /// The slots of the requests since the last doorbell.
    unsubmitted: Vec<usize>,
    queue: Queue<R, S>,
    controller: Controller<R, S>,
}

/// Why a queue cannot be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error(transparent)]
    Driver(#[from] driver::Error),
    #[error(transparent)]
    Requests(#[from] NewError),
}

/// Returns the policy of the loop.
const fn policy(protect: Protect) -> Policy {
    match protect {
        Protect::Strict => Policy::Strict,
        Protect::Revoke => Policy::Revoke,
        Protect::Batch => Policy::Batch,
        Protect::Static => Policy::Static,
    }
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<B, R, S> {
    /// Creates a queue for a namespace.
    pub(crate) fn new(name: String, options: NvmeOptions<'_, R, S>) -> Result<Self, QueueError> {
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
        let limits = Limits { flush: flush_limit, ..Limits::default() };
        let requests = Requests::new(domain, policy(protect), depth, limits)?;
        Ok(Self {
            info,
            namespace,
            in_flight: std::iter::repeat_with(|| None).take(depth).collect(),
            records: std::iter::repeat_with(|| None).take(requests.slots()).collect(),
            ended: Vec::with_capacity(requests.slots()),
            requests,
            polls_since: None,
            awaits_flush: false,
            quarantined: Vec::new(),
            writes_zeroes: identity.can_write_zeroes,
            lost: LostData::default(),
            unsubmitted: Vec::with_capacity(depth),
            queue,
            controller,
        })
    }

    /// Shares the state of flushes with the other queues of the namespace.
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

    /// Returns the statistics of the controller and its driver.
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

    fn rejected(&self, reason: Reject) -> TargetError {
        TargetError::Rejected { target: self.info.name.clone(), reason }
    }

    /// Returns the access that the controller needs to the buffer of a request; `None` if its command
    /// moves no data.
    fn access(&self, io: &Io) -> Option<Access> {
        match io.direction {
            IoDirection::Read => Some(Access::WRITE),
            IoDirection::Write if io.zeroes && self.writes_zeroes => None,
            IoDirection::Write => Some(Access::READ),
            IoDirection::Trim | IoDirection::Flush => None,
        }
    }

    /// Returns the first block of a request, and how many it has.
    fn blocks(&self, io: &Io) -> (u64, u32) {
        let slba = io.offset >> self.namespace.block_bytes.trailing_zeros();
        (slba, u32::try_from(io.len.div_ceil(self.info.block)).unwrap_or(u32::MAX))
    }

    /// Returns why the loop has not begun a request.
    #[cold]
    fn not_begun(&self, buffer: Option<B>, refusal: Refusal) -> SubmitError<B> {
        let target = self.info.name.clone();
        let error = match refusal {
            Refusal::Map { error, .. } => TargetError::Domain { target, error },
            refusal => TargetError::Begin { target, refusal },
        };
        SubmitError { buffer, error }
    }

    /// Ends a request that the driver has refused, for this reason; `unmapped` is its buffer if the
    /// loop does not have it.
    #[cold]
    fn refused(&mut self, token: Token, unmapped: Option<B>, reason: Reject) -> SubmitError<B> {
        let ended = self.requests.refused(token);
        let buffer = ended.ok().and_then(|Ended { payloads: [buffer], .. }| buffer);
        SubmitError { buffer: buffer.or(unmapped), error: self.rejected(reason) }
    }

    /// Submits a request that moves no data to the driver.
    fn submit_bare(&mut self, io: Io, buffer: B) -> Result<(), SubmitError<B>> {
        let token = match self.requests.begin([]) {
            Ok(token) => token,
            Err(BeginError { refusal, .. }) => return Err(self.not_begun(Some(buffer), refusal)),
        };
        let ((slba, blocks), nsid) = (self.blocks(&io), self.namespace.nsid);
        let submitted = match io.direction {
            IoDirection::Flush => self.queue.flush(nsid),
            IoDirection::Write => self.queue.write_zeroes(nsid, slba, blocks),
            _ => self.queue.discard(nsid, slba, blocks),
        };
        match submitted {
            Ok(in_flight) => {
                self.note_submitted(io, Some(buffer), Attempt::Bare(token, in_flight));
                Ok(())
            }
            Err(Rejected { reason, .. }) => Err(self.refused(token, Some(buffer), reason)),
        }
    }

    #[inline]
    fn note_submitted(&mut self, io: Io, buffer: Option<B>, attempt: Attempt<B>) {
        let slot = attempt.token().slot();
        if let Some(place) = self.records.get_mut(slot) {
            *place = Some(Record { io, buffer, error: None });
        }
        if let Some(place) = self.in_flight.get_mut(attempt.tag()) {
            *place = Some(attempt);
        }
        self.unsubmitted.push(slot);
        // One doorbell for many: the next poll or wait rings for the rest.
        if self.unsubmitted.len() >= BATCH {
            self.ring_doorbell();
        }
    }

    /// Rings the doorbell for requests queued since the last one.
    fn ring_doorbell(&mut self) {
        if self.unsubmitted.is_empty() {
            return;
        }
        self.queue.ring_doorbell();
        let now = Instant::now();
        for slot in self.unsubmitted.drain(..) {
            if let Some(Some(record)) = self.records.get_mut(slot) {
                record.io.queued = now;
            }
        }
    }

    /// Processes the completions of the controller.
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
            let attempt = self.in_flight.get_mut(tag).and_then(Option::take);
            let foreign = match attempt {
                Some(Attempt::Data(token, in_flight)) => match in_flight.finish(completion) {
                    Outcome::Completed { payload, result } => {
                        self.note(token, Some(result));
                        // The payload is of this loop, and was lent until now.
                        let _ = self.requests.completed_lent(payload);
                        None
                    }
                    Outcome::TimedOut(quarantined) => {
                        self.quarantined.push(quarantined);
                        completed.extend(self.lose(token));
                        None
                    }
                    Outcome::Foreign(in_flight, _) => Some(Attempt::Data(token, in_flight)),
                },
                Some(Attempt::Bare(token, in_flight)) => match in_flight.finish(completion) {
                    Outcome::Completed { result, .. } => {
                        self.note(token, Some(result));
                        let _ = self.requests.completed(token);
                        None
                    }
                    // It has no payload that the controller could reach.
                    Outcome::TimedOut(_) => {
                        self.note(token, None);
                        let _ = self.requests.completed(token);
                        None
                    }
                    Outcome::Foreign(in_flight, _) => Some(Attempt::Bare(token, in_flight)),
                },
                None => None,
            };
            if let (Some(attempt), Some(place)) = (foreign, self.in_flight.get_mut(tag)) {
                *place = Some(attempt);
            }
        }
    }

    /// Records the result of a command that has completed; without one it was given up.
    fn note(&mut self, token: Token, result: Option<Result<(), CommandError>>) {
        let Some(Some(record)) = self.records.get(token.slot()) else { return };
        let io = record.io;
        let result = match result {
            Some(result) if io.direction == IoDirection::Flush => Some(self.flushed(result)),
            result => result,
        };
        let error = match result {
            Some(Ok(())) => return,
            Some(Err(error)) => {
                TargetError::Command { target: self.info.name.clone(), io: Box::new(io), error }
            }
            None => TargetError::Timeout { target: self.info.name.clone(), io: Box::new(io) },
        };
        if let Some(Some(record)) = self.records.get_mut(token.slot()) {
            record.error = Some(Box::new(error));
        }
    }

    /// Reports a request that did not complete in time: the driver keeps its buffer.
    fn lose(&mut self, token: Token) -> Option<Completion<B>> {
        // It was at the controller until now.
        let _ = self.requests.lost(token);
        let Record { io, .. } = self.records.get_mut(token.slot())?.take()?;
        let error = TargetError::Timeout { target: self.info.name.clone(), io: Box::new(io) };
        Some(Completion { io, buffer: None, result: Err(error) })
    }

    /// Reports what the loop has ended. A flush that is late ends its request with an error; its
    /// buffer is dropped when the loop returns it.
    fn report(&mut self, completed: &mut Vec<Completion<B>>) {
        if !self.ended.is_empty() {
            self.polls_since = None;
        }
        for Ended { token, payloads: [buffer], end } in self.ended.drain(..) {
            let Some(record) = self.records.get_mut(token.slot()).and_then(Option::take) else {
                continue;
            };
            let Record { io, buffer: unmapped, error: failed } = record;
            let result = match (failed, end) {
                (Some(error), _) => Err(*error),
                (None, End::Quiesced) => Ok(io.len),
                (None, End::Late(error) | End::Lost(error)) => {
                    Err(TargetError::Domain { target: self.info.name.clone(), error })
                }
            };
            completed.push(Completion { io, buffer: buffer.or(unmapped), result });
        }
    }

    fn step(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        self.ring_doorbell();
        let reaped = self.reap(completed).map_err(|error| self.poll_error(error));
        self.requests.poll(&mut self.ended);
        self.report(completed);
        reaped
    }
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> Target<B> for NvmeTarget<B, R, S> {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn submit(&mut self, Request { io, buffer }: Request<B>) -> Result<(), SubmitError<B>> {
        let Some(access) = self.access(&io) else { return self.submit_bare(io, buffer) };
        let lent = match self.requests.begin_lent([(buffer, access)]) {
            Ok(lent) => lent,
            Err(BeginError { payloads: [buffer], refusal }) => {
                return Err(self.not_begun(buffer, refusal));
            }
        };
        let (token, (slba, blocks), nsid) = (lent.token(), self.blocks(&io), self.namespace.nsid);
        let submitted = match io.direction {
            IoDirection::Read => self.queue.read::<_, FromDevice>(nsid, slba, blocks, lent),
            _ => self.queue.write::<_, ToDevice>(nsid, slba, blocks, lent),
        };
        match submitted {
            Ok(in_flight) => {
                self.note_submitted(io, None, Attempt::Data(token, in_flight));
                Ok(())
            }
            Err(Rejected { payload, reason }) => {
                // The payload is of this loop, and was lent until now.
                let _ = self.requests.take_back(payload);
                Err(self.refused(token, None, reason))
            }
        }
    }

    fn poll(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        self.step(completed)
    }

    fn wait(&mut self, completed: &mut Vec<Completion<B>>) -> Result<(), TargetError> {
        let until = Instant::now() + WAIT_LIMIT;
        let mut polls = 0;
        loop {
            let held = self.requests.held();
            self.step(completed)?;
            // Also when the controller has room again: the caller may have more requests and other
            // buffers.
            if !completed.is_empty() || self.requests.held() > held || Instant::now() >= until {
                return Ok(());
            }
            polls += 1;
            self.queue.pause(polls, WAIT_LIMIT, &mut self.requests, &mut self.ended);
            self.report(completed);
        }
    }

    fn held(&self) -> usize {
        self.requests.held()
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.interrupt_fd()
    }

    fn flush_fd(&mut self) -> Option<BorrowedFd<'_>> {
        self.requests.arm().ok()
    }

    fn arm(&mut self) -> Duration {
        self.ring_doorbell();
        let wait = self.queue.arm_interrupt();
        if !self.queue.has_interrupt() {
            return Duration::ZERO;
        }
        if self.requests.held() > 0 {
            // A flush normally takes microseconds, and to sleep takes longer. A software IOMMU and
            // a model controller do their work on processors that these polls would keep busy.
            let since = *self.polls_since.get_or_insert_with(Instant::now);
            if since.elapsed() < FLUSH_POLLS {
                std::thread::yield_now();
                return Duration::ZERO;
            }
        }
        let awaits_flush = self.requests.held() + self.requests.late() > 0;
        // Also the first time that nothing is held: that clears the descriptor.
        if !awaits_flush && !self.awaits_flush {
            return wait;
        }
        self.awaits_flush = awaits_flush;
        self.requests.arm().map_or(FLUSH_POLLS.min(wait), |_| wait)
    }

    fn abandon_retries(&mut self) {
        self.queue.abandon_retries();
    }

    fn abandon_retries_of(&mut self, given_up: &mut dyn FnMut(&Io) -> bool) {
        for attempt in self.in_flight.iter().flatten() {
            let record = self.records.get(attempt.token().slot());
            if record.is_some_and(|record| record.as_ref().is_some_and(|one| given_up(&one.io))) {
                match attempt {
                    Attempt::Data(_, in_flight) => self.queue.abandon_retries_of(in_flight),
                    Attempt::Bare(_, in_flight) => self.queue.abandon_retries_of(in_flight),
                }
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
                Outcome::Completed { result, .. } => {
                    let error = |error| TargetError::Flush { target: target(), error: Some(error) };
                    self.flushed(result).map_err(error)
                }
                Outcome::TimedOut(_) | Outcome::Foreign(..) => {
                    Err(TargetError::Flush { target: target(), error: None })
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
