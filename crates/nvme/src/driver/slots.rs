//! The queues in memory, and the driver's own record of each command and request in flight. Nothing
//! in it can be written by the controller.

use super::data_pointer::{DataPointer, SegmentCursor};
use super::error::{CommandError, Error};
use super::passthrough::RawCommand;
use crate::spec::{Command, Cqe, Status};
use core::mem::offset_of;
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use pinfold_core::frame::Frame;
use pinfold_core::mem::{AccessError, DmaMemory};
use std::collections::TryReserveError;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Returns an empty list with room for `count` values.
pub(super) fn room<T>(count: usize) -> Result<Vec<T>, TryReserveError> {
    let mut list = Vec::new();
    list.try_reserve_exact(count)?;
    Ok(list)
}

/// Returns a list of `count` values.
pub(super) fn list<T>(
    count: usize,
    value: impl FnMut(usize) -> T,
) -> Result<Vec<T>, TryReserveError> {
    let mut list = room(count)?;
    list.extend((0..count).map(value));
    Ok(list)
}

/// A command. Its identifier is the slot and the slot's use count, so that a second completion of
/// an earlier command in the same slot is recognised.
#[derive(Debug, Default)]
pub(super) struct CommandSlot {
    pub(super) state: CommandState,
    pub(super) uses: u16,
    /// The request that the command belongs to; meaningful while in flight.
    pub(super) tag: u16,
    pub(super) abort: AbortState,
    pub(super) data: Option<DataPointer>,
    /// The command as it was sent, for a retry.
    pub(super) command: Command,
    pub(super) retry: RetryState,
}

/// The retries of a command.
#[derive(Clone, Copy, Debug)]
pub(super) struct RetryState {
    /// The number of times that it was or will be sent again.
    pub(super) attempts: u32,
    /// When it failed first; meaningful after the first attempt.
    pub(super) since_ns: u64,
    /// When it is sent again; meaningful while it waits.
    pub(super) due_ns: u64,
    /// The status of the last attempt.
    pub(super) status: Status,
}

