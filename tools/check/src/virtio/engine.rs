//! The disk at work: a thread looks for notifications, and serves the requests of the queues.

use super::registers::{
    ACCESS_PLATFORM, BLK_SIZE, Effect, FLUSH, INDIRECT, MQ, NEEDS_RESET, NO_VECTOR, Registers,
    SEG_MAX, VERSION_1,
};
use super::{COMMON_BYTES, DEVICE_BYTES, NOTIFY_BYTES};
use crate::findings::{self, counted};
use crate::function::Port;
use crate::hostile::VirtioBehaviour;
use crate::irq;
use crate::space::{Space, Span};
use crate::watch::{InFlight, WatchedBus};
use pinfold_core::addr::Iova;
use pinfold_nvme_model::{InterruptSink, Media, RegisterWindow};
use pinfold_virtio::model::blk::{Header, Medium, Outcome, SECTOR, serve};
use pinfold_virtio::model::queue::{self, Piece, Queue, QueueError, Unreachable};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The value of a notification that was not written since it was last read. No queue has the number.
const UNWRITTEN: u32 = u32::MAX;
/// The sleep between two looks at the notifications: for a second after the last request; then a
/// thousandth of the time since.
const LOOK: Duration = Duration::from_micros(50);
const BUSY_TIME: Duration = Duration::from_secs(1);
const LONG_LOOK: Duration = Duration::from_millis(5);
/// Every nth look is at the whole page of notifications.
const WIDE_LOOKS: u32 = 64;
/// The most requests that are served before a reset is looked at.
const BATCH: usize = 16;
/// The rings of a queue, in reports, and how they are aligned (virtio 1.2 section 2.7).
const RINGS: [(&str, u64); 3] = [
    ("the descriptor table of queue", 16),
    ("the available ring of queue", 2),
    ("the used ring of queue", 4),
];

/// A medium as the model disk uses it.
struct Stored(Arc<dyn Media>);

impl Medium for Stored {
    fn sectors(&self) -> u64 {
        self.0.bytes() / SECTOR as u64
    }

    fn read(&mut self, at: u64, to: &mut [u8]) -> bool {
        let (len, mut done) = (to.len(), 0);
        let mut sink = |bytes: &[u8]| {
            if let Some(to) = to.get_mut(done..done + bytes.len()) {
                to.copy_from_slice(bytes);
            }
            done += bytes.len();
            Ok(())
        };
        self.0.read(at, len, &mut sink).is_ok()
    }

    fn write(&mut self, at: u64, from: &[u8]) -> bool {
        let mut done = 0;
        let mut source = |bytes: &mut [u8]| {
            if let Some(from) = from.get(done..done + bytes.len()) {
                bytes.copy_from_slice(from);
            }
            done += bytes.len();
            Ok(())
        };
        self.0.write(at, from.len(), &mut source).is_ok()
    }

    fn flush(&mut self) -> bool {
        self.0.flush().is_ok()
    }
}

/// A request that was taken from a queue.
#[derive(Clone, Debug)]
struct Taken {
    queue: u16,
    head: u16,
    chain: Vec<Piece>,
    header: Option<Header>,
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue, head, .. } = self;
        write!(f, "the request at descriptor {head} of queue {queue}")?;
        if let Some(header) = &self.header {
            write!(f, ": {header}")?;
        }
        for piece in &self.chain {
            let verb = if piece.is_writable() { "writes" } else { "reads" };
            let bytes = counted(piece.len, "byte");
            write!(f, "; {verb} {bytes} at {:#x}", piece.iova.raw())?;
        }
        Ok(())
    }
}

/// A queue at work.
#[derive(Debug, Default)]
struct Active {
    queue: Option<Queue>,
    notified: bool,
}

struct State {
    registers: Registers,
    active: Vec<Active>,
    /// Requests that are executed later.
    waiting: Vec<(Instant, Taken)>,
    medium: Stored,
    behaviour: VirtioBehaviour,
    /// The interrupt status of a pin.
    status: u8,
    looks: u32,
}

