//! The loop of the executing thread: its state, registers, queues, faults, interrupts.

use crate::bus::{Bus, BusFault};
use crate::config::{Counters, ModelConfig, Namespace};
use crate::data_pointer::Resolver;
use crate::door::{InterruptSink, ModelEvent, Observer};
use crate::faults::{CommandInfo, Fault, Faults};
use crate::queues::{CommandId, CommandResult, CompletionQueue, FETCH, Queues, SubmissionQueue};
use crate::registers::{
    AdminQueues, BadDoorbell, EVENT_BAD_DOORBELL_VALUE, EVENT_NO_SUCH_DOORBELL, RegisterFile,
};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Cc, Command, Cqe, Csts, Doorbell, PAGE_BYTES, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The longest sleep where a driver wakes the controller. It bounds the cost of a lost wake-up; none
/// is known.
const WOKEN_SLEEP: Duration = Duration::from_millis(100);
/// The sleep between two scans of shared registers, which do not wake the controller: for a second
/// after the last command; then a thousandth of the time since, a millisecond at first and more
/// rarely the longer nothing happens. Most of its cost is to wake up.
const SCAN_SLEEP: Duration = Duration::from_micros(50);
const SCAN_TIME: Duration = Duration::from_secs(1);
const LONG_SCAN_SLEEP: Duration = Duration::from_millis(5);

fn scan_sleep(idle: Duration) -> Duration {
    if idle < SCAN_TIME { SCAN_SLEEP } else { (idle / 1000).min(LONG_SCAN_SLEEP) }
}

/// Every nth scan looks at all doorbells, also at those that no queue can have.
const WIDE_SCANS: u32 = 64;

/// From this size on, an interrupt does not wait for the rest of its batch.
const LARGE_BLOCKS: u32 = 16;

/// Shows a completion that is about to be written.
fn completing(observer: Option<&dyn Observer>, cqe: &Cqe) {
    if let Some(observer) = observer {
        let (queue, cid, status) = (cqe.sq_id.get(), cqe.cid.get(), cqe.status());
        observer.observe(&ModelEvent::Completing { queue, cid, status });
    }
}

impl<B: Bus> Engine<B> {
    /// Executes commands until the controller is dropped.
    ///
    /// Idle, it spins for a moment, since the next doorbell is often near, then yields, then
    /// sleeps. It yields only while its sleeps are short: where doorbells are far apart, as those
    /// of large requests, that would take the processor from the program which fills them. (The
    /// sleeps beside shared registers, which wake nobody, are not short: it looks once between two.)
    pub(crate) fn run(mut self) {
        const SPINS: u32 = 200;
        const YIELDS: u32 = 400;
        let (mut idle, mut sleeps_are_short) = (0u32, true);
        let mut last_work = Instant::now();
        while !self.registers.stop.load(Ordering::Acquire) {
            if self.step() {
                idle = 0;
                continue;
            }
            if idle == 0 && self.registers.is_shared() {
                last_work = Instant::now();
            }
            idle = idle.saturating_add(1);
            if idle < SPINS {
                std::hint::spin_loop();
            } else if idle < YIELDS && sleeps_are_short {
                std::thread::yield_now();
            } else {
                let limit = match self.registers.is_shared() {
                    false => WOKEN_SLEEP,
                    true => scan_sleep(last_work.elapsed()),
                };
                let limit = self.next_due().map_or(limit, |due| due.min(limit));
                let begun = Instant::now();
                self.registers.clone().park(limit, || self.step());
                sleeps_are_short = begun.elapsed() < SCAN_SLEEP;
                idle = SPINS;
            }
        }
    }

