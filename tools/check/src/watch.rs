//! Watches one device: which requests are in flight, which memory they and the queues use, and what of
//! it is wrong. What a request is, its model knows.

use crate::findings::{self, Findings, Kind, Likely, counted};
use crate::process::Site;
use crate::space::{Entry, Fault, Past, Space, Span, Target};
use crate::sys::window::SharedMemory;
use pinfold_core::addr::Iova;
use pinfold_nvme_model::{Bus, BusAccess, BusFault};
use pinfold_soft::Random;
use pinfold_virtio::model::queue::{self, Unreachable};
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

/// A request of the driver, as reports describe it.
pub(crate) trait Request: fmt::Display + fmt::Debug + Send + Sync {}
impl<T: fmt::Display + fmt::Debug + Send + Sync> Request for T {}

/// A request in flight.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub(crate) request: Arc<dyn Request>,
    /// Where its entries of the queue are and what they were, until a completion has released them.
    pub(crate) entries: Vec<(u64, Vec<u8>)>,
    /// Its data, and whether the device writes it.
    pub(crate) memory: Vec<(Span, bool)>,
    /// The lists that say where its data is.
    pub(crate) lists: Vec<Span>,
    /// What is wrong with its addresses, where the device comes upon them.
    pub(crate) wrong: Option<Wrong>,
    /// The last of the blocks of its data, where their number is 0-based.
    pub(crate) last_block: Option<LastBlock>,
    /// The mistake that would explain that it exists at all.
    pub(crate) likely: Option<Likely>,
    /// Whether the driver should wait for it.
    pub(crate) is_awaited: bool,
    /// The number of the last change of the space when it was fetched.
    serial: u64,
    /// The memory that the device writes, as it was mapped then.
    written: Vec<Target>,
    /// Of one that waits: the hash of the data that the device reads, and that of the lists.
    hash: Option<u64>,
    list_hash: Option<u64>,
}

impl InFlight {
    /// Creates a request with `memory`, for which the driver should wait.
    pub(crate) fn new(request: Arc<dyn Request>, memory: Vec<(Span, bool)>) -> Self {
        Self {
            request,
            entries: Vec::new(),
            memory,
            lists: Vec::new(),
            wrong: None,
            last_block: None,
            likely: None,
            is_awaited: true,
            serial: 0,
            written: Vec::new(),
            hash: None,
            list_hash: None,
        }
    }

    /// Returns all memory that the device accesses for it.
    fn used(&self) -> impl Iterator<Item = &Span> {
        self.memory.iter().map(|(span, _)| span).chain(&self.lists)
    }

    /// Returns the memory that the device writes, or that it reads.
    fn spans(&self, written: bool) -> impl Iterator<Item = &Span> {
        self.memory.iter().filter(move |(_, is)| *is == written).map(|(span, _)| span)
    }

    /// Describes the bytes that the device writes for both, which may be mapped at two addresses, and
    /// a mistake that would explain it.
    fn writes_with(&self, other: &Self) -> Option<(String, Option<Likely>)> {
        let both = |span: &&Span| self.spans(true).any(|own| own.overlaps(span));
        if let Some(span) = other.spans(true).find(both) {
            let likely = self.is_block_over(other).then_some(findings::NLB);
            return Some((format!("two commands in flight write the bytes in {span}"), likely));
        }
        let mut pairs = other.written.iter().flat_map(|a| self.written.iter().map(move |b| (a, b)));
        let [a, b] = pairs.find_map(|(a, b)| a.shared(b))?;
        let text =
            format!("two commands in flight write the same bytes: {a} and {b} are the same memory");
        Some((text, None))
    }

    /// Whether all bytes that the device writes for both are in the last block of one of them.
    fn is_block_over(&self, other: &Self) -> bool {
        let blocks = [self.last_block, other.last_block];
        let mut pairs =
            self.spans(true).flat_map(|own| other.spans(true).map(move |span| (own, span)));
        pairs.all(|(own, span)| {
            let both = Span { first: own.first.max(span.first), last: own.last.min(span.last) };
            !own.overlaps(span) || blocks.iter().flatten().any(|block| block.span.holds(&both))
        })
    }
}

