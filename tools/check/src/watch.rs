//! Watches one controller: which commands are in flight, which memory they use, and what of it is
//! wrong.

use crate::findings::{self, Findings, Kind};
use crate::process::Site;
use crate::space::{Entry, Fault, Past, Space, Span};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Status, admin, nvm};
use pinfold_nvme_model::{Bus, BusAccess, BusFault, ModelEvent, Observer, QueueKind};
use pinfold_soft::Random;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use zerocopy::IntoBytes;

/// The most pages of one command that are followed.
const PAGES: usize = 4096;
/// Opcodes of admin commands that a controller need not support, so that a driver may try them
/// (Base, figure "Opcodes for Admin Commands").
const ADMIN_OPCODES: [u8; 31] = [
    0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x10, 0x11, 0x14, 0x15, 0x18,
    0x19, 0x1a, 0x1c, 0x1d, 0x1e, 0x20, 0x21, 0x22, 0x24, 0x7c, 0x7f, 0x80, 0x81, 0x82, 0x84,
];

/// What the checks need to know of the controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) block_bytes: u32,
    /// The size of a page (CC.MPS).
    pub(crate) page_size: u64,
    pub(crate) mdts: u8,
    pub(crate) has_sgls: bool,
}

/// A command in flight.
#[derive(Clone, Debug)]
struct InFlight {
    command: Command,
    /// Its entry of the submission queue, until a completion has released it.
    entry: Option<Span>,
    /// The number of the last change of the space when it was fetched.
    serial: u64,
    /// Its data and lists.
    memory: Vec<Span>,
    /// Of a write that waits: the hash of its data.
    hash: Option<u64>,
}

impl InFlight {
    /// Returns whether the device writes the data.
    fn is_written(&self, queue: u16) -> bool {
        match queue {
            0 => matches!(self.command.opcode, admin::IDENTIFY | admin::GET_LOG_PAGE),
            _ => self.command.opcode == nvm::READ,
        }
    }
}

type Id = (u16, u16);

#[derive(Debug, Default)]
struct State {
    in_flight: BTreeMap<Id, InFlight>,
    queues: BTreeMap<(QueueKind, u16), Span>,
    current: Option<(Id, u64)>,
    enabled: bool,
    /// The controller was enabled, and not shut down since.
    dirty: bool,
    /// CSTS.CFS is set: the host can only reset it, with what is in flight.
    failed: bool,
}

impl State {
    /// Returns the number of commands in flight that the host should wait for: without the requests
    /// for asynchronous events, which are in flight until there is an event, and 0 where the
    /// controller has failed.
    fn commands(&self) -> usize {
        if self.failed {
            return 0;
        }
        let is_request =
            |queue: u16, known: &InFlight| queue == 0 && known.command.opcode == admin::ASYNC_EVENT;
        self.in_flight.iter().filter(|((queue, _), known)| !is_request(*queue, known)).count()
    }
}

/// A controller, from the side of its accesses to memory.
#[derive(Debug)]
pub(crate) struct Watch {
    name: String,
    space: RwLock<Option<Arc<Space>>>,
    bus_master: AtomicBool,
    state: Mutex<State>,
    findings: Arc<Findings>,
    limits: Limits,
    /// Writes in pieces, in an order that follows from a seed.
    scatter: Option<Mutex<Random>>,
}