    /// Handles one change of state or one batch of work; returns whether there was any.
    fn step(&mut self) -> bool {
        if self.registers.is_reset_pending() {
            // Takes in the driver's writes until then.
            self.scan();
            self.registers.show_reset();
            self.disable();
            self.registers.finish_reset();
            return true;
        }
        let scanned = self.scan();
        let cc = self.registers.cc();
        if cc.enabled() != self.enabled && !self.faults.is_stuck() {
            let delay = self.config.ready_delay;
            if cc.enabled() && !delay.is_zero() {
                let now = Instant::now();
                let due = *self.ready_at.get_or_insert_with(|| now + delay);
                if now < due {
                    return false;
                }
            }
            self.ready_at = None;
            if cc.enabled() {
                self.enable(cc)
            } else {
                self.disable()
            }
            return true;
        }
        let csts = self.registers.csts();
        if !self.enabled || csts.contains(Csts::FATAL) {
            return scanned;
        }
        if cc.shutdown()
            && !csts.contains(Csts::SHUTDOWN_COMPLETE)
            && !self.faults.is_shutdown_stuck()
        {
            let flushed = self.namespaces().iter().all(|namespace| namespace.media.flush().is_ok());
            Counters::add(&self.counters.shutdowns, u64::from(flushed));
            self.observe(&ModelEvent::ShutDown);
            self.registers
                .set_csts(csts | if flushed { Csts::SHUTDOWN_COMPLETE } else { Csts::FATAL });
            return true;
        }
        self.work().unwrap_or_else(|_fault| {
            // An inaccessible queue is a fatal error (Base 3.1.3.6, CFS).
            self.fail();
            true
        })
    }

    /// Reads the shared registers, if there are any; returns whether any has changed.
    fn scan(&mut self) -> bool {
        if !self.registers.is_shared() {
            return false;
        }
        self.scans = self.scans.wrapping_add(1);
        let scan = self.registers.scan(self.scans.is_multiple_of(WIDE_SCANS));
        if scan.admin_queues_changed {
            self.observe(&ModelEvent::AdminQueuesChanged);
        }
        if scan.early_change {
            self.observe(&ModelEvent::EarlyChange);
        }
        for bad in &scan.bad_doorbells {
            let BadDoorbell { at, queue, value, entries, passed } = *bad;
            self.observe(&ModelEvent::BadDoorbell { at, queue, value, entries, passed });
        }
        scan.any
    }

    /// Returns how long until the next held command is due, if one waits for a time.
    fn next_due(&self) -> Option<Duration> {
        let time = |held: &HeldCommand| match held.due {
            Due::At(at) | Due::Burst(at) => Some(at),
            Due::Release | Due::Index(_) => None,
        };
        let next = self.held.iter().filter_map(time).chain(self.ready_at).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    pub(super) fn observe(&self, event: &ModelEvent<'_>) {
        if let Some(observer) = &self.observer {
            observer.observe(event);
        }
    }

    fn work(&mut self) -> Result<bool, BusFault> {
        // Before the queues are looked at: what was submitted before the release is held by then.
        let released = self.faults.take_release();
        let mut any = self.report_events()?;
        for id in 0..=self.config.queues {
            any |= self.drain(id)?;
            any |= self.serve(id)?;
            if self.registers.csts().contains(Csts::FATAL) {
                return Ok(true);
            }
        }
        any |= self.resume(!any, released)?;
        self.interrupt();
        Ok(any)
    }

    /// Raises the interrupts of queues with completions since the last call.
    fn interrupt(&mut self) {
        for vector in self.queues.take_signals() {
            if vector < self.config.vectors {
                self.interrupts.raise(vector);
                Counters::add(&self.counters.interrupts, 1);
            }
        }
    }

    fn drain(&mut self, id: u16) -> Result<bool, BusFault> {
        let Some(Some(cq)) = self.queues.completion.get_mut(usize::from(id)) else {
            return Ok(false);
        };
        if !cq.is_blocked() {
            return Ok(false);
        }
        let observer = self.observer.as_deref();
        cq.drain(&self.registers, &self.bus, |cqe| completing(observer, cqe))
    }

    /// Fetches and executes a batch of one submission queue; returns whether there was one.
    fn serve(&mut self, id: u16) -> Result<bool, BusFault> {
        let Some(Some(sq)) = self.queues.submission.get_mut(usize::from(id)) else {
            return Ok(false);
        };
        let tail = self.registers.doorbell(id, Doorbell::SubmissionTail);
        let cq = self.queues.completion.get(usize::from(sq.cq)).and_then(Option::as_ref);
        if tail == sq.head || cq.is_none_or(CompletionQueue::is_blocked) {
            return Ok(false);
        }
        let mut batch = [Command::default(); FETCH];
        let (base, size, first) = (sq.base, sq.size, sq.head);
        let fetched = sq.fetch(&self.bus, tail, &mut batch)?;
        for (slot, command) in (first..).zip(fetched.iter()) {
            let at = u64::from(slot % size) * Command::BYTES as u64;
            let at = Iova::new(base.raw().wrapping_add(at));
            self.observe(&ModelEvent::Fetched { queue: id, at, command });
        }
        for command in fetched {
            self.index += u64::from(id != 0);
            if let Some(result) = self.start(id, command) {
                self.complete(CommandId { queue: id, cid: command.cid.get() }, result)?;
            }
            // One interrupt per batch, except that a host should not wait for others' large
            // transfers.
            if command.blocks() >= LARGE_BLOCKS {
                self.interrupt();
            }
            if self.registers.csts().contains(Csts::FATAL) {
                break;
            }
            self.perform_rogue_writes();
        }
        Ok(true)
    }

    /// Executes a command, unless a fault applies; returns `None` for one that completes later or
    /// never.
    fn start(&mut self, id: u16, command: &Command) -> Option<CommandResult> {
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
            Fault::Fail(status) => Some(status.into()),
            Fault::NeverComplete => {
                self.execute(id, command);
                None
            }
            Fault::Hold => {
                self.held.push(HeldCommand { queue: id, command: *command, due: Due::Release });
                None
            }
            Fault::Reorder(after) => {
                let due = Due::Index(self.index.saturating_add(after.into()));
                self.held.push(HeldCommand { queue: id, command: *command, due });
                None
            }
            Fault::Delay(time) => {
                let due = Due::At(Instant::now() + time);
                self.held.push(HeldCommand { queue: id, command: *command, due });
                None
            }
            Fault::Burst(time) => {
                let begun = self.held.iter().find_map(|held| match held.due {
                    Due::Burst(at) => Some(at),
                    _ => None,
                });
                let due = Due::Burst(begun.unwrap_or_else(|| Instant::now() + time));
                self.held.push(HeldCommand { queue: id, command: *command, due });
                None
            }
            Fault::Event(dword) => {
                let [.., page, _] = dword.to_le_bytes();
                // Otherwise they would pile up where the host takes no events.
                if !self.event_requests.is_empty() && !self.masked.contains(&page) {
                    self.faults.raise_event(dword);
                }
                self.execute(id, command)
            }
            Fault::SpuriousInterrupts => {
                self.queues.signal_all();
                self.interrupt();
                self.execute(id, command)
            }
            Fault::Remove => {
                self.registers.remove();
                self.observe(&ModelEvent::Removed);
                None
            }
            Fault::Fatal => {
                self.fail();
                None
            }
            Fault::Remember => {
                let result = self.execute(id, command);
                if let Some((iova, len)) = self.first_run() {
                    self.faults.remember(iova, len);
                }
                result
            }
            Fault::RogueWrite(after) => {
                let result = self.execute(id, command);
                if let Some((iova, len)) = self.first_run() {
                    let index = self.index.saturating_add(after.into());
                    self.rogue_writes.push(RogueWrite { index, iova, len });
                }
                result
            }
        }
    }

