//! The admin queue: one command at a time that is waited for, and beside it aborts and asynchronous event requests.

mod events;

pub use events::{Event, EventKind};

use super::clock::Backoff;
use super::config::{Config, nanoseconds};
use super::error::Error;
use super::life::Life;
use super::request::next_identifier;
use super::rings::{CompletionRing, SubmissionRing};
use super::span::{self, Span};
use crate::registers::Registers;
use crate::spec::{
    Cap, Command, ControllerData, Cqe, Csts, Doorbell, PAGE_BYTES, admin, doorbell_offset, offset,
};
use events::Events;
use pinfold_core::dma_pool::ChunkSource;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// How often a wait looks at CSTS: reading a device's register takes about a microsecond.
pub(super) const STATUS_EVERY_NS: u64 = 1_000_000;

/// Entries of both admin rings: more than the command, the aborts and the event requests that are outstanding.
pub(super) const ENTRIES: u16 = 32;
/// How many aborts are outstanding at most, whatever ACL says.
const ABORTS: usize = 8;

/// What an outstanding command is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    /// The one that is waited for.
    Command,
    /// An abort of command `cid` of the queue with this serial number; `None` where its answer is of no interest.
    Abort(Option<(u32, u16)>),
    EventRequest,
}

pub(super) struct Admin<S: ChunkSource> {
    sq: SubmissionRing<S>,
    cq: CompletionRing<S>,
    sq_span: Span<S>,
    cq_span: Span<S>,
    buffer: Span<S>,
    cid: u16,
    /// Whether the controller is enabled and every command so far was answered.
    usable: bool,
    outstanding: Vec<(u16, Pending)>,
    /// The answer to the command that is waited for.
    answer: Option<(u16, Cqe)>,
    /// ACL as a count.
    abort_limit: usize,
    /// Commands that the controller says it has not aborted: the serial number of the queue, and the identifier.
    refused: Vec<(u32, u16)>,
    pub(super) events: Events,
    life: Arc<Life>,
}

impl<S: ChunkSource + Clone> Admin<S> {
    pub(super) fn new(source: &S, life: Arc<Life>) -> Result<Self, Error> {
        let entries = usize::from(ENTRIES);
        let sq_span = span::take(source, entries * Command::BYTES, "the admin submission queue")?;
        let cq_span = span::take(source, entries * Cqe::BYTES, "the admin completion queue")?;
        let buffer = span::take(source, PAGE_BYTES, "identify data")?;
        let (sq, cq) = (
            SubmissionRing::new(Span::clone(&sq_span), ENTRIES.into()),
            CompletionRing::new(Span::clone(&cq_span), ENTRIES.into()),
        );
        Ok(Self {
            sq,
            cq,
            sq_span,
            cq_span,
            buffer,
            cid: 0,
            usable: false,
            outstanding: Vec::new(),
            answer: None,
            abort_limit: 1,
            refused: Vec::new(),
            events: Events::default(),
            life,
        })
    }

    /// Tells a disabled controller where the rings are, which begin anew.
    pub(super) fn attach(&mut self, registers: &impl Registers) {
        self.sq_span.zero();
        self.cq_span.zero();
        self.sq = SubmissionRing::new(Span::clone(&self.sq_span), ENTRIES.into());
        self.cq = CompletionRing::new(Span::clone(&self.cq_span), ENTRIES.into());
        self.outstanding.clear();
        self.refused.clear();
        (self.answer, self.abort_limit) = (None, 1);
        self.events.restart();
        let last = u32::from(ENTRIES - 1);
        registers.write32(offset::AQA, last | last << 16);
        registers.write64(offset::ASQ, self.sq_span.iova().raw());
        registers.write64(offset::ACQ, self.cq_span.iova().raw());
    }

    /// How much memory it has.
    pub(super) fn bytes(&self) -> u64 {
        [&self.sq_span, &self.cq_span, &self.buffer].iter().map(|span| span.segment().len).sum()
    }

    /// Whether it takes commands.
    pub(super) fn is_usable(&self) -> bool {
        self.usable
    }

