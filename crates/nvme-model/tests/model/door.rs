//! A controller behind a door: registers in shared memory, another sink of interrupts, events.

use pinfold_core::addr::Iova;
use pinfold_nvme_model::{
    Bus, BusFault, Door, InterruptSink, MemoryMedia, ModelConfig, ModelController, ModelEvent,
    Namespace, RegisterWindow,
};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const AQA: u32 = 0x24;
const ASQ: u32 = 0x28;
const ACQ: u32 = 0x30;
const DOORBELL: u32 = 0x1000;

struct Window(Vec<AtomicU32>);

impl RegisterWindow for Window {
    fn load(&self, at: u32) -> u32 {
        self.0.get(at as usize / 4).map_or(0, |word| word.load(Ordering::SeqCst))
    }
    fn store(&self, at: u32, value: u32) {
        self.swap(at, value);
    }
    fn swap(&self, at: u32, value: u32) -> u32 {
        self.0.get(at as usize / 4).map_or(0, |word| word.swap(value, Ordering::SeqCst))
    }
    fn len(&self) -> u32 {
        u32::try_from(self.0.len() * 4).unwrap()
    }
}

#[derive(Clone)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Bus for Memory {
    fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), BusFault> {
        let at = usize::try_from(iova.raw()).unwrap();
        to.copy_from_slice(&self.0.lock().unwrap()[at..at + to.len()]);
        Ok(())
    }
    fn write(&self, iova: Iova, from: &[u8]) -> Result<(), BusFault> {
        let at = usize::try_from(iova.raw()).unwrap();
        self.0.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
    fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), BusFault> {
        self.write(iova, &value.to_le_bytes())
    }
}

struct Raised(AtomicU32);

