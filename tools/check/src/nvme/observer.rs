//! What a model controller does, for the watch of its device: the commands, their memory, and what
//! of them is wrong.

use super::pointer::{Pointer, meaning_of_prp2};
use crate::findings::{self, Kind, Likely, counted};
use crate::irq::{self, Irqs};
use crate::space::Span;
use crate::watch::{InFlight, Watch};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Status, admin, nvm};
use pinfold_nvme_model::{ModelEvent, Observer, QueueKind};
use std::fmt;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Opcodes of admin commands that a controller need not support, so that a driver may try them
/// (Base, figure "Opcodes for Admin Commands").
const ADMIN_OPCODES: [u8; 31] = [
    0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x10, 0x11, 0x14, 0x15, 0x18,
    0x19, 0x1a, 0x1c, 0x1d, 0x1e, 0x20, 0x21, 0x22, 0x24, 0x7c, 0x7f, 0x80, 0x81, 0x82, 0x84,
];

/// SEL of Get Features: what may be done with a feature, without its data (Base 5.15).
const SUPPORTED_CAPABILITIES: u32 = 3;

/// What the checks need to know of the controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) block_bytes: u32,
    /// The size of the namespace.
    pub(crate) blocks: u64,
    /// The size of a page (CC.MPS).
    pub(crate) page_size: u64,
    pub(crate) mdts: u8,
    /// CAP.MQES.
    pub(crate) mqes: u16,
    pub(crate) has_sgls: bool,
}

impl Limits {
    /// Returns the most bytes of a command (MDTS).
    fn transfer_bytes(&self) -> u64 {
        match self.mdts {
            0 => u64::MAX,
            shift => self.page_size.checked_shl(shift.into()).unwrap_or(u64::MAX),
        }
    }

    /// Returns the length of a command's data; 0 where it has none, or it is not known.
    fn data_bytes(&self, queue: u16, command: &Command) -> u64 {
        match (queue, command.opcode) {
            (0, admin::IDENTIFY) => 4096,
            (0, admin::GET_LOG_PAGE) => {
                // NUMDL and NUMDU, of dwords and 0-based (Base 5.16).
                let high = u64::from(command.cdw11.get() & 0xffff) << 16;
                ((high | u64::from(command.cdw10.get() >> 16)) + 1) * 4
            }
            (0, admin::GET_FEATURES | admin::SET_FEATURES) => feature_bytes(command),
            (0, _) => 0,
            (_, nvm::READ | nvm::WRITE) => {
                u64::from(command.blocks()) * u64::from(self.block_bytes)
            }
            (_, nvm::DATASET_MANAGEMENT) => u64::from((command.cdw10.get() & 0xff) + 1) * 16,
            _ => 0,
        }
    }
}

/// Returns the length of the data of a feature (Base, figure "Feature Identifiers"; NVM 4.1.3); 0
/// where it is in the command or in its completion alone.
fn feature_bytes(command: &Command) -> u64 {
    let cdw10 = command.cdw10.get();
    let is_get = command.opcode == admin::GET_FEATURES;
    if is_get && cdw10 >> 8 & 7 == SUPPORTED_CAPABILITIES {
        return 0;
    }
    match cdw10 & 0xff {
        // LBA ranges; metadata of a controller and of a namespace.
        0x03 | 0x7d..=0x7f => 4096,
        // Autonomous power state transitions.
        0x0c => 256,
        // The attributes of the host's memory buffer.
        0x0d if is_get => 4096,
        // The time.
        0x0e => 8,
        // Predictable latency, and the host's behavior.
        0x13 | 0x16 => 512,
        // The host's identifier, whose size EXHID says.
        0x81 => 8 << (command.cdw11.get() & 1),
        _ => 0,
    }
}

/// Returns whether a command has NLB, the 0-based number of its blocks, and data of as many.
fn has_blocks(queue: u16, command: &Command) -> bool {
    queue != 0 && matches!(command.opcode, nvm::READ | nvm::WRITE)
}

