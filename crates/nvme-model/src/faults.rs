//! Faults that can be injected into the model controller.

use crate::bus::{Bus, BusAccess, BusFault};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Status};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A command before it is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandInfo {
    /// The submission queue; 0 is the admin queue.
    pub queue: u16,
    /// The command identifier.
    pub cid: u16,
    /// The opcode.
    pub opcode: u8,
    /// The namespace.
    pub nsid: u32,
    /// The first block, of a read or write.
    pub slba: u64,
    /// The number of blocks, of a read or write.
    pub blocks: u32,
    /// The number of I/O commands before it.
    pub index: u64,
}

/// Selects the commands that a fault applies to.
pub enum Trigger {
    /// The nth I/O command from now, once; 1 is the next.
    Nth(u64),
    /// Every nth I/O command from now.
    Every(u64),
    /// Every command, of the admin queue too, for which the predicate holds.
    Matches(Box<dyn FnMut(&CommandInfo) -> bool + Send>),
}

impl fmt::Debug for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nth(n) => write!(f, "Nth({n})"),
            Self::Every(n) => write!(f, "Every({n})"),
            Self::Matches(_) => f.write_str("Matches(..)"),
        }
    }
}

/// A fault of the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The command is not executed and completes with this status.
    Fail(Status),
    /// The command is executed, but never completes.
    NeverComplete,
    /// The command is neither executed nor completed until [`Faults::release`].
    Hold,
    /// The command is executed after this many later ones, or when the controller is idle.
    Reorder(u32),
    /// The command is executed after this time.
    Delay(Duration),
    /// The command is executed, together with those that come meanwhile, after this time.
    Burst(Duration),
    /// The controller reports an asynchronous event, by DW0 of its completion, if a request for one
    /// is outstanding and the log page that it names is read; then the command is executed.
    Event(u32),
    /// The interrupts of all completion queues are raised, although none has a new entry; then the
    /// command is executed.
    SpuriousInterrupts,
    /// The controller is removed: from now on its registers read as ones, and it does nothing.
    Remove,
    /// The controller fails: it sets CSTS.CFS and executes nothing until it is reset.
    Fatal,
    /// The command is executed, and the address of its first page is kept for
    /// [`Faults::access_remembered`].
    Remember,
    /// The command is executed, and after this many later ones the controller writes to its first
    /// page again.
    RogueWrite(u32),
}

/// An access to a remembered address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Injection {
    /// The address.
    pub iova: Iova,
    /// The length in bytes.
    pub len: usize,
    /// The kind of access.
    pub access: BusAccess,
    /// The outcome.
    pub outcome: InjectionOutcome,
}

/// The outcome of an access to a remembered address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectionOutcome {
    /// The device can still access the memory.
    Succeeded,
    /// The access faulted.
    Fault(BusFault),
}

/// The byte that rogue writes store.
pub const ROGUE_BYTE: u8 = 0xbd;

#[derive(Debug)]
struct Rule {
    when: Trigger,
    fault: Fault,
    counted: u64,
}

/// Changes what an admin command is about to write to the host.
type Tamper = Box<dyn FnMut(&Command, &mut [u8]) + Send>;

struct State {
    rules: Vec<Rule>,
    tamper: Option<Tamper>,
    events: VecDeque<u32>,
    remembered: Vec<(Iova, usize)>,
    strikes: Vec<Injection>,
}

struct Inner {
    armed: AtomicBool,
    release: AtomicBool,
    stuck: AtomicBool,
    shutdown_stuck: AtomicBool,
    eventful: AtomicBool,
    state: Mutex<State>,
    bus: Arc<dyn Bus>,
    wake: Box<dyn Fn() + Send + Sync>,
}

/// A handle for fault injection; clones refer to the same controller. Without rules it costs the
/// controller one load per command.
#[derive(Clone)]
pub struct Faults(Arc<Inner>);

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("rules", &self.state().rules).finish_non_exhaustive()
    }
}

