//! The controller's side of the queues.

use crate::bus::{Bus, BusFault};
use crate::registers::RegisterFile;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Cqe, Doorbell, Status};
use std::collections::VecDeque;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

/// Most commands fetched by one access.
pub(crate) const FETCH: usize = 16;

/// A command by its submission queue and identifier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CommandId {
    pub(crate) queue: u16,
    pub(crate) cid: u16,
}

/// The result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CommandResult {
    pub(crate) status: Status,
    /// DW0 of the completion.
    pub(crate) value: u32,
}

impl From<Status> for CommandResult {
    fn from(status: Status) -> Self {
        Self { status, value: 0 }
    }
}

/// A submission queue.
#[derive(Debug)]
pub(crate) struct SubmissionQueue {
    pub(crate) base: Iova,
    pub(crate) size: u32,
    pub(crate) head: u32,
    /// The completion queue.
    pub(crate) cq: u16,
}

impl SubmissionQueue {
    /// Fetches at most [`FETCH`] commands up to `tail`.
    pub(crate) fn fetch<'b>(
        &mut self,
        bus: &impl Bus,
        tail: u32,
        batch: &'b mut [Command; FETCH],
    ) -> Result<&'b [Command], BusFault> {
        let waiting = if tail >= self.head { tail - self.head } else { self.size - self.head };
        let count = usize::try_from(waiting).unwrap_or(FETCH).min(FETCH);
        let batch = batch.get_mut(..count).unwrap_or_default();
        let at =
            Iova::new(self.base.raw().wrapping_add(u64::from(self.head) * Command::BYTES as u64));
        bus.read(at, batch.as_mut_bytes())?;
        self.head = (self.head + u32::try_from(count).unwrap_or(0)) % self.size;
        Ok(batch)
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    id: u16,
    base: Iova,
    size: u32,
    pub(crate) users: u16,
    tail: u32,
    phase: bool,
    backlog: VecDeque<Cqe>,
    /// The interrupt that it raises.
    vector: Option<u16>,
    /// Whether entries were written since the last interrupt.
    signal: bool,
}

impl CompletionQueue {
    pub(crate) fn new(id: u16, base: Iova, size: u32, vector: Option<u16>) -> Self {
        let backlog = VecDeque::new();
        Self { id, base, size, users: 0, tail: 0, phase: true, backlog, vector, signal: false }
    }

    /// Returns whether completions wait for a free entry.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Returns whether an entry is free: the host has read up to the head.
    fn has_free_entry(&self, registers: &RegisterFile) -> bool {
        self.next_tail() != registers.doorbell(self.id, Doorbell::CompletionHead)
    }

    fn next_tail(&self) -> u32 {
        (self.tail + 1) % self.size
    }

    /// Writes a completion, of which `observe` is told before, or keeps it until an entry is free.
    /// Returns whether it was written.
    pub(crate) fn add(
        &mut self,
        registers: &RegisterFile,
        bus: &impl Bus,
        cqe: Cqe,
        observe: impl FnOnce(&Cqe),
    ) -> Result<bool, BusFault> {
        if self.is_blocked() || !self.has_free_entry(registers) {
            self.backlog.push_back(cqe);
            return Ok(false);
        }
        observe(&cqe);
        self.write(registers, bus, cqe).map(|()| true)
    }

    /// Writes waiting completions, of each of which `observe` is told before; returns whether it
    /// wrote any.
    pub(crate) fn drain(
        &mut self,
        registers: &RegisterFile,
        bus: &impl Bus,
        observe: impl Fn(&Cqe),
    ) -> Result<bool, BusFault> {
        let mut any = false;
        while self.has_free_entry(registers) {
            let Some(cqe) = self.backlog.pop_front() else { break };
            observe(&cqe);
            self.write(registers, bus, cqe)?;
            any = true;
        }
        Ok(any)
    }

    /// Drops the waiting completions of a submission queue that is deleted: a later queue of its
    /// number has the same identifiers.
    pub(crate) fn forget(&mut self, sq: u16) {
        self.backlog.retain(|cqe| cqe.sq_id.get() != sq);
    }

