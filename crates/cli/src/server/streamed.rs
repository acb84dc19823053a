//! Reads that are answered part by part, because there is no memory for all of their data at once.
//!
//! The memory of such a read is a window: a part is read, sent, and its buffer used for the next
//! one. In structured replies each part is a chunk, so an error can follow them. Otherwise the
//! parts follow one header in order, other replies of the connection wait behind them, and an error
//! after the first part can be reported only by the end of the connection ("Simple reply message").

use super::event_loop::EventLoop;
use super::operation::{Issue, Operation, Streamed};
use super::outgoing::Part;
use super::payload::PIECE;
use super::slab::Key;
use crate::targets::record::IoDirection;
use pinfold::Buffer;
use pinfold_nbd::{ErrorNumber, Request, reply};

/// The most memory of one such read: as much as its client may move in one turn.
const WINDOW: usize = super::receive::TURN;

impl EventLoop<'_, '_> {
    /// Starts a read with the memory that its client may have, or not at all if that is none.
    pub(super) fn start_streamed(&mut self, client: Key, operation: Operation) -> bool {
        let Request { offset, length, whole, .. } = operation.request;
        let mut left = (length as usize).min(WINDOW);
        let mut buffers = Vec::new();
        while left > 0
            && let Some(buffer) = self.take_memory(client, left.min(PIECE))
        {
            left = left.saturating_sub(buffer.len());
            buffers.push(buffer);
        }
        if buffers.is_empty() {
            return false;
        }
        let in_order = (whole || !operation.structured).then_some(offset);
        let streamed = Some(Streamed { next: offset, in_order });
        let key = self.insert(client, Operation { pending: 1, streamed, ..operation });
        if let Some(connection) = self.connections.get_mut(client) {
            connection.streaming = Some(key);
        }
        buffers.into_iter().for_each(|buffer| self.read_part(client, key, buffer));
        true
    }

    /// Reads the next part into a buffer, which is returned if nothing is left to be read.
    pub(super) fn read_part(&mut self, client: Key, key: Key, buffer: Buffer) {
        let operation = self.operations.get_mut(key);
        let end = operation.as_ref().map_or(0, |operation| operation.end());
        let part = operation.and_then(|operation| {
            let streamed = operation.streamed.as_mut().filter(|streamed| streamed.next < end)?;
            let at = streamed.next;
            let len = usize::try_from(end - at).unwrap_or(PIECE).min(buffer.len());
            streamed.next += len as u64;
            // With the last part there is no rest that counts as one.
            operation.pending += usize::from(streamed.next < end);
            Some((at, len))
        });
        match part {
            Some((at, len)) => {
                self.issues.push(client, Issue::new(key, IoDirection::Read, at, len, buffer));
            }
            None => self.return_memory(client, buffer),
        }
    }

    /// Reads no further parts; the caller looks whether the operation is complete.
    pub(super) fn stop_streamed(&mut self, key: Key) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let end = operation.end();
        if let Some(streamed) = operation.streamed.as_mut().filter(|streamed| streamed.next < end) {
            streamed.next = end;
            operation.pending -= 1;
        }
    }

    /// Appends what has been read to the replies, as far as that can be sent now.
    pub(super) fn send_parts(&mut self, key: Key) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let Some(streamed) = &mut operation.streamed else { return };
        let Request { cookie, offset, length, .. } = operation.request;
        let (structured, client) = (operation.structured, operation.connection);
        let Some(connection) = self.connections.get_mut(client) else { return };
        let outgoing = &mut connection.outgoing;
        let Some(at) = &mut streamed.in_order else {
            for (at, buffer, len) in operation.filled.drain(..) {
                let bytes = u32::try_from(len).unwrap_or(length);
                outgoing.push(Part::header(&reply::part_data(cookie, at, bytes)));
                outgoing.push(Part::Payload { buffer, len, of: Some(key) });
            }
            return self.list(client);
        };
        while let Some(index) = operation.filled.iter().position(|(offset, ..)| offset == at) {
            if *at == offset {
                outgoing.push(match structured {
                    true => Part::header(&reply::offset_data(cookie, offset, length)),
                    false => Part::header(&reply::simple(None, cookie)),
                });
                outgoing.hold_back();
            }
            let (_, buffer, len) = operation.filled.swap_remove(index);
            *at += len as u64;
            outgoing.push_first(Part::Payload { buffer, len, of: Some(key) });
        }
        self.list(client);
    }

    /// Ends the reply to a read all of whose parts have been read, or that has failed.
    pub(super) fn end_streamed(&mut self, client: Key, operation: Operation, streamed: &Streamed) {
        let Operation {
            request: Request { cookie, offset, .. },
            structured,
            error,
            filled,
            is_cut_off,
            ..
        } = operation;
        filled.into_iter().for_each(|(_, buffer, _)| self.return_memory(client, buffer));
        if let Some(connection) = self.connections.get_mut(client) {
            connection.streaming = None;
        }
        let began = streamed.in_order.is_some_and(|at| at > offset);
        match error {
            None if began => {
                if let Some(connection) = self.connections.get_mut(client) {
                    connection.outgoing.release();
                }
            }
            None => self.push(client, Part::header(&reply::none(cookie))),
            Some(_) if is_cut_off => {}
            Some(error) if began => self.break_off(client, error),
            Some(error) => self.reply_error(client, structured, error, cookie),
        }
    }

    /// Closes a connection behind what is being sent: the data of a reply that has begun cannot be
    /// completed.
    fn break_off(&mut self, client: Key, error: ErrorNumber) {
        self.stats.errors += 1;
        // One that is gone takes nothing any more, and may have sent writes behind the read.
        if let Some(connection) =
            self.connections.get_mut(client).filter(|connection| !connection.gone)
        {
            tracing::info!(
                "a client is disconnected: a read has failed ({error:?}) after its reply had begun"
            );
            self.stats.cut += 1;
            connection.ending = true;
        }
    }
}
