//! The accesses of a watched controller.

use super::*;
use crate::process::{Memory, Site};
use rustix::fs::OFlags;

const AT: u64 = 0x1000;

/// Has a controller write a dword where only some bytes are mapped, each a place and a length;
/// returns the bytes, and whether it was written.
fn written(scatter: Option<Random>, mapped: &[(u64, u64)]) -> ([u8; 4], bool) {
    let watch = Watch::new("test".to_owned(), Arc::default(), scatter);
    let space = Arc::new(Space::default());
    let memory = Arc::new(Memory::of(std::process::id()).unwrap());
    let target = Box::new([0u8; 4]);
    let vaddr = std::ptr::from_ref(&*target) as u64;
    for (at, len) in mapped {
        let span = Span::new(AT + at, *len).unwrap();
        let (memory, site) = (memory.clone(), Site::default());
        space.insert(Entry {
            span,
            vaddr: vaddr + at,
            read: true,
            write: true,
            memory,
            serial: 0,
            site,
        });
    }
    watch.attach(Some(space));
    watch.set_bus_master(true);
    let done =
        Bus::write_u32_release(&WatchedBus(Arc::new(watch)), Iova::new(AT), 0x4433_2211).is_ok();
    // As another process sees it: the compiler knows of no write.
    let mut bytes = [0; 4];
    memory.read(vaddr, &mut bytes).unwrap();
    drop(target);
    (bytes, done)
}

#[test]
fn the_byte_with_the_phase_is_written_last_and_alone() {
    for scatter in [None, Some(Random::new(3))] {
        let written = |mapped: &[(u64, u64)]| written(scatter.clone(), mapped);
        assert_eq!(written(&[(0, 4)]), ([0x11, 0x22, 0x33, 0x44], true));
        // All others are there before it.
        assert_eq!(written(&[(0, 2), (3, 1)]), ([0x11, 0x22, 0, 0x44], false));
        // It is not there if another one fails.
        assert_eq!(written(&[(2, 1)]), ([0; 4], false));
        assert_eq!(written(&[(0, 3)]), ([0x11, 0x22, 0, 0], false));
        assert_eq!(written(&[(2, 2)]), ([0; 4], false));
    }
}

#[test]
fn data_is_written_in_pieces_in_any_order() {
    const LEN: usize = 16 << 10;
    let data: Vec<u8> = (0..LEN).map(|at| u8::try_from(at % 251 + 1).unwrap()).collect();
    // What was written until the byte at `hole` was to be, which is not mapped.
    let written = |scatter: Option<Random>, hole: Option<usize>| {
        let watch = Watch::new("test".to_owned(), Arc::default(), scatter);
        let (space, target) = (Arc::new(Space::default()), vec![0u8; LEN]);
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let own = target.as_ptr() as u64;
        let spans = [(0, hole.unwrap_or(LEN)), (hole.map_or(LEN, |hole| hole + 1), LEN)];
        for (from, to) in spans.map(|(from, to)| (from as u64, to as u64)) {
            let Some(span) = Span::new(AT + from, to - from) else { continue };
            let (vaddr, memory, site) = (own + from, memory.clone(), Site::default());
            let (read, write, serial) = (true, true, 0);
            space.insert(Entry { span, vaddr, read, write, memory, serial, site });
        }
        watch.attach(Some(space));
        watch.set_bus_master(true);
        let done = Bus::write(&WatchedBus(Arc::new(watch)), Iova::new(AT), &data).is_ok();
        assert_eq!(done, hole.is_none());
        let mut bytes = vec![0; LEN];
        memory.read(own, &mut bytes).unwrap();
        drop(target);
        bytes
    };
    // All of it comes, and in order what is before the hole does.
    assert_eq!(written(None, None), data);
    assert!(written(None, Some(LEN / 2))[LEN / 2..].iter().all(|byte| *byte == 0));
    let mut orders = std::collections::HashSet::new();
    for seed in 0..8 {
        let random = || Some(Random::new(seed));
        assert_eq!(written(random(), None), data);
        let part = written(random(), Some(LEN / 2));
        assert!(part.iter().zip(&data).all(|(byte, whole)| *byte == 0 || byte == whole));
        orders.insert(part.iter().map(|byte| *byte != 0).collect::<Vec<_>>());
    }
    let after = |order: &&Vec<bool>| order[LEN / 2..].contains(&true);
    let before_is_missing = |order: &&Vec<bool>| order[..LEN / 2].contains(&false);
    assert!(orders.len() > 4, "{} orders", orders.len());
    assert!(orders.iter().filter(after).any(|order| before_is_missing(&order)));
}

/// A device that is at work for a process of its own, which may end.
struct Rig {
    watch: Arc<Watch>,
    bus: WatchedBus,
    findings: Arc<Findings>,
    child: std::process::Child,
    bytes: Box<[u8; 16]>,
}

/// Where memory of the process is mapped, and where memory of this one is.
const THEIRS: Iova = Iova::new(0x10000);
const OURS: Iova = Iova::new(0x20000);

