//! The translation of requests to commands.

use super::pair::Queue;
use crate::driver::admin_queue::STATUS_INTERVAL_NS;
use crate::driver::data_pointer::DataPointer;
use crate::driver::error::{CommandError, LayoutError, Reject, Rejected};
use crate::driver::in_flight::{InFlight, RequestId};
use crate::driver::namespace::Namespace;
use crate::driver::overlap::Extent;
use crate::driver::passthrough::{DataDirection, RawCommand};
use crate::driver::slots::{AbortState, CommandState, Operation, Request, RequestSlot, RetryState};
use crate::registers::Registers;
use crate::spec::{Command, DsmRange, nvm};
use pinfold_core::access::{DeviceReads, DeviceWrites, Direction};
use pinfold_core::addr::Segment;
use pinfold_core::dma_pool::{ChunkSource, PoolLocal};
use pinfold_core::domain::Payload;
use pinfold_core::gather::Profile;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The part of a request that was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// All commands.
    All,
    /// A part: slots or list pages ran out.
    Part,
}

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Reads `blocks` blocks from `slba` into the payload's first bytes. The device writes the
    /// payload, so it is mapped for a direction that allows this, in the domain of the controller's
    /// own memory:
    ///
    /// ```compile_fail,E0277
    /// # use pinfold_core::{access::ToDevice, domain::{Mapping, Pinned}, dma_pool::ChunkSource};
    /// # use pinfold_nvme::{Registers, driver::Queue};
    /// fn wrong<R: Registers, S: ChunkSource + Clone, P: Pinned>(
    ///     q: &mut Queue<R, S>,
    ///     p: Mapping<P, ToDevice>,
    /// ) {
    ///     let _ = q.read(1, 0, 8, p); // the device may only read it
    /// }
    /// ```
    ///
    /// Where the controller has no SGLs, all segments but the first begin at a page (4096 bytes),
    /// all but the last end at one, and the first begins at a multiple of 4. With SGLs they may be
    /// scattered as they like, at multiples of 4 where the controller asks for that.
    ///
    /// A request larger than
    /// [`Identity::max_transfer_bytes`](crate::driver::Identity::max_transfer_bytes) becomes
    /// several commands, with one [`Completion`](crate::driver::Completion). Linear in the pages or
    /// segments that are sent at once. The controller starts after
    /// [`ring_doorbell`](Self::ring_doorbell).
    ///
    /// # Errors
    /// [`Rejected`] with the payload and the reason; nothing has changed.
    pub fn read<P, D>(
        &mut self,
        nsid: u32,
        slba: u64,
        blocks: u32,
        payload: P,
    ) -> Result<InFlight<P>, Rejected<P>>
    where
        D: DeviceWrites,
        P: Payload<D>,
    {
        self.transfer(Request { operation: Operation::Read, nsid, slba, blocks }, payload)
    }

    /// Writes the payload's first bytes to `blocks` blocks from `slba`. The device reads the
    /// payload:
    ///
    /// ```compile_fail,E0277
    /// # use pinfold_core::{access::FromDevice, domain::{Mapping, Pinned}, dma_pool::ChunkSource};
    /// # use pinfold_nvme::{Registers, driver::Queue};
    /// fn wrong<R: Registers, S: ChunkSource + Clone, P: Pinned>(
    ///     q: &mut Queue<R, S>,
    ///     p: Mapping<P, FromDevice>,
    /// ) {
    ///     let _ = q.write(1, 0, 8, p); // the device may only write it
    /// }
    /// ```
    ///
    /// Otherwise as [`read`](Self::read).
    ///
    /// # Errors
    /// [`Rejected`] with the payload and the reason; nothing has changed.
    pub fn write<P, D>(
        &mut self,
        nsid: u32,
        slba: u64,
        blocks: u32,
        payload: P,
    ) -> Result<InFlight<P>, Rejected<P>>
    where
        D: DeviceReads,
        P: Payload<D>,
    {
        self.transfer(Request { operation: Operation::Write, nsid, slba, blocks }, payload)
    }

    /// Makes completed writes durable. After an error other than "namespace not ready" and "command
    /// interrupted", data written before may be lost, and the success of a later flush does not
    /// prove otherwise.
    ///
    /// # Errors
    /// [`Rejected`] with the reason.
    pub fn flush(&mut self, nsid: u32) -> Result<InFlight<()>, Rejected<()>> {
        self.without_payload(Request { operation: Operation::Flush, nsid, slba: 0, blocks: 0 })
    }

    /// Discards `blocks` blocks from `slba` (dataset management, deallocate). The controller may
    /// succeed and keep them as they are;
    /// [`Namespace::discard_zeroes`](crate::driver::Namespace::discard_zeroes) says whether those
    /// that it deallocates read as zeroes.
    ///
    /// # Errors
    /// [`Rejected`] with the reason.
    pub fn discard(
        &mut self,
        nsid: u32,
        slba: u64,
        blocks: u32,
    ) -> Result<InFlight<()>, Rejected<()>> {
        self.without_payload(Request { operation: Operation::Discard, nsid, slba, blocks })
    }

    /// Writes zeroes to `blocks` blocks from `slba`, without a payload. They read as zeroes
    /// afterwards; the controller may deallocate them. Becomes several commands where it exceeds
    /// the largest transfer, which bounds the time of one.
    ///
    /// # Errors
    /// [`Rejected`] with the reason; [`Reject::NoWriteZeroes`] where the controller cannot.
    pub fn write_zeroes(
        &mut self,
        nsid: u32,
        slba: u64,
        blocks: u32,
    ) -> Result<InFlight<()>, Rejected<()>> {
        self.without_payload(Request { operation: Operation::WriteZeroes, nsid, slba, blocks })
    }

    /// Sends a command of the program's own that has no data. It is one command of the queue: it is
    /// never split, and sent again only if the controller says that it has not carried it out.
    /// [`Completion::value`](crate::driver::Completion::value) is DW0 of its completion.
    ///
    /// One that does not name its blocks as a read does is ordered as if it were about all of its
    /// namespace. `command.nsid` is a namespace that this driver supports.
    ///
    /// # Errors
    /// [`Rejected`] with the reason: [`Reject::OwnedByDriver`], [`Reject::NotSent`],
    /// [`Reject::Direction`], [`Reject::OutOfRange`].
    pub fn raw(&mut self, command: &RawCommand) -> Result<InFlight<()>, Rejected<()>> {
        match command.check_io(DataDirection::None) {
            Ok(()) => self.without_payload(raw_request(command, 0)),
            Err(reason) => Err(Rejected { payload: (), reason }),
        }
    }

    /// Like [`raw`](Self::raw), for a command whose data the controller writes: the payload's first
    /// `bytes` bytes. The program is responsible for the length in the command, except for one that
    /// names its blocks; the controller reaches no page beside the payload's.
    ///
    /// # Errors
    /// As [`raw`](Self::raw); [`Reject::CommandLength`]; with the payload.
    pub fn raw_read<P, D>(
        &mut self,
        command: &RawCommand,
        bytes: u64,
        payload: P,
    ) -> Result<InFlight<P>, Rejected<P>>
    where
        D: DeviceWrites,
        P: Payload<D>,
    {
        match command.check_io(DataDirection::FromController) {
            Ok(()) => self.transfer(raw_request(command, bytes), payload),
            Err(reason) => Err(Rejected { payload, reason }),
        }
    }

    /// Like [`raw_read`](Self::raw_read), for a command whose data the controller reads.
    ///
    /// # Errors
    /// As [`raw_read`](Self::raw_read).
    pub fn raw_write<P, D>(
        &mut self,
        command: &RawCommand,
        bytes: u64,
        payload: P,
    ) -> Result<InFlight<P>, Rejected<P>>
    where
        D: DeviceReads,
        P: Payload<D>,
    {
        match command.check_io(DataDirection::ToController) {
            Ok(()) => self.transfer(raw_request(command, bytes), payload),
            Err(reason) => Err(Rejected { payload, reason }),
        }
    }

    fn transfer<P, D>(&mut self, request: Request, payload: P) -> Result<InFlight<P>, Rejected<P>>
    where
        D: Direction,
        P: Payload<D>,
    {
        if payload.domain() != self.inner.domain {
            return Err(Rejected { payload, reason: Reject::OtherDomain });
        }
        match self.accept(request, (0..).map_while(|index| payload.segment(index))) {
            Ok(id) => Ok(self.in_flight_request(payload, id)),
            Err(reason) => Err(Rejected { payload, reason }),
        }
    }

    fn without_payload(&mut self, request: Request) -> Result<InFlight<()>, Rejected<()>> {
        match self.accept(request, std::iter::empty()) {
            Ok(id) => Ok(self.in_flight_request((), id)),
            Err(reason) => Err(Rejected { payload: (), reason }),
        }
    }

    fn in_flight_request<P>(&self, payload: P, id: RequestId) -> InFlight<P> {
        InFlight::new(payload, id, self.generation, self.inner.shared.clone())
    }

    /// Checks a request, records it in a slot, and sends the commands that fit.
    fn accept(
        &mut self,
        request: Request,
        segments: impl Iterator<Item = Segment>,
    ) -> Result<RequestId, Reject> {
        if self.failed.is_some() || self.is_stale() || self.quarantined == self.commands.len() {
            return Err(Reject::NeedsReset);
        }
        if self.inner.shared.namespace_version() != self.namespace_version {
            self.update_namespaces()?;
        }
        let block_shift = self.check_range(&request)?;
        let depth = self.requests.len();
        let full = Reject::QueueFull { depth };
        let Some(&tag) = self.free_requests.last() else { return Err(full) };
        if self.sq.unpublished() == 0 {
            // The clock is read once per batch.
            self.now_ns = self.inner.config.clock.now_ns();
            if self.now_ns.saturating_sub(self.last_admin_poll_ns) >= STATUS_INTERVAL_NS {
                self.last_admin_poll_ns = self.now_ns;
                self.inner.poll_admin();
            }
        }
        let deadline_ns = self.now_ns.saturating_add(self.timeout_ns);
        let extension_ns = self.retry_limit_ns.saturating_add(self.timeout_ns);
        let Some(slot) = self.requests.get_mut(usize::from(tag)) else { return Err(full) };
        let needed = request.operation.payload_bytes(request.blocks, block_shift);
        let has = slot.segments.set(segments, needed);
        if has < needed {
            return Err(Reject::PayloadTooShort { needed, has });
        }
        let unsent = match request.operation {
            Operation::WriteZeroes => u64::from(request.blocks) << block_shift,
            // A flush or a discard is one command.
            _ => needed.max(1),
        };
        slot.start(request, block_shift, unsent);
        slot.set_deadline(deadline_ns, extension_ns);
        let segments = slot.segments.count();
        let extent = Extent::new(&request);
        // If others wait for slots, it waits behind them.
        if self.may_send(tag, &extent) && (!self.unsent.is_empty() || self.send(tag)? == Sent::Part)
        {
            self.unsent.push_back(tag);
        }
        self.extents.insert(tag, extent);
        self.free_requests.pop();
        self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
        self.stats.requests += 1;
        self.stats.segments += segments;
        self.stats.segments_max = self.stats.segments_max.max(segments);
        let Some(slot) = self.requests.get_mut(usize::from(tag)) else { return Err(full) };
        slot.busy = true;
        slot.sequence = slot.sequence.wrapping_add(1);
        Ok(RequestId { queue: self.serial, tag, sequence: slot.sequence })
    }

    /// Scans the namespaces after a change; waits for the controller.
    #[cold]
    fn update_namespaces(&mut self) -> Result<(), Reject> {
        let (info, version) = self.inner.current_namespaces().map_err(|_| Reject::NeedsReset)?;
        for old in self.namespaces.iter() {
            let same = |new: &Namespace| (new.nsid, new.block_bytes) == (old.nsid, old.block_bytes);
            if !info.namespaces.iter().any(same) && !self.changed.contains(&old.nsid) {
                self.changed.push(old.nsid);
            }
        }
        (self.namespaces, self.namespace_version) = (info.namespaces, version);
        Ok(())
    }

    /// Fails the requests with commands to be sent, for the first time or again, whose namespace
    /// was formatted or detached: their block numbers are those of the earlier format. Returns
    /// whether commands may be sent: none may while the namespaces cannot be scanned. Waits for the
    /// controller after a change.
    pub(super) fn fail_changed(&mut self) -> bool {
        let is_current = self.inner.shared.namespace_version() == self.namespace_version;
        if !is_current && self.update_namespaces().is_err() {
            return false;
        }
        while let Some((tag, nsid)) = self.find_changed() {
            self.fail_request(tag, CommandError::NamespaceChanged { nsid });
            self.complete_if_idle(tag);
        }
        true
    }

    /// Returns a request with commands to be sent whose namespace has changed, and the namespace.
    fn find_changed(&self) -> Option<(u16, u32)> {
        if self.changed.is_empty() {
            return None;
        }
        let slot = |index: &u16| self.commands.get(usize::from(*index));
        let retrying = self.retrying.iter().filter_map(slot).map(|slot| slot.tag);
        let nsid = |tag: u16| Some((tag, self.requests.get(usize::from(tag))?.request.nsid));
        let unsent = self.unblocked.iter().chain(&self.unsent).copied();
        let mut waiting = unsent.chain(retrying).filter_map(nsid);
        waiting.find(|(_, nsid)| self.changed.contains(nsid))
    }

    /// Returns the namespace's block shift, if the request is valid for it.
    fn check_range(&self, request: &Request) -> Result<u32, Reject> {
        let &Request { operation, nsid, slba, blocks } = request;
        if self.changed.contains(&nsid) {
            return Err(Reject::NamespaceChanged { nsid });
        }
        let namespace = self.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let namespace = namespace.ok_or(Reject::NoSuchNamespace { nsid })?;
        let (size, blocks) = (namespace.blocks, u64::from(blocks));
        let inside = slba.checked_add(blocks).is_some_and(|end| end <= size);
        let names_blocks = match operation {
            Operation::Flush => false,
            Operation::Raw(command, _) => command.blocks().is_some(),
            _ => true,
        };
        if names_blocks && (blocks == 0 || !inside) {
            return Err(Reject::OutOfRange { nsid, slba, blocks, size });
        }
        if let Operation::Raw(command, bytes) = operation {
            let limit = self.max_transfer;
            let needed = match command.moves_blocks() {
                true => blocks << namespace.block_bytes.trailing_zeros(),
                false => bytes.max((command.direction() != DataDirection::None).into()),
            };
            if needed != bytes || bytes > limit.into() {
                return Err(Reject::CommandLength { needed, bytes, limit });
            }
        }
        if operation == Operation::Discard && !self.can_discard {
            return Err(Reject::NoDiscard);
        }
        if operation == Operation::WriteZeroes && !self.can_write_zeroes {
            return Err(Reject::NoWriteZeroes);
        }
        Ok(namespace.block_bytes.trailing_zeros())
    }

    /// Sends commands of a request while there are free slots. An error means that the request has
    /// none in flight.
    fn send(&mut self, tag: u16) -> Result<Sent, LayoutError> {
        loop {
            let Some(request) = self.requests.get(usize::from(tag)) else { return Ok(Sent::All) };
            if request.unsent == 0 {
                return Ok(Sent::All);
            }
            let Some(&slot) = self.free_commands.last() else { return Ok(Sent::Part) };
            let limits = Limits { sgl: self.sgl.as_ref(), max_transfer: self.max_transfer };
            let (command, data, bytes) = match build(request, &limits, &mut self.lists) {
                Ok(built) => built,
                // Pages are freed by the completions of this request's other commands, or of other
                // requests'.
                Err(error)
                    if error.is_out_of_pages()
                        && (request.commands > 0 || self.commands_busy()) =>
                {
                    return Ok(Sent::Part);
                }
                Err(error) if request.commands > 0 => {
                    self.cancel_unsent(tag, CommandError::Layout(error));
                    return Ok(Sent::All);
                }
                Err(error) => return Err(error),
            };
            self.push(tag, slot, command, data);
            if let Some(request) = self.requests.get_mut(usize::from(tag)) {
                request.segments.advance(bytes);
                request.next_slba += bytes >> request.block_shift;
                request.unsent -= bytes.max(1).min(request.unsent);
                request.commands += 1;
            }
        }
    }

    fn commands_busy(&self) -> bool {
        self.commands.len() > self.free_commands.len() + self.quarantined
    }

    /// Sends nothing more of the request; it fails with `error` when the commands in flight have
    /// completed.
    pub(super) fn cancel_unsent(&mut self, tag: u16, error: CommandError) {
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.unsent = 0;
            request.error.get_or_insert(error);
        }
    }

    /// Assigns a slot and an identifier to the command and writes it to the ring.
    fn push(&mut self, tag: u16, index: u16, mut command: Command, data: Option<DataPointer>) {
        let Some(slot) = self.commands.get_mut(usize::from(index)) else { return };
        self.free_commands.pop();
        slot.state = CommandState::InFlight;
        slot.uses = self.ids.next(slot.uses, index);
        (slot.tag, slot.abort) = (tag, AbortState::None);
        if let Some(data) = &data {
            data.count(&mut self.stats);
        }
        (slot.data, slot.retry) = (data, RetryState::default());
        command.cid = U16::new(self.ids.encode(slot.uses, index));
        slot.command = command;
        self.stats.commands += 1;
        self.sq.push(&command);
    }

    /// Sends more commands of the requests that wait for slots.
    pub(super) fn send_more(&mut self) {
        while let Some(&tag) = self.unsent.front() {
            match self.send(tag) {
                Ok(Sent::Part) => break,
                Ok(Sent::All) => {
                    self.unsent.pop_front();
                }
                Err(error) => {
                    self.unsent.pop_front();
                    self.cancel_unsent(tag, CommandError::Layout(error));
                }
            }
            self.complete_if_idle(tag);
        }
    }
}

