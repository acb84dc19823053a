//! The translation of the target's completions to replies.

use super::connection::Connection;
use super::error::WARNINGS;
use super::event_loop::Service;
use super::operation::{Issue, Operation, Stage, Streamed};
use super::outgoing::Part;
use super::payload::{Key, PIECE};
use crate::targets::target::{Completion, Io, IoDirection, TargetError, is_no_operation};
use pinfold::Buffer;
use pinfold::uring::FileError;
use pinfold_nbd::{ErrorNumber, Operation as Kind, Request, reply};
use pinfold_nvme::driver::CommandError;
use pinfold_nvme::spec::Status;
use rustix::io::Errno;

/// "Namespace is Write Protected" (NVM Express Base Specification 2.0, figure 96).
const WRITE_PROTECTED: Status = Status::from_bits(0x20);

/// Returns the error that a client sees.
fn number(error: &TargetError) -> ErrorNumber {
    let status = match error {
        TargetError::File(FileError::Transfer { errno, .. } | FileError::System { errno, .. })
        | TargetError::Trim { errno, .. } => {
            return match *errno {
                // A limit of the file's size is one of its space, too.
                Errno::NOSPC | Errno::DQUOT | Errno::FBIG => ErrorNumber::NoSpace,
                Errno::PERM | Errno::ACCESS | Errno::ROFS => ErrorNumber::NotPermitted,
                _ => ErrorNumber::Io,
            };
        }
        TargetError::Command { error: CommandError::Status(status), .. }
        | TargetError::Flush { error: Some(CommandError::Status(status)), .. } => status.code(),
        _ => return ErrorNumber::Io,
    };
    match status {
        Status::CAPACITY_EXCEEDED => ErrorNumber::NoSpace,
        WRITE_PROTECTED => ErrorNumber::NotPermitted,
        _ => ErrorNumber::Io,
    }
}

/// Returns whether the file system has no such operation.
fn is_unsupported(error: &TargetError) -> bool {
    matches!(error, TargetError::Trim { errno, .. } if is_no_operation(*errno))
}