fn describe(queue: u16, command: &Command) -> String {
    let cid = command.cid.get();
    let range = || format!("{} blocks at {}", command.blocks(), command.slba());
    let what = match (queue, command.opcode) {
        (0, admin::IDENTIFY) => format!("identify {:#x}", command.cdw10.get() & 0xff),
        (0, admin::CREATE_CQ) => {
            format!("create completion queue {}", command.cdw10.get() & 0xffff)
        }
        (0, admin::CREATE_SQ) => {
            format!("create submission queue {}", command.cdw10.get() & 0xffff)
        }
        (0, admin::DELETE_CQ) => {
            format!("delete completion queue {}", command.cdw10.get() & 0xffff)
        }
        (0, admin::DELETE_SQ) => {
            format!("delete submission queue {}", command.cdw10.get() & 0xffff)
        }
        (0, admin::GET_LOG_PAGE) => format!("get log page {:#x}", command.cdw10.get() & 0xff),
        (0, opcode) => format!("admin command {opcode:#04x}"),
        (_, nvm::READ) => format!("read of {}", range()),
        (_, nvm::WRITE) => format!("write of {}", range()),
        (_, nvm::FLUSH) => "flush".to_owned(),
        (_, nvm::WRITE_ZEROES) => format!("write zeroes of {}", range()),
        (_, nvm::DATASET_MANAGEMENT) => "dataset management".to_owned(),
        (_, opcode) => format!("command {opcode:#04x}"),
    };
    format!(
        "command {cid} of queue {queue}: {what}; PRP1 {:#x}, PRP2 {:#x}",
        command.prp1.get(),
        command.prp2.get()
    )
}

impl Watch {
    pub(crate) fn new(
        name: String,
        findings: Arc<Findings>,
        limits: Limits,
        scatter: Option<Random>,
    ) -> Self {
        Self {
            name,
            space: RwLock::new(None),
            bus_master: AtomicBool::new(false),
            state: Mutex::default(),
            findings,
            limits,
            scatter: scatter.map(Mutex::new),
        }
    }

    // Each change leaves the state consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn space(&self) -> Option<Arc<Space>> {
        self.space.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Attaches the controller to an address space, or detaches it.
    pub(crate) fn attach(&self, space: Option<Arc<Space>>) {
        *self.space.write().unwrap_or_else(PoisonError::into_inner) = space;
    }

    /// Returns whether the controller is attached to `space`.
    pub(crate) fn is_attached(&self, space: &Arc<Space>) -> bool {
        self.space().is_some_and(|own| Arc::ptr_eq(&own, space))
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.bus_master.store(on, Ordering::SeqCst);
        let in_flight = self.state().commands();
        if !on && in_flight > 0 {
            let text = format!(
                "{}: bus mastering was switched off with {in_flight} commands in flight",
                self.name
            );
            self.findings.add(&findings::BUS_MASTER, text, Vec::new);
        }
    }

    fn add(&self, kind: &Kind, text: String, details: impl FnOnce() -> Vec<String>) {
        self.findings.add(kind, format!("{}: {text}", self.name), details);
    }

    // What the program does.

    /// Checks an unmap of `span` before it is carried out.
    pub(crate) fn before_unmap(&self, span: Span, site: &Site) {
        let state = self.state();
        for ((queue, _), command) in &state.in_flight {
            if let Some(used) = command.memory.iter().find(|used| used.overlaps(&span)) {
                let text = if *used == span {
                    format!("{span} is unmapped while a command in flight uses it")
                } else {
                    format!("{span} is unmapped while a command in flight uses {used}")
                };
                let (queue, command) = (*queue, command.command);
                self.add(&findings::UNMAP_IN_FLIGHT, text, || {
                    vec![describe(queue, &command), format!("unmapped by {}", site.describe())]
                });
            }
        }
        for ((kind, id), memory) in &state.queues {
            if memory.overlaps(&span) {
                let text = format!("{span} is unmapped, and {kind} queue {id} is in {memory}");
                self.add(&findings::QUEUE_UNMAPPED, text, || {
                    vec![format!("unmapped by {}", site.describe())]
                });
            }
        }
    }

    /// Notes a reset by the program; `closed`: its last descriptor is gone.
    pub(crate) fn before_reset(&self, closed: bool) {
        let (in_flight, dirty) = {
            let state = self.state();
            (state.commands(), state.dirty)
        };
        if in_flight > 0 {
            let how = if closed { "closed" } else { "reset" };
            let text = format!("the device was {how} with {in_flight} commands in flight");
            self.add(&findings::RESET_IN_FLIGHT, text, Vec::new);
        }
        if closed && dirty {
            let text = "the device was closed without a shutdown".to_owned();
            self.add(&findings::NO_SHUTDOWN, text, Vec::new);
        }
        self.state().dirty = false;
    }

