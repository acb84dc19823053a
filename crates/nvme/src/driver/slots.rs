//! The driver's own record of each command and request in flight. Nothing in it can be written by
//! the controller.

use super::data_pointer::DataPointer;
use super::error::CommandError;
use super::segments::SegmentCursor;
use crate::spec::{Command, Status};

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
    /// How often it was or will be sent again.
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
}

impl Operation {
    pub(super) fn moves_data(self) -> bool {
        matches!(self, Self::Read | Self::Write)
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
    pub(super) sequence: u32,
    pub(super) request: Request,
    pub(super) block_shift: u32,
    /// The first block of the next command.
    pub(super) next_slba: u64,
    /// Bytes (of reads, writes and zeroes) or commands (of others) that have not been sent.
    pub(super) unsent: u64,
    /// Commands in flight, or waiting for a retry.
    pub(super) commands: u16,
    pub(super) deadline_ns: u64,
    /// Whether the request is overdue and its commands are being aborted, until `deadline_ns`.
    pub(super) aborting: bool,
    /// Whether any of its commands was scheduled for a retry.
    pub(super) retried: bool,
    pub(super) error: Option<CommandError>,
    pub(super) segments: SegmentCursor,
}

impl RequestSlot {
    pub(super) fn start(
        &mut self,
        request: Request,
        block_shift: u32,
        unsent: u64,
        deadline_ns: u64,
    ) {
        (self.request, self.block_shift, self.next_slba) = (request, block_shift, request.slba);
        (self.unsent, self.commands, self.deadline_ns) = (unsent, 0, deadline_ns);
        (self.error, self.aborting, self.retried) = (None, false, false);
    }
}

impl Default for RequestSlot {
    fn default() -> Self {
        Self {
            busy: false,
            sequence: 0,
            request: Request::NONE,
            block_shift: 0,
            next_slba: 0,
            unsent: 0,
            commands: 0,
            deadline_ns: 0,
            aborting: false,
            retried: false,
            error: None,
            segments: SegmentCursor::default(),
        }
    }
}
