//! What a server has done.

use serde::Serialize;

/// What a server has done, besides its requests at the target.
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
    /// Those of them that arrived with a header and were copied into their buffer.
    pub(crate) copied: u64,
    /// Bytes of payload sent, which include descriptions of extents.
    pub(crate) sent: u64,
    /// How often a connection waited for memory.
    pub(crate) memory_waits: u64,
    /// Bytes of payload memory that a controller which did not answer may still reach: they are not
    /// used again.
    pub(crate) lost: u64,
    /// How often an event loop looked for events: ten times a second when idle.
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