    /// Notes that a command will be executed later: its data may not change until then.
    pub(crate) fn expect_unchanged(&self, queue: u16, cid: u16) {
        let Some(found) = self.state().in_flight.get(&(queue, cid)).cloned() else { return };
        if queue != 0 && found.command.opcode == nvm::WRITE {
            let hash = self.hash(&found);
            if let Some(known) = self.state().in_flight.get_mut(&(queue, cid)) {
                known.hash = hash;
            }
        }
    }

    fn hash(&self, command: &InFlight) -> Option<u64> {
        let space = self.space()?;
        let mut hasher = DefaultHasher::new();
        let mut bytes = vec![0; 4096];
        for span in &command.memory {
            let (mut at, mut left) = (span.first, span.len());
            while left > 0 {
                let piece = left.min(bytes.len() as u64);
                let to = bytes.get_mut(..usize::try_from(piece).ok()?)?;
                space.read(at, to).ok()?;
                hasher.write(to);
                (at, left) = (at.wrapping_add(piece), left - piece);
            }
        }
        Some(hasher.finish())
    }

    // The data of a command.

    /// Returns the length of a command's data; 0 where it has none, or it is not known.
    fn data_bytes(&self, queue: u16, command: &Command) -> u64 {
        match (queue, command.opcode) {
            (0, admin::IDENTIFY) => 4096,
            (0, _) => 0,
            (_, nvm::READ | nvm::WRITE) => {
                u64::from(command.blocks()) * u64::from(self.limits.block_bytes)
            }
            (_, nvm::DATASET_MANAGEMENT) => u64::from((command.cdw10.get() & 0xff) + 1) * 16,
            _ => 0,
        }
    }

