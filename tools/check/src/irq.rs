//! A function's interrupts: the eventfds that the program set, and what is masked.

use crate::findings::{self, Findings};
use crate::sys::signal::Signals;
use crate::sys::window::SharedMemory;
use pinfold_nvme_model::{InterruptSink, RegisterWindow};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// `VFIO_PCI_INTX_IRQ_INDEX` and the others.
pub(crate) const INTX: u32 = 0;
pub(crate) const MSI: u32 = 1;
pub(crate) const MSIX: u32 = 2;
pub(crate) const ERROR: u32 = 3;
pub(crate) const REQUEST: u32 = 4;
/// The number of kinds.
pub(crate) const KINDS: usize = 5;
/// The size of an entry of the MSI-X table, and the place of its mask bit (PCI 3.0, 6.8.2).
const TABLE_ENTRY: u32 = 16;
const TABLE_CONTROL: u32 = 12;

#[derive(Debug, Default)]
struct State {
    events: [Vec<Option<OwnedFd>>; KINDS],
    enabled: [bool; KINDS],
    /// INTx: masked by the program, or since it was delivered.
    masked: bool,
    /// INTx was raised while it was masked.
    pending: bool,
    /// MSI-X vectors that were raised while the table masked them.
    held: Vec<u16>,
}

/// The interrupts of a function.
#[derive(Debug)]
pub(crate) struct Irqs {
    state: Mutex<State>,
    memory: Arc<SharedMemory>,
    table: u32,
    findings: Arc<Findings>,
}

