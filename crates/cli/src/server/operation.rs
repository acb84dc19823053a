//! A request at the target: the pieces that it consists of, and what becomes of them.

use super::slab::Key;
use crate::targets::record::{Io, IoDirection};
use pinfold::Buffer;
use pinfold_nbd::{ErrorNumber, Operation as Kind, Request};
use std::collections::VecDeque;

/// What the target does for a request at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// It reads, or writes what is received.
    Moving,
    /// It deallocates the range; `zeroes` if that is expected to zero it.
    Trimming {
        /// Whether the range must read as zeroes.
        zeroes: bool,
    },
    /// Zeroes are written, from here on.
    Zeroing {
        /// The next byte to be zeroed.
        next: u64,
    },
    /// What was written is made durable.
    Flushing,
}

/// The progress of a read that is answered part by part. Until all of it is at the target, the rest
/// counts as one of its operation's parts.
pub(super) struct Streamed {
    /// The next byte to be read.
    pub(super) next: u64,
    /// Without chunks: the next byte to be sent.
    pub(super) in_order: Option<u64>,
}

/// A request at the target.
pub(super) struct Operation {
    /// The client.
    pub(super) connection: Key,
    pub(super) request: Request,
    pub(super) structured: bool,
    pub(super) stage: Stage,
    /// How many parts have not completed; the payload that is being received counts as one.
    pub(super) pending: usize,
    /// How many parts the target has, and the bytes of their buffers, and of those that it has not
    /// given back.
    pub(super) at_target: usize,
    pub(super) lent: usize,
    pub(super) error: Option<ErrorNumber>,
    /// Its payload does not arrive any more, or its client takes no reply: there is none.
    pub(super) is_cut_off: bool,
    /// The parts of a large read that are issued when earlier ones complete.
    pub(super) unissued: VecDeque<Issue>,
    /// How far a read is that is answered part by part.
    pub(super) streamed: Option<Streamed>,
    /// The buffers that a read has filled, each with its offset.
    pub(super) filled: Vec<(u64, Buffer, usize)>,
}

impl Operation {
    pub(super) fn new(connection: Key, request: Request, structured: bool, stage: Stage) -> Self {
        let (unissued, filled) = (VecDeque::new(), Vec::new());
        Self {
            connection,
            request,
            structured,
            stage,
            pending: 0,
            at_target: 0,
            lent: 0,
            error: None,
            is_cut_off: false,
            unissued,
            streamed: None,
            filled,
        }
    }

    /// Returns the end of its range.
    pub(super) fn end(&self) -> u64 {
        // The range of a write that was refused is whatever the client says.
        self.request.offset.saturating_add(u64::from(self.request.length))
    }

    /// Returns whether it must be made durable before the reply, and is not yet.
    pub(super) fn needs_flush(&self) -> bool {
        let writes =
            matches!(self.request.operation, Kind::Write | Kind::Trim | Kind::WriteZeroes { .. });
        self.request.fua && writes && self.error.is_none() && self.stage != Stage::Flushing
    }

    /// Notes an error; the first one is reported.
    pub(super) fn fail(&mut self, error: ErrorNumber) {
        self.error = self.error.or(Some(error));
    }
}

/// A request for the target that waits for its turn.
pub(super) struct Issue {
    pub(super) io: Io,
    pub(super) buffer: Buffer,
}

impl Issue {
    /// Creates the request of an operation.
    pub(super) fn new(
        operation: Key,
        direction: IoDirection,
        offset: u64,
        len: usize,
        buffer: Buffer,
    ) -> Self {
        Self { io: Io::new(direction, offset, len).tagged(operation.to_word()), buffer }
    }
}
