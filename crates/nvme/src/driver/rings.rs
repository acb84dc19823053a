//! The host's side of a queue's rings.

use super::span::Span;
use crate::spec::{Command, Cqe};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

/// A submission queue: commands are written at the tail; the doorbell tells how far.
pub(super) struct SubmissionRing<S: ChunkSource> {
    memory: Span<S>,
    entries: u32,
    tail: u32,
    /// How many were written since the doorbell was rung.
    unrung: u32,
}

impl<S: ChunkSource> SubmissionRing<S> {
    /// `memory` has room for `entries` entries.
    pub(super) fn new(memory: Span<S>, entries: u32) -> Self {
        Self { memory, entries, tail: 0, unrung: 0 }
    }

    /// Writes a command. The caller has fewer than `entries` under way, so it overwrites none that is unread.
    pub(super) fn push(&mut self, command: &Command) {
        // Inside: the tail is below `entries`, for which there is room.
        let _ = self.memory.memory().copy_from_slice(self.tail as usize * Command::BYTES, command.as_bytes());
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        self.unrung += 1;
    }

    /// The tail to ring, if there is something to tell.
    pub(super) fn take_unrung(&mut self) -> Option<u32> {
        (std::mem::take(&mut self.unrung) > 0).then_some(self.tail)
    }

    pub(super) fn unrung(&self) -> u32 {
        self.unrung
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }
}

/// A completion queue: the controller writes; a phase bit tells new entries from old.
pub(super) struct CompletionRing<S: ChunkSource> {
    memory: Span<S>,
    entries: u32,
    head: u32,
    phase: bool,
    /// How many were read since the doorbell was rung.
    unrung: u32,
}

impl<S: ChunkSource> CompletionRing<S> {
    /// `memory` is all 0 and has room for `entries` entries.
    pub(super) fn new(memory: Span<S>, entries: u32) -> Self {
        Self { memory, entries, head: 0, phase: true, unrung: 0 }
    }

    /// The next entry, if the controller has written it. All of it is the controller's word and nothing more.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Cqe> {
        let (at, memory) = (self.head as usize * Cqe::BYTES, self.memory.memory());
        // Inside, as for the other ring; an error would only mean that there is nothing to be read.
        let last = u32::from_le(memory.load_acquire_u32(at + 12).ok()?);
        let [cid_low, cid_high, status_low, status_high] = last.to_le_bytes();
        if (status_low & 1 != 0) != self.phase {
            return None;
        }
        let word = |offset| memory.read_u32(at + offset).map(u32::from_le);
        let [sq_head_low, sq_head_high, sq_low, sq_high] = word(8).ok()?.to_le_bytes();
        let cqe = Cqe {
            result: U32::new(word(0).ok()?),
            result_high: U32::new(word(4).ok()?),
            sq_head: U16::from_bytes([sq_head_low, sq_head_high]),
            sq_id: U16::from_bytes([sq_low, sq_high]),
            cid: U16::from_bytes([cid_low, cid_high]),
            status_phase: U16::from_bytes([status_low, status_high]),
        };
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        self.unrung += 1;
        Some(cqe)
    }

    /// The head to ring, if there is something to tell.
    pub(super) fn take_unrung(&mut self) -> Option<u32> {
        (std::mem::take(&mut self.unrung) > 0).then_some(self.head)
    }

    /// The same, but only where the controller may run out of room for the completions of `under_way` commands.
    #[inline]
    pub(super) fn take_unrung_full(&mut self, under_way: usize) -> Option<u32> {
        // It leaves one entry empty, and takes those for full that it was not told of.
        let room = self.entries.saturating_sub(self.unrung).saturating_sub(1);
        if (room as usize) < under_way { self.take_unrung() } else { None }
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }
}
