//! Payloads from a client: into the buffers of a write, or discarded.

use super::connection::{Phase, Receiving};
use super::ended::Ended;
use super::event_loop::EventLoop;
use super::operation::Issue;
use super::payload::PIECE;
use super::receive::Next;
use super::slab::Key;
use crate::targets::record::IoDirection;
use pinfold_nbd::{ErrorNumber, RequestHeader};
use std::io::IoSliceMut;

impl EventLoop<'_, '_> {
    /// Receives into the buffer of a write; `payload` bytes are due.
    pub(super) fn receive_payload(&mut self, key: Key, payload: usize) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        let Some(mut receiving) = connection.receiving.take() else { return Ok(Next::Wait) };
        if receiving.buffer.is_none() {
            let Some(buffer) = self.take_memory(key, payload) else {
                if self.payloads.is_lost() {
                    if let Some(operation) = self.operations.get_mut(receiving.operation) {
                        operation.fail(ErrorNumber::NoMemory);
                    }
                    self.keep_receiving(key, Receiving { discards: true, ..receiving });
                    return Ok(Next::Continue);
                }
                self.keep_receiving(key, receiving);
                self.starve(key, payload.min(PIECE));
                return Ok(Next::Wait);
            };
            if let Some(connection) = self.connections.get_mut(key) {
                connection.waits_since = None;
            }
            (receiving.wanted, receiving.filled) = (buffer.len().min(payload), 0);
            receiving.buffer = Some(buffer);
        }
        let received = self.fill_buffer(key, &mut receiving, payload);
        if receiving.filled < receiving.wanted {
            self.keep_receiving(key, receiving);
            return received;
        }
        let Receiving { operation, offset, buffer: Some(buffer), wanted, .. } = receiving else {
            return received;
        };
        let is_last = self.connections.get_mut(key).is_none_or(|connection| {
            connection.note_done();
            connection.due_payload() == 0
        });
        // The payload counts as one part until its end.
        if let Some(operation) = self.operations.get_mut(operation).filter(|_| !is_last) {
            operation.pending += 1;
        }
        self.issues.push(key, Issue::new(operation, IoDirection::Write, offset, wanted, buffer));
        if !is_last {
            let offset = offset + wanted as u64;
            self.keep_receiving(key, Receiving::new(operation, offset, false));
        }
        received
    }

    fn keep_receiving(&mut self, key: Key, receiving: Receiving) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.receiving = Some(receiving);
        }
    }

    /// Moves what has arrived into the buffer of a write. With the end of the payload, the next
    /// header is received by the same call.
    fn fill_buffer(
        &mut self,
        key: Key,
        receiving: &mut Receiving,
        payload: usize,
    ) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        let Phase::Transmission(_, reader) = &mut connection.phase else { return Ok(Next::Wait) };
        let Receiving { buffer: Some(buffer), wanted, filled, .. } = receiving else {
            return Ok(Next::Wait);
        };
        // The arena is mapped per use, so the slice is available.
        let space = buffer.as_mut_slice().ok().and_then(|bytes| bytes.get_mut(*filled..*wanted));
        let space = space.unwrap_or_default();
        let missing = space.len();
        let early = connection.input.unused();
        let moved = if early.is_empty() {
            if !connection.readable {
                return Ok(Next::Wait);
            }
            let ends = *wanted == payload + *filled;
            let header_bytes = if ends { RequestHeader::BYTES } else { 0 };
            let header = connection.input.space(header_bytes);
            let mut slices = [IoSliceMut::new(space), IoSliceMut::new(header)];
            match connection.stream.receive(&mut slices).map_err(Ended::Broken)? {
                None => return connection.note_empty().map(|()| Next::Wait),
                Some(0) => return Err(Ended::Closed),
                Some(moved) => {
                    connection.readable = connection.hung_up || moved == missing + header_bytes;
                    connection.input.end = moved.saturating_sub(missing);
                    moved.min(missing)
                }
            }
        } else {
            let moved = early.len().min(missing);
            space.iter_mut().zip(early).for_each(|(to, from)| *to = *from);
            connection.input.take(moved);
            self.stats.copied += moved as u64;
            moved
        };
        *filled += moved;
        // Both are at most the payload, whose length has 32 bits.
        reader.take_payload(u32::try_from(moved).unwrap_or(u32::MAX));
        connection.note_moved(moved);
        self.turn = self.turn.saturating_sub(moved);
        self.stats.received += moved as u64;
        Ok(Next::Continue)
    }

    /// Drops the payload of a refused write, and has it answered at its end.
    pub(super) fn discard_payload(&mut self, key: Key, payload: usize) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        let Phase::Transmission(_, reader) = &mut connection.phase else { return Ok(Next::Wait) };
        let early = connection.input.unused().len();
        let moved = if early > 0 {
            let moved = early.min(payload);
            connection.input.take(moved);
            moved
        } else {
            if !connection.readable {
                return Ok(Next::Wait);
            }
            let most = payload.min(self.scratch.len());
            let space = self.scratch.get_mut(..most).unwrap_or_default();
            match connection.stream.receive(&mut [IoSliceMut::new(space)]).map_err(Ended::Broken)? {
                None => return connection.note_empty().map(|()| Next::Wait),
                Some(0) => return Err(Ended::Closed),
                Some(moved) => moved,
            }
        };
        reader.take_payload(u32::try_from(moved).unwrap_or(u32::MAX));
        let is_over = reader.payload() == 0;
        connection.note_moved(moved);
        self.turn = self.turn.saturating_sub(moved);
        self.stats.received += moved as u64;
        if is_over && let Some(receiving) = connection.receiving.take() {
            connection.waits_since = None;
            self.end_payload(receiving.operation);
        }
        Ok(Next::Continue)
    }
}