/// A disk.
pub(super) struct Engine {
    port: Port,
    bus: WatchedBus,
    state: Mutex<State>,
    stop: AtomicBool,
    requests: AtomicU64,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("requests", &self.requests()).finish_non_exhaustive()
    }
}

impl Engine {
    pub(super) fn new(port: Port, media: Arc<dyn Media>, behaviour: VirtioBehaviour) -> Self {
        let always = SEG_MAX | BLK_SIZE | MQ | INDIRECT | VERSION_1 | ACCESS_PLATFORM;
        let offered = always | if behaviour.has_cache { FLUSH } else { 0 };
        let (queues, most) = (behaviour.queues, behaviour.queue_size);
        let state = State {
            registers: Registers::new(offered, queues, most, queues.saturating_add(1)),
            active: (0..queues).map(|_| Active::default()).collect(),
            waiting: Vec::new(),
            medium: Stored(media),
            behaviour,
            status: 0,
            looks: 0,
        };
        let bus = WatchedBus(port.watch.clone());
        let engine = Self {
            port,
            bus,
            state: Mutex::new(state),
            stop: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        };
        engine.clear_notifications();
        engine
    }

    // After a panic of its thread the device answers as before it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn is_started(&self) -> bool {
        self.state().registers.is_started()
    }

    // The registers.

    pub(super) fn common(&self) -> [u8; COMMON_BYTES] {
        self.state().registers.bytes()
    }

    /// Returns `struct virtio_blk_config` (virtio 1.2 section 5.2.4).
    pub(super) fn device_config(&self) -> [u8; DEVICE_BYTES] {
        let state = self.state();
        let mut bytes = [0; DEVICE_BYTES];
        let mut put = |at: usize, value: &[u8]| {
            if let Some(to) = bytes.get_mut(at..at + value.len()) {
                to.copy_from_slice(value);
            }
        };
        put(0, &state.medium.sectors().to_le_bytes());
        // All of a queue but header and status.
        put(12, &u32::from(state.behaviour.queue_size - 2).to_le_bytes());
        put(20, &512u32.to_le_bytes());
        put(34, &state.behaviour.queues.to_le_bytes());
        bytes
    }

    pub(super) fn take_interrupt_status(&self) -> u8 {
        std::mem::take(&mut self.state().status)
    }

    pub(super) fn write(&self, at: usize, from: &[u8]) {
        let mut state = self.state();
        let watch = &self.port.watch;
        match state.registers.write(at, from) {
            None => {}
            Some(Effect::Reset) => {
                drop(state);
                self.reset();
            }
            Some(Effect::Refused(bits)) => {
                let text = format!(
                    "FEATURES_OK is refused: these features are accepted and not offered, or missing: \
                     {bits:#x}"
                );
                watch.add(&findings::FEATURES, text, Vec::new);
            }
            // It may lose what was written, and says so by no status: there is no shutdown.
            Some(Effect::Started) => watch.enabled(false),
            Some(Effect::Enabled(id)) => self.enable(&mut state, id),
            Some(Effect::EnabledOutOfOrder(id)) => {
                let text = format!("queue {id} is enabled before FEATURES_OK, or after DRIVER_OK");
                watch.add(&findings::QUEUE_ORDER, text, Vec::new);
            }
            Some(Effect::Size(id, size)) => {
                let most = state.behaviour.queue_size;
                let text = format!(
                    "queue {id} gets {size} entries: a power of two of at most {most} is allowed"
                );
                watch.add(&findings::QUEUE_LIMIT, text, Vec::new);
            }
        }
    }

    fn enable(&self, state: &mut State, id: u16) {
        let Some(set) = state.registers.queues.get(usize::from(id)).copied() else { return };
        let queue = Queue::new(set.size, set.rings.map(Iova::new));
        let areas = queue.as_ref().map_or([(Iova::new(0), 0); 3], Queue::areas);
        for ((name, align), (at, len)) in RINGS.into_iter().zip(areas) {
            self.port.watch.queue_added((name, id), Span::new(at.raw(), len), None);
            if !at.raw().is_multiple_of(align) {
                let text =
                    format!("{name} {id} is at {:#x}, which is no multiple of {align}", at.raw());
                self.port.watch.add(&findings::VIRTQUEUE, text, Vec::new);
            }
        }
        if let Some(active) = state.active.get_mut(usize::from(id)) {
            active.queue = queue;
        }
    }

    /// Resets the device. It waits for the request that is being served.
    pub(super) fn reset(&self) {
        let mut state = self.state();
        let untaken = self.untaken(&mut state);
        state.registers.reset();
        state.active.fill_with(Active::default);
        state.waiting.clear();
        state.status = 0;
        self.clear_notifications();
        self.port.watch.disabled(untaken);
    }

    /// Returns how many requests the driver has notified of, and the device has not taken: none
    /// where the rings are not reachable any more.
    fn untaken(&self, state: &mut State) -> u32 {
        self.look(state);
        let Some(space) = self.port.watch.space() else { return 0 };
        let notified = state.active.iter().filter(|active| active.notified);
        let queues = notified.filter_map(|active| active.queue.as_ref());
        queues.filter_map(|queue| queue.waiting(&Quiet(&space)).ok()).map(u32::from).sum()
    }

    fn clear_notifications(&self) {
        for at in (0..NOTIFY_BYTES).step_by(4) {
            self.port.memory.store(at, UNWRITTEN);
        }
    }

    // The work.

    /// Serves requests until the device is dropped.
    pub(super) fn run(&self) {
        let mut last_work = Instant::now();
        while !self.stop.load(Ordering::SeqCst) {
            let (worked, due) = self.step();
            if worked {
                last_work = Instant::now();
                continue;
            }
            let idle = last_work.elapsed();
            let look = if idle < BUSY_TIME { LOOK } else { (idle / 1000).min(LONG_LOOK) };
            std::thread::park_timeout(due.map_or(look, |due| due.min(look)));
        }
    }

    /// Looks for notifications and serves a batch of requests; returns whether there were any, and
    /// how long until one that waits is due.
    fn step(&self) -> (bool, Option<Duration>) {
        let mut state = self.state();
        let mut worked = self.look(&mut state);
        if !state.registers.is_started() || state.registers.status & NEEDS_RESET != 0 {
            return (worked, None);
        }
        let now = Instant::now();
        while let Some(at) = state.waiting.iter().position(|(due, _)| *due <= now) {
            let (_, taken) = state.waiting.swap_remove(at);
            self.execute(&mut state, &taken);
            worked = true;
        }
        for id in 0..state.behaviour.queues {
            for _ in 0..BATCH {
                match self.take(&mut state, id) {
                    Ok(true) => worked = true,
                    Ok(false) => break,
                    Err(error) => {
                        self.fail(&mut state, id, error);
                        return (true, None);
                    }
                }
            }
        }
        let next = state.waiting.iter().map(|(due, _)| *due).min();
        (worked, next.map(|due| due.saturating_duration_since(Instant::now())))
    }

    /// Reads the notifications; returns whether there was one.
    fn look(&self, state: &mut State) -> bool {
        state.looks = state.looks.wrapping_add(1);
        let queues = u32::from(state.behaviour.queues);
        let end = match state.looks.is_multiple_of(WIDE_LOOKS) {
            true => NOTIFY_BYTES,
            false => queues * 4,
        };
        let mut any = false;
        for at in (0..end).step_by(4) {
            if self.port.memory.load(at) == UNWRITTEN {
                continue;
            }
            self.port.memory.swap(at, UNWRITTEN);
            any = true;
            let active = state.active.get_mut(usize::try_from(at / 4).unwrap_or(usize::MAX));
            match active {
                Some(active) if active.queue.is_some() && state.registers.is_started() => {
                    active.notified = true;
                }
                // Its queue is gone with the device's failure.
                _ if state.registers.status & NEEDS_RESET != 0 => {}
                _ => {
                    let text = format!(
                        "the notification at {at:#x} was written, and there is no such queue, or the \
                         driver has not set DRIVER_OK"
                    );
                    self.port.watch.add(&findings::DOORBELL_QUEUE, text, Vec::new);
                }
            }
        }
        any
    }

    /// Takes the next request of a queue, and executes it now or later; returns whether there was
    /// one.
    fn take(&self, state: &mut State, id: u16) -> Result<bool, QueueError> {
        let has_indirect = state.registers.accepted & INDIRECT != 0;
        let Some(Active { queue: Some(queue), notified: notified @ true }) =
            state.active.get_mut(usize::from(id))
        else {
            return Ok(false);
        };
        let Some(head) = queue.next(&self.bus)? else {
            *notified = false;
            return Ok(false);
        };
        let chain = queue.chain(&self.bus, head, has_indirect)?;
        // Of one that is not reachable the execution tells.
        let header = match self.port.watch.space() {
            Some(space) => header_of(&space, &chain),
            None => None,
        };
        let memory = chain.iter().filter_map(|piece| {
            let span = Span::new(piece.iova.raw(), piece.len.into())?;
            Some((span, piece.is_writable()))
        });
        let memory = memory.collect();
        let taken = Taken { queue: id, head, chain, header };
        let mut new = InFlight::new(Arc::new(taken.clone()), memory);
        let entry = |piece: &Piece| (piece.at.raw(), piece.descriptor().to_vec());
        new.entries = taken.chain.iter().map(entry).collect();
        self.port.watch.fetched((id, head), new);
        if state.behaviour.spurious.next() {
            self.interrupt(state, id);
        }
        if state.behaviour.late.next() {
            self.port.watch.expect_unchanged((id, head));
            state.waiting.push((Instant::now() + state.behaviour.late_by, taken));
        } else {
            self.execute(state, &taken);
        }
        Ok(true)
    }

    fn execute(&self, state: &mut State, taken: &Taken) {
        let (watch, id) = (&self.port.watch, (taken.queue, taken.head));
        watch.executing(id);
        let (outcome, written) = serve(&self.bus, &mut state.medium, &taken.chain, 0);
        watch.executed();
        let kind = match outcome {
            Outcome::OutOfRange => Some((&findings::LBA_RANGE, "it exceeds the disk")),
            Outcome::Unsupported => Some((&findings::OPCODE, "its type is not offered")),
            Outcome::Malformed(text) => Some((&findings::FIELD, text)),
            // The access, or the medium.
            _ => None,
        };
        if let Some((kind, text)) = kind {
            let text = format!("the disk refused a request: {text}");
            watch.add(kind, text, || vec![taken.to_string()]);
        }
        watch.completing(id);
        self.requests.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = self.complete(state, taken, written) {
            self.fail(state, taken.queue, error.into());
        }
    }

    fn complete(&self, state: &mut State, taken: &Taken, written: u32) -> Result<(), Unreachable> {
        let active = state.active.get_mut(usize::from(taken.queue));
        let Some(queue) = active.and_then(|active| active.queue.as_mut()) else { return Ok(()) };
        queue.used(&self.bus, taken.head, written)?;
        if !queue.is_quiet(&self.bus)? {
            self.interrupt(state, taken.queue);
        }
        Ok(())
    }

    fn interrupt(&self, state: &mut State, queue: u16) {
        let vector =
            state.registers.queues.get(usize::from(queue)).map_or(NO_VECTOR, |set| set.vector);
        if !self.port.irqs.is_enabled(irq::MSIX) {
            // The pin, if it is used.
            state.status |= 1;
            self.port.irqs.raise(0);
        } else if vector != NO_VECTOR {
            self.port.irqs.raise(vector);
        }
    }

    /// The device cannot go on (virtio 1.2 section 2.1.2).
    fn fail(&self, state: &mut State, id: u16, error: QueueError) {
        if let QueueError::Invalid(text) = error {
            self.port.watch.add(&findings::VIRTQUEUE, format!("queue {id}: {text}"), Vec::new);
        }
        state.registers.status |= NEEDS_RESET;
        state.waiting.clear();
        self.port.watch.failed();
    }
}

