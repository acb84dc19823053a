//! The translation of a client's input to operations.

use super::connection::{Connection, Phase, Receiving};
use super::error::Ended;
use super::event_loop::Service;
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

impl Service<'_> {
    /// Serves a connection: sends replies, then receives requests, until nothing more can be done
    /// or its budget is used up.
    pub(super) fn serve(&mut self, client: &mut Connection) -> Result<(), Ended> {
        self.budget = BUDGET;
        self.send(client);
        while self.receive(client)? == Next::Continue {
            let work = client.stream.take_work();
            self.budget = self.budget.saturating_sub(STEP + work);
            if self.budget == 0 {
                self.list(client);
                break;
            }
        }
        // Nothing was left to receive, but what TLS has is announced by no event.
        if !client.readable && client.stream.has_more() {
            client.readable = true;
            self.list(client);
        }
        // Small replies are sent in the iteration that requested them.
        self.budget = self.budget.max(STEP);
        self.send(client);
        Ok(())
    }

    /// Takes one step with the input of a client.
    fn receive(&mut self, client: &mut Connection) -> Result<Next, Ended> {
        if let Some(request) = client.waiting.take() {
            let Phase::Transmission(session, _) = client.phase else { return Ok(Next::Wait) };
            return Ok(self.start(client, session, request));
        }
        // A payload that has begun is received to its end: a reply before that is one that its
        // client does not expect yet.
        if (client.ending && client.receiving.is_none()) || client.is_saturated() {
            return Ok(Next::Wait);
        }
        let (session, payload, missing) = match &client.phase {
            Phase::Handshake(_) => return self.negotiate(client),
            Phase::Transmission(session, reader) => {
                (*session, reader.payload() as usize, reader.missing())
            }
        };
        match &client.receiving {
            Some(receiving) if receiving.discards => return self.discard_payload(client, payload),
            Some(_) => return self.receive_payload(client, payload),
            None => {}
        }
        if client.input.unused().is_empty() {
            // A header alone where a payload is likely to follow, which is then received into its
            // buffer.
            let limit = if client.writes { missing } else { usize::MAX };
            if !client.readable || client.fill_input(limit)? == 0 {
                return Ok(Next::Wait);
            }
        }
        let Phase::Transmission(_, reader) = &mut client.phase else { return Ok(Next::Wait) };
        let (used, header) = reader.read(client.input.unused())?;
        client.input.take(used);
        match header {
            Some(header) => Ok(self.begin(client, session, header)),
            None => Ok(Next::Continue),
        }
    }

    fn negotiate(&mut self, client: &mut Connection) -> Result<Next, Ended> {
        // Replies are sent before more is accepted, which bounds them.
        if client.outgoing.len() > 4 {
            return Ok(Next::Wait);
        }
        // With plaintext behind it, STARTTLS is refused below.
        if client.securing && client.input.unused().is_empty() {
            return self.start_tls(client);
        }
        if client.input.unused().is_empty()
            && (!client.readable || client.fill_input(usize::MAX)? == 0)
        {
            return Ok(Next::Wait);
        }
        let Phase::Handshake(handshake) = &mut client.phase else { return Ok(Next::Wait) };
        let mut output = Vec::new();
        let (used, step) =
            handshake.advance(self.shared.export, client.input.unused(), &mut output)?;
        client.input.take(used);
        client.outgoing.push(Part::Bytes(output));
        match step {
            Step::Continue => {}
            Step::Closed => client.ending = true,
            Step::StartTls => client.securing = true,
            Step::Transmission(session) => {
                client.phase = Phase::Transmission(session, Default::default());
            }
        }
        Ok(Next::Continue)
    }

    /// Begins TLS, once the reply to the client's request for it is sent.
    fn start_tls(&mut self, client: &mut Connection) -> Result<Next, Ended> {
        let (Phase::Handshake(handshake), Some(config)) = (&mut client.phase, self.shared.tls)
        else {
            return Ok(Next::Wait);
        };
        if !client.outgoing.is_empty() {
            return Ok(Next::Wait);
        }
        client.stream.start_tls(config).map_err(Ended::Broken)?;
        handshake.secured();
        client.securing = false;
        Ok(Next::Continue)
    }

    /// Decides a request whose header has arrived.
    fn begin(&mut self, client: &mut Connection, session: Session, header: RequestHeader) -> Next {
        self.stats.requests += 1;
        client.writes = header.payload() > 0;
        match self.shared.export.check(&session, &header) {
            Ok(request) => self.start(client, session, request),
            Err(error) => {
                let RequestHeader { cookie, offset, length, .. } = header;
                if header.payload() > 0 {
                    let (operation, fua, whole) = (Kind::Write, false, false);
                    let request = Request { operation, fua, whole, cookie, offset, length };
                    self.refuse_write(
                        client,
                        Operation::new(client.key, request, session.structured, Stage::Moving),
                        error,
                    );
                } else {
                    self.reply_error(client, session.structured, error, cookie);
                }
                Next::Continue
            }
        }
    }

    /// Refuses a request whose payload follows, which is discarded before the reply.
    fn refuse_write(
        &mut self,
        client: &mut Connection,
        mut operation: Operation,
        error: ErrorNumber,
    ) {
        operation.fail(error);
        self.start_write(client, operation);
    }

    /// Starts a request, or has it wait for memory.
    fn start(&mut self, client: &mut Connection, session: Session, request: Request) -> Next {
        let Request { operation, offset, length, cookie, .. } = request;
        let structured = session.structured;
        if operation != Kind::Disconnect && self.payloads.is_lost() {
            if operation == Kind::Write && length > 0 {
                let operation = Operation::new(client.key, request, structured, Stage::Moving);
                self.refuse_write(client, operation, ErrorNumber::NoMemory);
            } else {
                self.reply_error(client, structured, ErrorNumber::NoMemory, cookie);
            }
            client.waits_since = None;
            return Next::Continue;
        }
        if matches!(operation, Kind::BlockStatus { .. }) && client.asking.is_some() {
            client.waiting = Some(request);
            return Next::Wait;
        }
        let key = client.key;
        let create = |stage| Operation::new(key, request, structured, stage);
        let started = match operation {
            // The client would not take the reply.
            Kind::Read | Kind::BlockStatus { .. } if client.gone => true,
            Kind::Disconnect => {
                self.end(client);
                true
            }
            Kind::BlockStatus { one } => self.start_block_status(client, request, one),
            Kind::Read if length > 0 => self.start_read(client, create(Stage::Moving)),
            Kind::Write if length > 0 => {
                self.start_write(client, create(Stage::Moving));
                true
            }
            Kind::Flush => self.start_simple(client, create(Stage::Flushing)),
            Kind::Trim if length > 0 && self.info.no_trim.is_none() => {
                self.start_simple(client, create(Stage::Trimming { zeroes: false }))
            }
            Kind::WriteZeroes { may_trim } if length > 0 => {
                let trims = may_trim && self.info.trim_zeroes && self.info.no_trim.is_none();
                let zeroing = Stage::Zeroing { next: offset };
                let stage = if trims { Stage::Trimming { zeroes: true } } else { zeroing };
                self.start_simple(client, create(stage))
            }
            Kind::Read | Kind::Write | Kind::Trim | Kind::WriteZeroes { .. } => {
                self.reply_success(client, structured, cookie);
                true
            }
        };
        if started {
            client.waits_since = None;
            return Next::Continue;
        }
        client.waiting = Some(request);
        let bytes = match operation {
            Kind::Read => length as usize,
            Kind::WriteZeroes { .. } => (length as usize).min(PIECE),
            _ => PAGE,
        };
        self.starve(client, bytes);
        Next::Wait
    }

    /// Asks which parts of a range are allocated, with a page of the client's memory for the answer,
    /// or waits for one.
    fn start_block_status(&mut self, client: &mut Connection, request: Request, one: bool) -> bool {
        let Some(buffer) = self.take_memory(client, PAGE) else { return false };
        client.asking = Some(buffer);
        client.operations += 1;
        let Request { offset, length, .. } = request;
        let span = Span { offset: self.shared.base + offset, length, one };
        let (answers, wake) = (self.answers.0.clone(), self.inbox.wake.clone());
        let question = Question { client: client.key, request, span, answers, wake };
        let asked = self.shared.extents.map(|finder| finder.ask(question));
        if !matches!(asked, Some(Ok(()))) {
            self.answer(client, Answer { client: client.key, request, extents: span.unknown() });
        }
        true
    }

    /// Replies which parts of a range are allocated.
    pub(super) fn answer(&mut self, client: &mut Connection, answer: Answer) {
        let Answer { request, extents, .. } = answer;
        let Some(mut buffer) = client.asking.take() else { return };
        client.operations = client.operations.saturating_sub(1);
        if client.gone {
            return self.return_memory(client, buffer);
        }
        let reply = reply::block_status(request.cookie, &extents);
        // The arena is mapped per use, so the slice is available; a page holds the most extents of
        // a reply.
        let page = buffer.as_mut_slice().unwrap_or_default();
        page.iter_mut().zip(&reply).for_each(|(to, from)| *to = *from);
        client.outgoing.push(Part::Payload { buffer, len: reply.len(), of: None });
    }

    /// Makes a connection wait for `bytes` of memory.
    pub(super) fn starve(&mut self, client: &mut Connection, bytes: usize) {
        self.stats.memory_waits += 1;
        let now = self.now();
        // Beyond its own share, it waits for itself.
        if client.held == 0 || client.held + bytes <= self.payloads.budget() / 2 {
            client.waits_since.get_or_insert(now);
        }
        if !self.starved.contains(&client.key) {
            self.starved.push_back(client.key);
        }
    }

    /// Allocates memory for a client.
    pub(super) fn take_memory(
        &mut self,
        client: &mut Connection,
        bytes: usize,
    ) -> Option<pinfold::Buffer> {
        let buffer = self.payloads.take(bytes, client.held)?;
        client.held += buffer.len();
        Some(buffer)
    }

    /// Returns a connection's memory, for those that wait for some.
    pub(super) fn return_memory(&mut self, client: &mut Connection, buffer: pinfold::Buffer) {
        self.give_back(client, buffer);
        if !self.starved.is_empty() {
            self.feed();
        }
    }

    fn give_back(&mut self, client: &mut Connection, buffer: pinfold::Buffer) {
        client.held = client.held.saturating_sub(buffer.len());
        self.payloads.put(buffer);
    }

    /// Starts a read: with all of its memory, so that its reply can start with whether all of it
    /// succeeded; part by part if its client gets no more memory than it has now; or not at all,
    /// until some of the client's memory is returned.
    fn start_read(&mut self, client: &mut Connection, operation: Operation) -> bool {
        let Request { offset, length, .. } = operation.request;
        let held = client.held;
        if rounded(length as usize) > self.payloads.share(held) {
            return held == 0
                && client.streaming.is_none()
                && self.start_streamed(client, operation);
        }
        let (mut at, end) = (offset, operation.end());
        let mut buffers = Vec::with_capacity((length as usize).div_ceil(PIECE));
        while at < end {
            let rest = usize::try_from(end - at).unwrap_or(PIECE);
            let Some(buffer) = self.take_memory(client, rest) else {
                // The arena is fragmented. There is no more than before: two that wait for too much
                // would try one after the other without end.
                buffers.into_iter().for_each(|(_, buffer, _)| self.give_back(client, buffer));
                return false;
            };
            let len = buffer.len().min(rest);
            buffers.push((at, buffer, len));
            at += len as u64;
        }
        let operation = self.insert(client, Operation { pending: buffers.len(), ..operation });
        let parts = buffers.into_iter();
        let mut parts = parts
            .map(|(at, buffer, len)| Issue::new(operation, IoDirection::Read, at, len, buffer));
        // The rest follows part by part, so that requests of others find room in the queue.
        let first = (BUDGET / PIECE).min(self.depth / 2).max(1);
        parts.by_ref().take(first).for_each(|part| self.issues.push(client.key, part));
        if let Some(operation) = self.operations.get_mut(operation) {
            operation.unissued.extend(parts);
        }
        true
    }

    /// Starts a write, whose memory is taken as its payload arrives; that of one that has failed is
    /// discarded.
    fn start_write(&mut self, client: &mut Connection, operation: Operation) {
        let (offset, discards) = (operation.request.offset, operation.error.is_some());
        // The payload that is being received counts as one part.
        let operation = self.insert(client, Operation { pending: 1, ..operation });
        client.receiving = Some(Receiving::new(operation, offset, discards));
    }

    /// Starts an operation that has no payload of the client's.
    fn start_simple(&mut self, client: &mut Connection, operation: Operation) -> bool {
        let bytes = match operation.stage {
            Stage::Zeroing { .. } => (operation.request.length as usize).min(PIECE),
            _ => 1,
        };
        let Some(mut buffer) = self.take_memory(client, bytes) else { return false };
        if matches!(operation.stage, Stage::Zeroing { .. }) {
            buffer.zero();
        }
        let operation = self.insert(client, operation);
        self.advance(Some(client), operation, buffer);
        true
    }

    pub(super) fn insert(&mut self, client: &mut Connection, operation: Operation) -> Key {
        client.operations += 1;
        self.operations.insert(operation)
    }
}