impl Rig {
    fn new() -> Self {
        let findings = Arc::new(Findings::default());
        let watch = Arc::new(Watch::new("test".to_owned(), findings.clone(), None));
        let space = Arc::new(Space::default());
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let bytes = Box::new([0; 16]);
        let own = std::ptr::from_ref(&*bytes) as u64;
        for (at, vaddr, pid) in [(THEIRS, 0, child.id()), (OURS, own, std::process::id())] {
            let memory = Arc::new(Memory::of(pid).unwrap());
            let (span, site) = (Span::new(at.raw(), 16).unwrap(), Site::default());
            space.insert(Entry { span, vaddr, read: true, write: true, memory, serial: 0, site });
        }
        watch.attach(Some(space));
        watch.set_bus_master(true);
        watch.enabled(true);
        let bus = WatchedBus(watch.clone());
        Self { watch, bus, findings, child, bytes }
    }

    /// Ends the process.
    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn fetched(&self, number: u16) {
        self.watch.fetched((1, number), InFlight::new(Arc::new("a request"), Vec::new()));
    }

    /// Executes a request whose data is at `data`, and completes it at `completion`.
    fn executes(&self, number: u16, data: Iova, completion: Iova) {
        self.watch.executing((1, number));
        assert_eq!(self.bus.write_at(data, &[1; 4]).is_ok(), data == OURS);
        self.watch.executed();
        self.watch.completing((1, number));
        assert_eq!(self.bus.write_at(completion, &[1; 4]).is_ok(), completion == OURS);
    }

    /// Returns the texts of the findings.
    fn found(self) -> Vec<String> {
        assert_eq!(self.bytes.len(), 16);
        self.findings.take().0.into_iter().map(|finding| finding.text).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // It has the output of the tests open.
        self.end();
    }
}

#[test]
fn a_completion_that_nobody_receives_is_in_flight() {
    let mut rig = Rig::new();
    rig.end();
    [1, 2, 3].into_iter().for_each(|number| rig.fetched(number));
    rig.executes(1, OURS, OURS);
    rig.executes(2, OURS, THEIRS);
    rig.watch.failed();
    // The device has stopped, which concerns another process that goes on.
    assert!(rig.watch.has_failed());
    rig.watch.before_reset(true);
    rig.watch.disabled(4);
    rig.watch.after_reset(true);
    assert_eq!(
        rig.found(),
        [
            "test: the device was closed with 6 commands in flight",
            "test: the device was closed without a shutdown"
        ]
    );
}

#[test]
fn a_queue_of_a_process_that_has_ended_stops_the_device() {
    let mut rig = Rig::new();
    rig.end();
    rig.fetched(1);
    rig.executes(1, OURS, OURS);
    let mut entry = [0; 4];
    assert!(Bus::read(&rig.bus, THEIRS, &mut entry).is_err());
    rig.watch.failed();
    rig.watch.before_reset(true);
    // The device was too busy to say so in time, and does later.
    rig.watch.after_reset(true);
    rig.watch.disabled(3);
    assert_eq!(rig.found(), ["test: the device was closed without a shutdown"]);
}

/// The program has closed the device and frees memory that is still mapped; check has yet to see
/// the close.
#[test]
fn a_closed_device_finds_no_memory_gone() {
    for closed in [false, true] {
        let rig = Rig::new();
        let memory = Arc::new(SharedMemory::new("test", 4096, 4096).unwrap());
        let open = memory.open_for_program(OFlags::RDWR).unwrap();
        rig.watch.set_device(memory);
        if closed {
            drop(open);
        }
        rig.fetched(1);
        rig.executes(1, THEIRS, OURS);
        assert_eq!(rig.found().len(), usize::from(!closed));
    }
}

#[test]
fn data_of_a_process_that_has_ended_concerns_one_request() {
    let mut rig = Rig::new();
    rig.end();
    rig.fetched(1);
    rig.executes(1, THEIRS, OURS);
    // The device goes on, and the identifier is free.
    assert!(!rig.watch.has_failed());
    rig.fetched(1);
    rig.watch.shut_down();
    rig.watch.before_reset(false);
    rig.watch.after_reset(false);
    assert_eq!(rig.found(), ["test: the device was reset with 1 command in flight"]);
}

#[test]
fn a_reset_of_a_device_that_has_failed_ends_nothing() {
    let mut rig = Rig::new();
    rig.fetched(1);
    rig.watch.failed();
    rig.watch.before_reset(true);
    rig.watch.disabled(4);
    rig.watch.after_reset(true);
    rig.end();
    assert_eq!(rig.found(), [""; 0]);
}

#[test]
fn the_identifier_of_an_empty_entry_has_a_likely_cause() {
    for is_first in [true, false] {
        let mut rig = Rig::new();
        for is_empty in [is_first, !is_first] {
            let mut request = InFlight::new(Arc::new("a request"), Vec::new());
            request.likely = is_empty.then_some(findings::QUEUE_SIZE);
            rig.watch.fetched((1, 0), request);
        }
        rig.end();
        let (found, _) = rig.findings.take();
        assert_eq!((found.len(), found[0].id), (1, "command-id-twice"));
        assert_eq!(found[0].details.last().unwrap(), findings::QUEUE_SIZE);
    }
}

#[test]
fn data_that_can_no_longer_be_read_has_not_changed() {
    for (changes, found) in [(false, 0), (true, 1)] {
        let mut rig = Rig::new();
        let mut request = InFlight::new(Arc::new("a request"), Vec::new());
        request.lists = vec![Span::new(OURS.raw(), 16).unwrap()];
        rig.watch.fetched((1, 1), request);
        rig.watch.expect_unchanged((1, 1));
        if changes {
            rig.bytes[3] = 7;
        } else {
            rig.watch.attach(None);
        }
        rig.watch.executing((1, 1));
        rig.end();
        assert_eq!(rig.found().len(), found);
    }
}