/// Reads of check itself, which are no accesses of the device.
struct Quiet<'a>(&'a Space);

impl queue::Bus for Quiet<'_> {
    fn read(&self, at: Iova, to: &mut [u8]) -> Result<(), Unreachable> {
        self.0.read(at.raw(), to).map_err(|_| Unreachable)
    }
    fn read_u32_acquire(&self, at: Iova) -> Result<u32, Unreachable> {
        let mut bytes = [0; 4];
        self.read(at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
    fn write(&self, _at: Iova, _from: &[u8]) -> Result<(), Unreachable> {
        Err(Unreachable)
    }
    fn write_u32_release(&self, _at: Iova, _value: u32) -> Result<(), Unreachable> {
        Err(Unreachable)
    }
}

/// Reads the header of a request for reports, as far as it is reachable, without a finding.
fn header_of(space: &Space, chain: &[Piece]) -> Option<Header> {
    Header::read(&Quiet(space), chain).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::Findings;
    use crate::hostile::{Behaviour, Given};
    use crate::irq::Irqs;
    use crate::process::{Memory, Site};
    use crate::space::Entry;
    use crate::sys::window::SharedMemory;
    use crate::watch::Watch;
    use pinfold_nvme_model::MemoryMedia;
    use std::time::Duration;

    /// Returns what is found at the reset of a disk that has not looked yet at what the driver has
    /// submitted: three requests, with a notification or without.
    fn found_at_reset(notified: bool) -> Vec<String> {
        let findings = Arc::new(Findings::default());
        let memory = Arc::new(SharedMemory::new("test", 0x4000, NOTIFY_BYTES).unwrap());
        let irqs = Arc::new(Irqs::new(memory.clone(), 0x2000, findings.clone()));
        let watch = Arc::new(Watch::new("test".to_owned(), findings.clone(), None));
        // The available ring: flags and index, at 0x100.
        let rings = Box::new([0u32, 3 << 16, 0, 0]);
        let space = Arc::new(Space::default());
        space.insert(Entry {
            span: Span::new(0xfc, 16).unwrap(),
            vaddr: std::ptr::from_ref(&*rings) as u64,
            read: true,
            write: true,
            memory: Arc::new(Memory::of(std::process::id()).unwrap()),
            serial: 0,
            site: Site::default(),
        });
        watch.attach(Some(space));
        let given = Given { block_bytes: 512, bytes: 1 << 20, not_ready: Duration::ZERO };
        let behaviour = Behaviour::new(None, 0, &[], &given).virtio();
        let port = Port { memory: memory.clone(), irqs, watch };
        let disk = Engine::new(port, Arc::new(MemoryMedia::new(1 << 20).unwrap()), behaviour);
        for (at, bytes) in [
            (0x14, &[3][..]),
            (0x08, &[1, 0, 0, 0]),
            (0x0c, &[3, 0, 0, 0]),
            (0x14, &[11]),
            (0x18, &[16, 0]),
            (0x28, &[0, 1, 0, 0]),
            (0x1c, &[1, 0]),
            (0x14, &[15]),
        ] {
            disk.write(at, bytes);
        }
        assert!(disk.is_started());
        if notified {
            memory.store(0, 0);
        }
        disk.reset();
        assert_eq!(rings[1], 3 << 16);
        findings.take().0.into_iter().map(|finding| finding.text).collect()
    }

    #[test]
    fn requests_that_were_not_taken_are_counted_at_a_reset() {
        let text = "test: the device was disabled with 3 commands in flight";
        assert_eq!(found_at_reset(true), [text]);
        // One that the driver has not notified of is not submitted.
        assert_eq!(found_at_reset(false), [""; 0]);
    }
}