/// An address in a request that cannot be meant.
#[derive(Clone, Debug)]
pub(crate) struct Wrong {
    pub(crate) text: String,
    /// The addresses at which an access of the device then fails.
    pub(crate) at: Vec<Span>,
    /// The mistake that would explain it.
    pub(crate) likely: Option<Likely>,
}

/// The last of several blocks of data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastBlock {
    pub(crate) span: Span,
    /// The byte of the data before it.
    pub(crate) before: u64,
}

/// Memory of a queue.
#[derive(Clone, Copy, Debug)]
struct QueueMemory {
    span: Span,
    /// The size of an entry, where their number is 0-based.
    entry_bytes: Option<u64>,
}

/// A request's queue, and its identifier there.
pub(crate) type Id = (u16, u16);

#[derive(Debug, Default)]
struct State {
    in_flight: BTreeMap<Id, InFlight>,
    /// The memory of the queues, by what it is and the queue's number.
    queues: BTreeMap<(&'static str, u16), QueueMemory>,
    current: Option<(Id, u64)>,
    enabled: bool,
    /// The device was enabled, and should be shut down.
    dirty: bool,
    /// The device has failed: the host can only reset it, with what is in flight.
    failed: bool,
    /// The device has stopped at a queue whose process has ended: nobody can wait for what is in
    /// flight, and the last close follows, unless another process goes on.
    orphaned: bool,
    /// It has failed at some time of the run.
    has_ever_failed: bool,
    /// The last request whose completion was about to be written.
    completed: Option<(Id, InFlight)>,
    /// How the program ends what is in flight, where it is not by disabling the device.
    ending: Option<&'static str>,
}

impl State {
    /// Returns the number of requests in flight that the host should wait for: 0 where the device
    /// has failed.
    fn awaited(&self) -> usize {
        if self.failed {
            return 0;
        }
        self.in_flight.values().filter(|known| known.is_awaited).count()
    }

    /// Notes an access to memory of a process that has ended. Of a queue it is the device's last
    /// one; a write is that of a completion, which then nobody receives.
    fn orphaned(&mut self, access: BusAccess) {
        if self.current.is_some() {
            return;
        }
        self.orphaned = true;
        if access == BusAccess::Write {
            self.in_flight.extend(self.completed.take());
        }
    }
}

/// A device, from the side of its accesses to memory.
#[derive(Debug)]
pub(crate) struct Watch {
    name: String,
    space: RwLock<Option<Arc<Space>>>,
    bus_master: AtomicBool,
    state: Mutex<State>,
    findings: Arc<Findings>,
    /// Writes in pieces, in an order that follows from a seed.
    scatter: Option<Mutex<Random>>,
    /// The memory whose descriptors are the program's of the device.
    device: OnceLock<Arc<SharedMemory>>,
}

/// Whether memory has another hash now. What can no longer be read, as it was unmapped or its process
/// has ended, has not changed: that is found when the device accesses it.
fn is_change(before: Option<u64>, now: Option<u64>) -> bool {
    before.zip(now).is_some_and(|(before, now)| before != now)
}

impl Watch {
    pub(crate) fn new(name: String, findings: Arc<Findings>, scatter: Option<Random>) -> Self {
        Self {
            name,
            space: RwLock::new(None),
            bus_master: AtomicBool::new(false),
            state: Mutex::default(),
            findings,
            scatter: scatter.map(Mutex::new),
            device: OnceLock::new(),
        }
    }

    /// Sets the memory whose descriptors are the program's of the device, once.
    pub(crate) fn set_device(&self, memory: Arc<SharedMemory>) {
        self.device.get_or_init(|| memory);
    }

    // Each change leaves the state consistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn space(&self) -> Option<Arc<Space>> {
        self.space.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Attaches the device to an address space, or detaches it.
    pub(crate) fn attach(&self, space: Option<Arc<Space>>) {
        *self.space.write().unwrap_or_else(PoisonError::into_inner) = space;
    }

