//! Admin commands (Base 5).

use super::run::Engine;
use crate::bus::Bus;
use crate::door::{ModelEvent, QueueKind};
use crate::identify;
use crate::queues::{CommandId, CommandResult, CompletionQueue, SubmissionQueue};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{
    Command, Cqe, Doorbell, NamespaceList, SmartData, Status, VERSION_1_1, VERSION_1_3, admin, cns,
    create_cq, feature, log_page,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

/// DW0 of the completion, or an error status.
type AdminResult = Result<u32, Status>;

/// The halves of a dword: bits 15:0 and 31:16.
struct Halves {
    low: u16,
    high: u16,
}

impl From<U32> for Halves {
    fn from(dword: U32) -> Self {
        let [a, b, c, d] = dword.to_bytes();
        Self { low: u16::from_le_bytes([a, b]), high: u16::from_le_bytes([c, d]) }
    }
}

/// The error information log page, which asynchronous events of errors name, and its entries.
const ERROR_LOG_PAGE: u8 = 1;
const ERROR_ENTRY_BYTES: usize = 64;
/// The size of the data of "host behavior support".
const HOST_BEHAVIOR_BYTES: usize = 512;

/// The common fields of the commands that create a queue.
struct NewQueue {
    id: u16,
    size: u32,
    base: Iova,
}

impl<B: Bus> Engine<B> {
    /// Executes an admin command; returns `None` for one that completes later.
    pub(super) fn execute_admin(&mut self, command: &Command) -> Option<CommandResult> {
        let result = match command.opcode {
            // Fused commands, and SGLs, which PCIe controllers do not support here.
            _ if command.flags != 0 => Err(Status::INVALID_FIELD),
            admin::IDENTIFY => self.identify(command),
            admin::GET_LOG_PAGE => self.log_page(command),
            admin::CREATE_CQ => self.create_cq(command),
            admin::CREATE_SQ => self.create_sq(command),
            admin::DELETE_SQ => self.delete_sq(command),
            admin::DELETE_CQ => self.delete_cq(command),
            admin::SET_FEATURES | admin::GET_FEATURES => self.features(command),
            admin::ABORT => self.abort(command),
            admin::ASYNC_EVENT if self.event_requests.len() > usize::from(self.config.aerl) => {
                Err(Status::ASYNC_EVENT_LIMIT)
            }
            admin::ASYNC_EVENT => {
                self.event_requests.push(command.cid.get());
                return None;
            }
            _ => Err(Status::INVALID_OPCODE),
        };
        Some(match result {
            Ok(value) => CommandResult { status: Status::SUCCESS, value },
            Err(status) => status.do_not_retry().into(),
        })
    }

    fn identify(&mut self, command: &Command) -> AdminResult {
        let count = u32::try_from(self.namespaces().len()).unwrap_or(u32::MAX);
        let nsid = command.nsid.get();
        let version = self.registers.version;
        match u8::try_from(command.cdw10.get() & 0xff).unwrap_or(u8::MAX) {
            // Version 1.0 has one bit of CNS.
            cns if version < VERSION_1_1 && cns & 1 != cns => {
                let command = Command {
                    cdw10: U32::new(command.cdw10.get() & !0xff | u32::from(cns & 1)),
                    ..*command
                };
                self.identify(&command)
            }
            cns::DESCRIPTORS if version < VERSION_1_3 => Err(Status::INVALID_FIELD),
            cns::DESCRIPTORS if nsid == 0 || nsid > count => Err(Status::INVALID_NAMESPACE),
            cns::DESCRIPTORS => {
                let list = identify::descriptors();
                self.transfer(command, list.as_bytes())
            }
            cns::CONTROLLER => {
                let data = identify::controller(&self.config);
                self.transfer(command, data.as_bytes())
            }
            cns::NAMESPACE => {
                let index = nsid.checked_sub(1).and_then(|i| usize::try_from(i).ok());
                let namespace = index
                    .and_then(|i| self.namespaces().get(i))
                    .ok_or(Status::INVALID_NAMESPACE)?;
                let data = identify::namespace(namespace);
                self.transfer(command, data.as_bytes())
            }
            cns::ACTIVE_NAMESPACES if nsid >= 0xffff_fffe => Err(Status::INVALID_NAMESPACE),
            cns::ACTIVE_NAMESPACES => {
                let list = identify::active(nsid, count);
                self.transfer(command, list.as_bytes())
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// SMART / health information of the controller (Base 5.16.1.3), or its first bytes.
    fn log_page(&mut self, command: &Command) -> AdminResult {
        let (page, bytes) = log_page::parse(command.cdw10.get());
        self.masked.retain(|masked| *masked != page);
        if page == log_page::CHANGED_NAMESPACES {
            let list = NamespaceList::new_zeroed();
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(list.as_bytes().len());
            return self.transfer(command, list.as_bytes().get(..wanted).unwrap_or_default());
        }
        if page == ERROR_LOG_PAGE {
            // The log has one entry (ELPE is 0), which holds no error.
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(ERROR_ENTRY_BYTES);
            return self
                .transfer(command, [0; ERROR_ENTRY_BYTES].get(..wanted).unwrap_or_default());
        }
        if page != log_page::SMART {
            return Err(Status::INVALID_LOG_PAGE);
        }
        // LPA bit 0 is clear: there is no log page per namespace.
        if !matches!(command.nsid.get(), 0 | u32::MAX) {
            return Err(Status::INVALID_NAMESPACE);
        }
        let data = identify::smart(&self.counters);
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(SmartData::BYTES);
        self.transfer(command, data.as_bytes().get(..wanted).unwrap_or_default())
    }

    /// Writes `bytes` to the command's data.
    fn transfer(&mut self, command: &Command, bytes: &[u8]) -> AdminResult {
        let bytes = self.faults.tampered(command, bytes);
        let mut rest = bytes.as_slice();
        for run in self.resolver.resolve(&self.bus, command, bytes.len())? {
            let (part, after) = rest.split_at_checked(run.len).ok_or(Status::INTERNAL_ERROR)?;
            self.bus.write(run.iova, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            rest = after;
        }
        Ok(0)
    }

    /// Checks QID, size and address of a new queue.
    fn new_queue(
        &self,
        command: &Command,
        in_use: impl Fn(usize) -> bool,
    ) -> Result<NewQueue, Status> {
        let Halves { low: id, high: size } = command.cdw10.into();
        if id == 0 || id > self.config.queues || in_use(usize::from(id)) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if size == 0 || size > self.registers.cap().mqes() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR requires contiguous queues.
        if command.cdw11.get() & create_cq::CONTIGUOUS == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if !command.prp1.get().is_multiple_of(self.config.page_size() as u64) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        Ok(NewQueue { id, size: u32::from(size) + 1, base: Iova::new(command.prp1.get()) })
    }

    fn create_cq(&mut self, command: &Command) -> AdminResult {
        let NewQueue { id, size, base } = self
            .new_queue(command, |id| self.queues.completion.get(id).is_none_or(Option::is_some))?;
        if self.registers.cc().completion_entry_bytes() as usize != Cqe::BYTES {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let Halves { low: flags, high: vector } = command.cdw11.into();
        let vector = (u32::from(flags) & create_cq::INTERRUPTS != 0).then_some(vector);
        if vector.is_some_and(|vector| vector >= self.config.vectors) {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        if let Some(slot) = self.queues.completion.get_mut(usize::from(id)) {
            *slot = Some(CompletionQueue::new(id, base, size, vector));
        }
        self.observe(&ModelEvent::Created { kind: QueueKind::Completion, id, base, entries: size });
        self.registers.set_queue_size(id, Doorbell::CompletionHead, size);
        Ok(0)
    }

    fn create_sq(&mut self, command: &Command) -> AdminResult {
        let NewQueue { id, size, base } = self
            .new_queue(command, |id| self.queues.submission.get(id).is_none_or(Option::is_some))?;
        if self.registers.cc().submission_entry_bytes() as usize != Command::BYTES {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let Halves { high: cq_id, .. } = command.cdw11.into();
        let cq = self.queues.completion.get_mut(usize::from(cq_id)).filter(|_| cq_id != 0);
        let Some(Some(cq)) = cq else {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        };
        cq.users = cq.users.saturating_add(1);
        if let Some(slot) = self.queues.submission.get_mut(usize::from(id)) {
            *slot = Some(SubmissionQueue { base, size, head: 0, cq: cq_id });
        }
        self.observe(&ModelEvent::Created { kind: QueueKind::Submission, id, base, entries: size });
        self.registers.set_queue_size(id, Doorbell::SubmissionTail, size);
        Ok(0)
    }

    fn delete_sq(&mut self, command: &Command) -> AdminResult {
        let Halves { low: id, .. } = command.cdw10.into();
        let slot = self.queues.submission.get_mut(usize::from(id)).filter(|_| id != 0);
        let sq = slot.and_then(Option::take).ok_or(Status::INVALID_QUEUE_ID)?;
        if let Some(Some(cq)) = self.queues.completion.get_mut(usize::from(sq.cq)) {
            cq.users = cq.users.saturating_sub(1);
            cq.forget(id);
        }
        // Its held commands end without a completion.
        self.held.retain(|held| held.queue != id);
        self.registers.set_queue_size(id, Doorbell::SubmissionTail, 0);
        self.observe(&ModelEvent::Deleted { kind: QueueKind::Submission, id });
        Ok(0)
    }

    fn delete_cq(&mut self, command: &Command) -> AdminResult {
        let Halves { low: id, .. } = command.cdw10.into();
        let slot = self.queues.completion.get_mut(usize::from(id)).filter(|_| id != 0);
        let slot = slot.ok_or(Status::INVALID_QUEUE_ID)?;
        match slot {
            None => return Err(Status::INVALID_QUEUE_ID),
            Some(cq) if cq.users != 0 => return Err(Status::INVALID_QUEUE_DELETION),
            Some(_) => *slot = None,
        }
        self.registers.set_queue_size(id, Doorbell::CompletionHead, 0);
        self.observe(&ModelEvent::Deleted { kind: QueueKind::Completion, id });
        Ok(0)
    }

    /// Number of queues (Base 5.27.1.5): 0-based, submission in bits 15:0, completion in 31:16.
    fn features(&mut self, command: &Command) -> AdminResult {
        if u8::try_from(command.cdw10.get() & 0xff) == Ok(feature::HOST_BEHAVIOR)
            && command.opcode == admin::SET_FEATURES
        {
            return self.host_behavior(command);
        }
        if u8::try_from(command.cdw10.get() & 0xff) == Ok(feature::ASYNC_EVENTS) {
            return Ok(0);
        }
        if u8::try_from(command.cdw10.get() & 0xff) == Ok(feature::VOLATILE_WRITE_CACHE)
            && self.config.volatile_cache
        {
            if command.opcode == admin::SET_FEATURES {
                self.cache_enabled = command.cdw11.get() & 1 != 0;
            }
            return Ok(self.cache_enabled.into());
        }
        if u8::try_from(command.cdw10.get() & 0xff) != Ok(feature::NUMBER_OF_QUEUES) {
            return Err(Status::INVALID_FIELD);
        }
        if command.opcode == admin::SET_FEATURES {
            let Halves { low: sq, high: cq } = command.cdw11.into();
            if sq == u16::MAX || cq == u16::MAX {
                return Err(Status::INVALID_FIELD);
            }
        }
        let granted = u32::from(self.config.queues.saturating_sub(1));
        Ok(granted | granted << 16)
    }

    /// Host behavior support: byte 0 of the data is ACRE.
    fn host_behavior(&mut self, command: &Command) -> AdminResult {
        let mut data = [0; HOST_BEHAVIOR_BYTES];
        let mut rest = data.as_mut_slice();
        for run in self.resolver.resolve(&self.bus, command, HOST_BEHAVIOR_BYTES)? {
            let (part, after) = rest.split_at_mut_checked(run.len).ok_or(Status::INTERNAL_ERROR)?;
            self.bus.read(run.iova, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            rest = after;
        }
        self.advanced_retry = data.first() == Some(&feature::ADVANCED_RETRY);
        Ok(0)
    }

    /// Aborts a held command; bit 0 of the result: not aborted (Base 5.1).
    fn abort(&mut self, command: &Command) -> AdminResult {
        let Halves { low: queue, high: cid } = command.cdw10.into();
        let found =
            self.held.iter().position(|held| held.queue == queue && held.command.cid.get() == cid);
        let Some(found) = found.filter(|_| self.config.aborts) else { return Ok(1) };
        self.held.swap_remove(found);
        self.complete(CommandId { queue, cid }, Status::ABORT_REQUESTED.into())
            .map_err(|_| Status::INTERNAL_ERROR)?;
        Ok(0)
    }
}
