//! The admin queue: one command at a time that is waited for, beside aborts and asynchronous event
//! requests (Base 5).

use super::clock::{Backoff, RetryDelays};
use super::config::{Config, nanoseconds};
use super::enable::ControllerRegisters;
use super::error::Error;
use super::event::{EventKind, EventLog};
use super::in_flight::SharedState;
use super::slots::{self, CompletionRing, DmaBuffer, SubmissionRing, next_sequential};
use crate::registers::Registers;
use crate::spec::{Command, ControllerData, Cqe, Doorbell, PAGE_BYTES, admin, offset};
use pinfold_core::dma_pool::ChunkSource;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Interval between reads of CSTS while waiting: a register read of a device takes about a
/// microsecond.
pub(super) const STATUS_INTERVAL_NS: u64 = 1_000_000;

/// Entries of both admin rings: more than the command, the aborts and the event requests that can
/// be outstanding.
const ENTRIES: u16 = 32;
/// Most aborts outstanding, whatever ACL allows.
const MAX_ABORTS: usize = 8;
/// The owner of aborts of admin commands. No queue has this serial number.
const ADMIN_SERIAL: u64 = 0;

/// The command that an abort is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AbortTarget {
    /// The serial number of the queue's owner.
    pub(super) serial: u64,
    /// The submission queue.
    pub(super) queue: u16,
    pub(super) cid: u16,
}

/// The controller's answer to an abort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AbortAnswer {
    pub(super) target: AbortTarget,
    /// Whether the controller has aborted the command, which then completes by itself.
    pub(super) aborted: bool,
}

/// The state of an outstanding admin command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    /// The command that is waited for.
    Command,
    /// An abort; `None` where its owner no longer wants the answer.
    Abort(Option<AbortTarget>),
    EventRequest,
}

pub(super) struct AdminQueue<S: ChunkSource> {
    sq: SubmissionRing<S>,
    cq: CompletionRing<S>,
    sq_buffer: DmaBuffer<S>,
    cq_buffer: DmaBuffer<S>,
    data_buffer: DmaBuffer<S>,
    cid: u16,
    /// Whether the controller is enabled and has answered every command so far.
    usable: bool,
    outstanding: Vec<(u16, Pending)>,
    /// The completion of the command that is waited for.
    answer: Option<Cqe>,
    retry_delays: RetryDelays,
    /// ACL as a count.
    abort_limit: usize,
    abort_answers: Vec<AbortAnswer>,
    pub(super) events: EventLog,
    shared: Arc<SharedState>,
}

impl<S: ChunkSource + Clone> AdminQueue<S> {
    pub(super) fn new(source: &S, shared: Arc<SharedState>) -> Result<Self, Error> {
        let entries = usize::from(ENTRIES);
        let allocate = |bytes, what| slots::allocate(source, bytes, what);
        let sq_buffer = allocate(entries * Command::BYTES, "the admin submission queue")?;
        let cq_buffer = allocate(entries * Cqe::BYTES, "the admin completion queue")?;
        Ok(Self {
            sq: SubmissionRing::new(DmaBuffer::clone(&sq_buffer), ENTRIES.into()),
            cq: CompletionRing::new(DmaBuffer::clone(&cq_buffer), ENTRIES.into()),
            sq_buffer,
            cq_buffer,
            data_buffer: allocate(PAGE_BYTES, "identify data")?,
            cid: 0,
            usable: false,
            outstanding: Vec::new(),
            answer: None,
            retry_delays: RetryDelays::default(),
            abort_limit: 1,
            abort_answers: Vec::new(),
            events: EventLog::default(),
            shared,
        })
    }

    /// Empties the rings and writes their addresses to a disabled controller.
    pub(super) fn attach(&mut self, registers: &impl Registers) {
        self.sq_buffer.zero();
        self.cq_buffer.zero();
        self.sq = SubmissionRing::new(DmaBuffer::clone(&self.sq_buffer), ENTRIES.into());
        self.cq = CompletionRing::new(DmaBuffer::clone(&self.cq_buffer), ENTRIES.into());
        self.outstanding.clear();
        self.abort_answers.clear();
        self.answer = None;
        self.events.restart();
        let last = u32::from(ENTRIES - 1);
        registers.write32(offset::AQA, last | last << 16);
        registers.write64(offset::ASQ, self.sq_buffer.iova().raw());
        registers.write64(offset::ACQ, self.cq_buffer.iova().raw());
    }

    /// Returns the size of its memory.
    pub(super) fn bytes(&self) -> u64 {
        [&self.sq_buffer, &self.cq_buffer, &self.data_buffer].iter().map(|b| b.segment().len).sum()
    }

    pub(super) fn is_usable(&self) -> bool {
        self.usable
    }