    /// Returns whether the device is attached to `space`.
    pub(crate) fn is_attached(&self, space: &Arc<Space>) -> bool {
        self.space().is_some_and(|own| Arc::ptr_eq(&own, space))
    }

    pub(crate) fn set_bus_master(&self, on: bool) {
        self.bus_master.store(on, Ordering::SeqCst);
        let in_flight = self.state().awaited();
        if !on && in_flight > 0 {
            let text = format!(
                "{}: bus mastering was switched off with {} in flight",
                self.name,
                counted(in_flight, "command")
            );
            self.findings.add(&findings::BUS_MASTER, text, Vec::new);
        }
    }

    pub(crate) fn add(&self, kind: &Kind, text: String, details: impl FnOnce() -> Vec<String>) {
        self.add_likely(kind, None, text, details);
    }

    /// As [`add`](Self::add), with the mistake that would explain it.
    pub(crate) fn add_likely(
        &self,
        kind: &Kind,
        likely: Option<Likely>,
        text: String,
        details: impl FnOnce() -> Vec<String>,
    ) {
        let details = || details().into_iter().chain(likely.map(str::to_owned)).collect();
        self.findings.add(kind, format!("{}: {text}", self.name), details);
    }

    // What the program does.

    /// Checks an unmap of `span` before it is carried out.
    pub(crate) fn before_unmap(&self, span: Span, site: &Site) {
        let state = self.state();
        for known in state.in_flight.values() {
            if let Some(used) = known.used().find(|used| used.overlaps(&span)) {
                let text = if *used == span {
                    format!("{span} is unmapped while a command in flight uses it")
                } else {
                    format!("{span} is unmapped while a command in flight uses {used}")
                };
                self.add(&findings::UNMAP_IN_FLIGHT, text, || {
                    vec![known.request.to_string(), format!("unmapped by {}", site.describe())]
                });
            }
        }
        for ((what, id), QueueMemory { span: memory, .. }) in &state.queues {
            if memory.overlaps(&span) {
                let text = format!("{span} is unmapped, and {what} {id} is in {memory}");
                self.add(&findings::QUEUE_UNMAPPED, text, || {
                    vec![format!("unmapped by {}", site.describe())]
                });
            }
        }
    }

    /// Notes that the device will be reset; `closed`: because its last descriptor is gone.
    pub(crate) fn before_reset(&self, closed: bool) {
        self.state().ending = Some(if closed { "closed" } else { "reset" });
    }

    /// Notes that the device was reset.
    pub(crate) fn after_reset(&self, closed: bool) {
        // It has said so itself, unless it was too busy for the time that a reset takes at most.
        self.disabled(0);
        let dirty = std::mem::take(&mut self.state().dirty);
        if closed && dirty {
            let text = "the device was closed without a shutdown".to_owned();
            self.add(&findings::NO_SHUTDOWN, text, Vec::new);
        }
    }

    /// Notes that a request will be executed later: its data and its lists may not change until then.
    pub(crate) fn expect_unchanged(&self, id: Id) {
        let Some(found) = self.state().in_flight.get(&id).cloned() else { return };
        let (hash, list_hash) = (self.hash(found.spans(false)), self.hash(found.lists.iter()));
        if let Some(known) = self.state().in_flight.get_mut(&id) {
            (known.hash, known.list_hash) = (hash, list_hash);
        }
    }

    /// Returns the hash of memory that the device reads, if there is any.
    fn hash<'a>(&self, spans: impl Iterator<Item = &'a Span>) -> Option<u64> {
        let space = self.space()?;
        let mut hasher = DefaultHasher::new();
        let mut bytes = vec![0; 4096];
        let mut any = false;
        for span in spans {
            let (mut at, mut left) = (span.first, span.len());
            while left > 0 {
                let piece = left.min(bytes.len() as u64);
                let to = bytes.get_mut(..usize::try_from(piece).ok()?)?;
                space.read(at, to).ok()?;
                hasher.write(to);
                (at, left) = (at.wrapping_add(piece), left - piece);
            }
            any = true;
        }
        any.then(|| hasher.finish())
    }