    fn execute(&mut self, id: u16, command: &Command) -> Option<CommandResult> {
        self.observe(&ModelEvent::Executing { queue: id, command });
        let result = self.execute_unobserved(id, command);
        let status = result.as_ref().map(|result| result.status);
        self.observe(&ModelEvent::Executed { queue: id, command, status });
        result
    }

    fn execute_unobserved(&mut self, id: u16, command: &Command) -> Option<CommandResult> {
        match id {
            0 => self.execute_admin(command),
            _ if self.is_not_ready() => {
                let crd =
                    u8::from(self.config.retry_delays.first().is_some_and(|delay| *delay > 0));
                Some(Status::NAMESPACE_NOT_READY.with_retry_delay(crd).into())
            }
            _ => Some(self.execute_io(command).into()),
        }
    }

    /// Returns whether the namespaces are not ready yet
    /// ([`ModelConfig::not_ready`](crate::ModelConfig::not_ready)).
    fn is_not_ready(&mut self) -> bool {
        self.not_ready_until = self.not_ready_until.filter(|until| Instant::now() < *until);
        self.not_ready_until.is_some()
    }

    fn perform_rogue_writes(&mut self) {
        let (index, faults) = (self.index, &self.faults);
        for write in self.rogue_writes.extract_if(.., |write| write.index <= index) {
            faults.rogue_write(write.iova, write.len);
        }
    }

