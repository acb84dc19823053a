//! A request at the target: the pieces that it consists of, and their progress.

use super::payload::Key;
use crate::targets::target::{Io, IoDirection};
use pinfold::Buffer;
use pinfold_nbd::{ErrorNumber, Operation as Kind, Request};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};

/// The present work of the target for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// It reads, or writes received data.
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
    /// The written data is made durable.
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
    /// The number of parts that have not completed; the payload being received counts as one.
    pub(super) pending: usize,
    /// The number of parts at the target, with the bytes of their buffers, and of the buffers that
    /// it has not returned.
    pub(super) at_target: usize,
    pub(super) lent: usize,
    pub(super) error: Option<ErrorNumber>,
    /// Its payload does not arrive any more, or its client takes no reply: there is none.
    pub(super) is_cut_off: bool,
    /// The parts of a large read that are issued when earlier ones complete.
    pub(super) unissued: VecDeque<Issue>,
    /// The progress of a read that is answered part by part.
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

    /// Records an error; the first one is reported.
    pub(super) fn fail(&mut self, error: ErrorNumber) {
        self.error = self.error.or(Some(error));
    }
}

/// A request that waits for room in the target's queue.
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

// Requests that wait for room in the target's queue: one client after the other, each with its
// share.

/// The requests of one client.
#[derive(Default)]
struct Client {
    waiting: VecDeque<Issue>,
    at_target: usize,
}

/// The requests of all clients that wait for the target, and how many each has there.
#[derive(Default)]
pub(super) struct Issues {
    clients: HashMap<Key, Client>,
    /// The clients with waiting requests: the next one first.
    waiting: VecDeque<Key>,
}

impl Issues {
    /// Appends a request of `client`.
    pub(super) fn push(&mut self, client: Key, issue: Issue) {
        let entry = self.clients.entry(client).or_default();
        if entry.waiting.is_empty() {
            self.waiting.push_back(client);
        }
        entry.waiting.push_back(issue);
    }

    /// Takes the next request that may be issued while the target's queue has room for `free` more;
    /// it counts as at the target until [`note_returned`](Self::note_returned).
    ///
    /// A client may have as many there as the queue has room for: alone it gets half of the queue,
    /// with others an equal share, and there is room for one that comes later, however long the
    /// requests of the others take. Of clients that come one after the other, each gets half of
    /// what is left: eight whose requests do not complete fill a queue of 128.
    pub(super) fn pop(&mut self, free: usize) -> Option<(Key, Issue)> {
        for _ in 0..self.waiting.len() {
            let client = self.waiting.pop_front()?;
            let Some(entry) = self.clients.get_mut(&client) else { continue };
            if entry.at_target < free
                && let Some(issue) = entry.waiting.pop_front()
            {
                entry.at_target += 1;
                if !entry.waiting.is_empty() {
                    self.waiting.push_back(client);
                }
                return Some((client, issue));
            }
            self.waiting.push_back(client);
        }
        None
    }

    /// Records that a request of `client` has left the target, or did not get there.
    pub(super) fn note_returned(&mut self, client: Key) {
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.at_target = entry.at_target.saturating_sub(1);
            if entry.at_target == 0 && entry.waiting.is_empty() {
                self.clients.remove(&client);
            }
        }
    }
}

// The statistics of a server.

/// The statistics of a server, besides those of its requests at the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub(crate) struct ServeStats {
    /// Connections that were accepted.
    pub(crate) connections: u64,
    /// Connections that ended for a violation of the protocol, or a client that stalled.
    pub(crate) dropped: u64,
    /// Connections that were closed before all of their replies were sent: at the end, or because
    /// of a read that failed in the middle.
    pub(crate) cut: u64,
    /// Requests that were received.
    pub(crate) requests: u64,
    /// Requests that were answered with an error.
    pub(crate) errors: u64,
    /// Bytes of payload received.
    pub(crate) received: u64,
    /// The bytes of them that arrived with a header and were copied into their buffer.
    pub(crate) copied: u64,
    /// Bytes of payload sent, which include descriptions of extents.
    pub(crate) sent: u64,
    /// The number of times that a connection waited for memory.
    pub(crate) memory_waits: u64,
    /// Bytes of payload memory that a controller which did not answer may still reach: they are not
    /// used again.
    pub(crate) lost: u64,
    /// The number of times that an event loop checked for events: ten times a second when idle.
    pub(crate) turns: u64,
    /// Event loops whose last flush failed.
    pub(crate) unflushed: u64,
}

impl ServeStats {
    /// Adds those of another event loop.
    pub(crate) fn add(&mut self, other: &Self) {
        self.connections += other.connections;
        self.dropped += other.dropped;
        self.cut += other.cut;
        self.requests += other.requests;
        self.errors += other.errors;
        self.received += other.received;
        self.copied += other.copied;
        self.sent += other.sent;
        self.memory_waits += other.memory_waits;
        self.lost += other.lost;
        self.turns += other.turns;
        self.unflushed += other.unflushed;
    }
}

#[cfg(test)]
mod tests {
    use super::super::payload::Slab;
    use super::*;
    use crate::targets::target::IoDirection;
    use pinfold::{Arena, Source};

    /// Four clients with more requests than the queue holds, none of which completes, and one that
    /// comes last.
    #[test]
    fn the_last_client_finds_room_in_the_queue() {
        let arena = Arena::builder().size(4 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut keys = Slab::default();
        for (depth, hogs, alone) in [(1, 0, 1), (2, 1, 1), (8, 1, 4), (128, 1, 64), (128, 4, 26)] {
            let mut issues = Issues::default();
            let clients: Vec<_> = (0..=hogs).map(|_| keys.insert(())).collect();
            let push = |issues: &mut Issues, client| {
                let buffer = arena.alloc(4096).unwrap();
                issues.push(client, Issue::new(client, IoDirection::Read, 0, 512, buffer));
            };
            let (last, hogs) = clients.split_last().unwrap();
            for &hog in hogs {
                (0..depth).for_each(|_| push(&mut issues, hog));
            }
            let mut taken = 0;
            while let Some((client, _)) = issues.pop(depth - taken) {
                assert_eq!(client, hogs[taken % hogs.len()], "one after the other");
                taken += 1;
            }
            assert!(hogs.is_empty() || taken.div_ceil(hogs.len()) == alone, "{taken} of {depth}");
            push(&mut issues, *last);
            assert!(issues.pop(depth - taken).is_some_and(|(client, _)| client == *last));
            taken += 1;
            (0..taken - 1).for_each(|number| issues.note_returned(hogs[number % hogs.len()]));
            issues.note_returned(*last);
            while issues.pop(depth).is_some() {}
        }
    }
}