    pub(super) fn set_usable(&mut self, usable: bool) {
        self.usable = usable;
    }

    /// Takes over the limits that the controller names, ACL and AERL, which count from 0, and requests events.
    pub(super) fn set_limits(&mut self, registers: &impl Registers, cap: Cap, data: &ControllerData) {
        self.abort_limit = (usize::from(data.acl) + 1).min(ABORTS);
        self.events.set_limit(usize::from(data.aerl) + 1);
        self.request_events(registers, cap);
    }

    fn request_events(&mut self, registers: &impl Registers, cap: Cap) {
        while self.usable && self.events.take_request() {
            let command = Command { opcode: admin::ASYNC_EVENT, ..Command::default() };
            self.send(registers, cap, command, Pending::EventRequest);
        }
    }

    fn send(&mut self, registers: &impl Registers, cap: Cap, mut command: Command, pending: Pending) -> u16 {
        // At most 13 are outstanding, so this ends.
        loop {
            self.cid = next_identifier(self.cid);
            if self.outstanding.iter().all(|(cid, _)| *cid != self.cid) {
                break;
            }
        }
        command.cid = U16::new(self.cid);
        self.outstanding.push((self.cid, pending));
        self.sq.push(&command);
        if let Some(tail) = self.sq.take_unrung() {
            let stride = cap.doorbell_stride_shift();
            registers.write32(doorbell_offset(0, Doorbell::SubmissionTail, stride), tail);
        }
        self.cid
    }