    fn write(
        &mut self,
        registers: &RegisterFile,
        bus: &impl Bus,
        mut cqe: Cqe,
    ) -> Result<(), BusFault> {
        cqe.status_phase = U16::new(cqe.status_phase.get() & !1 | u16::from(self.phase));
        let at = self.base.raw().wrapping_add(u64::from(self.tail) * Cqe::BYTES as u64);
        if let Some((body, last)) = cqe.as_bytes().split_last_chunk::<4>() {
            bus.write(Iova::new(at), body)?;
            // The host may ring as soon as it sees the phase.
            registers.set_end(self.id, Doorbell::CompletionHead, self.next_tail());
            bus.write_u32_release(Iova::new(at.wrapping_add(12)), u32::from_le_bytes(*last))?;
        }
        self.tail += 1;
        if self.tail == self.size {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.signal = true;
        Ok(())
    }
}

/// All queues, by identifier; 0 is the admin pair.
#[derive(Debug)]
pub(crate) struct Queues {
    pub(crate) submission: Vec<Option<SubmissionQueue>>,
    pub(crate) completion: Vec<Option<CompletionQueue>>,
}

impl Queues {
    pub(crate) fn new(queues: u16) -> Self {
        let count = usize::from(queues) + 1;
        Self {
            submission: (0..count).map(|_| None).collect(),
            completion: (0..count).map(|_| None).collect(),
        }
    }

    /// Returns the interrupts that are due.
    pub(crate) fn take_signals(&mut self) -> impl Iterator<Item = u16> {
        let due = |cq: &mut CompletionQueue| {
            std::mem::take(&mut cq.signal).then_some(cq.vector).flatten()
        };
        self.completion.iter_mut().flatten().filter_map(due)
    }

    /// Makes the interrupts of all queues due.
    pub(crate) fn signal_all(&mut self) {
        self.completion.iter_mut().flatten().for_each(|cq| cq.signal = true);
    }

    /// Returns how many I/O commands have been submitted and not fetched.
    pub(crate) fn unfetched(&self, registers: &RegisterFile) -> u32 {
        let queues = (0..).zip(&self.submission).skip(1);
        let waiting = queues.filter_map(|(id, sq)| {
            let SubmissionQueue { size, head, .. } = sq.as_ref()?;
            Some((registers.doorbell(id, Doorbell::SubmissionTail) + size - head) % size)
        });
        waiting.sum()
    }

    /// Deletes all queues.
    pub(crate) fn clear(&mut self, registers: &RegisterFile) {
        for (id, (sq, cq)) in (0..).zip(self.submission.iter_mut().zip(&mut self.completion)) {
            *sq = None;
            *cq = None;
            registers.set_queue_size(id, Doorbell::SubmissionTail, 0);
            registers.set_queue_size(id, Doorbell::CompletionHead, 0);
        }
    }

    /// Completes a command; returns the head of its completion queue if its completion waits for a
    /// free entry. Otherwise `observe` is told of it before it is written. The commands of a deleted
    /// queue have no completions.
    pub(crate) fn complete(
        &mut self,
        registers: &RegisterFile,
        bus: &impl Bus,
        command: CommandId,
        result: CommandResult,
        observe: impl FnOnce(&Cqe),
    ) -> Result<Option<u32>, BusFault> {
        let Some(Some(sq)) = self.submission.get(usize::from(command.queue)) else {
            return Ok(None);
        };
        let Some(Some(cq)) = self.completion.get_mut(usize::from(sq.cq)) else { return Ok(None) };
        // Also for a command that waits for a free entry: its queue may be deleted until then.
        registers.set_end(command.queue, Doorbell::SubmissionTail, sq.head);
        let cqe = Cqe {
            result: U32::new(result.value),
            result_high: U32::new(0),
            sq_head: U16::new(u16::try_from(sq.head).unwrap_or(0)),
            sq_id: U16::new(command.queue),
            cid: U16::new(command.cid),
            status_phase: U16::new(result.status.bits() << 1),
        };
        let written = cq.add(registers, bus, cqe, observe)?;
        Ok((!written).then(|| registers.doorbell(sq.cq, Doorbell::CompletionHead)))
    }
}
