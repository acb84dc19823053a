//! The state of a client's connection.

use super::error::Ended;
use super::outgoing::Outgoing;
use super::payload::Key;
use super::stream::{Input, Stream};
use pinfold::Buffer;
use pinfold_nbd::{Handshake, Request, RequestReader, Session};
use std::io::IoSliceMut;
use std::time::Duration;

/// The bytes that one call receives besides a payload: 146 headers.
pub(super) const INPUT: usize = 4096;
/// The most requests of a client that are executed at the same time.
const MAX_OPERATIONS: usize = 256;
/// The most parts of replies that wait for a client.
const MAX_OUTGOING: usize = 1024;
/// The memory of a client from which on no further request of its is accepted, bytes: enough to
/// keep a device busy, and so little that payloads are still in the processor's cache when they are
/// sent.
const WINDOW: usize = 2 << 20;
/// The time limit of a client's handshake, and of a client's hold on memory that others wait for.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 8 } else { 30 });
/// The bytes that count as progress of a client whose memory others wait for. Single bytes now and
/// then do not, and neither do completions of the target.
const PROGRESS: usize = 64 << 10;

/// The protocol phase of a connection.
pub(super) enum Phase {
    /// Options are being negotiated.
    Handshake(Handshake),
    /// Requests are being received.
    Transmission(Session, RequestReader),
}

/// The payload of a write that is being received.
pub(super) struct Receiving {
    /// The operation.
    pub(super) operation: Key,
    /// The offset of the buffer's first byte in the export.
    pub(super) offset: u64,
    /// The buffer, once there is one.
    pub(super) buffer: Option<Buffer>,
    /// The number of bytes that it will hold, and that it holds.
    pub(super) wanted: usize,
    pub(super) filled: usize,
    /// The request is refused: the rest is discarded, and the reply follows it.
    pub(super) discards: bool,
}

impl Receiving {
    /// Begins with the payload of `operation` at `offset`.
    pub(super) fn new(operation: Key, offset: u64, discards: bool) -> Self {
        Self { operation, offset, buffer: None, wanted: 0, filled: 0, discards }
    }
}

/// A client.
pub(super) struct Connection {
    /// Its key in the table of its event loop.
    pub(super) key: Key,
    pub(super) stream: Stream,
    pub(super) phase: Phase,
    pub(super) input: Input,
    pub(super) outgoing: Outgoing,
    /// The payload of the present write.
    pub(super) receiving: Option<Receiving>,
    /// A request that waits for memory.
    pub(super) waiting: Option<Request>,
    /// Whether the last request was a write: then headers are received alone, and payloads directly
    /// into their buffers.
    pub(super) writes: bool,
    /// Whether the socket may have input, or space for output.
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Whether the client has closed its end: input ends without another event.
    pub(super) hung_up: bool,
    /// Whether it takes no replies either: they are discarded, and what it had sent before is done.
    pub(super) gone: bool,
    /// No more requests are received; it is closed when all replies are sent.
    pub(super) ending: bool,
    /// TLS begins as soon as the reply to STARTTLS is sent.
    pub(super) securing: bool,
    /// Whether it is in the list of connections to be served.
    pub(super) listed: bool,
    /// Requests at the target.
    pub(super) operations: usize,
    /// The page for the answer to its question about extents, which counts as an operation: it has
    /// one at a time.
    pub(super) asking: Option<Buffer>,
    /// The read among them that is answered part by part.
    pub(super) streaming: Option<Key>,
    /// Bytes of memory that it holds.
    pub(super) held: usize,
    /// Since when it waits for memory that others hold.
    pub(super) waits_since: Option<Duration>,
    /// When it was accepted.
    accepted: Duration,
    /// Since when the server waits for the client to take a reply or to send the rest of a payload,
    /// without [`PROGRESS`] bytes having moved.
    waiting_since: Option<Duration>,
    /// The bytes that were moved since then.
    moved: usize,
}

impl Connection {
    /// Greets a client at `now`, by the clock of the event loop. It has to begin TLS if `tls`.
    pub(super) fn new(key: Key, stream: Stream, tls: bool, now: Duration) -> Self {
        let mut greeting = Vec::new();
        let start = if tls { Handshake::requiring_tls } else { Handshake::new };
        let handshake = start(&mut greeting);
        let mut outgoing = Outgoing::default();
        outgoing.push(super::outgoing::Part::Bytes(greeting));
        Self {
            key,
            stream,
            phase: Phase::Handshake(handshake),
            input: Input::new(INPUT),
            outgoing,
            receiving: None,
            waiting: None,
            writes: false,
            readable: true,
            writable: true,
            hung_up: false,
            gone: false,
            ending: false,
            securing: false,
            listed: false,
            operations: 0,
            asking: None,
            streaming: None,
            held: 0,
            waits_since: None,
            accepted: now,
            waiting_since: None,
            moved: 0,
        }
    }

    /// Returns whether options are still being negotiated.
    pub(super) fn is_in_handshake(&self) -> bool {
        matches!(self.phase, Phase::Handshake(_))
    }

    /// Records that the client has sent or taken bytes, which is no progress until they are
    /// [`PROGRESS`].
    pub(super) fn note_moved(&mut self, bytes: usize) {
        self.moved += bytes;
        if self.moved >= PROGRESS {
            (self.waiting_since, self.moved) = (None, 0);
        }
    }

    /// Records that the client has taken replies, or sent all of a payload: if nothing else is to
    /// be taken or sent, the server no longer waits for it.
    pub(super) fn note_done(&mut self) {
        if !self.has_output() && self.receiving.is_none() {
            (self.waiting_since, self.moved) = (None, 0);
        }
    }

