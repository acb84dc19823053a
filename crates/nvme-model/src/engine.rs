//! The thread that executes commands.

mod admin;
mod io;

use crate::bus::{Bus, BusFault};
use crate::config::ModelConfig;
use crate::faults::{CommandInfo, Fault, Faults};
use crate::namespace::Namespace;
use crate::prp::Resolver;
use crate::queues::{Completions, FETCH, Queues, Submission};
use crate::registers::{EVENT_BAD_DOORBELL_VALUE, EVENT_NO_SUCH_DOORBELL, RegisterFile};
use crate::stats::Counters;
use pinfold_core::addr::Iova;
use pinfold_nvme::EventFd;
use pinfold_nvme::spec::{Cc, Command, Csts, Doorbell, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// From how many blocks on a transfer takes long enough to be told of at once.
const LARGE_BLOCKS: u32 = 16;

/// What became of a command: its completion, or `None` for one that completes later or never.
type Outcome = Option<(Status, u32)>;

/// When a command that is held goes on.
#[derive(Clone, Copy, Debug)]
enum Due {
    /// When somebody says so.
    Release,
    /// When this many I/O commands have come, or nothing else is left to do.
    Index(u64),
}

#[derive(Debug)]
struct Held {
    queue: u16,
    command: Command,
    due: Due,
}

#[derive(Debug)]
pub(crate) struct Engine<B> {
    shared: Arc<RegisterFile>,
    bus: B,
    faults: Faults,
    vectors: Vec<Arc<EventFd>>,
    counters: Arc<Counters>,
    namespaces: Vec<Namespace>,
    mdts: u8,
    rtd3_entry_us: u32,
    acl: u8,
    aerl: u8,
    queue_limit: u16,
    queues: Queues,
    enabled: bool,
    /// Commands that came in on I/O queues since the beginning.
    index: u64,
    held: Vec<Held>,
    rogues: Vec<(u64, Iova, usize)>,
    event_requests: Vec<u16>,
    event: Option<u32>,
    /// Log pages whose events are masked: one was reported, and the page has not been read since.
    masked: Vec<u8>,
    resolver: Resolver,
    bytes: Box<[u8; FETCH * Command::BYTES]>,
}

impl<B: Bus> Engine<B> {
    pub(crate) fn new(
        shared: Arc<RegisterFile>,
        bus: B,
        (faults, vectors): (Faults, Vec<Arc<EventFd>>),
        counters: Arc<Counters>,
        config: ModelConfig,
    ) -> Self {
        Self {
            shared,
            bus,
            faults,
            vectors,
            counters,
            namespaces: config.namespaces,
            mdts: config.mdts,
            rtd3_entry_us: config.rtd3_entry_us,
            acl: config.acl,
            aerl: config.aerl,
            queue_limit: config.queues,
            queues: Queues::new(config.queues),
            enabled: false,
            index: 0,
            held: Vec::new(),
            rogues: Vec::new(),
            event_requests: Vec::new(),
            event: None,
            masked: Vec::new(),
            resolver: Resolver::new(),
            bytes: Box::new([0; FETCH * Command::BYTES]),
        }
    }

    /// Executes until the controller is dropped.
    ///
    /// Idle, it spins for a moment (the next doorbell is often near), lets others run for a while, then sleeps.
    pub(crate) fn run(mut self) {
        const SPINS: u32 = 200;
        const YIELDS: u32 = 400;
        let mut idle = 0u32;
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.step() {
                idle = 0;
                continue;
            }
            idle = idle.saturating_add(1);
            if idle < SPINS {
                std::hint::spin_loop();
            } else if idle < YIELDS {
                std::thread::yield_now();
            } else {
                self.shared.clone().park(|| self.step());
                idle = SPINS;
            }
        }
    }

    /// Does what there is to do; whether there was anything.
    fn step(&mut self) -> bool {
        let cc = self.shared.cc();
        if cc.enabled() != self.enabled && !self.faults.is_stuck() {
            if cc.enabled() {
                self.enable(cc)
            } else {
                self.disable()
            }
            return true;
        }
        let csts = self.shared.csts();
        if !self.enabled || csts.contains(Csts::FATAL) {
            return false;
        }
        if cc.shutdown() && !csts.contains(Csts::SHUTDOWN_COMPLETE) && !self.faults.is_shutdown_stuck() {
            let flushed = self.namespaces.iter().all(|namespace| namespace.media.flush().is_ok());
            Counters::add(&self.counters.shutdowns, u64::from(flushed));
            self.shared.set_csts(csts | if flushed { Csts::SHUTDOWN_COMPLETE } else { Csts::FATAL });
            return true;
        }
        self.work().unwrap_or_else(|_fault| {
            // A queue that can not be reached leaves no way to tell: Base 3.1.3.6, CFS.
            self.fail();
            true
        })
    }

    fn work(&mut self) -> Result<bool, BusFault> {
        let mut any = self.report_events()?;
        for id in 0..=self.queue_limit {
            any |= self.drain(id)?;
            any |= self.serve(id)?;
            if self.shared.csts().contains(Csts::FATAL) {
                return Ok(true);
            }
        }
        any |= self.resume(!any)?;
        self.interrupt();
        Ok(any)
    }

    /// Raises the interrupts of the queues that got completions since the last call.
    fn interrupt(&mut self) {
        for vector in self.queues.take_signals() {
            if let Some(event) = self.vectors.get(usize::from(vector)) {
                event.signal();
                Counters::add(&self.counters.interrupts, 1);
            }
        }
    }

    fn drain(&mut self, id: u16) -> Result<bool, BusFault> {
        let Some(Some(cq)) = self.queues.completion.get_mut(usize::from(id)) else { return Ok(false) };
        if !cq.is_blocked() {
            return Ok(false);
        }
        let head = self.shared.bell(id, Doorbell::CompletionHead).map_or(0, |bell| bell.value());
        cq.drain(&self.bus, head)
    }

    /// Fetches and executes a batch of one submission queue; whether there was one.
    fn serve(&mut self, id: u16) -> Result<bool, BusFault> {
        let Some(Some(sq)) = self.queues.submission.get_mut(usize::from(id)) else { return Ok(false) };
        let tail = self.shared.bell(id, Doorbell::SubmissionTail).map_or(0, |bell| bell.value());
        if tail == sq.head
            || self
                .queues
                .completion
                .get(usize::from(sq.cq))
                .is_none_or(|cq| cq.as_ref().is_none_or(Completions::is_blocked))
        {
            return Ok(false);
        }
        let mut batch = [Command::default(); FETCH];
        let count = sq.fetch(&self.bus, tail, &mut self.bytes, &mut batch)?;
        for command in batch.iter().take(count) {
            self.index += u64::from(id != 0);
            if let Some(outcome) = self.start(id, command) {
                self.complete(id, command, outcome)?;
            }
            // One interrupt does for a batch, but a host does not wait for others' large transfers.
            if command.blocks() >= LARGE_BLOCKS {
                self.interrupt();
            }
            if self.shared.csts().contains(Csts::FATAL) {
                break;
            }
            self.strike_back();
        }
        Ok(true)
    }

    fn complete(&mut self, id: u16, command: &Command, outcome: (Status, u32)) -> Result<(), BusFault> {
        Counters::add(&self.counters.commands, 1);
        Counters::add(&self.counters.errors, u64::from(!outcome.0.is_success()));
        self.queues.complete(&self.shared, &self.bus, (id, command.cid.get()), outcome)
    }

    /// Executes a command, unless a fault says otherwise.
    fn start(&mut self, id: u16, command: &Command) -> Outcome {
        let index = self.index.saturating_sub(1);
        let fault = self.faults.pick(|| CommandInfo {
            queue: id,
            cid: command.cid.get(),
            opcode: command.opcode,
            nsid: command.nsid.get(),
            slba: command.slba(),
            blocks: command.blocks(),
            index,
        });
        let Some(fault) = fault else { return self.execute(id, command) };
        match fault {
            Fault::Fail(status) => Some((status, 0)),
            Fault::NeverComplete => {
                self.execute(id, command);
                None
            }
            Fault::Hold => {
                self.held.push(Held { queue: id, command: *command, due: Due::Release });
                None
            }
            Fault::Reorder(after) => {
                let due = Due::Index(self.index.saturating_add(after.into()));
                self.held.push(Held { queue: id, command: *command, due });
                None
            }
            Fault::Fatal => {
                self.fail();
                None
            }
            Fault::Remember => {
                let outcome = self.execute(id, command);
                if let Some((iova, len)) = self.first_run() {
                    self.faults.remember(iova, len);
                }
                outcome
            }
            Fault::RogueWrite(after) => {
                let outcome = self.execute(id, command);
                if let Some((iova, len)) = self.first_run() {
                    self.rogues.push((self.index.saturating_add(after.into()), iova, len));
                }
                outcome
            }
        }
    }

    fn execute(&mut self, id: u16, command: &Command) -> Outcome {
        if id == 0 { self.execute_admin(command) } else { Some((self.execute_io(command), 0)) }
    }

    /// Writes where [`Fault::RogueWrite`] said, when it is time.
    fn strike_back(&mut self) {
        if self.rogues.is_empty() {
            return;
        }
        let (index, faults) = (self.index, &self.faults);
        self.rogues.retain(|(due, iova, len)| {
            let wait = *due > index;
            if !wait {
                faults.rogue_write(*iova, *len);
            }
            wait
        });
    }

    /// Executes what was held and is due; `idle`: nothing else is left to do.
    fn resume(&mut self, idle: bool) -> Result<bool, BusFault> {
        let released = self.faults.take_release();
        if self.held.is_empty() {
            return Ok(false);
        }
        let index = self.index;
        let mut due = Vec::new();
        self.held.retain_mut(|held| {
            let now = match held.due {
                Due::Release => released,
                Due::Index(at) => idle || at <= index,
            };
            if now {
                due.push((held.queue, held.command));
            }
            !now
        });
        let any = !due.is_empty();
        for (queue, command) in due {
            if let Some(outcome) = self.execute(queue, &command) {
                self.complete(queue, &command, outcome)?;
            }
        }
        Ok(any)
    }

    fn enable(&mut self, cc: Cc) {
        let (sq_size, cq_size, asq, acq) = self.shared.admin_queues();
        let sound = cc.page_shift() == 12
            && cc.command_set() == 0
            && sq_size >= 2
            && cq_size >= 2
            && asq % 4096 == 0
            && acq % 4096 == 0;
        self.enabled = true;
        if !sound {
            self.shared.set_csts(Csts::FATAL);
            return;
        }
        let (sq, cq) = (Iova::new(asq), Iova::new(acq));
        if let Some(slot) = self.queues.submission.first_mut() {
            *slot = Some(Submission { base: sq, size: sq_size, head: 0, cq: 0 });
        }
        if let Some(slot) = self.queues.completion.first_mut() {
            *slot = Some(Completions::new(cq, cq_size, Some(0)));
        }
        self.open_bell(0, Doorbell::SubmissionTail, sq_size);
        self.open_bell(0, Doorbell::CompletionHead, cq_size);
        self.shared.set_csts(Csts::READY);
    }

    /// Forgets everything; when RDY reads 0 the controller makes no further access.
    fn disable(&mut self) {
        self.queues.clear(&self.shared);
        self.held.clear();
        self.event_requests.clear();
        self.event = None;
        self.masked.clear();
        self.enabled = false;
        self.shared.set_csts(Csts::empty());
    }

    fn fail(&mut self) {
        self.shared.set_csts(self.shared.csts() | Csts::FATAL);
    }

    fn open_bell(&self, queue: u16, which: Doorbell, size: u32) {
        if let Some(bell) = self.shared.bell(queue, which) {
            bell.set_size(size);
        }
    }

    /// Tells the host of a doorbell error, if it asked for events (Base 5.2).
    fn report_events(&mut self) -> Result<bool, BusFault> {
        if let Some(event) = self.shared.take_event() {
            debug_assert!(matches!(event, EVENT_NO_SUCH_DOORBELL | EVENT_BAD_DOORBELL_VALUE));
            self.event = Some(event);
        }
        if self.event_requests.is_empty() {
            return Ok(false);
        }
        if let Some(result) = self.faults.take_event(&self.masked) {
            let [.., page, _] = result.to_le_bytes();
            self.masked.push(page);
            let Some(cid) = self.event_requests.pop() else { return Ok(false) };
            self.queues.complete(&self.shared, &self.bus, (0, cid), (Status::SUCCESS, result))?;
            return Ok(true);
        }
        let Some(event) = self.event else { return Ok(false) };
        let Some(cid) = self.event_requests.pop() else { return Ok(false) };
        self.event = None;
        // Type 0 (error status) in bits 2:0, information in bits 15:8, log page 1 in bits 23:16.
        let result = event << 8 | 1 << 16;
        self.queues.complete(&self.shared, &self.bus, (0, cid), (Status::SUCCESS, result))?;
        Ok(true)
    }
}