    /// Returns the memory that a command uses, as far as its data pointer is valid.
    fn memory_of(&self, queue: u16, command: &Command) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut left = self.data_bytes(queue, command);
        let mut add = |at: u64, len: u64| match spans.last_mut() {
            Some(Span { last, .. }) if last.checked_add(1) == Some(at) => {
                *last = last.saturating_add(len);
            }
            _ => spans.extend(Span::new(at, len)),
        };
        if left == 0 {
            return spans;
        }
        if command.flags & Command::PSDT_SGL != 0 {
            // One data block; segments are checked when they are read.
            let sgl = command.sgl1();
            if sgl.kind == 0 {
                add(sgl.address.get(), u64::from(sgl.length.get()).min(left));
            }
            return spans;
        }
        let page = self.limits.page_size;
        let (prp1, prp2) = (command.prp1.get(), command.prp2.get());
        let first = (page - prp1 % page).min(left);
        add(prp1, first);
        left -= first;
        if left == 0 {
            return spans;
        }
        if left <= page {
            add(prp2, left);
            return spans;
        }
        let Some(space) = self.space() else { return spans };
        let mut list = prp2;
        for _ in 0..PAGES {
            let mut entry = [0; 8];
            if space.read(list, &mut entry).is_err() {
                break;
            }
            let value = u64::from_le_bytes(entry);
            if list % page == page - 8 && left > page {
                list = value;
                continue;
            }
            let piece = left.min(page);
            add(value, piece);
            left -= piece;
            list = list.wrapping_add(8);
            if left == 0 {
                break;
            }
        }
        spans
    }

    // What the controller does.

    fn fetched(&self, queue: u16, at: Iova, command: &Command) {
        let cid = command.cid.get();
        let entry = Span::new(at.raw(), Command::BYTES as u64);
        let serial = self.space().map_or(0, |space| space.serial());
        let memory = self.memory_of(queue, command);
        let new = InFlight { command: *command, entry, serial, memory, hash: None };
        if queue != 0 && (command.cdw2.get() | command.cdw3.get()) != 0 {
            let text = "CDW2 and CDW3 of a command are reserved, and not 0".to_owned();
            self.add(&findings::FIELD, text, || vec![describe(queue, command)]);
        }
        let mut state = self.state();
        if new.is_written(queue) {
            for ((other_queue, _), other) in &state.in_flight {
                let both = |span: &&Span| new.memory.iter().any(|own| own.overlaps(span));
                let hit = other.is_written(*other_queue).then(|| other.memory.iter().find(both));
                if let Some(span) = hit.flatten() {
                    let text = format!("two commands in flight write the bytes in {span}");
                    let (other_queue, other) = (*other_queue, other.command);
                    self.add(&findings::WRITTEN_TWICE, text, || {
                        vec![describe(other_queue, &other), describe(queue, command)]
                    });
                    break;
                }
            }
        }
        if let Some(old) = state.in_flight.insert((queue, cid), new) {
            let text = format!("command identifier {cid} of queue {queue} is in flight twice");
            self.add(&findings::CID_TWICE, text, || {
                vec![describe(queue, &old.command), describe(queue, command)]
            });
        }
    }

    fn executing(&self, queue: u16, command: &Command) {
        let id = (queue, command.cid.get());
        let known = self.state().in_flight.get(&id).cloned();
        self.state().current = known.as_ref().map(|known| (id, known.serial));
        let Some(known) = known else { return };
        if known.hash.is_some() && known.hash != self.hash(&known) {
            let text = "the data of a write changed between its submission and its completion";
            self.add(&findings::DATA_CHANGED, text.to_owned(), || vec![describe(queue, command)]);
        }
        let mut entry = [0; Command::BYTES];
        let at = known.entry.zip(self.space());
        if let Some((at, space)) = at
            && space.read(at.first, &mut entry).is_ok()
            && entry != known.command.as_bytes()
        {
            let text = "an entry of a submission queue changed after its submission".to_owned();
            self.add(&findings::ENTRY_CHANGED, text, || {
                vec![describe(queue, command), format!("the entry at {at}")]
            });
        }
    }

    fn executed(&self, queue: u16, command: &Command, status: Option<Status>) {
        self.state().current = None;
        let status = status.map_or(Status::SUCCESS, Status::code);
        let kind = match (queue, status) {
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
                let limit = match self.limits.mdts {
                    0 => u64::MAX,
                    shift => self.limits.page_size.checked_shl(shift.into()).unwrap_or(u64::MAX),
                };
                let is_sgl = command.flags & Command::PSDT_SGL != 0;
                if self.data_bytes(queue, command) > limit {
                    &findings::TRANSFER_SIZE
                } else if is_sgl && !self.limits.has_sgls {
                    &findings::SGL
                } else {
                    &findings::FIELD
                }
            }
            _ => return,
        };
        let text = format!("the controller refused a command: {status}");
        self.add(kind, text, || vec![describe(queue, command)]);
    }

    /// Describes the command that the controller executes.
    fn current(&self) -> Vec<String> {
        let state = self.state();
        let id = state.current.map(|(id, _)| id);
        let known = id.and_then(|id| Some((id, state.in_flight.get(&id)?)));
        match known {
            Some(((queue, _), known)) => vec![describe(queue, &known.command)],
            None => vec!["an entry of a queue".to_owned()],
        }
    }

    fn faulted(&self, fault: &Fault, len: usize, access: BusAccess) {
        let verb = match access {
            BusAccess::Read => "reads",
            BusAccess::Write => "writes",
        };
        match fault {
            Fault::Unmapped(at, Some(Past { span, site, refused: Some(errno) })) => {
                let text = format!("the device {verb} {at:#x}, whose map was refused");
                let error = std::io::Error::from_raw_os_error(*errno);
                self.add(&findings::MAP_REFUSED, text, || {
                    let mut details = self.current();
                    details.push(format!("the map of {span} by {}: {error}", site.describe()));
                    details
                });
            }
            Fault::Unmapped(at, past) => {
                let text = format!("the device {verb} {len} bytes at {at:#x}, which is not mapped");
                self.add(&findings::UNMAPPED, text, || {
                    let mut details = self.current();
                    details.extend(past.as_ref().map(|past| {
                        format!("{} was unmapped by {}", past.span, past.site.describe())
                    }));
                    details
                });
            }
            Fault::Direction(at, entry) => {
                let text = format!("the device {verb} {at:#x}, which is not mapped for that");
                self.add(&findings::DIRECTION, text, || self.with_map(entry));
            }
            Fault::Gone(at, entry) => {
                let text = format!(
                    "the device {verb} {at:#x}, mapped to memory that process {} has unmapped",
                    entry.memory.pid
                );
                // A process that has ended uses no memory, and its device is being closed.
                if entry.memory.is_alive() {
                    self.add(&findings::MEMORY_GONE, text, || self.with_map(entry));
                }
            }
        }
    }

    fn with_map(&self, entry: &Entry) -> Vec<String> {
        let mut details = self.current();
        details.push(format!("{} was mapped by {}", entry.span, entry.site.describe()));
        details
    }

    fn access(
        &self,
        at: Iova,
        len: usize,
        kind: BusAccess,
        access: impl FnOnce(&Space, &mut u64) -> Result<(), Fault>,
    ) -> Result<(), BusFault> {
        let failed = BusFault { iova: at, len, kind };
        if !self.bus_master.load(Ordering::SeqCst) {
            let text = format!("the device accesses {:#x} with bus mastering off", at.raw());
            self.add(&findings::BUS_MASTER, text, Vec::new);
            return Err(failed);
        }
        let space = self.space().ok_or(failed)?;
        let mut newest = 0;
        if let Err(fault) = access(&space, &mut newest) {
            self.faulted(&fault, len, kind);
            return Err(failed);
        }
        let current = self.state().current;
        if current.is_some_and(|(_, serial)| newest > serial) {
            let text = format!(
                "{:#x} was mapped again after the submission of the command that uses it",
                at.raw()
            );
            self.add(&findings::REMAPPED, text, || match space.at(at.raw()) {
                Some(entry) => self.with_map(&entry),
                None => self.current(),
            });
        }
        Ok(())
    }
}

