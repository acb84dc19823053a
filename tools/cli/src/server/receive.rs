//! From a client's input to operations.

use super::connection::{Phase, Receiving};
use super::error::Ended;
use super::event_loop::EventLoop;
use super::extents::{Answer, Question, Span};
use super::operation::{Issue, Operation, Stage};
use super::outgoing::Part;
use super::payload::{Key, PAGE, PIECE, rounded};
use crate::targets::target::IoDirection;
use pinfold_nbd::{ErrorNumber, Operation as Kind, Request, RequestHeader, Session, Step, reply};
use std::io::IoSliceMut;

/// The most bytes that a connection receives and sends in one iteration of the loop, so that no
/// client delays the others for long.
pub(super) const BUDGET: usize = 1 << 20;
/// The share of the budget that a step with its input costs, besides the bytes of a payload.
const STEP: usize = BUDGET / 512;

/// The next step after a part of the input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// More may follow at once.
    Continue,
    /// Nothing until something happens: input, a completion, memory.
    Wait,
}

impl EventLoop<'_, '_> {
    /// Serves a connection: sends replies, then receives requests, until nothing more can be done
    /// or its budget is used up.
    pub(super) fn serve(&mut self, key: Key) -> Result<(), Ended> {
        self.budget = BUDGET;
        self.send(key);
        while self.receive(key)? == Next::Continue {
            let work =
                self.connections.get_mut(key).map_or(0, |connection| connection.stream.take_work());
            self.budget = self.budget.saturating_sub(STEP + work);
            if self.budget == 0 {
                self.list(key);
                break;
            }
        }
        // Nothing was left to receive, but what TLS has is announced by no event.
        if let Some(connection) = self.connections.get_mut(key)
            && !connection.readable
            && connection.stream.has_more()
        {
            connection.readable = true;
            self.list(key);
        }
        // Small replies are sent in the iteration that requested them.
        self.budget = self.budget.max(STEP);
        self.send(key);
        Ok(())
    }