impl Faults {
    pub(crate) fn new(bus: Arc<dyn Bus>, wake: Box<dyn Fn() + Send + Sync>) -> Self {
        Self(Arc::new(Inner {
            armed: AtomicBool::new(false),
            release: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            shutdown_stuck: AtomicBool::new(false),
            eventful: AtomicBool::new(false),
            state: Mutex::new(State {
                rules: Vec::new(),
                tamper: None,
                events: VecDeque::new(),
                remembered: Vec::new(),
                strikes: Vec::new(),
            }),
            bus,
            wake,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change under the lock is a single push, clear or add, so a panic leaves it
        // consistent.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies `fault` to the commands that `when` selects from now on. The first matching rule
    /// applies.
    pub fn inject(&self, when: Trigger, fault: Fault) {
        self.state().rules.push(Rule { when, fault, counted: 0 });
        self.0.armed.store(true, Ordering::Release);
    }

    /// Lets `tamper` change the data of identify and log page commands from now on, before it is
    /// written to the host.
    pub fn tamper(&self, tamper: impl FnMut(&Command, &mut [u8]) + Send + 'static) {
        self.state().tamper = Some(Box::new(tamper));
    }

    /// Makes the controller report an asynchronous event, with `dword` as DW0 of its completion,
    /// when a request for one is outstanding and the log page that it names has been read since the
    /// last event that named it.
    pub fn raise_event(&self, dword: u32) {
        self.state().events.push_back(dword);
        self.0.eventful.store(true, Ordering::Release);
        (self.0.wake)();
    }

    /// Returns the next event that is not masked.
    pub(crate) fn take_event(&self, masked: &[u8]) -> Option<u32> {
        if !self.0.eventful.load(Ordering::Acquire) {
            return None;
        }
        let mut state = self.state();
        let at = state.events.iter().position(|event| {
            let [.., page, _] = event.to_le_bytes();
            !masked.contains(&page)
        });
        let event = at.and_then(|at| state.events.remove(at));
        self.0.eventful.store(!state.events.is_empty(), Ordering::Release);
        event
    }

    /// Returns the data of an admin command as it is written to the host.
    pub(crate) fn tampered(&self, command: &Command, data: &[u8]) -> Vec<u8> {
        let mut data = data.to_vec();
        if let Some(tamper) = &mut self.state().tamper {
            tamper(command, &mut data);
        }
        data
    }

    /// Removes all rules. Held commands stay held, and remembered addresses remembered.
    pub fn clear(&self) {
        self.state().rules.clear();
        self.0.armed.store(false, Ordering::Release);
    }

    /// Executes and completes the commands that [`Fault::Hold`] holds.
    pub fn release(&self) {
        self.0.release.store(true, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// While `stuck`, changes of CC.EN have no effect on CSTS.RDY.
    pub fn set_stuck(&self, stuck: bool) {
        self.0.stuck.store(stuck, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// While `stuck`, shutdowns do not complete (CSTS.SHST).
    pub fn set_shutdown_stuck(&self, stuck: bool) {
        self.0.shutdown_stuck.store(stuck, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// Accesses every remembered page now, as a faulty device would, and returns the outcomes.
    /// Writes store [`ROGUE_BYTE`]s. The pages stay remembered.
    pub fn access_remembered(&self, access: BusAccess) -> Vec<Injection> {
        let remembered = self.state().remembered.clone();
        let strikes: Vec<_> =
            remembered.into_iter().map(|(at, len)| self.access(at, len, access)).collect();
        self.state().strikes.extend_from_slice(&strikes);
        strikes
    }

    /// Returns all such accesses so far, those of [`Fault::RogueWrite`] included.
    pub fn injections(&self) -> Vec<Injection> {
        self.state().strikes.clone()
    }

    fn access(&self, iova: Iova, len: usize, access: BusAccess) -> Injection {
        let mut bytes = vec![ROGUE_BYTE; len];
        let done = match access {
            BusAccess::Read => self.0.bus.read(iova, &mut bytes),
            BusAccess::Write => self.0.bus.write(iova, &bytes),
        };
        let outcome = match done {
            Ok(()) => InjectionOutcome::Succeeded,
            Err(fault) => InjectionOutcome::Fault(fault),
        };
        Injection { iova, len, access, outcome }
    }

    pub(crate) fn rogue_write(&self, iova: Iova, len: usize) {
        let strike = self.access(iova, len, BusAccess::Write);
        self.state().strikes.push(strike);
    }

    pub(crate) fn remember(&self, iova: Iova, len: usize) {
        self.state().remembered.push((iova, len));
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.0.stuck.load(Ordering::SeqCst)
    }

    pub(crate) fn is_shutdown_stuck(&self) -> bool {
        self.0.shutdown_stuck.load(Ordering::SeqCst)
    }

    /// Returns whether [`release`](Self::release) was called since the last call.
    pub(crate) fn take_release(&self) -> bool {
        self.0.release.load(Ordering::SeqCst) && self.0.release.swap(false, Ordering::AcqRel)
    }

    /// Returns the fault that applies to this command.
    #[inline]
    pub(crate) fn pick(&self, seen: impl FnOnce() -> CommandInfo) -> Option<Fault> {
        if !self.0.armed.load(Ordering::Acquire) {
            return None;
        }
        self.pick_armed(&seen())
    }

    #[cold]
    fn pick_armed(&self, seen: &CommandInfo) -> Option<Fault> {
        let mut state = self.state();
        let mut hit = None;
        let mut spent = None;
        for (i, rule) in state.rules.iter_mut().enumerate() {
            let counts = seen.queue != 0 && !matches!(rule.when, Trigger::Matches(_));
            rule.counted += u64::from(counts);
            let fits = match &mut rule.when {
                Trigger::Nth(n) => counts && rule.counted == *n,
                Trigger::Every(n) => counts && *n != 0 && rule.counted % *n == 0,
                Trigger::Matches(predicate) => predicate(seen),
            };
            if fits && hit.is_none() {
                hit = Some(rule.fault);
                spent = matches!(rule.when, Trigger::Nth(_)).then_some(i);
            }
        }
        if let Some(i) = spent {
            state.rules.remove(i);
            self.0.armed.store(!state.rules.is_empty(), Ordering::Release);
        }
        hit
    }
}