/// Returns whether no driver has written the entry: a command without a namespace and an identifier
/// that asks for nothing.
fn is_empty(command: &Command) -> bool {
    command.as_bytes().iter().all(|byte| *byte == 0)
}

/// A command of a queue.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    queue: u16,
    command: Command,
    limits: Limits,
}

impl fmt::Display for Submitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, command, limits } = self;
        let queue = *queue;
        let cid = command.cid.get();
        let range = || format!("{} at {}", counted(command.blocks(), "block"), command.slba());
        let (id, entries) =
            (command.cdw10.get() & 0xffff, u64::from(command.cdw10.get() >> 16) + 1);
        let what = match (queue, command.opcode) {
            (0, admin::IDENTIFY) => format!("identify {:#x}", command.cdw10.get() & 0xff),
            (0, admin::CREATE_CQ) => format!("create completion queue {id} of {entries} entries"),
            (0, admin::CREATE_SQ) => format!("create submission queue {id} of {entries} entries"),
            (0, admin::DELETE_CQ) => format!("delete completion queue {id}"),
            (0, admin::DELETE_SQ) => format!("delete submission queue {id}"),
            (0, admin::GET_LOG_PAGE) => format!("get log page {:#x}", command.cdw10.get() & 0xff),
            (0, admin::GET_FEATURES) => format!("get feature {:#x}", command.cdw10.get() & 0xff),
            (0, admin::SET_FEATURES) => format!("set feature {:#x}", command.cdw10.get() & 0xff),
            (0, opcode) => format!("admin command {opcode:#04x}"),
            (_, nvm::READ) => format!("read of {}", range()),
            (_, nvm::WRITE) => format!("write of {}", range()),
            (_, nvm::FLUSH) => "flush".to_owned(),
            (_, nvm::WRITE_ZEROES) => format!("write zeroes of {}", range()),
            (_, nvm::DATASET_MANAGEMENT) => "dataset management".to_owned(),
            (_, opcode) => format!("command {opcode:#04x}"),
        };
        write!(
            f,
            "command {cid} of queue {queue}: {what}; PRP1 {:#x}, PRP2 {:#x}{}",
            command.prp1.get(),
            command.prp2.get(),
            meaning_of_prp2(command, limits.data_bytes(queue, command), limits.page_size)
        )
    }
}

/// Returns whether the device writes the data of a command.
fn is_written(queue: u16, command: &Command) -> bool {
    match queue {
        0 => matches!(command.opcode, admin::IDENTIFY | admin::GET_LOG_PAGE | admin::GET_FEATURES),
        _ => command.opcode == nvm::READ,
    }
}

fn name(kind: QueueKind) -> &'static str {
    match kind {
        QueueKind::Submission => "submission queue",
        QueueKind::Completion => "completion queue",
    }
}

/// Shows a controller's events to its watch, and a removal to the program.
#[derive(Debug)]
pub(crate) struct Observing {
    pub(crate) watch: Arc<Watch>,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) limits: Limits,
}

impl Observing {
    fn submitted(&self, queue: u16, command: &Command) -> Submitted {
        Submitted { queue, command: *command, limits: self.limits }
    }

    fn described(&self, queue: u16, command: &Command) -> impl FnOnce() -> Vec<String> {
        let submitted = self.submitted(queue, command);
        move || vec![submitted.to_string()]
    }

    fn queue_added(&self, kind: QueueKind, id: u16, base: Iova, entries: u32) {
        let bytes = match kind {
            QueueKind::Submission => 64,
            QueueKind::Completion => 16,
        };
        let memory = Span::new(base.raw(), u64::from(entries) * bytes);
        self.watch.queue_added((name(kind), id), memory, Some(bytes));
    }

