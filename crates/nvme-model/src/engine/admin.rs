//! Admin commands (Base 5).

use super::{Completions, Engine, Outcome, Submission};
use crate::bus::Bus;
use crate::identify;
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{
    Command, ControllerData, Doorbell, NamespaceList, SmartData, Status, VERSION_1_1, VERSION_1_3, admin,
    cns, create_cq, feature, log_page,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromZeros, IntoBytes};

type Done = Result<u32, Status>;

impl<B: Bus> Engine<B> {
    pub(crate) fn execute_admin(&mut self, command: &Command) -> Outcome {
        let done = match command.opcode {
            _ if command.flags != 0 => Err(Status::INVALID_FIELD),
            admin::IDENTIFY => self.identify(command),
            admin::GET_LOG_PAGE => self.log_page(command),
            admin::CREATE_CQ => self.create_cq(command),
            admin::CREATE_SQ => self.create_sq(command),
            admin::DELETE_SQ => self.delete_sq(command),
            admin::DELETE_CQ => self.delete_cq(command),
            admin::SET_FEATURES | admin::GET_FEATURES => self.features(command),
            admin::ABORT => self.abort(command),
            admin::ASYNC_EVENT if self.event_requests.len() > usize::from(self.aerl) => {
                Err(Status::ASYNC_EVENT_LIMIT)
            }
            admin::ASYNC_EVENT => {
                self.event_requests.push(command.cid.get());
                return None;
            }
            _ => Err(Status::INVALID_OPCODE),
        };
        Some(done.map_or_else(|status| (status.do_not_retry(), 0), |result| (Status::SUCCESS, result)))
    }