impl Default for RetryState {
    fn default() -> Self {
        Self { attempts: 0, since_ns: 0, due_ns: 0, status: Status::SUCCESS }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum CommandState {
    #[default]
    Free,
    InFlight,
    /// Its request was quarantined. A late completion or a reset frees it.
    Quarantined,
    /// Completed while an abort of it is outstanding: the identifier is not reused before the abort
    /// is answered, since the abort would hit the later command.
    AwaitingAbort,
    /// Completed with a status that permits a retry: it is sent again when it is due.
    AwaitingRetry,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum AbortState {
    #[default]
    None,
    Outstanding,
    Answered,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// A command of the program's own, and the bytes of its payload. It is never split.
    Raw(RawCommand, u64),
}

impl Operation {
    /// Returns the bytes of the payload of a request for `blocks` blocks.
    pub(super) fn payload_bytes(self, blocks: u32, block_shift: u32) -> u64 {
        match self {
            Self::Read | Self::Write => u64::from(blocks) << block_shift,
            Self::Raw(_, bytes) => bytes,
            Self::Flush | Self::Discard | Self::WriteZeroes => 0,
        }
    }

    /// Returns whether the request may change blocks.
    pub(super) fn changes_blocks(self) -> bool {
        match self {
            Self::Read => false,
            Self::Raw(command, _) => command.changes_blocks(),
            _ => true,
        }
    }

    /// Returns whether it must not be sent again after it may have been carried out: a second flush
    /// could succeed without the data that the first has lost, and a command of the program's own is
    /// not known to have the same effect twice.
    pub(super) fn is_sent_once(self) -> bool {
        matches!(self, Self::Flush | Self::Raw(..))
    }
}

/// A request as it was submitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) nsid: u32,
    pub(super) slba: u64,
    pub(super) blocks: u32,
}

impl Request {
    const NONE: Self = Self { operation: Operation::Flush, nsid: 0, slba: 0, blocks: 0 };
}

/// A request in flight, from submission until its completion is returned: the one record of it.
#[derive(Debug)]
pub(super) struct RequestSlot {
    pub(super) busy: bool,
    pub(super) sequence: u64,
    pub(super) request: Request,
    /// Older requests of the queue that it conflicts with.
    pub(super) blockers: usize,
    /// Whether other queues wait for it: it is retried, or waits for what is, or for another queue.
    pub(super) listed: bool,
    /// The age on the list of retries: older entries have to end first. Meaningful while it is
    /// unblocked or listed.
    pub(super) age: u64,
    pub(super) block_shift: u32,
    /// The first block of the next command.
    pub(super) next_slba: u64,
    /// Bytes (of reads, writes and zeroes) or commands (of others) that have not been sent.
    pub(super) unsent: u64,
    /// Commands in flight, or waiting for a retry.
    pub(super) commands: u16,
    pub(super) deadline_ns: u64,
    /// The latest that retries may extend `deadline_ns` to, however many of its commands there are.
    limit_ns: u64,
    /// Whether the request is overdue and its commands are being aborted, until `deadline_ns`.
    pub(super) aborting: bool,
    /// Whether any of its commands was scheduled for a retry.
    pub(super) retried: bool,
    /// Whether its owner has given it up: nothing of it is sent again.
    pub(super) given_up: bool,
    pub(super) error: Option<CommandError>,
    /// DW0 of the completion of its last command.
    pub(super) value: u32,
    pub(super) segments: SegmentCursor,
}

impl RequestSlot {
    pub(super) fn start(&mut self, request: Request, block_shift: u32, unsent: u64) {
        (self.request, self.block_shift, self.next_slba) = (request, block_shift, request.slba);
        (self.unsent, self.commands) = (unsent, 0);
        (self.error, self.aborting, self.retried, self.given_up) = (None, false, false, false);
        (self.listed, self.value) = (false, 0);
    }

    /// Sets the deadline, which retries may extend by `extension_ns` in all.
    pub(super) fn set_deadline(&mut self, deadline_ns: u64, extension_ns: u64) {
        self.deadline_ns = deadline_ns;
        self.limit_ns = deadline_ns.saturating_add(extension_ns);
    }

    /// Extends the deadline for a retry, as far as its limit permits; returns whether it does.
    pub(super) fn extend_deadline(&mut self, deadline_ns: u64) -> bool {
        self.deadline_ns = self.deadline_ns.max(deadline_ns.min(self.limit_ns));
        deadline_ns <= self.limit_ns
    }
}

impl Default for RequestSlot {
    fn default() -> Self {
        Self {
            busy: false,
            sequence: 0,
            request: Request::NONE,
            blockers: 0,
            listed: false,
            age: 0,
            block_shift: 0,
            next_slba: 0,
            unsent: 0,
            commands: 0,
            deadline_ns: 0,
            limit_ns: 0,
            aborting: false,
            retried: false,
            given_up: false,
            error: None,
            value: 0,
            segments: SegmentCursor::default(),
        }
    }
}

// The host's side of submission and completion queues (Base 3.3.1).

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

    /// Returns whether the controller has written the next entry.
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
        let cqe = read(self.buffer.memory(), self.head as usize * Cqe::BYTES).ok()?;
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

    /// Like [`take_head`](Self::take_head), but only where the controller may lack entries for
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

// Command identifiers.

/// The layout of a queue's command identifiers: the slot of the command in the low bits, and above
/// it as many bits of the slot's use count as fit. FFFFh is not used: it means "no command" in the
/// error log (Base 3.3.3.1).
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandIds {
    slot_bits: u32,
}

impl CommandIds {
    const RESERVED: u16 = 0xffff;

    /// Creates the scheme for `slots` slots: at least 1, and at most 65,535, as a ring of 65,536
    /// entries has.
    pub(super) fn new(slots: usize) -> Self {
        Self { slot_bits: (usize::BITS - (slots - 1).leading_zeros()).min(16) }
    }

    /// Returns the slot that an identifier names; it may be out of range.
    pub(super) fn slot(self, cid: u16) -> u16 {
        let [a, b, ..] = (u32::from(cid) & ((1 << self.slot_bits) - 1)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    pub(super) fn encode(self, uses: u16, slot: u16) -> u16 {
        // The upper bits of the use count are cut off, on both sides of each comparison.
        let [a, b, ..] = (u32::from(uses) << self.slot_bits | u32::from(slot)).to_le_bytes();
        u16::from_le_bytes([a, b])
    }

    /// Returns the use count of the next command in `slot`.
    pub(super) fn next(self, uses: u16, slot: u16) -> u16 {
        let next = uses.wrapping_add(1);
        if self.encode(next, slot) == Self::RESERVED { next.wrapping_add(1) } else { next }
    }
}

/// Returns the identifier after `cid` for a queue that numbers its commands in order.
pub(super) fn next_sequential(cid: u16) -> u16 {
    if cid >= CommandIds::RESERVED - 1 { 0 } else { cid + 1 }
}

// Memory for rings and buffers, and typed reads of the values that the controller wrote there.

/// Frames that the controller can access. They are released by their last owner: the ring, or the
/// queue or [`PendingRelease`](super::inner::PendingRelease) that waits until the controller no
/// longer uses them.
pub(super) type DmaBuffer<S> = Arc<Coherent<S>>;

/// Allocates at least `bytes` zeroed bytes.
pub(super) fn allocate<S: ChunkSource + Clone>(
    source: &S,
    bytes: usize,
    what: &'static str,
) -> Result<DmaBuffer<S>, Error> {
    let run = Coherent::new(source.clone(), bytes as u64)
        .map_err(|error| Error::Source { what, error })?;
    if !run.iova().is_aligned(Frame::BYTES) {
        return Err(Error::BadSource { what });
    }
    run.zero();
    Ok(Arc::new(run))
}

/// Copies a `T` out of memory that the controller can write; the copy no longer changes.
#[inline]
pub(super) fn read<T: FromBytes + IntoBytes>(
    memory: DmaMemory<'_>,
    offset: usize,
) -> Result<T, AccessError> {
    let mut value = T::new_zeroed();
    memory.copy_to_slice(offset, value.as_mut_bytes())?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_identifier_is_ffff_for_any_number_of_slots() {
        for slots in [1, 2, 63, 64, 65, 1023, 1024, 4096, 32_768, 32_769, 65_535] {
            let ids = CommandIds::new(slots);
            let last = u16::try_from(slots - 1).unwrap();
            for slot in [0, 1.min(last), last / 2, last] {
                let mut uses = 0;
                for _ in 0..70_000 {
                    let before = ids.encode(uses, slot);
                    uses = ids.next(uses, slot);
                    let cid = ids.encode(uses, slot);
                    assert_ne!(cid, 0xffff, "{slots} slots");
                    assert_eq!(ids.slot(cid), slot);
                    // With 15 or 16 bits for the slot, none are left for the use count of the last
                    // slot.
                    assert!(cid != before || slots >= 32_768);
                }
            }
        }
        let mut cid = 0;
        for _ in 0..70_000 {
            cid = next_sequential(cid);
            assert_ne!(cid, 0xffff);
        }
    }
}
