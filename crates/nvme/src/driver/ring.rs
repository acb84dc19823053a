//! The host's side of submission and completion queues (Base 3.3.1).

use super::dma_buffer::{self, DmaBuffer};
use crate::spec::{Command, Cqe};
use core::mem::offset_of;
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::IntoBytes;

/// A submission queue: commands are written at the tail, and a doorbell publishes the tail.
pub(super) struct SubmissionRing<S: ChunkSource> {
    buffer: DmaBuffer<S>,
    entries: u32,
    tail: u32,
    /// Commands written since the last doorbell.
    unpublished: u32,
}

impl<S: ChunkSource> SubmissionRing<S> {
    /// Creates an empty ring in `buffer`, which holds `entries` entries.
    pub(super) fn new(buffer: DmaBuffer<S>, entries: u32) -> Self {
        Self { buffer, entries, tail: 0, unpublished: 0 }
    }

    /// Writes a command. The caller keeps fewer than `entries` commands in flight, so that no
    /// unread one is overwritten.
    pub(super) fn push(&mut self, command: &Command) {
        // In bounds: the tail is below `entries`.
        let _ = self
            .buffer
            .memory()
            .copy_from_slice(self.tail as usize * Command::BYTES, command.as_bytes());
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        self.unpublished += 1;
    }

    /// Returns the value for the doorbell, if commands were written since the last one.
    pub(super) fn take_tail(&mut self) -> Option<u32> {
        (std::mem::take(&mut self.unpublished) > 0).then_some(self.tail)
    }

    pub(super) fn unpublished(&self) -> u32 {
        self.unpublished
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }
}

/// A completion queue: the controller writes entries, whose phase tag distinguishes new from old.
pub(super) struct CompletionRing<S: ChunkSource> {
    buffer: DmaBuffer<S>,
    entries: u32,
    head: u32,
    phase: bool,
    /// Entries read since the last doorbell.
    unpublished: u32,
}

impl<S: ChunkSource> CompletionRing<S> {
    /// Creates an empty ring in `buffer`, which is zeroed and holds `entries` entries.
    pub(super) fn new(buffer: DmaBuffer<S>, entries: u32) -> Self {
        Self { buffer, entries, head: 0, phase: true, unpublished: 0 }
    }

    /// Whether the controller has written the next entry.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        // In bounds, as for the other ring. The acquire load orders reads of the entry behind its
        // phase tag.
        let at = self.head as usize * Cqe::BYTES + offset_of!(Cqe, cid);
        let last = self.buffer.memory().load_acquire_u32(at).map(u32::from_le);
        last.is_ok_and(|last| (last >> 16 & 1 != 0) == self.phase)
    }

    /// Reads the next entry, if the controller has written it. Its content is untrusted.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Cqe> {
        if !self.is_ready() {
            return None;
        }
        let cqe = dma_buffer::read(self.buffer.memory(), self.head as usize * Cqe::BYTES).ok()?;
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        self.unpublished += 1;
        Some(cqe)
    }

    /// Returns the value for the doorbell, if entries were read since the last one.
    pub(super) fn take_head(&mut self) -> Option<u32> {
        (std::mem::take(&mut self.unpublished) > 0).then_some(self.head)
    }

    /// As [`take_head`](Self::take_head), but only where the controller may lack entries for
    /// `in_flight` commands.
    #[inline]
    pub(super) fn take_head_if_full(&mut self, in_flight: usize) -> Option<u32> {
        // The controller leaves one entry empty and treats unacknowledged entries as occupied.
        let free = self.entries.saturating_sub(self.unpublished).saturating_sub(1);
        if (free as usize) < in_flight { self.take_head() } else { None }
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }
}