    fn fetched(&self, queue: u16, at: Iova, command: &Command) {
        if queue != 0 && (command.cdw2.get() | command.cdw3.get()) != 0 {
            let text = "CDW2 and CDW3 of a command are reserved, and not 0".to_owned();
            self.watch.add(&findings::FIELD, text, self.described(queue, command));
        }
        let written = is_written(queue, command);
        let block = if has_blocks(queue, command) { self.limits.block_bytes.into() } else { 0 };
        let pointer = match self.limits.data_bytes(queue, command) {
            0 => Pointer::default(),
            bytes => {
                let space = self.watch.space();
                Pointer::of(command, [bytes, block], self.limits.page_size, space.as_deref())
            }
        };
        let last_block = pointer.last_block(block);
        let memory = pointer.data.into_iter().map(|span| (span, written)).collect();
        let mut new = InFlight::new(Arc::new(self.submitted(queue, command)), memory);
        (new.lists, new.wrong) = (pointer.lists, pointer.wrong);
        new.last_block = last_block;
        new.likely = is_empty(command).then_some(findings::QUEUE_SIZE);
        new.entries.push((at.raw(), command.as_bytes().to_vec()));
        // Requests for asynchronous events are in flight until there is an event.
        new.is_awaited = queue != 0 || command.opcode != admin::ASYNC_EVENT;
        self.watch.fetched((queue, command.cid.get()), new);
    }

    fn executed(&self, queue: u16, command: &Command, status: Option<Status>) {
        self.watch.executed();
        let status = status.map_or(Status::SUCCESS, Status::code);
        let kind = match (queue, status) {
            // In an I/O queue a flush, of no namespace.
            (_, Status::INVALID_NAMESPACE) if queue != 0 && is_empty(command) => {
                &findings::QUEUE_LIMIT
            }
            (_, Status::PRP_OFFSET_INVALID) => &findings::PRP,
            (
                _,
                Status::INVALID_SGL_SEGMENT_DESCRIPTOR
                | Status::INVALID_SGL_DESCRIPTOR_COUNT
                | Status::DATA_SGL_LENGTH_INVALID
                | Status::SGL_DESCRIPTOR_TYPE_INVALID
                | Status::SGL_DATA_BLOCK_GRANULARITY_INVALID,
            ) => &findings::SGL,
            (0, Status::INVALID_QUEUE_ID | Status::INVALID_QUEUE_SIZE) => &findings::QUEUE_LIMIT,
            (0, Status::COMPLETION_QUEUE_INVALID | Status::INVALID_QUEUE_DELETION) => {
                &findings::QUEUE_ORDER
            }
            (0, Status::INVALID_INTERRUPT_VECTOR) => &findings::FIELD,
            (0, Status::INVALID_OPCODE) if !ADMIN_OPCODES.contains(&command.opcode) => {
                &findings::OPCODE
            }
            (0, Status::INVALID_FIELD)
                if matches!(command.opcode, admin::CREATE_CQ | admin::CREATE_SQ) =>
            {
                &findings::FIELD
            }
            (0, _) => return,
            (_, Status::INVALID_OPCODE) => &findings::OPCODE,
            (_, Status::INVALID_NAMESPACE) => &findings::NAMESPACE,
            (_, Status::LBA_OUT_OF_RANGE) => &findings::LBA_RANGE,
            (_, Status::INVALID_FIELD) => {
                let is_sgl = command.flags & Command::PSDT_SGL != 0;
                if self.limits.data_bytes(queue, command) > self.limits.transfer_bytes() {
                    &findings::TRANSFER_SIZE
                } else if is_sgl && !self.limits.has_sgls {
                    &findings::SGL
                } else {
                    &findings::FIELD
                }
            }
            _ => return,
        };
        let mut likely = self.likely(queue, command, kind, status);
        let wrong = match status {
            _ if is_empty(command) => {
                let text = "the controller refused an entry of zeroes, which the driver has not written: \
                            the sizes of queues (AQA, CDW10) are 0-based, or a tail is ahead";
                Some(text.to_owned())
            }
            Status::PRP_OFFSET_INVALID => {
                let wrong = self.watch.wrong((queue, command.cid.get()));
                likely = wrong.as_ref().and_then(|wrong| wrong.likely);
                wrong.map(|wrong| wrong.text)
            }
            Status::INVALID_QUEUE_SIZE
                if (1..=self.limits.mqes.into()).contains(&(command.cdw10.get() >> 16)) =>
            {
                let text = "a queue was created while CC.IOSQES or CC.IOCQES was not the size of its entries";
                Some(text.to_owned())
            }
            _ => None,
        };
        let text = wrong.unwrap_or_else(|| format!("the controller refused a command: {status}"));
        self.watch.add_likely(kind, likely, text, self.described(queue, command));
    }

