//! Faults that can be injected into the model controller.

use crate::bus::{Bus, BusAccess, BusFault};
use pinfold_core::addr::Iova;
use pinfold_nvme::spec::{Command, Status};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A command as the model sees it before it executes it.
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
    /// How many blocks, of a read or write.
    pub blocks: u32,
    /// How many I/O commands came before it since the model was spawned.
    pub index: u64,
}

/// Which commands a fault hits.
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

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The command is not executed and completes with this status.
    Fail(Status),
    /// The command is executed, but never completes.
    NeverComplete,
    /// The command is neither executed nor completed until [`Faults::release`], or for ever.
    Hold,
    /// The command is executed after this many later ones, or when nothing else is left to do.
    Reorder(u32),
    /// The controller fails: CSTS.CFS, and nothing more until it is reset.
    Fatal,
    /// The command is executed, and its first page remembered for [`Faults::access_remembered`].
    Remember,
    /// The command is executed, and after this many later ones the model writes to its first page once more.
    RogueWrite(u32),
}

/// What became of an access to an address that was remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Injection {
    /// Where.
    pub iova: Iova,
    /// How many bytes.
    pub len: usize,
    /// Which access.
    pub access: BusAccess,
    /// Whether it landed.
    pub outcome: InjectionOutcome,
}

/// Whether an access landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectionOutcome {
    /// The bus took it: the device still reaches the memory.
    Succeeded,
    /// The bus refused it.
    Fault(BusFault),
}

/// What a rogue write leaves where it lands.
pub const ROGUE_BYTE: u8 = 0xbd;

#[derive(Debug)]
struct Rule {
    when: Trigger,
    fault: Fault,
    counted: u64,
}

/// Changes what an admin command is about to write to the host.
type Forger = Box<dyn FnMut(&Command, &mut [u8]) + Send>;

struct State {
    rules: Vec<Rule>,
    forger: Option<Forger>,
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

/// The handle by which faults are injected; clones work on the same controller. Without rules it costs the
/// controller one load a command.
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
                forger: None,
                events: VecDeque::new(),
                remembered: Vec::new(),
                strikes: Vec::new(),
            }),
            bus,
            wake,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change under the lock is one push, clear or add: a panic leaves it whole.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on `fault` hits the commands that `when` names. The first rule that fits wins.
    pub fn inject(&self, when: Trigger, fault: Fault) {
        self.state().rules.push(Rule { when, fault, counted: 0 });
        self.0.armed.store(true, Ordering::Release);
    }

    /// From now on `forger` changes the data of identify and log page commands before it is written to the host.
    pub fn tamper(&self, forger: impl FnMut(&Command, &mut [u8]) + Send + 'static) {
        self.state().forger = Some(Box::new(forger));
    }

    /// Has the controller report an asynchronous event, by DW0 of its completion, when a request for one is outstanding
    /// and the log page that it names has been read since the last event that named it.
    pub fn raise_event(&self, dword: u32) {
        self.state().events.push_back(dword);
        self.0.eventful.store(true, Ordering::Release);
        (self.0.wake)();
    }

    /// The next event that is not masked.
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

    /// The data of an admin command, as it is to be written.
    pub(crate) fn forged(&self, command: &Command, data: &[u8]) -> Vec<u8> {
        let mut data = data.to_vec();
        if let Some(forger) = &mut self.state().forger {
            forger(command, &mut data);
        }
        data
    }

    /// Takes all rules back. What is held stays held; what is remembered stays remembered.
    pub fn clear(&self) {
        self.state().rules.clear();
        self.0.armed.store(false, Ordering::Release);
    }

    /// Has the controller execute and complete now what [`Fault::Hold`] holds.
    pub fn release(&self) {
        self.0.release.store(true, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// While `stuck`, a change of CC.EN has no effect: CSTS.RDY stays what it is.
    pub fn set_stuck(&self, stuck: bool) {
        self.0.stuck.store(stuck, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// While `stuck`, a shutdown does not complete: CSTS.SHST stays what it is.
    pub fn set_shutdown_stuck(&self, stuck: bool) {
        self.0.shutdown_stuck.store(stuck, Ordering::SeqCst);
        (self.0.wake)();
    }

    /// Accesses every remembered page now, as a device gone astray would, and says what became of it. A write
    /// leaves [`ROGUE_BYTE`]s. The pages stay remembered.
    pub fn access_remembered(&self, access: BusAccess) -> Vec<Injection> {
        let remembered = self.state().remembered.clone();
        let strikes: Vec<_> = remembered.into_iter().map(|(at, len)| self.access(at, len, access)).collect();
        self.state().strikes.extend_from_slice(&strikes);
        strikes
    }

    /// Every strike so far, of [`Fault::RogueWrite`] too.
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

    /// Whether a release was asked for since the last call.
    pub(crate) fn take_release(&self) -> bool {
        self.0.release.load(Ordering::SeqCst) && self.0.release.swap(false, Ordering::AcqRel)
    }

    /// The fault that hits this command, if one does.
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