/// Signals an eventfd; one that is full is not waited for.
fn signal(event: &OwnedFd) {
    static SIGNALS: LazyLock<Option<Signals>> = LazyLock::new(|| Signals::new().ok());
    if let Some(signals) = &*SIGNALS
        && signals.signal(event.as_fd()).is_ok()
    {
        return;
    }
    // Without these calls of the system: the program could fill it in between.
    let mut polled = [PollFd::new(event, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1)) {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

impl Irqs {
    pub(crate) fn new(memory: Arc<SharedMemory>, table: u32, findings: Arc<Findings>) -> Self {
        Self { state: Mutex::default(), memory, table, findings }
    }

    // Each change leaves the state consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether interrupts of this kind are enabled.
    pub(crate) fn is_enabled(&self, kind: u32) -> bool {
        let state = self.state();
        usize::try_from(kind).ok().and_then(|at| state.enabled.get(at).copied()).unwrap_or(false)
    }

    /// Returns how many eventfds of a kind there may be without more vectors.
    pub(crate) fn enabled_vectors(&self, kind: u32) -> usize {
        let state = self.state();
        usize::try_from(kind).ok().and_then(|at| state.events.get(at)).map_or(0, Vec::len)
    }

    /// Sets the eventfds of a kind from `start` on, and enables it.
    pub(crate) fn set(&self, kind: u32, start: u32, events: Vec<Option<OwnedFd>>) {
        let mut state = self.state();
        let (Ok(at), Ok(start)) = (usize::try_from(kind), usize::try_from(start)) else { return };
        if let Some(list) = state.events.get_mut(at) {
            if list.len() < start + events.len() {
                list.resize_with(start + events.len(), || None);
            }
            for (to, event) in list.iter_mut().skip(start).zip(events) {
                *to = event;
            }
        }
        if let Some(enabled) = state.enabled.get_mut(at) {
            *enabled = true;
        }
    }

    /// Disables a kind.
    pub(crate) fn disable(&self, kind: u32) {
        let mut state = self.state();
        let Ok(at) = usize::try_from(kind) else { return };
        if let Some(list) = state.events.get_mut(at) {
            list.clear();
        }
        if let Some(enabled) = state.enabled.get_mut(at) {
            *enabled = false;
        }
        if kind == INTX {
            (state.masked, state.pending) = (false, false);
        }
        if kind == MSIX {
            state.held.clear();
        }
    }

    /// Disables all.
    pub(crate) fn clear(&self) {
        *self.state() = State::default();
    }

    /// Masks INTx.
    pub(crate) fn mask(&self) {
        self.state().masked = true;
    }

    /// Unmasks INTx, and delivers one that was raised meanwhile.
    pub(crate) fn unmask(&self) {
        let mut state = self.state();
        state.masked = false;
        if std::mem::take(&mut state.pending) {
            deliver_intx(&mut state);
        }
    }

    /// Signals an eventfd by itself, as `VFIO_IRQ_SET_ACTION_TRIGGER` without eventfds does.
    pub(crate) fn trigger(&self, kind: u32, vector: u32) {
        let state = self.state();
        let (Ok(at), Ok(vector)) = (usize::try_from(kind), usize::try_from(vector)) else { return };
        if let Some(Some(event)) = state.events.get(at).and_then(|list| list.get(vector)) {
            signal(event);
        }
    }

    /// Returns what is wrong where an interrupt was raised and has waited for its unmasking since.
    pub(crate) fn waiting(&self) -> Option<&'static str> {
        let state = self.state();
        if state.pending {
            Some(
                "INTx was raised while it was masked, as it is by each delivery until \
                 VFIO_IRQ_SET_ACTION_UNMASK",
            )
        } else if !state.held.is_empty() {
            Some("an interrupt was raised while the MSI-X table masked it")
        } else {
            None
        }
    }

    fn is_masked(&self, vector: u16) -> bool {
        let at = self.table + u32::from(vector) * TABLE_ENTRY + TABLE_CONTROL;
        self.memory.load(at) & 1 != 0
    }

    /// Delivers what the table no longer masks.
    pub(crate) fn deliver_held(&self) {
        let mut state = self.state();
        if state.held.is_empty() {
            return;
        }
        let held = std::mem::take(&mut state.held);
        for vector in held {
            if self.is_masked(vector) {
                state.held.push(vector);
            } else if let Some(event) = event_of(&state, MSIX, vector) {
                signal(event);
            }
        }
    }
}

fn event_of(state: &State, kind: u32, vector: u16) -> Option<&OwnedFd> {
    let list = state.events.get(usize::try_from(kind).ok()?)?;
    list.get(usize::from(vector))?.as_ref()
}

fn deliver_intx(state: &mut State) {
    if let Some(event) = event_of(state, INTX, 0) {
        signal(event);
        // The kernel masks it until the program has served it.
        state.masked = true;
    }
}

impl InterruptSink for Irqs {
    fn raise(&self, vector: u16) {
        let mut state = self.state();
        let [intx, msi, msix, ..] = state.enabled;
        if msix && self.is_masked(vector) {
            if !state.held.contains(&vector) {
                state.held.push(vector);
            }
            return;
        }
        let event = match (msix, msi) {
            (true, _) => event_of(&state, MSIX, vector),
            // With fewer messages than vectors the device uses the first.
            (false, true) => {
                let messages = state.events.get(MSI as usize).map_or(0, Vec::len);
                let is_own = usize::from(vector) < messages;
                event_of(&state, MSI, if is_own { vector } else { 0 })
            }
            (false, false) if intx && state.masked => {
                state.pending = true;
                return;
            }
            (false, false) if intx && event_of(&state, INTX, 0).is_some() => {
                return deliver_intx(&mut state);
            }
            (false, false) => None,
        };
        match event {
            Some(event) => signal(event),
            // The admin queue always raises interrupts: a driver that polls enables none.
            None if vector == 0 && !msix && !msi => {}
            None => {
                drop(state);
                let text = format!("interrupt {vector} is raised, and no eventfd is set for it");
                self.findings.add(&findings::NO_EVENTFD, text, Vec::new);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_nvme::{EventFd, Interrupt};
    use std::time::Duration;

    fn irqs() -> (Irqs, Arc<SharedMemory>) {
        let memory = Arc::new(SharedMemory::new("test", 4096, 0).unwrap());
        (Irqs::new(memory.clone(), 256, Arc::default()), memory)
    }

    fn event() -> (EventFd, Option<OwnedFd>) {
        let event = EventFd::new().unwrap();
        let copy = event.as_fd().try_clone_to_owned().unwrap();
        (event, Some(copy))
    }

    fn has(event: &EventFd) -> bool {
        event.wait(Duration::ZERO)
    }

    #[test]
    fn vectors_are_replaced_and_missing_ones_reported() {
        let (irqs, _) = irqs();
        let ((first, a), (second, b)) = (event(), event());
        irqs.set(MSIX, 0, vec![None, a]);
        irqs.raise(1);
        assert!(has(&first));
        irqs.set(MSIX, 1, vec![b]);
        irqs.raise(1);
        assert!(!has(&first) && has(&second));
        assert!(irqs.findings.take().0.is_empty());
        irqs.raise(0);
        irqs.disable(MSIX);
        irqs.raise(1);
        // The admin queue of a driver that polls.
        irqs.raise(0);
        assert_eq!(irqs.findings.take().1.get("interrupt-lost"), Some(&2));
    }

    #[test]
    fn a_masked_vector_is_delivered_later() {
        let (irqs, memory) = irqs();
        let (first, a) = event();
        irqs.set(MSIX, 0, vec![a]);
        memory.store(256 + 12, 1);
        assert_eq!(irqs.waiting(), None);
        irqs.raise(0);
        irqs.deliver_held();
        assert!(!has(&first) && irqs.waiting().is_some_and(|text| text.contains("MSI-X")));
        memory.store(256 + 12, 0);
        irqs.deliver_held();
        assert!(has(&first) && irqs.waiting().is_none());
        irqs.deliver_held();
        assert!(!has(&first));
    }

    #[test]
    fn a_pin_is_masked_until_it_is_served() {
        let (irqs, _) = irqs();
        let (first, a) = event();
        irqs.set(INTX, 0, vec![a]);
        irqs.raise(3);
        assert!(has(&first) && irqs.waiting().is_none());
        irqs.raise(3);
        assert!(!has(&first) && irqs.waiting().is_some_and(|text| text.contains("INTx")));
        irqs.unmask();
        assert!(has(&first) && irqs.waiting().is_none());
        irqs.unmask();
        assert!(!has(&first));
        irqs.mask();
        irqs.raise(0);
        assert!(!has(&first));
    }

    #[test]
    fn a_message_without_an_eventfd_is_not_another_one() {
        let (irqs, _) = irqs();
        let (first, a) = event();
        irqs.set(MSI, 0, vec![a, None]);
        assert_eq!(irqs.enabled_vectors(MSI), 2);
        irqs.raise(1);
        assert!(!has(&first));
        // Of a vector that has no message.
        irqs.raise(2);
        assert!(has(&first));
        irqs.disable(MSI);
        irqs.set(INTX, 0, vec![None]);
        irqs.raise(1);
        assert_eq!(irqs.findings.take().1.get("interrupt-lost"), Some(&2));
    }

    #[test]
    fn a_full_eventfd_does_not_block() {
        let (irqs, _) = irqs();
        let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let copy = full.try_clone().unwrap();
        irqs.set(MSI, 0, vec![Some(full)]);
        irqs.raise(5);
        if Signals::new().is_err() {
            return;
        }
        // As by the kernel's own signal, which no write can do: it would have waited.
        for _ in 0..2 * 64 {
            irqs.raise(5);
        }
        let mut count = [0; 8];
        rustix::io::read(&copy, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), u64::MAX);
        irqs.raise(5);
        rustix::io::read(&copy, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}