/// The bus of a watched controller.
#[derive(Clone, Debug)]
pub(crate) struct WatchedBus(pub(crate) Arc<Watch>);

impl WatchedBus {
    fn write_at(&self, at: Iova, from: &[u8]) -> Result<(), BusFault> {
        self.0.access(at, from.len(), BusAccess::Write, |space, newest| {
            space.access(at.raw(), from.len(), true, |entry, vaddr, done, len| {
                *newest = (*newest).max(entry.serial);
                entry.memory.write(vaddr, from.get(done..done + len).unwrap_or_default())
            })
        })
    }

    /// Writes in pieces of random length, in random order.
    fn scattered(&self, random: &Mutex<Random>, at: Iova, from: &[u8]) -> Result<(), BusFault> {
        let mut pieces = Vec::new();
        {
            let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
            let mut done = 0;
            while done < from.len() {
                let most = usize::try_from(random.below(1024) + 1).unwrap_or(1);
                let len = most.min(from.len() - done);
                pieces.push((random.below(1 << 40), done, len));
                done += len;
            }
        }
        pieces.sort_unstable();
        for (_, done, len) in pieces {
            let piece = from.get(done..done + len).unwrap_or_default();
            self.write_at(Iova::new(at.raw().wrapping_add(done as u64)), piece)?;
        }
        Ok(())
    }
}

impl Bus for WatchedBus {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        self.0.access(iova, to.len(), BusAccess::Read, |space, newest| {
            space.access(iova.raw(), to.len(), false, |entry, vaddr, done, len| {
                *newest = (*newest).max(entry.serial);
                entry.memory.read(vaddr, to.get_mut(done..done + len).unwrap_or_default())
            })
        })
    }

    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        match &self.0.scatter {
            Some(random) => self.scattered(random, iova, from),
            None => self.write_at(iova, from),
        }
    }

    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        // The kernel copies byte by byte on some processors, so the byte with the phase is written
        // last and alone.
        let [a, b, phase, c] = value.to_le_bytes();
        let at = |distance| Iova::new(iova.raw().wrapping_add(distance));
        self.write_at(at(0), &[a, b])?;
        self.write_at(at(3), &[c])?;
        self.write_at(at(2), &[phase])
    }
}