    /// Records whether the server waits for the client: to take replies that its socket has no
    /// space for, or to send the rest of a payload for which there is memory. Its requests at the
    /// target do not matter.
    pub(super) fn note_waiting(&mut self, now: Duration) {
        let takes = self.has_output() && !self.writable;
        let sends = self.receiving.as_ref().is_some_and(|receiving| receiving.buffer.is_some())
            && !self.readable;
        if takes || sends {
            self.waiting_since.get_or_insert(now);
        } else {
            (self.waiting_since, self.moved) = (None, 0);
        }
    }

    /// Returns whether it has taken longer than a client may: for its handshake, or while the
    /// server waits for it since `start`, when others began to wait for memory, which it holds.
    pub(super) fn is_stalled(&self, start: Option<Duration>, now: Duration) -> bool {
        if self.is_in_handshake() {
            return now.saturating_sub(self.accepted) > PATIENCE;
        }
        let since = self.waiting_since.filter(|_| self.held > 0);
        since
            .zip(start)
            .is_some_and(|(since, start)| now.saturating_sub(since.max(start)) > PATIENCE)
    }

    /// Returns whether the client has to take replies before more of its requests are accepted.
    pub(super) fn is_saturated(&self) -> bool {
        // The payload of a request that was accepted is received in any case.
        let is_between = self.receiving.is_none() && self.due_payload() == 0;
        self.operations >= MAX_OPERATIONS
            || self.outgoing.len() >= MAX_OUTGOING
            || (is_between && self.held >= WINDOW)
    }

    /// Returns whether nothing remains to be done for a connection that is ending.
    pub(super) fn is_done(&self) -> bool {
        self.ending && self.operations == 0 && !self.has_output() && self.waiting.is_none()
    }

    /// Returns whether something waits to be sent, and can be.
    pub(super) fn has_output(&self) -> bool {
        !self.gone && (!self.outgoing.is_empty() || self.stream.has_unsent())
    }

    /// Records that the client takes no more replies. The bytes that it had sent before are still
    /// to be received.
    pub(super) fn note_gone(&mut self) {
        (self.gone, self.hung_up, self.readable) = (true, true, true);
    }

    /// Records that nothing more has arrived: nothing will, from a client that is gone.
    pub(super) fn note_empty(&mut self) -> Result<(), Ended> {
        self.readable = false;
        if self.gone && !self.stream.has_more() { Err(Ended::Closed) } else { Ok(()) }
    }

    /// Returns how many bytes of the present payload have not been taken from the stream.
    pub(super) fn due_payload(&self) -> u32 {
        match &self.phase {
            Phase::Handshake(_) => 0,
            Phase::Transmission(_, reader) => reader.payload(),
        }
    }

    /// Fills the input buffer with at most `limit` bytes. Returns how many there are now; 0 if
    /// nothing has arrived.
    pub(super) fn fill_input(&mut self, limit: usize) -> Result<usize, Ended> {
        let space = self.input.space(limit);
        let received = self.stream.receive(&mut [IoSliceMut::new(space)]).map_err(Ended::Broken)?;
        match received {
            None => self.note_empty().map(|()| 0),
            Some(0) => Err(Ended::Closed),
            Some(received) => {
                // A short count means that nothing more had arrived (epoll(7)); the end is reported
                // by an event of its own.
                self.readable = self.hung_up || received == limit.min(INPUT);
                self.input.end = received;
                self.note_moved(received);
                Ok(received)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn connection() -> Connection {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        Connection::new(Key::from_word(0), Stream::unix(ours).unwrap(), false, NOW)
    }

    const LONG: Duration = Duration::from_secs(PATIENCE.as_secs() + 1);
    const NOW: Duration = Duration::from_secs(1000);

    #[test]
    fn bytes_prolong_no_handshake() {
        let mut connection = connection();
        assert!(!connection.is_stalled(None, NOW));
        connection.accepted = NOW - LONG;
        connection.note_moved(PROGRESS);
        assert!(connection.is_stalled(None, NOW));
    }

    #[test]
    fn only_what_the_client_takes_or_sends_is_progress() {
        let mut connection = connection();
        connection.phase = Phase::Transmission(Session::default(), RequestReader::default());
        connection.held = 4096;
        connection.outgoing.push(super::super::outgoing::Part::Bytes(vec![0; 100]));
        connection.note_waiting(NOW);
        assert!(
            connection.waiting_since.is_none(),
            "its socket has space: the client waits for the server"
        );
        connection.writable = false;
        connection.note_waiting(NOW);
        connection.waiting_since = connection.waiting_since.map(|_| NOW - 2 * LONG);
        assert!(!connection.is_stalled(None, NOW), "no client waits");
        assert!(!connection.is_stalled(Some(NOW), NOW), "they have just begun to");
        assert!(connection.is_stalled(Some(NOW - LONG), NOW));
        connection.operations = 1;
        connection.note_waiting(NOW);
        assert!(
            connection.is_stalled(Some(NOW - LONG), NOW),
            "a request at the target is no excuse"
        );
        connection.note_moved(PROGRESS - 1);
        assert!(connection.is_stalled(Some(NOW - LONG), NOW), "a few bytes are no progress");
        connection.note_moved(1);
        connection.note_waiting(NOW);
        assert!(!connection.is_stalled(Some(NOW - LONG), NOW));
        connection.waiting_since = Some(NOW - LONG);
        connection.held = 0;
        assert!(!connection.is_stalled(Some(NOW - LONG), NOW), "it holds nothing");
        connection.held = 4096;
        connection.writable = true;
        connection.note_waiting(NOW);
        assert!(!connection.is_stalled(Some(NOW - LONG), NOW), "the client has caught up");
    }
}