    /// Executes held commands that are due; `idle`: the controller has nothing else to do.
    fn resume(&mut self, idle: bool, released: bool) -> Result<bool, BusFault> {
        if self.held.is_empty() {
            return Ok(false);
        }
        let (index, now) = (self.index, Instant::now());
        let is_due = |held: &mut HeldCommand| match held.due {
            Due::Release => released,
            Due::Index(at) => idle || at <= index,
            Due::At(at) | Due::Burst(at) => at <= now,
        };
        let due: Vec<_> = self.held.extract_if(.., is_due).collect();
        for HeldCommand { queue, command, .. } in &due {
            if let Some(result) = self.execute(*queue, command) {
                self.complete(CommandId { queue: *queue, cid: command.cid.get() }, result)?;
            }
        }
        Ok(!due.is_empty())
    }

    fn enable(&mut self, cc: Cc) {
        let AdminQueues { sq_size, cq_size, asq, acq } = self.registers.admin_queues();
        let page_bytes = self.config.page_size() as u64;
        let valid = 1u64.checked_shl(cc.page_shift()) == Some(page_bytes)
            && cc.command_set() == 0
            && sq_size >= 2
            && cq_size >= 2
            && asq.is_multiple_of(page_bytes)
            && acq.is_multiple_of(page_bytes);
        self.enabled = true;
        let entries = [sq_size, cq_size];
        let (asq_at, acq_at) = (Iova::new(asq), Iova::new(acq));
        self.observe(&ModelEvent::Enabled { asq: asq_at, acq: acq_at, entries, valid });
        if !valid {
            self.registers.set_csts(Csts::FATAL);
            return;
        }
        if let Some(slot) = self.queues.submission.first_mut() {
            *slot = Some(SubmissionQueue { base: Iova::new(asq), size: sq_size, head: 0, cq: 0 });
        }
        if let Some(slot) = self.queues.completion.first_mut() {
            *slot = Some(CompletionQueue::new(0, Iova::new(acq), cq_size, Some(0)));
        }
        self.registers.set_queue_size(0, Doorbell::SubmissionTail, sq_size);
        self.registers.set_queue_size(0, Doorbell::CompletionHead, cq_size);
        let not_ready = self.config.not_ready;
        self.not_ready_until = (!not_ready.is_zero()).then(|| Instant::now() + not_ready);
        self.registers.set_csts(Csts::READY);
    }

    /// Resets all state; once RDY reads 0 the controller makes no more accesses.
    fn disable(&mut self) {
        let unfetched = self.queues.unfetched(&self.registers);
        self.queues.clear(&self.registers);
        self.registers.clear_doorbells();
        self.observe(&ModelEvent::Disabled { unfetched });
        self.held.clear();
        self.event_requests.clear();
        self.doorbell_error = None;
        self.masked.clear();
        self.enabled = false;
        self.ready_at = None;
        self.advanced_retry = false;
        self.registers.set_csts(Csts::empty());
    }

    /// Reports an injected event or a doorbell error, if the host requested events (Base 5.2).
    fn report_events(&mut self) -> Result<bool, BusFault> {
        if let Some(error) = self.registers.take_event() {
            debug_assert!(matches!(error, EVENT_NO_SUCH_DOORBELL | EVENT_BAD_DOORBELL_VALUE));
            self.doorbell_error = Some(error);
        }
        if self.event_requests.is_empty() {
            return Ok(false);
        }
        let value = if let Some(event) = self.faults.take_event(&self.masked) {
            let [.., page, _] = event.to_le_bytes();
            self.masked.push(page);
            event
        } else if let Some(error) = self.doorbell_error.take() {
            // Type 0 (error status) in bits 2:0, information in bits 15:8, log page 1 in bits
            // 23:16.
            error << 8 | 1 << 16
        } else {
            return Ok(false);
        };
        let Some(cid) = self.event_requests.pop() else { return Ok(false) };
        let result = CommandResult { status: Status::SUCCESS, value };
        self.complete_uncounted(CommandId { queue: 0, cid }, result)?;
        Ok(true)
    }
}

// The state of the executing thread.

/// When a held command continues.
#[derive(Clone, Copy, Debug)]
pub(super) enum Due {
    /// On [`Faults::release`].
    Release,
    /// After this many I/O commands, or when the controller is idle.
    Index(u64),
    /// At this time.
    At(Instant),
    /// At this time, with all others of the burst.
    Burst(Instant),
}

#[derive(Debug)]
pub(super) struct HeldCommand {
    pub(super) queue: u16,
    pub(super) command: Command,
    pub(super) due: Due,
}

/// A write that [`Fault::RogueWrite`] has scheduled.
#[derive(Debug)]
pub(super) struct RogueWrite {
    pub(super) index: u64,
    pub(super) iova: Iova,
    pub(super) len: usize,
}