    fn identify(&mut self, command: &Command) -> Done {
        let count = u32::try_from(self.namespaces.len()).unwrap_or(u32::MAX);
        let nsid = command.nsid.get();
        let version = self.shared.version;
        match u8::try_from(command.cdw10.get() & 0xff).unwrap_or(u8::MAX) {
            // Version 1.0 has one bit of CNS.
            cns if version < VERSION_1_1 && cns & 1 != cns => {
                let command =
                    Command { cdw10: U32::new(command.cdw10.get() & !0xff | u32::from(cns & 1)), ..*command };
                self.identify(&command)
            }
            cns::DESCRIPTORS if version < VERSION_1_3 => Err(Status::INVALID_FIELD),
            cns::DESCRIPTORS if nsid == 0 || nsid > count => Err(Status::INVALID_NAMESPACE),
            cns::DESCRIPTORS => {
                let list = identify::descriptors();
                self.transfer(command, list.as_bytes())
            }
            cns::CONTROLLER => {
                let mut data = identify::controller(self.mdts, count, self.shared.cap().mqes());
                (data.acl, data.aerl) = (self.acl, self.aerl);
                data.oaes = U32::new(ControllerData::OAES_NAMESPACE_ATTRIBUTES);
                data.version = U32::new(self.shared.version);
                data.rtd3_entry_us = U32::new(self.rtd3_entry_us);
                self.transfer(command, data.as_bytes())
            }
            cns::NAMESPACE => {
                let index = nsid.checked_sub(1).and_then(|i| usize::try_from(i).ok());
                let namespace =
                    index.and_then(|i| self.namespaces.get(i)).ok_or(Status::INVALID_NAMESPACE)?;
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

    /// SMART / health information of the controller (Base 5.16.1.3), from its start or a part of it.
    fn log_page(&mut self, command: &Command) -> Done {
        let (page, bytes) = log_page::parse(command.cdw10.get());
        self.masked.retain(|masked| *masked != page);
        if page == log_page::CHANGED_NAMESPACES {
            let list = NamespaceList::new_zeroed();
            let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(list.as_bytes().len());
            return self.transfer(command, list.as_bytes().get(..wanted).unwrap_or_default());
        }
        if page != log_page::SMART {
            return Err(Status::INVALID_LOG_PAGE);
        }
        // Of a namespace it would be another page, which LPA bit 0 does not offer.
        if !matches!(command.nsid.get(), 0 | u32::MAX) {
            return Err(Status::INVALID_NAMESPACE);
        }
        let data = identify::smart(&self.counters);
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).min(SmartData::BYTES);
        self.transfer(command, data.as_bytes().get(..wanted).unwrap_or_default())
    }

    /// Writes `bytes` to the command's data.
    fn transfer(&mut self, command: &Command, bytes: &[u8]) -> Done {
        let bytes = self.faults.forged(command, bytes);
        let mut rest = bytes.as_slice();
        for run in self.resolver.resolve(&self.bus, command.prp1.get(), command.prp2.get(), bytes.len())? {
            let (part, after) = rest.split_at_checked(run.len).ok_or(Status::INTERNAL_ERROR)?;
            self.bus.write(run.iova, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            rest = after;
        }
        Ok(0)
    }

    /// QID and size from CDW10, both checked against the limits.
    fn new_queue(&self, command: &Command, taken: impl Fn(usize) -> bool) -> Result<(u16, u32), Status> {
        let (id, size) = split(command.cdw10.get());
        if id == 0 || id > self.queue_limit || taken(usize::from(id)) {
            return Err(Status::INVALID_QUEUE_ID);
        }
        if size == 0 || size > self.shared.cap().mqes() {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // PC: CAP.CQR asks for queues in one piece.
        if command.cdw11.get() & 1 == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if !command.prp1.get().is_multiple_of(4096) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        Ok((id, u32::from(size) + 1))
    }

    fn create_cq(&mut self, command: &Command) -> Done {
        let (id, size) =
            self.new_queue(command, |id| self.queues.completion.get(id).is_none_or(Option::is_some))?;
        if self.shared.cc().completion_entry_bytes() != 16 {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let (flags, vector) = split(command.cdw11.get());
        let vector = (u32::from(flags) & create_cq::INTERRUPTS != 0).then_some(vector);
        if vector.is_some_and(|vector| usize::from(vector) >= self.vectors.len()) {
            return Err(Status::INVALID_INTERRUPT_VECTOR);
        }
        if let Some(slot) = self.queues.completion.get_mut(usize::from(id)) {
            *slot = Some(Completions::new(Iova::new(command.prp1.get()), size, vector));
        }
        self.open_bell(id, Doorbell::CompletionHead, size);
        Ok(0)
    }

    fn create_sq(&mut self, command: &Command) -> Done {
        let (id, size) =
            self.new_queue(command, |id| self.queues.submission.get(id).is_none_or(Option::is_some))?;
        if self.shared.cc().submission_entry_bytes() != 64 {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let (_, cq_id) = split(command.cdw11.get());
        let (cq_id, base) = match cq_id {
            0 => return Err(Status::COMPLETION_QUEUE_INVALID),
            id => (id, Iova::new(command.prp1.get())),
        };
        let Some(Some(cq)) = self.queues.completion.get_mut(usize::from(cq_id)) else {
            return Err(Status::COMPLETION_QUEUE_INVALID);
        };
        cq.users = cq.users.saturating_add(1);
        if let Some(slot) = self.queues.submission.get_mut(usize::from(id)) {
            *slot = Some(Submission { base, size, head: 0, cq: cq_id });
        }
        self.open_bell(id, Doorbell::SubmissionTail, size);
        Ok(0)
    }

    fn delete_sq(&mut self, command: &Command) -> Done {
        let (id, _) = split(command.cdw10.get());
        let slot = self.queues.submission.get_mut(usize::from(id)).filter(|_| id != 0);
        let sq = slot.and_then(Option::take).ok_or(Status::INVALID_QUEUE_ID)?;
        if let Some(Some(cq)) = self.queues.completion.get_mut(usize::from(sq.cq)) {
            cq.users = cq.users.saturating_sub(1);
        }
        // What is held of the queue is given up with it.
        self.held.retain(|held| held.queue != id);
        self.open_bell(id, Doorbell::SubmissionTail, 0);
        Ok(0)
    }

    fn delete_cq(&mut self, command: &Command) -> Done {
        let (id, _) = split(command.cdw10.get());
        let slot = self.queues.completion.get_mut(usize::from(id)).filter(|_| id != 0);
        let slot = slot.ok_or(Status::INVALID_QUEUE_ID)?;
        match slot {
            None => return Err(Status::INVALID_QUEUE_ID),
            Some(cq) if cq.users != 0 => return Err(Status::INVALID_QUEUE_DELETION),
            Some(_) => *slot = None,
        }
        self.open_bell(id, Doorbell::CompletionHead, 0);
        Ok(0)
    }

    /// Number of queues (Base 5.27.1.5): counts from 0, submission in bits 15:0, completion in 31:16.
    fn features(&self, command: &Command) -> Done {
        if u8::try_from(command.cdw10.get() & 0xff) == Ok(feature::ASYNC_EVENTS) {
            return Ok(0);
        }
        if u8::try_from(command.cdw10.get() & 0xff) != Ok(feature::NUMBER_OF_QUEUES) {
            return Err(Status::INVALID_FIELD);
        }
        if command.opcode == admin::SET_FEATURES {
            let (sq, cq) = split(command.cdw11.get());
            if sq == u16::MAX || cq == u16::MAX {
                return Err(Status::INVALID_FIELD);
            }
        }
        let granted = u32::from(self.queue_limit.saturating_sub(1));
        Ok(granted | granted << 16)
    }

    /// Aborts a command that is held; bit 0 of the result says that nothing was (Base 5.1).
    fn abort(&mut self, command: &Command) -> Done {
        let (queue, cid) = split(command.cdw10.get());
        let found = self.held.iter().position(|held| held.queue == queue && held.command.cid.get() == cid);
        let Some(found) = found else { return Ok(1) };
        let held = self.held.swap_remove(found);
        self.complete(queue, &held.command, (Status::ABORT_REQUESTED, 0))
            .map_err(|_| Status::INTERNAL_ERROR)?;
        Ok(0)
    }
}

/// Bits 15:0 and 31:16.
fn split(dword: u32) -> (u16, u16) {
    let [a, b, c, d] = dword.to_le_bytes();
    (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
}