impl Observer for Watch {
    fn observe(&self, event: &ModelEvent<'_>) {
        match *event {
            ModelEvent::Enabled { asq, acq, entries: [sq, cq], valid } => {
                let span = |at: Iova, bytes: u32| Span::new(at.raw(), bytes.into());
                let mut state = self.state();
                (state.enabled, state.dirty) = (true, valid);
                state
                    .queues
                    .extend(span(asq, sq * 64).map(|span| ((QueueKind::Submission, 0), span)));
                state
                    .queues
                    .extend(span(acq, cq * 16).map(|span| ((QueueKind::Completion, 0), span)));
                drop(state);
                if !valid {
                    let text = format!(
                        "the controller was enabled with CC, AQA, ASQ ({:#x}) or ACQ ({:#x}) that it \
                         does not support",
                        asq.raw(),
                        acq.raw()
                    );
                    self.add(&findings::ENABLE, text, Vec::new);
                }
            }
            ModelEvent::Disabled => {
                let mut state = self.state();
                let in_flight = state.commands();
                let enabled = state.enabled;
                *state = State { dirty: state.dirty, ..State::default() };
                drop(state);
                if in_flight > 0 && enabled {
                    let text =
                        format!("the controller was disabled with {in_flight} commands in flight");
                    self.add(&findings::RESET_IN_FLIGHT, text, Vec::new);
                }
            }
            ModelEvent::ShutDown => self.state().dirty = false,
            ModelEvent::Failed => {
                let mut state = self.state();
                (state.failed, state.dirty) = (true, false);
            }
            // It makes no more accesses, and can neither be reset nor shut down.
            ModelEvent::Removed => *self.state() = State::default(),
            ModelEvent::AdminQueuesChanged => {
                let text = "AQA, ASQ or ACQ changed while the controller was enabled".to_owned();
                self.add(&findings::ADMIN_CHANGED, text, Vec::new);
            }
            ModelEvent::EarlyChange => {
                let text = "CC.EN changed before CSTS.RDY had followed the last change".to_owned();
                self.add(&findings::EARLY_CHANGE, text, Vec::new);
            }
            ModelEvent::BadDoorbell { at, queue, value, entries } => {
                let what = match queue {
                    Some((id, kind)) => format!("the doorbell of {kind} queue {id}"),
                    None => "a register between the doorbells".to_owned(),
                };
                if entries == 0 {
                    let text = format!("{what} ({at:#x}) was written, and there is no such queue");
                    self.add(&findings::DOORBELL_QUEUE, text, || vec![format!("value {value}")]);
                } else {
                    let text = format!("{what} ({at:#x}) was set to {value} of {entries} entries");
                    self.add(&findings::DOORBELL_VALUE, text, Vec::new);
                }
            }
            ModelEvent::Created { kind, id, base, entries } => {
                let bytes = match kind {
                    QueueKind::Submission => 64,
                    QueueKind::Completion => 16,
                };
                let span = Span::new(base.raw(), u64::from(entries) * bytes);
                self.state().queues.extend(span.map(|span| ((kind, id), span)));
            }
            ModelEvent::Deleted { kind, id } => {
                let mut state = self.state();
                state.queues.remove(&(kind, id));
                if kind == QueueKind::Submission {
                    state.in_flight.retain(|(queue, _), _| *queue != id);
                }
            }
            ModelEvent::Fetched { queue, at, command } => self.fetched(queue, at, command),
            ModelEvent::Executing { queue, command } => self.executing(queue, command),
            ModelEvent::Executed { queue, command, status } => {
                self.executed(queue, command, status);
            }
            ModelEvent::Completing { queue, cid, .. } => {
                let mut state = self.state();
                state.in_flight.remove(&(queue, cid));
                // Its SQHD is past all entries that were fetched.
                for ((own, _), known) in &mut state.in_flight {
                    if *own == queue {
                        known.entry = None;
                    }
                }
            }
            ModelEvent::CompletionQueueFull { queue, .. } => {
                let text = format!("the completion queue of submission queue {queue} is full");
                self.add(&findings::CQ_FULL, text, Vec::new);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