    /// Takes one step with the input of a connection.
    fn receive(&mut self, key: Key) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        if let Some(request) = connection.waiting.take() {
            let Phase::Transmission(session, _) = connection.phase else { return Ok(Next::Wait) };
            return Ok(self.start(key, session, request));
        }
        // A payload that has begun is received to its end: a reply before that is one that its
        // client does not expect yet.
        if (connection.ending && connection.receiving.is_none()) || connection.is_saturated() {
            return Ok(Next::Wait);
        }
        let (session, payload, missing) = match &connection.phase {
            Phase::Handshake(_) => return self.negotiate(key),
            Phase::Transmission(session, reader) => {
                (*session, reader.payload() as usize, reader.missing())
            }
        };
        match &connection.receiving {
            Some(receiving) if receiving.discards => return self.discard_payload(key, payload),
            Some(_) => return self.receive_payload(key, payload),
            None => {}
        }
        if connection.input.unused().is_empty() {
            // A header alone where a payload is likely to follow, which is then received into its
            // buffer.
            let limit = if connection.writes { missing } else { usize::MAX };
            if !connection.readable || connection.fill_input(limit)? == 0 {
                return Ok(Next::Wait);
            }
        }
        let Phase::Transmission(_, reader) = &mut connection.phase else { return Ok(Next::Wait) };
        let (used, header) = reader.read(connection.input.unused())?;
        connection.input.take(used);
        match header {
            Some(header) => Ok(self.begin(key, session, header)),
            None => Ok(Next::Continue),
        }
    }

    fn negotiate(&mut self, key: Key) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        // Replies are sent before more is accepted, which bounds them.
        if connection.outgoing.len() > 4 {
            return Ok(Next::Wait);
        }
        // With plaintext behind it, STARTTLS is refused below.
        if connection.securing && connection.input.unused().is_empty() {
            return self.start_tls(key);
        }
        if connection.input.unused().is_empty()
            && (!connection.readable || connection.fill_input(usize::MAX)? == 0)
        {
            return Ok(Next::Wait);
        }
        let Phase::Handshake(handshake) = &mut connection.phase else { return Ok(Next::Wait) };
        let mut output = Vec::new();
        let (used, step) =
            handshake.advance(self.shared.export, connection.input.unused(), &mut output)?;
        connection.input.take(used);
        connection.outgoing.push(Part::Bytes(output));
        match step {
            Step::Continue => {}
            Step::Closed => connection.ending = true,
            Step::StartTls => connection.securing = true,
            Step::Transmission(session) => {
                connection.phase = Phase::Transmission(session, Default::default());
            }
        }
        Ok(Next::Continue)
    }

    /// Begins TLS, once the reply to the client's request for it is sent.
    fn start_tls(&mut self, key: Key) -> Result<Next, Ended> {
        let Some(connection) = self.connections.get_mut(key) else { return Ok(Next::Wait) };
        let (Phase::Handshake(handshake), Some(config)) = (&mut connection.phase, self.shared.tls)
        else {
            return Ok(Next::Wait);
        };
        if !connection.outgoing.is_empty() {
            return Ok(Next::Wait);
        }
        connection.stream.start_tls(config).map_err(Ended::Broken)?;
        handshake.secured();
        connection.securing = false;
        Ok(Next::Continue)
    }

    /// Decides a request whose header has arrived.
    fn begin(&mut self, key: Key, session: Session, header: RequestHeader) -> Next {
        self.stats.requests += 1;
        if let Some(connection) = self.connections.get_mut(key) {
            connection.writes = header.payload() > 0;
        }
        match self.shared.export.check(&session, &header) {
            Ok(request) => self.start(key, session, request),
            Err(error) => {
                let RequestHeader { cookie, offset, length, .. } = header;
                if header.payload() > 0 {
                    let (operation, fua, whole) = (Kind::Write, false, false);
                    let request = Request { operation, fua, whole, cookie, offset, length };
                    self.refuse_write(
                        key,
                        Operation::new(key, request, session.structured, Stage::Moving),
                        error,
                    );
                } else {
                    self.reply_error(key, session.structured, error, cookie);
                }
                Next::Continue
            }
        }
    }

    /// Refuses a request whose payload follows, which is discarded before the reply.
    fn refuse_write(&mut self, key: Key, mut operation: Operation, error: ErrorNumber) {
        operation.fail(error);
        self.start_write(key, operation);
    }

    /// Starts a request, or has it wait for memory.
    fn start(&mut self, key: Key, session: Session, request: Request) -> Next {
        let Request { operation, offset, length, cookie, .. } = request;
        let structured = session.structured;
        if operation != Kind::Disconnect && self.payloads.is_lost() {
            if operation == Kind::Write && length > 0 {
                let operation = Operation::new(key, request, structured, Stage::Moving);
                self.refuse_write(key, operation, ErrorNumber::NoMemory);
            } else {
                self.reply_error(key, structured, ErrorNumber::NoMemory, cookie);
            }
            if let Some(connection) = self.connections.get_mut(key) {
                connection.waits_since = None;
            }
            return Next::Continue;
        }
        if matches!(operation, Kind::BlockStatus { .. })
            && let Some(connection) = self.connections.get_mut(key)
            && connection.asking.is_some()
        {
            connection.waiting = Some(request);
            return Next::Wait;
        }
        let create = |stage| Operation::new(key, request, structured, stage);
        let is_gone = self.connections.get_mut(key).is_none_or(|connection| connection.gone);
        let started = match operation {
            // The client would not take the reply.
            Kind::Read | Kind::BlockStatus { .. } if is_gone => true,
            Kind::Disconnect => {
                self.end(key);
                true
            }
            Kind::BlockStatus { one } => self.start_block_status(key, request, one),
            Kind::Read if length > 0 => self.start_read(key, create(Stage::Moving)),
            Kind::Write if length > 0 => {
                self.start_write(key, create(Stage::Moving));
                true
            }
            Kind::Flush => self.start_simple(key, create(Stage::Flushing)),
            Kind::Trim if length > 0 && self.info.no_trim.is_none() => {
                self.start_simple(key, create(Stage::Trimming { zeroes: false }))
            }
            Kind::WriteZeroes { may_trim } if length > 0 => {
                let trims = may_trim && self.info.trim_zeroes && self.info.no_trim.is_none();
                let zeroing = Stage::Zeroing { next: offset };
                let stage = if trims { Stage::Trimming { zeroes: true } } else { zeroing };
                self.start_simple(key, create(stage))
            }
            Kind::Read | Kind::Write | Kind::Trim | Kind::WriteZeroes { .. } => {
                self.reply_success(key, structured, cookie);
                true
            }
        };
        if let Some(connection) = self.connections.get_mut(key) {
            if started {
                connection.waits_since = None;
                return Next::Continue;
            }
            connection.waiting = Some(request);
        }
        let bytes = match operation {
            Kind::Read => length as usize,
            Kind::WriteZeroes { .. } => (length as usize).min(PIECE),
            _ => PAGE,
        };
        self.starve(key, bytes);
        Next::Wait
    }

    /// Asks which parts of a range are allocated, with a page of the client's memory for the answer,
    /// or waits for one.
    fn start_block_status(&mut self, key: Key, request: Request, one: bool) -> bool {
        let Some(buffer) = self.take_memory(key, PAGE) else { return false };
        let Some(connection) = self.connections.get_mut(key) else { return true };
        connection.asking = Some(buffer);
        connection.operations += 1;
        let Request { offset, length, .. } = request;
        let span = Span { offset: self.shared.base + offset, length, one };
        let (answers, wake) = (self.answers.0.clone(), self.inbox.wake.clone());
        let question = Question { client: key, request, span, answers, wake };
        let asked = self.shared.extents.map(|finder| finder.ask(question));
        if !matches!(asked, Some(Ok(()))) {
            self.answer(Answer { client: key, request, extents: span.unknown() });
        }
        true
    }

    /// Replies to the clients whose extents were found.
    pub(super) fn take_answers(&mut self) {
        while let Ok(answer) = self.answers.1.try_recv() {
            let client = answer.client;
            self.answer(answer);
            // It may have asked again.
            self.list(client);
        }
    }

    fn answer(&mut self, Answer { client, request, extents }: Answer) {
        let Some(connection) = self.connections.get_mut(client) else { return };
        let Some(mut buffer) = connection.asking.take() else { return };
        connection.operations = connection.operations.saturating_sub(1);
        if connection.gone {
            return self.return_memory(client, buffer);
        }
        let reply = reply::block_status(request.cookie, &extents);
        // The arena is mapped per use, so the slice is available; a page holds the most extents of
        // a reply.
        let page = buffer.as_mut_slice().unwrap_or_default();
        page.iter_mut().zip(&reply).for_each(|(to, from)| *to = *from);
        self.push(client, Part::Payload { buffer, len: reply.len(), of: None });
    }

    /// Has a connection wait for `bytes` of memory.
    pub(super) fn starve(&mut self, key: Key, bytes: usize) {
        self.stats.memory_waits += 1;
        let now = self.now();
        // Beyond what it gets alone, it waits for itself.
        if let Some(connection) = self.connections.get_mut(key)
            && (connection.held == 0 || connection.held + bytes <= self.payloads.budget() / 2)
        {
            connection.waits_since.get_or_insert(now);
        }
        if !self.starved.contains(&key) {
            self.starved.push_back(key);
        }
    }

    /// Takes memory for a connection.
    pub(super) fn take_memory(&mut self, key: Key, bytes: usize) -> Option<pinfold::Buffer> {
        let connection = self.connections.get_mut(key)?;
        let buffer = self.payloads.take(bytes, connection.held)?;
        connection.held += buffer.len();
        Some(buffer)
    }

    /// Returns a connection's memory, for those that wait for some.
    pub(super) fn return_memory(&mut self, key: Key, buffer: pinfold::Buffer) {
        self.give_back(key, buffer);
        if !self.starved.is_empty() {
            self.feed();
        }
    }

    fn give_back(&mut self, key: Key, buffer: pinfold::Buffer) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.held = connection.held.saturating_sub(buffer.len());
        }
        self.payloads.put(buffer);
    }

    /// Starts a read: with all of its memory, so that its reply can start with whether all of it
    /// succeeded; part by part if its client gets no more memory than it has now; or not at all,
    /// until some of the client's memory is returned.
    fn start_read(&mut self, key: Key, operation: Operation) -> bool {
        let Request { offset, length, .. } = operation.request;
        let Some(connection) = self.connections.get_mut(key) else { return true };
        let held = connection.held;
        if rounded(length as usize) > self.payloads.share(held) {
            return held == 0
                && connection.streaming.is_none()
                && self.start_streamed(key, operation);
        }
        let (mut at, end) = (offset, operation.end());
        let mut buffers = Vec::with_capacity((length as usize).div_ceil(PIECE));
        while at < end {
            let rest = usize::try_from(end - at).unwrap_or(PIECE);
            let Some(buffer) = self.take_memory(key, rest) else {
                // The arena is fragmented. There is no more than before: two that wait for too much
                // would try one after the other without end.
                buffers.into_iter().for_each(|(_, buffer, _)| self.give_back(key, buffer));
                return false;
            };
            let len = buffer.len().min(rest);
            buffers.push((at, buffer, len));
            at += len as u64;
        }
        let operation = self.insert(key, Operation { pending: buffers.len(), ..operation });
        let parts = buffers.into_iter();
        let mut parts = parts
            .map(|(at, buffer, len)| Issue::new(operation, IoDirection::Read, at, len, buffer));
        // The rest follows part by part, so that requests of others find room in the queue.
        let first = (BUDGET / PIECE).min(self.depth / 2).max(1);
        parts.by_ref().take(first).for_each(|part| self.issues.push(key, part));
        if let Some(operation) = self.operations.get_mut(operation) {
            operation.unissued.extend(parts);
        }
        true
    }

    /// Starts a write, whose memory is taken as its payload arrives; that of one that has failed is
    /// discarded.
    fn start_write(&mut self, key: Key, operation: Operation) {
        let (offset, discards) = (operation.request.offset, operation.error.is_some());
        // The payload that is being received counts as one part.
        let operation = self.insert(key, Operation { pending: 1, ..operation });
        if let Some(connection) = self.connections.get_mut(key) {
            connection.receiving = Some(Receiving::new(operation, offset, discards));
        }
    }

    /// Starts an operation that has no payload of the client's.
    fn start_simple(&mut self, key: Key, operation: Operation) -> bool {
        let bytes = match operation.stage {
            Stage::Zeroing { .. } => (operation.request.length as usize).min(PIECE),
            _ => 1,
        };
        let Some(mut buffer) = self.take_memory(key, bytes) else { return false };
        if matches!(operation.stage, Stage::Zeroing { .. }) {
            buffer.zero();
        }
        let operation = self.insert(key, operation);
        self.advance(operation, buffer);
        true
    }

    pub(super) fn insert(&mut self, key: Key, operation: Operation) -> Key {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.operations += 1;
        }
        self.operations.insert(operation)
    }
}

// Payloads from a client: into the buffers of a write, or discarded.

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
        self.budget = self.budget.saturating_sub(moved);
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
        self.budget = self.budget.saturating_sub(moved);
        self.stats.received += moved as u64;
        if is_over && let Some(receiving) = connection.receiving.take() {
            connection.waits_since = None;
            self.end_payload(receiving.operation);
        }
        Ok(Next::Continue)
    }
}