impl InterruptSink for Raised {
    fn raise(&self, vector: u16) {
        assert_eq!(vector, 0);
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Rig {
    window: Arc<Window>,
    memory: Memory,
    raised: Arc<Raised>,
    events: Arc<Mutex<Vec<String>>>,
    model: ModelController,
}

fn rig(change: impl FnOnce(&mut ModelConfig)) -> Rig {
    rig_with(change, None)
}

/// A rig with another observer than one that logs the events.
fn rig_with(
    change: impl FnOnce(&mut ModelConfig),
    observer: Option<Arc<dyn pinfold_nvme_model::Observer>>,
) -> Rig {
    let window = Arc::new(Window((0..0x1800 / 4).map(|_| AtomicU32::new(7)).collect()));
    let memory = Memory(Arc::new(Mutex::new(vec![0; 1 << 16])));
    let raised = Arc::new(Raised(AtomicU32::new(0)));
    let events = Arc::new(Mutex::new(Vec::new()));
    let log = events.clone();
    let observe = move |event: &ModelEvent<'_>| {
        let text = format!("{event:?}");
        let name = text.split([' ', '{']).next().unwrap_or_default().to_owned();
        log.lock().unwrap().push(name);
    };
    let media = Arc::new(MemoryMedia::new(1 << 20).unwrap());
    let mut config = ModelConfig::new(vec![Namespace::new(media, 512).unwrap()]);
    config.vectors = 1;
    change(&mut config);
    let door = Door {
        window: Some(window.clone()),
        interrupts: Some(raised.clone()),
        observer: observer.or_else(|| Some(Arc::new(observe))),
    };
    let model = ModelController::spawn_behind(memory.clone(), config, door).unwrap();
    Rig { window, memory, raised, events, model }
}

impl Rig {
    fn wait(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn enable(&self) {
        self.window.store(AQA, 3 << 16 | 3);
        self.window.store(ASQ, 0x1000);
        self.window.store(ACQ, 0x2000);
        self.window.store(CC, 1 | 6 << 16 | 4 << 20);
        self.wait("ready", |rig| rig.window.load(CSTS) == 1);
    }

    /// Submits Identify Controller from slot 0.
    fn identify(&self) {
        let mut command = [0; 64];
        (command[0], command[2], command[40]) = (6, 9, 1);
        command[24..32].copy_from_slice(&0x3000u64.to_le_bytes());
        self.memory.write(Iova::new(0x1000), &command).unwrap();
        self.window.store(DOORBELL, 1);
    }

    fn has(&self, event: &str) -> bool {
        self.events.lock().unwrap().iter().any(|seen| seen == event)
    }
}

#[test]
fn shared_registers_are_scanned() {
    let rig = rig(|_| {});
    assert_eq!(rig.window.load(8), 2 << 16, "VS");
    assert_eq!(rig.window.load(0) & 0xffff, 1023, "CAP.MQES");
    rig.enable();
    rig.identify();
    rig.wait("an interrupt", |rig| rig.raised.0.load(Ordering::SeqCst) == 1);
    let memory = rig.memory.0.lock().unwrap().clone();
    assert_eq!(&memory[0x3000 + 4..0x3000 + 11], b"PINFOLD");
    assert_eq!(memory[0x200c], 9, "the command identifier");
    assert_eq!(memory[0x200e] & 1, 1, "the phase");
    let expected = ["Enabled", "Fetched", "Executing", "Executed", "Completing"];
    assert_eq!(*rig.events.lock().unwrap(), expected);
    // The same value again is a write, and an invalid one: the queue is no longer at entry 0.
    rig.window.store(DOORBELL, 4);
    rig.wait("a refused doorbell", |rig| rig.has("BadDoorbell"));
}

#[test]
fn a_head_past_the_last_completion_is_refused() {
    let rig = rig(|_| {});
    rig.enable();
    let refused = |head: u32, expected: u64| {
        let before = rig.model.stats().doorbells;
        rig.window.store(DOORBELL + 4, head);
        let seen = |rig: &Rig| {
            let stats = rig.model.stats();
            stats.bad_doorbells == expected || stats.doorbells > before
        };
        rig.wait("the doorbell", seen);
        assert_eq!(rig.model.stats().bad_doorbells, expected, "{head}");
    };
    // None is there, and the same value again passes none.
    refused(1, 1);
    refused(0, 1);
    // Around the end of the queue of four entries.
    for slot in 0..9u16 {
        rig.submit(slot, 6, 1);
        let at = 0x2000 + usize::from(slot % 4) * 16;
        let phase = u8::from(slot % 8 < 4);
        rig.wait("a completion", |rig| rig.memory.0.lock().unwrap()[at + 14] & 1 == phase);
        refused(u32::from(slot + 2) % 4, 2 * u64::from(slot) + 2);
        refused(u32::from(slot + 3) % 4, 2 * u64::from(slot) + 3);
        refused(u32::from(slot + 1) % 4, 2 * u64::from(slot) + 3);
    }
}

#[test]
fn doorbells_of_no_queue_are_seen() {
    let rig = rig(|config| config.queues = 1);
    rig.enable();
    // Beyond the doorbells of the queues that there can be.
    rig.window.store(DOORBELL + 0x700, 1);
    rig.wait("a refused doorbell", |rig| rig.has("BadDoorbell"));
}

#[test]
fn changed_admin_queues_are_seen() {
    let rig = rig(|_| {});
    rig.enable();
    rig.window.store(ASQ, 0x5000);
    rig.wait("the change", |rig| rig.has("AdminQueuesChanged"));
}

#[test]
fn a_driver_cannot_write_read_only_registers() {
    let rig = rig(|_| {});
    rig.enable();
    let cap = rig.window.load(0);
    rig.window.store(CSTS, 0x77);
    rig.window.store(0, 0x77);
    rig.wait("CSTS", |rig| rig.window.load(CSTS) == 1);
    rig.wait("CAP", |rig| rig.window.load(0) == cap);
}

#[test]
fn readiness_can_take_time() {
    let start = Instant::now();
    let rig = rig(|config| config.ready_delay = Duration::from_millis(80));
    rig.enable();
    assert!(start.elapsed() >= Duration::from_millis(80));
}

#[test]
fn a_function_reset_ends_everything() {
    let rig = rig(|_| {});
    rig.enable();
    rig.identify();
    rig.wait("an interrupt", |rig| rig.raised.0.load(Ordering::SeqCst) == 1);
    rig.model.reset();
    for at in [CC, CSTS, AQA, ASQ, ACQ] {
        assert_eq!(rig.window.load(at), 0, "{at:#x}");
    }
    assert!(rig.has("Disabled"));
    // From the first entry again.
    rig.enable();
    rig.identify();
    rig.wait("an interrupt", |rig| rig.raised.0.load(Ordering::SeqCst) == 2);
}

#[test]
fn a_doorbell_that_no_scan_saw_ends_with_the_reset() {
    let rig = rig(|_| {});
    rig.window.store(CC, 0);
    rig.window.store(DOORBELL, 1);
    rig.model.reset();
    rig.enable();
    std::thread::sleep(Duration::from_millis(5));
    assert!(!rig.has("Fetched"));
}

/// Returns how many commands were not fetched when the driver ended the use of a controller, which
/// was at work: six of seven.
fn unfetched_where(driver_ends: impl FnOnce(&Rig)) -> u32 {
    let (send, events) = std::sync::mpsc::channel();
    let (go_on, held) = std::sync::mpsc::channel();
    let held = Mutex::new(held);
    // The engine is held at each command, while the driver goes on.
    let observe = move |event: &ModelEvent<'_>| match event {
        ModelEvent::Executing { .. } => {
            send.send(None).unwrap();
            held.lock().unwrap().recv().unwrap();
        }
        ModelEvent::Disabled { unfetched } => drop(send.send(Some(*unfetched))),
        _ => {}
    };
    let rig = rig_with(|_| {}, Some(Arc::new(observe)));
    rig.enable();
    let next = || events.recv_timeout(Duration::from_secs(60)).unwrap();
    // An I/O pair of eight entries, at 0x5000 and 0x4000.
    for (slot, opcode, at, flags) in [(0, 5, 0x5000u64, 1u32), (1, 1, 0x4000, 1 << 16 | 1)] {
        let mut command = [0; 64];
        (command[0], command[2]) = (opcode, 1);
        command[24..32].copy_from_slice(&at.to_le_bytes());
        command[40..44].copy_from_slice(&(7u32 << 16 | 1).to_le_bytes());
        command[44..48].copy_from_slice(&flags.to_le_bytes());
        rig.memory.write(Iova::new(0x1000 + slot * 64), &command).unwrap();
        rig.window.store(DOORBELL, u32::try_from(slot + 1).unwrap());
        assert_eq!(next(), None);
        go_on.send(()).unwrap();
        rig.completion(u16::try_from(slot).unwrap());
    }
    // Seven of eight entries, of which the first one is fetched.
    rig.window.store(DOORBELL + 8, 1);
    assert_eq!(next(), None);
    rig.window.store(DOORBELL + 8, 7);
    // An admin command may be a request for events, which nobody waits for.
    rig.window.store(DOORBELL, 3);
    driver_ends(&rig);
    go_on.send(()).unwrap();
    next().unwrap()
}

#[test]
fn commands_that_were_not_fetched_are_counted_at_the_end() {
    assert_eq!(unfetched_where(|rig| rig.window.store(CC, 0)), 6);
    // It returns after a second, in which the controller was busy.
    assert_eq!(unfetched_where(|rig| rig.model.reset()), 6);
}

/// The state of an I/O command's completion, by its identifier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Completion {
    Waits(u16),
    IsWritten(u16),
}