impl Service<'_> {
    /// Sends the replies of a connection as far as its socket takes them and its budget lasts. That
    /// they cannot be sent does not end it: data that the client had sent before it left is still
    /// received.
    pub(super) fn send(&mut self, client: &mut Connection) {
        if client.gone {
            return self.discard_replies(client);
        }
        let (payloads, stats) = (&mut self.payloads, &mut self.stats);
        let (mut progress, mut reused) = (false, Vec::new());
        while client.writable && client.has_output() && self.budget > 0 {
            let held = &mut client.held;
            let free = |buffer: Buffer, len, of| {
                stats.sent += len as u64;
                if let Some(operation) = of {
                    return reused.push((operation, buffer));
                }
                *held = held.saturating_sub(buffer.len());
                payloads.put(buffer);
            };
            match client.outgoing.send(&mut client.stream, free) {
                Ok(Some(sent)) => {
                    progress = true;
                    self.budget = self.budget.saturating_sub(sent);
                    client.note_moved(sent);
                }
                Ok(None) => client.writable = false,
                Err(error) => {
                    tracing::debug!("replies cannot be sent: {error}");
                    client.note_gone();
                }
            }
        }
        if progress {
            client.note_done();
        }
        // Its budget is used up before its replies are sent.
        let remains = client.writable && client.has_output();
        // It may have stopped receiving until its replies were taken, or are discarded.
        let receives =
            (progress || client.gone) && (client.readable || !client.input.unused().is_empty());
        if remains || receives {
            self.list(client);
        }
        reused
            .into_iter()
            .for_each(|(operation, buffer)| self.read_part(client, operation, buffer));
        if progress && !self.starved.is_empty() {
            self.feed();
        }
    }

    /// Discards the replies of a client that does not take them any more, and reads nothing further
    /// for it.
    pub(super) fn discard_replies(&mut self, client: &mut Connection) {
        client.gone = true;
        self.departed = true;
        let (streaming, mut buffers) = (client.streaming, Vec::new());
        let parts = client.outgoing.len();
        client.outgoing.clear(|buffer| buffers.push(buffer));
        if parts > 0 {
            // It may have stopped receiving because of them.
            self.list(client);
        }
        buffers.into_iter().for_each(|buffer| self.return_memory(client, buffer));
        if let Some(operation) = streaming {
            self.stop_streamed(operation);
            self.finish_if_complete(Some(client), operation);
        }
    }

    /// Replies that a request without a payload has succeeded.
    pub(super) fn reply_success(&mut self, client: &mut Connection, structured: bool, cookie: u64) {
        let part = match structured {
            true => Part::header(&reply::none(cookie)),
            false => Part::header(&reply::simple(None, cookie)),
        };
        client.outgoing.push(part);
    }

    /// Replies that a request has failed.
    pub(super) fn reply_error(
        &mut self,
        client: &mut Connection,
        structured: bool,
        error: ErrorNumber,
        cookie: u64,
    ) {
        self.stats.errors += 1;
        let part = match structured {
            true => Part::header(&reply::error(error, cookie)),
            false => Part::header(&reply::simple(Some(error), cookie)),
        };
        client.outgoing.push(part);
    }

    /// Receives no more requests from a connection, which is closed when those that it has begun
    /// are answered.
    pub(super) fn end(&mut self, client: &mut Connection) {
        client.ending = true;
        self.list(client);
    }

    /// Abandons a payload whose client sends no more; the part that arrived may have been written.
    pub(super) fn abandon_receiving(&mut self, client: &mut Connection) {
        let Some(receiving) = client.receiving.take() else { return };
        client.waits_since = None;
        if let Some(buffer) = receiving.buffer {
            self.return_memory(client, buffer);
        }
        if let Some(operation) = self.operations.get_mut(receiving.operation) {
            operation.fail(ErrorNumber::Shutdown);
            operation.is_cut_off = true;
        }
        self.end_payload(client, receiving.operation);
    }

    /// Counts the payload of an operation, which was received, discarded or given up, as completed.
    pub(super) fn end_payload(&mut self, client: &mut Connection, key: Key) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        operation.pending -= 1;
        self.finish_if_complete(Some(client), key);
    }

    /// Passes on a buffer that the target is about to get for an operation, unless its result is
    /// not needed any more. The client is absent if its connection is closed, here and below.
    pub(super) fn lend(
        &mut self,
        client: Option<&mut Connection>,
        tag: u64,
        buffer: Buffer,
    ) -> Option<Buffer> {
        let key = Key::from_word(tag);
        let is_needed = self.is_needed(client.as_deref(), key);
        let Some(operation) = self.operations.get_mut(key).filter(|_| is_needed) else {
            self.cancel(client, key, buffer);
            return None;
        };
        operation.at_target += 1;
        operation.lent += buffer.len();
        Some(buffer)
    }

    /// Returns whether an operation has to go on: a read ends with its client; everything else is
    /// done nevertheless, since a client may disconnect behind its last requests
    /// ("`NBD_CMD_DISC`").
    fn is_needed(&mut self, client: Option<&Connection>, key: Key) -> bool {
        let Some(operation) = self.operations.get_mut(key) else { return false };
        operation.request.operation != Kind::Read || client.is_some_and(|client| !client.gone)
    }

    /// Completes a part of an operation without the target.
    fn cancel(&mut self, mut client: Option<&mut Connection>, key: Key, buffer: Buffer) {
        let Some(operation) = self.operations.get_mut(key) else {
            return self.payloads.put(buffer);
        };
        operation.fail(ErrorNumber::Shutdown);
        operation.is_cut_off = true;
        operation.pending -= 1;
        let connection = operation.connection;
        // Nothing of it may be at the target, whose completions would pass these on. Each is
        // cancelled when it is next.
        operation.unissued.drain(..).for_each(|issue| self.issues.push(connection, issue));
        self.stop_streamed(key);
        self.put_back(client.as_deref_mut(), buffer);
        self.finish_if_complete(client, key);
    }

    /// Returns memory of a client that may have departed.
    fn put_back(&mut self, client: Option<&mut Connection>, buffer: Buffer) {
        match client {
            Some(client) => self.return_memory(client, buffer),
            None => {
                self.payloads.put(buffer);
                self.feed();
            }
        }
    }

    /// Handles a completion of the target for a client.
    pub(super) fn complete(
        &mut self,
        mut client: Option<&mut Connection>,
        Completion { io, buffer, result }: Completion<Buffer>,
    ) {
        let key = Key::from_word(io.tag);
        let result = match result {
            // The file was truncated.
            Ok(moved) if io.direction == IoDirection::Read && moved < io.len => {
                Err(ErrorNumber::Io)
            }
            Ok(_) => Ok(()),
            Err(error) => self.judge(key, io, &error),
        };
        let is_needed = self.is_needed(client.as_deref(), key);
        let Some(operation) = self.operations.get_mut(key) else {
            return buffer.into_iter().for_each(|buffer| self.payloads.put(buffer));
        };
        operation.pending -= 1;
        operation.at_target = operation.at_target.saturating_sub(1);
        operation.lent = operation.lent.saturating_sub(buffer.as_ref().map_or(0, Buffer::len));
        // A part that has not returned by now never does. Others of its parts may still be
        // unissued, or wait for memory.
        let lost = if operation.at_target == 0 { std::mem::take(&mut operation.lent) } else { 0 };
        let connection = operation.connection;
        self.issues.note_returned(connection);
        // Parts of a read that is not needed are cancelled when they are next.
        let next =
            if is_needed { 1 } else { operation.unissued.len() }.min(operation.unissued.len());
        operation.unissued.drain(..next).for_each(|issue| self.issues.push(connection, issue));
        if let Err(error) = result {
            operation.fail(error);
        }
        let stops = !is_needed || result.is_err();
        let buffer = match buffer {
            Some(buffer) if io.direction == IoDirection::Read && result.is_ok() => {
                operation.filled.push((io.offset, buffer, io.len));
                None
            }
            buffer => buffer,
        };
        let continues = match operation.stage {
            Stage::Zeroing { next } => operation.error.is_none() && next < operation.end(),
            _ => false,
        };
        let flushes = operation.pending == 0 && operation.needs_flush();
        match buffer {
            // The buffer of the last part serves for what follows.
            Some(buffer) if continues => return self.advance(client, key, buffer),
            Some(buffer) if flushes => {
                operation.stage = Stage::Flushing;
                return self.advance(client, key, buffer);
            }
            Some(buffer) => self.put_back(client.as_deref_mut(), buffer),
            None => {}
        }
        if lost > 0 {
            self.lose(client.as_deref_mut(), lost);
        }
        if let Some(client) = client.as_deref_mut() {
            self.send_parts(client, key);
        }
        if stops {
            self.stop_streamed(key);
        }
        self.finish_if_complete(client, key);
    }

    /// Replies to an operation without parts that are not complete.
    fn finish_if_complete(&mut self, client: Option<&mut Connection>, key: Key) {
        if self.operations.get_mut(key).is_some_and(|operation| operation.pending == 0) {
            self.finish(client, key);
        }
    }

    /// Decides what an error means for its operation: nothing, if it is one that the protocol
    /// permits to ignore.
    fn judge(&mut self, key: Key, io: Io, error: &TargetError) -> Result<(), ErrorNumber> {
        let stage = self.operations.get_mut(key).map(|operation| &mut operation.stage);
        if let (Some(stage @ Stage::Trimming { .. }), true) = (stage, is_unsupported(error)) {
            // To discard is optional ("`NBD_CMD_TRIM`"), to zero is not.
            if *stage == (Stage::Trimming { zeroes: true }) {
                *stage = Stage::Zeroing { next: io.offset };
                self.info.trim_zeroes = false;
            }
            return Ok(());
        }
        // The parts of a large request fail alike.
        let is_first =
            self.operations.get_mut(key).is_some_and(|operation| operation.error.is_none());
        if is_first && self.warned < WARNINGS {
            self.warned += 1;
            tracing::warn!("{error}");
        } else {
            tracing::debug!("{error}");
        }
        Err(number(error))
    }

    /// Issues the next part of an operation, with `buffer`.
    pub(super) fn advance(
        &mut self,
        client: Option<&mut Connection>,
        key: Key,
        mut buffer: Buffer,
    ) {
        let Some(operation) = self.operations.get_mut(key) else {
            return self.payloads.put(buffer);
        };
        let (Request { offset, length, .. }, end) = (operation.request, operation.end());
        operation.pending += 1;
        let connection = operation.connection;
        let issue = match operation.stage {
            Stage::Zeroing { next } => {
                let rest = usize::try_from(end - next).unwrap_or(PIECE);
                if next == offset {
                    // The first part: with a page from an attempt to trim, or with a buffer that is
                    // zeroed already.
                    buffer = self.larger_zeroed(client, buffer, rest);
                }
                let len = buffer.len().min(rest);
                if let Some(operation) = self.operations.get_mut(key) {
                    operation.stage = Stage::Zeroing { next: next + len as u64 };
                }
                Issue::new(key, IoDirection::Write, next, len, buffer)
            }
            Stage::Trimming { .. } => {
                Issue::new(key, IoDirection::Trim, offset, length as usize, buffer)
            }
            Stage::Flushing | Stage::Moving => {
                Issue::new(key, IoDirection::Flush, offset, 0, buffer)
            }
        };
        self.issues.push(connection, issue);
    }

    /// Returns a zeroed buffer for `bytes` bytes: `buffer`, or a larger one where there is memory.
    fn larger_zeroed(
        &mut self,
        client: Option<&mut Connection>,
        mut buffer: Buffer,
        bytes: usize,
    ) -> Buffer {
        if buffer.len() < bytes.min(PIECE)
            && let Some(client) = client
            && let Some(larger) = self.take_memory(client, bytes)
        {
            let smaller = std::mem::replace(&mut buffer, larger);
            self.return_memory(client, smaller);
        }
        buffer.zero();
        buffer
    }

    /// Replies to a request all of whose parts have completed.
    fn finish(&mut self, client: Option<&mut Connection>, key: Key) {
        let Some(mut operation) = self.operations.remove(key) else { return };
        let Operation { request, structured, error, .. } = operation;
        let Request { cookie, offset, length, .. } = request;
        let Some(client) = client else {
            self.stats.errors += u64::from(error.is_some() && !operation.is_cut_off);
            operation.filled.into_iter().for_each(|(_, buffer, _)| self.put_back(None, buffer));
            return;
        };
        client.operations = client.operations.saturating_sub(1);
        if let Some(streamed) = operation.streamed.take() {
            self.end_streamed(client, operation, &streamed);
            return self.list(client);
        }
        let mut filled = std::mem::take(&mut operation.filled);
        match error {
            None if request.operation == Kind::Read => {
                let header = match structured {
                    true => Part::header(&reply::offset_data(cookie, offset, length)),
                    false => Part::header(&reply::simple(None, cookie)),
                };
                // Sorted by offset.
                filled.sort_unstable_by_key(|(offset, ..)| *offset);
                client.outgoing.push(header);
                for (_, buffer, len) in filled {
                    client.outgoing.push(Part::Payload { buffer, len, of: None });
                }
            }
            None => self.reply_success(client, structured, cookie),
            Some(error) => {
                filled.into_iter().for_each(|(_, buffer, _)| self.return_memory(client, buffer));
                if !operation.is_cut_off {
                    self.reply_error(client, structured, error, cookie);
                }
            }
        }
        self.list(client);
    }

    /// Records that the target has not returned memory of a client, and will not: a controller that
    /// did not answer may reach it.
    fn lose(&mut self, client: Option<&mut Connection>, bytes: usize) {
        self.payloads.lose(bytes);
        self.stats.lost += bytes as u64;
        if let Some(client) = client {
            client.held = client.held.saturating_sub(bytes);
        }
        // Clients that wait for more than remains are refused.
        self.feed();
    }
}