/// The state that an engine shares with its controller.
pub(crate) struct EngineParts<B> {
    pub(crate) registers: Arc<RegisterFile>,
    pub(crate) bus: B,
    pub(crate) faults: Faults,
    pub(crate) interrupts: Arc<dyn InterruptSink>,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) counters: Arc<Counters>,
}

pub(crate) struct Engine<B> {
    pub(super) registers: Arc<RegisterFile>,
    pub(super) bus: B,
    pub(super) faults: Faults,
    pub(super) interrupts: Arc<dyn InterruptSink>,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) counters: Arc<Counters>,
    pub(super) config: ModelConfig,
    pub(super) queues: Queues,
    pub(super) enabled: bool,
    /// When CSTS.RDY follows CC.EN, if that takes a time.
    pub(super) ready_at: Option<Instant>,
    /// Scans of the shared registers so far.
    pub(super) scans: u32,
    /// ACRE: the host waits as CRD says.
    pub(super) advanced_retry: bool,
    /// The volatile write cache is enabled (WCE). It has no effect on a model.
    pub(super) cache_enabled: bool,
    /// The time until which I/O commands fail, if they do.
    pub(super) not_ready_until: Option<Instant>,
    /// I/O commands fetched since the start.
    pub(super) index: u64,
    pub(super) held: Vec<HeldCommand>,
    pub(super) rogue_writes: Vec<RogueWrite>,
    /// Command identifiers of outstanding event requests.
    pub(super) event_requests: Vec<u16>,
    /// A doorbell error that has not been reported.
    pub(super) doorbell_error: Option<u32>,
    /// Log pages whose events are masked: one was reported, and the page has not been read since.
    pub(super) masked: Vec<u8>,
    pub(super) resolver: Resolver,
}

impl<B: Bus> Engine<B> {
    pub(crate) fn new(parts: EngineParts<B>, config: ModelConfig) -> Self {
        let EngineParts { registers, bus, faults, interrupts, observer, counters } = parts;
        Self {
            registers,
            bus,
            faults,
            interrupts,
            observer,
            counters,
            queues: Queues::new(config.queues),
            resolver: Resolver::new(config.sgls, config.page_size()),
            config,
            enabled: false,
            ready_at: None,
            scans: 0,
            advanced_retry: false,
            cache_enabled: true,
            not_ready_until: None,
            index: 0,
            held: Vec::new(),
            rogue_writes: Vec::new(),
            event_requests: Vec::new(),
            doorbell_error: None,
            masked: Vec::new(),
        }
    }

    pub(super) fn namespaces(&self) -> &[Namespace] {
        &self.config.namespaces
    }

    /// Completes a command and counts it.
    pub(super) fn complete(
        &mut self,
        command: CommandId,
        mut result: CommandResult,
    ) -> Result<(), BusFault> {
        if !self.advanced_retry {
            result.status = result.status.with_retry_delay(0);
        }
        Counters::add(&self.counters.commands, 1);
        Counters::add(&self.counters.errors, u64::from(!result.status.is_success()));
        self.complete_uncounted(command, result)
    }

    fn complete_uncounted(
        &mut self,
        command: CommandId,
        result: CommandResult,
    ) -> Result<(), BusFault> {
        let CommandId { queue, cid } = command;
        let observer = self.observer.as_deref();
        let observe = |cqe: &Cqe| completing(observer, cqe);
        let full = self.queues.complete(&self.registers, &self.bus, command, result, observe)?;
        if let Some(head) = full {
            self.observe(&ModelEvent::CompletionQueueFull { queue, cid, head });
        }
        Ok(())
    }

    /// Returns where the last command had its data, at most one page of it.
    pub(super) fn first_run(&self) -> Option<(Iova, usize)> {
        self.resolver.first().map(|run| (run.iova, run.len.min(PAGE_BYTES)))
    }

    /// Sets CSTS.CFS.
    pub(super) fn fail(&mut self) {
        self.observe(&ModelEvent::Failed);
        self.registers.set_csts(self.registers.csts() | Csts::FATAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_become_rare_where_nothing_happens() {
        let micros = |idle_ms| scan_sleep(Duration::from_millis(idle_ms)).as_micros();
        let idle = [0, 999, 1000, 3000, 5000, 3_600_000];
        assert_eq!(idle.map(micros), [50, 50, 1000, 3000, 5000, 5000]);
    }
}