/// A controller with an I/O pair, whose completion queue has two entries: of three commands, two
/// completions wait. Returns it with what has become of them.
fn rig_with_a_full_queue() -> (Rig, Arc<Mutex<Vec<Completion>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let observe = move |event: &ModelEvent<'_>| match *event {
        ModelEvent::Completing { queue: 1, cid, .. } => {
            log.lock().unwrap().push(Completion::IsWritten(cid));
        }
        ModelEvent::CompletionQueueFull { queue: 1, cid, head: 0 } => {
            log.lock().unwrap().push(Completion::Waits(cid));
        }
        _ => {}
    };
    let rig = rig_with(|_| {}, Some(Arc::new(observe)));
    rig.enable();
    rig.create_queues(0, 2);
    for cid in 0..3 {
        // An unknown opcode.
        let mut command = [0; 64];
        (command[0], command[2]) = (0x77, cid);
        rig.memory.write(Iova::new(0x4000 + u64::from(cid) * 64), &command).unwrap();
    }
    rig.window.store(DOORBELL + 8, 3);
    let all = [Completion::IsWritten(0), Completion::Waits(1), Completion::Waits(2)];
    rig.wait("two completions to wait", |_| *seen.lock().unwrap() == all);
    (rig, seen)
}

#[test]
fn a_completion_is_observed_when_it_is_written() {
    let (rig, seen) = rig_with_a_full_queue();
    for (head, cid) in [(1, 1), (0, 2)] {
        rig.window.store(DOORBELL + 12, head);
        rig.wait("a completion", |_| {
            seen.lock().unwrap().last() == Some(&Completion::IsWritten(cid))
        });
    }
    assert_eq!(seen.lock().unwrap().len(), 5);
}