// Reads that are answered part by part, because there is no memory for all of their data at once.
//
// The memory of such a read is a window: a part is read, sent, and its buffer used for the next
// one. In structured replies each part is a chunk, so an error can follow them. Otherwise the
// parts follow one header in order, other replies of the connection wait behind them, and an error
// after the first part can be reported only by the end of the connection ("Simple reply message").

/// The most memory of one such read: as much as its client may move in one iteration of the loop.
const WINDOW: usize = super::receive::BUDGET;

impl Service<'_> {
    /// Starts a read with the memory that its client may have, or not at all if that is none.
    pub(super) fn start_streamed(&mut self, client: &mut Connection, operation: Operation) -> bool {
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
        client.streaming = Some(key);
        buffers.into_iter().for_each(|buffer| self.read_part(client, key, buffer));
        true
    }

    /// Reads the next part into a buffer, which is returned if nothing is left to be read.
    fn read_part(&mut self, client: &mut Connection, key: Key, buffer: Buffer) {
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
                self.issues.push(client.key, Issue::new(key, IoDirection::Read, at, len, buffer));
            }
            None => self.return_memory(client, buffer),
        }
    }

    /// Reads no further parts; the caller looks whether the operation is complete.
    fn stop_streamed(&mut self, key: Key) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let end = operation.end();
        if let Some(streamed) = operation.streamed.as_mut().filter(|streamed| streamed.next < end) {
            streamed.next = end;
            operation.pending -= 1;
        }
    }

    /// Appends the read data to the replies, as far as they can be sent now.
    fn send_parts(&mut self, client: &mut Connection, key: Key) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        let Some(streamed) = &mut operation.streamed else { return };
        let Request { cookie, offset, length, .. } = operation.request;
        let structured = operation.structured;
        let outgoing = &mut client.outgoing;
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
    fn end_streamed(&mut self, client: &mut Connection, operation: Operation, streamed: &Streamed) {
        let Operation {
            request: Request { cookie, offset, .. },
            structured,
            error,
            filled,
            is_cut_off,
            ..
        } = operation;
        filled.into_iter().for_each(|(_, buffer, _)| self.return_memory(client, buffer));
        client.streaming = None;
        let began = streamed.in_order.is_some_and(|at| at > offset);
        match error {
            None if began => client.outgoing.release(),
            None => client.outgoing.push(Part::header(&reply::none(cookie))),
            Some(_) if is_cut_off => {}
            Some(error) if began => self.break_off(client, error),
            Some(error) => self.reply_error(client, structured, error, cookie),
        }
    }

    /// Closes a connection behind what is being sent: the data of a reply that has begun cannot be
    /// completed.
    fn break_off(&mut self, client: &mut Connection, error: ErrorNumber) {
        self.stats.errors += 1;
        // One that is gone takes nothing any more, and may have sent writes behind the read.
        if !client.gone {
            tracing::info!(
                "a client is disconnected: a read has failed ({error:?}) after its reply had begun"
            );
            self.stats.cut += 1;
            client.ending = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold::uring::Op;
    use std::path::Path;

    #[test]
    fn each_cause_keeps_its_number_in_every_operation() {
        let io = || Box::new(Io::new(IoDirection::Trim, 0, 512));
        let target = || "x".to_owned();
        for (errno, expected) in [
            (Errno::NOSPC, ErrorNumber::NoSpace),
            (Errno::DQUOT, ErrorNumber::NoSpace),
            (Errno::FBIG, ErrorNumber::NoSpace),
            (Errno::PERM, ErrorNumber::NotPermitted),
            (Errno::ACCESS, ErrorNumber::NotPermitted),
            (Errno::ROFS, ErrorNumber::NotPermitted),
            (Errno::IO, ErrorNumber::Io),
        ] {
            let path = || Path::new("x").into();
            for error in [
                FileError::System { call: "fdatasync", path: path(), errno }.into(),
                FileError::Transfer {
                    op: Op::Write,
                    path: path(),
                    offset: 0,
                    len: 1,
                    done: 0,
                    errno,
                }
                .into(),
                TargetError::Trim { target: target(), io: io(), errno },
            ] {
                assert_eq!(number(&error), expected, "{error}");
            }
        }
        for (status, expected) in [
            (Status::CAPACITY_EXCEEDED.do_not_retry(), ErrorNumber::NoSpace),
            (WRITE_PROTECTED.do_not_retry(), ErrorNumber::NotPermitted),
            (Status::WRITE_FAULT, ErrorNumber::Io),
        ] {
            let error = CommandError::Status(status);
            let flush = TargetError::Flush { target: target(), error: Some(error.clone()) };
            for error in [flush, TargetError::Command { target: target(), io: io(), error }] {
                assert_eq!(number(&error), expected, "{error}");
            }
        }
    }
}