// Payloads from a client: into the buffers of a write, or discarded.

impl Service<'_> {
    /// Receives into the buffer of a write; `payload` bytes are due.
    pub(super) fn receive_payload(
        &mut self,
        client: &mut Connection,
        payload: usize,
    ) -> Result<Next, Ended> {
        let Some(mut receiving) = client.receiving.take() else { return Ok(Next::Wait) };
        if receiving.buffer.is_none() {
            let Some(buffer) = self.take_memory(client, payload) else {
                if self.payloads.is_lost() {
                    if let Some(operation) = self.operations.get_mut(receiving.operation) {
                        operation.fail(ErrorNumber::NoMemory);
                    }
                    self.keep_receiving(client, Receiving { discards: true, ..receiving });
                    return Ok(Next::Continue);
                }
                self.keep_receiving(client, receiving);
                self.starve(client, payload.min(PIECE));
                return Ok(Next::Wait);
            };
            client.waits_since = None;
            (receiving.wanted, receiving.filled) = (buffer.len().min(payload), 0);
            receiving.buffer = Some(buffer);
        }
        let received = self.fill_buffer(client, &mut receiving, payload);
        if receiving.filled < receiving.wanted {
            self.keep_receiving(client, receiving);
            return received;
        }
        let Receiving { operation, offset, buffer: Some(buffer), wanted, .. } = receiving else {
            return received;
        };
        client.note_done();
        let is_last = client.due_payload() == 0;
        // The payload counts as one part until its end.
        if let Some(operation) = self.operations.get_mut(operation).filter(|_| !is_last) {
            operation.pending += 1;
        }
        self.issues
            .push(client.key, Issue::new(operation, IoDirection::Write, offset, wanted, buffer));
        if !is_last {
            let offset = offset + wanted as u64;
            self.keep_receiving(client, Receiving::new(operation, offset, false));
        }
        received
    }

    fn keep_receiving(&mut self, client: &mut Connection, receiving: Receiving) {
        client.receiving = Some(receiving);
    }

    /// Moves what has arrived into the buffer of a write. With the end of the payload, the next
    /// header is received by the same call.
    fn fill_buffer(
        &mut self,
        client: &mut Connection,
        receiving: &mut Receiving,
        payload: usize,
    ) -> Result<Next, Ended> {
        let Phase::Transmission(_, reader) = &mut client.phase else { return Ok(Next::Wait) };
        let Receiving { buffer: Some(buffer), wanted, filled, .. } = receiving else {
            return Ok(Next::Wait);
        };
        // The arena is mapped per use, so the slice is available.
        let space = buffer.as_mut_slice().ok().and_then(|bytes| bytes.get_mut(*filled..*wanted));
        let space = space.unwrap_or_default();
        let missing = space.len();
        let early = client.input.unused();
        let moved = if early.is_empty() {
            if !client.readable {
                return Ok(Next::Wait);
            }
            let ends = *wanted == payload + *filled;
            let header_bytes = if ends { RequestHeader::BYTES } else { 0 };
            let header = client.input.space(header_bytes);
            let mut slices = [IoSliceMut::new(space), IoSliceMut::new(header)];
            match client.stream.receive(&mut slices).map_err(Ended::Broken)? {
                None => return client.note_empty().map(|()| Next::Wait),
                Some(0) => return Err(Ended::Closed),
                Some(moved) => {
                    client.readable = client.hung_up || moved == missing + header_bytes;
                    client.input.end = moved.saturating_sub(missing);
                    moved.min(missing)
                }
            }
        } else {
            let moved = early.len().min(missing);
            space.iter_mut().zip(early).for_each(|(to, from)| *to = *from);
            client.input.take(moved);
            self.stats.copied += moved as u64;
            moved
        };
        *filled += moved;
        // Both are at most the payload, whose length has 32 bits.
        reader.take_payload(u32::try_from(moved).unwrap_or(u32::MAX));
        client.note_moved(moved);
        self.budget = self.budget.saturating_sub(moved);
        self.stats.received += moved as u64;
        Ok(Next::Continue)
    }

    /// Drops the payload of a refused write, and has it answered at its end.
    pub(super) fn discard_payload(
        &mut self,
        client: &mut Connection,
        payload: usize,
    ) -> Result<Next, Ended> {
        let Phase::Transmission(_, reader) = &mut client.phase else { return Ok(Next::Wait) };
        let early = client.input.unused().len();
        let moved = if early > 0 {
            let moved = early.min(payload);
            client.input.take(moved);
            moved
        } else {
            if !client.readable {
                return Ok(Next::Wait);
            }
            let most = payload.min(self.scratch.len());
            let space = self.scratch.get_mut(..most).unwrap_or_default();
            match client.stream.receive(&mut [IoSliceMut::new(space)]).map_err(Ended::Broken)? {
                None => return client.note_empty().map(|()| Next::Wait),
                Some(0) => return Err(Ended::Closed),
                Some(moved) => moved,
            }
        };
        reader.take_payload(u32::try_from(moved).unwrap_or(u32::MAX));
        let is_over = reader.payload() == 0;
        client.note_moved(moved);
        self.budget = self.budget.saturating_sub(moved);
        self.stats.received += moved as u64;
        if is_over && let Some(receiving) = client.receiving.take() {
            client.waits_since = None;
            self.end_payload(client, receiving.operation);
        }
        Ok(Next::Continue)
    }
}