#[test]
fn a_deleted_queue_has_no_waiting_completions() {
    let (rig, seen) = rig_with_a_full_queue();
    rig.submit(2, 0, 1);
    rig.completion(2);
    rig.window.store(DOORBELL + 12, 1);
    // It looks at all queues between two commands.
    for slot in 3..6 {
        rig.submit(slot, 6, 1);
        rig.completion(slot);
    }
    assert_eq!(seen.lock().unwrap().len(), 3);
}

#[test]
fn delayed_commands_complete_when_they_are_due() {
    use pinfold_nvme_model::{Fault, Trigger};
    let rig = rig(|_| {});
    let delay = Duration::from_millis(60);
    rig.model.faults().inject(Trigger::Matches(Box::new(|_| true)), Fault::Delay(delay));
    rig.enable();
    let start = Instant::now();
    rig.identify();
    rig.wait("an interrupt", |rig| rig.raised.0.load(Ordering::SeqCst) == 1);
    assert!(start.elapsed() >= delay);
}

#[test]
fn commands_of_a_burst_complete_together() {
    use pinfold_nvme_model::{Fault, Trigger};
    let rig = rig(|_| {});
    let time = Duration::from_millis(60);
    rig.model.faults().inject(Trigger::Matches(Box::new(|_| true)), Fault::Burst(time));
    rig.enable();
    for slot in 0..3u8 {
        let mut command = [0; 64];
        (command[0], command[2], command[40]) = (6, slot, 1);
        command[24..32].copy_from_slice(&0x3000u64.to_le_bytes());
        rig.memory.write(Iova::new(0x1000 + u64::from(slot) * 64), &command).unwrap();
    }
    let start = Instant::now();
    rig.window.store(DOORBELL, 3);
    rig.wait("an interrupt", |rig| rig.raised.0.load(Ordering::SeqCst) > 0);
    assert!(start.elapsed() >= time);
    let phases = [0x200e, 0x201e, 0x202e].map(|at| rig.memory.0.lock().unwrap()[at] & 1);
    assert_eq!(phases, [1; 3]);
    // The next one begins another burst.
    let start = Instant::now();
    rig.window.store(DOORBELL + 4, 3);
    rig.submit(3, 6, 1);
    rig.completion(3);
    assert!(start.elapsed() >= time);
}

// Actions of a hostile device.

impl Rig {
    /// Creates an I/O pair from the admin slots `first` and the next: eight commands at 0x4000, and
    /// `entries` completions at 0x5000.
    fn create_queues(&self, first: u16, entries: u32) {
        for (slot, opcode, at, entries, flags) in
            [(first, 5, 0x5000u64, entries, 1u32), (first + 1, 1, 0x4000, 8, 1 << 16 | 1)]
        {
            let mut command = [0; 64];
            (command[0], command[2]) = (opcode, u8::try_from(slot).unwrap());
            command[24..32].copy_from_slice(&at.to_le_bytes());
            command[40..44].copy_from_slice(&((entries - 1) << 16 | 1).to_le_bytes());
            command[44..48].copy_from_slice(&flags.to_le_bytes());
            self.memory.write(Iova::new(0x1000 + u64::from(slot % 4) * 64), &command).unwrap();
            self.window.store(DOORBELL, u32::from((slot + 1) % 4));
            self.completion(slot);
        }
    }

    /// Submits an admin command from `slot`, and frees the entries of its completions before.
    fn submit(&self, slot: u16, opcode: u8, cdw10: u32) {
        let mut command = [0; 64];
        (command[0], command[2]) = (opcode, u8::try_from(slot).unwrap());
        command[24..32].copy_from_slice(&0x3000u64.to_le_bytes());
        command[40..44].copy_from_slice(&cdw10.to_le_bytes());
        self.memory.write(Iova::new(0x1000 + u64::from(slot % 4) * 64), &command).unwrap();
        self.window.store(DOORBELL, u32::from((slot + 1) % 4));
    }

    /// Waits for the completion in `slot`; returns its first dword and its identifier, and frees
    /// its entry.
    fn completion(&self, slot: u16) -> (u32, u8) {
        let at = 0x2000 + usize::from(slot % 4) * 16;
        let phase = u8::from(slot % 8 < 4);
        self.wait("a completion", |rig| rig.memory.0.lock().unwrap()[at + 14] & 1 == phase);
        let memory = self.memory.0.lock().unwrap();
        self.window.store(DOORBELL + 4, u32::from((slot + 1) % 4));
        (u32::from_le_bytes(memory[at..at + 4].try_into().unwrap()), memory[at + 12])
    }