    /// Returns the mistake that would explain why a command was refused: by one block, or one entry.
    fn likely(&self, queue: u16, command: &Command, kind: &Kind, status: Status) -> Option<Likely> {
        let Limits { block_bytes, blocks, mqes, .. } = self.limits;
        let bytes = self.limits.data_bytes(queue, command);
        let over = |limit: u64| limit.checked_add(block_bytes.into()) == Some(bytes);
        let is_nlb = match status {
            Status::LBA_OUT_OF_RANGE => {
                let end = command.slba().checked_add(command.blocks().into());
                command.opcode != nvm::DATASET_MANAGEMENT
                    && command.blocks() > 1
                    && end == blocks.checked_add(1)
            }
            Status::DATA_SGL_LENGTH_INVALID => {
                let sgl = command.sgl1();
                has_blocks(queue, command) && sgl.kind == 0 && over(sgl.length.get().into())
            }
            _ => kind.id == findings::TRANSFER_SIZE.id && over(self.limits.transfer_bytes()),
        };
        let is_size = status == Status::INVALID_QUEUE_SIZE
            && command.cdw10.get() >> 16 == u32::from(mqes) + 1;
        is_nlb.then_some(findings::NLB).or(is_size.then_some(findings::QUEUE_SIZE))
    }

    /// Reports a doorbell whose value passes the other end of its queue.
    fn passed(&self, at: u32, (id, kind): (u16, QueueKind), value: u32, [end, entries]: [u32; 2]) {
        let what = format!("the doorbell of {kind} queue {id} ({at:#x}) was set to {value}, past");
        let (finding, text) = match kind {
            QueueKind::Completion => (
                &findings::HEAD_AHEAD,
                format!(
                    "{what} the last completion: the next one comes to entry {end} of {entries}"
                ),
            ),
            QueueKind::Submission => (
                &findings::SQ_OVERRUN,
                format!(
                    "{what} the head: completions have released the entries before entry {end} of \
                     {entries}"
                ),
            ),
        };
        // The driver goes on at entry 0, and the device at one more.
        let is_size = kind == QueueKind::Completion && value == 0 && end + 1 == entries;
        let likely = is_size.then_some(findings::QUEUE_SIZE);
        self.watch.add_likely(finding, likely, text, Vec::new);
    }

    fn bad_doorbell(&self, at: u32, queue: Option<(u16, QueueKind)>, value: u32, entries: u32) {
        let what = match queue {
            Some((id, kind)) => format!("the doorbell of {kind} queue {id}"),
            None => "a register between the doorbells".to_owned(),
        };
        if entries == 0 {
            let text = format!("{what} ({at:#x}) was written, and there is no such queue");
            self.watch.add(&findings::DOORBELL_QUEUE, text, || vec![format!("value {value}")]);
        } else {
            let text = format!("{what} ({at:#x}) was set to {value} of {entries} entries");
            self.watch.add(&findings::DOORBELL_VALUE, text, Vec::new);
        }
    }
}

