//! The admin queue: one command at a time, waited for.

use super::clock::Backoff;
use super::config::{Config, nanoseconds};
use super::error::Error;
use super::request::next_identifier;
use super::rings::{CompletionRing, SubmissionRing};
use super::span::{self, Span};
use crate::registers::Registers;
use crate::spec::{Cap, Command, Cqe, Csts, Doorbell, PAGE_BYTES, doorbell_offset, offset};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::FromBytes;
use zerocopy::little_endian::{U16, U64};

/// How often a wait looks at CSTS: reading a device's register takes about a microsecond.
pub(super) const STATUS_EVERY_NS: u64 = 1_000_000;

/// Entries of both admin rings.
pub(super) const ENTRIES: u16 = 32;

pub(super) struct Admin<S: ChunkSource> {
    sq: SubmissionRing<S>,
    cq: CompletionRing<S>,
    sq_span: Span<S>,
    cq_span: Span<S>,
    buffer: Span<S>,
    cid: u16,
    /// Whether the controller is enabled and every command so far was answered.
    usable: bool,
    /// Answers to commands that had been given up.
    pub(super) late: u64,
}

impl<S: ChunkSource + Clone> Admin<S> {
    pub(super) fn new(source: &S) -> Result<Self, Error> {
        let entries = usize::from(ENTRIES);
        let sq_span = span::take(source, entries * Command::BYTES, "the admin submission queue")?;
        let cq_span = span::take(source, entries * Cqe::BYTES, "the admin completion queue")?;
        let buffer = span::take(source, PAGE_BYTES, "identify data")?;
        let (sq, cq) = (
            SubmissionRing::new(Span::clone(&sq_span), ENTRIES.into()),
            CompletionRing::new(Span::clone(&cq_span), ENTRIES.into()),
        );
        Ok(Self { sq, cq, sq_span, cq_span, buffer, cid: 0, usable: false, late: 0 })
    }

    /// Tells a disabled controller where the rings are, which begin anew.
    pub(super) fn attach(&mut self, registers: &impl Registers) {
        self.sq_span.zero();
        self.cq_span.zero();
        self.sq = SubmissionRing::new(Span::clone(&self.sq_span), ENTRIES.into());
        self.cq = CompletionRing::new(Span::clone(&self.cq_span), ENTRIES.into());
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

    /// Sends a command and waits for its answer: DW0 of the completion.
    pub(super) fn execute(
        &mut self,
        registers: &impl Registers,
        cap: Cap,
        config: &Config,
        what: &'static str,
        mut command: Command,
    ) -> Result<u32, Error> {
        if !self.usable {
            return Err(Error::NeedsReset);
        }
        self.cid = next_identifier(self.cid);
        command.cid = U16::new(self.cid);
        self.sq.push(&command);
        let stride = cap.doorbell_stride_shift();
        if let Some(tail) = self.sq.take_unrung() {
            registers.write32(doorbell_offset(0, Doorbell::SubmissionTail, stride), tail);
        }
        let start = config.clock.now_ns();
        let limit = nanoseconds(config.admin_timeout);
        let mut backoff = Backoff::default();
        let mut looked_ns = start;
        loop {
            let cqe = self.cq.next();
            if let Some(head) = self.cq.take_unrung() {
                registers.write32(doorbell_offset(0, Doorbell::CompletionHead, stride), head);
            }
            match cqe {
                Some(cqe) if cqe.cid.get() == self.cid && cqe.sq_id.get() == 0 => {
                    let status = cqe.status();
                    return if status.is_success() {
                        Ok(cqe.result.get())
                    } else {
                        Err(Error::Admin { what, status })
                    };
                }
                Some(_) => {
                    self.late += 1;
                    continue;
                }
                None => backoff.pause(),
            }
            let now = config.clock.now_ns();
            let overdue = now.saturating_sub(start) >= limit;
            if overdue || now.saturating_sub(looked_ns) >= STATUS_EVERY_NS {
                looked_ns = now;
                // The buffer may be written at any time after a failure: nothing is sent until the next reset.
                let works = check_status(registers);
                self.usable = works.is_ok() && !overdue;
                works?;
            }
            if overdue {
                return Err(Error::AdminTimeout { what, limit_ms: limit / 1_000_000 });
            }
        }
    }

    /// Sends a command that fills a page or less, and reads it: a copy, which the controller can not change any more.
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