/// Returns the request for a command of the program's own.
fn raw_request(command: &RawCommand, bytes: u64) -> Request {
    let (slba, blocks) = command.blocks().unwrap_or((0, 0));
    Request { operation: Operation::Raw(*command, bytes), nsid: command.nsid, slba, blocks }
}

/// The limits of a command of a queue.
struct Limits<'q> {
    sgl: Option<&'q Profile>,
    max_transfer: u32,
}

/// Builds the next command of a request, without its identifier; returns the bytes of the payload
/// that it transfers.
fn build(
    slot: &RequestSlot,
    limits: &Limits<'_>,
    lists: &mut PoolLocal,
) -> Result<(Command, Option<DataPointer>, u64), LayoutError> {
    let request = &slot.request;
    let mut command = Command { nsid: U32::new(request.nsid), ..Command::default() };
    match request.operation {
        Operation::Flush => {
            command.opcode = nvm::FLUSH;
            Ok((command, None, 0))
        }
        Operation::Discard => {
            let range = DsmRange {
                blocks: U32::new(request.blocks),
                slba: U64::new(request.slba),
                ..DsmRange::default()
            };
            let data = DataPointer::page(range.as_bytes(), lists)?;
            command.opcode = nvm::DATASET_MANAGEMENT;
            command.cdw11 = U32::new(nvm::DEALLOCATE);
            data.set(&mut command);
            Ok((command, Some(data), 0))
        }
        Operation::WriteZeroes => {
            let bytes = slot.unsent.min(largest_command(slot, limits));
            command.opcode = nvm::WRITE_ZEROES;
            command.set_slba(slot.next_slba);
            command.cdw12 = U32::new(blocks_of(bytes, slot) | nvm::ZERO_DEALLOCATE);
            Ok((command, None, bytes))
        }
        Operation::Raw(raw, bytes) => {
            let mut command = raw.io();
            if bytes == 0 {
                return Ok((command, None, 0));
            }
            let data = DataPointer::new(slot.segments.peek(bytes), bytes, limits.sgl, lists)?;
            data.set(&mut command);
            Ok((command, Some(data), bytes))
        }
        Operation::Read | Operation::Write => {
            let most = largest_command(slot, limits);
            let (data, bytes) = describe(slot, slot.unsent.min(most), limits, lists)?;
            let write = request.operation == Operation::Write;
            command.opcode = if write { nvm::WRITE } else { nvm::READ };
            data.set(&mut command);
            command.set_slba(slot.next_slba);
            command.cdw12 = U32::new(blocks_of(bytes, slot));
            Ok((command, Some(data), bytes))
        }
    }
}

/// Describes the next `bytes` bytes of a payload, or fewer blocks of it where they have too many
/// segments.
fn describe(
    slot: &RequestSlot,
    mut bytes: u64,
    limits: &Limits<'_>,
    lists: &mut PoolLocal,
) -> Result<(DataPointer, u64), LayoutError> {
    loop {
        let segments = slot.segments.peek(bytes);
        match DataPointer::new(segments, bytes, limits.sgl, lists) {
            Ok(data) => return Ok((data, bytes)),
            Err(LayoutError::TooLong { .. }) if bytes >> slot.block_shift > 1 => {
                bytes = (bytes / 2) >> slot.block_shift << slot.block_shift;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns the most bytes of a command: the largest transfer, and at most 65,536 blocks.
fn largest_command(slot: &RequestSlot, limits: &Limits<'_>) -> u64 {
    u64::from(limits.max_transfer).min(0x1_0000 << slot.block_shift)
}

/// Returns NLB, which is 0-based, for `bytes` bytes of at most 65,536 blocks.
fn blocks_of(bytes: u64, slot: &RequestSlot) -> u32 {
    u32::try_from((bytes >> slot.block_shift).saturating_sub(1)).unwrap_or(0)
}