    pub(super) fn set_usable(&mut self, usable: bool) {
        self.usable = usable;
    }

    /// Applies the controller's limits, ACL and AERL (both 0-based), and requests events.
    pub(super) fn set_limits<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        data: &ControllerData,
    ) {
        self.abort_limit = (usize::from(data.acl) + 1).min(MAX_ABORTS);
        self.events.set_limit(usize::from(data.aerl) + 1);
        self.request_events(registers);
    }

    fn request_events<R: Registers>(&mut self, registers: &ControllerRegisters<R>) {
        while self.usable && self.events.take_request() {
            let command = Command { opcode: admin::ASYNC_EVENT, ..Command::default() };
            self.send(registers, command, Pending::EventRequest);
        }
    }

    fn send<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        mut command: Command,
        pending: Pending,
    ) -> u16 {
        // Terminates: at most 13 are outstanding.
        loop {
            self.cid = next_sequential(self.cid);
            if self.outstanding.iter().all(|(cid, _)| *cid != self.cid) {
                break;
            }
        }
        command.cid = U16::new(self.cid);
        self.outstanding.push((self.cid, pending));
        self.sq.push(&command);
        if let Some(tail) = self.sq.take_tail() {
            registers.ring_doorbell(0, Doorbell::SubmissionTail, tail);
        }
        self.cid
    }

    /// Processes completions, at most one ring of them, which bounds the loop against endless
    /// garbage. Returns whether there were any; never waits.
    pub(super) fn poll<R: Registers>(&mut self, registers: &ControllerRegisters<R>) -> bool {
        let mut any = false;
        for _ in 0..ENTRIES {
            let Some(cqe) = self.cq.next() else { break };
            any = true;
            self.handle_completion(&cqe);
        }
        if let Some(head) = self.cq.take_head() {
            registers.ring_doorbell(0, Doorbell::CompletionHead, head);
        }
        self.request_events(registers);
        any
    }

    fn handle_completion(&mut self, cqe: &Cqe) {
        let found = self.outstanding.iter().position(|(cid, _)| *cid == cqe.cid.get());
        let Some(found) = found.filter(|_| cqe.sq_id.get() == 0) else {
            self.shared.spurious_admin_completions.fetch_add(1, Ordering::Relaxed);
            return;
        };
        match self.outstanding.swap_remove(found).1 {
            Pending::Command => self.answer = Some(*cqe),
            Pending::Abort(Some(target)) => {
                // Bit 0 of the result: not aborted (Base 5.1).
                let aborted = cqe.status().is_success() && cqe.result.get() & 1 == 0;
                self.abort_answers.push(AbortAnswer { target, aborted });
            }
            Pending::Abort(None) => {}
            Pending::EventRequest => self.record_event(cqe),
        }
    }

    fn record_event(&mut self, cqe: &Cqe) {
        let Some((event, lost)) = self.events.accept(cqe) else { return };
        tracing::info!(?event, "the controller reports an event");
        let count = |counter: &AtomicU64, by| counter.fetch_add(u64::from(by), Ordering::Relaxed);
        count(&self.shared.events, true);
        count(&self.shared.events_lost, lost);
        count(&self.shared.health_events, event.kind == EventKind::Health);
        count(&self.shared.namespace_events, event.is_namespace_change());
        if event.is_namespace_change() {
            self.shared.namespaces_changed();
        }
    }

    /// Sends an abort (Base 5.1), unless ACL aborts are outstanding; returns whether it did.
    pub(super) fn abort<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        target: AbortTarget,
    ) -> bool {
        let aborts =
            self.outstanding.iter().filter(|(_, pending)| matches!(pending, Pending::Abort(_)));
        if !self.usable || aborts.count() >= self.abort_limit {
            return false;
        }
        let cdw10 = U32::new(u32::from(target.queue) | u32::from(target.cid) << 16);
        let command = Command { opcode: admin::ABORT, cdw10, ..Command::default() };
        self.send(registers, command, Pending::Abort(Some(target)));
        true
    }

    /// Returns the answers to aborts of the queue with this serial number since the last call.
    pub(super) fn take_abort_answers(&mut self, serial: u64) -> Vec<AbortAnswer> {
        self.abort_answers.extract_if(.., |answer| answer.target.serial == serial).collect()
    }

    /// Discards the answers to aborts of a queue that no longer exists.
    pub(super) fn forget_aborts(&mut self, serial: u64) {
        self.abort_answers.retain(|answer| answer.target.serial != serial);
        for (_, pending) in &mut self.outstanding {
            if matches!(pending, Pending::Abort(Some(target)) if target.serial == serial) {
                *pending = Pending::Abort(None);
            }
        }
    }

    pub(super) fn set_retry_delays(&mut self, delays: RetryDelays) {
        self.retry_delays = delays;
    }

    /// Sends a command and returns DW0 of its completion, as [`execute_once`](Self::execute_once)
    /// does; again while the controller is not ready for it, up to [`Config::retry_limit`].
    pub(super) fn execute<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        config: &Config,
        what: &'static str,
        command: Command,
    ) -> Result<u32, Error> {
        let start_ns = config.clock.now_ns();
        let mut attempts: u32 = 0;
        loop {
            let result = self.execute_once(registers, config, what, command);
            let Err(Error::Admin { status, .. }) = result else { return result };
            let now_ns = config.clock.now_ns();
            let left_ns =
                nanoseconds(config.retry_limit).saturating_sub(now_ns.saturating_sub(start_ns));
            let delay_ns = self.retry_delays.delay_ns(status, attempts, left_ns);
            let Some(delay_ns) = delay_ns.filter(|_| status.is_not_ready()) else { return result };
            let due_ns = now_ns.saturating_add(delay_ns);
            attempts = attempts.saturating_add(1);
            self.shared.admin_retries.fetch_add(1, Ordering::Relaxed);
            let mut backoff = Backoff::default();
            while config.clock.now_ns() < due_ns {
                if !self.poll(registers) {
                    backoff.pause();
                }
            }
        }
    }

    /// Sends a command, waits for its completion and returns DW0 of it. A command that does not
    /// complete in time is aborted; if that does not end it, nothing is sent until the next reset,
    /// since it may still write to the buffer.
    fn execute_once<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        config: &Config,
        what: &'static str,
        command: Command,
    ) -> Result<u32, Error> {
        if !self.usable {
            return Err(Error::NeedsReset);
        }
        let cid = self.send(registers, command, Pending::Command);
        let mut limit_ns = nanoseconds(config.admin_timeout);
        let timeout = Error::AdminTimeout { what, limit_ms: limit_ns / 1_000_000 };
        let mut start_ns = config.clock.now_ns();
        let mut checked_ns = start_ns;
        let mut aborting = false;
        let mut backoff = Backoff::default();
        loop {
            let any = self.poll(registers);
            if let Some(cqe) = self.answer.take_if(|cqe| cqe.cid.get() == cid) {
                let status = cqe.status();
                return match status.is_success() {
                    true => Ok(cqe.result.get()),
                    false if aborting => Err(timeout),
                    false => Err(Error::Admin { what, status }),
                };
            }
            if !any {
                backoff.pause();
            }
            let now_ns = config.clock.now_ns();
            let overdue = now_ns.saturating_sub(start_ns) >= limit_ns;
            if overdue || now_ns.saturating_sub(checked_ns) >= STATUS_INTERVAL_NS {
                checked_ns = now_ns;
                registers.check_status().inspect_err(|_| self.usable = false)?;
            }
            let not_aborted = |answer: &AbortAnswer| answer.target.cid == cid && !answer.aborted;
            let refused = aborting && self.take_abort_answers(ADMIN_SERIAL).iter().any(not_aborted);
            if overdue && !aborting && !config.abort_timeout.is_zero() {
                aborting =
                    self.abort(registers, AbortTarget { serial: ADMIN_SERIAL, queue: 0, cid });
                (start_ns, limit_ns) = (now_ns, nanoseconds(config.abort_timeout));
                if aborting {
                    continue;
                }
            }
            if overdue || refused {
                self.usable = false;
                return Err(timeout);
            }
        }
    }

    /// Sends a command whose data begins with `data`, of at most a page, followed by zeroes.
    pub(super) fn send_data<R: Registers>(
        &mut self,
        registers: &ControllerRegisters<R>,
        config: &Config,
        what: &'static str,
        mut command: Command,
        data: &[u8],
    ) -> Result<u32, Error> {
        self.data_buffer.zero();
        let written = self.data_buffer.memory().copy_from_slice(0, data);
        written.map_err(|_| Error::BadSource { what: "feature data" })?;
        command.prp1 = U64::new(self.data_buffer.iova().raw());
        self.execute(registers, config, what, command)
    }

    /// Sends a command that reads a structure of at most a page, and returns a copy of it, with DW0 of
    /// its completion.
    pub(super) fn fetch<R: Registers, T: FromBytes + IntoBytes>(
        &mut self,
        registers: &ControllerRegisters<R>,
        config: &Config,
        what: &'static str,
        mut command: Command,
    ) -> Result<(Box<T>, u32), Error> {
        self.data_buffer.zero();
        command.prp1 = U64::new(self.data_buffer.iova().raw());
        let result = self.execute(registers, config, what, command)?;
        let data = slots::read(self.data_buffer.memory(), 0);
        let data = data.map(Box::new).map_err(|_| Error::BadSource { what: "identify data" })?;
        Ok((data, result))
    }
}
