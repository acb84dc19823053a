//! From requests to commands.

use super::Queue;
use crate::driver::admin::STATUS_EVERY_NS;
use crate::driver::controller::Namespace;
use crate::driver::error::{CommandError, LayoutError, Reject, Rejected};
use crate::driver::request::{CommandState, InFlight, Operation, PRPS_LISTS, Page, RequestId};
use crate::registers::Registers;
use crate::spec::{Command, DsmRange, nvm};
use pinfold_core::access::{DeviceReads, DeviceWrites, Direction};
use pinfold_core::addr::Segment;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::Payload;
use pinfold_core::gather::prp::{ControllerPage, ListPages, PrpError, Prps};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// How far sending got.
enum Sent {
    /// All commands of the request are under way.
    All,
    /// There was no room for the rest.
    Part,
}

/// What a request asks for.
struct Ask {
    operation: Operation,
    nsid: u32,
    slba: u64,
    blocks: u64,
}

impl<R: Registers, S: ChunkSource + Clone> Queue<R, S> {
    /// Reads `blocks` blocks from `slba` into the payload's first bytes. The device writes the payload, so its
    /// direction is one in which it may; it is mapped in the domain that the controller's own memory is in. Of its
    /// segments all but the first begin at a page (4096 bytes), all but the last end at one, and the first begins at a
    /// multiple of 4:
    ///
    /// ```compile_fail,E0277
    /// # use pinfold_core::{access::ToDevice, domain::{Mapping, Pinned}, dma_pool::ChunkSource};
    /// # use pinfold_nvme::{Registers, driver::Queue};
    /// fn wrong<R: Registers, S: ChunkSource + Clone, P: Pinned>(q: &mut Queue<R, S>, p: Mapping<P, ToDevice>) {
    ///     let _ = q.read(1, 0, 8, p); // the device may only read it
    /// }
    /// ```
    ///
    /// A request larger than [`Identity::max_transfer_bytes`](crate::driver::Identity::max_transfer_bytes) becomes
    /// several commands; it is one [`Completion`](crate::driver::Completion) all the same. Linear in the pages of what
    /// is sent at once. Nothing is told to the controller before [`ring_doorbell`](Self::ring_doorbell).
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
        let operation = Operation::Transfer { write: false };
        self.transfer(Ask { operation, nsid, slba, blocks: blocks.into() }, payload)
    }

    /// Writes the payload's first bytes to `blocks` blocks from `slba`. The device reads the payload:
    ///
    /// ```compile_fail,E0277
    /// # use pinfold_core::{access::FromDevice, domain::{Mapping, Pinned}, dma_pool::ChunkSource};
    /// # use pinfold_nvme::{Registers, driver::Queue};
    /// fn wrong<R: Registers, S: ChunkSource + Clone, P: Pinned>(q: &mut Queue<R, S>, p: Mapping<P, FromDevice>) {
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
        let operation = Operation::Transfer { write: true };
        self.transfer(Ask { operation, nsid, slba, blocks: blocks.into() }, payload)
    }

    /// Makes what was written and completed before durable.
    ///
    /// # Errors
    /// [`Rejected`] with the reason.
    pub fn flush(&mut self, nsid: u32) -> Result<InFlight<()>, Rejected<()>> {
        self.submit(Ask { operation: Operation::Flush, nsid, slba: 0, blocks: 0 }, (), |(), _| None)
    }

    /// Tells the controller that `blocks` blocks from `slba` are of no use any more (dataset management, deallocate).
    /// What they read as then is [`Namespace::discard_zeroes`](crate::driver::Namespace::discard_zeroes)'s to say.
    ///
    /// # Errors
    /// [`Rejected`] with the reason.
    pub fn discard(&mut self, nsid: u32, slba: u64, blocks: u32) -> Result<InFlight<()>, Rejected<()>> {
        let ask = Ask { operation: Operation::Discard { blocks }, nsid, slba, blocks: blocks.into() };
        self.submit(ask, (), |(), _| None)
    }

    fn transfer<P, D>(&mut self, ask: Ask, payload: P) -> Result<InFlight<P>, Rejected<P>>
    where
        D: Direction,
        P: Payload<D>,
    {
        if payload.domain() != self.core.domain {
            return Err(Rejected { payload, reason: Reject::OtherDomain });
        }
        self.submit(ask, payload, |p, i| p.segment(i))
    }

    fn submit<P>(
        &mut self,
        ask: Ask,
        payload: P,
        segment: impl Fn(&P, usize) -> Option<Segment>,
    ) -> Result<InFlight<P>, Rejected<P>> {
        let segments = (0..).map_while(|i| segment(&payload, i));
        match self.register_memory(&ask, segments) {
            Ok(id) => Ok(InFlight::new(payload, id, self.epoch, self.core.life.clone())),
            Err(reason) => Err(Rejected { payload, reason }),
        }
    }

    /// Checks a request, gives it a place, and sends what there is room for.
    fn register_memory(
        &mut self,
        ask: &Ask,
        segments: impl Iterator<Item = Segment>,
    ) -> Result<RequestId, Reject> {
        if self.failed.is_some() || self.is_stale() || self.quarantined == self.commands.len() {
            return Err(Reject::NeedsReset);
        }
        if self.core.life.namespaces() != self.namespaces_seen {
            self.look_at_namespaces()?;
        }
        let block_shift = self.check_range(ask)?;
        let depth = self.requests.len();
        let Some(&tag) = self.free_requests.last() else { return Err(Reject::QueueFull { depth }) };
        if self.sq.unrung() == 0 {
            // One look at the clock for a batch.
            self.now_ns = self.core.config.clock.now_ns();
            if self.now_ns.saturating_sub(self.last_look_ns) >= STATUS_EVERY_NS {
                self.last_look_ns = self.now_ns;
                self.core.look();
            }
        }
        let deadline_ns = self.now_ns.saturating_add(self.timeout_ns);
        let Some(request) = self.requests.get_mut(usize::from(tag)) else {
            return Err(Reject::QueueFull { depth });
        };
        let left = match ask.operation {
            Operation::Transfer { .. } => {
                let needed = ask.blocks << block_shift;
                let has = request.cursor.set(segments, needed);
                if has < needed {
                    return Err(Reject::PayloadTooShort { needed, has });
                }
                needed
            }
            Operation::Flush | Operation::Discard { .. } => {
                request.cursor.set(std::iter::empty(), 0);
                1
            }
        };
        (request.operation, request.nsid, request.block_shift) = (ask.operation, ask.nsid, block_shift);
        (request.slba, request.left, request.outstanding) = (ask.slba, left, 0);
        (request.deadline_ns, request.error, request.aborting) = (deadline_ns, None, false);
        let count = request.cursor.segments();
        // Behind others that wait for room, it waits too.
        let sent = if self.unsent.is_empty() { self.send(tag)? } else { Sent::Part };
        if matches!(sent, Sent::Part) {
            self.unsent.push_back(tag);
        }
        self.free_requests.pop();
        self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
        self.stats.requests += 1;
        self.stats.segments += count;
        self.stats.segments_max = self.stats.segments_max.max(count);
        let serial = self.serial;
        let Some(request) = self.requests.get_mut(usize::from(tag)) else {
            return Err(Reject::QueueFull { depth });
        };
        request.busy = true;
        request.sequence = request.sequence.wrapping_add(1);
        Ok(RequestId { queue: serial, tag, sequence: request.sequence })
    }

    /// A namespace has changed: they are identified again, which waits for the controller.
    #[cold]
    fn look_at_namespaces(&mut self) -> Result<(), Reject> {
        let (facts, seen) = self.core.namespaces_now().map_err(|_| Reject::NeedsReset)?;
        for old in self.namespaces.iter() {
            let same = |new: &&Namespace| (new.nsid, new.block_bytes) == (old.nsid, old.block_bytes);
            if !facts.namespaces.iter().any(|new| same(&new)) && !self.changed.contains(&old.nsid) {
                self.changed.push(old.nsid);
            }
        }
        (self.namespaces, self.namespaces_seen) = (facts.namespaces, seen);
        Ok(())
    }

    /// The namespace's block shift, if the range lies inside it.
    fn check_range(&self, ask: &Ask) -> Result<u32, Reject> {
        let (nsid, slba, blocks) = (ask.nsid, ask.slba, ask.blocks);
        if self.changed.contains(&nsid) {
            return Err(Reject::NamespaceChanged { nsid });
        }
        let namespace = self.namespaces.iter().find(|namespace| namespace.nsid == nsid);
        let namespace = namespace.ok_or(Reject::NoSuchNamespace { nsid })?;
        let size = namespace.blocks;
        let inside = slba.checked_add(blocks).is_some_and(|end| end <= size);
        if ask.operation != Operation::Flush && (blocks == 0 || !inside) {
            return Err(Reject::OutOfRange { nsid, slba, blocks, size });
        }
        if matches!(ask.operation, Operation::Discard { .. }) && !self.can_discard {
            return Err(Reject::NoDiscard);
        }
        Ok(namespace.block_bytes.trailing_zeros())
    }

    /// Sends commands of a request while there is room. An error means that the request has none under way.
    fn send(&mut self, tag: u16) -> Result<Sent, LayoutError> {
        loop {
            let Some(request) = self.requests.get(usize::from(tag)) else { return Ok(Sent::All) };
            if request.left == 0 {
                return Ok(Sent::All);
            }
            let Some(&place) = self.free_commands.last() else { return Ok(Sent::Part) };
            let (command, prps, page, bytes) = match self.lay_out(tag) {
                Ok(parts) => parts,
                // Pages come back with the completions of this request's other commands, or of other requests'.
                Err(PrpError::Take(_)) if request.outstanding > 0 || self.commands_busy() => {
                    return Ok(Sent::Part);
                }
                Err(error) if request.outstanding > 0 => {
                    self.refuse_rest(tag, CommandError::Layout(error));
                    return Ok(Sent::All);
                }
                Err(error) => return Err(error),
            };
            self.put(tag, place, command, prps, page);
            if let Some(request) = self.requests.get_mut(usize::from(tag)) {
                request.cursor.advance(bytes);
                request.slba += bytes >> request.block_shift;
                request.left -= bytes.max(1).min(request.left);
                request.outstanding += 1;
            }
        }
    }

    fn commands_busy(&self) -> bool {
        self.commands.len() > self.free_commands.len() + self.quarantined
    }

    /// Nothing more of the request is sent; it fails when what is under way is complete.
    pub(super) fn refuse_rest(&mut self, tag: u16, error: CommandError) {
        if let Some(request) = self.requests.get_mut(usize::from(tag)) {
            request.left = 0;
            request.error.get_or_insert(error);
        }
    }

    /// The next command of a request, all but its identifier, and how many bytes of the payload it moves.
    #[expect(clippy::type_complexity, reason = "used once, by the caller above")]
    fn lay_out(
        &self,
        tag: u16,
    ) -> Result<(Command, Option<Prps<Page, PRPS_LISTS>>, Option<Page>, u64), LayoutError> {
        let Some(request) = self.requests.get(usize::from(tag)) else { return Err(PrpError::Empty) };
        let mut command = Command { nsid: U32::new(request.nsid), ..Command::default() };
        match request.operation {
            Operation::Flush => {
                command.opcode = nvm::FLUSH;
                Ok((command, None, None, 0))
            }
            Operation::Discard { blocks } => {
                let list = self.core.lists.take().map_err(PrpError::Take)?;
                let range = DsmRange {
                    blocks: U32::new(blocks),
                    slba: U64::new(request.slba),
                    ..DsmRange::default()
                };
                if let Err(error) = list.memory.copy_from_slice(0, range.as_bytes()) {
                    self.core.give_page(list.page);
                    return Err(PrpError::Memory(error));
                }
                command.opcode = nvm::DATASET_MANAGEMENT;
                command.prp1 = U64::new(list.iova.raw());
                command.cdw11 = U32::new(nvm::DEALLOCATE);
                Ok((command, None, Some(list.page), 0))
            }
            Operation::Transfer { write } => {
                let most = u64::from(self.max_transfer).min(0x1_0000 << request.block_shift);
                let bytes = request.left.min(most);
                let segments = request.cursor.peek(bytes);
                let prps = Prps::new(ControllerPage::SIZE_4K, segments, &self.core.lists)?;
                command.opcode = if write { nvm::WRITE } else { nvm::READ };
                command.prp1 = U64::new(prps.prp1());
                command.prp2 = U64::new(prps.prp2());
                command.set_slba(request.slba);
                // NLB counts from 0; at most 65,536 blocks by `most`.
                command.cdw12 = U32::new(u32::try_from((bytes >> request.block_shift) - 1).unwrap_or(0));
                Ok((command, Some(prps), None, bytes))
            }
        }
    }

    /// Gives the command its place and identifier and writes it to the ring.
    fn put(
        &mut self,
        tag: u16,
        place: u16,
        mut command: Command,
        prps: Option<Prps<Page, PRPS_LISTS>>,
        page: Option<Page>,
    ) {
        let Some(slot) = self.commands.get_mut(usize::from(place)) else { return };
        self.free_commands.pop();
        slot.state = CommandState::Busy;
        slot.generation = self.identifiers.next(slot.generation, place);
        (slot.request, slot.aborted) = (tag, false);
        if let Some(prps) = &prps {
            self.stats.prp_entries += prps.entries();
            self.stats.prp_list_pages += prps.list_pages() as u64;
        }
        (slot.prps, slot.page) = (prps, page);
        command.cid = U16::new(self.identifiers.encode(slot.generation, place));
        self.stats.commands += 1;
        self.sq.push(&command);
    }

    /// Sends more of the requests that wait for room.
    pub(super) fn send_more(&mut self) {
        while let Some(&tag) = self.unsent.front() {
            match self.send(tag) {
                Ok(Sent::Part) => break,
                Ok(Sent::All) => {
                    self.unsent.pop_front();
                }
                Err(error) => {
                    self.unsent.pop_front();
                    self.refuse_rest(tag, CommandError::Layout(error));
                }
            }
            self.finish_if_over(tag);
        }
    }
}
