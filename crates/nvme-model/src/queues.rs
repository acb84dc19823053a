//! The controller's side of the queues.

use crate::bus::{Bus, BusFault};
use crate::registers::RegisterFile;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Cqe, Doorbell, Status};
use std::collections::VecDeque;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, IntoBytes};

/// How many commands are fetched by one access.
pub(crate) const FETCH: usize = 16;

/// A submission queue.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) base: Iova,
    pub(crate) size: u32,
    pub(crate) head: u32,
    pub(crate) cq: u16,
}

impl Submission {
    /// Fetches what has come in, at most [`FETCH`] commands, into `batch`; how many.
    pub(crate) fn fetch(
        &mut self,
        bus: &impl Bus,
        tail: u32,
        bytes: &mut [u8; FETCH * Command::BYTES],
        batch: &mut [Command; FETCH],
    ) -> Result<usize, BusFault> {
        let waiting = if tail >= self.head { tail - self.head } else { self.size - self.head };
        let count = usize::try_from(waiting).unwrap_or(FETCH).min(FETCH);
        let Some(part) = bytes.get_mut(..count * Command::BYTES).filter(|part| !part.is_empty()) else {
            return Ok(0);
        };
        let at = Iova::new(self.base.raw().wrapping_add(u64::from(self.head) * Command::BYTES as u64));
        bus.read(at, part)?;
        for (command, from) in batch.iter_mut().zip(part.chunks_exact(Command::BYTES)) {
            *command = Command::read_from_bytes(from).unwrap_or_default();
        }
        // count <= FETCH
        self.head = (self.head + u32::try_from(count).unwrap_or(0)) % self.size;
        Ok(count)
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Completions {
    pub(crate) base: Iova,
    pub(crate) size: u32,
    pub(crate) users: u16,
    tail: u32,
    phase: bool,
    backlog: VecDeque<Cqe>,
    /// Which interrupt it raises, and whether it has something to tell.
    vector: Option<u16>,
    signal: bool,
}

impl Completions {
    pub(crate) fn new(base: Iova, size: u32, vector: Option<u16>) -> Self {
        let backlog = VecDeque::new();
        Self { base, size, users: 0, tail: 0, phase: true, backlog, vector, signal: false }
    }

    /// Whether completions wait for room.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether an entry can be written, the host having read up to `head`.
    pub(crate) fn has_room(&self, head: u32) -> bool {
        (self.tail + 1) % self.size != head
    }

    /// Writes a completion, or keeps it until there is room.
    pub(crate) fn post(&mut self, bus: &impl Bus, head: u32, cqe: Cqe) -> Result<(), BusFault> {
        if self.is_blocked() || !self.has_room(head) {
            self.backlog.push_back(cqe);
            return Ok(());
        }
        self.write(bus, cqe)
    }

    /// Writes what waits; whether any of it could be.
    pub(crate) fn drain(&mut self, bus: &impl Bus, head: u32) -> Result<bool, BusFault> {
        let mut any = false;
        while self.has_room(head) {
            let Some(cqe) = self.backlog.pop_front() else { break };
            self.write(bus, cqe)?;
            any = true;
        }
        Ok(any)
    }

    fn write(&mut self, bus: &impl Bus, mut cqe: Cqe) -> Result<(), BusFault> {
        cqe.status_phase = U16::new(cqe.status_phase.get() & !1 | u16::from(self.phase));
        let at = self.base.raw().wrapping_add(u64::from(self.tail) * Cqe::BYTES as u64);
        if let Some((body, last)) = cqe.as_bytes().split_last_chunk::<4>() {
            bus.write(Iova::new(at), body)?;
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
    pub(crate) submission: Vec<Option<Submission>>,
    pub(crate) completion: Vec<Option<Completions>>,
}

impl Queues {
    pub(crate) fn new(queues: u16) -> Self {
        let none = || usize::from(queues) + 1;
        Self {
            submission: (0..none()).map(|_| None).collect(),
            completion: (0..none()).map(|_| None).collect(),
        }
    }

    /// The interrupts that are due.
    pub(crate) fn take_signals(&mut self) -> impl Iterator<Item = u16> {
        let due = |cq: &mut Completions| std::mem::take(&mut cq.signal).then_some(cq.vector).flatten();
        self.completion.iter_mut().flatten().filter_map(due)
    }

    /// Drops all of them.
    pub(crate) fn clear(&mut self, shared: &RegisterFile) {
        for (id, (sq, cq)) in (0..).zip(self.submission.iter_mut().zip(&mut self.completion)) {
            *sq = None;
            *cq = None;
            for which in [Doorbell::SubmissionTail, Doorbell::CompletionHead] {
                if let Some(bell) = shared.bell(id, which) {
                    bell.set_size(0);
                }
            }
        }
    }

    /// Completes command `cid` of submission queue `sq_id`; a queue that is gone takes no completion.
    pub(crate) fn complete(
        &mut self,
        shared: &RegisterFile,
        bus: &impl Bus,
        (sq_id, cid): (u16, u16),
        (status, result): (Status, u32),
    ) -> Result<(), BusFault> {
        let Some(Some(sq)) = self.submission.get(usize::from(sq_id)) else { return Ok(()) };
        let Some(Some(cq)) = self.completion.get_mut(usize::from(sq.cq)) else { return Ok(()) };
        let head = shared.bell(sq.cq, Doorbell::CompletionHead).map_or(0, |bell| bell.value());
        let cqe = Cqe {
            result: U32::new(result),
            result_high: U32::new(0),
            sq_head: U16::new(u16::try_from(sq.head).unwrap_or(0)),
            sq_id: U16::new(sq_id),
            cid: U16::new(cid),
            status_phase: U16::new(status.bits() << 1),
        };
        cq.post(bus, head, cqe)
    }
}