    fn inject(&self, fault: pinfold_nvme_model::Fault) {
        let is_identify = |info: &pinfold_nvme_model::CommandInfo| info.opcode == 6;
        let when = pinfold_nvme_model::Trigger::Matches(Box::new(is_identify));
        self.model.faults().inject(when, fault);
    }
}

#[test]
fn a_spurious_interrupt_comes_before_its_command() {
    let rig = rig(|_| {});
    rig.inject(pinfold_nvme_model::Fault::SpuriousInterrupts);
    rig.enable();
    rig.identify();
    rig.wait("both interrupts", |rig| rig.raised.0.load(Ordering::SeqCst) == 2);
    assert_eq!(rig.completion(0).1, 9);
}

#[test]
fn an_event_is_masked_until_its_log_page_is_read() {
    const EVENT: u32 = 0x01_0500;
    let rig = rig(|_| {});
    rig.inject(pinfold_nvme_model::Fault::Event(EVENT));
    rig.enable();
    // Without a request there is none.
    rig.submit(0, 6, 1);
    assert_eq!(rig.completion(0), (0, 0));
    rig.submit(1, 0x0c, 0);
    rig.submit(2, 6, 1);
    let mut both = [rig.completion(1), rig.completion(2)];
    both.sort_unstable();
    assert_eq!(both, [(0, 2), (EVENT, 1)]);
    // Masked; then the log page is read.
    rig.submit(3, 0x0c, 0);
    rig.submit(4, 6, 1);
    assert_eq!(rig.completion(3), (0, 4));
    rig.submit(5, 2, 15 << 16 | 1);
    assert_eq!(rig.completion(4), (0, 5));
    rig.submit(6, 6, 1);
    let mut both = [rig.completion(5), rig.completion(6)];
    both.sort_unstable();
    assert_eq!(both, [(0, 6), (EVENT, 3)]);
}

#[test]
fn a_removed_controller_reads_as_ones() {
    let rig = rig(|_| {});
    rig.inject(pinfold_nvme_model::Fault::Remove);
    rig.enable();
    assert!(!rig.model.is_removed());
    rig.identify();
    rig.wait("the removal", |rig| rig.has("Removed"));
    rig.wait("the registers", |rig| {
        [0, CC, CSTS, DOORBELL].iter().all(|at| rig.window.load(*at) == u32::MAX)
    });
    // It does not wait for a reset that is never executed; a thread without a processor may.
    let is_quick = || {
        let start = Instant::now();
        rig.model.reset();
        assert!(rig.model.is_removed());
        start.elapsed() < Duration::from_millis(900)
    };
    assert!((0..20).any(|_| is_quick()), "each reset waits");
    rig.window.store(CC, 1 | 6 << 16 | 4 << 20);
    rig.window.store(DOORBELL, 2);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(rig.memory.0.lock().unwrap()[0x200e], 0, "no completion");
    assert!(!rig.has("Executed") && !rig.has("Disabled"));
}

#[test]
fn only_pages_of_its_size_enable_it() {
    let rig = rig(|config| config.mpsmin = 1);
    assert_eq!(rig.window.load(4) >> 16 & 0xff, 0x11, "CAP.MPSMAX and CAP.MPSMIN");
    rig.window.store(AQA, 3 << 16 | 3);
    rig.window.store(ASQ, 0x2000);
    rig.window.store(ACQ, 0x4000);
    rig.window.store(CC, 1 | 6 << 16 | 4 << 20);
    rig.wait("CSTS.CFS", |rig| rig.window.load(CSTS) == 2);
    rig.window.store(CC, 0);
    rig.wait("a reset", |rig| rig.window.load(CSTS) == 0);
    // A multiple of 4 KiB, and not of 8.
    rig.window.store(ACQ, 0x5000);
    rig.window.store(CC, 1 | 1 << 7 | 6 << 16 | 4 << 20);
    rig.wait("CSTS.CFS", |rig| rig.window.load(CSTS) == 2);
    rig.window.store(CC, 0);
    rig.wait("a reset", |rig| rig.window.load(CSTS) == 0);
    rig.window.store(ACQ, 0x4000);
    rig.window.store(CC, 1 | 1 << 7 | 6 << 16 | 4 << 20);
    rig.wait("ready", |rig| rig.window.load(CSTS) == 1);
}