impl Observer for Observing {
    fn observe(&self, event: &ModelEvent<'_>) {
        let watch = &self.watch;
        match *event {
            ModelEvent::Enabled { asq, acq, entries: [sq, cq], valid } => {
                watch.enabled(valid);
                for (kind, base, entries) in
                    [(QueueKind::Submission, asq, sq), (QueueKind::Completion, acq, cq)]
                {
                    self.queue_added(kind, 0, base, entries);
                }
                if !valid {
                    let text = format!(
                        "the controller was enabled with CC, AQA, ASQ ({:#x}) or ACQ ({:#x}) that it \
                         does not support",
                        asq.raw(),
                        acq.raw()
                    );
                    watch.add(&findings::ENABLE, text, Vec::new);
                }
            }
            ModelEvent::Disabled { unfetched } => watch.disabled(unfetched),
            ModelEvent::ShutDown => watch.shut_down(),
            ModelEvent::Failed => watch.failed(),
            ModelEvent::Removed => {
                watch.removed();
                // The kernel requests the device.
                self.irqs.trigger(irq::REQUEST, 0);
            }
            ModelEvent::AdminQueuesChanged => {
                let text = "AQA, ASQ or ACQ changed while the controller was enabled".to_owned();
                watch.add(&findings::ADMIN_CHANGED, text, Vec::new);
            }
            ModelEvent::EarlyChange => {
                let text = "CC.EN changed before CSTS.RDY had followed the last change".to_owned();
                watch.add(&findings::EARLY_CHANGE, text, Vec::new);
            }
            ModelEvent::BadDoorbell { at, queue, value, entries, passed } => {
                match (queue, passed) {
                    (Some(queue), Some(end)) => self.passed(at, queue, value, [end, entries]),
                    _ => self.bad_doorbell(at, queue, value, entries),
                }
            }
            ModelEvent::Created { kind, id, base, entries } => {
                self.queue_added(kind, id, base, entries);
            }
            ModelEvent::Deleted { kind, id } => {
                watch.queue_removed(name(kind), id);
                if kind == QueueKind::Submission {
                    watch.requests_ended(id);
                }
            }
            ModelEvent::Fetched { queue, at, command } => self.fetched(queue, at, command),
            ModelEvent::Executing { queue, command } => {
                watch.executing((queue, command.cid.get()));
            }
            ModelEvent::Executed { queue, command, status } => {
                self.executed(queue, command, status);
            }
            ModelEvent::Completing { queue, cid, .. } => {
                watch.completing((queue, cid));
                // Its SQHD is past all entries that were fetched.
                watch.entries_released(queue);
            }
            ModelEvent::CompletionQueueFull { queue, head, .. } => {
                let text = format!(
                    "the completion queue of submission queue {queue} is full: its doorbell has \
                     released the entries before entry {head}"
                );
                watch.add(&findings::CQ_FULL, text, Vec::new);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::little_endian::U32;

    #[test]
    fn the_data_of_admin_commands_have_a_length() {
        let limits = Limits {
            block_bytes: 512,
            blocks: 9,
            page_size: 4096,
            mdts: 0,
            mqes: 1,
            has_sgls: false,
        };
        let bytes = |opcode, cdw10: u32, cdw11: u32| {
            let (cdw10, cdw11) = (U32::new(cdw10), U32::new(cdw11));
            limits.data_bytes(0, &Command { opcode, cdw10, cdw11, ..Command::default() })
        };
        assert_eq!(bytes(admin::GET_LOG_PAGE, 2, 0), 4);
        assert_eq!(bytes(admin::GET_LOG_PAGE, 127 << 16 | 2, 0), 512);
        // The upper half of CDW11 is not of the length.
        assert_eq!(bytes(admin::GET_LOG_PAGE, 2, 7 << 16 | 1), (1 << 18) + 4);
        assert_eq!(bytes(admin::GET_LOG_PAGE, u32::MAX, u32::MAX), 1 << 34);
        for (feature, cdw11, get, set) in [
            (0x07, 0, 0, 0),
            (0x0d, 0, 4096, 0),
            (0x0e, 0, 8, 8),
            (0x16, 0, 512, 512),
            (0x81, 0, 8, 8),
            (0x81, 1, 16, 16),
        ] {
            assert_eq!(bytes(admin::GET_FEATURES, feature, cdw11), get, "{feature:#x}");
            assert_eq!(bytes(admin::GET_FEATURES, feature | 1 << 8, cdw11), get, "{feature:#x}");
            assert_eq!(bytes(admin::GET_FEATURES, feature | 3 << 8, cdw11), 0, "{feature:#x}");
            assert_eq!(bytes(admin::SET_FEATURES, feature | 1 << 31, cdw11), set, "{feature:#x}");
        }
    }
}