    // What the device does.

    /// Notes a request that was fetched.
    pub(crate) fn fetched(&self, id: Id, mut new: InFlight) {
        let (queue, number) = id;
        if let Some(space) = self.space() {
            new.serial = space.serial();
            new.written = new.spans(true).flat_map(|span| space.targets(*span)).collect();
        }
        let mut state = self.state();
        for other in state.in_flight.values() {
            if let Some((text, likely)) = new.writes_with(other) {
                self.add_likely(&findings::WRITTEN_TWICE, likely, text, || {
                    vec![other.request.to_string(), new.request.to_string()]
                });
                break;
            }
        }
        let (request, likely) = (new.request.clone(), new.likely);
        if let Some(old) = state.in_flight.insert(id, new) {
            let likely = likely.or(old.likely);
            let text = format!("command identifier {number} of queue {queue} is in flight twice");
            self.add_likely(&findings::CID_TWICE, likely, text, || {
                vec![old.request.to_string(), request.to_string()]
            });
        }
    }

    /// Notes that a request is about to be executed: all accesses until [`executed`](Self::executed)
    /// are its own.
    pub(crate) fn executing(&self, id: Id) {
        let known = self.state().in_flight.get(&id).cloned();
        self.state().current = known.as_ref().map(|known| (id, known.serial));
        let Some(known) = known else { return };
        let details = || vec![known.request.to_string()];
        if is_change(known.hash, self.hash(known.spans(false))) {
            let text = "the data of a write changed between its submission and its completion";
            self.add(&findings::DATA_CHANGED, text.to_owned(), details);
        }
        if is_change(known.list_hash, self.hash(known.lists.iter())) {
            let text = "the list that says where the data of a command is changed between its submission \
                        and its completion";
            self.add(&findings::DATA_CHANGED, text.to_owned(), || {
                let mut details = details();
                details.extend(known.lists.iter().map(|list| format!("the list at {list}")));
                details
            });
        }
        let Some(space) = self.space() else { return };
        for (at, entry) in &known.entries {
            let mut now = vec![0; entry.len()];
            if space.read(*at, &mut now).is_ok() && now != *entry {
                let text = "an entry of a submission queue changed after its submission".to_owned();
                self.add(&findings::ENTRY_CHANGED, text, || {
                    let last = at.saturating_add(entry.len() as u64).saturating_sub(1);
                    let mut details = details();
                    details.push(format!("the entry at {}", Span { first: *at, last }));
                    details
                });
                return;
            }
        }
    }

    pub(crate) fn executed(&self) {
        self.state().current = None;
    }

    /// Notes that a request is about to be completed.
    pub(crate) fn completing(&self, id: Id) {
        let mut state = self.state();
        state.completed = state.in_flight.remove(&id).map(|known| (id, known));
    }

    /// Notes that the entries of a queue that were fetched are the driver's again.
    pub(crate) fn entries_released(&self, queue: u16) {
        let mut state = self.state();
        for (_, known) in state.in_flight.iter_mut().filter(|((own, _), _)| *own == queue) {
            known.entries.clear();
        }
    }