    /// Takes what has completed, at most a ring full, so that a controller that writes garbage without end does not
    /// keep the caller. Whether there was anything. It never waits.
    pub(super) fn reap(&mut self, registers: &impl Registers, cap: Cap) -> bool {
        let mut any = false;
        for _ in 0..ENTRIES {
            let Some(cqe) = self.cq.next() else { break };
            any = true;
            let cid = cqe.cid.get();
            let found = self.outstanding.iter().position(|(outstanding, _)| *outstanding == cid);
            let Some(found) = found.filter(|_| cqe.sq_id.get() == 0) else {
                self.life.spurious.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            match self.outstanding.swap_remove(found).1 {
                Pending::Command => self.answer = Some((cid, cqe)),
                // Bit 0 of the result: not aborted (Base 5.1). Aborted, it completes by itself.
                Pending::Abort(Some(of)) if !cqe.status().is_success() || cqe.result.get() & 1 != 0 => {
                    self.refused.push(of);
                }
                Pending::Abort(_) => {}
                Pending::EventRequest => self.accept_event(&cqe),
            }
        }
        if let Some(head) = self.cq.take_unrung() {
            let stride = cap.doorbell_stride_shift();
            registers.write32(doorbell_offset(0, Doorbell::CompletionHead, stride), head);
        }
        self.request_events(registers, cap);
        any
    }

    fn accept_event(&mut self, cqe: &Cqe) {
        let Some((event, lost)) = self.events.accept(cqe) else { return };
        tracing::info!(?event, "the controller reports an event");
        let count = |counter: &AtomicU64, by| counter.fetch_add(u64::from(by), Ordering::Relaxed);
        count(&self.life.events, true);
        count(&self.life.events_lost, lost);
        count(&self.life.health_events, event.kind == EventKind::Health);
        count(&self.life.namespace_events, event.is_namespace_change());
        if event.is_namespace_change() {
            self.life.namespaces_changed();
        }
    }

    /// Sends an abort of command `cid` of submission queue `id` (Base 5.1), if as many are not outstanding as ACL
    /// allows. Whether it did.
    pub(super) fn abort(
        &mut self,
        registers: &impl Registers,
        cap: Cap,
        (id, cid): (u16, u16),
        serial: Option<u32>,
    ) -> bool {
        let aborts = self.outstanding.iter().filter(|(_, pending)| matches!(pending, Pending::Abort(_)));
        if !self.usable || aborts.count() >= self.abort_limit {
            return false;
        }
        let cdw10 = U32::new(u32::from(id) | u32::from(cid) << 16);
        let command = Command { opcode: admin::ABORT, cdw10, ..Command::default() };
        self.send(registers, cap, command, Pending::Abort(serial.map(|serial| (serial, cid))));
        true
    }

    /// The commands of a queue that the controller says it has not aborted, since the last call.
    pub(super) fn take_refused(&mut self, serial: u32) -> Vec<u16> {
        let (mine, others) = self.refused.iter().partition(|(of, _)| *of == serial);
        self.refused = others;
        let mine: Vec<(u32, u16)> = mine;
        mine.into_iter().map(|(_, cid)| cid).collect()
    }

    /// The queue with this serial number is gone: the answers to its aborts are of no interest.
    pub(super) fn forget_aborts(&mut self, serial: u32) {
        self.refused.retain(|(of, _)| *of != serial);
        for (_, pending) in &mut self.outstanding {
            if matches!(pending, Pending::Abort(Some((of, _))) if *of == serial) {
                *pending = Pending::Abort(None);
            }
        }
    }

    /// Sends a command and waits for its answer: DW0 of the completion. One that does not complete in time is aborted;
    /// if that does not end it, nothing more is sent until the next reset, since it may still write to the buffer.
    pub(super) fn execute(
        &mut self,
        registers: &impl Registers,
        cap: Cap,
        config: &Config,
        what: &'static str,
        command: Command,
    ) -> Result<u32, Error> {
        if !self.usable {
            return Err(Error::NeedsReset);
        }
        let cid = self.send(registers, cap, command, Pending::Command);
        let limit_ns = nanoseconds(config.admin_timeout);
        let timeout = Error::AdminTimeout { what, limit_ms: limit_ns / 1_000_000 };
        let mut start_ns = config.clock.now_ns();
        let mut looked_ns = start_ns;
        let mut left_ns = limit_ns;
        let mut aborting = false;
        let mut backoff = Backoff::default();
        loop {
            let any = self.reap(registers, cap);
            if let Some((_, cqe)) = self.answer.take_if(|(answered, _)| *answered == cid) {
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
            let overdue = now_ns.saturating_sub(start_ns) >= left_ns;
            if overdue || now_ns.saturating_sub(looked_ns) >= STATUS_EVERY_NS {
                looked_ns = now_ns;
                let works = check_status(registers);
                self.usable &= works.is_ok();
                works?;
            }
            // A queue's serial number of an admin command: none is as high before 2^32 queues.
            let refused = aborting && self.take_refused(u32::MAX).contains(&cid);
            if overdue && !aborting && !config.abort_timeout.is_zero() {
                aborting = self.abort(registers, cap, (0, cid), Some(u32::MAX));
                (start_ns, left_ns) = (now_ns, nanoseconds(config.abort_timeout));
                if aborting {
                    continue;
                }
            }
            if overdue || refused {
                self.usable = false;
                self.outstanding.retain(|(outstanding, _)| *outstanding != cid);
                return Err(timeout);
            }
        }
    }

    /// Sends a command that fills a page or less, and reads it: a copy, which the controller cannot change any more.
    pub(super) fn fetch<T: FromBytes>(
        &mut self,
        registers: &impl Registers,
        cap: Cap,
        config: &Config,
        what: &'static str,
        mut command: Command,
    ) -> Result<Box<T>, Error> {
        self.buffer.zero();
        command.prp1 = U64::new(self.buffer.iova().raw());
        self.execute(registers, cap, config, what, command)?;
        let mut bytes = [0; PAGE_BYTES];
        let bad = || Error::BadSource { what: "identify data" };
        self.buffer.memory().copy_to_slice(0, &mut bytes).map_err(|_| bad())?;
        T::read_from_prefix(&bytes).map(|(data, _)| Box::new(data)).map_err(|_| bad())
    }
}

/// Whether the controller is there and has not failed.
pub(super) fn check_status(registers: &impl Registers) -> Result<Csts, Error> {
    let csts = registers.read32(offset::CSTS);
    if csts == Csts::GONE {
        return Err(Error::Gone);
    }
    let csts = Csts::from_bits_retain(csts);
    if csts.contains(Csts::FATAL) { Err(Error::Fatal) } else { Ok(csts) }
}