    /// Notes memory of a queue that exists from now on: `what` and the queue's number name it.
    /// `entry_bytes` is the size of its entries, where their number is 0-based.
    pub(crate) fn queue_added(
        &self,
        (what, id): (&'static str, u16),
        memory: Option<Span>,
        entry_bytes: Option<u64>,
    ) {
        let memory = memory.map(|span| QueueMemory { span, entry_bytes });
        self.state().queues.extend(memory.map(|memory| ((what, id), memory)));
    }

    pub(crate) fn queue_removed(&self, what: &'static str, id: u16) {
        self.state().queues.remove(&(what, id));
    }

    /// Notes that the requests of a queue are over.
    pub(crate) fn requests_ended(&self, queue: u16) {
        self.state().in_flight.retain(|(own, _), _| *own != queue);
    }

    /// Notes that the device is enabled; `dirty`: it should be shut down.
    pub(crate) fn enabled(&self, dirty: bool) {
        let mut state = self.state();
        (state.enabled, state.dirty) = (true, dirty);
    }

    /// Notes that the device is disabled: its queues are gone, with so many requests that were
    /// submitted, and not fetched.
    pub(crate) fn disabled(&self, unfetched: u32) {
        let mut state = self.state();
        let unfetched = if state.failed { 0 } else { usize::try_from(unfetched).unwrap_or(0) };
        let (in_flight, enabled) = (state.awaited() + unfetched, state.enabled);
        let how = state.ending.unwrap_or("disabled");
        let (dirty, has_ever_failed) = (state.dirty, state.has_ever_failed);
        *state = State { dirty, has_ever_failed, ..State::default() };
        drop(state);
        if in_flight > 0 && enabled {
            let commands = counted(in_flight, "command");
            let text = format!("the device was {how} with {commands} in flight");
            self.add(&findings::RESET_IN_FLIGHT, text, Vec::new);
        }
    }

    pub(crate) fn shut_down(&self) {
        self.state().dirty = false;
    }

    /// Notes that the device has failed: it waits for a reset.
    pub(crate) fn failed(&self) {
        let mut state = self.state();
        // Not the device has failed, but the program has ended.
        if !state.orphaned {
            (state.failed, state.has_ever_failed, state.dirty) = (true, true, false);
        }
    }

    /// Notes that the device is gone: it makes no more accesses, and can neither be reset nor shut
    /// down.
    pub(crate) fn removed(&self) {
        *self.state() = State { failed: true, ..State::default() };
    }

    /// Returns whether the device has failed or is gone, and was not reset since.
    pub(crate) fn has_failed(&self) -> bool {
        let state = self.state();
        state.failed || state.orphaned
    }

    /// Returns whether the device has failed at some time, be it that it was reset since.
    pub(crate) fn has_ever_failed(&self) -> bool {
        self.state().has_ever_failed
    }

    /// Returns what is wrong with the addresses of a request, if that is known.
    pub(crate) fn wrong(&self, id: Id) -> Option<Wrong> {
        self.state().in_flight.get(&id)?.wrong.clone()
    }

    /// Returns what is wrong with the request that the device executes, if that explains an access
    /// to an address.
    fn explanation(&self, at: u64) -> Option<Wrong> {
        let (id, _) = self.state().current?;
        self.wrong(id).filter(|wrong| wrong.at.iter().any(|span| span.contains(at)))
    }

    /// Returns the mistake that would explain that nothing is mapped at an address: it is in the last
    /// block of a request's data, or in the last entry of a queue, and what is before that is mapped.
    fn likely(&self, at: u64) -> Option<Likely> {
        let space = self.space()?;
        let state = self.state();
        if let Some((id, _)) = state.current {
            let block = state.in_flight.get(&id)?.last_block?;
            let is_it = block.span.contains(at) && space.at(block.before).is_some();
            return is_it.then_some(findings::NLB);
        }
        let memory = state.queues.values().find(|memory| memory.span.contains(at))?;
        let last = memory.span.last.checked_sub(memory.entry_bytes? - 1)?;
        let before = last.checked_sub(1).filter(|before| memory.span.contains(*before))?;
        (at >= last && space.at(before).is_some()).then_some(findings::QUEUE_SIZE)
    }

    /// Describes the request that the device executes, or the queue of which it accesses an entry.
    fn current(&self, at: u64) -> Vec<String> {
        let state = self.state();
        if let Some(known) = state.current.and_then(|(id, _)| state.in_flight.get(&id)) {
            return vec![known.request.to_string()];
        }
        let queue = state.queues.iter().find(|(_, memory)| memory.span.contains(at));
        vec![queue.map_or("an entry of a queue".to_owned(), |((what, id), memory)| {
            format!("an entry of {what} {id}, which is in {}", memory.span)
        })]
    }

    /// Adds the way out where a device is given the address that the program has itself.
    fn with_own_address(&self, at: u64, mut details: Vec<String>) -> Vec<String> {
        let mapped = self.space().and_then(|space| space.mapped_to(at));
        details.extend(mapped.map(|iova| {
            format!(
                "{at:#x} is the program's own address of what is mapped at {iova:#x}: a device takes \
                 that of the map (iova)"
            )
        }));
        details
    }

    fn faulted(&self, fault: &Fault, len: usize, access: BusAccess) {
        let verb = match access {
            BusAccess::Read => "reads",
            BusAccess::Write => "writes",
        };
        if let Fault::Unmapped(at, None) | Fault::Direction(at, _) = fault
            && let Some(Wrong { text, likely, .. }) = self.explanation(*at)
        {
            self.add_likely(&findings::PRP, likely, text, || {
                self.with_own_address(*at, self.current(*at))
            });
            return;
        }
        match fault {
            Fault::Unmapped(at, Some(Past { span, site, refused: Some(errno) })) => {
                let text = format!("the device {verb} {at:#x}, whose map was refused");
                let error = std::io::Error::from_raw_os_error(*errno);
                self.add(&findings::MAP_REFUSED, text, || {
                    let mut details = self.current(*at);
                    details.push(format!("the map of {span} by {}: {error}", site.describe()));
                    details
                });
            }
            Fault::Unmapped(at, past) => {
                let bytes = counted(len, "byte");
                let text = format!("the device {verb} {bytes} at {at:#x}, which is not mapped");
                let likely = self.likely(*at);
                self.add_likely(&findings::UNMAPPED, likely, text, || {
                    let mut details = self.current(*at);
                    match past {
                        None => details = self.with_own_address(*at, details),
                        Some(Past { span, site, .. }) => {
                            details.push(format!("{span} was unmapped by {}", site.describe()));
                        }
                    }
                    details
                });
            }
            Fault::Direction(at, entry) => {
                let text = format!("the device {verb} {at:#x}, which is not mapped for that");
                self.add(&findings::DIRECTION, text, || self.with_map(*at, entry));
            }
            Fault::Gone(at, entry) => {
                let text = format!(
                    "the device {verb} {at:#x}, mapped to memory that process {} has unmapped",
                    entry.memory.pid
                );
                // A process that has ended uses no memory, and its device is being closed; so is one
                // of which the program has closed the last descriptor, and may free what it used.
                if entry.memory.is_alive() && self.device.get().is_none_or(|it| it.is_open()) {
                    self.add(&findings::MEMORY_GONE, text, || self.with_map(*at, entry));
                } else {
                    self.state().orphaned(access);
                }
            }
        }
    }

    fn with_map(&self, at: u64, entry: &Entry) -> Vec<String> {
        let mut details = self.current(at);
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
                Some(entry) => self.with_map(at.raw(), &entry),
                None => self.current(at.raw()),
            });
        }
        Ok(())
    }
}

/// The bus of a watched device.
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

impl queue::Bus for WatchedBus {
    fn read(&self, at: Iova, to: &mut [u8]) -> Result<(), Unreachable> {
        Bus::read(self, at, to).map_err(|_| Unreachable)
    }

    fn read_u32_acquire(&self, at: Iova) -> Result<u32, Unreachable> {
        let mut bytes = [0; 4];
        Bus::read(self, at, &mut bytes).map_err(|_| Unreachable)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write(&self, at: Iova, from: &[u8]) -> Result<(), Unreachable> {
        Bus::write(self, at, from).map_err(|_| Unreachable)
    }

    /// Writes the flags and the index of a used ring at once: of two bytes the kernel copies one
    /// after the other, and a driver would see an index of which one byte is new.
    fn write_u32_release(&self, at: Iova, value: u32) -> Result<(), Unreachable> {
        fence(Ordering::SeqCst);
        self.write_at(at, &value.to_le_bytes()).map_err(|_| Unreachable)
    }
}

#[cfg(test)]
mod tests;
